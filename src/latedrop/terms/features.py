"""Features of a row: what enters the sites, pooled to one vector.

Positions (pixels, steps) are pooled to mean and standard deviation of each channel; calls of one layer are averaged;
the sites stand one after the other. More than `_WIDEST` features are projected to that many by a fixed random matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from latedrop.errors import SiteError
from latedrop.masking.thinning import Thinning
from latedrop.model.arrays import widened
from latedrop.model.calling import call
from latedrop.model.layers import channel_axis
from latedrop.model.rows import copied, fitting_batches, row_count
from latedrop.model.running import may_derive, quietly
from latedrop.model.sites import Site, Sites
from latedrop.model.twin import release, twin_of
from latedrop.model.wrappers import layer_named

__all__ = ["Features", "pooled"]

_WIDEST = 256


@dataclass(frozen=True)
class Features:
    """Which features: those that enter the sites of these names."""

    sites: tuple[str, ...]

    @classmethod
    def all(cls, sites: Sites) -> Features | None:
        """Of all sites that run for every batch on the examples in their order; None where none does."""
        names = tuple(s.name for s in sites if s.batch_axis is not None and not s.moved and not s.skipped)
        return cls(names) if names else None

    def of(self, model: nn.Module, x: Any, sites: Sites) -> Tensor:
        """`(N, features)`, in one plain pass."""
        parts = fitting_batches(model, x)
        if parts is not None:
            return torch.cat([self.of(model, part, sites)[:rows] for part, rows in parts])
        chosen = [site for site in sites if site.name in self.sites]
        channels = {site.name: _channels(model, site) for site in chosen}

        def run() -> Tensor:
            noted = _Noted(row_count(x), channels)
            twin = twin_of(model, own_gradients=may_derive(model))
            try:
                with Thinning(twin, chosen, noted, shared=False).passing(x):
                    call(twin, copied(x))
            finally:
                release(twin)
            return _narrow(torch.cat([noted.features(site.name) for site in chosen], 1))

        return quietly(model, run)


def _channels(model: nn.Module, site: Site) -> int:
    layer = layer_named(model, site.name) if site.weight is None else None
    return channel_axis(layer) if layer is not None else -1


def pooled(value: Tensor, channels: int) -> Tensor:
    """`(N, features)` from `(N, ...)`: mean and standard deviation over all axes but the channels'."""
    flat = value.movedim(channels, 1).flatten(2) if value.dim() > 2 else value.reshape(len(value), -1, 1)
    if flat.shape[2] == 1:
        return flat[:, :, 0]
    return torch.cat([flat.mean(2), flat.std(2)], 1)


class _Noted:
    """Leaves what passes by as it is, and notes its features."""

    def __init__(self, rows: int, channels: dict[str, int]) -> None:
        self._rows = rows
        self._channels = channels
        self._found: dict[str, list[Tensor]] = {name: [] for name in channels}

    def thin(self, site: Site, call: int, value: Tensor, shape: tuple[int, ...], axis: int | None) -> Tensor:
        if axis is not None:
            channels = self._channels[site.name] % value.dim()
            moved = widened(value.detach()).movedim(axis, 0)
            self._found[site.name].append(pooled(moved, channels if channels > axis else channels + 1))
        return value

    def thin_packed(
        self, site: Site, call: int, value: Tensor, shape: tuple[int, ...], rows: Tensor, steps: Tensor
    ) -> Tensor:
        noted = widened(value.detach())
        counts = torch.zeros(self._rows, device=value.device).index_add_(0, rows, torch.ones_like(noted[:, 0]))
        total, squares = (
            torch.zeros(self._rows, noted.shape[1], device=value.device, dtype=noted.dtype).index_add_(0, rows, part)
            for part in (noted, noted.square())
        )
        mean = total / counts[:, None]
        spread = (squares / counts[:, None] - mean.square()).clamp_min(0).sqrt()
        self._found[site.name].append(torch.cat([mean, spread], 1))
        return value

    def features(self, name: str) -> Tensor:
        """Of one site, `(N, features)`: the mean over its calls."""
        found = self._found[name]
        if not found or any(part.shape != found[0].shape for part in found):
            raise SiteError(
                f"expected features of the same shape in every call of {name!r}; found "
                f"{[tuple(part.shape) for part in found]}."
            )
        return torch.stack(found).mean(0)


def _narrow(features: Tensor) -> Tensor:
    wide = features.shape[1]
    if wide <= _WIDEST:
        return features
    generator = torch.Generator().manual_seed(wide)
    matrix = torch.randn(wide, _WIDEST, generator=generator) / wide**0.5
    narrow: Tensor = features @ matrix.to(features)
    return narrow

"""Vectors of a row from inside the network: features, which enter the sites, and mask gradients.

Of features positions (pixels, steps) are pooled to mean and standard deviation of each channel; calls of one layer are
averaged; the sites stand one after the other. Where some sites have no positions, only these are looked at: of
positions some may be padding. Features that depend on the other rows of a batch are left out.

Mask gradients are what first order makes of every unit, `phi = h · dy/dh`, one number per unit or channel: positions
and calls of one layer are summed.

Vectors that are too wide are folded: some signs are flipped, and every `width`-th number is added up, which keeps inner
products on average. The signs follow from a hash, so they are the same on every machine and in every version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from latedrop.data.arrays import apart, widened
from latedrop.data.rows import copied, row_count, rows_are_nodes, take_rows
from latedrop.dropout.masks import STEP, mixed
from latedrop.errors import ArgumentError, SiteError
from latedrop.network.network import Network, Pass
from latedrop.network.sites import Site, Sites, channel_axis
from latedrop.records import Limits, record

__all__ = ["Features", "Noted", "folded", "joined_gradients", "pooled"]

WIDEST = 256
_ALONE = 8  # rows that are run alone, to see whether their features change
_ROUNDING = 0.02


@record
@dataclass(frozen=True)
class Features:
    """Which features: those that enter the sites of these names."""

    sites: Annotated[tuple[str, ...], Limits(1)]

    @classmethod
    def all(cls, sites: Sites) -> Features | None:
        """Take all sites that run for every batch on the examples in their order; None where none does.

        Where none has an axis for the examples, the entries of each are pooled, as the nodes of a graph are.
        """
        steady = [site for site in sites if not site.moved and not site.skipped]
        names = tuple(site.name for site in steady if site.batch_axis is not None)
        if not names and not any(site.coupled for site in sites):
            names = tuple(site.name for site in steady)
        return cls(names) if names else None

    @classmethod
    def named(cls, names: Sequence[str], sites: Sites) -> Features:
        """Take these sites alone."""
        usable = cls.all(sites)
        known = () if usable is None else usable.sites
        missing = [name for name in names if name not in known]
        if missing or not names:
            raise ArgumentError(
                f"expected features among the sites whose input has the rows, {list(known)}; found {missing or 'none'}."
            )
        return cls(tuple(names))

    def are_loose(self, sites: Sites) -> bool:
        """Return True if it takes a backward pass to tell which entries are whose."""
        return any(site.batch_axis is None for site in sites if site.name in self.sites)

    def of(self, network: Network, x: Any, sites: Sites) -> tuple[Tensor, Any]:
        """Return `(N, features)` and the raw output, from one plain pass."""
        noted, output = self._noted(network, x, sites)
        return self.gathered(noted), output

    def noting(self, network: Network) -> Noted:
        """Notes these features while a pass runs that somebody else makes."""
        return Noted(network.notes.get("channels") or _channels(network), {name: [] for name in self.sites})

    def gathered(self, noted: Noted) -> Tensor:
        """`(N, features)`, after the pass."""
        parts = [noted.features(name) for name in self.sites]
        return folded(torch.cat(parts, 1) if len(parts) > 1 else parts[0], WIDEST)

    def steady(self, network: Network, x: Any, sites: Sites) -> Features | None:
        """Keep the features that a row has alone as in its batch `x`: not of padding, nor where rows see each other.

        Vectors are taken before what has positions, of which some may be padding. None where there are none.
        """
        if self.are_loose(sites) or rows_are_nodes(x):
            return self  # entries that serve several rows are refused where they are told apart; nodes act on others
        rows = row_count(x)
        together, _ = self._noted(network, x, sites)
        vectors = tuple(name for name in self.sites if name not in together.positions)
        names = vectors or self.sites
        for i in range(0, rows, max(1, rows // _ALONE)):
            try:
                alone, _ = self._noted(network, take_rows(x, slice(i, i + 1)), sites)
            except Exception:  # a model may raise anything where it cannot take a single row, as squeeze() makes it
                return Features(names)
            names = tuple(name for name in names if together.agrees(alone, name, i))
        return Features(names) if names else None

    def _noted(self, network: Network, x: Any, sites: Sites) -> tuple[Noted, Any]:
        chosen, rows = [site for site in sites if site.name in self.sites], row_count(x)

        def run() -> tuple[Noted, Any]:
            noted = self.noting(network)
            return noted, network.output(copied(x), Pass(chosen, noted, rows, shared=False))

        return network.quietly(run)


def pooled(value: Tensor, channels: int) -> Tensor:
    """`(N, features)` from `(N, ...)`: mean and standard deviation over all axes but the channels'."""
    flat = value.movedim(channels, 1).flatten(2) if value.dim() > 2 else value.reshape(len(value), -1, 1)
    if value.dim() <= 2:
        return flat[:, :, 0]
    if flat.is_cuda and flat.shape[2] > 1:  # one kernel
        spread, mean = torch.std_mean(flat, 2)
        return torch.cat([mean, spread], 1)
    mean = flat.mean(2)
    # A single position has no spread; another row may have more of them, and has as many features. On a CPU the norm
    # takes a tenth of the time of torch's own standard deviation.
    spread = torch.linalg.vector_norm(flat - mean[:, :, None], dim=2) / max(flat.shape[2] - 1, 1) ** 0.5
    return torch.cat([mean, spread], 1)


@dataclass
class Noted:
    """Leaves what passes by as it is, and notes the features of some sites.

    Attributes:
        channels: the axis of each site's input along which its features lie.
        calls: by site what was noted, `(N, features)` for each call of its layer.
        positions: sites whose input has more than one vector for a row.
    """

    channels: dict[str, int]
    calls: dict[str, list[Tensor]]
    positions: set[str] = field(default_factory=set)

    def thin(self, site: Site, call: int, value: Tensor, shape: tuple[int, ...], axis: int | None) -> Tensor:
        """Note `value`; see `Thinner`."""
        if axis is not None and site.name in self.calls:
            channels = self.channels.get(site.name, -1) % value.dim()
            moved = widened(value.detach()).movedim(axis, 0)
            self.positions |= {site.name} if moved.dim() > 2 else set()
            self.calls[site.name].append(pooled(moved, channels if channels > axis else channels + 1))
        return value

    def note_entries(self, name: str, entries: Tensor, owner: Tensor, rows: int) -> None:
        """Note `entries` `(P, channels)` of a site, each of the row `owner`: mean and standard deviation by row."""
        if name not in self.calls:
            return
        count = torch.bincount(owner, minlength=rows + 1)[:, None].to(entries)
        mean = entries.new_zeros(rows + 1, entries.shape[1]).index_add(0, owner, entries) / count.clamp_min(1)
        squares = torch.zeros_like(mean).index_add(0, owner, (entries - mean[owner]).square())
        self.calls[name].append(torch.cat([mean, (squares / (count - 1).clamp_min(1)).sqrt()], 1)[:-1])

    def agrees(self, alone: Noted, name: str, row: int) -> bool:
        """Whether a row has the same features of a site alone, up to rounding, also in half precision."""
        calls, other = self.calls[name], alone.calls[name]
        wide = [part.shape[1:] for part in calls]
        if len(set(wide)) != 1 or wide != [part.shape[1:] for part in other]:  # calls with more axes have more features
            return False
        together = self.features(name)
        apart = (together[row] - alone.features(name)[0]).abs().max()
        return bool(apart <= _ROUNDING * together.abs().max())

    def features(self, name: str) -> Tensor:
        """Return the features of one site, `(N, features)`: the mean over its calls."""
        calls = self.calls[name]
        if not calls or any(part.shape != calls[0].shape for part in calls):
            raise SiteError(
                f"expected features of the same shape in every call of {name!r}; found "
                f"{[tuple(part.shape) for part in calls]}. Leave the site out with select=, or name others with at=."
            )
        return calls[0] if len(calls) == 1 else torch.stack(calls).mean(0)


WIDEST_GRADIENTS = 512
_MOST_NUMBERS = 2**22  # of the matrices of all outputs together


def joined_gradients(network: Network, sites: Sequence[Site], phi: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Return `(N, K, D)` from `phi` of each of K outputs, `(N, units)` by the names of the sites."""
    axes = network.notes.get("channels") or _channels(network)
    rows = [
        torch.cat([_by_channel(site, axes.get(site.name, -1), entry[site.name]) for site in sites], 1) for entry in phi
    ]
    joined = torch.stack(rows, 1)
    return folded(joined, min(WIDEST_GRADIENTS, max(8, int((_MOST_NUMBERS / len(phi)) ** 0.5))))


def folded(phi: Tensor, width: int) -> Tensor:
    """Fold `(..., U)` into `(..., width)`; nothing is done where U is at most `width`."""
    units = phi.shape[-1]
    if units <= width:
        return phi
    layers = -(-units // width)
    padded = pad(phi * _signs(units).to(phi), (0, layers * width - units))
    return padded.reshape(*phi.shape[:-1], layers, width).sum(-2)


def _channels(network: Network) -> dict[str, int]:
    """Return along which axis of a layer's input its features lie, from the end; looked up once."""
    axes = {name: channel_axis(layer) for name, layer in network.layers.items()}
    network.notes["channels"] = axes
    return axes


def _by_channel(site: Site, axis: int, phi: Tensor) -> Tensor:
    """Sum `(N, units)` over positions and calls, to `(N, channels)`."""
    axis = axis if len(site.units) > 1 else -1
    channels = site.units[axis]
    if phi.shape[1] == channels or phi.shape[1] % channels:
        return widened(phi)
    wide = torch.promote_types(phi.dtype, torch.float32)
    if axis == -1:
        return phi.reshape(len(phi), -1, channels).sum(1, dtype=wide)
    calls = site.calls if phi.shape[1] % (site.calls * channels) == 0 else 1
    return phi.reshape(len(phi), calls, channels, -1).sum((1, 3), dtype=wide)


@lru_cache(maxsize=8)
def _signs(units: int) -> Tensor:
    """Return 1 or -1 for each unit."""
    return apart(partial(_drawn, units))  # a graph would hold how they are made in place of them


def _drawn(units: int) -> Tensor:
    with np.errstate(over="ignore"):
        start = mixed(np.array([1], np.uint64))
        keys = mixed(start + np.arange(1, units + 1, dtype=np.uint64) * STEP)
    return torch.from_numpy(np.where(keys & np.uint64(1), 1.0, -1.0))

"""Thinned values of one draw, or of many that are rows of one batch.

The rows of a batch are `(draw, example)`, draws first. A value is seen as `(..., T, N, ...)` at the axis of its rows,
and multiplied by masks `(..., T, 1, ...)`: one for each draw, the same for all of its examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from latedrop.dropout.masks import are_small, keys_for, masks, thinned
from latedrop.errors import ArgumentError
from latedrop.network.sites import Site

__all__ = ["DrawMasks", "checked_seed", "split"]

_HALF = (torch.float16, torch.bfloat16)
_FEW = 2**22  # numbers for which a plain product is quicker than the start of a kernel that also makes the mask


@dataclass
class DrawMasks:
    """The masks of some draws: a `Thinner`.

    Attributes:
        seed: with the draw and the site it fixes every mask.
        rates: by site.
        draws: which draws are rows of the batch, or the only one.
        of: all draws that will be asked for, one part after the other.
    """

    seed: int
    rates: Mapping[str, float]
    draws: range
    of: range

    def thin(self, site: Site, call: int, value: Tensor, shape: tuple[int, ...], axis: int | None) -> Tensor:
        """Zero the units that the draws drop, and divide the others by `1 - rate`."""
        rate, draws = self.rates[site.name], self.draws
        if rate == 0:
            return value
        one = axis == 0 and shape[0] == 1 and len(value) == len(draws) and type(value) is Tensor
        if one and not _worth_a_kernel(value, draws, shape):
            return _times(value, self._masks(site, call, shape[1:], value), rate)  # one row: the same, in one operator
        if axis is None:
            return self._split(site, call, value[None], shape, 0)[0]
        return self._split(site, call, split(value, axis, len(draws)), shape, axis).flatten(axis, axis + 1)

    def thin_rows(self, site: Site, call: int, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Thin rows `(N, ...)` that are the same for all draws: `(draws · N, ...)`."""
        if self.rates[site.name] == 0:
            return torch.cat([rows] * len(self.draws))
        return self._split(site, call, rows.expand(len(self.draws), *rows.shape), shape, 0).flatten(0, 1)

    def thin_packed(
        self, site: Site, call: int, value: Tensor, shape: tuple[int, ...], rows: Tensor, steps: Tensor
    ) -> Tensor:
        """The same of packed entries."""
        rate = self.rates[site.name]
        if rate == 0:
            return value
        made = self._masks(site, call, shape, value)
        made = made.expand(*made.shape[:2], int(steps.max()) + 1, made.shape[-1])
        examples = (int(rows.max()) + 1) // len(self.draws)
        draw, example = rows // examples, rows % examples
        return _times(value, made[draw, example if shape[0] > 1 else 0, steps], rate)

    def _split(self, site: Site, call: int, value: Tensor, shape: tuple[int, ...], axis: int) -> Tensor:
        """Thin a value with an axis of draws before that of the examples."""
        rate, draws = self.rates[site.name], self.draws
        if axis == 0 and _worth_a_kernel(value, draws, shape):
            keys = keys_for(self.seed, self.of, site.name, call, value.device)
            product = thinned(value, keys[draws.start - self.of.start : draws.stop - self.of.start], shape, rate)
            if product is not None:
                return product
        made = self._masks(site, call, shape, value)
        return _times(value, made if axis == 0 else made.movedim(0, axis), rate)

    def _masks(self, site: Site, call: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """`(draws, *shape)`. In half precision the scale is not rounded into them, where it would be off by 0.4 %."""
        scaled = like.dtype not in _HALF
        return masks(self.seed, self.draws, site.name, call, shape, self.rates[site.name], like, scaled=scaled)


def split(value: Tensor, axis: int, times: int) -> Tensor:
    """The axis of the rows as two: draws, and the examples of each."""
    shape = value.shape
    return value.view(*shape[:axis], times, shape[axis] // times, *shape[axis + 1 :])


def checked_seed(seed: Any) -> int:
    """The seed as an int, or `ArgumentError`."""
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise ArgumentError(f"expected an integer seed; found {seed!r}.")
    return int(seed)


def _worth_a_kernel(value: Tensor, draws: range, shape: tuple[int, ...]) -> bool:
    """Whether hash and product go into one: where masks are too large to be remembered, or the value is large."""
    if value.device.type != "cuda" or (are_small(draws, shape, value.device) and value.numel() <= _FEW):
        return False
    return not (value.requires_grad and torch.is_grad_enabled())


def _times(value: Tensor, mask: Tensor, rate: float) -> Tensor:
    return value * mask / (1 - rate) if value.dtype in _HALF else value * mask

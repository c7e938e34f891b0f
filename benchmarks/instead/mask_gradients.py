"""Leverage of mask gradients: dropout in the metric of the data.

First order gives `phi(x) = h · dy/dh`, the gradient of an output by the mask of every unit, one number per unit or
channel (positions are summed). Dropout at one rate has the variance `phi' phi`. With a constant appended to `phi`, the
root of the mean of `phi' phi`, and `G` the mean of `phi phi'` over the n reference rows, D numbers in all, leverage
measures the same vector in their metric:

    lev(x) = phi' (G + r · tr(G) / D · I)^-1 phi,      r = ridge · max(1, D / n)^2.

Directions in which the reference rows vary count little, others much, and the unit of the output cancels. A row that
is a reference row itself is left out of them: `(n - 1) / n · t / (1 - t / n)`, with `t` its leverage among all. Entries
are not standardised, as units that are nearly dead would then dominate. More than `WIDEST` units are folded into that
many by a permutation and signs that follow from a seed, so the state is a matrix and a few numbers.

Leverage of features is the same with what enters the sites, `(n, 1, F)`, in place of `phi`.

References: Cook and Weisberg (1982), leverage; Immer et al. (2021), linearised Laplace; Sharma, Azizan and Pavone
(2021), sketches of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from latedrop.dropout.first_order import _by_rows
from latedrop.dropout.masks import mixed
from latedrop.errors import DataError
from latedrop.network.calling import Readout, part_of
from latedrop.network.network import Network
from latedrop.network.sites import Site, Sites, channel_axis

__all__ = ["RIDGE", "WIDEST", "Leverage", "folded", "largest_logit", "mask_gradients"]

RIDGE = 1e-3
"""With three times as much, shifted rows of a set with little noise (energy) are held less often; others are alike."""
WIDEST = 512
_MOST_NUMBERS = 2**22  # of the matrices of all outputs together
_SAMPLE = 1024  # reference rows at most whose leverage is remembered
_ROWS = 2048  # at once: they stay in the cache of a core


def mask_gradients(network: Network, x: Any, sites: Sites, readout: Readout = None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield outputs `(n, ...)` of some rows after the others, and `phi` `(n, K, U)` of their K entries and U units.

    The inputs must be on the network's device. For classes pass `largest_logit(readout)`: K is then 1.
    """
    for part in _by_rows(network, x, sites, readout, None, lambda phi: phi):
        phi = [torch.cat([_by_channel(network, site, entry[site.name]) for site in sites], 1) for entry in part.columns]
        yield part.mean, torch.stack(phi, 1)


def largest_logit(readout: Readout = None) -> Readout:
    """Return a readout of the largest entry of each row, `(N, 1)`."""

    def read(output: Any) -> Tensor:
        logits: Tensor = part_of(output, readout).flatten(1)
        return logits.gather(1, logits.detach().argmax(1, keepdim=True))

    return read


def folded(phi: Tensor, width: int, seed: int) -> Tensor:
    """Fold `(..., U)` into `(..., width)`: permute the units, flip signs, add up every `width`-th.

    Inner products are kept on average; nothing is done where U is at most `width`.
    """
    units = phi.shape[-1]
    if units <= width:
        return phi
    order, signs = _fold(units, seed)
    shuffled = phi.index_select(-1, order.to(phi.device)) * signs.to(phi)
    layers = -(-units // width)
    padded = torch.nn.functional.pad(shuffled, (0, layers * width - units))
    return padded.reshape(*phi.shape[:-1], layers, width).sum(-2)


@dataclass(frozen=True)
class Leverage:
    """The metric of some reference rows, and how far others are from them in it.

    Attributes:
        root: `(K, D, D)` for K outputs, float64: `root' root` is the inverse of `G` with its ridge, for vectors that
            end with a 1.
        rows: number of reference rows.
        units: numbers in `phi` before folding.
        seed: of the fold.
        sample: `(m, K)`, leverage of some of the reference rows, evenly spread, each left out for itself.
        dropout: `(K,)`, mean of `phi' phi` over the reference rows.
    """

    root: Tensor
    rows: int
    units: int
    seed: int
    sample: Tensor
    dropout: Tensor

    @classmethod
    def fit(cls, batches: Iterable[Tensor], ridge: float = RIDGE, widest: int = WIDEST, seed: int = 0) -> Leverage:
        """Learn from reference rows in batches `(n, K, U)`."""
        rows, units, outputs, width = 0, 0, 0, 0
        gram = dropout = torch.empty(0)
        some = _Sample()
        for phi in batches:
            if not rows:
                outputs, units = phi.shape[1:]
                width = min(units, widest, max(8, int((_MOST_NUMBERS / outputs) ** 0.5)))
                gram = phi.new_zeros(outputs, width + 1, width + 1, dtype=torch.float64)
                dropout = phi.new_zeros(outputs, dtype=torch.float64)
            if phi.shape[1:] != (outputs, units):
                raise DataError(
                    f"expected mask gradients of {outputs} outputs and {units} units in every batch; found "
                    f"{tuple(phi.shape[1:])}. Leave out sites whose width changes with the input, with select=."
                )
            for part in phi.split(_ROWS):
                narrow = folded(part.double(), width, seed)
                vectors = torch.cat([narrow, torch.ones_like(narrow[..., :1])], -1).transpose(0, 1)
                gram += vectors.mT @ vectors
                dropout += part.double().square().sum((0, 2))
                some.add(vectors, rows)
                rows += len(part)
        if rows < 2:
            raise DataError(f"expected at least 2 reference rows; found {rows}. Pass more rows as reference=.")
        gram, dropout = gram / rows, dropout / rows
        constant = dropout.sqrt().clamp_min(torch.finfo(torch.float32).tiny)
        gram[:, -1] *= constant[:, None]
        gram[:, :, -1] *= constant[:, None]
        size = gram.diagonal(dim1=1, dim2=2).mean(1)
        relative = ridge * max(1.0, gram.shape[1] / rows) ** 2
        identity = torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device)
        lower = torch.linalg.cholesky(gram + relative * size[:, None, None] * identity)
        root = torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False).contiguous()
        root[:, :, -1] *= constant[:, None]
        sample = _left_out((some.vectors() @ root.mT).square().sum(2).T, rows)
        return cls(root, rows, units, seed, sample, dropout)

    def directions(self, phi: Tensor) -> Tensor:
        """Return `(n, K, D)` from rows `(n, K, U)`: `phi` in the metric, whose squares add up to the leverage."""
        if phi.shape[1:] != (len(self.root), self.units):
            raise DataError(
                f"expected mask gradients of {len(self.root)} outputs and {self.units} units; found "
                f"{tuple(phi.shape[1:])}. Calibrate again with the sites that are in use."
            )
        root = self.root.to(phi.device)
        vectors = folded(phi.double(), root.shape[-1] - 1, self.seed).transpose(0, 1)
        return (vectors @ root[:, :, :-1].mT + root[:, None, :, -1]).transpose(0, 1)  # the last entry is a one

    def values(self, phi: Tensor, *, reference: bool = False) -> Tensor:
        """Return the leverage `(n, K)` of rows `(n, K, U)`; with `reference` these are reference rows themselves."""
        value = torch.cat([self.directions(part).square().sum(2) for part in phi.split(_ROWS)])
        return _left_out(value, self.rows) if reference else value

    def state(self) -> dict[str, Any]:
        """Return what a record has to hold: arrays and numbers."""
        return {
            "root": self.root.cpu().numpy(),
            "rows": self.rows,
            "units": self.units,
            "seed": self.seed,
            "sample": self.sample.cpu().numpy(),
            "dropout": self.dropout.cpu().numpy(),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Leverage:
        """Return the inverse of `state`."""
        arrays = {name: torch.as_tensor(state[name], dtype=torch.float64) for name in ("root", "sample", "dropout")}
        return cls(rows=int(state["rows"]), units=int(state["units"]), seed=int(state["seed"]), **arrays)


def _left_out(value: Tensor, rows: int) -> Tensor:
    return value * (1 - 1 / rows) / (1 - value / rows).clamp_min(1e-9)


class _Sample:
    """Keeps every k-th row of a stream, k doubling as the stream grows."""

    def __init__(self) -> None:
        self._step, self._batches = 1, []  # type: ignore[var-annotated]

    def add(self, vectors: Tensor, start: int) -> None:
        """Take some of the rows `(K, n, D)`; `start` rows went before."""
        places = torch.arange(start, start + vectors.shape[1])
        self._batches.append((vectors[:, places % self._step == 0], places[places % self._step == 0]))
        while sum(len(places) for _, places in self._batches) > _SAMPLE:
            self._step *= 2
            self._batches = [(v[:, p % self._step == 0], p[p % self._step == 0]) for v, p in self._batches]

    def vectors(self) -> Tensor:
        """Return the rows, `(K, m, D)`."""
        return torch.cat([vectors for vectors, _ in self._batches], 1)


def _by_channel(network: Network, site: Site, phi: Tensor) -> Tensor:
    """Sum `(n, units)` over positions and calls, to `(n, channels)`."""
    layer = network.layers.get(site.name) if site.weight is None else None
    axis = channel_axis(layer) if layer is not None and len(site.units) > 1 else -1
    channels = site.units[axis]
    if phi.shape[1] % channels:
        return phi
    if axis == -1:
        return phi.reshape(len(phi), -1, channels).sum(1)
    calls = site.calls if phi.shape[1] % (site.calls * channels) == 0 else 1
    return phi.reshape(len(phi), calls, channels, -1).sum((1, 3))


@lru_cache(maxsize=8)
def _fold(units: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the order of the units and their signs, from a hash: the same on every machine and in every version."""
    with np.errstate(over="ignore"):
        start = mixed(np.array([seed], np.uint64) + np.uint64(1))
        keys = mixed(start + np.arange(1, units + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    order = np.argsort(keys, kind="stable")
    signs = np.where(keys[order] & np.uint64(1), 1.0, -1.0)
    return torch.from_numpy(order), torch.from_numpy(signs)

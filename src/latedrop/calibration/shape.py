"""Coefficients of a variance, shrunk to a typical shape: `v = floor + sum_j theta_j t_j`, all above 0.

With `u_j = t_j / size_j`, columns brought to a mean of about 1, and typical shares `w`, write

    v = s · (w_0 exp(d_0) + sum_j w_j exp(d_j) u_j).

The scale s is free. The departures d cost `k / 4 · sum_j w_j (d_j - d)^2` with `d` their mean weighted by w, as if k
rows more had the typical shape: few rows change little but the scale, many rows have their way. Fisher scoring in the
logarithms of the coefficients minimises the negative log-likelihood of the errors plus that cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from latedrop.calibration.cross_validation import effective_rows
from latedrop.calibration.fitted_terms import term_of
from latedrop.terms import ErrorForest, Term

__all__ = ["TYPICAL", "Block", "TermFit", "blocks_of", "fit_terms"]

TYPICAL = {"floor": 0.5, "gradients": 0.2, "leverage": 0.2, "dropout": 0.1, "forest": 1.0}
"""Shares of the variance of usual rows; they are divided by the sum of those in use."""
_OTHER = 0.2  # the share of a term that is not named there
_TYPICAL_ROWS = 60.0  # that the typical shape counts for
_STEPS = 100
_FARTHEST = 12.0  # departure in logarithms
_LEAST_FLOOR = 1e-4  # of the mean squared error


class Block(NamedTuple):
    """Columns that share a coefficient, by their places, and what share of the variance they typically have."""

    places: Sequence[int]
    share: float
    of_forest: bool = False


@dataclass(frozen=True)
class TermFit:
    """`variance = floors + columns @ coefficients`, one row of coefficients and one floor for each of K outputs.

    Attributes:
        coefficients: `(K, J)`.
        floors: `(K,)`.
        constants: `(K,)`, the mean squared errors.
        without: the fit without a forest, where there is one.
    """

    coefficients: Tensor
    floors: Tensor
    constants: Tensor
    without: TermFit | None = None

    def variance(self, columns: Tensor) -> Tensor:
        """The fitted variance `(n, K, ...)` from `(n, K, ..., J)`."""
        along = [-1, *[1] * (columns.dim() - 3)]
        return torch.einsum("nk...j,kj->nk...", columns, self.coefficients) + self.floors.reshape(along)

    def with_floors(self) -> tuple[tuple[float, ...], ...]:
        """Coefficients and floors, these last, for each output."""
        return tuple(tuple(row) for row in torch.cat([self.coefficients, self.floors[:, None]], 1).tolist())


def fit_terms(
    error: Tensor,
    columns: Tensor,
    blocks: Sequence[Block],
    sizes: Tensor | None = None,
    weights: Tensor | None = None,
    *,
    worth: float | None = None,
) -> TermFit:
    """Fit errors `(n, K, ...)` with columns `(n, K, ..., J)`; each output has coefficients of its own.

    Args:
        error: target minus prediction; of several entries per row and output all have the same coefficients.
        columns: not negative.
        blocks: the columns that share a coefficient, with their typical shares.
        sizes: `(K, J)`, what a column is on usual rows; its mean over these where None.
        weights: `(n,)`, what each row counts.
        worth: how many independent rows they are, where neighbours are alike or weights differ.
    """
    errors = [each.flatten() for each in error.double().unbind(1)]
    units = [each.flatten(0, -2) for each in columns.double().unbind(1)]
    sizes = torch.stack([each.mean(0) for each in units]) if sizes is None else sizes.double()
    counts = torch.ones(len(error), dtype=torch.float64) if weights is None else weights.double()
    counts = counts.repeat_interleave(len(errors[0]) // len(error))
    counts = counts / counts.sum() * (effective_rows(counts, len(counts)) if worth is None else worth)
    fits = [_fit_one(*each, blocks, counts) for each in zip(errors, units, sizes, strict=True)]
    coefficients, floors, constants = (torch.stack(part) for part in zip(*fits, strict=True))
    found = TermFit(coefficients, floors, constants)
    if not any(block.of_forest for block in blocks):
        return found
    rest = [block for block in blocks if not block.of_forest]
    return replace(found, without=fit_terms(error, columns, rest, sizes, weights, worth=worth))


def _fit_one(
    error: Tensor, columns: Tensor, sizes: Tensor, blocks: Sequence[Block], counts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return coefficients `(J,)`, floor and mean squared error of one output."""
    used = [(b, columns[:, list(b.places)].sum(1), float(sizes[list(b.places)].sum())) for b in blocks]
    used = [part for part in used if part[2] > 0]
    size = (counts @ error.square() / counts.sum()).clamp_min(torch.finfo(torch.float64).tiny)
    units = torch.stack([torch.ones_like(error), *(column / mean for _, column, mean in used)], 1)
    typical = torch.tensor([TYPICAL["floor"], *(block.share for block, _, _ in used)], dtype=torch.float64)
    typical = typical / typical.sum()
    theta = _shrunk(error.square() / size, units, typical, counts)
    coefficients = torch.zeros_like(sizes)
    for (block, _, mean), value in zip(used, theta[1:], strict=True):
        coefficients[list(block.places)] = value * size / mean
    return coefficients, theta[0].clamp_min(_LEAST_FLOOR) * size, size


def _shrunk(squares: Tensor, units: Tensor, typical: Tensor, counts: Tensor) -> Tensor:
    """Return the coefficients `(1 + J,)` of units `(n, 1 + J)` that fit squares best, at a price for departures."""
    scale = counts @ (squares / (units @ typical)) / counts.sum()
    start = typical.log() + scale.clamp_min(1e-9).log()
    centred = torch.eye(len(typical), dtype=torch.float64) - typical
    cost = _TYPICAL_ROWS / 2 * centred.T @ torch.diag(typical) @ centred  # curvature of the price

    def objective(logs: Tensor) -> float:
        variance, off = units @ logs.exp(), logs - start
        return float(counts @ (squares / variance + variance.log())) / 2 + float(off @ cost @ off) / 2

    logs, value = start, objective(start)
    for _ in range(_STEPS):
        theta = logs.exp()
        variance = units @ theta
        part = units * theta / variance[:, None]
        gradient = part.T @ (counts * (1 - squares / variance)) / 2 + cost @ (logs - start)
        curvature = part.T @ (counts[:, None] * part) / 2 + cost
        curvature = curvature + 1e-9 * curvature.diagonal().mean() * torch.eye(len(theta), dtype=torch.float64)
        move = -torch.linalg.solve(curvature, gradient)
        step = min(1.0, 3.0 / float(move.abs().max().clamp_min(1e-300)))
        while step > 1e-6:
            moved = (logs + step * move).clamp(start - _FARTHEST, start + _FARTHEST)
            new = objective(moved)
            if new < value:
                break
            step /= 2
        else:
            break
        done = value - new < 1e-9 * max(1.0, float(counts.sum()))
        logs, value = moved, new
        if done:
            break
    return logs.exp()


def blocks_of(term: Term, names: Sequence[str]) -> list[Block]:
    """The places of a term's columns among those of these names, those that share a coefficient together."""
    places = [i for i, name in enumerate(names) if term_of(name) == term.name]
    together = [places] if term.is_block and places else [[place] for place in places]
    share = TYPICAL.get(term.name, _OTHER) / max(1, len(together))
    return [Block(each, share, isinstance(term, ErrorForest)) for each in together]

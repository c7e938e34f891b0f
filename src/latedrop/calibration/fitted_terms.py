"""Fit the coefficients of variance terms, and compute the variance of new rows from them.

    fitted(x) = floor + sum_j theta_j t_j(x)

The guard then multiplies this by the novelty of a row, see `latedrop.calibration.guard`.

The coefficients are shrunk to a typical shape. With columns scaled to a mean of about 1, `u_j = t_j / size_j`, and
typical shares `w`, write

    v = s · (w_0 exp(d_0) + sum_j w_j exp(d_j) u_j).

The scale s is free. The departures d_j are penalised by `k / 4 · sum_j w_j (d_j - d)^2`, where `d` is their mean
weighted by w. This acts like k additional rows of the typical shape: with few rows mostly the scale is fitted, with
many rows all coefficients are. Fisher scoring in the logarithms of the coefficients minimises the negative
log-likelihood of the errors plus the penalty.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, NamedTuple, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from latedrop.calibration.corrected_mean import Correction
from latedrop.calibration.cross_validation import Candidate, effective_rows
from latedrop.calibration.guard import LARGEST, Guard
from latedrop.data.arrays import constants
from latedrop.errors import ArgumentError, DataError, FileError
from latedrop.records import Limits, Tagged, Via, match, record
from latedrop.streams.monitor import Usual
from latedrop.terms import BatchContext, Dropout, ErrorForest, GradientLeverage, Kind, Leverage, Term
from latedrop.terms.features import Features
from latedrop.terms.term import Missing
from latedrop.torch_private import being_traced

__all__ = [
    *("KINDS", "TYPICAL", "Block", "FittedTerms", "TermFit", "aligned", "blocks_of", "checked_terms"),
    *("compared", "fit_terms", "is_site", "measured_columns", "shares_of_terms", "term_of"),
]

_Floats: TypeAlias = npt.NDArray[np.float64]
KINDS: dict[str, type[Term]] = {kind.name: kind for kind in get_args(Kind)}
_Stored: TypeAlias = Annotated[Kind | Missing, Tagged("name", otherwise=Missing)]
_Amount: TypeAlias = Annotated[float, Limits(0, 1e30)]
_Amounts: TypeAlias = Annotated[tuple[_Amount, ...], Limits(1)]


@record
@dataclass(frozen=True)
class FittedTerms:
    """Hold fitted terms and their coefficients, and compute variances from them.

    Attributes:
        terms: all fitted terms: in the variance, compared but not chosen, or used by the guard alone.
        columns: names of the columns that have a coefficient, `"term"` or `"term:part"`.
        coefficients: one tuple per output, or one for all outputs, with one number per column.
        floors: constant part of the variance, one per output or one for all.
        without: coefficients and floor (last) of a fit without the forest, for rows outside the range of the trees;
            empty if there is no forest.
        shares: mean share of each column and of the floor in the variance of the validation rows.
        guard: limits of the novelty; None if no features can measure how novel a row is.
        features: sites whose activations the terms and the guard read.
        candidates: nested models that were compared, the simplest first.
        choice: name of the candidate in use.
        reference_rows: number of reference rows; 0 if the validation rows were used instead.
        correction: correction of the mean; None unless `mean="corrected"` was requested.
        usual: distribution of novelty and shares over the validation rows, for monitoring; None if unknown.
    """

    terms: Annotated[tuple[Term, ...], Via(tuple[_Stored, ...], tuple)]
    columns: tuple[str, ...]
    coefficients: Annotated[tuple[tuple[_Amount, ...], ...], Limits(1)]
    floors: _Amounts
    without: tuple[_Amounts, ...]
    shares: dict[str, Annotated[float, Limits(0, 1 + 1e-6)]]
    guard: Guard | None
    features: Features | None
    candidates: Annotated[tuple[Candidate, ...], Limits(1)]
    choice: str
    reference_rows: Annotated[int, Limits(0)] = 0
    correction: Correction | None = None
    usual: Usual | None = None

    def to_record(self) -> FittedTerms:
        """Replace the user's own terms by their names, because a file cannot hold them."""
        terms = tuple(term if type(term) in KINDS.values() else Missing(term.name) for term in self.terms)
        return replace(self, terms=terms)

    def checked(self) -> FittedTerms:
        """Check names and lengths against each other after reading."""
        names, outputs, columns = [term.name for term in self.terms], len(self.floors), list(self.columns)
        match(len(set(names)) == len(names), "terms", "terms of different names", names)
        match(len(set(columns)) == len(columns), "columns", "different columns", columns)
        match({term_of(name) for name in columns} <= set(names), "columns", f"columns of the terms {names}", columns)
        match(set(self.shares) == {*columns, "floor"}, "shares", "one of every column and of the floor", [*self.shares])
        match(self.choice in [c.name for c in self.candidates], "choice", "the name of a candidate", self.choice)
        for name, rows, count in (("coefficients", self.coefficients, 0), ("without", self.without, 1)):
            fits = len(rows) == outputs or (not rows and name == "without")
            match(fits, name, f"{outputs} rows, as floors", len(rows))
            for i, theta in enumerate(rows):
                wanted = f"one number for each of {columns}{' and a floor' * count}"
                match(len(theta) == len(columns) + count, f"{name}[{i}]", wanted, theta)
        for term in self.terms:
            forest = isinstance(term, ErrorForest)
            learned = term.grown is not None if forest else None not in vars(term).values()  # type: ignore[attr-defined]
            learns = forest or term.needs_features or term.needs_gradients
            match(learned or not learns, "terms", f"all that {term.name} has learned", "nothing")
            beside = set(term.beside) if isinstance(term, ErrorForest) else set()
            match(beside <= set(names), "terms", f"terms {names} beside the forest", beside)
        looking = any(term.needs_features for term in self.terms)
        match(self.features is not None or not looking, "features", "the sites that terms look at", None)
        needed = {ErrorForest.name, GradientLeverage.name}
        fits = self.correction is None or (needed <= set(names) and self.guard is not None)
        match(fits, "correction", f"with terms {needed}, guarded", names)
        if self.guard is not None:
            lever = [term.name for term in self.terms if isinstance(term, (Leverage, GradientLeverage))]
            match(set(self.guard.terms) <= set(lever), "guard.terms", f"some of {lever}", self.guard.terms)
            for name, values in (("constants", self.guard.constants), ("centres", self.guard.centres)):
                fits = len(values) == outputs or (name == "centres" and not values)
                match(fits, f"guard.{name}", f"{outputs} numbers, as floors", values)
        return self

    @property
    def active(self) -> tuple[Term, ...]:
        """Return the terms that have a coefficient above 0."""
        used = {term_of(name) for name, *theta in zip(self.columns, *self.coefficients, strict=True) if any(theta)}
        return tuple(term for term in self.terms if term.name in used)

    @cached_property
    def needs_gradients(self) -> bool:
        """Return True if predictions need mask gradients."""
        guard = () if self.guard is None else self.guard.terms
        used = (*self._measured, *(self._named[name] for name in guard))
        return self._corrects or any(term.needs_gradients for term in used)

    @cached_property
    def _corrects(self) -> bool:
        """Return True if the mean of any output is corrected."""
        return self.correction is not None and self.correction.used

    @cached_property
    def _named(self) -> dict[str, Term]:
        """Return the terms by name."""
        return {term.name: term for term in self.terms}

    @cached_property
    def _measured(self) -> tuple[Term, ...]:
        """Return the terms in use, and the terms that a forest in use reads."""
        active = self.active
        trees = [term for term in self.terms if isinstance(term, ErrorForest) and (self._corrects or term in active)]
        read = {name for term in trees for name in term.beside}
        return tuple(term for term in self.terms if term in active or term.name in read)

    def odds(self, sites: Sequence[str], output: int) -> list[float]:
        """Return the coefficient of each site's first-order variance for one output (index of axis 1), or 0."""
        theta = self.coefficients[output if len(self.coefficients) > 1 else 0]
        named = dict(zip(self.columns, theta, strict=True))
        return [named.get(f"{Dropout.name}:{name}", 0.0) for name in sites]

    def parts(self, rows: BatchContext) -> dict[str, Tensor]:
        """Return the part of each column and of the floor in the variance, `(N, ...)`, before the guard."""
        columns = measured_columns(self._measured, rows)
        names, values = self._weighted(columns, rows.mean, self.coefficients, self.floors)
        return dict(zip(names, values.unbind(), strict=True))

    def _weighted(
        self, columns: Mapping[str, Tensor], mean: Tensor, coefficients: Sequence[Sequence[float]], floors: Any
    ) -> tuple[list[str], Tensor]:
        """Return the names of the parts of the variance, floor last, and their values, `(parts, N, ...)`."""
        thetas = {name: theta for name, *theta in zip(self.columns, *coefficients, strict=True)}
        used = [name for name, theta in thetas.items() if any(theta) and name in columns]
        numbers = [value for name in used for value in thetas[name]]
        factors = constants((*numbers, *floors)).to(mean).reshape(len(used) + 1, 1, -1, *[1] * (mean.dim() - 2))
        factors = factors if mean.dim() > 1 else factors[..., 0]
        values = torch.stack([*(columns[name] for name in used), torch.ones_like(mean)])
        return [*used, "floor"], values * factors

    def predicted(self, rows: BatchContext) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Tensor] | None]:
        """Return mean and variance `(N, ...)`, novelty `(N,)` or None without a guard, and shares or None for maps."""
        columns, mean = measured_columns(self._measured, rows), rows.mean
        names, values = self._weighted(columns, mean, self.coefficients, self.floors)
        total = values.sum(0)
        shares = shares_of_terms(names, values) if total.dim() < 3 else None
        if self.guard is None:
            return mean, total, None, shares
        novelty, without = self.guard.novelty(rows, self._named), None
        # Only on the CPU: reading one bool from a GPU waits for it. Usual rows need no guard.
        usual = novelty.is_cpu and not being_traced() and not bool((novelty > 1).any())
        if self.without and not usual:
            theta, floors = [row[:-1] for row in self.without], tuple(row[-1] for row in self.without)
            without = self._weighted(columns, mean, theta, floors)[1].sum(0)
        if self.correction is not None and self._corrects:
            forest, metric = self._named[ErrorForest.name], self._named[GradientLeverage.name]
            assert isinstance(forest, ErrorForest)
            assert isinstance(metric, GradientLeverage)
            added = self.correction.values(forest.numbers(rows), metric.directions(rows.gradients))
            mean = mean + (added / novelty.clamp_min(1)[:, None]).to(mean).reshape(mean.shape)
        variance = total if usual else self.guard.grown(total, novelty, mean, without)
        # The numbers of a traced program are looked at where it is run.
        return mean, variance, novelty if being_traced() else novelty.clamp_max(LARGEST), shares

    def lines(self) -> list[str]:
        """Format the candidates and the share of every column as lines of text."""
        rows = f"{self.reference_rows} reference rows" if self.reference_rows else "validation rows as reference"
        lines = [f"variance: {self.choice} ({rows})"]
        lines += [] if self.correction is None else [f"corrected mean: {self.correction}"]
        return [*lines, *compared(self.candidates, self.choice, "a constant"), *aligned(self.table())]

    def table(self) -> list[list[str]]:
        """Return a table of text with coefficients and share of each column and of the floor, header first."""
        values = zip([*self.columns, "floor"], [*zip(*self.coefficients, strict=True), self.floors], strict=True)
        cells = [[name, ", ".join(f"{v:.4g}" for v in each), f"{self.shares[name]:.1%}"] for name, each in values]
        return [["term", "coefficient", "share of variance"], *cells]

    def with_terms(self, given: Sequence[Term], path: object) -> FittedTerms:
        """Replace names of the user's own terms by the `given` objects; raise `FileError` if one is missing."""
        named = {term.name: term for term in checked_terms(given)}
        absent = [term.name for term in self.terms if isinstance(term, Missing) and term.name not in named]
        if absent:
            raise FileError(
                f"expected terms= with {absent}, which a file cannot hold; found only their names in {path}. "
                "Pass the same terms to load()."
            )
        return replace(self, terms=tuple(named.get(t.name, t) if isinstance(t, Missing) else t for t in self.terms))


def checked_terms(terms: Any) -> tuple[Term, ...]:
    """Make terms from names or objects; raise `ArgumentError` for anything else."""
    if isinstance(terms, (str, Term)) or not isinstance(terms, Iterable):
        terms = (terms,)
    chosen: list[Term] = []
    for item in terms:
        if isinstance(item, str) and item in KINDS:
            try:
                chosen.append(KINDS[item]())
            except TypeError as error:
                raise ArgumentError(
                    f"expected latedrop.terms.{KINDS[item].__name__}(...), as term {item!r} needs arguments that "
                    "say what to read; found only its name."
                ) from error
        elif isinstance(item, Term):
            chosen.append(item)
        else:
            raise ArgumentError(f"expected terms among {sorted(KINDS)}, or objects of latedrop.terms; found {item!r}.")
    names = [getattr(term, "name", None) for term in chosen]
    if not all(isinstance(name, str) and name for name in names):
        raise ArgumentError(f"expected terms with a name, as in name = 'night'; found {names}.")
    twice = sorted({str(name) for name in names if names.count(name) > 1})
    if twice or "floor" in names or any(":" in str(name) for name in names):
        raise ArgumentError(f"expected terms of different names, without ':' and none of them 'floor'; found {names}.")
    return tuple(chosen)


def measured_columns(terms: Sequence[Term], rows: BatchContext) -> dict[str, Tensor]:
    """Compute the columns of all terms, shaped as the mean; raise `DataError` if one is negative or not finite."""
    measured: dict[str, Tensor] = {}
    for term in terms:
        columns = {f"{term.name}:{part}" if part else term.name: value for part, value in term.columns(rows).items()}
        columns = {name: _as_column(name, value, rows.mean) for name, value in columns.items()}
        values = torch.stack([*columns.values()])
        # One test for all columns, because each waits for the GPU.
        if not being_traced() and not bool((torch.isfinite(values) & (values >= 0)).all()):
            name, value = next((n, v) for n, v in columns.items() if bool((~(v.isfinite() & (v >= 0))).any()))
            infinite = value.isfinite().logical_not().reshape(len(value), -1).any(1)
            raise DataError(
                f"expected term {name!r} to be finite and not below 0; found other values.",
                rows=None if bool((value < 0).any()) else infinite,
            )
        rows.totals[term.name] = values.sum(0) if len(columns) > 1 else values[0]  # for terms that read other terms
        measured |= columns
    return measured


def _as_column(name: str, value: Any, mean: Tensor) -> Tensor:
    """Expand a term's output to the shape of the mean; raise `DataError` if it has another shape."""
    if not isinstance(value, Tensor) or value.is_complex():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise DataError(f"expected term {name!r} to give a tensor of real numbers; found {kind}.")
    if value.shape[:1] != mean.shape[:1] or (value.dim() != 1 and value.shape != mean.shape):
        raise DataError(
            f"expected term {name!r} to give shape {tuple(mean.shape[:1])} or {tuple(mean.shape)}; found "
            f"{tuple(value.shape)}."
        )
    column: Tensor = value.to(mean)
    column = column.reshape(-1, *[1] * (mean.dim() - 1)) if column.dim() == 1 else column
    return column.expand(mean.shape)


def shares_of_terms(names: Sequence[str], values: Tensor) -> dict[str, Tensor]:
    """Return each term's share of the variance, `(N,)`, averaged over outputs, from its parts `(parts, N, ...)`."""
    shares: dict[str, Tensor] = {}
    for name, share in zip(names, (values / values.sum(0)).reshape(*values.shape[:2], -1).mean(2), strict=True):
        term = name.partition(":")[0]
        shares[term] = shares[term] + share if term in shares else share
    return shares


def is_site(column: str) -> bool:
    """Return True if a column is the first-order variance of a site."""
    return column.startswith(f"{Dropout.name}:")


def term_of(column: str) -> str:
    """Return the name of the term that a column belongs to."""
    return column.partition(":")[0]


def compared(candidates: Sequence[Candidate], choice: str, trivial: str) -> list[str]:
    """Format candidates and their gains over the baseline as lines of text; a star marks the choice."""
    table = [["", "candidate", f"gain over {trivial}"]]
    for each in candidates:
        mark = "*" if each.name == choice else ""
        table.append([mark, each.name, f"{each.gain:+.4f} ± {each.gain_error:.4f}"])
    return aligned(table)


def aligned(cells: list[list[str]]) -> list[str]:
    """Format a table with every column as wide as its widest cell, as lines."""
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]


TYPICAL = {"floor": 0.5, "gradients": 0.2, "leverage": 0.2, "dropout": 0.1, "forest": 1.0}
"""Typical share of each term in the variance of usual rows; shares of the terms in use are normalised to sum 1."""
_OTHER = 0.2  # typical share of any other term
_TYPICAL_ROWS = 60.0  # weight of the typical shape, in rows
_STEPS = 100
_FARTHEST = 12.0  # largest departure of a coefficient, as a logarithm
_LEAST_FLOOR = 1e-4  # of the mean squared error


class Block(NamedTuple):
    """Columns that share one coefficient."""

    places: Sequence[int]  # of the columns
    share: float  # typical, of the variance
    of_forest: bool = False


@dataclass(frozen=True)
class TermFit:
    """Hold coefficients and floors of K outputs: `variance = floors + columns @ coefficients`."""

    coefficients: Tensor  # (K, J), for J columns
    floors: Tensor  # (K,)
    constants: Tensor  # mean squared errors, (K,)
    without: TermFit | None = None  # a second fit without the forest, if there is one

    def variance(self, columns: Tensor) -> Tensor:
        """Return the fitted variance `(n, K, ...)` of columns `(n, K, ..., J)`."""
        along = [-1, *[1] * (columns.dim() - 3)]
        return torch.einsum("nk...j,kj->nk...", columns, self.coefficients) + self.floors.reshape(along)


def fit_terms(
    error: Tensor,
    columns: Tensor,
    blocks: Sequence[Block],
    sizes: Tensor | None = None,
    weights: Tensor | None = None,
    *,
    worth: float | None = None,
) -> TermFit:
    """Fit the variance of errors `(n, K, ...)` by columns `(n, K, ..., J)`, with separate coefficients for each output.

    Args:
        error: target minus prediction; entries `...` of one row and output share coefficients.
        columns: values of the terms, at least 0.
        blocks: groups of columns that share a coefficient, with their typical shares.
        sizes: typical size of each column, `(K, J)`; None: its mean over these rows.
        weights: row weights, `(n,)`.
        worth: effective number of independent rows, for correlated entries or unequal weights; None: from `weights`.
    """
    errors = [each.flatten().numpy() for each in error.double().unbind(1)]
    units = [each.flatten(0, -2).numpy() for each in columns.double().unbind(1)]
    means = [each.mean(0) for each in units] if sizes is None else sizes.double().numpy()
    counts = torch.ones(len(error), dtype=torch.float64) if weights is None else weights.double()
    counts = counts.repeat_interleave(len(errors[0]) // len(error))
    counts = counts / counts.sum() * (effective_rows(counts, len(counts)) if worth is None else worth)
    fits = [_fit_one(*each, blocks, counts.numpy()) for each in zip(errors, units, means, strict=True)]
    coefficients, floors, constants = (torch.from_numpy(np.stack(part)) for part in zip(*fits, strict=True))
    fit = TermFit(coefficients, floors, constants)
    if not any(block.of_forest for block in blocks):
        return fit
    rest = [block for block in blocks if not block.of_forest]
    return replace(fit, without=fit_terms(error, columns, rest, sizes, weights, worth=worth))


def _fit_one(
    error: _Floats, columns: _Floats, sizes: _Floats, blocks: Sequence[Block], counts: _Floats
) -> tuple[_Floats, float, float]:
    """Fit one output; return coefficients `(J,)`, floor and mean squared error."""
    used = [(b, columns[:, list(b.places)].sum(1), sizes[list(b.places)].sum()) for b in blocks]
    used = [part for part in used if part[2] > 0]
    size = max(float(counts @ np.square(error) / counts.sum()), float(np.finfo(np.float64).tiny))
    units = np.stack([np.ones_like(error), *(column / mean for _, column, mean in used)], 1)
    typical = np.array([TYPICAL["floor"], *(block.share for block, _, _ in used)])
    theta = _shrunk(np.square(error) / size, units, typical / typical.sum(), counts)
    coefficients = np.zeros_like(sizes)
    for (block, _, mean), value in zip(used, theta[1:], strict=True):
        coefficients[list(block.places)] = value * size / mean
    return coefficients, max(theta[0], _LEAST_FLOOR) * size, size


def _shrunk(squares: _Floats, units: _Floats, typical: _Floats, counts: _Floats) -> _Floats:
    """Fit squared errors `(n,)` by units `(n, 1 + J)` with penalised departures; return coefficients `(1 + J,)`."""
    scale = counts @ (squares / (units @ typical)) / counts.sum()
    start = np.log(typical) + np.log(max(scale, 1e-9))
    centred = np.eye(len(typical)) - typical
    cost = _TYPICAL_ROWS / 2 * centred.T @ np.diag(typical) @ centred  # curvature of the penalty

    def objective(logs: _Floats) -> float:
        variance, off = units @ np.exp(logs), logs - start
        return float(counts @ (squares / variance + np.log(variance)) + off @ cost @ off) / 2

    logs, value = start, objective(start)
    for _ in range(_STEPS):
        theta = np.exp(logs)
        variance = units @ theta
        part = units * theta / variance[:, None]
        gradient = part.T @ (counts * (1 - squares / variance)) / 2 + cost @ (logs - start)
        curvature = part.T @ (counts[:, None] * part) / 2 + cost
        curvature += 1e-9 * curvature.diagonal().mean() * np.eye(len(theta))
        move = -np.linalg.solve(curvature, gradient)
        step = min(1.0, 3.0 / max(float(np.abs(move).max()), 1e-300))
        while step > 1e-6:
            moved = np.clip(logs + step * move, start - _FARTHEST, start + _FARTHEST)
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
    result: _Floats = np.exp(logs)
    return result


def blocks_of(term: Term, names: Sequence[str]) -> list[Block]:
    """Group the columns of a term, by position among `names`, into blocks that share a coefficient."""
    places = [i for i, name in enumerate(names) if term_of(name) == term.name]
    groups = [places] if term.is_block and places else [[place] for place in places]
    share = TYPICAL.get(term.name, _OTHER) / max(1, len(groups))
    return [Block(each, share, isinstance(term, ErrorForest)) for each in groups]

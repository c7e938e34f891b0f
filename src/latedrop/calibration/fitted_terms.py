"""Terms with their coefficients: what turns rows into variances, and how it is kept.

    fitted(x) = floor + sum_j theta_j t_j(x)

grows with the novelty of a row, see `latedrop.calibration.guard`.

The coefficients are shrunk to a typical shape. With `u_j = t_j / size_j`, columns brought to a mean of about 1, and
typical shares `w`, write

    v = s · (w_0 exp(d_0) + sum_j w_j exp(d_j) u_j).

The scale s is free. The departures d cost `k / 4 · sum_j w_j (d_j - d)^2` with `d` their mean weighted by w, as if k
rows more had the typical shape: few rows change little but the scale, many rows have their way. Fisher scoring in the
logarithms of the coefficients minimises the negative log-likelihood of the errors plus that cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, NamedTuple, NoReturn, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from latedrop.calibration.corrected_mean import Correction
from latedrop.calibration.cross_validation import Candidate, effective_rows
from latedrop.calibration.guard import Guard, finite
from latedrop.data.arrays import any_true, constants
from latedrop.errors import ArgumentError, DataError, FileError
from latedrop.records import Limits, Tagged, Via, match, record
from latedrop.streams.monitor import Usual
from latedrop.terms import (
    BatchContext,
    Dropout,
    ErrorForest,
    GradientLeverage,
    Leverage,
    Neighbours,
    Size,
    Term,
    VarianceHead,
)
from latedrop.terms.features import Features
from latedrop.terms.term import Missing
from latedrop.torch_private import being_traced

__all__ = [
    *("KINDS", "TYPICAL", "Block", "FittedTerms", "TermFit", "aligned", "blocks_of", "by_term", "checked_terms"),
    *("compared", "fit_terms", "is_site", "measured_columns", "shares_of_terms", "term_of"),
]

_Floats: TypeAlias = npt.NDArray[np.float64]
_Kind: TypeAlias = Dropout | Leverage | GradientLeverage | ErrorForest | Neighbours | Size | VarianceHead
KINDS: dict[str, type[Term]] = {kind.name: kind for kind in get_args(_Kind)}
_Stored: TypeAlias = Annotated[_Kind | Missing, Tagged("name", otherwise=Missing)]
_Amount: TypeAlias = Annotated[float, Limits(0, 1e30)]
_Amounts: TypeAlias = Annotated[tuple[_Amount, ...], Limits(1)]


@record
@dataclass(frozen=True)
class FittedTerms:
    """Terms with their coefficients.

    Attributes:
        terms: those that were measured, in use or not, and those of the guard, after they learned.
        columns: the names of what has a coefficient.
        coefficients: for each output, or once for all, one number per column.
        floors: one per output, or one for all.
        without: the coefficients and floors, those last, of a fit without the forest, for rows that no tree knows;
            empty where there is no forest.
        shares: of every column and of the floor in the variance of the validation rows, on average.
        guard: None where no features can tell how strange a row is.
        features: which features the terms and the guard look at.
        candidates: the nested models that were compared, the simplest first.
        choice: the name of the one in use.
        reference_rows: how many reference rows there were; 0 where the validation rows stood in.
        correction: of the mean; None where that was not asked for.
        usual: how novelty and shares of the validation rows are spread; None where it is not known.
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
        """Name the user's own terms alone, which a file cannot hold."""
        terms = tuple(term if type(term) in KINDS.values() else Missing(term.name) for term in self.terms)
        return replace(self, terms=terms)

    def checked(self) -> FittedTerms:
        """Check names and lengths against each other after reading."""
        names, outputs, columns = [term.name for term in self.terms], len(self.floors), list(self.columns)
        match(len(set(names)) == len(names), "terms", "terms of different names", names)
        match(len(set(columns)) == len(columns), "columns", "different columns", columns)
        match({term_of(name) for name in columns} <= set(names), "columns", f"columns of the terms {names}", columns)
        match(len(self.coefficients) == outputs, "coefficients", f"{outputs} rows, as floors", len(self.coefficients))
        match(len(self.without) in (0, outputs), "without", f"{outputs} rows, as floors", len(self.without))
        for name, rows, count in (("coefficients", self.coefficients, 0), ("without", self.without, 1)):
            for i, theta in enumerate(rows):
                wanted = f"one number for each of {columns}{' and a floor' * count}"
                match(len(theta) == len(columns) + count, f"{name}[{i}]", wanted, theta)
        match(set(self.shares) == {*columns, "floor"}, "shares", "one of every column and of the floor", [*self.shares])
        match(self.choice in [c.name for c in self.candidates], "choice", "the name of a candidate", self.choice)
        for term in self.terms:
            if isinstance(term, ErrorForest):
                match(term.grown is not None, "terms", "all that forest has learned", "nothing")
                match(set(term.beside) <= set(names), "terms", f"terms {names} beside the forest", term.beside)
            elif term.needs_features or term.needs_gradients:
                match(None not in vars(term).values(), "terms", f"all that {term.name} has learned", "nothing")
        if self.correction is not None:
            wanted_terms = {ErrorForest.name, GradientLeverage.name}
            fits = wanted_terms <= set(names) and self.guard is not None
            match(fits, "correction", f"with terms {wanted_terms}, guarded", names)
        looking = any(term.needs_features for term in self.terms)
        match(self.features is not None or not looking, "features", "the sites that terms look at", None)
        if self.guard is not None:
            learned = [term.name for term in self.terms if isinstance(term, (Leverage, GradientLeverage))]
            match(set(self.guard.terms) <= set(learned), "guard.terms", f"some of {learned}", self.guard.terms)
            for name, values in (("constants", self.guard.constants), ("centres", self.guard.centres)):
                fits = len(values) == outputs or (name == "centres" and not values)
                match(fits, f"guard.{name}", f"{outputs} numbers, as floors", values)
        return self

    @property
    def active(self) -> tuple[Term, ...]:
        """The terms that have a coefficient above 0."""
        used = {term_of(name) for name, *theta in zip(self.columns, *self.coefficients, strict=True) if any(theta)}
        return tuple(term for term in self.terms if term.name in used)

    @cached_property
    def needs_gradients(self) -> bool:
        """Whether predictions need mask gradients."""
        guard = () if self.guard is None else self.guard.terms
        looked = (*self._measured, *(self._named[name] for name in guard))
        return self._corrects or any(term.needs_gradients for term in looked)

    @cached_property
    def _corrects(self) -> bool:
        return self.correction is not None and self.correction.used

    @cached_property
    def _named(self) -> dict[str, Term]:
        return {term.name: term for term in self.terms}

    @cached_property
    def _measured(self) -> tuple[Term, ...]:
        """The terms in use, and those that a forest in use looks at."""
        active = self.active
        trees = [term for term in self.terms if isinstance(term, ErrorForest) and (self._corrects or term in active)]
        read = {name for term in trees for name in term.beside}
        return tuple(term for term in self.terms if term in active or term.name in read)

    def odds(self, sites: Sequence[str], output: int) -> list[float]:
        """The coefficient of each site's first-order variance for one index of axis 1, 0 where it has none."""
        theta = self.coefficients[output if len(self.coefficients) > 1 else 0]
        named = dict(zip(self.columns, theta, strict=True))
        return [named.get(f"{Dropout.name}:{name}", 0.0) for name in sites]

    def parts(self, rows: BatchContext) -> dict[str, Tensor]:
        """Return what each column and the floor add to the variance, `(N, ...)`; the guard multiplies their sum."""
        columns = measured_columns(self._measured, rows)
        names, values = self._weighted(columns, rows.mean, self.coefficients, self.floors)
        return dict(zip(names, values.unbind(), strict=True))

    def _weighted(
        self, columns: Mapping[str, Tensor], mean: Tensor, coefficients: Sequence[Sequence[float]], floors: Any
    ) -> tuple[list[str], Tensor]:
        """Return the names of what adds to the variance, the floor last, and how much it adds, `(parts, N, ...)`."""
        thetas = {name: theta for name, *theta in zip(self.columns, *coefficients, strict=True)}
        used = [name for name, theta in thetas.items() if any(theta) and name in columns]
        numbers = [value for name in used for value in thetas[name]]
        factors = constants((*numbers, *floors)).to(mean).reshape(len(used) + 1, 1, -1, *[1] * (mean.dim() - 2))
        factors = factors if mean.dim() > 1 else factors[..., 0]
        values = torch.stack([*(columns[name] for name in used), torch.ones_like(mean)])
        return [*used, "floor"], values * factors

    def predicted(self, rows: BatchContext) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Tensor] | None]:
        """Mean, variance `(N, ...)`; how novel each row is, `(N,)`, where there is a guard; shares, but not of maps."""
        columns, mean = measured_columns(self._measured, rows), rows.mean
        names, values = self._weighted(columns, mean, self.coefficients, self.floors)
        total = values.sum(0)
        shares = shares_of_terms(names, values) if total.dim() < 3 else None
        if self.guard is None:
            return mean, total, None, shares
        novelty, without = self.guard.novelty(rows, self._named), None
        # Another device would be waited for; the variance of usual rows alone is what it is.
        usual = novelty.is_cpu and not being_traced() and not bool((novelty > 1).any())
        if self.without and not usual:
            theta, floors = [row[:-1] for row in self.without], tuple(row[-1] for row in self.without)
            without = self._weighted(columns, mean, theta, floors)[1].sum(0)
        if self.correction is not None and self._corrects:
            forest, metric = self._named[ErrorForest.name], self._named[GradientLeverage.name]
            assert isinstance(forest, ErrorForest)
            assert isinstance(metric, GradientLeverage)
            added = self.correction.values(forest.numbers(rows), metric.directions(rows.gradients))  # of usual rows
            mean = mean + (added / novelty.clamp_min(1)[:, None]).to(mean).reshape(mean.shape)
        variance = total if usual else self.guard.grown(total, novelty, mean, without)
        return mean, variance, finite(novelty), shares

    def lines(self) -> list[str]:
        """The candidates, and the share of every column, as lines of text."""
        rows = f"{self.reference_rows} reference rows" if self.reference_rows else "validation rows as reference"
        lines = [f"variance: {self.choice} ({rows})"]
        lines += [] if self.correction is None else [f"corrected mean: {self.correction}"]
        return [*lines, *compared(self.candidates, self.choice, "a constant"), *aligned(self.table())]

    def table(self) -> list[list[str]]:
        """Every column and the floor with their coefficients and shares of the variance, as text, header first."""
        values = [*zip(*self.coefficients, strict=True), self.floors]
        cells = [
            [name, ", ".join(f"{value:.4g}" for value in each), f"{self.shares[name]:.1%}"]
            for name, each in zip([*self.columns, "floor"], values, strict=True)
        ]
        return [["term", "coefficient", "share of variance"], *cells]

    def with_terms(self, given: Sequence[Term], path: object) -> FittedTerms:
        """Put the user's own terms, which a file cannot hold, in their places."""
        named = {term.name: term for term in checked_terms(given)}
        absent = [term.name for term in self.terms if isinstance(term, Missing) and term.name not in named]
        if absent:
            raise FileError(
                f"expected terms= with {absent}, which {path} was made with and a file cannot hold. Pass the same "
                "terms to load()."
            )
        return replace(self, terms=tuple(named.get(t.name, t) if isinstance(t, Missing) else t for t in self.terms))


def checked_terms(terms: Any) -> tuple[Term, ...]:
    """Terms from names or objects, or `ArgumentError`."""
    if isinstance(terms, (str, Term)) or not isinstance(terms, Iterable):
        terms = (terms,)
    chosen: list[Term] = []
    for item in terms:
        if isinstance(item, str) and item in KINDS:
            try:
                chosen.append(KINDS[item]())
            except TypeError as error:
                raise ArgumentError(
                    f"expected latedrop.terms.{KINDS[item].__name__}(...), as term {item!r} has to be told what to "
                    "read; found its name alone."
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
    """The columns of all terms in the shape of the mean `(N, ...)`; refused where below 0 or not finite."""
    measured: dict[str, Tensor] = {}
    for term in terms:
        columns = {f"{term.name}:{part}" if part else term.name: value for part, value in term.columns(rows).items()}
        columns = {name: _as_column(name, value, rows.mean) for name, value in columns.items()}
        values = torch.stack([*columns.values()])
        if any_true(~(torch.isfinite(values) & (values >= 0))):  # a device is waited for once
            _refuse_unsound(columns)
        rows.totals[term.name] = values.sum(0) if len(columns) > 1 else values[0]  # for terms that look at others
        measured |= columns
    return measured


def _as_column(name: str, value: Any, mean: Tensor) -> Tensor:
    """Return what a term gives in the shape of the mean; `DataError` where it is of another one."""
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


def _refuse_unsound(columns: Mapping[str, Tensor]) -> NoReturn:
    name, value = next((n, v) for n, v in columns.items() if bool((~(torch.isfinite(v) & (v >= 0))).any()))
    infinite = value.isfinite().logical_not().reshape(len(value), -1).any(1)
    raise DataError(
        f"expected term {name!r} to be finite and not below 0; found other values.",
        rows=None if any_true(value < 0) else infinite,
    )


def shares_of_terms(names: Sequence[str], values: Tensor) -> dict[str, Tensor]:
    """Return each term's share of the variance of every row, `(N,)`, from what its columns add; the mean over outputs.

    Args:
        names: of the columns.
        values: `(columns, N, ...)`.
    """
    each = (values / values.sum(0)).reshape(*values.shape[:2], -1).mean(2)
    return by_term(dict(zip(names, each.unbind(), strict=True)))


def by_term(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sum the columns of each term."""
    by_term: dict[str, list[Tensor]] = {}
    for name, column in columns.items():
        by_term.setdefault(term_of(name), []).append(column)
    return {name: torch.stack(each).sum(0) if len(each) > 1 else each[0] for name, each in by_term.items()}


def is_site(column: str) -> bool:
    """Whether a column is the first-order variance of a site."""
    return column.startswith(f"{Dropout.name}:")


def term_of(column: str) -> str:
    """The name of the term that a column belongs to."""
    return column.partition(":")[0]


def compared(candidates: Sequence[Candidate], choice: str, trivial: str) -> list[str]:
    """Candidates and their gains over the trivial answer, as lines of text; a star marks the choice."""
    table = [["", "candidate", f"gain over {trivial}"]]
    for each in candidates:
        mark = "*" if each.name == choice else ""
        table.append([mark, each.name, f"{each.gain:+.4f} ± {each.gain_error:.4f}"])
    return aligned(table)


def aligned(cells: list[list[str]]) -> list[str]:
    """Lines with every column as wide as its widest cell."""
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]


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
    """Return coefficients `(J,)`, floor and mean squared error of one output."""
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
    """Return the coefficients `(1 + J,)` of units `(n, 1 + J)` that fit squares best, at a price for departures."""
    scale = counts @ (squares / (units @ typical)) / counts.sum()
    start = np.log(typical) + np.log(max(scale, 1e-9))
    centred = np.eye(len(typical)) - typical
    cost = _TYPICAL_ROWS / 2 * centred.T @ np.diag(typical) @ centred  # curvature of the price

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
    """The places of a term's columns among those of these names, those that share a coefficient together."""
    places = [i for i, name in enumerate(names) if term_of(name) == term.name]
    together = [places] if term.is_block and places else [[place] for place in places]
    share = TYPICAL.get(term.name, _OTHER) / max(1, len(together))
    return [Block(each, share, isinstance(term, ErrorForest)) for each in together]

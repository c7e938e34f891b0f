"""Tell strange rows from usual ones by scores of a calibrated model, with a p-value for each row.

Scores, all large for strange rows: `novelty` (leverage of the features), `neighbours` (mean squared distance to the
nearest usual rows); for classes also `entropy`, `confidence` (one minus the largest probability), `energy` and
`mutual_information`; for numbers `std`.

With `s` the score of a new row and `u_1, ..., u_n` those of rows known to be usual,

    p = (1 + #{i: u_i >= s}) / (n + 1),

where scores that differ by rounding alone are equal: the same row has other last bits in another batch. If the row is
exchangeable with those, `P(p <= a) <= a`: whoever raises an alarm where `p <= a` has at most that share of false ones
(conformal p-values; Vovk et al. 2005, Bates et al. 2023, "Testing for outliers with conformal p-values").

Several scores are put on one scale, `q = normal quantile of the score's rank among usual rows`. Their combination is
the largest `q`: a row is strange if any score says so. Ranks come from other usual rows than p-values do.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeAlias

import torch
from torch import Tensor

from latedrop.calibration.class_record import ClassCalibration
from latedrop.calibration.record import Calibration
from latedrop.errors import ArgumentError, DataError, FileError
from latedrop.records import Format, Via, match, record
from latedrop.stored_tensors import StoredTensor, inline
from latedrop.terms import BatchContext, Neighbours
from latedrop.terms.features import Features

__all__ = ["COMBINED", "DETECTOR", "Combination", "Detection", "Detector", "detector", "p_values"]

COMBINED = "combined"
"""The name of the combination of scores."""
_NEAR = "neighbours"
_FEWEST = 20  # usual rows
_ROUNDING = 1e-5  # of a score: what is less is the arithmetic of batches, not the row
_RATE = 0.1  # of the dropout that gives mutual information where the calibration has none
_FREE = {True: ("entropy", "confidence", "energy"), False: ("std",)}  # scores that cost nothing, of classes and numbers
_COSTLY = {True: ("mutual_information", _NEAR), False: (_NEAR,)}


def _rising(values: Tensor) -> Tensor:
    match(values.dim() == 1 and len(values) > 0, "shape", "(n,)", tuple(values.shape))
    match(not bool((values.diff() < 0).any()), "data", "numbers in rising order", "others")
    return values


Rising: TypeAlias = Annotated[Tensor, Via(StoredTensor, _rising)]
"""Scores `(n,)` in rising order."""


def p_values(usual: Tensor, scores: Tensor) -> Tensor:
    """Return p-values `(N,)` of scores `(N,)` against `usual` `(n,)` in rising order.

    >>> p_values(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 2.0, 9.0]))
    tensor([1.0000, 0.7500, 0.2500], dtype=torch.float64)
    """
    s = scores.to(usual)
    below = torch.searchsorted(usual.contiguous(), (s - _rounding(usual, s)).contiguous())
    return (1 + len(usual) - below).double() / (len(usual) + 1)


def _rounding(usual: Tensor, scores: Tensor) -> Tensor:
    """Return by how much equal scores may differ, `(N,)`."""
    return _ROUNDING * torch.maximum(scores.abs().clamp_max(1e30), usual.abs().median())


@record
@dataclass(frozen=True)
class Combination:
    """Combine several scores into one, the largest."""

    usual: dict[str, Rising] = field(repr=False)  # of every score, those of usual rows in rising order, `(n,)`
    weights: None = None  # always None; files have this field

    def __call__(self, scores: Mapping[str, Tensor]) -> Tensor:
        """Return the largest normal quantile of a row's ranks, `(N,)`; beyond all usual rows it grows on slowly."""
        columns = []
        for name, usual in self.usual.items():
            s = scores[name].double().contiguous()
            off = _rounding(usual, s)
            rank = torch.searchsorted(usual, s - off) + torch.searchsorted(usual, s + off, right=True)
            q = torch.special.ndtri((rank / 2 + 0.5) / (len(usual) + 1))
            far = (s - off - usual[-1]).clamp_min(0) / (usual[-1] - usual.median()).clamp_min(1e-12)
            columns.append(q + torch.log1p(far))
        return torch.stack(columns, 1).amax(1)


@dataclass(frozen=True)
class Detection:
    """How strange rows are.

    Attributes:
        scores: of each row by name, `(N,)` each, large for strange rows.
        p_values: of each row by name: `P(p <= a) <= a` for rows like the usual ones.
        rows: how many usual rows the p-values come from.
    """

    scores: dict[str, Tensor]
    p_values: dict[str, Tensor]
    rows: int

    @property
    def p_value(self) -> Tensor:
        """`(N,)`, that of the combination, or of the only score."""
        return self.p_values[COMBINED if COMBINED in self.p_values else next(iter(self.p_values))]

    def strange(self, alarm: float = 0.05, score: str | None = None) -> Tensor:
        """`(N,)`, True for strange rows; of rows like the usual ones at most the share `alarm` are called so."""
        if type(alarm) not in (int, float) or not 1 / (self.rows + 1) <= alarm < 1:
            raise ArgumentError(
                f"expected a rate of false alarms from {1 / (self.rows + 1):.2g}, as there were {self.rows} usual "
                f"rows, to 1; found {alarm!r}. Pass more rows to detector()."
            )
        if score is not None and score not in self.p_values:
            raise ArgumentError(f"expected a score among {', '.join(self.p_values)}; found {score!r}.")
        return (self.p_value if score is None else self.p_values[score]) <= alarm

    def __repr__(self) -> str:
        return f"Detection of {len(self)} rows by {', '.join(self.scores)}, beside {self.rows} usual rows"

    def __len__(self) -> int:
        return len(self.p_value)


@record
@dataclass(frozen=True)
class UsualRows:
    """Hold the scores of usual rows: the contents of a detector's file."""

    fingerprint: str  # of the model's weights
    calibration: str  # a mark of the calibration
    names: tuple[str, ...]  # of the scores
    usual: dict[str, Rising] = field(repr=False)  # of every score, and of the combination
    combination: Combination | None = None  # None where there is one score
    neighbours: Neighbours | None = field(default=None, repr=False)  # None where not asked for

    def checked(self) -> UsualRows:
        """Check names against each other after reading."""
        names, combined = set(self.names), self.combination
        match(len(names) == len(self.names) > 0, "names", "different scores", self.names)
        match((combined is not None) == (len(names) > 1), "combination", "there with several scores", combined)
        wanted = names if combined is None else names | {COMBINED}
        match(set(self.usual) == wanted, "usual", f"those of {sorted(wanted)}", [*self.usual])
        match(len({*map(len, self.usual.values())}) == 1, "usual", "as many rows of each score", "others")
        same = combined is None or set(combined.usual) == names
        match(same, "combination.usual", f"those of {sorted(names)}", "others")
        near = self.neighbours
        match((near is not None) == (_NEAR in names), _NEAR, "there with that score, and only then", near)
        match(near is None or near.points is not None, f"{_NEAR}.points", "what it has learned", None)
        return self

    def scored(self, measured: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return all scores of rows from those that were measured; of neighbours these are features."""
        scores = dict(measured)
        if self.neighbours is not None:
            scores[_NEAR] = self.neighbours.distances(scores[_NEAR], None).double()
        return scores if self.combination is None else {**scores, COMBINED: self.combination(scores)}


DETECTOR = Format(UsualRows, "latedrop-detector", "a detector", "Make it again with detector().", "detector")


@dataclass(frozen=True)
class Detector:
    """Tells strange rows by scores of a calibrated model; `uq.detector(...)` makes it.

    Attributes:
        uq: the calibrated model.
        known: the scores of usual rows.
    """

    uq: Any
    known: UsualRows

    @property
    def rows(self) -> int:
        """How many usual rows p-values come from."""
        return len(next(iter(self.known.usual.values())))

    def __call__(self, x: Any) -> Detection:
        """Return scores and p-values of N rows, of a `DataLoader` or of a data set."""
        scores = self.known.scored(_measured(self.uq, x, self.known.names))
        return Detection(scores, {name: p_values(self.known.usual[name], s) for name, s in scores.items()}, self.rows)

    def __repr__(self) -> str:
        return f"Detector by {', '.join(self.known.names)}, beside {self.rows} usual rows"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the detector as JSON; the calibration has a file of its own."""
        DETECTOR.write(path, self.known, inline)

    @classmethod
    def load(cls, path: str | os.PathLike[str], uq: Any) -> Detector:
        """Bring a saved detector back to its calibrated model."""
        known, c = DETECTOR.read(path), uq.calibration
        same_model = known.fingerprint == c.fingerprint
        if not same_model or known.calibration != _mark(c):
            raise FileError(
                f"{path}: expected the {'calibration' if same_model else 'model'} that the detector was made with; "
                f"found another. {DETECTOR.again}"
            )
        return cls(uq, known)


def detector(uq: Any, usual: Any, scores: Sequence[str] | None = None, *, seed: int = 0) -> Detector:
    """Tell rows that are unlike those of `usual`, with p-values: a threshold then has a rate of false alarms.

    Args:
        uq: a calibrated model.
        usual: inputs known to be usual, a `DataLoader`, a data set, or an iterator of batches of inputs. Rows used for
            nothing else make p-values exact; with validation rows they are nearly so. With several scores one half, at
            random, puts them on one scale, the other gives the p-values.
        scores: names; by default `"novelty"` and what costs nothing more: `"entropy"`, `"confidence"` and `"energy"`
            for classes, `"std"` for numbers. Also `"neighbours"` (needs scipy), and for classes `"mutual_information"`.
        seed: fixes the halves.
    """
    names, c = _checked(uq.calibration, scores), uq.calibration
    measured = _measured(uq, usual, names)
    rows = len(next(iter(measured.values())))
    if rows < _FEWEST:
        raise DataError(f"expected at least {_FEWEST} usual rows for a detector, and better a thousand; found {rows}.")
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    half = rows // 2 if len(names) > 1 or _NEAR in names else 0
    fitting, judging = ({k: v[part] for k, v in measured.items()} for part in (order[:half], order[half:]))
    near = combination = None
    if _NEAR in names:
        near = Neighbours().learned_from([fitting[_NEAR]], own=False)
        apart = replace(near, own=True)  # a row is not its own neighbour
        fitting[_NEAR] = apart.distances(fitting[_NEAR], torch.arange(half)).double()
    if len(names) > 1:
        combination = Combination({name: values.sort().values for name, values in fitting.items()})
    known = UsualRows(c.fingerprint, _mark(c), names, {}, combination, near)
    scored = known.scored(judging)
    return Detector(uq, replace(known, usual={name: values.sort().values for name, values in scored.items()}))


def _measured(uq: Any, x: Any, names: Sequence[str]) -> dict[str, Tensor]:
    """Return scores `(N,)` by name, in double precision on the CPU; of neighbours the features `(N, F)`."""
    parts: list[dict[str, Tensor]] = []
    for rows in uq.batches(x):
        scores = _scores(uq, rows, names)
        parts.append({name: scores[name].detach().cpu() for name in names})  # no batch stays on a GPU
    if not parts:
        raise DataError("expected at least one row to score; found none.")
    joined = {name: torch.cat([part[name] for part in parts]) for name in names}
    return {name: values if name == _NEAR else values.double() for name, values in joined.items()}


def _scores(uq: Any, x: Any, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the scores of one batch, and features where neighbours are asked for."""
    c = uq.calibration
    if isinstance(c, ClassCalibration):
        p = uq.predict(x, rate=_RATE) if "mutual_information" in names and c.rate is None else uq.predict(x)
        scores = {"entropy": p.entropy, "confidence": 1 - p.confidence, "energy": p.energy}
        scores |= {} if p.mutual_information is None else {"mutual_information": p.mutual_information}
        if c.maps:  # an image is as strange as its pixels are on average
            scores = {name: values.flatten(1).mean(1) for name, values in scores.items()}
    else:
        p = uq.predict(x)
        scores = {"std": p.variance.flatten(1).clamp_min(1e-300).log().mean(1) / 2}  # of outputs of any unit
    scores |= {} if p.novelty is None else {"novelty": p.novelty}
    if _NEAR in names:
        fitted = c.features if isinstance(c, ClassCalibration) else c.terms and c.terms.features
        features = fitted or Features.all(c.sites)
        if features is None:
            raise ArgumentError(f"expected a model with features to compare for {_NEAR!r}; found none. Leave it out.")
        scores[_NEAR] = BatchContext(uq.network, x, c.sites, uq.readout, features).features
    return scores


def _checked(c: Calibration | ClassCalibration, scores: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of scores, by default of those that cost nothing; `ArgumentError` for others."""
    classes = isinstance(c, ClassCalibration)
    guarded = c.guard is not None if isinstance(c, ClassCalibration) else c.terms is not None and c.terms.guard
    free = (*(("novelty",) if guarded else ()), *_FREE[classes])
    names, possible = tuple(free if scores is None else scores), (*free, *_COSTLY[classes])
    if isinstance(scores, str) or not names or len(set(names)) < len(names) or not set(names) <= set(possible):
        raise ArgumentError(f"expected different scores among {', '.join(possible)}; found {scores!r}.")
    return names


def _mark(calibration: Calibration | ClassCalibration) -> str:
    """Return a digest of what scores depend on besides the weights: not on intervals, sets or a scale for these."""
    if isinstance(calibration, ClassCalibration):
        limits = None if calibration.guard is None else calibration.guard.limits
        facts: tuple[Any, ...] = (calibration.fit, limits, calibration.rate, calibration.draws)
    elif calibration.terms is not None:
        terms, guard = calibration.terms, calibration.terms.guard
        facts = (terms.columns, terms.coefficients, terms.floors, None if guard is None else guard.limits)
    else:
        facts = (calibration.method, calibration.rate, calibration.draws)
    return hashlib.sha256(repr(facts).encode()).hexdigest()

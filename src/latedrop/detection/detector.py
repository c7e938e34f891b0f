"""Telling strange rows from usual ones by scores of a calibrated model, with a p-value for each row.

Scores, all large for strange rows: `novelty` (leverage of the features), `neighbours` (mean squared distance to the
nearest usual rows), `sites` (one for every site: its first-order variance); for classes also `entropy`, `confidence`
(one minus the largest probability), `energy` and `mutual_information`; for numbers `std`.

With `s` the score of a new row, large for strange ones, and `u_1, ..., u_n` those of rows known to be usual,

    p = (1 + #{i: u_i >= s}) / (n + 1),

where scores that differ by rounding alone are equal: the same row has other last bits in another batch. If the row is
exchangeable with those, `P(p <= a) <= a`: whoever raises an alarm where `p <= a` has at most that share of false ones
(conformal p-values; Vovk et al. 2005, Bates et al. 2023, "Testing for outliers with conformal p-values").

Several scores are put on one scale, `q = normal quantile of the score's rank among usual rows`. Their combination is
the largest `q`: a row is strange if any score says so. Where strange rows are known it is a sum with weights
`w = S^-1 d`, none below 0, with `S` the mean of the covariances of `q` over usual and over strange rows, and `d` how
far their means are apart (Fisher 1936). Ranks and weights come from other usual rows than p-values do.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeAlias

import torch
from torch import Tensor

from latedrop.calibration.class_record import ClassCalibration
from latedrop.calibration.record import Calibration
from latedrop.calibration.targets import as_logits
from latedrop.data.arrays import place
from latedrop.data.batches import row_batches
from latedrop.data.datasets import inputs_in, is_loader
from latedrop.data.names import in_order
from latedrop.data.rows import as_items
from latedrop.dropout.first_order import linearize
from latedrop.errors import ArgumentError, DataError, FileError
from latedrop.metrics import auroc
from latedrop.metrics.classes import aupr, fpr_at
from latedrop.network.network import part_of
from latedrop.network.sites import Sites
from latedrop.records import Format, Limits, Via, match, record
from latedrop.stored_tensors import StoredTensor, inline
from latedrop.terms import Neighbours
from latedrop.terms.features import Features
from latedrop.terms.term import BatchContext

__all__ = ["COMBINED", "Combination", "Detection", "Detector", "DetectorScores", "Rising", "detector", "p_values"]

COMBINED = "combined"
"""The name of the combination of scores."""
_SHRINK = 0.1
_LEAST = 20  # usual rows
_ROUNDING = 1e-5  # of a score: what is less is the arithmetic of batches, not the row
_RATE = 0.1
_CLASSES = ("novelty", "entropy", "confidence", "energy", "mutual_information", "neighbours", "sites")
_NUMBERS = ("novelty", "std", "neighbours", "sites")
_MOST = 16  # classes whose logits are looked at, the likeliest ones
_COSTLY = ("mutual_information", "neighbours", "sites")


def _rising(values: Tensor) -> Tensor:
    match(values.dim() == 1 and len(values) > 0, "shape", "(n,)", tuple(values.shape))
    match(not bool((values.diff() < 0).any()), "data", "numbers in rising order", "others")
    return values


Rising: TypeAlias = Annotated[Tensor, Via(StoredTensor, _rising)]
"""Scores `(n,)` in rising order."""


def p_values(usual: Tensor, scores: Tensor) -> Tensor:
    """`(N,)` for scores `(N,)`, against `usual` `(n,)` in rising order.

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
    """Several scores as one.

    Attributes:
        usual: of every score, those of usual rows in rising order, `(n,)`.
        weights: of every score, none below 0; they sum to 1. None: the largest counts.
    """

    usual: dict[str, Rising] = field(repr=False)
    weights: dict[str, Annotated[float, Limits(0)]] | None = None

    def checked(self) -> Combination:
        """Check names against each other after reading."""
        match(
            self.weights is None or set(self.weights) == set(self.usual), "weights", "those of its scores", self.weights
        )
        return self

    @classmethod
    def fit(cls, usual: Mapping[str, Tensor], strange: Mapping[str, Tensor] | None = None) -> Combination:
        """Fit to scores of usual rows, and of strange ones where some are known."""
        largest = cls({name: values.double().sort().values for name, values in usual.items()})
        if strange is None:
            return largest
        q, far = largest.places(usual), largest.places(strange)
        if len(far) < 2:
            raise DataError(f"expected at least 2 strange rows to fit a combination to; found {len(far)}.")
        spread = (1 - _SHRINK) * (torch.cov(q.T) + torch.cov(far.T)) / 2 + _SHRINK * torch.eye(q.shape[1])
        weights = torch.linalg.solve(spread, far.mean(0) - q.mean(0)).clamp_min(0)
        if not float(weights.sum()) > 0:  # strange rows score lower than usual ones
            return largest
        return cls(largest.usual, dict(zip(usual, (weights / weights.sum()).tolist(), strict=True)))

    def places(self, scores: Mapping[str, Tensor]) -> Tensor:
        """Return the normal quantile of each score's rank, `(N, scores)`; beyond all usual rows it grows on slowly."""
        columns = []
        for name, usual in self.usual.items():
            s = scores[name].double().contiguous()
            off = _rounding(usual, s)
            rank = torch.searchsorted(usual, s - off) + torch.searchsorted(usual, s + off, right=True)
            q = torch.special.ndtri((rank / 2 + 0.5) / (len(usual) + 1))
            far = (s - off - usual[-1]).clamp_min(0) / (usual[-1] - usual.median()).clamp_min(1e-12)
            columns.append(q + torch.log1p(far))
        return torch.stack(columns, 1)

    def __call__(self, scores: Mapping[str, Tensor]) -> Tensor:
        """The combined score, `(N,)`."""
        q = self.places(scores)
        if self.weights is None:
            return q.amax(1)
        return q @ torch.tensor([self.weights[name] for name in self.usual], dtype=torch.float64)


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


@dataclass(frozen=True)
class DetectorScores:
    """How well a score tells rows apart that are known to be usual or strange.

    Attributes:
        score: its name.
        auroc: the probability that a strange row has the larger score.
        fpr95: share of usual rows called strange by the threshold that finds 95 % of the strange ones.
        aupr: average precision.
        false_alarms: share of usual rows with a p-value up to 0.05.
        found: share of strange rows with one.
    """

    score: str
    auroc: float
    fpr95: float
    aupr: float
    false_alarms: float
    found: float

    def __str__(self) -> str:
        return (
            f"{self.score}: AUROC {self.auroc:.3f}, FPR95 {self.fpr95:.1%}; alarms at p <= 0.05: "
            f"{self.false_alarms:.1%} of usual rows, {self.found:.1%} of strange ones"
        )


@dataclass(frozen=True)
class Detector:
    """Tells strange rows by scores of a calibrated model; `uq.detector(...)` makes it.

    Attributes:
        uq: the calibrated model.
        names: of the scores, one for every site where sites were asked for.
        usual: of every score, and of the combination, those of usual rows in rising order.
        combination: None where there is one score.
        neighbours: what has learned where usual rows lie; None where it was not asked for.
    """

    uq: Any
    names: tuple[str, ...]
    usual: dict[str, Tensor] = field(repr=False)
    combination: Combination | None = None
    neighbours: Neighbours | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        rows = len(next(iter(self.usual.values()), ()))
        return f"Detector by {', '.join(self.names)}, beside {rows} usual rows"

    def __call__(self, x: Any) -> Detection:
        """Scores and p-values of N rows, of a `DataLoader` or of a data set."""
        scores = self._scores(*measured(self.uq, x, self.names))
        rows = len(next(iter(self.usual.values())))
        return Detection(scores, {name: p_values(self.usual[name], s) for name, s in scores.items()}, rows)

    def _scores(self, scores: dict[str, Tensor], features: Tensor | None) -> dict[str, Tensor]:
        """Return the scores that were measured with those of neighbours and of the combination."""
        scores = _with_distances(self.neighbours, scores, features)
        return scores if self.combination is None else {**scores, COMBINED: self.combination(scores)}

    def evaluate(self, usual: Any, strange: Any) -> tuple[DetectorScores, ...]:
        """Score it by AUROC, FPR95 and more on rows known to be usual and rows known to be strange.

        Neither should have served the detector.
        """
        inside, outside = self(usual), self(strange)
        results = []
        for name, low in inside.scores.items():
            high = outside.scores[name]
            rates = [float((part.p_values[name] <= 0.05).double().mean()) for part in (inside, outside)]
            area = auroc(torch.cat([low, high]), torch.arange(len(low) + len(high)) >= len(low))
            results.append(DetectorScores(name, float(area), float(fpr_at(high, low)), float(aupr(high, low)), *rates))
        return tuple(results)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the detector as JSON; the calibration has a file of its own."""
        c = self.uq.calibration
        stored = StoredDetector(c.fingerprint, _mark(c), self.names, self.usual, self.combination, self.neighbours)
        DETECTOR.write(path, stored, inline)

    @classmethod
    def load(cls, path: str | os.PathLike[str], uq: Any) -> Detector:
        """Bring a saved detector back to its calibrated model."""
        stored = DETECTOR.read(path)
        for name, there in (("fingerprint", uq.calibration.fingerprint), ("calibration", _mark(uq.calibration))):
            if getattr(stored, name) != there:
                what = "model" if name == "fingerprint" else "calibration"
                raise FileError(
                    f"{path}: expected the {what} that the detector was made with; found another. {DETECTOR.again}"
                )
        return cls(uq, stored.names, stored.usual, stored.combination, stored.neighbours)


@record
@dataclass(frozen=True)
class StoredDetector:
    """A detector in a file: that of one calibrated model, which has a file of its own; see `Detector`.

    Attributes:
        fingerprint: of the model's weights.
        calibration: a mark of the calibration.
    """

    fingerprint: str
    calibration: str
    names: tuple[str, ...]
    usual: dict[str, Rising]
    combination: Combination | None
    neighbours: Neighbours | None

    def checked(self) -> StoredDetector:
        """Check names against each other after reading."""
        names, combined = set(self.names), self.combination
        match(len(names) == len(self.names) > 0, "names", "different scores", self.names)
        match((combined is not None) == (len(names) > 1), "combination", "there with several scores", combined)
        wanted = names if combined is None else names | {COMBINED}
        match(set(self.usual) == wanted, "usual", f"those of {sorted(wanted)}", [*self.usual])
        match(
            len({len(values) for values in self.usual.values()}) == 1, "usual", "as many rows of each score", "others"
        )
        match(
            combined is None or set(combined.usual) == names, "combination.usual", f"those of {sorted(names)}", "others"
        )
        near = self.neighbours
        match((near is not None) == ("neighbours" in names), "neighbours", "there with that score, and only then", near)
        match(near is None or near.points is not None, "neighbours.points", "what it has learned", None)
        return self


DETECTOR = Format(StoredDetector, "latedrop-detector", "a detector", "Make it again with detector().", "detector")


def detector(
    uq: Any, usual: Any, scores: Sequence[str] | None = None, *, strange: Any = None, seed: int = 0
) -> Detector:
    """Make a `Detector` from rows known to be usual; see `Calibrated.detector`."""
    names = _checked(uq, scores)
    measures, features = measured(uq, usual, names)
    rows = len(next(iter(measures.values()))) if measures else len(features if features is not None else ())
    if rows < _LEAST:
        raise DataError(f"expected at least {_LEAST} usual rows for a detector, and better a thousand; found {rows}.")
    several = len(names) > 1
    if strange is not None and not several:
        raise ArgumentError("expected several scores to combine with strange=; found one. Leave strange= out.")
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    half = rows // 2 if several or features is not None else 0
    fitting, judging = order[:half], order[half:]
    near = combination = None
    if features is not None:
        near = Neighbours().learned_from([features[fitting]], own=False)
    if several:
        usual_scores = {name: values[fitting] for name, values in measures.items()}
        if features is not None:  # a row is not its own neighbour
            apart = Neighbours().learned_from([features[fitting]], own=True)
            usual_scores["neighbours"] = apart.distances(features[fitting], torch.arange(half)).double()
        outside = None if strange is None else _with_distances(near, *measured(uq, strange, names))
        combination = Combination.fit(usual_scores, outside)
    made = Detector(uq, names, {}, combination, near)
    rest = {name: values[judging] for name, values in measures.items()}
    final = made._scores(rest, None if features is None else features[judging])
    return replace(made, usual={name: values.sort().values for name, values in final.items()})


def measured(uq: Any, x: Any, names: Sequence[str]) -> tuple[dict[str, Tensor], Tensor | None]:
    """Return scores by name, in double precision on the CPU; and features where neighbours are asked for."""
    scores: dict[str, list[Tensor]] = {}
    features: list[Tensor] = []
    looked = _features(uq) if "neighbours" in names else None
    for part in _batches(uq, x):
        for name, values in _scores(uq, part, names).items():
            scores.setdefault(name, []).append(values.detach().double().cpu())
        if looked is not None:
            rows = BatchContext(uq.network, part, uq.calibration.sites, uq.readout, looked)
            features.append(rows.features.cpu())
    if not scores and not features:
        raise DataError("expected at least one row to score; found none.")
    joined = {name: torch.cat(parts) for name, parts in scores.items()}
    return joined, torch.cat(features) if features else None


def _batches(uq: Any, x: Any) -> Iterator[Any]:
    several = isinstance(x, Iterator) or (is_loader(x) and uq.collate is None)
    for part in inputs_in(x, uq.model, uq.batch_size, None, uq.collate) if several else [x]:
        items = as_items(in_order(part, uq.calibration.columns), uq.collate, uq.calibration.sites)
        placed = place(items, uq.model, cut=True)
        yield from row_batches(placed, uq.batch_size)


def _scores(uq: Any, x: Any, names: Sequence[str]) -> dict[str, Tensor]:
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
    if any(name.startswith("site:") for name in names):
        by_site = _site_variances(uq, x, c.sites)
        scores |= {f"site:{site.name}": by_site[:, i] for i, site in enumerate(c.sites)}
    return {name: scores[name] for name in names if name in scores}


def _site_variances(uq: Any, x: Any, sites: Sites) -> Tensor:
    """Return `(N, sites)`, to first order: summed over outputs, or over logits less their mean."""

    def centred(output: Any) -> Tensor:
        logits = as_logits(part_of(output, uq.readout))
        logits = logits if logits.shape[1] <= _MOST else logits.topk(_MOST, 1).values
        return logits - logits.mean(1, keepdim=True)

    readout = centred if isinstance(uq.calibration, ClassCalibration) else uq.readout
    return linearize(uq.network, x, sites, readout).variance_by_site.sum(1)


def _features(uq: Any) -> Features:
    c: Calibration | ClassCalibration = uq.calibration
    fitted = c.features if isinstance(c, ClassCalibration) else c.terms and c.terms.features
    features = fitted or Features.all(c.sites)
    if features is None:
        raise ArgumentError("expected a model with features to compare for 'neighbours'; found none. Leave it out.")
    return features


def _with_distances(near: Neighbours | None, scores: dict[str, Tensor], features: Tensor | None) -> dict[str, Tensor]:
    if near is None or features is None:
        return scores
    return {**scores, "neighbours": near.distances(features, None).double()}


def _checked(uq: Any, scores: Sequence[str] | None) -> tuple[str, ...]:
    c = uq.calibration
    classes = isinstance(c, ClassCalibration)
    known = list(_CLASSES if classes else _NUMBERS)
    strange = c.guard is not None if classes else c.terms is not None and c.terms.guard is not None
    if not strange:
        known.remove("novelty")
    if isinstance(c, ClassCalibration) and c.maps:  # a backward pass for every pixel
        known.remove("sites")
    names = [name for name in known if name not in _COSTLY] if scores is None else list(scores)
    if isinstance(scores, str) or not names or len(set(names)) < len(names) or not set(names) <= set(known):
        raise ArgumentError(f"expected different scores among {', '.join(known)}; found {scores!r}.")
    sites = [f"site:{site.name}" for site in c.sites]
    return tuple(each for name in names for each in (sites if name == "sites" else [name]))


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

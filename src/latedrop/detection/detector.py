"""Whether rows are unlike those that a model was calibrated on: scores of a calibrated model, with p-values.

Scores, all large for strange rows: `novelty` (leverage of the features), `neighbours` (mean squared distance to the
nearest usual rows), `sites` (one for every site: its first-order variance); for classes also `entropy`, `confidence`
(one minus the largest probability), `energy` and `mutual_information`; for numbers `std`. `detection` has the rest.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from latedrop.calibration.class_record import ClassCalibration
from latedrop.calibration.labels import as_logits
from latedrop.calibration.record import Calibration
from latedrop.data.arrays import place
from latedrop.data.batches import row_batches
from latedrop.data.datasets import inputs_in, is_loader
from latedrop.data.names import in_order
from latedrop.data.rows import Collate, as_items
from latedrop.detection.detection import (
    COMBINED,
    Combination,
    Detection,
    DetectorScores,
    Rising,
    check_usual,
    p_values,
    separation,
)
from latedrop.dropout.first_order import linearize
from latedrop.errors import ArgumentError, DataError, FileError
from latedrop.network.calling import Readout, part_of
from latedrop.network.network import Network
from latedrop.network.sites import Sites
from latedrop.records import Format, match, record
from latedrop.stored_tensors import inline
from latedrop.terms import Neighbours
from latedrop.terms.features import Features
from latedrop.terms.term import BatchContext

__all__ = ["Detector", "detector"]

_RATE = 0.1
_CLASSES = ("novelty", "entropy", "confidence", "energy", "mutual_information", "neighbours", "sites")
_NUMBERS = ("novelty", "std", "neighbours", "sites")
_MOST = 16  # classes whose logits are looked at, the likeliest ones
_COSTLY = ("mutual_information", "neighbours", "sites")


class Scored(Protocol):
    """What a calibrated model has that its scores need."""

    model: nn.Module
    calibration: Any
    readout: Readout
    batch_size: int
    collate: Collate
    predict: Callable[..., Any]

    @property
    def network(self) -> Network:
        """Its private copy."""
        ...


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

    uq: Scored
    names: tuple[str, ...]
    usual: dict[str, Tensor] = field(repr=False)
    combination: Combination | None = None
    neighbours: Neighbours | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        rows = len(next(iter(self.usual.values()), ()))
        return f"Detector by {', '.join(self.names)}, beside {rows} usual rows"

    def __call__(self, x: Any) -> Detection:
        """Scores and p-values of N rows, of a `DataLoader` or of a data set."""
        scores, features = measured(self.uq, x, self.names)
        return self._detection(scores, features)

    def _detection(self, scores: dict[str, Tensor], features: Tensor | None) -> Detection:
        found = dict(scores)
        if self.neighbours is not None and features is not None:
            found["neighbours"] = _distances(self.neighbours, features)
        if self.combination is not None:
            found[COMBINED] = self.combination(found)
        rows = len(next(iter(self.usual.values())))
        return Detection(found, {name: p_values(self.usual[name], s) for name, s in found.items()}, rows)

    def evaluate(self, usual: Any, strange: Any) -> tuple[DetectorScores, ...]:
        """AUROC, FPR95 and more of every score, on rows known to be usual and rows known to be strange.

        Neither should have served the detector.
        """
        return separation(self(usual), self(strange))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the detector as JSON; the calibration has a file of its own."""
        c = self.uq.calibration
        stored = StoredDetector(c.fingerprint, _mark(c), self.names, self.usual, self.combination, self.neighbours)
        DETECTOR.write(path, stored, inline)

    @classmethod
    def load(cls, path: str | os.PathLike[str], uq: Scored) -> Detector:
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
    uq: Scored, usual: Any, scores: Sequence[str] | None = None, *, strange: Any = None, seed: int = 0
) -> Detector:
    """Make a `Detector` from rows known to be usual; see `Calibrated.detector`."""
    names = _checked(uq, scores)
    found, features = measured(uq, usual, names)
    rows = len(next(iter(found.values()))) if found else len(features if features is not None else ())
    check_usual(rows)
    several = len(names) > 1
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    learned, held = (order[: rows // 2], order[rows // 2 :]) if several or features is not None else (order[:0], order)
    near = None
    if features is not None:
        near = Neighbours().learned_from([features[learned]], own=False)
    fitting = {name: values[learned] for name, values in found.items()}
    made = Detector(uq, names, {}, None, near)
    if several:
        if near is not None and features is not None:  # a row is not its own neighbour
            fitting["neighbours"] = _distances(
                Neighbours().learned_from([features[learned]], own=True), features[learned], True
            )
        outside = None
        if strange is not None:
            scored, apart = measured(uq, strange, names)
            outside = scored if near is None or apart is None else {**scored, "neighbours": _distances(near, apart)}
        made = replace(made, combination=Combination.fit(fitting, outside))
    elif strange is not None:
        raise ArgumentError("expected several scores to combine with strange=; found one. Leave strange= out.")
    every = {name: torch.zeros(1) for name in (*names, *([COMBINED] if several else []))}
    parts = {name: values[held] for name, values in found.items()}
    kept = replace(made, usual=every)._detection(parts, None if features is None else features[held]).scores
    return replace(made, usual={name: values.sort().values for name, values in kept.items()})


def measured(uq: Scored, x: Any, names: Sequence[str]) -> tuple[dict[str, Tensor], Tensor | None]:
    """The scores of rows by name, in double precision on the CPU; and their features where neighbours are asked for."""
    found: dict[str, list[Tensor]] = {}
    features: list[Tensor] = []
    looked = _features(uq) if "neighbours" in names else None
    for part in _batches(uq, x):
        for name, values in _scores(uq, part, names).items():
            found.setdefault(name, []).append(values.detach().double().cpu())
        if looked is not None:
            rows = BatchContext(uq.network, part, uq.calibration.sites, uq.readout, looked)
            features.append(rows.features.cpu())
    if not found and not features:
        raise DataError("expected at least one row to score; found none.")
    joined = {name: torch.cat(parts) for name, parts in found.items()}
    return joined, torch.cat(features) if features else None


def _batches(uq: Scored, x: Any) -> Iterator[Any]:
    several = isinstance(x, Iterator) or (is_loader(x) and uq.collate is None)
    for part in inputs_in(x, uq.model, uq.batch_size, None, uq.collate) if several else [x]:
        items = as_items(in_order(part, uq.calibration.columns), uq.collate, uq.calibration.sites)
        placed = place(items, uq.model, cut=True)
        yield from row_batches(placed, uq.batch_size)


def _scores(uq: Scored, x: Any, names: Sequence[str]) -> dict[str, Tensor]:
    c = uq.calibration
    found: dict[str, Tensor] = {}
    if isinstance(c, ClassCalibration):
        p = uq.predict(x, rate=_RATE) if "mutual_information" in names and c.rate is None else uq.predict(x)
        found = {"entropy": p.entropy, "confidence": 1 - p.confidence, "energy": p.energy}
        found |= {} if p.mutual_information is None else {"mutual_information": p.mutual_information}
        if c.maps:  # an image is as strange as its pixels are on average
            found = {name: values.flatten(1).mean(1) for name, values in found.items()}
    else:
        p = uq.predict(x)
        found = {"std": p.variance.flatten(1).clamp_min(1e-300).log().mean(1) / 2}  # of outputs of any unit
    found |= {} if p.novelty is None else {"novelty": p.novelty}
    sites = [name for name in names if name.startswith("site:")]
    if sites:
        known = _site_variances(uq, x, c.sites)
        found |= {f"site:{site.name}": known[:, i] for i, site in enumerate(c.sites)}
    return {name: found[name] for name in names if name in found}


def _site_variances(uq: Scored, x: Any, sites: Sites) -> Tensor:
    """Return `(N, sites)`, to first order: summed over outputs, or over logits less their mean."""

    def centred(output: Any) -> Tensor:
        logits = as_logits(part_of(output, uq.readout))
        logits = logits if logits.shape[1] <= _MOST else logits.topk(_MOST, 1).values
        return logits - logits.mean(1, keepdim=True)

    readout = centred if isinstance(uq.calibration, ClassCalibration) else uq.readout
    return linearize(uq.network, x, sites, readout).variance_by_site.sum(1)


def _features(uq: Scored) -> Features:
    c: Calibration | ClassCalibration = uq.calibration
    known = c.features if isinstance(c, ClassCalibration) else c.terms and c.terms.features
    found = known or Features.all(c.sites)
    if found is None:
        raise ArgumentError("expected a model with features to compare for 'neighbours'; found none. Leave it out.")
    return found


def _distances(term: Neighbours, features: Tensor, own: bool = False) -> Tensor:
    return term.distances(features, torch.arange(len(features)) if own else None).double()


def _checked(uq: Scored, scores: Sequence[str] | None) -> tuple[str, ...]:
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
    """What the scores of rows depend on besides the weights: not on intervals, sets or a scale for these."""
    if isinstance(calibration, ClassCalibration):
        known = calibration.guard
        limits = None if known is None else known.limits
        facts: tuple[Any, ...] = (calibration.fit, limits, calibration.rate, calibration.draws)
    elif calibration.terms is not None:
        terms, guard = calibration.terms, calibration.terms.guard
        facts = (terms.columns, terms.coefficients, terms.floors, None if guard is None else guard.limits)
    else:
        facts = (calibration.method, calibration.rate, calibration.draws)
    return hashlib.sha256(repr(facts).encode()).hexdigest()

"""Store a calibrated classifier, and its score on left-out rows (the verdict)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from torch import Tensor

from latedrop.calibration.class_sets import ClassSets, Rejection
from latedrop.calibration.cross_validation import Candidate
from latedrop.calibration.fit_classes import ALONE, ClassFit
from latedrop.calibration.fitted_terms import compared
from latedrop.calibration.guard import Guard
from latedrop.calibration.record import Columns
from latedrop.calibration.seen import Sketch
from latedrop.calibration.verdict import said_of_rows
from latedrop.network.sites import StoredSites
from latedrop.records import Format, Limits, Tagged, match, record
from latedrop.stored_tensors import inline
from latedrop.terms import BatchContext, GradientLeverage, Leverage
from latedrop.terms.features import Features

__all__ = ["CLASSES", "ClassCalibration", "ClassVerdict"]

_Kind: TypeAlias = Annotated[Leverage | GradientLeverage, Tagged("name")]


@record
@dataclass(frozen=True)
class ClassVerdict:
    """Score class probabilities on rows that they were not fitted to.

    Attributes:
        rows: number of rows, or of pixels.
        fitted: how rows of the fit and rows of the score were separated: `"cross-validation"` or `"other rows"`.
        gain: NLL of one temperature for all rows minus `nll`, in nats per row; above 0 is better.
        gain_error: standard error of `gain`.
        nll: mean negative log-likelihood of the labels, in nats per row.
        accuracy: share of rows whose label is the most likely class.
        ece: expected calibration error with 15 bins of equal mass.
        unit: the unit of `rows`, `"rows"` or `"pixels"`.
    """

    rows: Annotated[int, Limits(1)]
    fitted: str
    gain: float
    gain_error: Annotated[float, Limits(0)]
    nll: float
    accuracy: Annotated[float, Limits(0, 1)]
    ece: Annotated[float, Limits(0, 1)]
    unit: str = "rows"

    @property
    def better(self) -> bool | None:
        """Return True if better than one temperature, False if worse, None if within two standard errors of it."""
        return None if abs(self.gain) <= 2 * self.gain_error else self.gain > 0

    def __str__(self) -> str:
        words = {True: "better than one temperature by", False: "worse than one temperature by"}
        size = f"{abs(self.gain):.4f} nats (± {self.gain_error:.4f})"
        worth = f"no better than one temperature ({self.gain:+.4f} ± {self.gain_error:.4f} nats)"
        if self.better is not None:
            worth = f"{words[self.better]} {size}"
        return (
            f"{worth}; NLL {self.nll:.4f}, accuracy {self.accuracy:.1%}, calibration error {self.ece:.1%} on "
            f"{self.rows} {self.unit} {said_of_rows(self.fitted)}"
        )


@record
@dataclass(frozen=True)
class ClassCalibration:
    """Hold everything that a calibrated classifier needs besides the model; frozen, and stored as JSON.

    Attributes:
        classes: number of classes.
        names: class names in the order of the logits; empty if the classes have none.
        binary: whether the model has one logit for two classes.
        fit: the fitted temperature, which turns logits into probabilities.
        alone: the temperature of the baseline, one for all rows.
        rate: dropout rate of the draws whose softmax is averaged; None: no draws are run.
        draws, seed: number and seed of these draws.
        sites: where dropout is applied.
        features: sites whose activations the leverage reads; None: no leverage is used.
        terms: leverage terms that detect novel rows, already fitted to the reference rows.
        guard: limits of these terms; beyond them probabilities get flatter. None: novel rows cannot be detected.
        reference_rows: number of reference rows; 0 if the validation rows were used instead.
        rows: number of validation rows, or of images.
        choice: name of the candidate in use.
        candidates: all candidates that were compared.
        verdict: score on left-out rows.
        readout: name or index of the part of the raw output that holds the logits; None for all of it or a function.
        custom_readout: name of the readout function, which a file cannot hold.
        fingerprint: hash of the weights.
        sets: thresholds of the prediction sets; None before `conformal`.
        rule: which rows are answered and which rejected; None before `reject`.
        columns: names of the input and label columns of tables; None for arrays.
        maps: True for segmentation, where each pixel has a class.
        ignore_index: label of pixels without a class; None if all have one.
        seen: hashes of the validation rows, see `calibration.seen`; empty for maps and in files of earlier versions.
    """

    classes: Annotated[int, Limits(2)]
    names: tuple[str, ...]
    binary: bool
    fit: ClassFit
    alone: Annotated[float, Limits(1e-30, 1e30)]
    rate: Annotated[float, Limits(1e-12, 1 - 1e-12)] | None
    draws: Annotated[int, Limits(0)]
    seed: int
    sites: StoredSites
    features: Features | None
    terms: tuple[_Kind, ...]
    guard: Guard | None
    reference_rows: Annotated[int, Limits(0)]
    rows: Annotated[int, Limits(2)]
    choice: str
    candidates: Annotated[tuple[Candidate, ...], Limits(1)]
    verdict: ClassVerdict
    readout: str | int | None
    custom_readout: str | None
    fingerprint: str
    sets: ClassSets | None = None
    rule: Rejection | None = None
    columns: Columns | None = None
    maps: bool = False
    ignore_index: int | None = None
    seen: Sketch = ""

    def checked(self) -> ClassCalibration:
        """Check names and lengths against each other after reading."""
        sites, classes = [site.name for site in self.sites], self.classes
        match(len(self.names) in (0, classes), "names", f"{classes} names, or none", self.names)
        looked = () if self.features is None else self.features.sites
        match(set(looked) <= set(sites), "features.sites", f"some of the sites {sites}", looked)
        match(bool(looked) or self.guard is None, "features", "the sites that the leverage looks at", None)
        names, guard = tuple(term.name for term in self.terms), () if self.guard is None else self.guard.terms
        match(names == guard, "guard.terms", f"the names of terms {names}", guard)
        for term in self.terms:
            match(term.root is not None, "terms", f"all that {term.name} has learned", None)
        match(self.rate is None or self.draws >= 2, "draws", "how many draws are averaged, 2 or more", self.draws)
        match(self.choice in [c.name for c in self.candidates], "choice", "the name of a candidate", self.choice)
        if self.sets is not None:
            lists = len(self.sets.scores)
            match(lists in (1, classes), "sets.scores", f"one list, or {classes}", f"{lists} lists")
        return self

    @property
    def known_names(self) -> tuple[str, ...]:
        """Return the class names, or the class numbers as text if there are no names."""
        return self.names or tuple(map(str, range(self.classes)))

    def novelty(self, rows: BatchContext) -> Tensor | None:
        """Return the novelty of rows, `(N,)`; None without a guard."""
        return None if self.guard is None else self.guard.novelty(rows, {term.name: term for term in self.terms})

    def to_json(self, tensor: Callable[[Tensor], Any] = inline) -> str:
        """Return readable JSON with a checksum over its content; see `Calibration.to_json`."""
        return CLASSES.to_json(self, tensor)

    @classmethod
    def from_json(cls, content: str) -> ClassCalibration:
        """Read the JSON of `to_json`; raise `DataError` if it is damaged, edited or in another format."""
        return CLASSES.from_json(content)

    def __repr__(self) -> str:
        return f"ClassCalibration of {self.classes} classes by {self.choice}, {self.rows} validation rows"

    def __str__(self) -> str:
        fit = self.fit
        follows = "" if fit.slope is None else f", growing with leverage (exponent {fit.slope:.2f} inside, 1 beyond)"
        lines = [str(self.verdict), f"{self.choice}: temperature {fit.temperature:.3f}{follows}"]
        return "\n".join([*lines, *compared(self.candidates, self.choice, ALONE)])


CLASSES = Format(
    ClassCalibration, "latedrop-classes", "a calibration of a classifier", "Calibrate again.", "calibration"
)

"""The record of a calibrated classifier, and its verdict."""

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
    """The worth of probabilities on rows that they were not fitted to.

    Attributes:
        rows: how many.
        fitted: how they were kept apart: `"cross-validation"` or `"other rows"`.
        gain: nats per row by which they are better than one temperature for all rows.
        gain_error: standard error of that.
        nll: of the labels, in nats.
        accuracy: share of labels that are the likeliest class.
        ece: expected calibration error, 15 bins of equal mass.
        unit: what was counted, `"rows"` or `"pixels"`.
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
        """Whether they are better than a temperature alone; None where the rows cannot tell (two standard errors)."""
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
    """The frozen record of a calibrated classifier.

    Attributes:
        classes: how many.
        names: of the classes; empty where they have none.
        binary: whether the model has one logit for two classes.
        fit: from logits to probabilities.
        alone: one temperature for all rows, the trivial answer.
        rate: of the draws that are averaged; None: none are run.
        draws, seed: of these.
        sites: where dropout goes.
        features: which the leverage looks at; None where there are none.
        terms: kinds of leverage that tell novel rows, after they learned from the reference rows.
        guard: their limits; novel rows have flatter probabilities. None where nothing can tell them.
        reference_rows: how many reference rows there were; 0 where the validation rows stood in.
        rows: validation rows, or images.
        choice: the candidate in use.
        candidates: all that were compared.
        verdict: what it is worth.
        readout: from the raw output to the logits, where it has a name or an index.
        custom_readout: the name of a function that a file cannot hold.
        fingerprint: of the weights.
        sets: what makes prediction sets; None before `conformal`.
        rule: which rows are kept; None before `reject`.
        columns: the names of the inputs and labels, in tables of validation data; None where there are none.
        maps: whether every pixel of an image has a class.
        ignore_index: the label of pixels that have none; None where all have one.
        seen: marks of the validation rows, see `calibration.seen`; none of maps, and in files of earlier versions.
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
        """The names of the classes, or their numbers."""
        return self.names or tuple(map(str, range(self.classes)))

    def novelty(self, rows: BatchContext) -> Tensor | None:
        """How novel rows are, `(N,)`; None where nothing can tell."""
        return None if self.guard is None else self.guard.novelty(rows, {term.name: term for term in self.terms})

    def to_json(self, tensor: Callable[[Tensor], Any] = inline) -> str:
        """Readable JSON, with a checksum over its content; see `Calibration.to_json`."""
        return CLASSES.to_json(self, tensor)

    @classmethod
    def from_json(cls, content: str) -> ClassCalibration:
        """Read what `to_json` wrote; `DataError` where it is damaged, edited or of another format."""
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

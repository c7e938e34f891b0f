"""The record of a calibration of several labels for one row, and the rows that control how many labels are missed.

A row with m labels has the loss `missed / m`, and a row without labels the loss 0. On n rows used for nothing else

    t = the largest threshold with (sum of losses + 1) / (n + 1) <= share,

so that sets of the labels of probability `t` at least lose no more than that share of a new exchangeable row's labels
on average (conformal risk control: Angelopoulos, Bates, Fisch, Lei and Schuster 2022).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from torch import Tensor

from latedrop.calibration.cross_validation import Candidate
from latedrop.calibration.record import Columns
from latedrop.calibration.seen import Sketch
from latedrop.errors import ArgumentError
from latedrop.records import Format, Limits, match, record

__all__ = ["MULTILABEL", "MultiLabelCalibration", "MultiLabelChoice", "RiskControl"]

_Number: TypeAlias = Annotated[float, Limits(-1e30, 1e30)]
_Share: TypeAlias = Annotated[float, Limits(0, 1)]
MultiLabelChoice = Literal["model", "common", "each"]


@record
@dataclass(frozen=True)
class RiskControl:
    """The labels of rows used for nothing else.

    Attributes:
        probabilities: of every true label, in rising order.
        losses: what missing it costs: 1 / m of a row with m labels.
        rows: how many rows there are, with labels or without.
    """

    probabilities: tuple[_Share, ...]
    losses: tuple[_Share, ...]
    rows: Annotated[int, Limits(1)]

    def checked(self) -> RiskControl:
        """Check lengths and order after reading."""
        match(list(self.probabilities) == sorted(self.probabilities), "probabilities", "in rising order", "others")
        match(len(self.losses) == len(self.probabilities), "losses", "one of each probability", len(self.losses))
        return self

    @classmethod
    def fit(cls, probabilities: Tensor, labels: Tensor) -> RiskControl:
        """From probabilities and labels `(N, K)`."""
        losses = (labels / labels.sum(1, keepdim=True).clamp_min(1)).double()
        p, order = probabilities.double()[labels.bool()].sort()
        return cls(tuple(p.tolist()), tuple(losses[labels.bool()][order].tolist()), len(labels))

    def threshold(self, missed: float) -> float:
        """Return the largest probability that a set may ask for; above 1 where it may ask for anything.

        >>> RiskControl((0.2, 0.5, 0.9), (1.0, 1.0, 1.0), 9).threshold(0.2)
        0.5
        """
        needed = math.ceil(1 / missed - 1e-9) - 1
        if self.rows < needed:
            raise ArgumentError(
                f"expected at least {needed} rows to keep missed labels below {missed:g}; found {self.rows}. Pass more "
                "rows to control(...), or allow a larger share."
            )
        most, lost = missed * (self.rows + 1) - 1, 0.0
        for p, loss in zip(self.probabilities, self.losses, strict=True):
            lost += loss
            if lost > most + 1e-9:
                return p
        return math.inf


@record
@dataclass(frozen=True, kw_only=True)
class MultiLabelCalibration:
    """All that was chosen and measured. Frozen, and plain JSON on disk.

    Attributes:
        slopes: a of each label.
        shifts: b of each label.
        choice: `"model"`, `"common"` or `"each"`: which of the candidates is in use.
        candidates: with their gains over the model's own probabilities, in nats per label.
        rows: how many it was fitted to.
        nll: of a label on rows left out, in nats.
        base_nll: the same of the share of each label, which is the trivial answer.
        names: of the labels; empty where they have none.
        columns: the names of the inputs; None where there were none.
        control: what sets are made from; None before `control`.
        seen: marks of rows that it was fitted to.
    """

    slopes: Annotated[tuple[_Number, ...], Limits(1)]
    shifts: tuple[_Number, ...]
    choice: MultiLabelChoice
    candidates: tuple[Candidate, ...]
    rows: Annotated[int, Limits(2)]
    nll: Annotated[float, Limits(0)]
    base_nll: Annotated[float, Limits(0)]
    names: tuple[str, ...] = ()
    columns: Columns | None = None
    readout: str | int | None = None
    custom_readout: str | None = None
    fingerprint: str
    control: RiskControl | None = None
    seen: Sketch = ""

    def checked(self) -> MultiLabelCalibration:
        """Check lengths against each other after reading."""
        match(len(self.shifts) == len(self.slopes), "shifts", f"{len(self.slopes)} numbers", len(self.shifts))
        match(len(self.names) in (0, len(self.slopes)), "names", f"{len(self.slopes)} names", len(self.names))
        return self

    def __str__(self) -> str:
        gain = max(self.candidates, key=lambda each: each.name == self.choice)
        return (
            f"{len(self.slopes)} labels, {self.rows} rows; probabilities of {self.choice!r}: {self.nll:.3f} nats per "
            f"label on rows left out, {gain.gain:+.3f} (± {gain.gain_error:.3f}) beside the model's own; shares of "
            f"labels alone: {self.base_nll:.3f}"
        )


MULTILABEL = Format(
    MultiLabelCalibration,
    "latedrop-multilabel",
    "a multi-label calibration",
    "Calibrate again with calibrate_multilabel().",
    "calibration",
)

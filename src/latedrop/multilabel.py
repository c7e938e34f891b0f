"""Several labels for one row: a calibrated probability for each, and sets that miss few of the labels.

A model gives K logits z, trained with sigmoids. The probability of a label is `sigmoid(a z + b)`, with a and b common
to all labels or of each label, shrunk to the common ones; what is in use is chosen on rows left out of the fits (Platt
1999).

A row with m labels has the loss `missed / m`, and a row without labels the loss 0. On n rows used for nothing else

    t = the largest threshold with (sum of losses + 1) / (n + 1) <= share,

so that sets of the labels of probability `t` at least lose no more than that share of a new exchangeable row's labels
on average (conformal risk control: Angelopoulos, Bates, Fisch, Lei and Schuster 2022).
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, TypeAlias
from warnings import warn

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from latedrop.calibration.cross_validation import Candidate, CrossValidation, leading
from latedrop.calibration.fit_classes import logistic
from latedrop.calibration.record import Columns
from latedrop.calibration.seen import Sketch, marks_of, merged, sketch
from latedrop.data.batches import Batches, Unpack, names_of
from latedrop.dropout.sampling import own_output
from latedrop.errors import ArgumentError, DataError, LatedropWarning
from latedrop.network.network import Network, Readout, check_module
from latedrop.network.sites import Sites
from latedrop.prediction.prediction import Predicted
from latedrop.prediction.predictor import Batched, check_belongs, explain_failure, identity_of
from latedrop.quantiles import checked_level, first_beyond
from latedrop.records import Format, Limits, match, record

__all__ = [
    *("MULTILABEL", "MultiLabelCalibration", "MultiLabelPrediction", "MultiLabelPredictor", "RiskControl"),
    *("calibrate_multilabel", "load_multilabel"),
]

_FEWEST_ROWS = 20
_PRIOR = 10.0  # rows' worth of curvature that hold a label at the common fit
_FREE = 1e-3
_Number: TypeAlias = Annotated[float, Limits(-1e30, 1e30)]
_Share: TypeAlias = Annotated[float, Limits(0, 1)]
_Choice: TypeAlias = Literal["model", "common", "each"]


@record
@dataclass(frozen=True)
class RiskControl:
    """The labels of rows used for nothing else."""

    probabilities: tuple[_Share, ...]  # of every true label, in rising order
    losses: tuple[_Share, ...]  # what missing it costs: 1 / m of a row with m labels
    rows: Annotated[int, Limits(1)]  # how many rows there are, with labels or without

    def checked(self) -> RiskControl:
        """Check lengths and order after reading."""
        match(list(self.probabilities) == sorted(self.probabilities), "probabilities", "in rising order", "others")
        match(len(self.losses) == len(self.probabilities), "losses", "one of each probability", len(self.losses))
        return self

    @classmethod
    def fit(cls, probabilities: Tensor, labels: Tensor) -> RiskControl:
        """Return the control from probabilities and labels `(N, K)`."""
        losses = (labels / labels.sum(1, keepdim=True).clamp_min(1)).double()
        p, order = probabilities.double()[labels.bool()].sort()
        return cls(tuple(p.tolist()), tuple(losses[labels.bool()][order].tolist()), len(labels))

    def threshold(self, missed: float) -> float:
        """Return the largest probability that a set may ask for; above 1 where it may ask for anything.

        >>> RiskControl((0.2, 0.5, 0.9), (1.0, 1.0, 1.0), 9).threshold(0.2)
        0.5
        """
        losses = zip(self.probabilities, self.losses, strict=True)
        purpose, remedy = (
            f"rows to keep missed labels below {missed:g}",
            "Pass more rows to control(...), or allow more.",
        )
        return first_beyond(losses, self.rows, missed, math.inf, purpose, remedy)


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
        control: what sets are made from; None before `control`.
        seen: marks of rows that it was fitted to.
    """

    slopes: Annotated[tuple[_Number, ...], Limits(1)]
    shifts: tuple[_Number, ...]
    choice: _Choice
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
    sites: ClassVar[Sites] = Sites()  # nothing is dropped

    def checked(self) -> MultiLabelCalibration:
        """Check lengths against each other after reading."""
        match(len(self.shifts) == len(self.slopes), "shifts", f"{len(self.slopes)} numbers", len(self.shifts))
        match(len(self.names) in (0, len(self.slopes)), "names", f"{len(self.slopes)} names", len(self.names))
        return self

    def to_json(self) -> str:
        """Return readable JSON with a checksum over its content."""
        return MULTILABEL.to_json(self)

    def __str__(self) -> str:
        best = next(each for each in self.candidates if each.name == self.choice)
        return (
            f"{len(self.slopes)} labels, {self.rows} rows; probabilities of {self.choice!r}: {self.nll:.3f} nats per "
            f"label on rows left out, {best.gain:+.3f} (± {best.gain_error:.3f}) beside the model's own; shares of "
            f"labels alone: {self.base_nll:.3f}"
        )


_AGAIN = "Calibrate again with calibrate_multilabel()."
MULTILABEL = Format(MultiLabelCalibration, "latedrop-multilabel", "a multi-label calibration", _AGAIN, "calibration")


@dataclass(frozen=True)
class MultiLabelPrediction(Predicted):
    """Predictions of N rows among K labels, of which any number may be true.

    Attributes:
        logits: `(N, K)`, the model's own.
        calibration: what turns them into probabilities.
        index: of the pandas data frame that was predicted; None for other inputs.
    """

    logits: Tensor
    calibration: MultiLabelCalibration
    index: Any = None

    @property
    def probabilities(self) -> Tensor:
        """`(N, K)`, calibrated; their sum is the expected number of labels."""
        slopes, shifts = (torch.tensor(part).double() for part in (self.calibration.slopes, self.calibration.shifts))
        return torch.sigmoid(self.logits.double().cpu() * slopes + shifts)

    def label_set(self, missed: float = 0.1) -> Tensor:
        """`(N, K)`, True for the labels of a set that misses no more than that share of them on average."""
        if self.calibration.control is None:
            raise ArgumentError(
                "expected a predictor that controls missed labels, from rows used for nothing else; found one without. "
                "Call uq = uq.control((x, labels)) first."
            )
        return self.probabilities >= self.calibration.control.threshold(checked_level(missed))

    def named(self, row: int, missed: float = 0.1) -> list[str]:
        """Return the names of the labels in the set of one row."""
        names = self.calibration.names or tuple(map(str, range(self.logits.shape[1])))
        return [names[k] for k in self.label_set(missed)[row].nonzero()[:, 0].tolist()]

    def __repr__(self) -> str:
        return f"MultiLabelPrediction of {len(self)} rows, {float(self.probabilities.sum(1).mean()):.1f} labels in each"


class MultiLabelPredictor(Batched[MultiLabelCalibration, MultiLabelPrediction]):
    """A model of several labels with its calibration; `calibrate_multilabel` makes it. The model is untouched."""

    kind = MultiLabelPrediction
    flags_rows = False

    def control(self, data: Any, unpack: Unpack | None = None) -> MultiLabelPredictor:
        """Return the same predictor with sets that miss few labels, from rows used for nothing else."""
        c, (p, labels, marks) = self.calibration, self._unseen(data, unpack)
        control = RiskControl.fit(p.probabilities, labels)
        changed = replace(c, control=control, seen=merged(c.seen, sketch(marks)))
        return self._as(MultiLabelPredictor, calibration=changed)

    def _step(self, x: Any, **options: Any) -> MultiLabelPrediction:
        logits = _logits(self._network, x, self.readout)
        if logits.shape[1] != len(self.calibration.slopes):
            raise DataError(
                f"expected logits of {len(self.calibration.slopes)} labels, as in the calibration; found "
                f"{logits.shape[1]}. Use the readout that the calibration was made with."
            )
        return MultiLabelPrediction(logits, self.calibration)

    def _truth(self, prediction: MultiLabelPrediction, y: Tensor) -> Tensor:
        return _as_labels(y, prediction.logits)


def calibrate_multilabel(
    model: nn.Module,
    data: Any,
    *,
    readout: Readout = None,
    names: Sequence[str] = (),
    batches: Batches = Batches(),  # noqa: B008 - frozen
) -> MultiLabelPredictor:
    """Calibrate a trained model that gives K logits for K labels, of which any number may be true for a row.

    Args:
        model: trained with sigmoids (`BCEWithLogitsLoss`); it is left as it was.
        data: validation rows `(x, labels)`, labels `(N, K)` of 0 and 1; or whatever `calibrate` takes.
        readout: from the raw output to logits `(N, K)`: a function, or the name or index of a part.
        names: of the labels.
        batches: how `data` are read.

    >>> x = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    >>> net = nn.Sequential(nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 3))
    >>> uq = calibrate_multilabel(net, (x[:100], x[:100, :3] > 0)).control((x[100:], x[100:, :3] > 0))
    >>> uq.predict(x).probabilities.shape, uq.predict(x).label_set(missed=0.2).shape
    (torch.Size([200, 3]), torch.Size([200, 3]))
    """
    check_module(model)
    network = Network(model)
    parts = [(_logits(network, x, readout), y) for x, y in batches.read(data, model)]
    rows = sum(len(y) for _, y in parts)
    if rows < _FEWEST_ROWS:
        raise DataError(f"expected at least {_FEWEST_ROWS} validation rows; found {rows}. Pass more.")
    logits, labels = torch.cat([z for z, _ in parts]), torch.cat([y for _, y in parts])
    labels = _as_labels(labels, logits)
    if bool((logits >= 0).all() and (logits <= 1).all()):
        raise DataError(
            "expected logits; found numbers between 0 and 1 alone, as sigmoids give. Pass readout=torch.logit, or the "
            "model without its last sigmoid."
        )
    if names and len(names) != labels.shape[1]:
        raise ArgumentError(f"expected names of {labels.shape[1]} labels; found {len(names)}.")
    if bool((labels.sum(1) == 1).all()):
        advice = "Of classes that exclude each other call calibrate(model, (x, labels.argmax(1)))."
        warn(f"every row has exactly one label. {advice}", LatedropWarning, stacklevel=2)
    left = CrossValidation()
    options: dict[str, Tensor] = {name: torch.empty_like(logits) for name in ("model", "common", "each")}
    base = torch.empty_like(logits)
    for rest, out in left.splits(rows):
        for name, (slopes, shifts) in _fits(logits[rest], labels[rest]).items():
            options[name][out] = logits[out] * slopes + shifts
        base[out] = ((labels[rest].sum(0) + 0.5) / (len(rest) + 1)).logit().expand(len(out), -1)
    scores = {name: -_losses(values, labels) for name, values in options.items()}
    choice: _Choice = leading(scores, "model", left)  # type: ignore[assignment]
    slopes, shifts = _fits(logits, labels)[choice]
    calibration = MultiLabelCalibration(
        slopes=tuple(slopes.tolist()),
        shifts=tuple(shifts.tolist()),
        choice=choice,
        candidates=tuple(left.candidate(name, score - scores["model"]) for name, score in scores.items()),
        rows=rows,
        nll=float(-scores[choice].mean()),
        base_nll=float(_losses(base, labels).mean()),
        names=tuple(names),
        seen=sketch(marks_of(logits, labels)),
        **identity_of(model, readout, names_of(data)),
    )
    return MultiLabelPredictor(model, calibration, readout, batch_size=batches.size, collate=batches.collate)


def load_multilabel(path: str | os.PathLike[str], model: nn.Module, *, readout: Readout = None) -> MultiLabelPredictor:
    """Read what `MultiLabelPredictor.save` wrote, for the same model; `readout` where that was a function."""
    check_module(model)
    calibration = MULTILABEL.read(path)
    check_belongs(path, calibration, model, readout)
    return MultiLabelPredictor(model, calibration, readout)


def _fits(logits: Tensor, labels: Tensor) -> dict[_Choice, tuple[Tensor, Tensor]]:
    """Return slopes and shifts `(K,)` of each candidate."""
    count = labels.shape[1]
    inputs = torch.stack([logits, torch.ones_like(logits)], -1)
    start = torch.tensor([1.0, 0.0], dtype=torch.float64)
    common = logistic(inputs.flatten(0, 1), labels.flatten(), torch.full_like(start, _FREE), start)
    ridge = _PRIOR * (inputs.square() * 0.25).mean(0)  # (K, 2): at most the curvature of a row
    each = torch.stack([logistic(inputs[:, k], labels[:, k], ridge[k], common) for k in range(count)])
    fits: dict[_Choice, Tensor] = {"model": start.expand(count, 2), "common": common.expand(count, 2), "each": each}
    return {name: (fit[:, 0], fit[:, 1]) for name, fit in fits.items()}


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean negative log-likelihood of a row's labels, `(N,)`."""
    return binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(1)


def _logits(network: Network, x: Any, readout: Readout) -> Tensor:
    """Return the logits of rows that were placed, `(N, K)` in double precision on the CPU."""
    try:
        logits = own_output(network, x, readout).double().cpu()
    except Exception as error:
        explain_failure(error, x, network.model)
        raise
    if logits.dim() != 2 or logits.shape[1] < 2:
        raise DataError(
            f"expected logits (N, K) of at least 2 labels; found {tuple(logits.shape)}. Pass a readout that gives them."
        )
    return logits


def _as_labels(labels: Tensor, logits: Tensor) -> Tensor:
    """Return labels `(N, K)` in double precision; `DataError` where they are something else."""
    y = labels.detach().double().cpu()
    if y.shape != logits.shape or not bool(((y == 0) | (y == 1)).all()):
        raise DataError(
            f"expected labels of 0 and 1 of shape {tuple(logits.shape)}, as the logits; found shape {tuple(y.shape)} "
            f"with values from {float(y.min()):g} to {float(y.max()):g}. Pass a column for each label."
        )
    return y

"""Several labels for one row: a calibrated probability for each, and sets that miss few of the labels.

A model gives K logits z, trained with sigmoids. The probability of a label is `sigmoid(a z + b)`, with a and b common
to all labels or of each label, shrunk to the common ones; what is in use is chosen on rows left out of the fits (Platt
1999).

Sets miss no more labels than one allows: see `latedrop.calibration.multilabel_record`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from latedrop.calibration.cross_validation import CrossValidation, leading
from latedrop.calibration.logistic import logistic
from latedrop.calibration.multilabel_record import (
    MULTILABEL,
    MultiLabelCalibration,
    MultiLabelChoice,
    RiskControl,
)
from latedrop.calibration.seen import marks_of, merged, sketch, warn_of_fitted_rows
from latedrop.data.arrays import place
from latedrop.data.batches import Batches, row_batches
from latedrop.data.datasets import Unpack, gives_batches, inputs_in
from latedrop.data.names import in_order, index_of, names_of, pair_in_order
from latedrop.data.rows import as_items
from latedrop.dropout.sampling import own_output
from latedrop.errors import ArgumentError, DataError, LatedropWarning
from latedrop.network.network import Network, Readout, check_module
from latedrop.prediction.prediction import Predicted
from latedrop.prediction.predictor import check_belongs, explain_failure
from latedrop.quantiles import checked_level
from latedrop.weights import Weights, fingerprint

__all__ = [
    "MultiLabelPrediction",
    "MultiLabelPredictor",
    "calibrate_multilabel",
    "load_multilabel",
]

_FEWEST_ROWS = 20
_PRIOR = 10.0  # rows' worth of curvature that hold a label at the common fit
_FREE = 1e-3


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
    novelty: Tensor | None = None
    index: Any = None

    @property
    def probabilities(self) -> Tensor:
        """`(N, K)`, calibrated; their sum is the expected number of labels."""
        c = self.calibration
        slopes, shifts = (torch.tensor(part, dtype=torch.float64) for part in (c.slopes, c.shifts))
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

    def __len__(self) -> int:
        return len(self.logits)

    def __repr__(self) -> str:
        count = self.probabilities.sum(1)
        return (
            f"MultiLabelPrediction of {len(self)} rows, {float(count.min()):.1f} to {float(count.max()):.1f} labels "
            "expected"
        )


class MultiLabelPredictor:
    """A model of several labels with its calibration; `calibrate_multilabel` makes it. The model is untouched."""

    def __init__(
        self, model: nn.Module, calibration: MultiLabelCalibration, readout: Readout = None, *, batch_size: int = 256
    ) -> None:
        self.model = model
        self.calibration = calibration
        self.readout = calibration.readout if readout is None else readout
        self.batch_size = batch_size
        self._weights = Weights(model, calibration.fingerprint)
        self._network = Network(model)

    def predict(self, x: Any) -> MultiLabelPrediction:
        """Predict N rows: inputs, a `DataLoader`, a data set, or an iterator of batches."""
        if not isinstance(x, Tensor) and gives_batches(x):
            return MultiLabelPrediction.joined(
                [self.predict(part) for part in inputs_in(x, self.model, self.batch_size)]
            )
        if not self._weights.are_same(self.model):
            self._network = self._network.current()
            self._weights.check(self.model)
        logits = _logits(self._network, in_order(x, self.calibration.columns), self.readout, self.batch_size)
        if logits.shape[1] != len(self.calibration.slopes):
            raise DataError(
                f"expected logits of {len(self.calibration.slopes)} labels, as in the calibration; found "
                f"{logits.shape[1]}. Use the readout that the calibration was made with."
            )
        return MultiLabelPrediction(logits, self.calibration, index=index_of(x))

    def control(self, data: Any, unpack: Unpack | None = None) -> MultiLabelPredictor:
        """Return the same predictor with sets that miss few labels, from rows used for nothing else."""
        c = self.calibration
        logits, labels = _rows(
            self._network, pair_in_order(data, c.columns), self.readout, Batches(self.batch_size, unpack)
        )
        marks = marks_of(logits, labels)
        warn_of_fitted_rows(c.seen, marks, stacklevel=2)
        control = RiskControl.fit(MultiLabelPrediction(logits, c).probabilities, labels)
        calibration = replace(c, control=control, seen=merged(c.seen, sketch(marks)))
        return MultiLabelPredictor(self.model, calibration, self.readout, batch_size=self.batch_size)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the calibration as JSON, whole or not at all; the weights are not in it."""
        MULTILABEL.write(path, self.calibration)

    def __repr__(self) -> str:
        return f"MultiLabelPredictor of {type(self.model).__name__}: {self.calibration}"


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
    network, columns = Network(model), names_of(data)
    logits, labels = _rows(network, data, readout, batches)
    if len(labels) < _FEWEST_ROWS:
        raise DataError(f"expected at least {_FEWEST_ROWS} validation rows; found {len(labels)}. Pass more.")
    if names and len(names) != labels.shape[1]:
        raise ArgumentError(f"expected names of {labels.shape[1]} labels; found {len(names)}.")
    if bool((labels.sum(1) == 1).all()):
        warn(
            "every row has exactly one label: of classes that exclude each other, trained with cross-entropy, call "
            "calibrate(model, (x, labels.argmax(1))).",
            LatedropWarning,
            stacklevel=2,
        )
    left = CrossValidation()
    options: dict[str, Tensor] = {name: torch.empty_like(logits) for name in ("model", "common", "each")}
    base = torch.empty_like(logits)
    for rest, out in left.splits(len(labels)):
        for name, (slopes, shifts) in _fits(logits[rest], labels[rest]).items():
            options[name][out] = logits[out] * slopes + shifts
        base[out] = ((labels[rest].sum(0) + 0.5) / (len(rest) + 1)).logit().expand(len(out), -1)
    scores = {name: -_losses(values, labels) for name, values in options.items()}
    choice: MultiLabelChoice = leading(scores, "model", left)  # type: ignore[assignment]
    slopes, shifts = _fits(logits, labels)[choice]
    calibration = MultiLabelCalibration(
        slopes=tuple(slopes.tolist()),
        shifts=tuple(shifts.tolist()),
        choice=choice,
        candidates=tuple(left.candidate(name, score - scores["model"]) for name, score in scores.items()),
        rows=len(labels),
        nll=float(-scores[choice].mean()),
        base_nll=float(_losses(base, labels).mean()),
        names=tuple(names),
        columns=None if columns is None else {key: tuple(part) for key, part in columns.items()},
        readout=None if callable(readout) else readout,
        custom_readout=getattr(readout, "__qualname__", type(readout).__name__) if callable(readout) else None,
        fingerprint=fingerprint(model),
        seen=sketch(marks_of(logits, labels)),
    )
    return MultiLabelPredictor(model, calibration, readout, batch_size=batches.size)


def load_multilabel(path: str | os.PathLike[str], model: nn.Module, *, readout: Readout = None) -> MultiLabelPredictor:
    """Read what `MultiLabelPredictor.save` wrote, for the same model; `readout` where that was a function.

    Raises `FileError` where the file is missing or edited; warns where the model has other weights.
    """
    calibration = MULTILABEL.read(path)
    check_belongs(path, calibration, model, readout)
    return MultiLabelPredictor(model, calibration, readout)


def _fits(logits: Tensor, labels: Tensor) -> dict[MultiLabelChoice, tuple[Tensor, Tensor]]:
    """Return slopes and shifts `(K,)` of each candidate."""
    count = labels.shape[1]
    inputs = torch.stack([logits, torch.ones_like(logits)], -1)
    free = torch.full((2,), _FREE, dtype=torch.float64)
    start = torch.tensor([1.0, 0.0], dtype=torch.float64)
    common = logistic(inputs.flatten(0, 1), labels.flatten(), free, start)
    ridge = _PRIOR * (inputs.square() * 0.25).mean(0)  # (K, 2): at most the curvature of a row
    each = torch.stack([logistic(inputs[:, k], labels[:, k], ridge[k], common) for k in range(count)])
    return {
        "model": (start[0].expand(count), start[1].expand(count)),
        "common": (common[0].expand(count), common[1].expand(count)),
        "each": (each[:, 0], each[:, 1]),
    }


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean negative log-likelihood of a row's labels, `(N,)`."""
    return binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(1)


def _logits(network: Network, x: Any, readout: Readout, batch_size: int) -> Tensor:
    """Return `(N, K)` in double precision on the CPU."""
    placed = place(as_items(x, None), network.weight, cut=True)
    try:
        parts = [own_output(network, part, readout).double().cpu() for part in row_batches(placed, batch_size)]
    except Exception as error:
        explain_failure(error, placed, network.model)
        raise
    if not parts or parts[0].dim() != 2 or parts[0].shape[1] < 2:
        shape = tuple(parts[0].shape) if parts else "no rows"
        raise DataError(f"expected logits (N, K) of at least 2 labels; found {shape}. Pass a readout that gives them.")
    return torch.cat(parts)


def _rows(network: Network, data: Any, readout: Readout, batches: Batches) -> tuple[Tensor, Tensor]:
    """Return logits and labels `(N, K)` of all rows."""
    logits, labels = [], []
    for x, y in batches.read(data, network.model):
        logits.append(_logits(network, x, readout, batches.size))
        labels.append(y.detach().double().cpu())
    if not labels:
        raise DataError("expected rows with labels; found none.")
    z, y = torch.cat(logits), torch.cat(labels)
    if y.shape != z.shape or not bool(((y == 0) | (y == 1)).all()):
        raise DataError(
            f"expected labels of 0 and 1 of shape {tuple(z.shape)}, as the logits; found shape {tuple(y.shape)} with "
            f"values from {float(y.min()):g} to {float(y.max()):g}. Pass a column for each label."
        )
    if bool((z >= 0).all() and (z <= 1).all()):
        raise DataError(
            "expected logits; found numbers between 0 and 1 alone, as sigmoids give. Pass readout=torch.logit, or the "
            "model without its last sigmoid."
        )
    return z, y

"""Rows that were seen before: validation rows in the training of the model, test rows in the fit of the calibration.

A row's mark is a 64-bit hash of numbers that belong to it, rounded so that the batch that it ran in does not matter.
Which share of the validation rows are reference rows, or near-identical to one, is told by marks of their features.
Which share of test rows, or of rows for conformal intervals or a rejection, are the calibration's own, is told by marks
of prediction and target: the calibration stores the 256 smallest (a bottom-k sketch), and of rows whose mark is at most
the largest of these the share that is among them is an estimate. Below a half nothing is said: data sets have
duplicates.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias
from warnings import warn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from latedrop.dropout.masks import STEP, mixed
from latedrop.errors import LatedropWarning
from latedrop.records import Limits

__all__ = [
    *("Sketch", "feature_marks", "fitted_to", "marks_of", "merged", "share_seen", "sketch", "warn_of_fitted_rows"),
    *("warn_of_seen", "warn_of_training_rows"),
]

Marks: TypeAlias = "npt.NDArray[np.uint64]"

_STORED, _DIGITS = 256, 16
Sketch: TypeAlias = Annotated[str, Limits(0, _STORED * _DIGITS, f"^([0-9a-f]{{{_DIGITS}}})*$")]
"""Marks in a record, of 16 digits each."""
_LEAST, _HALF = 5, 0.5  # rows that can tell, and the share of them that is worth a word
_OUTPUT_BITS, _TARGET_BITS = 10, 20  # of a prediction, whose last digits depend on the batch, and of a target
_SUMS = 3  # of the features that a mark is made of


def marks_of(output: Tensor, target: Tensor) -> Marks:
    """Return a mark for each row of predictions and targets, `(N, ...)` both."""
    return _hashed((output, 0, _OUTPUT_BITS), (target, 0, _TARGET_BITS))


def feature_marks(features: Tensor) -> Marks:
    """Return a mark for each row of features, `(N, F)`."""
    return _hashed(*((features, number, _OUTPUT_BITS) for number in range(_SUMS)))


def sketch(marks: Marks) -> str:
    """Return the smallest marks, as digits; empty where most rows share theirs with others."""
    different = np.unique(marks)
    return "" if 2 * len(different) < len(marks) else _text(different)


def merged(one: str, other: str) -> str:
    """Return the sketch of two sets of rows together."""
    return _text(np.unique(np.concatenate([_marks(one), _marks(other)])))


def share_seen(seen: str, marks: Marks) -> float:
    """Return the share of rows that a sketch has seen; 0 where fewer than 5 can tell.

    >>> rows = torch.arange(40.0)
    >>> share_seen(sketch(marks_of(rows, rows)), marks_of(rows[::4], rows[::4]))
    1.0
    """
    sketched = _marks(seen)
    telling = marks[marks <= sketched[-1]] if len(sketched) == _STORED else marks
    return float(np.isin(telling, sketched).mean()) if min(len(sketched), len(telling)) >= _LEAST else 0.0


def fitted_to(seen: str, output: Tensor, target: Tensor) -> bool:
    """Return True if at least half of the rows are rows that the calibration was fitted to."""
    return share_seen(seen, marks_of(output, target)) >= _HALF


def warn_of_seen(seen: str, output: Tensor, target: Tensor, *, stacklevel: int) -> None:
    """Warn where test rows are the calibration's own."""
    text = (
        "of the test rows are rows that the calibration was fitted to: the scores are too good. Evaluate on other "
        "rows; what cross-validation found is in the calibration's verdict."
    )
    _warn(share_seen(seen, marks_of(output, target)), text, stacklevel)


def warn_of_fitted_rows(seen: str, marks: Marks, *, stacklevel: int) -> None:
    """Warn where rows that must have served for nothing else are the calibration's own."""
    text = (
        "of these rows are rows that the calibration was fitted to: what conformal intervals, sets and a rejection "
        "promise does not hold with them. Pass rows that were used for nothing else."
    )
    _warn(share_seen(seen, marks), text, stacklevel)


def warn_of_training_rows(share: float, *, stacklevel: int) -> None:
    """Warn where validation rows are among the reference rows."""
    text = (
        "of the validation rows are among the reference rows, or so close to one that their features, of three digits, "
        "do not tell them apart. If the model was trained with them, its errors there are smaller than on new rows, "
        "and intervals will be too narrow. Pass validation rows that it was not trained with, and training rows as "
        "reference=."
    )
    _warn(share, text, stacklevel)


def _warn(share: float, text: str, stacklevel: int) -> None:
    if share >= _HALF:
        warn(f"{share:.0%} {text}", LatedropWarning, stacklevel=stacklevel + 2)


def _hashed(*parts: tuple[Tensor, int, int]) -> Marks:
    """Hash sums of each row: values `(N, ...)`, the number of the sum, and its bits that count."""
    mark = np.zeros(len(parts[0][0]), dtype=np.uint64)
    for values, number, bits in parts:
        flat = values.detach().reshape(len(values), -1).double()
        factors = 1 + (torch.arange(flat.shape[1], dtype=torch.float64) * (0.6180339887 + 0.1 * number)) % 1
        digits, exponent = np.frexp((flat @ factors.to(flat.device)).cpu().numpy())
        rounded = np.round(digits * 2.0**bits).astype(np.int64) * 4096 + exponent
        mark = mixed((mark ^ rounded.astype(np.uint64)) + STEP)
    return mark


def _text(marks: Marks) -> str:
    return "".join(f"{mark:016x}" for mark in marks[:_STORED].tolist())


def _marks(text: str) -> Marks:
    return np.array([int(text[i : i + _DIGITS], 16) for i in range(0, len(text), _DIGITS)], dtype=np.uint64)

"""Labels and logits: which task it is, and whether both are what they should be.

Of rows logits are `(N, K)` and labels `(N,)`; of maps `(N, K, H, W)` and `(N, H, W)`. A binary classifier with one
logit `z` is one with two, `(0, z)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits

from latedrop.errors import DataError, OutputError
from latedrop.torch_private import being_traced

__all__ = ["as_labels", "as_logits", "check_labels", "check_logits", "check_row_count", "is_classification"]

_LOOKED_AT = 2**12  # pixels of a batch, to see whether they are probabilities
_SUMS = 1e-3  # by how much the sum of probabilities may differ from 1, also in half precision
_COARSE_SUMS = 8e-3  # in bfloat16


def is_classification(labels: Any, output: Tensor | None) -> bool:
    """Return True if labels and outputs are those of a classifier.

    They are where labels are whole numbers `(N,)` beside outputs `(N, K)` of at least two columns, or `(N, H, W)`
    beside `(N, K, H, W)`: as targets of a regression they would not even fit.
    """
    whole = isinstance(labels, Tensor) and not labels.is_floating_point() and not labels.is_complex()
    if not whole or output is None or output.dim() != labels.dim() + 1 or output.dim() < 2:
        return False
    return output.shape[1] > 1 and output.shape[2:] == labels.shape[1:]


def as_logits(output: Tensor, *, maps: bool = False) -> Tensor:
    """Return `(N, K)`, or maps `(N, K, ...)`, also from one logit; `OutputError` where they look like probabilities."""
    if (output.dim() > 2) != maps:
        wanted = "maps of logits (N, K, H, W)" if maps else "logits (N, K), or (N,) or (N, 1) of a binary classifier"
        raise OutputError(
            f"expected {wanted}; found shape {tuple(output.shape)}. Pass a readout that gives them, as the calibration "
            "was made with."
        )
    output = output[:, None] if output.dim() == 1 else output
    if output.shape[1] == 1:
        return torch.cat([torch.zeros_like(output), output], 1)
    pixels = output.flatten(2) if maps else output[:, :, None]
    some = pixels[:, :, :: max(1, len(pixels) * pixels.shape[2] // _LOOKED_AT)]
    _check_no_probabilities(some.movedim(1, -1).reshape(-1, output.shape[1]))
    return output


def _check_no_probabilities(output: Tensor) -> None:
    """Raise `OutputError` where all of several rows `(N, K)` look like probabilities."""
    if being_traced():
        return
    most = _COARSE_SUMS if bool((output == output.bfloat16()).all()) else _SUMS
    sums = output.double().sum(1)
    if len(output) > 1 and bool(((output >= 0).all(1) & ((sums - 1).abs() < most)).all()):
        raise OutputError(
            "expected logits, as they are before a softmax; found rows that are not below 0 and sum to 1, as "
            "probabilities do. Pass readout=lambda p: p.clamp_min(1e-12).log(), or the model without its last softmax."
        )


def check_logits(logits: Tensor, labels: Tensor, *, binary: bool) -> None:
    """Raise `OutputError` where the outputs of all validation rows look like probabilities.

    One number between 0 and 1 may be either: it is a probability where the labels are likelier under it.
    """
    if not binary:
        _check_no_probabilities(logits)
        return
    z, y = logits[:, 1].double(), labels.double()
    inside = bool(((z >= 0) & (z <= 1)).all())
    if inside and binary_cross_entropy(z, y) < binary_cross_entropy_with_logits(z, y):
        raise OutputError(
            "expected logits of a binary classifier, as they are before a sigmoid; found numbers from 0 to 1, as "
            "probabilities are. Pass readout=lambda p: p.clamp(1e-7, 1 - 1e-7).logit(), or the model without its "
            "last sigmoid."
        )


def as_labels(labels: Any, classes: int, shape: Sequence[int], ignore_index: int | None = None) -> Tensor:
    """Return labels of the `shape` `(N,)` or `(N, H, W)` as whole numbers from 0 to `classes - 1`; else `DataError`."""
    labels = torch.as_tensor(labels)
    if labels.dim() == len(shape) + 1 and labels.shape[1] == 1:
        labels = labels[:, 0]
    maps = len(shape) > 1
    if tuple(labels.shape) != tuple(shape):
        raise DataError(
            f"expected one label for each {'pixel' if maps else 'row'}, {tuple(shape)}; found shape "
            f"{tuple(labels.shape)}. Of one-hot labels pass labels.argmax(1)."
        )
    numbers = labels.is_complex() or (labels.is_floating_point() and classes > 2)
    if numbers or (labels.is_floating_point() and not bool((labels == labels.round()).all())):
        raise DataError(
            f"expected labels as whole numbers from 0 to {classes - 1}; found {labels.dtype}. Convert them with "
            "labels.long() if they are; numbers that are no classes are task='regression'."
        )
    codes: Tensor = labels.long()
    counted = codes if ignore_index is None else codes[codes != ignore_index]
    if counted.numel() and (int(counted.min()) < 0 or int(counted.max()) >= classes):
        beside = "" if ignore_index is None else f", beside the ignore_index {ignore_index}"
        remedy = (
            "Name the label of pixels that have no class: task=Classification(ignore_index=...)."
            if maps
            else "Labels count from 0; leave out rows whose class the model does not know."
        )
        raise DataError(
            f"expected labels from 0 to {classes - 1}{beside}, as the model has {classes} classes; found "
            f"{int(counted.min())} to {int(counted.max())}. {remedy}"
        )
    return codes


def check_row_count(rows: int | None, classes: int) -> None:
    """Raise `DataError` where rows are too few to fit to; None: nobody knows how many there are."""
    if rows is not None and rows < max(2, classes):
        raise DataError(
            f"expected at least as many validation rows as classes, {classes}, and better a thousand; found {rows}."
        )


def check_labels(labels: Tensor, classes: int) -> None:
    """Raise `DataError` where labels `(N,)` are too few to fit to."""
    check_row_count(len(labels), classes)
    if len(labels.unique()) < 2:
        raise DataError(
            f"expected labels of at least two classes; found {len(labels)} rows of class {int(labels[0])} alone. Pass "
            "rows by chance, not the first ones of a sorted file."
        )

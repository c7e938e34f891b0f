"""Labels and logits: which task it is, and whether both are what they should be.

A binary classifier with one logit `z` is one with two, `(0, z)`.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits

from latedrop.errors import ArgumentError, DataError, OutputError
from latedrop.torch_private import being_traced

__all__ = [
    "Task",
    "as_labels",
    "as_logits",
    "check_labels",
    "check_logits",
    "check_rows_of_logits",
    "is_classification",
]

Task = Literal["auto", "regression", "classification"]
_TASKS = ("auto", "regression", "classification")
_SUMS = 1e-3  # by how much the sum of probabilities may differ from 1, also in half precision
_COARSE_SUMS = 8e-3  # in bfloat16


def is_classification(task: Task, labels: Any, output: Tensor | None) -> bool:
    """Whether labels and outputs are those of a classifier.

    With `"auto"` they are where labels are whole numbers `(N,)` beside outputs `(N, K)` of at least two columns, or
    `(N, H, W)` beside `(N, K, H, W)`: as targets of a regression they would not even fit.
    """
    if task not in _TASKS:
        raise ArgumentError(f"expected task to be one of {_TASKS}; found {task!r}.")
    if task != "auto":
        return task == "classification"
    whole = isinstance(labels, Tensor) and not labels.is_floating_point() and not labels.is_complex()
    if not whole or output is None or output.dim() != labels.dim() + 1 or output.dim() < 2:
        return False
    return output.shape[1] > 1 and output.shape[2:] == labels.shape[1:]


def as_logits(output: Tensor) -> Tensor:
    """`(N, K)` from `(N, K)`, or from one logit `(N,)` or `(N, 1)`; refused where they look like probabilities."""
    if output.dim() > 2:
        raise OutputError(
            f"expected logits (N, K), or (N,) or (N, 1) of a binary classifier; found shape {tuple(output.shape)}. "
            "Pass a readout that gives them."
        )
    if output.dim() == 2 and output.shape[1] > 1:
        check_rows_of_logits(output)
        return output
    one = output.reshape(len(output), 1)
    return torch.cat([torch.zeros_like(one), one], 1)


def check_rows_of_logits(output: Tensor) -> None:
    """`OutputError` where all of several rows `(N, K)` look like probabilities."""
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
    """`OutputError` where the outputs of all validation rows look like probabilities.

    One number between 0 and 1 may be either: it is a probability where the labels are likelier under it.
    """
    if not binary:
        check_rows_of_logits(logits)
        return
    z, y = logits[:, 1].double(), labels.double()
    if bool(((z >= 0) & (z <= 1)).all()):
        taken = binary_cross_entropy(z, y), binary_cross_entropy_with_logits(z, y)
        if taken[0] < taken[1]:
            raise OutputError(
                "expected logits of a binary classifier, as they are before a sigmoid; found numbers from 0 to 1, as "
                "probabilities are. Pass readout=lambda p: p.clamp(1e-7, 1 - 1e-7).logit(), or the model without its "
                "last sigmoid."
            )


def as_labels(labels: Any, classes: int) -> Tensor:
    """Whole numbers `(N,)` from 0 to `classes - 1`, or `DataError`."""
    if not isinstance(labels, Tensor):
        labels = torch.as_tensor(labels)
    if labels.dim() == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.dim() != 1:
        raise DataError(
            f"expected one label for each row, (N,); found shape {tuple(labels.shape)}. Of one-hot rows pass "
            "labels.argmax(1)."
        )
    numbers = labels.is_complex() or (labels.is_floating_point() and classes > 2)
    if numbers or (labels.is_floating_point() and not bool((labels == labels.round()).all())):
        raise DataError(
            f"expected labels as whole numbers from 0 to {classes - 1}; found {labels.dtype}. Convert them with "
            "labels.long() if they are; numbers that are no classes are task='regression'."
        )
    found: Tensor = labels.long()
    if len(found) and (int(found.min()) < 0 or int(found.max()) >= classes):
        raise DataError(
            f"expected labels from 0 to {classes - 1}, as the model has {classes} classes; found {int(found.min())} to "
            f"{int(found.max())}. Labels count from 0; leave out rows whose class the model does not know."
        )
    return found


def check_labels(labels: Tensor, classes: int) -> None:
    """`DataError` where labels are too few to fit to."""
    if len(labels) < max(2, classes):
        raise DataError(
            f"expected at least as many validation rows as classes, {classes}, and better a thousand; found "
            f"{len(labels)}."
        )
    if len(labels.unique()) < 2:
        raise DataError(
            f"expected labels of at least two classes; found {len(labels)} rows of class {int(labels[0])} alone. Pass "
            "rows by chance, not the first ones of a sorted file."
        )

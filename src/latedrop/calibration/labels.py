"""Labels and logits: which task it is, and whether both are what they should be.

A binary classifier with one logit `z` is one with two, `(0, z)`.

Maps of classes: labels `(N, H, W)` beside logits `(N, K, H, W)`, and pixels of them by chance, in bounded memory.

A fit of a few numbers needs no more than some ten thousand pixels. Every image gives the same number at most, drawn
among its pixels that have a label; whenever the logits that are kept are more than `MOST` numbers, half of each
image's go. So memory does not grow with the size of the images, nor with their number as long as a pixel of each is
kept. Images may differ in size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits

from latedrop.errors import DataError, OutputError
from latedrop.torch_private import being_traced

__all__ = [
    "MOST",
    "Pixels",
    "as_labels",
    "as_logit_maps",
    "as_logits",
    "check_labels",
    "check_logits",
    "check_row_count",
    "check_rows_of_logits",
    "is_classification",
    "label_maps",
]

MOST = 2**18
_EACH = 2**14  # pixels of one image, at most
_LOOKED_AT = 2**12  # pixels of a batch, to see whether they are probabilities


def as_logit_maps(output: Tensor) -> Tensor:
    """`(N, K, ...)` from the same, or from one logit `(N, 1, ...)`; refused where they look like probabilities."""
    if output.dim() < 3:
        raise OutputError(
            f"expected maps of logits (N, K, H, W), as in the calibration; found shape {tuple(output.shape)}. Pass the "
            "readout that gives them."
        )
    if output.shape[1] > 1:
        flat = output.flatten(2)
        some = flat[:, :, :: max(1, len(flat) * flat.shape[2] // _LOOKED_AT)]
        check_rows_of_logits(some.movedim(1, -1).reshape(-1, output.shape[1]))
        return output
    return torch.cat([torch.zeros_like(output), output], 1)


def label_maps(labels: Tensor, logits: Tensor, ignore_index: int | None) -> Tensor:
    """Whole numbers `(N, ...)`, one for each pixel, or `DataError`."""
    classes, shape = logits.shape[1], (len(logits), *logits.shape[2:])
    if labels.dim() == logits.dim() and labels.shape[1] == 1:
        labels = labels[:, 0]
    if tuple(labels.shape) != shape:
        raise DataError(
            f"expected a label for each pixel, {shape}; found shape {tuple(labels.shape)}. Of one-hot maps pass "
            "labels.argmax(1); labels have the size of the output."
        )
    if labels.is_floating_point() or labels.is_complex():
        raise DataError(
            f"expected labels of pixels as whole numbers from 0 to {classes - 1}; found {labels.dtype}. Convert them "
            "with labels.long() if they are."
        )
    found: Tensor = labels.long()
    counted = found if ignore_index is None else found[found != ignore_index]
    if counted.numel() and (int(counted.min()) < 0 or int(counted.max()) >= classes):
        beside = "" if ignore_index is None else f", beside the ignore_index {ignore_index}"
        raise DataError(
            f"expected labels of pixels from 0 to {classes - 1}{beside}; found {int(counted.min())} to "
            f"{int(counted.max())}. Name the label of pixels that have no class: task=Classification(ignore_index=...)."
        )
    return found


class Pixels:
    """Pixels of images, drawn by chance and in an order of chance, so that the first ones of each are a sample, too.

    Args:
        ignore_index: the label of pixels that have none.
        most: numbers in all logits.
    """

    def __init__(self, ignore_index: int | None, most: int = MOST) -> None:
        self._ignored, self._most, self._each = ignore_index, most, _EACH
        self._columns: list[dict[str, Tensor]] = []
        self._images: list[int] = []
        self._seen = self._unlabelled = 0

    def add(self, output: Tensor, labels: Tensor) -> dict[int, Tensor]:
        """The next images, of outputs `(N, K, ...)`; which pixels are kept, by row, of those that have any."""
        logits = as_logit_maps(output)
        truth = label_maps(labels.to(logits.device), logits, self._ignored)
        places = {}
        for row, (z, y) in enumerate(zip(logits.flatten(2), truth.flatten(1), strict=True)):
            usable = torch.arange(len(y)) if self._ignored is None else (y != self._ignored).nonzero()[:, 0].cpu()
            order = torch.randperm(len(usable), generator=torch.Generator().manual_seed(self._seen))
            kept = usable[order[: self._each]]
            if len(kept):
                at = kept.to(z.device)
                places[row] = kept
                self._columns.append({"logits": z[:, at].T.cpu(), "labels": y[at].cpu()})
                self._images.append(self._seen)
            else:
                self._unlabelled += 1
            self._seen += 1
        return places

    def add_drawn(self, number: int, rate: float, logits: Tensor) -> None:
        """Logits of draws `(T, pixels, K)` of an image, counted from the end of what was added."""
        self._columns[number][f"{rate!r}"] = logits.movedim(1, 0)

    def thin(self) -> None:
        """Bring memory back below its bound; to be called after each batch."""
        while sum(part["logits"].numel() for part in self._columns) > self._most and self._each > 1:
            self._each //= 2
            self._columns = [{k: v[: self._each].clone() for k, v in part.items()} for part in self._columns]

    def check(self) -> None:
        """`DataError` where there is too little to fit to."""
        if self._seen and not self._columns:
            raise DataError(
                f"expected pixels with a label; found the ignore_index, {self._ignored}, at all pixels of all "
                f"{self._seen} images. Check ignore_index= and the labels."
            )
        if len(self._columns) < 2:
            raise DataError(
                f"expected at least 2 validation images with labels, and better fifty; found {len(self._columns)}."
            )

    def column(self, name: str) -> Tensor:
        """All pixels, `(P, ...)`, of `logits`, of `labels`, or of draws at a rate."""
        return torch.cat([part[name] for part in self._columns])

    def drawn(self) -> dict[float, Tensor]:
        """Logits of draws `(T, P, K)` by rate."""
        names = [name for name in self._columns[0] if name not in ("logits", "labels")]
        return {float(name): self.column(name).movedim(1, 0) for name in names}

    @property
    def images(self) -> Tensor:
        """`(P,)`, which image each pixel is from, counted among all that were added."""
        counts = torch.tensor([len(part["labels"]) for part in self._columns])
        return torch.tensor(self._images).repeat_interleave(counts)


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


def check_row_count(rows: int | None, classes: int) -> None:
    """`DataError` where rows are too few to fit to; None: nobody knows how many there are."""
    if rows is not None and rows < max(2, classes):
        raise DataError(
            f"expected at least as many validation rows as classes, {classes}, and better a thousand; found {rows}."
        )


def check_labels(labels: Tensor, classes: int) -> None:
    """`DataError` where labels are too few to fit to."""
    check_row_count(len(labels), classes)
    if len(labels.unique()) < 2:
        raise DataError(
            f"expected labels of at least two classes; found {len(labels)} rows of class {int(labels[0])} alone. Pass "
            "rows by chance, not the first ones of a sorted file."
        )

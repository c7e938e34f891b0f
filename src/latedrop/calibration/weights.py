"""The weights that a calibration belongs to: a fingerprint for the file, and a quick look before each prediction."""

from __future__ import annotations

import hashlib
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn

from latedrop.errors import LatedropWarning
from latedrop.model.wrappers import plain_names
from latedrop.torch_inside import version_of, weights_of

__all__ = ["Weights", "fingerprint", "weight_marks"]


def fingerprint(model: nn.Module) -> str:
    """A digest of the model's parameters and buffers: names, shapes, dtypes, and up to 1024 values of each."""
    return hashlib.sha256(b"".join(weight_marks(model).values())).hexdigest()


def weight_marks(model: nn.Module) -> dict[str, bytes]:
    """What tells each parameter and buffer from another one: its name, shape, dtype, and up to 1024 of its values."""
    marks, plain = {}, plain_names(model)
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor):
            flat = torch.view_as_real(value.detach().resolve_conj()) if value.is_complex() else value.detach()
            flat = flat.reshape(-1)
            values = flat[:: max(1, -(-flat.numel() // 1024))].cpu().to(torch.float64).numpy()
            marks[name] = f"{plain(name)} {tuple(value.shape)} {value.dtype}".encode() + values.tobytes()
    return marks


class Weights:
    """Notices that a model's weights are no longer those that were calibrated.

    Where a tensor lies, and how often it was changed in place, is looked at each time; only where that is new are the
    values compared. What is written through `parameter.data` torch does not count, and nobody notices.

    Args:
        model: with the weights that were calibrated.
        known: their fingerprint.
    """

    def __init__(self, model: nn.Module, known: str) -> None:
        self._known, self._last = known, _marks(model)

    def check(self, model: nn.Module) -> None:
        """Warn, once for each change."""
        now = _marks(model)
        if now == self._last:
            return
        self._last = now
        if fingerprint(model) != self._known:
            warn(
                "the model's weights were changed after the calibration: its intervals may not hold. Calibrate again "
                "after training.",
                LatedropWarning,
                stacklevel=3,
            )


def _marks(model: nn.Module) -> list[Any]:
    """Where each weight is, how often it was changed in place, and where its numbers lie."""
    return [
        mark
        for value in weights_of(model)
        for mark in (id(value), version_of(value), value.data_ptr() if value.layout is torch.strided else 0)
    ]

"""The weights that a calibration belongs to: a fingerprint for the file, and a quick look before each prediction."""

from __future__ import annotations

import hashlib
from warnings import warn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from latedrop.errors import ArgumentError, LatedropWarning
from latedrop.torch_private import plain_names, version_of

__all__ = ["Weights", "check_in_memory", "fingerprint", "states", "weight_marks"]

_COMPARED, _LOOKED = 1024, 8


def check_in_memory(model: nn.Module) -> None:
    """Raise `ArgumentError` if parameters of a model hold no numbers."""
    absent = [name for name, weight in model.named_parameters() if weight.is_meta]
    if absent:
        raise ArgumentError(
            f"expected weights in memory; found {absent[0]!r} and {len(absent) - 1} others on the meta device, where "
            "offloading, as by accelerate, leaves them between passes. Load the whole model on one device, in half "
            "precision where it is too large."
        )


def fingerprint(model: nn.Module) -> str:
    """Return a digest of the model's parameters and buffers: names, shapes, dtypes, and up to 1024 values of each."""
    check_in_memory(model)
    return hashlib.sha256(b"".join(weight_marks(model).values())).hexdigest()


def weight_marks(model: nn.Module) -> dict[str, bytes]:
    """Return what tells each parameter and buffer from another one: name, shape, dtype, and up to 1024 values."""
    marks, plain = {}, plain_names(model)
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor):
            value = value.detach()
            flat = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
            flat = flat.reshape(-1)
            values = flat[:: max(1, -(-flat.numel() // _COMPARED))].cpu().to(torch.float64).numpy()
            marks[name] = f"{plain(name)} {tuple(value.shape)} {value.dtype}".encode() + values.tobytes()
    return marks


class Weights:
    """Notices that a model's weights are no longer those that were calibrated.

    Where a tensor lies, how often it was changed in place, and a few of its values are looked at each time; only where
    these are new are more values compared. Torch does not count what is written through `parameter.data`: the few
    values notice it, but not on other devices than a CPU, nor a change of other values alone.

    Args:
        model: with the weights that were calibrated.
        digest: their fingerprint.
    """

    def __init__(self, model: nn.Module, digest: str) -> None:
        self._digest, self._last, self._few = digest, states(model), _few_values(model)
        self._values = [part.tobytes() for part in self._few]

    def changed(self, model: nn.Module) -> bool:
        """Return True if any tensor was changed or moved since the last look; warn if the weights are others."""
        if states(model) == self._last and [part.tobytes() for part in self._few] == self._values:
            return False
        check_in_memory(model)
        self.__init__(model, self._digest)  # type: ignore[misc]
        if fingerprint(model) != self._digest:
            warn(
                "the model's weights were changed after the calibration: its intervals may not hold. Calibrate again "
                "after training.",
                LatedropWarning,
                stacklevel=3,
            )
        return True


def _few_values(model: nn.Module) -> list[npt.NDArray[np.uint8]]:
    """Return the bytes of a few values of every plain tensor on a CPU, where they lie."""
    views = []
    for value in (*model.parameters(), *model.buffers()):
        plain = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_quantized
        if plain and value.device.type == "cpu" and value.is_contiguous() and value.numel():
            flat = value.detach().resolve_neg().resolve_conj().reshape(-1).view(torch.uint8).numpy()
            apart = -(-value.numel() // _COMPARED)  # a multiple of what the fingerprint looks at
            apart *= -(-value.numel() // (apart * _LOOKED))
            views.append(flat.reshape(value.numel(), -1)[::apart])
    return views


def states(model: nn.Module) -> list[tuple[int, int, int]]:
    """Return what each weight is, how often it was changed in place, and where its numbers lie."""
    # `model.parameters()` would put their names together, too, which takes long before each prediction.
    parts = [part for m in model.modules() for part in (*m._parameters.values(), *m._buffers.values())]
    tensors = [part for part in parts if part is not None]
    return [(id(v), version_of(v), v.data_ptr() if v.layout is torch.strided else 0) for v in tensors]

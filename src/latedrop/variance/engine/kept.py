"""Programs are kept as long as their model is, and found again for inputs of the same shape."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import RLock
from typing import Any, Protocol, TypeVar
from warnings import warn

import torch
from torch import Tensor, nn

from latedrop.errors import LatedropWarning
from latedrop.model.by_model import ByModel
from latedrop.torch_inside import leaves_and_structure
from latedrop.variance.engine.snapshots import looked_at, quick_snapshot

__all__ = ["PROGRAMS", "Kept", "kept"]


class Kept(Protocol):
    """A program. It must not hold its model."""

    def holds(self) -> bool:
        """Whether what was looked at when it was made is still so."""


_Kept = TypeVar("_Kept", bound=Kept)
_log = logging.getLogger(__name__)
PROGRAMS: ByModel[dict[Any, Any]] = ByModel()
_MOST = 8  # of one model: each holds a CUDA graph's memory
_COMPILING = RLock()


def kept(model: nn.Module, x: Any, key: Any, make: Callable[[], _Kept]) -> _Kept:
    """The program of a model for inputs like `x` and a `key` of what else it depends on, or a new one.

    Programs are made in turns.
    """
    flat, structure = ([x], None) if isinstance(x, Tensor) else leaves_and_structure(x)
    shapes = tuple(_form(value) if isinstance(value, Tensor) else looked_at(value) for value in flat)
    kind = next(iter(value.device.type for value in flat if isinstance(value, Tensor)))
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    switches = torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.is_inference_mode_enabled()
    whole = (shapes, structure, quick_snapshot(model), cast, switches, key)
    known = PROGRAMS.setdefault(model, {})
    found = known.get(whole)
    if found is None or not found.holds():
        with _COMPILING:
            if whole in known and not known[whole].holds():
                del known[whole]
            if whole not in known:
                if len(known) >= _MOST:
                    known.pop(next(iter(known)))
                    _warn_of_many(model)
                _log.info("compiling %s for inputs of this shape; it takes seconds", type(model).__name__)
                known[whole] = make()
            found = known[whole]
    return found  # type: ignore[no-any-return]


def _form(value: Tensor) -> tuple[Any, ...]:
    strides = value.stride() if value.layout is torch.strided else value.layout
    return value.shape, value.dtype, value.device, strides


_WARNED: ByModel[bool] = ByModel()


def _warn_of_many(model: nn.Module) -> None:
    """Once for each model."""
    if model not in _WARNED:
        _WARNED[model] = True
        warn(
            f"more than {_MOST} programs were compiled for one {type(model).__name__}, which takes seconds each time; "
            f"the last {_MOST} are kept. Programs are for inputs of few shapes, a model that stays as it is and one "
            "calibration. Use engine='auto', or batches of one size.",
            LatedropWarning,
            stacklevel=2,
        )

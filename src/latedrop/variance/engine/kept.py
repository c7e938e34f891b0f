"""Programs are kept as long as their model is, and found again for inputs of the same shape."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import RLock
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from latedrop.torch_inside import leaves_and_structure
from latedrop.variance.engine.snapshots import quick_snapshot

__all__ = ["PROGRAMS", "Kept", "kept"]


class Kept(Protocol):
    """A program. It must not hold its model."""

    def holds(self) -> bool:
        """Whether what was looked at when it was made is still so."""


_Kept = TypeVar("_Kept", bound=Kept)
_log = logging.getLogger(__name__)
PROGRAMS: WeakKeyDictionary[nn.Module, dict[Any, Any]] = WeakKeyDictionary()
_MOST = 8  # of one model: each holds a CUDA graph's memory
_COMPILING = RLock()


def kept(model: nn.Module, x: Any, key: Any, make: Callable[[], _Kept]) -> _Kept:
    """The program of a model for inputs like `x` and a `key` of what else it depends on, or a new one.

    Programs are made in turns.
    """
    flat, structure = ([x], None) if isinstance(x, Tensor) else leaves_and_structure(x)
    shapes = tuple((v.shape, v.dtype, v.device, v.stride()) if isinstance(v, Tensor) else v for v in flat)
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
                _log.info("compiling %s for inputs of this shape; it takes seconds", type(model).__name__)
                known[whole] = make()
            found = known[whole]
    return found  # type: ignore[no-any-return]

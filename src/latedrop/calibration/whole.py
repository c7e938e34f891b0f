"""Predictions without draws by a compiled program: the default's, of numbers and classes, first order, propagation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, Generic, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn

from latedrop.calibration.classes.prediction import ClassPrediction
from latedrop.calibration.classes.record import ClassCalibration
from latedrop.calibration.fitted_terms import KINDS
from latedrop.calibration.prediction import Prediction
from latedrop.calibration.record import Calibration
from latedrop.errors import ArgumentError, LatedropError
from latedrop.model.calling import Readout
from latedrop.model.items import Items
from latedrop.terms import LocalErrors, Neighbours
from latedrop.variance.engine.checking import check_program
from latedrop.variance.engine.kept import kept
from latedrop.variance.engine.refusing import refuse
from latedrop.variance.engine.snapshots import looked_at
from latedrop.variance.engine.whole import Whole
from latedrop.variance.moments import out_of_memory

__all__ = ["predicted_whole"]

_Found = TypeVar("_Found", Prediction, ClassPrediction)


def predicted_whole(
    model: nn.Module,
    x: Any,
    calibration: Calibration | ClassCalibration,
    readout: Readout,
    predicted: Callable[[Any], _Found],
) -> _Found:
    """What `predicted` gives for a batch that was placed, by a program that is compiled on the first call."""
    if isinstance(x, Items):
        raise ArgumentError("expected another engine with collate=; batches of items have no one shape to compile for.")
    fitted = calibration.terms if isinstance(calibration, Calibration) else None
    own = [term for term in fitted.terms if type(term) not in KINDS.values()] if fitted is not None else []
    code = tuple(looked_at(part) for term in own for part in (type(term), type(term).values, type(term).columns))
    active = fitted.active if fitted is not None else ()
    nearest = [term.name for term in active if isinstance(term, (Neighbours, LocalErrors))]
    if nearest:
        refuse(f"terms that look for the nearest of other rows ({nearest})")

    def made() -> _Program[_Found]:
        return _Program(model, x, calibration, readout, predicted)

    program = kept(model, x, (id(calibration), looked_at(readout), looked_at(own), code), made)
    try:
        if not program.checked:
            check_program(model, x, lambda batch: _numbers(program(batch)), lambda batch: _numbers(predicted(batch)))
            program.checked = True
        found = program(x)
    except Exception as error:
        if isinstance(error, LatedropError) or out_of_memory(error):
            raise
        found = None  # it ran for other inputs: what fails with these is said as ever
    return predicted(x) if found is None else found


def _numbers(found: Prediction | ClassPrediction | None) -> list[Tensor]:
    """What is compared of two predictions."""
    values = [getattr(found, field.name) for field in fields(found)] if found is not None else []
    return [value for value in values if isinstance(value, Tensor)]


class _Program(Generic[_Found]):
    """The program of one calibration. Neither that nor the model is held.

    Attributes:
        checked: whether it was seen to say what the steps say.
    """

    def __init__(
        self,
        model: nn.Module,
        x: Any,
        calibration: Calibration | ClassCalibration,
        readout: Readout,
        predicted: Callable[[Any], _Found],
    ) -> None:
        self.checked = False
        self._calibration = ref(calibration)
        self._kind: type[_Found]
        self._parts: dict[str, tuple[str, ...]] = {}  # what the tensors are called, and what is named in them

        def parts(batch: Any) -> list[Tensor]:
            found = predicted(batch)
            values = {field.name: getattr(found, field.name) for field in fields(found)}
            held = {name: value for name, value in values.items() if isinstance(value, (Tensor, dict))}
            self._kind = type(found)
            self._parts = {name: tuple(value) if isinstance(value, dict) else () for name, value in held.items()}
            return [torch.stack(list(value.values())) if isinstance(value, dict) else value for value in held.values()]

        self._whole = Whole(model, x, calibration.sites, readout, parts, lambda: self._calibration() is not None)

    def __call__(self, x: Any) -> _Found | None:
        """The prediction; None where a check of values failed."""
        found, calibration = self._whole(x), self._calibration()
        if found is None or calibration is None:
            return None
        kind: Any = self._kind
        named: dict[str, Any] = {"calibration": calibration}
        for (name, keys), value in zip(self._parts.items(), found, strict=True):
            named[name] = dict(zip(keys, value.unbind(), strict=True)) if keys else value
        return kind(**named)  # type: ignore[no-any-return]

    def holds(self) -> bool:
        """See `Kept`."""
        return self._whole.holds()

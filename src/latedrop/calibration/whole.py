"""Predictions without draws by a compiled program: the default's, first order and propagation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from latedrop.calibration.fitted_terms import KINDS
from latedrop.calibration.prediction import Prediction
from latedrop.calibration.record import Calibration
from latedrop.errors import ArgumentError
from latedrop.model.calling import Readout
from latedrop.model.items import Items
from latedrop.variance.engine.kept import kept
from latedrop.variance.engine.snapshots import looked_at
from latedrop.variance.engine.whole import Whole

__all__ = ["predicted_whole"]


def predicted_whole(
    model: nn.Module, x: Any, calibration: Calibration, readout: Readout, predicted: Callable[[Any], Prediction]
) -> Prediction:
    """What `predicted` gives for a batch that was placed, by a program that is compiled on the first call."""
    if isinstance(x, Items):
        raise ArgumentError("expected another engine with collate=; batches of items have no one shape to compile for.")
    terms = () if calibration.terms is None else calibration.terms.terms
    own = looked_at([term for term in terms if type(term) not in KINDS.values()])

    def made() -> _Program:
        return _Program(model, x, calibration, readout, predicted)

    found = kept(model, x, (id(calibration), readout, own), made)(x)
    return predicted(x) if found is None else found  # which says what is wrong


class _Program:
    """The program of one calibration. Neither that nor the model is held."""

    def __init__(
        self,
        model: nn.Module,
        x: Any,
        calibration: Calibration,
        readout: Readout,
        predicted: Callable[[Any], Prediction],
    ) -> None:
        self._calibration = ref(calibration)
        self._strange = False
        self._shares: tuple[str, ...] = ()

        def parts(batch: Any) -> list[Tensor]:
            found = predicted(batch)
            self._strange, self._shares = found.strangeness is not None, tuple(found.shares or ())
            shares = [torch.stack(list(found.shares.values()))] if found.shares else []
            strange = [] if found.strangeness is None else [found.strangeness]
            return [found.output, found.raw_variance, *strange, *shares]

        self._whole = Whole(model, x, calibration.sites, readout, parts, lambda: self._calibration() is not None)

    def __call__(self, x: Any) -> Prediction | None:
        found, calibration = self._whole(x), self._calibration()
        if found is None or calibration is None:
            return None
        output, variance, *more = found
        shares = dict(zip(self._shares, more.pop().unbind(), strict=True)) if self._shares else None
        return Prediction(output, variance, calibration, more[0] if self._strange else None, shares=shares)

    def holds(self) -> bool:
        """See `Kept`."""
        return self._whole.holds()

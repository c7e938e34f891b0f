"""Run predictions without draws (the default for numbers and classes, first order, propagation) as a compiled program.

All steps are traced as one function of the batch: forward and backward passes, features, terms and guard. Values cannot
be checked while a function is traced, so batches with results that are not finite are predicted again step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from latedrop.calibration.guard import LARGEST
from latedrop.calibration.record import Calibration
from latedrop.data.arrays import floating
from latedrop.data.rows import tensors
from latedrop.dropout.compiled import Program, batch_function, program_for, readout_key, refuse
from latedrop.dropout.moments import out_of_memory
from latedrop.errors import LatedropError
from latedrop.prediction.prediction import ClassPrediction, Prediction

__all__ = ["predicted_whole"]

_SHARE, _OF_RANGE = 0.01, 0.05  # how far a program may be from the steps: of the largest number, and of their range
_HALF = 0.2  # both, where the model computes in half precision: a deep network differs by as much between two kernels


def predicted_whole(uq: Any, predicted: Callable[[Any], Any], x: Any) -> Any:
    """Run `predicted` on a batch that is on the device, as a program that is compiled on the first call."""
    network, calibration, engine = uq.network, uq.calibration, uq.engine
    fitted = calibration.terms if isinstance(calibration, Calibration) else None
    nearest = [term.name for term in fitted.active if term.is_lookup] if fitted is not None else []
    if nearest:
        refuse(f"terms that look for the nearest of other rows ({nearest})")
    function, inputs = batch_function(x, lambda batch: _with_largest(_values(predicted(batch)), floating(batch)))
    key = "whole", id(calibration), readout_key(uq.readout)
    program = program_for(network, x, key, engine, lambda: Program(network, function, inputs, engine))
    try:
        *results, largest = program(*inputs)
    except Exception as error:
        if isinstance(error, LatedropError) or out_of_memory(error) or not program.checked:
            raise
        return predicted(x)  # it ran for other inputs: what fails with these is said as ever
    if not program.checked:
        steps = predicted(x)
        _check(results, _values(steps), half=network.weight.dtype in (torch.float16, torch.bfloat16))
        program.checked, program.shape = True, steps  # which holds the calibration, so that its id stays
        return steps
    if not float(largest) < LARGEST:  # the steps treat such numbers apart, and NaN
        return predicted(x)
    values = iter(results)
    return program.shape.mapped(lambda _: next(values))


def _values(prediction: Prediction | ClassPrediction) -> list[Tensor]:
    """Return the tensors of a prediction, in the order of `mapped`."""
    return [value.detach() for value in tensors({**vars(prediction), "calibration": None})]


def _with_largest(values: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return values and the largest absolute one (NaN if one is NaN), so that a check copies one number."""
    sizes = [v.abs().amax().double() for v in (*values, *inputs) if v.is_floating_point() and v.numel()]
    return [*values, torch.stack(sizes).amax()]


def _check(results: Sequence[Tensor], expected: Sequence[Tensor], *, half: bool) -> None:
    """Raise `ArgumentError` if the results of a program differ from those step by step."""
    share, of_range = (_HALF, _HALF) if half else (_SHARE, _OF_RANGE)
    for a, b in zip(results, expected, strict=True):
        if b.is_floating_point() and b.numel():
            a, b = a.double(), b.double()
            if float((a - b).abs().max()) > share * float(b.abs().max()) + of_range * float(b.max() - b.min()):
                refuse(
                    "other numbers in the program than step by step: noise of its own, or values that Python code "
                    "takes out of its tensors"
                )

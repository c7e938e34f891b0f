"""Quick calibrations: few rates and draws, no progress bar, and the paper's method unless told otherwise."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from latedrop import Propagation, Sampling, calibrate
from latedrop.calibration.methods import checked_method


def quick(rates: Sequence[float], draws: int) -> Callable[..., Any]:
    """`calibrate` with these rates and draws, where a method does not name its own."""

    def calibrated(model: Any, data: Any, *, method: Any = "sample", **options: Any) -> Any:
        method = checked_method(method)
        if isinstance(method, (Sampling, Propagation)) and method.rates is None:
            method = replace(method, rates=rates)
        if isinstance(method, Sampling) and method.draws == Sampling().draws:
            method = replace(method, draws=draws)
        return calibrate(model, data, **{"method": method, "progress": False, **options})

    return calibrated

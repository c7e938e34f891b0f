"""How mean and raw variance are measured: by draws, to first order, or carried through the layers.

Calibration and prediction measure in the same way, so that a scale fitted to one holds for the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

from torch import nn

from latedrop.dropout.first_order import linearize
from latedrop.dropout.moments import Moments, Sampling
from latedrop.dropout.sampling import sample_rates
from latedrop.network.network import Network
from latedrop.network.sites import Rate, Sites
from latedrop.propagation.propagate import propagate

__all__ = ["Method", "moments"]

Method: TypeAlias = Literal["terms", "sample", "linear", "propagate"]


def moments(
    model: nn.Module | Network,
    x: Any,
    rates: Sequence[Rate],
    sites: Sites,
    method: str,
    options: Sampling,
    tick: Callable[[], Any] = lambda: None,
) -> list[Moments]:
    """Mean and raw variance of `x`, which was placed, at each rate; `tick` is called after each. Not for terms.

    Of the options, methods other than `"sample"` need the readout alone.
    """
    if method == "sample":
        return sample_rates(model, x, rates, sites, options, tick)
    if method == "linear":
        result = linearize(model, x, sites, options.readout)
        return [Moments(result.mean, result.variance(rate), 0) for rate in rates]
    found = []
    for rate in rates:
        found.append(propagate(model, x, rate, sites, options.readout))
        tick()
    return found

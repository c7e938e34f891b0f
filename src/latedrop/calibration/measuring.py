"""How mean and raw variance are measured: by draws, to first order, or carried through the layers.

Calibration and prediction measure with the same `Measuring`, so that a scale fitted to one holds for the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import nn

from latedrop.model.forward import Readout
from latedrop.model.sites import Rate, Sites, odds_by_site
from latedrop.variance.first_order import linearize
from latedrop.variance.propagation import propagate
from latedrop.variance.sampling import Engine, Moments, sample_rates

__all__ = ["Measuring", "Method", "moments"]

Method: TypeAlias = Literal["sample", "linear", "propagate"]


@dataclass(frozen=True)
class Measuring:
    """One of the three methods, and what it needs.

    Attributes:
        method: `"sample"`, `"linear"` or `"propagate"`.
        draws: thinned networks per rate; the other methods need none.
        seed: fixes all masks.
        readout: from the raw output to the quantity of interest.
        chunk: draws that run at once; chosen to fit memory where None.
        shared: False gives every example its own masks.
        engine: how draws are run, see `sample`.
    """

    method: str
    draws: int
    seed: int
    readout: Readout
    chunk: int | None
    shared: bool
    engine: Engine


def moments(
    model: nn.Module,
    x: Any,
    rates: Sequence[Rate],
    sites: Sites,
    how: Measuring,
    tick: Callable[[], Any] = lambda: None,
) -> list[Moments]:
    """Mean and raw variance of `x`, which was placed, at each rate; `tick` is called after each."""
    if how.method == "sample":
        return sample_rates(
            model,
            x,
            rates,
            sites,
            how.draws,
            how.seed,
            how.readout,
            how.chunk,
            how.shared,
            engine=how.engine,
            tick=tick,
        )
    if how.method == "linear":
        result = linearize(model, x, sites, how.readout)
        return [Moments(result.mean, result.variance(odds_by_site(sites, rate)), 0) for rate in rates]
    found = []
    for rate in rates:
        found.append(propagate(model, x, rate, sites, how.readout))
        tick()
    return found

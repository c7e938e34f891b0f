"""Where the variance of one prediction comes from."""

from __future__ import annotations

from math import prod
from typing import Any

from latedrop.calibration.fitted_terms import is_site
from latedrop.calibration.record import Calibration
from latedrop.data.arrays import place
from latedrop.dropout.first_order import unit_variances
from latedrop.errors import ArgumentError, OutputError
from latedrop.network.network import Network, Readout
from latedrop.network.sites import odds_by_site
from latedrop.prediction.prediction import Explanation
from latedrop.terms import BatchContext

__all__ = ["explained"]


def explained(
    network: Network, x: Any, calibration: Calibration, readout: Readout, *, output: int, most: int
) -> Explanation:
    """The shares of sites, terms and units in the variance of one row, before the guard."""
    sites = calibration.sites
    mean, columns = unit_variances(network, x, sites, readout)
    if not 0 <= output < len(columns):
        raise ArgumentError(f"expected an output between 0 and {len(columns) - 1}; found {output}.")
    others = _other_terms(network, x, calibration, readout, output)
    odds = _odds(calibration, output)
    parts = {s.name: columns[output][s.name].double() * o for s, o in zip(sites, odds, strict=True)}
    total = sum(float(part.sum()) for part in parts.values()) + sum(others.values())
    if total == 0:
        raise OutputError(
            "expected a prediction that dropout can move; no unit of any site contributes to it: the variance that "
            "is predicted here is the floor alone."
        )
    units = []
    for site in sites:
        values, places = parts[site.name].topk(min(most, parts[site.name].numel()))
        units += [
            (site.name, site.place(place), value / total)
            for value, place in zip(values.tolist(), places.tolist(), strict=True)
        ]
    units.sort(key=lambda unit: -unit[2])
    shares = {name: float(part.sum()) / total for name, part in parts.items()}
    shares |= {name: value / total for name, value in others.items()}
    own = mean if calibration.target is None else calibration.target.inverse(mean)
    return Explanation(float(own.flatten()[output]), shares, tuple(units[:most]))


def _odds(calibration: Calibration, output: int) -> list[float]:
    """What every site's first-order variance is multiplied by."""
    if calibration.terms is not None:
        index = output // prod(calibration.output_shape[1:])  # of axis 1
        return calibration.terms.odds([site.name for site in calibration.sites], index)
    return list(odds_by_site(calibration.sites, calibration.rate))


def _other_terms(network: Network, x: Any, calibration: Calibration, readout: Readout, output: int) -> dict[str, float]:
    """What the floor and the terms other than dropout to first order add to the variance of one row."""
    terms = calibration.terms
    if terms is None:
        return {}
    rows = BatchContext(network, place(x, network.copy), calibration.sites, readout, terms.features)
    parts = terms.parts(rows)
    return {name: float(part[0].flatten()[output]) for name, part in parts.items() if not is_site(name)}

"""What is noteworthy about the rate that was chosen, and about a variance that was approximated.

First order leaves out all but small masks, and propagation takes units as independent. A scale hides how far off they
are, so that a few draws on a few validation rows are compared with them:

    ratio = sum of approximated variances / sum of variances over draws
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from warnings import warn

from torch import Tensor

from latedrop.calibration.measuring import moments
from latedrop.calibration.rate_fit import RateFit
from latedrop.calibration.scale import apply_scale
from latedrop.calibration.setup import Setup
from latedrop.calibration.verdict import Left, losses, standard_error
from latedrop.data.rows import row_count, take_rows, tensors
from latedrop.dropout.moments import Sampling
from latedrop.dropout.sampling import sample_rates
from latedrop.errors import LatedropWarning
from latedrop.metrics.entries import average
from latedrop.network.sites import Rate, Sites, rates_by_site

__all__ = ["few_rows", "ratio_to_draws", "warn_of_edge", "warn_of_few_drops", "warn_of_ratio"]

_ROWS, _VALUES = 8, 2**18  # of the inputs that a few draws run on
_DRAWS, _DROPS = 50, 100  # so many units must be dropped in all for a variance over so many draws to be told
_SMALL = 0.1  # a rate to which first order should hold
_FAR = 3.0
_HARDLY_ANY = 5
_GAIN = 0.02  # nats that are worth a word


def few_rows(x: Any, sites: Sites) -> Any:
    """The first rows of a batch; all of them where they belong together."""
    if any(site.coupled or site.batch_axis is None for site in sites):
        return x
    row = sum(value.numel() for value in tensors(x)) / max(row_count(x), 1)
    return take_rows(x, slice(max(1, min(_ROWS, int(_VALUES / max(row, 1))))))


def ratio_to_draws(model: Any, x: Any, rate: Rate, sites: Sites, setup: Setup) -> float | None:
    """The approximated variance over that of a few draws; None where these do not vary.

    At the chosen rate, or at one at which draws can tell; of first order at 0.1 or less, as it is one for small rates.
    """
    most = _SMALL if setup.method == "linear" else 0.9
    wanted = rates_by_site(sites, rate)
    least = {site.name: min(_SMALL, _DROPS / (_DRAWS * site.count * site.calls)) for site in sites}
    used = {name: min(max(value, least[name]), most) for name, value in wanted.items() if value > 0}
    options = Sampling(_DRAWS, setup.seed, setup.readout, engine="loop")
    (drawn,) = sample_rates(model, x, [used], sites, options)
    (found,) = moments(model, x, [used], sites, setup.method, options)
    spread = float(drawn.variance.double().sum())
    return float(found.variance.double().sum()) / spread if spread > 0 else None


def warn_of_ratio(ratio: float | None, method: str) -> None:
    """Warn where an approximation is far from draws."""
    if ratio is not None and not 1 / _FAR <= ratio <= _FAR:
        why = {
            "linear": "the output bends too much for a first order, or something cuts off its gradients",
            "propagate": "units that propagation takes as independent are not, as behind a stack of convolutions",
        }[method]
        warn(
            f"the variance of method={method!r} is {ratio:.2g} times that of {_DRAWS} draws on a few validation rows: "
            f"{why}. The scale makes up for its size, not for what it says about one row against another. Compare with "
            "method='sample'.",
            LatedropWarning,
            stacklevel=5,
        )


def warn_of_edge(fits: Sequence[RateFit], best: RateFit, criterion: str) -> None:
    """Warn where the best of several rates is the smallest or the largest, and the NLL still falls towards it."""
    found = [fit for fit in fits if isinstance(fit.rate, float)]
    found.sort(key=lambda fit: float(fit.rate))  # type: ignore[arg-type]
    if len(found) < 3 or (best is not found[0] and best is not found[-1]):
        return
    beside = found[1] if best is found[0] else found[-2]
    gain = _losses(beside, criterion) - _losses(best, criterion)
    if float(average(gain, best.weights)) > max(_GAIN, 2 * standard_error(gain, Left(weights=best.weights))):
        side, more = ("smallest", "smaller rates with more draws") if best is found[0] else ("largest", "larger rates")
        warn(
            f"the best rate, {best.rate:g}, is the {side} that was tried, and the NLL still falls towards it: a better "
            f"one may lie beyond. Try {more}, rates=[...].",
            LatedropWarning,
            stacklevel=5,
        )


def warn_of_few_drops(rate: Rate, sites: Sites, draws: int) -> None:
    """Warn where the variance rests on a handful of dropped units."""
    rates = rates_by_site(sites, rate)
    drops = draws * sum(site.count * site.calls * rates[site.name] for site in sites)
    if drops < _HARDLY_ANY:
        warn(
            f"at the chosen rate {draws} draws drop {drops:.1f} units in all, on average: the variance rests on these. "
            "Take more draws, larger rates, or method='linear', which is the limit of small rates.",
            LatedropWarning,
            stacklevel=5,
        )


def _losses(fit: RateFit, criterion: str) -> Tensor:
    """The NLL of every validation row, but for a constant."""
    variance = fit.variance.double()
    variance = apply_scale(variance, *fit.optimal) if criterion == "scaled" else variance
    return losses(fit.target.double() - fit.mean.double(), variance)

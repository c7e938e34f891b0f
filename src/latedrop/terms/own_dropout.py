"""The dropout that a model was trained with, switched on: embedded dropout.

With `p_s` the rate of each dropout layer, `t(x) = sum_s p_s / (1 - p_s) · v_s` to first order, or the variance over
thinned networks; see `dropout`. Its coefficient says how much of that the errors ask for.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal

from torch import Tensor

from latedrop.dropout.first_order import linearize
from latedrop.dropout.masks import checked_seed
from latedrop.dropout.moments import Sampling, checked_draws
from latedrop.dropout.sampling import sample_rates
from latedrop.errors import ArgumentError, DataError
from latedrop.network.find_sites import own_dropouts
from latedrop.network.sites import Probability, StoredSites
from latedrop.records import record
from latedrop.terms.term import BatchContext, Term

__all__ = ["OwnDropout"]


@record
@dataclass(eq=False)
class OwnDropout(Term):
    """Embedded dropout.

    Args:
        draws: thinned networks; 0 takes the variance to first order.
        seed: fixes their masks.
        sites, rates: the model's dropout layers, once it was shown the model.

    >>> import latedrop, torch
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> net = torch.nn.Sequential(
    ...     torch.nn.Linear(1, 20), torch.nn.Dropout(0.1), torch.nn.Tanh(), torch.nn.Linear(20, 1)
    ... )
    >>> latedrop.calibrate(net, (x, x**2), method=latedrop.Terms([OwnDropout(), "leverage"])).predict(x).std.shape
    torch.Size([64, 1])
    """

    draws: int = 0
    _: KW_ONLY
    seed: int = 0
    sites: StoredSites | None = None
    rates: dict[str, Probability] | None = None
    name: Literal["own_dropout"] = "own_dropout"

    def __post_init__(self) -> None:
        if self.draws != 0 or type(self.draws) is not int:
            checked_draws(self.draws)
        checked_seed(self.seed)
        names = None if self.sites is None else {site.name for site in self.sites}
        if names != (None if self.rates is None else set(self.rates)):
            raise ArgumentError("expected a rate for every dropout layer of the model's own.")

    def prepared(self, rows: BatchContext) -> OwnDropout:
        """See `Term`."""
        sites, rates = own_dropouts(rows.model, rows.x)
        return replace(self, sites=sites, rates=rates)

    def values(self, rows: BatchContext) -> Tensor:
        """See `Term`."""
        if self.sites is None or self.rates is None:
            raise DataError("expected a term that was shown the model; found one that was not.")
        if self.draws:
            options = Sampling(self.draws, self.seed, rows.readout)
            return sample_rates(rows.network, rows.x, [self.rates], self.sites, options)[0].variance
        return linearize(rows.network, rows.x, self.sites, rows.readout).variance(self.rates)

"""The dropout that a model was trained with, switched on: embedded dropout.

With `p_s` the rate of each dropout layer, `t(x) = sum_s p_s / (1 - p_s) · v_s` to first order, or the variance over
thinned networks; see `dropout`. Its coefficient says how much of that the errors ask for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from latedrop.dropout.first_order import linearize
from latedrop.dropout.masks import checked_seed
from latedrop.dropout.moments import Sampling, checked_draws
from latedrop.dropout.sampling import sample_rates
from latedrop.errors import ArgumentError, DataError
from latedrop.network.find_sites import own_dropouts
from latedrop.network.sites import Site, Sites
from latedrop.terms.term import Learned, Rows, Term

__all__ = ["OwnDropout"]


class OwnDropout(Term):
    """Embedded dropout.

    Args:
        draws: thinned networks; 0 takes the variance to first order.
        seed: fixes their masks.

    >>> import latedrop, torch
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> net = torch.nn.Sequential(
    ...     torch.nn.Linear(1, 20), torch.nn.Dropout(0.1), torch.nn.Tanh(), torch.nn.Linear(20, 1)
    ... )
    >>> latedrop.calibrate(net, (x, x**2), terms=[OwnDropout(), "leverage"]).predict(x).std.shape
    torch.Size([64, 1])
    """

    name: ClassVar[str] = "own_dropout"

    def __init__(
        self,
        draws: int = 0,
        *,
        seed: int = 0,
        sites: Sequence[Site] | list[Any] | None = None,
        rates: Mapping[str, float] | None = None,
    ) -> None:
        self.draws, self.seed = 0 if draws == 0 and type(draws) is int else checked_draws(draws), checked_seed(seed)
        self._sites = None if sites is None else sites if isinstance(sites, Sites) else Sites.from_list(sites)
        if (sites is None) != (rates is None) or (self._sites and set(rates or ()) != {s.name for s in self._sites}):
            raise ArgumentError("expected a rate for every dropout layer of the model's own.")
        self._rates = dict(rates or {})

    def prepared(self, rows: Rows) -> OwnDropout:
        """See `Term`."""
        sites, rates = own_dropouts(rows.model, rows.x)
        return OwnDropout(self.draws, seed=self.seed, sites=sites, rates=rates)

    def values(self, rows: Rows) -> Tensor:
        """See `Term`."""
        if self._sites is None:
            raise DataError("expected a term that was shown the model; found one that was not.")
        if self.draws:
            options = Sampling(self.draws, self.seed, rows.readout)
            return sample_rates(rows.network, rows.x, [self._rates], self._sites, options)[0].variance
        return linearize(rows.network, rows.x, self._sites, rows.readout).variance(self._rates)

    def state(self) -> Learned:
        """See `Term`."""
        sites = None if self._sites is None else self._sites.to_list()
        return {"draws": self.draws, "seed": self.seed, "sites": sites, "rates": self._rates or None}

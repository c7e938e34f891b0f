"""Dropout at the sites: one column per site to first order, or one column for all from a few draws.

To first order `t_s(x) = sum over the units i of s of (h_i · dy/dh_i)^2`, and its coefficient is `rate / (1 - rate)`;
see `variance.first_order`. It costs a backward pass for every output, so that models with many outputs, and those that
autograd cannot differentiate, are measured by draws: `t(x)` is the variance over thinned networks at one rate.
"""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

from torch import Tensor

from latedrop.dropout.masks import checked_seed
from latedrop.dropout.moments import Sampling, checked_draws
from latedrop.dropout.sampling import sample_rates
from latedrop.errors import ArgumentError, LatedropError
from latedrop.terms.term import Learned, Rows, Term

__all__ = ["Dropout"]

_MOST_OUTPUTS = 4  # to first order each costs a backward pass, about two plain ones; beyond, draws are cheaper
_Way = Literal["first order", "draws"]


class Dropout(Term):
    """Dropout at the sites.

    Args:
        way: `"first order"` or `"draws"`; by default the first, where it can be had and there are few outputs.
        rate: of the draws.
        draws: how many.
        seed: fixes their masks.

    >>> import latedrop, torch
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
    >>> latedrop.calibrate(net, (x, x**2), terms=[Dropout("draws", draws=20), "leverage"]).predict(x).std.shape
    torch.Size([64, 1])
    """

    name: ClassVar[str] = "dropout"

    def __init__(self, way: _Way | None = None, *, rate: float = 0.1, draws: int = 10, seed: int = 0) -> None:
        if way is not None and way not in get_args(_Way):
            raise ArgumentError(f"expected dropout by 'first order' or by 'draws'; found {way!r}.")
        if isinstance(rate, bool) or not isinstance(rate, float) or not 0 < rate < 1:
            raise ArgumentError(f"expected a rate inside (0, 1); found {rate!r}.")
        self.way, self.rate, self.draws, self.seed = way, rate, checked_draws(draws), checked_seed(seed)

    def prepared(self, rows: Rows) -> Dropout:
        """See `Term`."""
        if self.way is not None:
            return self
        way: _Way = "first order"
        if rows.mean[0].numel() > _MOST_OUTPUTS or any(site.coupled for site in rows.sites):
            way = "draws"
        else:
            try:
                _ = rows.linear
            except LatedropError:
                way = "draws"
        return Dropout(way, rate=self.rate, draws=self.draws, seed=self.seed)

    def columns(self, rows: Rows) -> dict[str, Tensor]:
        """See `Term`."""
        if self.way != "draws":
            by_site = rows.linear.variance_by_site
            named = zip(rows.sites, by_site.unbind(-1), strict=True)
            return {site.name: column.reshape(rows.mean.shape) for site, column in named}
        options = Sampling(self.draws, self.seed, rows.readout)
        (found,) = sample_rates(rows.network, rows.x, [self.rate], rows.sites, options)
        return {"": found.variance}

    def state(self) -> Learned:
        """See `Term`."""
        return {"way": self.way, "rate": self.rate, "draws": self.draws, "seed": self.seed}

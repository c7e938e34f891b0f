"""Dropout at the sites: one column per site to first order, or one column for all from a few draws.

To first order `t_s(x) = sum over the units i of s of (h_i · dy/dh_i)^2`, and its coefficient is `rate / (1 - rate)`;
see `variance.first_order`. It costs a backward pass for every output, so that models with many outputs, and those that
autograd cannot differentiate, are measured by draws: `t(x)` is the variance over thinned networks at one rate.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Annotated, ClassVar, Literal, get_args

from torch import Tensor

from latedrop.data.rows import rows_are_nodes
from latedrop.dropout.masks import checked_seed
from latedrop.dropout.moments import Sampling, checked_draws
from latedrop.dropout.sampling import sample_rates
from latedrop.errors import ArgumentError, LatedropError
from latedrop.records import Limits, record
from latedrop.terms.term import BatchContext, Term

__all__ = ["Dropout"]

_MOST_OUTPUTS = 4  # to first order each costs a backward pass, about two plain ones; beyond, draws are cheaper
_Way = Literal["first order", "draws"]


@record
@dataclass(eq=False)
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
    >>> method = latedrop.Terms([Dropout("draws", draws=20), "leverage"])
    >>> latedrop.calibrate(net, (x, x**2), method=method).predict(x).std.shape
    torch.Size([64, 1])
    """

    way: _Way | None = None
    _: KW_ONLY
    rate: Annotated[float, Limits(0, 1)] = 0.1
    draws: int = 10
    seed: int = 0
    name: Literal["dropout"] = "dropout"
    is_block: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.way is not None and self.way not in get_args(_Way):
            raise ArgumentError(f"expected dropout by 'first order' or by 'draws'; found {self.way!r}.")
        if isinstance(self.rate, bool) or not isinstance(self.rate, float) or not 0 < self.rate < 1:
            raise ArgumentError(f"expected a rate inside (0, 1); found {self.rate!r}.")
        self.draws, self.seed = checked_draws(self.draws), checked_seed(self.seed)

    def prepared(self, rows: BatchContext) -> Dropout:
        """Return the term with the way to measure it: draws where first order is dear or cannot be had."""
        if self.way is not None:
            return self
        way: _Way = "first order"
        coupled = any(site.coupled for site in rows.sites) and not rows_are_nodes(rows.x)
        if rows.mean[0].numel() > _MOST_OUTPUTS or coupled:
            way = "draws"
        else:
            try:
                _ = rows.linear
            except LatedropError:
                way = "draws"
        return replace(self, way=way)

    def columns(self, rows: BatchContext) -> dict[str, Tensor]:
        """Return the first-order variance of every site, or one variance over draws."""
        if self.way != "draws":
            by_site = rows.linear.variance_by_site
            named = zip(rows.sites, by_site.unbind(-1), strict=True)
            return {site.name: column.reshape(rows.mean.shape) for site, column in named}
        options = Sampling(self.draws, self.seed, rows.readout)
        (moments,) = sample_rates(rows.network, rows.x, [self.rate], rows.sites, options)
        return {"": moments.variance}

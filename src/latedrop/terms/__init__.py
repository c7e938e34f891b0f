"""Terms of the variance: quantities that are never negative and vary with the input.

The calibrated variance is `guard(x) · (floor + sum_j theta_j t_j(x))` with `theta_j >= 0`; here are the `t_j`.

>>> import latedrop, torch
>>> x = torch.linspace(-1, 1, 64)[:, None]
>>> net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
>>> terms = ["dropout", Leverage(ridge=0.01), GradientLeverage(), Size(1), ErrorForest(trees=20)]
>>> latedrop.calibrate(net, (x, x**2), method=latedrop.Terms(terms)).predict(x).std.shape
torch.Size([64, 1])

The room may import `dropout`, `network`, `data` and `metrics`.
"""

from typing import TypeAlias

from latedrop.terms.dropout import Dropout
from latedrop.terms.forest import ErrorForest
from latedrop.terms.leverage import GradientLeverage, Leverage, Neighbours
from latedrop.terms.term import BatchContext, Term
from latedrop.terms.variance_head import Size, VarianceHead

__all__ = [
    "BatchContext",
    "Dropout",
    "ErrorForest",
    "GradientLeverage",
    "Leverage",
    "Neighbours",
    "Size",
    "Term",
    "VarianceHead",
]

Kind: TypeAlias = Dropout | Leverage | GradientLeverage | ErrorForest | Neighbours | Size | VarianceHead
"""Terms that a file can hold."""

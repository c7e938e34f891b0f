"""The size of the prediction: noise that grows with the quantity, as a count's does.

`t(x) = |mean|`, or its square; a variance that is a multiple of the mean is a Poisson's, of its square a fixed
percentage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from latedrop.errors import ArgumentError
from latedrop.records import record
from latedrop.terms.term import BatchContext, Term

__all__ = ["Size"]


@record
@dataclass(eq=False)
class Size(Term):
    """Size of the prediction.

    Args:
        power: 1 for `|mean|`, 2 for its square.

    >>> import latedrop, torch
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
    >>> uq = latedrop.calibrate(net, (x, x**2), method=latedrop.Terms(["dropout", Size(1)]))
    >>> uq.predict(x).std.shape
    torch.Size([64, 1])
    """

    power: Literal[1, 2] = 2
    name: Literal["size"] = "size"

    def __post_init__(self) -> None:
        if self.power not in (1, 2):
            raise ArgumentError(f"expected a power of 1 or 2; found {self.power!r}.")

    def values(self, rows: BatchContext) -> Tensor:
        """See `Term`."""
        return rows.mean.abs() if self.power == 1 else rows.mean.square()

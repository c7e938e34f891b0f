"""Variances that the output itself gives: by a head for it, or by the size of the prediction.

`t(x)` of a head is its variance: that of a Gaussian head, as a logarithm, as a standard deviation, or by quantiles. The
fit then tells how much of it, and how much of the other terms, the errors ask for. Noise that grows with the quantity,
as a count's does, is a multiple of `|mean|` (as a Poisson's) or of its square (a fixed percentage).
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from latedrop.data.arrays import any_true
from latedrop.dropout.sampling import own_output
from latedrop.errors import ArgumentError, OutputError
from latedrop.metrics.levels import central_quantile, checked_level
from latedrop.network.network import Readout
from latedrop.records import Via, record
from latedrop.terms.term import BatchContext, Missing, Term

__all__ = ["Size", "VarianceHead"]

_Form: TypeAlias = Literal["variance", "log_variance", "std"]
_Part: TypeAlias = Annotated[Readout, Via(str | int | None, lambda part: part)]


@record
@dataclass(eq=False)
class VarianceHead(Term):
    """A variance that the model says of itself.

    Args:
        readout: which part of the output it is, as for the mean: a function, a name or an index.
        form: `"variance"`, `"log_variance"` or `"std"`.
        upper: another part. Where given, both are quantiles, and `level` is what lies between them.
        level: probability between the two quantiles.

    >>> import latedrop
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.Tanh(), torch.nn.Linear(20, 2))  # mean, log variance
    >>> own = VarianceHead(lambda output: output[:, 1:], "log_variance")
    >>> method = latedrop.Terms(["dropout", own])
    >>> uq = latedrop.calibrate(net, (x, x**2), readout=lambda output: output[:, :1], method=method)
    >>> uq.predict(x).std.shape
    torch.Size([64, 1])
    """

    readout: _Part
    form: _Form = "variance"
    _: KW_ONLY
    upper: _Part = None
    level: float = 0.8
    name: Literal["variance_head"] = "variance_head"

    def __post_init__(self) -> None:
        if self.form not in get_args(_Form):
            raise ArgumentError(f"expected a form of {get_args(_Form)}; found {self.form!r}.")
        self.level = checked_level(self.level)

    def values(self, rows: BatchContext) -> Tensor:
        """Return the variance that the model gives, in the shape of the mean."""
        value = own_output(rows.model, rows.x, self.readout)
        if self.upper is not None:
            wide = own_output(rows.model, rows.x, self.upper) - value
            value = (wide.clamp_min(0) / (2 * float(central_quantile(self.level)))).square()
        elif self.form == "log_variance":
            value = value.exp()
        elif self.form == "std":
            value = value.square()
        if value.shape != rows.mean.shape:
            if value.numel() != rows.mean.numel():
                raise OutputError(
                    f"expected one variance for each of the outputs {tuple(rows.mean.shape)}; the part that "
                    f"VarianceHead reads has shape {tuple(value.shape)}."
                )
            value = value.reshape(rows.mean.shape)
        if any_true(~(torch.isfinite(value) & (value >= 0))):
            raise OutputError(
                "expected variances that are finite and not below 0; the part that VarianceHead reads has others. "
                "Say form='log_variance' where the model gives logarithms."
            )
        return value

    def to_record(self) -> Any:
        """Name the term alone where it reads by a function, which has no place in a file."""
        return Missing(self.name) if callable(self.readout) or callable(self.upper) else self


@record
@dataclass(eq=False)
class Size(Term):
    """Size of the prediction.

    Args:
        power: 1 for `|mean|`, 2 for its square.
    """

    power: Literal[1, 2] = 2
    name: Literal["size"] = "size"

    def __post_init__(self) -> None:
        if self.power not in (1, 2):
            raise ArgumentError(f"expected a power of 1 or 2; found {self.power!r}.")

    def values(self, rows: BatchContext) -> Tensor:
        """Return the size of the prediction, or its square."""
        return rows.mean.abs() if self.power == 1 else rows.mean.square()

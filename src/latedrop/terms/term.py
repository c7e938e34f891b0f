"""Terms, and what they are given: a batch of rows, with what the network makes of them.

A term of one's own is a class with a name and `values`:

    class Night(Term):
        name = "night"

        def values(self, rows: BatchContext) -> Tensor:
            return (rows.x[:, 3] > 20).float()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from latedrop.data.arrays import widened
from latedrop.data.rows import Items, row_count, tensors
from latedrop.dropout.first_order import Linearization, first_order
from latedrop.dropout.sampling import own_output
from latedrop.network.network import Network, Readout, check_finite, read
from latedrop.network.sites import Sites
from latedrop.records import record
from latedrop.terms.features import Features, joined_gradients
from latedrop.torch_private import being_traced

__all__ = ["BatchContext", "Missing", "OnDevices", "Term"]

_WIDEST_TABLE = 256

if TYPE_CHECKING:
    _once = cached_property
else:

    class _once(cached_property):  # noqa: N801 - used as a decorator
        """Compute an attribute when it is first asked for; before Python 3.12 `cached_property` locks other threads."""

        def __get__(self, instance: Any, owner: Any = None) -> Any:
            if instance is None:
                return self
            value = vars(instance)[self.attrname] = self.func(instance)
            return value


class BatchContext:
    """A batch of N examples; each of the parts below is computed when it is first asked for.

    Attributes:
        model: as the user has it.
        network: its private copy, which is run in its place.
        x: the inputs, on its device.
        sites: where dropout goes.
        readout: what of the output is taken.
        index: `(N,)`, the rows' places among the validation rows while these are fitted; None for new rows.
        weights: `(N,)`, what validation rows count while these are fitted; None where all count the same.
        totals: the sum of a term's columns, in the shape of the mean, for terms that were measured before others.
        wants_gradients: whether the pass of first order notes mask gradients, too, should they be asked for later.
    """

    def __init__(
        self,
        network: Network,
        x: Any,
        sites: Sites,
        readout: Readout,
        features: Features | None,
        index: Tensor | None = None,
        *,
        gradients: bool = False,
        of: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.network = network
        self.model = network.model
        self.x = x
        self.sites = sites
        self.readout = readout
        self.index = index
        self.weights: Tensor | None = None
        self.totals: dict[str, Tensor] = {}
        self.wants_gradients = gradients
        self._which = features
        self._of = of
        self._values: dict[int, Tensor] = {}
        self._output: Any = None  # raw, of the pass for the features; read where the mean is asked for

    def remember(self, **parts: Tensor | None) -> None:
        """Take parts that were computed before: `mean`, `features`, `gradients`, `table`."""
        vars(self).update({name: part for name, part in parts.items() if part is not None})

    @property
    def has_features(self) -> bool:
        """Whether there are features to ask for."""
        return self._which is not None or "features" in vars(self)

    @_once
    def table(self) -> Tensor | None:
        """The inputs as they are, `(N, columns)`, where they are tables of at most 256 columns; else None."""
        if self.x is None or isinstance(self.x, Items):
            return None
        parts = [part if part.dim() == 2 else part[:, None] for part in tensors(self.x) if part.dim() in (1, 2)]
        alike = len(parts) == len(tensors(self.x)) > 0 and all(part.is_floating_point() for part in parts)
        alike = alike and len({len(part) for part in parts}) == 1
        if not alike or sum(part.shape[1] for part in parts) > _WIDEST_TABLE:
            return None
        return torch.cat(parts, 1) if len(parts) > 1 else parts[0]

    def values_of(self, term: Term) -> Tensor:
        """Return what a term gives for these rows, computed once: a guard may look at the same."""
        if id(term) not in self._values:
            self._values[id(term)] = term.values(self)
        return self._values[id(term)]

    @_once
    def linear(self) -> Linearization:
        """The first-order variance of every site."""
        return self._differentiated(self.wants_gradients)

    @_once
    def gradients(self) -> Tensor:
        """The mask gradients of each of K outputs, or of what `of` makes of the output, `(N, K, D)`."""
        self.linear = self._differentiated(True)
        gradients: Tensor = vars(self)["gradients"]
        return gradients

    def _differentiated(self, gradients: bool) -> Linearization:
        """Run first order, with the gradient of every mask or without; the same pass notes the features."""
        wanted, network, of = self._which, self.network, self._of if gradients else None
        noting = None if wanted is None else partial(wanted.noting, network)
        parts = first_order(network, self.x, self.sites, self.readout, phi=gradients, watch=noting, of=of)
        linear, phi, noted = [], [], []
        for part in parts:
            linear.append(part.linear)
            if gradients:
                phi.append(joined_gradients(network, self.sites, part.phi))
            if wanted is not None:
                noted.append(wanted.gathered(part.watcher))
        if gradients:
            self.gradients = torch.cat(phi)
        if wanted is not None and "features" not in vars(self):
            self.features = torch.cat(noted)
        return linear[0] if len(linear) == 1 else Linearization.joined(linear)

    @_once
    def mean(self) -> Tensor:
        """The model's own output, `(N, ...)`."""
        if "linear" not in vars(self) and self._which is not None:
            _ = self.features  # whose pass has the output, too
        if "linear" in vars(self):
            return self.linear.mean
        if self._output is None:
            return own_output(self.network, self.x, self.readout)
        mean = widened(read(self._output, self.readout, row_count(self.x)).detach())
        self._output = None
        check_finite(mean, "without dropout")
        return mean

    @_once
    def features(self) -> Tensor:
        """The features that enter the sites, `(N, features)`; see `Features`."""
        if self._which is None:
            raise ValueError("no term asked for features")
        if not self._which.are_loose(self.sites):
            features, self._output = self._which.of(self.network, self.x, self.sites)
        else:
            self.linear = self._differentiated(self.wants_gradients)
            features = vars(self)["features"]
        return features


class OnDevices:
    """Tensors, which are copied to each device once."""

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors, self._copies = tensors, dict[torch.device, tuple[Tensor, ...]]()

    def on(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return them on a device."""
        if device.type == "cpu" or being_traced():
            return tuple(tensor.to(device) for tensor in self._tensors)
        if device not in self._copies:
            with torch.inference_mode(False):
                self._copies[device] = tuple(tensor.to(device) for tensor in self._tensors)
        return self._copies[device]


class Term:
    """Something that is never negative, varies with the input and may explain the size of errors.

    Attributes:
        name: in tables, and in the file of a calibration.
        needs_features: whether `rows.features` is asked for, of reference rows too.
        needs_gradients: whether `rows.gradients` is, of reference rows too.
        needs_errors: whether it learns from the errors of all entries of the validation rows.
        is_lookup: whether it looks for the nearest of other rows, which no traced program can.
        is_block: whether its columns share one coefficient, unless a candidate tells each apart.

    >>> import latedrop
    >>> class Distance(Term):
    ...     name = "distance"
    ...
    ...     def values(self, rows):
    ...         return rows.x.square().sum(1)
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
    >>> uq = latedrop.calibrate(net, (x, x**2), method=latedrop.Terms(["dropout", Distance()]))
    >>> uq.predict(x).std.shape
    torch.Size([64, 1])
    """

    name: str
    needs_features: ClassVar[bool] = False
    needs_gradients: ClassVar[bool] = False
    needs_errors: ClassVar[bool] = False
    is_lookup: ClassVar[bool] = False
    is_block: ClassVar[bool] = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({getattr(self, 'name', '')})"

    def values(self, rows: BatchContext) -> Tensor:
        """Not negative: `(N,)`, for all outputs alike, or in the shape of `rows.mean`."""
        raise NotImplementedError

    def columns(self, rows: BatchContext) -> dict[str, Tensor]:
        """All that has a coefficient of its own, by name; `values` alone, without a name, unless there are several."""
        return {"": rows.values_of(self)}

    def prepared(self, rows: BatchContext) -> Term:
        """Return the term ready to measure: it is shown the first rows once, before all others.

        It raises `LatedropError` where a model cannot have it; by default it is then left out.
        """
        return self

    def learned_from(self, reference: Iterable[Tensor], own: bool) -> Term:
        """Return the term after the features of all reference rows have passed, in batches; or their mask gradients.

        `own` says that the reference rows are the validation rows themselves: each is then left out for itself.
        """
        return self

    def learned_from_errors(self, rows: BatchContext, error: Tensor) -> Term:
        """Return the term after the errors `(N, ...)` of all validation rows; `rows` has their features and means."""
        return self


@record
@dataclass(eq=False)
class Missing(Term):
    """Stands for a term of the user's own that a file could only name."""

    name: str

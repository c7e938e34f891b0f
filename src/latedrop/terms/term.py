"""What a term is, and what it is given: a batch of rows, with what the network makes of them.

A term of one's own is a class with a name and `values`:

    class Night(Term):
        name = "night"

        def values(self, rows: Rows) -> Tensor:
            return (rows.x[:, 3] > 20).float()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from latedrop.data.arrays import widened
from latedrop.data.rows import row_count
from latedrop.dropout.first_order import Linearization, linearize, watched
from latedrop.dropout.sampling import own_output
from latedrop.network.calling import Readout, check_finite, read
from latedrop.network.network import Network
from latedrop.network.sites import Sites
from latedrop.terms.features import Features

__all__ = ["Learned", "Rows", "Term"]

Learned = Mapping[str, Any]
"""What a term has learned, as a calibration keeps it."""


class Rows:
    """A batch of N examples; each of the parts below is computed when it is first asked for.

    Attributes:
        model: as the user has it.
        network: its private copy, which is run in its place.
        x: the inputs, on its device.
        sites: where dropout goes.
        readout: what of the output is taken.
        index: `(N,)`, the rows' places among the validation rows while these are fitted; None for new rows.
    """

    def __init__(
        self,
        model: nn.Module | Network,
        x: Any,
        sites: Sites,
        readout: Readout,
        features: Features | None,
        index: Tensor | None = None,
    ) -> None:
        self.network = Network.of(model)
        self.model = self.network.model
        self.x = x
        self.sites = sites
        self.readout = readout
        self.index = index
        self._which = features
        self._linear: Linearization | None = None
        self._mean: Tensor | None = None
        self._features: Tensor | None = None
        self._values: dict[int, Tensor] = {}
        self._outputs: list[Any] = []  # raw, of the pass for the features; read where the mean is asked for

    def remember(self, features: Tensor, mean: Tensor | None = None) -> None:
        """Take parts that were computed before."""
        self._features, self._mean = features, mean

    def values_of(self, term: Term) -> Tensor:
        """What a term gives for these rows, computed once: a guard may look at the same."""
        if id(term) not in self._values:
            self._values[id(term)] = term.values(self)
        return self._values[id(term)]

    @property
    def linear(self) -> Linearization:
        """The first-order variance of every site; the same pass notes the features, if there are any."""
        if self._linear is not None:
            return self._linear
        wanted = self._which
        if wanted is None:
            self._linear = linearize(self.network, self.x, self.sites, self.readout)
        else:
            noting = partial(wanted.noting, self.network, self.sites)
            self._linear, noted = watched(self.network, self.x, self.sites, self.readout, noting)
            if self._features is None:
                self._features = torch.cat([wanted.gathered(one)[:rows] for one, rows in noted])
        return self._linear

    @property
    def mean(self) -> Tensor:
        """The model's own output, `(N, ...)`."""
        if self._mean is None:
            if self._linear is None and self._which is not None and self.network.batches(self.x) is None:
                _ = self.features  # whose pass has the output, too
            if self._linear is not None:
                self._mean = self._linear.mean
            elif not self._outputs:
                self._mean = own_output(self.network, self.x, self.readout)
            else:
                self._mean = widened(read(self._outputs.pop(), self.readout, row_count(self.x)).detach())
                check_finite(self._mean, "without dropout")
        return self._mean

    @property
    def features(self) -> Tensor:
        """What enters the sites, `(N, features)`; see `Features`."""
        if self._features is None:
            if self._which is None:
                raise ValueError("no term asked for features")
            whole = self.network.batches(self.x) is None
            seen: Callable[[Any], object] = self._outputs.append if whole else lambda output: None
            self._features = self._which.of(self.network, self.x, self.sites, seen)
        return self._features


class Term:
    """Something that is never negative, varies with the input and may explain the size of errors.

    Attributes:
        name: in tables, and in the file of a calibration.
        needs_features: whether `rows.features` is asked for, of reference rows too.

    >>> import latedrop
    >>> class Distance(Term):
    ...     name = "distance"
    ...
    ...     def values(self, rows):
    ...         return rows.x.square().sum(1)
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
    >>> uq = latedrop.calibrate(net, (x, x**2), terms=["dropout", Distance()])
    >>> uq.predict(x).std.shape
    torch.Size([64, 1])
    """

    name: ClassVar[str]
    needs_features: ClassVar[bool] = False

    def values(self, rows: Rows) -> Tensor:
        """Not negative: `(N,)`, for all outputs alike, or in the shape of `rows.mean`."""
        raise NotImplementedError

    def columns(self, rows: Rows) -> dict[str, Tensor]:
        """All that has a coefficient of its own, by name; `values` alone, without a name, unless there are several."""
        return {"": rows.values_of(self)}

    def prepared(self, rows: Rows) -> Term:
        """The same term, ready to measure: it is shown the first rows once, before all others."""
        return self

    def learned_from(self, reference: Iterable[Tensor], own: bool) -> Term:
        """The same term, after the features of all reference rows have passed, in batches.

        `own` says that the reference rows are the validation rows themselves: each is then left out for itself.
        """
        return self

    def state(self) -> Learned | None:
        """What has to be kept for predictions; None where a file cannot hold it, and `load` needs the term again."""
        return {}

    @classmethod
    def restored(cls, state: Learned) -> Term:
        """The inverse of `state`."""
        return cls(**state)

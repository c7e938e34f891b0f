"""Layers before the first site run once: on N rows instead of T times N.

Draws are rows: a batch holds T copies of N rows. As long as no site has touched them all copies are the same, so a
layer that comes before every site runs on the first N rows, and what it gives is repeated. Which calls of which layers
those are is found by autograd, in one pass in which the input of every site is multiplied by a 1 that asks for
gradients: a layer whose input does not require grad comes before all sites. What goes from one such layer straight to
the next is never repeated; what leaves them is remembered for later chunks of draws and for other rates, as far as
memory allows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from latedrop.data.rows import copied, row_count, take_rows, tensors
from latedrop.network.network import Network, Pass
from latedrop.network.probe import Following
from latedrop.network.sites import Site
from latedrop.torch_private import version_of
from latedrop.wrappers import bare

__all__ = ["Prefix", "Repeating", "worth_it"]

Call: TypeAlias = "tuple[str, int]"
"""A layer, and which of its calls in a pass."""
_FEW = {"cpu": 2**13}  # numbers in the inputs of all draws below which it takes longer to keep track than to compute
_FEW_ELSEWHERE = 2**18  # the same on devices that compute more in the time that Python needs
_REMEMBERED = {"cpu": 2**28, "cuda": 2**31}  # bytes of what layers gave
_ASKS = ("__get__", "size", "dim", "numel", "__len__", "is_floating_point", "ndimension")
_NOT_BY_ROW = (nn.RNNCellBase, nn.RNNBase, nn.Bilinear, nn.MultiheadAttention, nn.TransformerEncoderLayer)


def worth_it(x: Any, draws: int, passes: int) -> bool:
    """Return True if layers before the first site take long enough to keep track of them."""
    if passes > 1:
        return True
    values = tensors(x)
    return draws * sum(value.numel() for value in values) > _FEW.get(values[0].device.type, _FEW_ELSEWHERE)


class Prefix:
    """The calls of layers before every one of some sites, and what they gave for one batch.

    Args:
        network: whose layers they are.
        x: the batch, placed.
        sites: those with a mask.
        remember: whether to keep what they give for other passes.

    Attributes:
        repeats: which calls these are, and whether the result of each is read by others than such calls and sites.
        rows: of the batch.
    """

    def __init__(self, network: Network, x: Any, sites: Sequence[Site], *, remember: bool = True) -> None:
        key = _key(sites)
        if key not in network.notes:
            network.notes[key] = _calls_before(network, x, sites)
        self.repeats: dict[Call, bool] = network.notes[key]
        self.rows = row_count(x)
        self._results: dict[Call, Tensor] = {}
        self._shapes: dict[Call, tuple[torch.Size, torch.dtype]] = {}
        self._room = _REMEMBERED.get(network.weight.device.type, 0) if remember else 0

    @staticmethod
    def is_known(network: Network, sites: Sequence[Site]) -> bool:
        """Return True if it was found out before; while a function is traced it cannot be."""
        return _key(sites) in network.notes

    def result(self, call: Call, make: Callable[[], Any]) -> Tensor:
        """Return what a call gives for the N rows."""
        if call in self._results:
            return self._results[call]
        given = make()
        if not isinstance(given, Tensor) or given.shape[:1] != (self.rows,):
            raise ValueError(f"layer {call[0]!r} does not give one row for each")
        self._shapes[call] = given.shape, given.dtype
        return given

    def remember(self, call: Call, given: Tensor) -> Tensor:
        """Keep what a call gave for other passes, as far as there is room."""
        if call not in self._results and given.nbytes <= self._room:
            self._results[call] = given
            self._room -= given.nbytes
        return given

    def stand_in(self, call: Call, copies: int, device: torch.device) -> Tensor | None:
        """Return a tensor without memory that has the shape of all copies of a result; None where it is unknown."""
        if call not in self._shapes:
            return None
        (rows, *rest), dtype = self._shapes[call]
        filler = torch.full((), torch.nan if dtype.is_floating_point else 0, dtype=dtype, device=device)
        return filler.expand(rows * copies, *rest)


def _key(sites: Sequence[Site]) -> tuple[str, tuple[str, ...]]:
    return "prefix", tuple(site.name for site in sites)


class Repeating(Pass):
    """A pass over copies of the rows of `x`, which are `batch`, in which layers before all sites run once."""

    def __init__(self, prefix: Prefix, batch: Any, x: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._prefix, self._counts = prefix, dict[str, int]()
        self._pending: dict[int, tuple[Tensor, Call, Callable[[], Tensor]]] = {}  # what stands for results, and these
        self._inputs: dict[int, tuple[Tensor, int, Tensor]] = {}  # layers that read a batch as it is run on `x`
        for copies, rows in zip(tensors(batch), tensors(x), strict=True):
            if copies.dim() and len(copies) == len(rows) * self._copies:
                self._inputs[id(copies)] = copies, version_of(copies), rows

    def run(self, name: str, layer: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `Pass`."""
        if name not in self.sites:
            call = name, self._counts.get(name, 0) + 1
            self._counts[name] = call[1]
            if call in self._prefix.repeats and len(args[0]) == self._prefix.rows * self._copies:
                return self._once(call, forward, args[0])
        return super().run(name, layer, forward, args, kwargs)

    def _once(self, call: Call, forward: Any, value: Tensor) -> Tensor:
        prefix, first = self._prefix, self._first(value)  # no function below holds the pass: its tensors go with it
        _, _, rows = self._pending.get(id(value), (None, None, lambda: first))
        given = cache(lambda: prefix.result(call, lambda: forward(rows())))
        if prefix.repeats[call]:
            return torch.cat([prefix.remember(call, given())] * self._copies)
        stand_in = prefix.stand_in(call, self._copies, value.device)
        if stand_in is None:
            given()
            stand_in = prefix.stand_in(call, self._copies, value.device)
            assert stand_in is not None
        self._pending[id(stand_in)] = stand_in, call, given
        return stand_in

    def _first(self, value: Tensor) -> Tensor:
        """Return the rows of the first copy."""
        _, version, rows = self._inputs.get(id(value), (None, None, value))
        return rows if version == version_of(value) else value[: self._prefix.rows]

    def _thin(self, site: Site, number: int, value: Tensor, channels: tuple[int, ...]) -> Tensor:
        """Multiply the N rows by the masks of all draws, where they are the same in all copies."""
        if id(value) not in self._pending:
            return super()._thin(site, number, value, channels)
        _, call, given = self._pending[id(value)]
        rows, thin = self._prefix.remember(call, given()), getattr(self.thinner, "thin_rows", None)
        if thin is None or site.batch_axis != 0:
            return super()._thin(site, number, torch.cat([rows] * self._copies), channels)
        axes = [channel % rows.dim() for channel in channels]
        examples = 1 if self._shared else self._prefix.rows
        shape = [size if not axes or i in axes else 1 for i, size in enumerate(rows.shape)]
        thinned: Tensor = thin(site, number, rows, (examples, *shape[1:]))
        return thinned


def _calls_before(network: Network, x: Any, sites: Sequence[Site]) -> dict[Call, bool]:
    """Return the calls of torch's own layers that come before all sites, but for those that change their input."""
    network.route(name for name, layer in network.layers.items() if _takes_rows(layer))
    network.route(site.name for site in sites)
    marking, few = _Marking(sites), take_rows(x, slice(0, 2))

    def passed() -> None:
        with _Reading(bare(network.model), marking):
            network.output(copied(few), marking)

    network.quietly(passed, gradients=True)
    return {call: id(result) in marking.read for call, result in marking.results.items()}


def _takes_rows(layer: nn.Module) -> bool:
    """Return True for a layer of torch's own that gives one row for each row of its one input."""
    plain = type(layer).__module__.startswith("torch.nn.modules.") and not any(True for _ in layer.children())
    return plain and not isinstance(layer, _NOT_BY_ROW) and not getattr(layer, "inplace", False)


class _Marking(Pass):
    """A pass that lets all that depends on a site require grad, and notes the calls of layers that do not.

    Attributes:
        results: what these calls gave.
        read: the identities of tensors that something else than such a call, or a site of one input, has read.
        inside: whether such a call runs now, or this pass itself reads something.
    """

    def __init__(self, sites: Sequence[Site]) -> None:
        super().__init__()
        self.results: dict[Call, Any] = {}
        self.read: set[int] = set()
        self.inside = False
        self._names = {site.name for site in sites}
        self._counts: dict[str, int] = {}
        self._one = torch.ones((), requires_grad=True)

    def run(self, name: str, layer: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `Pass`."""
        number = self._counts[name] = self._counts.get(name, 0) + 1
        given = tensors((args, kwargs))
        if name in self._names:
            if len(args) != len(given) or len(args) != 1 or kwargs or type(args[0]) is not Tensor:
                self.read.update(map(id, given))
            args = tuple(self._marked(value) for value in args)
            return forward(*args, **{key: self._marked(value) for key, value in kwargs.items()})
        if not _takes_rows(layer) or len(args) != 1 or kwargs or len(given) != 1 or given[0].requires_grad:
            return forward(*args, **kwargs)
        self.inside = True
        try:
            result = forward(*args)
        finally:
            self.inside = False
        if result is not args[0]:  # as dropout that is off gives its input
            self.results[name, number] = result
        return result

    def _marked(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        self.inside = True
        try:
            return value * self._one.to(value)
        finally:
            self.inside = False


class _Reading(Following):
    """Also notes which tensors are read by torch functions outside of the layers that come before all sites."""

    def __init__(self, model: nn.Module, marking: _Marking) -> None:
        super().__init__(model)
        self._marking = marking

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asks = getattr(func, "__name__", "") in _ASKS  # which a stand-in answers, too
        if not asks and not self._marking.inside:
            self._marking.read.update(map(id, tensors((args, kwargs))))
        return super().__torch_function__(func, types, args, kwargs)

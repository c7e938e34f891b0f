"""Sites that did not fire: was their branch not taken, or did the model use their weights in another way?

A layer that does not run for a batch has no effect on it. One whose weights are used past it has, and its dropout would
be lost without a word: fused kernels do so, and code that reads `layer.weight`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from latedrop.model.layers import SOURCES
from latedrop.model.sites import Site
from latedrop.model.storages import address, placed
from latedrop.model.twin import release, reroute, twin_of
from latedrop.model.weight_calls import WeightCall, WeightCalls
from latedrop.model.wrappers import layer_named, plain_names
from latedrop.torch_inside import Operator, eager, watching

__all__ = ["used_elsewhere"]

_UNTAKEN: WeakSet[Any] = WeakSet()
"""Storages of weights that some batch did not reach at all: they are not asked about again."""


def used_elsewhere(twin: nn.Module, sites: Sequence[Site], again: Callable[[nn.Module], Any]) -> list[str]:
    """The names of those sites, none of which fired, whose weights a pass uses all the same.

    Args:
        twin: whose pass it was.
        sites: that did not fire.
        again: runs the same pass on another twin.
    """
    weights = {site: _weights(twin, site) for site in sites}
    asked = [site for site in sites if not any(weight.untyped_storage() in _UNTAKEN for weight in weights[site])]
    if not asked:
        return []
    other = twin_of(twin, own_gradients=True)  # the model may differentiate itself
    uses = _Uses()
    calls = WeightCalls(other, uses.meet)
    for module in other.modules():
        if isinstance(module, SOURCES):
            reroute(module, partial(uses.inside, calls))
    try:
        with watching(uses.seen), calls, eager():
            calls.begin()
            again(other)
            calls.end()
    finally:
        release(other)
    used = [site for site in asked if uses.past(site, weights[site])]
    _UNTAKEN.update(weight.untyped_storage() for site in asked if site not in used for weight in weights[site])
    return [site.name for site in used]


def _weights(twin: nn.Module, site: Site) -> list[Tensor]:
    if site.weight is None:
        layer = layer_named(twin, site.name)
        return [] if layer is None else list(layer.parameters())
    plain = plain_names(twin)
    return [parameter for name, parameter in twin.named_parameters() if plain(name) == site.weight]


class _Uses:
    """Notes which tensors meet at least one entry: inside of weight layers, and outside."""

    def __init__(self) -> None:
        self._inside: set[int] = set()
        self._outside: set[int] = set()
        self._met: set[str] = set()
        self._deep = 0

    def past(self, site: Site, weights: Sequence[Tensor]) -> bool:
        """Whether weights were used past their site.

        A layer may share them with another one, which runs in its turn; so may the parts of a parameter.
        """
        if site.weight is None:
            return any(address(weight) in self._outside for weight in weights)
        return site.weight not in self._met and any(address(w) in self._outside | self._inside for w in weights)

    def meet(self, call: WeightCall) -> dict[Any, Any]:
        self._met.add(call.weight)
        return {}

    def inside(self, calls: WeightCalls, forward: Any, *args: Any, **kwargs: Any) -> Any:
        self._deep += 1
        try:
            with calls.apart():
                return forward(*args, **kwargs)
        finally:
            self._deep -= 1

    def seen(self, operator: Operator | None, args: Any, kwargs: Any, result: Any) -> None:
        values = placed((args, kwargs))
        if all(value.numel() for _, value in values):  # a view of a weight has met nothing yet
            found = {where for where, _ in values}.difference(where for where, _ in placed(result))
            (self._inside if self._deep else self._outside).update(found)

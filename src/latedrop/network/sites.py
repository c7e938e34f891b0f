"""Describe sites, the inputs of weight layers where dropout is applied, and their rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from numbers import Real
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from latedrop.errors import ArgumentError
from latedrop.network.functional import Place, named_weights
from latedrop.records import Limits, Via, match, record
from latedrop.torch_private import plain_names

__all__ = [
    *("LAYERS", "SOURCES", "Kind", "Rate", "Site", "Sites", "StoredSites", "channel_axis", "layer_inputs"),
    *("missing_sites", "odds_by_site", "rates_by_site"),
]

Kind: TypeAlias = Literal["element", "channel"]
Probability: TypeAlias = Annotated[float, Limits(0, 1 - 2**-53)]
Rate: TypeAlias = Probability | Mapping[str, Probability]

_CONVOLUTIONS: dict[type[nn.Module], int] = {
    **{nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3},
    **{nn.ConvTranspose1d: 1, nn.ConvTranspose2d: 2, nn.ConvTranspose3d: 3},
}
_OTHERS = (nn.Linear, nn.Bilinear, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
LAYERS: tuple[type[nn.Module], ...] = (*_OTHERS, *_CONVOLUTIONS)
SOURCES: tuple[type[nn.Module], ...] = (*LAYERS, nn.Embedding, nn.EmbeddingBag)
"""Layers whose output depends on weights."""

_Count: TypeAlias = Annotated[int, Limits(1, 2**40)]


@record
@dataclass(frozen=True)
class Site:
    """Describe a place where dropout is applied: the input of one weight layer.

    Attributes:
        name: the layer's name in `model.named_modules()`, without wrappers' prefixes; for a weight without a layer the
            parameter's name, and where in it the weight starts (`"stack[3]"`).
        kind: `"element"` masks every unit by itself, `"channel"` whole channels (features).
        layer: the layer's type, or the torch function that takes the weight.
        units: shape of the mask for one example, at the probe's input size.
        calls: how often the layer runs in one forward pass, at most.
        batch_axis: the axis of the layer's input that counts the examples; None where none does, or where an example
            has any number of entries, as a graph has nodes.
        interleaved: True where examples that were folded into another axis alternate in it.
        weight: the parameter's name, for a weight without a layer; None where the site is a module.
        moved: True where examples may lie in another order than that of the inputs, as in a model that sorts them.
        coupled: True where draws cannot share a batch: the output of a row depends on the rows beside it, or what came
            out of weights decides which layers run.
        skipped: True where the layer does not run for every batch.
    """

    name: str
    kind: Kind
    layer: str
    units: Annotated[tuple[_Count, ...], Limits(1)]
    calls: _Count = 1
    batch_axis: Annotated[int, Limits(0, 64)] | None = 0
    interleaved: bool = False
    weight: str | None = None
    moved: bool = False
    coupled: bool = False
    skipped: bool = False

    @property
    def count(self) -> int:
        """Return the number of units in one mask."""
        return prod(self.units)

    def place(self, unit: int) -> tuple[int, ...]:
        """Return the index in the mask of a unit with a flat index; the call comes first if the layer has several."""
        call, unit = divmod(unit, self.count)
        places = tuple(map(int, np.unravel_index(unit, self.units)))
        return (call, *places) if self.calls > 1 and self.kind == "element" else places


class Sites(tuple[Site, ...]):
    """Sites in execution order; prints as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        rows = [("site", "layer", "masks", "units", "calls")]
        rows += [(s.name, s.layer, s.kind, f"{s.count} = " + " x ".join(map(str, s.units)), str(s.calls)) for s in self]
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)

    __repr__ = __str__


def _distinct(sites: Sequence[Site]) -> Sites:
    names = [site.name for site in sites]
    match(len(set(names)) == len(names), "", "sites that differ", names)
    return Sites(sites)


StoredSites: TypeAlias = Annotated[Sites, Via(Annotated[tuple[Site, ...], Limits(1)], _distinct)]
"""Sites as a field of a record."""


def layer_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[Place, Any]:
    """Return the arguments of a weight layer to which dropout is applied, by position."""
    names: tuple[str, ...] = ("input",)
    if isinstance(module, (nn.MultiheadAttention, nn.Bilinear)):
        names = ("input1", "input2") if isinstance(module, nn.Bilinear) else ("query", "key", "value")
    inputs: dict[Place, Any] = {(i,): value for i, value in enumerate(args[: len(names)])}
    inputs.update({(name,): kwargs[name] for name in names if name in kwargs})
    values = ((place, value) for place, value in inputs.items() if isinstance(value, (Tensor, PackedSequence)))
    return {place: value for place, value in values if isinstance(value, PackedSequence) or value.is_floating_point()}


def channel_axis(module: nn.Module) -> int:
    """Return the feature axis of a layer's input, counted from the end."""
    return next((-1 - spatial for layer, spatial in _CONVOLUTIONS.items() if isinstance(module, layer)), -1)


def missing_sites(model: nn.Module, sites: Sequence[Site], *, same_type: bool = False) -> list[str]:
    """Return the names of sites whose layer or weight is missing in a model, or with `same_type` has another type."""
    plain = plain_names(model)
    modules = {plain(name): module for name, module in model.named_modules()}
    weights = dict(named_weights(model)) if any(site.weight is not None for site in sites) else {}
    there = {s.name: s.weight in weights if s.weight is not None else s.name in modules for s in sites}
    if same_type:
        there.update({s.name: type(modules.get(s.name)).__name__ == s.layer for s in sites if s.weight is None})
    return [name for name, present in there.items() if not present]


def rates_by_site(sites: Sequence[Site], rate: Rate) -> dict[str, float]:
    """Return the rate of each site, by name.

    In a mapping an exact name wins over patterns, and an earlier pattern over a later one; a site that
    nothing matches keeps rate 0.

    >>> sites = [Site("a.fc", "element", "Linear", (4,)), Site("b.fc", "element", "Linear", (4,))]
    >>> rates_by_site(sites, {"a.*": 0.1})
    {'a.fc': 0.1, 'b.fc': 0.0}
    """
    names = [site.name for site in sites]
    if not isinstance(rate, Mapping):
        return dict.fromkeys(names, _checked_rate(rate))
    for pattern, value in rate.items():
        _checked_rate(value)
        if not any(name == pattern or fnmatchcase(name, pattern) for name in names):
            raise ArgumentError(
                f"expected every pattern of the rate mapping to match a site; {pattern!r} matches none of {names}."
            )
    by_pattern = {n: next((float(v) for p, v in rate.items() if fnmatchcase(n, p)), 0.0) for n in names}
    return {name: rate.get(name, value) for name, value in by_pattern.items()}


def odds_by_site(sites: Sequence[Site], rate: Rate) -> tuple[float, ...]:
    """Return `rate / (1 - rate)` of every site: the variance of a mask with mean 1."""
    return tuple(value / (1 - value) for value in rates_by_site(sites, rate).values())


def _checked_rate(rate: Any) -> float:
    if isinstance(rate, bool) or not isinstance(rate, Real) or not 0 <= float(rate) < 1:
        raise ArgumentError(f"expected a rate in [0, 1); found {rate!r}. A rate is the probability that a unit drops.")
    return float(rate)

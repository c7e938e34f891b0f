"""Where dropout goes: before every weight layer that has another weight layer upstream.

*Upstream* is judged by data flow, in two probe passes (`probe`). The first layer of every branch stays clean, however
many branches there are. Comparing the two passes also tells which axis of a layer's input counts the examples, so that
one mask can serve them all (`layout`). A weight layer is a module, or a call of a torch function with a weight
(`weight_calls`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from torch import nn

from latedrop.errors import ArgumentError, SiteError
from latedrop.model.layout import common_layout
from latedrop.model.probe import Run, probe_twice
from latedrop.model.scripts import check_scripts
from latedrop.model.sites import Kind, Site, Sites
from latedrop.model.wrappers import bare, named_layers

__all__ = ["Select", "find_sites"]

Select: TypeAlias = (
    "str | type[nn.Module] | Callable[[str, nn.Module], bool] | "
    "Sequence[str | type[nn.Module] | Callable[[str, nn.Module], bool]] | None"
)


def find_sites(model: nn.Module, *example_inputs: Any, select: Select = None, kind: Kind = "element") -> Sites:
    """Find the sites of `model`, in the order in which they run.

    Args:
        model: any module; it is read, never changed.
        example_inputs: what `model` is called with; a few rows are enough and only three are used.
        select: narrows the sites: a name pattern (`"encoder.*"`), a module type, a predicate
            `(name, module) -> bool`, or a sequence of these of which one must hold. For a weight without a layer the
            module is the one that holds the parameter.
        kind: `"element"` or `"channel"`.

    Raises:
        SiteError: no site is left; the message lists the layers that were seen.

    >>> net = nn.Sequential(nn.Linear(3, 50), nn.ReLU(), nn.Linear(50, 1))
    >>> print(find_sites(net, torch.zeros(8, 3)))
    site  layer   masks    units    calls
    2     Linear  element  50 = 50  1
    """
    if kind not in ("element", "channel"):
        raise ArgumentError(f"expected kind 'element' or 'channel'; found {kind!r}.")
    if not example_inputs:
        raise ArgumentError("expected example inputs after the model; found none. Pass one batch of its inputs.")
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"expected a torch.nn.Module; found {type(model).__name__}. Pass the model itself; an exported program "
            "becomes one with latedrop.load_program(program)."
        )
    x = example_inputs[0] if len(example_inputs) == 1 else tuple(example_inputs)
    model = bare(model)
    check_scripts(model)
    small, large, coupled = probe_twice(model, x)
    modules = named_layers(model)
    owners = {name: modules.get(runs[0].owner, model) for name, runs in small.items()}
    downstream = [name for name, runs in small.items() if any(run.downstream for run in runs)]
    chosen = [name for name in downstream if _selected(select, name, owners[name])]
    if not chosen:
        raise SiteError(_no_site_message(select, downstream, [name for name in small if name not in downstream]))
    found = (_site(name, kind, small[name], large.get(name, []) if large else None) for name in chosen)
    return Sites(replace(site, coupled=coupled) for site in found)


def _site(name: str, kind: Kind, small: list[Run], large: list[Run] | None) -> Site:
    first = small[0]
    if first.packed_steps is not None:
        features = first.value.shape[-1]
        units: tuple[int, ...] = (features,) if kind == "channel" else (first.packed_steps, features)
        return Site(name, kind, first.layer, units, len(small), 0)
    try:
        axis, interleaved = common_layout(name, small, large)
    except SiteError:
        if kind == "element":
            raise
        axis, interleaved = None, False  # a channel mask is the same for every example and position
    shape = list(first.value.shape)
    if kind == "channel":
        units = tuple(shape[channel] for channel in sorted(first.channels))
    else:
        if axis is not None:
            shape[axis] //= first.rows
        units = tuple(size for i, size in enumerate(shape) if i != axis or size > 1)
    return Site(name, kind, first.layer, units, len(small), axis, interleaved, first.weight)


def _selected(select: Select, name: str, module: nn.Module) -> bool:
    if select is None:
        return True
    if isinstance(select, str):
        return name == select or fnmatchcase(name, select)
    if isinstance(select, type):
        return isinstance(module, select)
    if callable(select):
        return bool(select(name, module))
    return any(_selected(item, name, module) for item in select)


def _no_site_message(select: Select, downstream: list[str], first: list[str]) -> str:
    if not downstream:
        return (
            "expected at least one weight layer with another one upstream; found only first layers "
            f"{first}. A model of one layer has no hidden units to drop."
        )
    return (
        f"expected select={select!r} to match at least one site; found none. Sites: {downstream}; "
        f"first layers, which are never sites: {first}."
    )

"""Where dropout goes: before every weight layer that has another weight layer upstream.

*Upstream* is judged by data flow, in a few probe passes (`probe`). The first layer of every branch stays clean, however
many branches there are. Comparing the passes also tells which axis of a layer's input counts the examples, so that one
mask can serve them all. A weight layer is a module, or a call of a torch function with a weight (`functional`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from fractions import Fraction
from itertools import chain, product, zip_longest
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from latedrop.data.datasets import first_inputs
from latedrop.data.rows import Collate, as_items, reordering
from latedrop.errors import ArgumentError, SiteError
from latedrop.network.network import Network, check_module
from latedrop.network.probe import Probe, Run, Runs
from latedrop.network.sites import LAYERS, Kind, Site, Sites, refuse_nested
from latedrop.options import shown
from latedrop.wrappers import bare, plain_names

__all__ = ["Select", "find_sites"]

_Selector: TypeAlias = str | type[nn.Module] | Callable[[str, nn.Module], bool]
Select: TypeAlias = _Selector | Sequence[_Selector] | None


def find_sites(
    model: nn.Module | Network,
    *example_inputs: Any,
    select: Select = None,
    kind: Kind | None = None,
    collate: Collate = None,
) -> Sites:
    """Find the sites of `model`, in the order in which they run.

    Args:
        model: any module; it is read, never changed.
        example_inputs: what `model` is called with, or a `DataLoader` or data set, of which the first batch serves.
            Three rows are enough for most; where values decide which layers run, further rows are taken, up to 1024,
            until every layer was reached.
        select: narrows the sites: a name pattern (`"encoder.*"`), a module type, a predicate
            `(name, module) -> bool`, or a sequence of these of which one must hold. For a weight without a layer the
            module is the one that holds the parameter.
        kind: `"element"` or `"channel"`. None: elements; of graphs channels, where the layer sees nodes or edges.
        collate: a function from a list of items to what `model` takes, where the inputs are a list of objects such as
            graphs or sequences of several lengths: its items are the rows.

    Warns:
        LatedropWarning: values decide which layers run, and no row reached some parameters.

    Raises:
        SiteError: no site is left; the message lists the layers that were seen.

    >>> net = nn.Sequential(nn.Linear(3, 50), nn.ReLU(), nn.Linear(50, 1))
    >>> print(find_sites(net, torch.zeros(8, 3)))
    site  layer   masks    units    calls
    2     Linear  element  50 = 50  1
    """
    if kind not in (None, "element", "channel"):
        raise ArgumentError(f"expected kind 'element' or 'channel'; found {kind!r}.")
    if not example_inputs:
        raise ArgumentError("expected example inputs after the model; found none. Pass one batch of its inputs.")
    model = model.model if isinstance(model, Network) else model
    check_module(model)
    x = example_inputs[0] if len(example_inputs) == 1 else tuple(example_inputs)
    x = as_items(first_inputs(x, model, collate), collate)
    probe = _probe(model, x)
    layers = {name: list(chain(*probe.calls(name))) for name in _in_order(probe.passes)}
    modules = _named_layers(model)
    owners = {name: modules.get(runs[0].owner, model) for name, runs in layers.items()}
    downstream = [name for name, runs in layers.items() if any(run.downstream for run in runs)]
    chosen = [name for name in downstream if _selected(select, name, owners[name])]
    patterns = [item for item in select if isinstance(item, str)] if isinstance(select, (list, tuple)) else []
    unmatched = [item for item in patterns if not any(_selected(item, name, owners[name]) for name in chosen)]
    if not chosen:
        _check_weights(model, modules)
    if not chosen or unmatched:
        first = [name for name in layers if name not in downstream]
        raise SiteError(_no_site_message(unmatched[0] if unmatched else select, downstream, first))
    sites = [site for name in chosen for site in _sites(name, kind, probe)]
    if not sites:
        raise SiteError(
            f"expected a layer whose input has one entry for each node, as the targets have; found {chosen}, whose "
            "inputs have others, such as edges. Read out one number for each graph."
        )
    if any(site.batch_axis is None for site in sites):  # draws run one by one: no channel mask needs to know rows
        rowless = {"batch_axis": None, "interleaved": False, "moved": False}
        sites = [replace(site, **rowless) if site.kind == "channel" else site for site in sites]  # type: ignore[arg-type]
    return Sites(sites)


def _probe(model: nn.Module, x: Any, types: tuple[type[nn.Module], ...] = LAYERS) -> Probe:
    """Probe a network of its own: what a probe pass writes into the copy must not reach the model."""
    network = Network(model, buffers=False)
    before = {name: buffer.clone() for name, buffer in network.copy.named_buffers()}
    probe = Probe(network, x, types)
    layers = [name for name, layer in network.layers.items() if type(layer).__module__.startswith("torch.nn.modules.")]
    now = dict(network.copy.named_buffers())
    written = [
        name for name in before if name.rpartition(".")[0] in layers and not torch.equal(now[name], before[name])
    ]
    if written:
        raise SiteError(
            f"expected a model that changes nothing of its layers in eval mode; its forward pass writes into {written},"
            " as batch normalization in training mode does. Run these layers in eval mode inside forward."
        )
    return probe


def _named_layers(model: nn.Module) -> dict[str, nn.Module]:
    model = bare(model)
    plain = plain_names(model)
    return {plain(name): bare(module) for name, module in model.named_modules()}


def _in_order(passes: Sequence[Runs]) -> list[str]:
    """Return the layers of all passes, those of the longest first; others come before what they ran before, or last."""
    order: list[str] = []
    for runs in sorted(passes, key=len, reverse=True):
        place = len(order)
        for name in reversed(runs):
            if name not in order:
                order.insert(place, name)
            place = order.index(name)
    return order


def _sites(name: str, kind: Kind | None, probe: Probe) -> list[Site]:
    """Return the site of a layer; of graphs with the kind that it can have, and none where nodes have no entry."""
    try:
        site = _site(name, kind or "element", probe)
    except SiteError:
        if probe.nodes:
            return []
        if kind is not None or not probe.structured:
            raise
        site = _site(name, "channel", probe)
    return [replace(site, coupled=True, moved=False) if probe.nodes else site]


def _site(name: str, kind: Kind, probe: Probe) -> Site:
    """Return the site of a layer, from its calls in every pass."""
    calls = probe.calls(name)
    runs = list(chain(*calls))
    first, axis, interleaved = runs[0], 0, False
    refuse_nested(name, *(run.value for run in runs))
    if not first.packed:
        kind, axis, interleaved = _laid_out(name, kind, calls, probe)  # type: ignore[assignment]
    shape = list(first.value.shape)
    if kind == "channel":
        units = tuple(shape[channel] for channel in sorted(first.channels))
    else:
        if axis is not None:
            shape[axis] //= first.rows
        units = tuple(size for i, size in enumerate(shape) if i != axis or size > 1)
    return Site(
        name,
        kind,
        first.layer,
        units,
        calls=max(map(len, calls)),
        batch_axis=axis,
        interleaved=interleaved,
        weight=first.weight,
        moved=axis is not None and _moves(name, axis, interleaved, probe),
        coupled=probe.together,
        skipped=not all(calls),
    )


def _laid_out(name: str, kind: Kind, calls: list[list[Run]], probe: Probe) -> tuple[Kind, int | None, bool]:
    """Return the kind of masks, the axis of the rows, and whether folded ones alternate along it.

    A channel mask is the same for every row and position, so that rows need not be told apart. Where a row has at most
    one entry, of features alone, an element is a channel.
    """
    runs = list(chain(*calls))
    first, second = calls[0], calls[1] if probe.compared else None
    folded = True
    try:
        if not first or second == []:
            raise SiteError(_varying(name))
        axis, interleaved = (
            (0, False) if second is None else _common_layout(name, first, second, probe.turned.get(name, []))
        )
        folded = axis is not None and first[0].value.shape[axis] != first[0].rows
        if folded and (probe.structured or ("counts" in probe.deeds and kind == "element")):  # as many, by chance
            raise SiteError(_varying(name))
        alike = [run for run in runs if run.value.dim() == runs[0].value.dim()]
        if axis is not None and len({Fraction(run.value.shape[axis], run.rows) for run in alike}) > 1:
            raise SiteError(_varying(name))
    except SiteError as error:
        single = all(run.value.dim() == 2 and len(run.value) <= run.rows for run in runs)
        if kind == "element" and not (single and {len(c) for c in calls} <= {0, 1}):
            raise SiteError(_varying(name) if "reads" in probe.deeds else str(error)) from error
        return "channel", None, False
    # Code that reads values may fold as many entries of each row as they say; items may have had one entry by chance.
    unsure = probe.structured or "sizes" in probe.deeds or (folded and "reads" in probe.deeds)
    return (kind, None, False) if kind == "channel" and unsure else (kind, axis, interleaved)


def _moves(name: str, axis: int, interleaved: bool, probe: Probe) -> bool:
    """Return True if the rows of a layer's input do not follow the order of the rows that the model is given."""
    if probe.together or probe.random or probe.orders is None:
        return False
    there, back = (runs.get(name, []) for runs in probe.orders)
    pairs = zip(there, back, strict=False)
    return len(there) != len(back) or not all(_follows(a, b, axis, interleaved) for a, b in pairs)


def _common_layout(name: str, first: list[Run], second: list[Run], turned: list[Run]) -> tuple[int | None, bool]:
    """Return the batch axis of all calls of a layer, and whether folded examples alternate along it."""
    if len(first) != len(second):
        counts = f"{len(second)} calls for {second[0].rows} examples and {len(first)} for {first[0].rows}"
        raise SiteError(_irregular(name, counts))
    layouts = {_layout(name, *runs) for runs in zip_longest(first, second, turned[: len(first)])}
    if len(layouts) > 1:
        raise SiteError(_irregular(name, f"axes {sorted(str(axis) for axis, _ in layouts)}"))
    return layouts.pop()


def _layout(name: str, first: Run, second: Run, turned: Run | None) -> tuple[int | None, bool]:
    """Return the same of one call: from the axis that grows with the rows, and from the rows in another order."""
    rows, (a, b) = first.rows, (first.value, second.value)
    if second.rows < rows:
        axes = [i for i, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n]
        if len(axes) > 1 or (axes and a.shape[axes[0]] * second.rows != b.shape[axes[0]] * rows):
            shapes = f"shape {tuple(b.shape)} for {second.rows} examples and {tuple(a.shape)} for {rows}"
            raise SiteError(_irregular(name, shapes))
        if not axes or a.shape[axes[0]] == rows:
            return axes[0] if axes else None, False
    elif torch.equal(a, b):
        return None, False
    else:
        axes = [axis for axis, size in enumerate(a.shape) if size % rows == 0]
    for axis, interleaved in product(axes, (False, True)):
        if turned is not None and _follows(first, turned, axis, interleaved):
            return axis, interleaved
    if second.rows == rows:  # these are rows that act on each other, such as the nodes of a graph
        return 0, False
    raise SiteError(_irregular(name, f"shape {tuple(a.shape)}, with examples folded in another order"))


def _irregular(name: str, found: str) -> str:
    return (
        f"expected the examples in order along one axis of the input of layer {name!r}, in every call; found {found}. "
        "Use kind='channel', or leave it out with select=."
    )


def _follows(there: Run, back: Run, axis: int, interleaved: bool) -> bool:
    """Return True if rows that go in in another order lie in that order."""
    a, b, rows = there.value.float(), back.value.float(), there.rows
    if a.shape != b.shape or a.shape[axis] % rows:
        return False
    order = torch.tensor(reordering(rows), device=a.device)
    split: Tensor = a.unflatten(axis, (-1, rows) if interleaved else (rows, -1))
    expected = split.index_select(axis + interleaved, order).flatten(axis, axis + 1)
    return torch.allclose(expected, b, rtol=1e-2, atol=_rounding(a))


def _rounding(value: Tensor) -> float:
    return 1e-3 * float(value.abs().max()) + 1e-12 if value.numel() else 0.0


def _varying(name: str) -> str:
    return (
        f"expected as many entries for every row in the input of layer {name!r}; found a number that depends on "
        "values, as with the nodes of graphs, or rows that go to one of several layers. Use kind='channel', with which "
        "all entries have one mask, and pass sites=; or leave it out with select=."
    )


def _selected(select: Select, name: str, module: nn.Module) -> bool:
    if select is None:
        return True
    if isinstance(select, str):
        return name == select or fnmatchcase(name, select)
    if isinstance(select, type):
        return isinstance(module, select)
    if callable(select):
        return bool(select(name, module))
    if not isinstance(select, Iterable):
        raise ArgumentError(
            "expected sites by a name pattern, a type of layers, a function of name and layer, or a list of these; "
            f"found {shown(select)}. print(find_sites(model, x)) lists all names."
        )
    return any(_selected(item, name, module) for item in select)


def _check_weights(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    """Raise `SiteError` where weights are packed (quantised) or complex: no dropout is put before such layers."""
    holders = {name: module for name, module in modules.items() if hasattr(module, "weight")}
    packed = [name for name, module in holders.items() if ".quantized." in type(module).__module__]
    if packed:
        raise SiteError(
            f"expected weight layers that work on floating numbers; found quantised ones, {', '.join(packed[:3])}. "
            "Calibrate the model as it was before it was quantised, and measure what the rounding adds."
        )
    complexes = [name for name, parameter in model.named_parameters() if parameter.is_complex()]
    if complexes:
        raise SiteError(
            f"expected weight layers of real numbers with another one upstream; found complex weights, "
            f"{', '.join(complexes[:3])}, whose layers dropout does not go before. Keep real and imaginary parts as "
            "weights of their own."
        )


def _no_site_message(select: Select, downstream: list[str], first: list[str]) -> str:
    if not downstream:
        return (
            "expected at least one weight layer with another one upstream; found only first layers "
            f"{first}. A model of one layer has no hidden units to drop."
        )
    return (
        f"expected {select!r} to match at least one site; found none. Sites: {downstream}; "
        f"first layers, which are never sites: {first}."
    )

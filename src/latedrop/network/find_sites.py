"""Where dropout goes: before every weight layer that has another weight layer upstream.

*Upstream* is judged by data flow, in a few probe passes (`probe`). The first layer of every branch stays clean, however
many branches there are. Comparing the passes also tells which axis of a layer's input counts the examples, so that one
mask can serve them all (`layout`). A weight layer is a module, or a call of a torch function with a weight
(`functional`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from fractions import Fraction
from itertools import chain
from typing import Any, TypeAlias
from warnings import warn

import torch
from torch import nn

from latedrop.data.datasets import first_inputs
from latedrop.data.items import Collate, as_items
from latedrop.errors import ArgumentError, LatedropWarning, SiteError
from latedrop.network.layers import DROPOUTS
from latedrop.network.layout import common_layout, follows, in_order
from latedrop.network.network import Network, check_module
from latedrop.network.probe import Probed, Run, Runs, probe
from latedrop.network.sites import Kind, Site, Sites, refuse_nested
from latedrop.wrappers import bare, plain_names

__all__ = ["Select", "find_sites", "own_dropouts"]

Select: TypeAlias = (
    "str | type[nn.Module] | Callable[[str, nn.Module], bool] | "
    "Sequence[str | type[nn.Module] | Callable[[str, nn.Module], bool]] | None"
)


def find_sites(
    model: nn.Module | Network,
    *example_inputs: Any,
    select: Select = None,
    kind: Kind = "element",
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
        kind: `"element"` or `"channel"`.
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
    if kind not in ("element", "channel"):
        raise ArgumentError(f"expected kind 'element' or 'channel'; found {kind!r}.")
    if not example_inputs:
        raise ArgumentError("expected example inputs after the model; found none. Pass one batch of its inputs.")
    model = model.model if isinstance(model, Network) else model
    check_module(model)
    x = example_inputs[0] if len(example_inputs) == 1 else tuple(example_inputs)
    x = as_items(first_inputs(x, model, collate), collate)
    _check_scripts(model)
    probed = _probed(model, x)
    layers = {name: list(chain(*probed.calls(name))) for name in _in_order(probed.passes)}
    modules = _named_layers(model)
    owners = {name: modules.get(runs[0].owner, model) for name, runs in layers.items()}
    downstream = [name for name, runs in layers.items() if any(run.downstream for run in runs)]
    chosen = [name for name in downstream if _selected(select, name, owners[name])]
    if not chosen:
        _check_weights(model, modules)
        raise SiteError(_no_site_message(select, downstream, [name for name in layers if name not in downstream]))
    sites = [_site(name, kind, probed) for name in chosen]
    if any(site.batch_axis is None for site in sites):  # draws run one by one: no channel mask needs to know rows
        channels = [replace(site, batch_axis=None, interleaved=False, moved=False) for site in sites]
        sites = [other if site.kind == "channel" else site for site, other in zip(sites, channels, strict=True)]
    return Sites(sites)


def own_dropouts(model: nn.Module, x: Any) -> tuple[Sites, dict[str, float]]:
    """Return the dropout layers that a model was trained with, as sites, and their rates; `x` was placed."""
    probed, modules = _probed(model, x, DROPOUTS), _named_layers(model)
    seen = [name for name in _in_order(probed.passes) if isinstance(modules.get(name), DROPOUTS)]
    rates = {name: float(vars(modules[name])["p"]) for name in seen}
    used = {name: rate for name, rate in rates.items() if 0 < rate < 1}
    if not used:
        raise SiteError(
            f"expected dropout layers of the model's own with a rate inside (0, 1); found {rates or 'none'}. Leave the "
            "term 'own_dropout' out: 'dropout' injects it."
        )
    kinds: dict[str, Kind] = {name: "element" if type(modules[name]) is nn.Dropout else "channel" for name in used}
    return Sites(_site(name, kinds[name], probed) for name in used), used


def _probed(model: nn.Module, x: Any, *types: Any) -> Probed:
    """Probe a network of its own: what a probe pass leaves behind in the copy goes with it."""
    network = Network(model)
    statistics = {name: layer for name, layer in network.layers.items() if _has_buffers(layer)}
    before = {name: dict(layer._buffers) for name, layer in statistics.items()}
    for layer in statistics.values():  # the copy shares them: what is written here must not reach the model
        layer._buffers.update({key: None if v is None else v.clone() for key, v in layer._buffers.items()})
    probed = probe(network, x, *types)
    written = [
        f"{name}.{key}"
        for name, layer in statistics.items()
        for key, value in layer._buffers.items()
        if value is not None and not torch.equal(value, before[name][key])
    ]
    if written:
        raise SiteError(
            f"expected a model that changes nothing of its layers in eval mode; its forward pass writes into {written},"
            " as batch normalization in training mode does. Run these layers in eval mode inside forward."
        )
    return probed


def _has_buffers(layer: nn.Module) -> bool:
    """Return True for a layer of torch's own with buffers, which the private copy shares with the model."""
    return type(layer).__module__.startswith("torch.nn.modules.") and any(True for _ in layer.buffers(recurse=False))


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


def _site(name: str, kind: Kind, probed: Probed) -> Site:
    """Return the site of a layer, from its calls in every pass."""
    calls = probed.calls(name)
    runs = list(chain(*calls))
    first, count, skipped = runs[0], max(map(len, calls)), not all(calls)
    if first.packed_steps is not None:
        features = first.value.shape[-1]
        units: tuple[int, ...] = (features,) if kind == "channel" else (first.packed_steps, features)
        moved = _moves(name, 0, False, probed)
        return Site(name, kind, first.layer, units, count, 0, moved=moved, coupled=probed.together, skipped=skipped)
    kind, axis, interleaved = _laid_out(name, kind, calls, probed)
    shape = list(first.value.shape)
    if kind == "channel":
        units = tuple(shape[channel] for channel in sorted(first.channels))
    else:
        if axis is not None:
            shape[axis] //= first.rows
        units = tuple(size for i, size in enumerate(shape) if i != axis or size > 1)
    moved = _moves(name, axis, interleaved, probed)
    together = probed.together
    return Site(name, kind, first.layer, units, count, axis, interleaved, first.weight, moved, together, skipped)


def _laid_out(name: str, kind: Kind, calls: list[list[Run]], probed: Probed) -> tuple[Kind, int | None, bool]:
    """Return the kind of masks, the axis of the rows, and whether folded ones alternate along it.

    A channel mask is the same for every row and position, so that rows need not be told apart. Where a row has at most
    one entry, of features alone, an element is a channel.
    """
    runs = list(chain(*calls))
    refuse_nested(name, *(run.value for run in runs))
    small, large = calls[0], calls[1] if probed.compared else None
    varying = not small or large == []
    if large and small[0].rows > large[0].rows:
        small, large = large, small
    folded = True
    try:
        if varying:
            raise SiteError(_varying(name))
        axis, interleaved = common_layout(name, small, large)
        folded = axis is not None and small[0].value.shape[axis] != small[0].rows
        if folded and (probed.structured or (probed.counts and kind == "element")):  # as many in every row, by chance
            raise SiteError(_varying(name))
        _check_entries(name, axis, runs)
    except SiteError as error:
        single = all(run.value.dim() == 2 and len(run.value) <= run.rows for run in runs)
        if kind == "element" and not (single and {len(c) for c in calls} <= {0, 1}):
            raise SiteError(_varying(name) if probed.branches else str(error)) from error
        return "channel", None, False
    # Code that reads values may fold as many entries of each row as they say; items may have had one entry by chance.
    unsure = kind == "channel" and (probed.structured or probed.sizes or (folded and probed.branches))
    return kind, None if unsure else axis, interleaved and not unsure


def _moves(name: str, axis: int | None, interleaved: bool, probed: Probed) -> bool:
    """Return True if the rows of a layer's input do not follow the order of the rows that the model is given."""
    if axis is None or probed.together or probed.random:
        return False
    if probed.orders is None:
        if not probed.compared:
            return False
        large, small = (runs.get(name, []) for runs in probed.passes[:2])
        pairs = zip(small, large, strict=False)
        return not all(in_order(a, b, axis, interleaved) for a, b in pairs if a.value.dim() == b.value.dim())
    there, back = (runs.get(name, []) for runs in probed.orders)
    return len(there) != len(back) or not all(
        follows(a, b, axis, interleaved) for a, b in zip(there, back, strict=True)
    )


def _check_entries(name: str, axis: int | None, runs: list[Run]) -> None:
    """Raise where rows have several numbers of entries."""
    alike = [run for run in runs if run.value.dim() == runs[0].value.dim()]
    if axis is not None and len({Fraction(run.value.shape[axis], run.rows) for run in alike}) > 1:
        raise SiteError(_varying(name))


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
    return any(_selected(item, name, module) for item in select)


def _check_scripts(model: nn.Module) -> None:
    """Refuse a model that is TorchScript, and warn of parts that are: they run outside Python."""
    if isinstance(bare(model), torch.jit.ScriptModule):
        raise SiteError(
            "expected a model whose layers run in Python; found TorchScript, inside which nothing can be dropped. Use "
            "the Python model, or export it with torch.export and pass latedrop.load_program(path)."
        )
    scripts = [name for name, module in _named_layers(model).items() if isinstance(module, torch.jit.ScriptModule)]
    outermost = [name for name in scripts if not any(name.startswith(f"{other}.") for other in scripts)]
    if outermost:
        warn(
            f"{outermost} are TorchScript: no dropout goes inside them, only after them. Use the Python modules to "
            "reach their layers.",
            LatedropWarning,
            stacklevel=3,
        )


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
        f"expected select={select!r} to match at least one site; found none. Sites: {downstream}; "
        f"first layers, which are never sites: {first}."
    )

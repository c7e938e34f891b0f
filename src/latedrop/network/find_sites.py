"""Where dropout goes: before every weight layer that has another weight layer upstream.

*Upstream* is judged by data flow: autograd answers what depends on what. In a probe pass everything that comes out of a
weight layer is multiplied by a 1 that asks for gradients; so a layer has another one upstream if and only if its input
requires grad. The first layer of every branch stays clean, however many branches there are. A weight layer is a module,
or a call of a torch function with a weight (`functional`).

Passes over two and three rows, and over these in another order, tell which axis of a layer's input counts the examples,
so that one mask can serve them all, and whether examples affect each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from itertools import chain, product, zip_longest
from typing import Any, NamedTuple, TypeAlias
from warnings import warn

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from latedrop.data.arrays import check_dtypes, map_values, place
from latedrop.data.batches import first_inputs, inputs_loaded, is_loader
from latedrop.data.rows import (
    Collate,
    Graphs,
    Items,
    as_items,
    batch_of,
    copied,
    distinct_rows,
    reordered,
    reordering,
    row_count,
    some_rows,
    take_rows,
    tensors,
)
from latedrop.errors import ArgumentError, DataError, LatedropError, LatedropWarning, SiteError
from latedrop.network.functional import WeightCall, WeightCalls
from latedrop.network.network import Network, Pass, call, check_module
from latedrop.network.private_copy import Guard
from latedrop.network.sites import LAYERS, SOURCES, Kind, Site, Sites, channel_axis, layer_inputs
from latedrop.options import shown
from latedrop.torch_private import bare, plain_names, unwrapped

__all__ = ["Select", "find_sites", "placed_batches"]

_Selector: TypeAlias = str | type[nn.Module] | Callable[[str, nn.Module], bool]
Select: TypeAlias = _Selector | Sequence[_Selector] | None
Runs: TypeAlias = "dict[str, list[Run]]"
"""The calls of each weight layer in one pass."""
_AT_ONCE, _ALONE, _MOST_ROWS = 16, 8, 1024
_ANY_NUMBER = "a number that depends on values, as with the nodes of graphs, or rows that go to one of several layers"


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
    longest_first = sorted(probe.passes, key=len, reverse=True)
    names = dict.fromkeys(chain(*longest_first))
    layers = {name: [run for runs in probe.passes for run in runs.get(name, [])] for name in names}
    plain = plain_names(bare(model))
    modules = {plain(name): bare(module) for name, module in bare(model).named_modules()}
    holders = {name: (runs[0].weight or f"{name}.").rpartition(".")[0] for name, runs in layers.items()}
    owners = {name: modules.get(holder, model) for name, holder in holders.items()}
    downstream = [name for name, runs in layers.items() if any(run.downstream for run in runs)]
    chosen = [name for name in downstream if _selected(select, name, owners[name])]
    patterns = [item for item in select if isinstance(item, str)] if isinstance(select, (list, tuple)) else []
    unmatched = [item for item in patterns if not any(_selected(item, name, owners[name]) for name in chosen)]
    quantised = [name for name, module in modules.items() if ".quantized." in type(module).__module__]
    unusable = [name for name in quantised if hasattr(modules[name], "weight")]  # parametrized layers compute theirs
    unusable += [name for name, weight in model.named_parameters() if weight.is_complex()]
    if unusable and not chosen:
        raise SiteError(
            "expected weight layers that work on floating numbers; found quantised or complex ones, "
            f"{', '.join(unusable[:3])}. Calibrate the model as it was before it was quantised; keep real and "
            "imaginary parts as weights of their own."
        )
    first = [name for name in layers if name not in downstream]
    if not downstream:
        raise SiteError(
            "expected at least one weight layer with another one upstream; found only first layers "
            f"{first}. A model of one layer has no hidden units to drop."
        )
    if not chosen or unmatched:
        raise SiteError(
            f"expected {unmatched[0] if unmatched else select!r} to match at least one site; found none. Sites: "
            f"{downstream}; first layers, which are never sites: {first}."
        )
    sites = [site for name in chosen for site in _sites(name, kind, probe)]
    if not sites:
        raise SiteError(
            f"expected a layer whose input has one entry for each node, as the targets have; found {chosen}, whose "
            "inputs have others, such as edges. Read out one number for each graph."
        )
    rowless = any(site.batch_axis is None for site in sites)  # draws run one by one: channel masks need no rows then
    apart = [replace(s, batch_axis=None, interleaved=False, moved=False) for s in sites]
    return Sites(a if rowless and s.kind == "channel" else s for s, a in zip(sites, apart, strict=True))


def placed_batches(
    network: Network, x: Any, sites: Sequence[Site] | None, collate: Collate, *, check: bool = True
) -> tuple[Sites, Iterable[Any]]:
    """Return the sites, found where None, and the inputs on the model's device: one batch, or those of a loader.

    Without `check` inputs may have NaN or inf. Reading a batch without rows raises `DataError`.
    """
    loads = not isinstance(x, Tensor) and collate is None and is_loader(x)
    if not loads:
        x = place(as_items(x, collate), network.weight, check=check or sites is None)
    sites = find_sites(network, x) if sites is None else Sites(sites)
    if not loads:
        some_rows(x)
        return sites, [as_items(x, None, sites)]
    parts = (place(part, network.weight, check=check) for part in inputs_loaded(x, network.model))
    return sites, (as_items(part, None, sites) for part in parts if some_rows(part))


def _probe(model: nn.Module, x: Any) -> Probe:
    """Probe a network of its own: what a probe pass writes into the copy must not reach the model."""
    network = Network(model, buffers=False)
    layers = [name for name, layer in network.layers.items() if type(layer).__module__.startswith("torch.nn.modules.")]
    named = [(name, buffer) for name, buffer in network.copy.named_buffers() if name.rpartition(".")[0] in layers]
    before = {name: buffer.clone() for name, buffer in named}
    try:
        probe = Probe(network, x)
    except (LatedropError, MemoryError):
        raise
    except Exception as error:
        check_dtypes(x, network.copy, error)
        raise DataError(
            f"expected the model to run on the example inputs; it raised {type(error).__name__}: {error}. "
            "Pass inputs of the shapes and dtypes that the model takes."
        ) from error
    written = [name for name, values in before.items() if not torch.equal(network.copy.get_buffer(name), values)]
    if written:
        raise SiteError(
            f"expected a model that changes nothing of its layers in eval mode; its forward pass writes into {written},"
            " as batch normalization in training mode does. Run these layers in eval mode inside forward."
        )
    return probe


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
    calls = [runs.get(name, []) for runs in probe.passes]
    runs = list(chain(*calls))
    first, axis, interleaved = runs[0], 0, False
    if any(run.value.is_nested for run in runs):
        raise SiteError(
            f"expected a plain tensor as the input of layer {name!r}; found a nested one, of rows of several sizes, in "
            "which units cannot be told apart. Leave the layer out with select=, or pad the rows."
        )
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
            raise _irregular(name)
        axis, interleaved = 0, False
        if second is not None:
            if len(first) != len(second):
                counts = f"{len(second)} calls for {second[0].rows} examples and {len(first)} for {first[0].rows}"
                raise _irregular(name, counts)
            turned = probe.turned.get(name, [])[: len(first)]
            layouts = {_layout(name, *runs) for runs in zip_longest(first, second, turned)}
            if len(layouts) > 1:
                raise _irregular(name, f"axes {sorted(str(axis) for axis, _ in layouts)}")
            axis, interleaved = layouts.pop()  # type: ignore[assignment]
        folded = axis is not None and first[0].value.shape[axis] != first[0].rows
        if folded and (probe.structured or ("counts" in probe.deeds and kind == "element")):  # as many, by chance
            raise _irregular(name)
        alike = [run for run in runs if run.value.dim() == runs[0].value.dim()]
        if axis is not None and len({Fraction(run.value.shape[axis], run.rows) for run in alike}) > 1:
            raise _irregular(name)
    except SiteError as error:
        single = all(run.value.dim() == 2 and len(run.value) <= run.rows for run in runs)
        if kind == "element" and not (single and {len(c) for c in calls} <= {0, 1}):
            if "reads" in probe.deeds:
                raise _irregular(name) from error
            raise
        return "channel", None, False
    # Code that reads values may fold as many entries of each row as they say; items may have had one entry by chance.
    unsure = probe.structured or "sizes" in probe.deeds or (folded and "reads" in probe.deeds)
    return (kind, None, False) if kind == "channel" and unsure else (kind, axis, interleaved)


def _moves(name: str, axis: int, interleaved: bool, probe: Probe) -> bool:
    """Return True if the rows of a layer's input do not follow the order of the rows that the model is given."""
    if probe.together or probe.random or probe.orders is None:
        return False
    there, back = (runs.get(name, []) for runs in probe.orders)
    if len(there) != len(back):
        return True
    return not all(_follows(a, b, axis, interleaved) for a, b in zip(there, back, strict=True))


def _layout(name: str, first: Run, second: Run, turned: Run | None) -> tuple[int | None, bool]:
    """Return the axis of the rows, and whether folded ones alternate along it, from passes over other rows."""
    rows, (a, b) = first.rows, (first.value, second.value)
    if second.rows < rows:
        axes = [i for i, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n]
        if len(axes) > 1 or (axes and a.shape[axes[0]] * second.rows != b.shape[axes[0]] * rows):
            shapes = f"shape {tuple(b.shape)} for {second.rows} examples and {tuple(a.shape)} for {rows}"
            raise _irregular(name, shapes)
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
    raise _irregular(name, f"shape {tuple(a.shape)}, with examples folded in another order")


def _irregular(name: str, layout: str = _ANY_NUMBER) -> SiteError:
    return SiteError(
        f"expected as many entries for every row in the input of layer {name!r}, in order along one axis, in every "
        f"call; found {layout}. Use kind='channel', with which all entries have one mask, and pass sites=; or leave "
        "it out with select=."
    )


def _follows(there: Run, back: Run, axis: int, interleaved: bool) -> bool:
    """Return True if rows that go in in another order lie in that order."""
    a, b, rows = there.value.float(), back.value.float(), there.rows
    if a.shape != b.shape or a.shape[axis] % rows:
        return False
    order = torch.tensor(reordering(rows), device=a.device)
    split: Tensor = a.unflatten(axis, (-1, rows) if interleaved else (rows, -1))
    expected = split.index_select(axis + interleaved, order).flatten(axis, axis + 1)
    rounding = 1e-3 * float(a.nan_to_num().abs().max()) + 1e-12 if a.numel() else 0.0
    return torch.allclose(expected, b, rtol=1e-2, atol=rounding, equal_nan=True)


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


@dataclass
class Run:
    """One call of one weight layer in a probe pass."""

    layer: str  # its type, or the torch function that takes the weight
    weight: str | None  # the name of a weight without a module
    channels: tuple[int, ...]  # the axes of the input, from the end, along which features lie
    value: Tensor  # the input, padded where it was packed
    packed: bool
    rows: int  # examples in the pass
    downstream: bool  # whether another weight layer is upstream


class _Made(NamedTuple):
    """One pass: its inputs and rows, the tensors of its output, and its runs."""

    x: Any
    rows: int
    output: list[Tensor]
    runs: Runs


class Probe:
    """Passes of a network over a few rows of `x`, which note the calls of weight layers.

    Attributes:
        passes: the runs of each pass; the second has fewer rows than the first, or these in another order.
        compared: whether there is a second pass.
        turned: the runs of the first pass's rows in another order.
        orders: the runs of a pass over some rows, and of one over these in another order, if there were such.
        together: whether the rows of a batch belong together: they act on each other, or their number is fixed.
        random: whether the output changes with random numbers of the model's own.
        structured: whether a batch of items holds tensors that have not one entry for each of them.
        nodes: whether the rows are the nodes of graphs, as the output has one entry for each; None where `x` is other.
        deeds: what the model's Python code does with values; see `Guard`.
    """

    def __init__(self, network: Network, x: Any) -> None:
        self.nodes: bool | None = None
        if isinstance(x, Graphs):  # passes are over graphs in either case
            x, self.nodes = Graphs(x.graphs), x.nodes
            x.batch(network.copy)  # checks all of them, and passes are over some
        some_rows(x)
        self._network, self._reached = network, set[str]()
        self.orders: tuple[Runs, Runs] | None = None
        self.together = self.random = self.structured = False
        self.deeds: set[str] = set()
        network.watched |= {name for name, layer in network.layers.items() if isinstance(layer, SOURCES)}
        turn, second = None, None
        try:
            first = self._run(distinct_rows(x, 3))
            second = self._run(distinct_rows(x, 2))
            turn = self._run(reordered(first.x))
            self.orders = first.runs, turn.runs
        except LatedropError:
            raise
        except Exception:  # the model may insist on its batch size
            self.together, turn = True, None
            first, second = self._of_one_size(x)
        self.compared = second is not None
        self.turned = (turn or second or first).runs
        self.passes = [made.runs for made in (first, second) if made is not None]
        if self.random:
            warn(
                "the model draws random numbers by itself in eval mode (functional dropout left on, perhaps): "
                "its output varies without injection, and that variance is counted too.",
                LatedropWarning,
                stacklevel=4,
            )
        elif second is not None:
            self._compare(x, first, second, turn)
        if "reads" in self.deeds and not self.together:
            self._go_on(x)
        self.together |= "decides" in self.deeds  # each draw may take another way

    def _run(self, x: Any) -> _Made:
        """Make one pass."""
        network, rows = self._network, row_count(x)

        def passed() -> tuple[Any, _Probing]:
            inputs = batch_of(copied(x), network.copy)
            if isinstance(x, Items):
                self.structured |= _is_structured(inputs, rows)
                self.deeds.add("reads")
            now = _Probing(rows, network)
            with now.following, network.passing(now):
                return call(network.copy, inputs), now

        output, now = network.quietly(passed, gradients=True)
        if network.random:
            self.deeds.add("reads")
            self.random |= self._varies(x, output)
        network.derives = network.derives or "derives" in now.following.deeds
        self.deeds |= now.following.deeds
        self._reached |= now.ran
        if isinstance(x, Graphs):
            nodes, shapes = int(x.graphs.num_nodes), {tensor.shape[:1] for tensor in tensors(output)}
            self.nodes = rows < nodes and shapes == {(nodes,)} if self.nodes is None else self.nodes
        for run in chain.from_iterable(now.runs.values()):
            run.rows = nodes if self.nodes else run.rows
            run.value = run.value.detach()
            self.deeds |= {"reads"} if run.packed else set()
        return _Made(x, rows, [tensor.detach() for tensor in tensors(output)], now.runs)

    def _of_one_size(self, x: Any) -> tuple[_Made, _Made | None]:
        """Make a pass, and one with the rows in another order, where they differ."""
        first, moved = self._run(x), reordered(x)
        alike = [torch.equal(a, b) for a, b in zip(tensors(x), tensors(moved), strict=True)]
        if row_count(x) > 1 and (isinstance(x, Items) or not all(alike)):
            with suppress(Exception):
                return first, self._run(moved)
        return first, None

    def _varies(self, x: Any, output: Any) -> bool:
        """Return True if the output changes with the random numbers; some models draw them in eval mode for nothing."""

        def again() -> Any:
            torch.rand(1)  # moves the generator on
            return self._network.output(copied(x))

        others = tensors(self._network.quietly(again))
        return not all(torch.allclose(a, b) for a, b in zip(tensors(output), others, strict=False))

    def _compare(self, x: Any, first: _Made, second: _Made, turn: _Made | None) -> None:
        """Tell from the outputs of the passes whether rows affect each other."""
        if second.rows < first.rows:
            _check_rows(x, first, second)
            alike = _alike(first, second, slice(second.rows))
            alike = alike and (turn is None or _alike(first, turn, reordering(first.rows)))
        else:
            alike = _alike(first, second, reordering(first.rows))
        if alike:
            return
        if not _alike(first, self._run(first.x), slice(None)):
            raise SiteError(
                "expected a model whose output depends on its inputs alone; it gives another one for the same inputs, "
                "as it remembers earlier passes in an attribute. Reset that at the start of its forward."
            )
        if isinstance(x, Items) and turn is not None and not _alike(first, turn, reordering(first.rows)):
            pairs = [(a.float().sort(0)[0], b.float().sort(0)[0]) for a, b in _pairs(first, turn)]
            if pairs and all(torch.allclose(a, b, rtol=1e-3) for a, b in pairs):
                raise DataError(
                    "expected collate= to keep the order of the items; found outputs that come in another one, as "
                    "where it sorts them by length. Sort inside of the model, and undo it there."
                )
        self._meet()

    def _meet(self) -> None:
        """Note that rows affect each other, and warn of it."""
        self.together = True
        warn(
            "expected examples that do not depend on each other; the output of a row changes with the rows beside "
            "it, as with batch statistics, the nodes of one graph or the steps of one sequence. Use "
            "method='sample', with all the rows that belong together in one batch, or give each graph one row; "
            "method='linear' is wrong here.",
            LatedropWarning,
            stacklevel=6,
        )

    def _go_on(self, x: Any) -> None:
        """Where values decide what runs, take more rows together, some alone, and others until every layer has run."""
        rows = min(row_count(x), _MOST_ROWS)
        some = take_rows(x, slice(0, _AT_ONCE))
        beside = self._run(some)
        self.passes.append(beside.runs)
        with suppress(Exception):  # some models insist on an order
            self.orders = beside.runs, self._run(reordered(some)).runs  # code that reads values may sort rows by them
        for start in sorted({i * (beside.rows - 1) // (_ALONE - 1) for i in range(_ALONE)}):
            with suppress(Exception):  # some models take no single row
                alone = self._run(take_rows(x, slice(start, start + 1)))
                self.passes.append(alone.runs)
                if not self.random and not self.together and not _alike(beside, alone, slice(start, start + 1)):
                    self._meet()
        runs = chain.from_iterable(chain.from_iterable(made.values()) for made in self.passes)
        stacks = any(run.weight is not None for run in runs)  # how many experts are in one parameter cannot be told
        for start in range(_AT_ONCE, rows, _AT_ONCE):
            if not stacks and not self._unreached():
                break
            self.passes.append(self._run(take_rows(x, slice(start, start + _AT_ONCE))).runs)
        names = self._unreached()
        if names:
            warn(
                f"none of {rows} rows reached the parameters {shown(names)}: there is no site in that branch, so what "
                "it does adds nothing to the variance. Find the sites on rows that take every branch, and pass sites=.",
                LatedropWarning,
                stacklevel=5,
            )

    def _unreached(self) -> list[str]:
        """Return the parameters of weight layers that have not run in any pass."""
        layers = {name: layer for name, layer in self._network.layers.items() if isinstance(layer, SOURCES)}
        used = {id(weight) for name in self._reached & layers.keys() for weight in layers[name].parameters()}
        inner = [name for name in layers for other in layers if name.startswith(f"{other}.")]  # used without a call
        silent = [name for name in layers if name not in self._reached and name not in inner]
        named = [(f"{name}.{own}", weight) for name in silent for own, weight in layers[name].named_parameters()]
        return [name for name, weight in named if id(weight) not in used]  # tied weights may have run elsewhere


def _pairs(first: _Made, second: _Made) -> list[tuple[Tensor, Tensor]]:
    """Return the outputs of two passes that have one entry per row."""
    return [
        (a, b)
        for a, b in zip(first.output, second.output, strict=False)
        if a.shape[:1] == (first.rows,) and b.shape[:1] == (second.rows,) and a.shape[1:] == b.shape[1:]
        if a.is_floating_point() and a.numel()
    ]


def _alike(first: _Made, second: _Made, rows: slice | list[int]) -> bool:
    """Return True if these rows of the first pass are those of the second."""
    for a, b in _pairs(first, second):
        rounding = 0.1 if a.dtype in (torch.float16, torch.bfloat16) else 1e-3
        if bool((a[rows] - b).abs().max() > rounding * a.abs().max()):
            return False
    return True


def _check_rows(x: Any, first: _Made, second: _Made) -> None:
    """Raise where the number of rows that go in does not change anything of what comes out."""
    shapes = [[tuple(t.shape) for t in made.output if t.is_floating_point()] for made in (first, second)]
    if shapes[0] != shapes[1] or not any(shape[:1] > (1,) for shape in shapes[0]):
        return
    outputs = f"found outputs of shapes {shapes[0]} for {first.rows} rows and for {second.rows} alike"
    if isinstance(x, Items):
        raise DataError(
            f"expected collate= to make a batch with one output for each item; {outputs}. It must use all items of the "
            "list that it is given."
        )
    raise DataError(
        f"expected inputs and outputs whose first axis counts the examples; {outputs}: the first axis of the inputs "
        "counts something else, such as the steps of sequences. Pass inputs with the examples along the first axis; a "
        "module that transposes them can stand before the model."
    )


def _is_structured(batch: Any, rows: int) -> bool:
    """Return True if a batch of items holds tensors with another number of entries than items, or nothing to see."""
    parts = list(batch) if type(batch) in (tuple, list) else [batch]
    packed = [part for part in parts if isinstance(part, PackedSequence) and int(part.batch_sizes[0]) == rows]
    others = tensors([part for part in parts if not any(part is one for one in packed)])
    return any(tensor.shape[:1] != (rows,) for tensor in others) or (not others and not packed)


class _Probing(Pass):
    """A pass that notes the inputs of weight layers, and marks what comes out of them."""

    calls: WeightCalls

    def __init__(self, rows: int, network: Network) -> None:
        super().__init__()
        self.runs, self.ran = dict[str, list[Run]](), set[str]()
        self.following = Guard(bare(network.model), follows=True)
        self.calls = WeightCalls(network.copy, self.meet, self._marked)
        self._rows, self._one = rows, torch.ones((), requires_grad=True)

    def run(self, name: str, layer: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer and record its call; see `Pass`."""
        inputs = list(layer_inputs(layer, args, kwargs).values())
        self.ran.add(name)
        if isinstance(layer, LAYERS) and inputs:
            self._note(name, inputs, layer=type(layer).__name__, weight=None, channels=(channel_axis(layer),))
        with self.calls.apart():
            output = forward(*args, **kwargs)
        return self._marked(output) if isinstance(layer, SOURCES) else output

    def meet(self, met: WeightCall) -> dict[Any, Any]:
        """Note a weight without a layer; see `Pass`."""
        self._note(met.name, [*met.inputs.values()], layer=met.layer, weight=met.weight, channels=met.channels)
        return {}

    def _marked(self, output: Any) -> Any:
        """Return what came out of a weight layer, so that all that is computed from it requires grad."""
        return map_values(output, lambda t: t * self._one.to(t) if t.is_floating_point() else t)

    def _note(self, name: str, inputs: list[Any], **about: Any) -> None:
        """Note the first of a layer's inputs, with the fields of `Run` that say what the layer is."""
        if torch.is_inference_mode_enabled():
            raise SiteError(
                f"expected layers that run outside of torch.inference_mode(); the model runs {name!r} inside, where "
                "nothing tells what depends on what. Use torch.no_grad() there."
            )
        packed = isinstance(inputs[0], PackedSequence)
        value = pad_packed_sequence(inputs[0], batch_first=True)[0] if packed else inputs[0].clone()
        asking = [i.data if isinstance(i, PackedSequence) else i for i in inputs]
        asking = [tensor for tensor in asking if tensor.requires_grad]
        downstream = any(map(self._depends, asking)) if "asks" in self.following.deeds else bool(asking)
        run = Run(value=value, packed=packed, rows=self._rows or 0, downstream=downstream, **about)
        self.runs.setdefault(name, []).append(run)

    def _depends(self, value: Tensor) -> bool:
        """Return True if a weight layer is upstream, not just an input that the model itself asks gradients of."""
        left, seen = [unwrapped(value).grad_fn], set[Any]()
        while left:
            node = left.pop()
            if getattr(node, "variable", None) is self._one:
                return True
            if node is not None and node not in seen:
                seen.add(node)
                left += [function for function, _ in node.next_functions]
        return False

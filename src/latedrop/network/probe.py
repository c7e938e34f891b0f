"""Probe passes: which weight layers run, on what, and whether another weight layer is upstream of them.

Autograd answers what depends on what. In a probe pass everything that comes out of a weight layer is multiplied by a 1
that asks for gradients; so a layer has another one upstream if and only if its input requires grad. Passes over two and
three rows, and over these in another order, tell which axis of an input counts the rows, and whether rows affect
each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, TypeAlias
from warnings import warn

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from latedrop.data.arrays import check_dtypes, map_values
from latedrop.data.rows import (
    Graphs,
    Items,
    batch_of,
    copied,
    distinct_rows,
    reordered,
    reordering,
    row_count,
    take_rows,
    tensors,
)
from latedrop.errors import DataError, LatedropError, LatedropWarning, SiteError
from latedrop.network.calling import call
from latedrop.network.functional import WeightCall, WeightCalls
from latedrop.network.network import Network, Pass
from latedrop.network.private_copy import Guard
from latedrop.network.sites import LAYERS, SOURCES, channel_axis, layer_inputs
from latedrop.torch_private import set_grad, unwrapped
from latedrop.wrappers import bare

__all__ = ["Following", "Probe", "Run", "Runs"]

Runs: TypeAlias = "dict[str, list[Run]]"
"""The calls of each weight layer in one pass."""
_AT_ONCE, _ALONE, _MOST_ROWS, _MOST_NAMES = 16, 8, 1024, 10


@dataclass
class Run:
    """One call of one weight layer in a probe pass.

    Attributes:
        layer: the type of the layer, or the torch function that takes the weight.
        owner: the name of the module that holds the weight.
        weight: the name of a weight without a module; None for a layer.
        channels: the axes of the input, from the end, along which features lie.
        value: the input, padded where it was packed.
        packed: whether it was.
        rows: examples in the pass.
        downstream: whether another weight layer is upstream.
    """

    layer: str
    owner: str
    weight: str | None
    channels: tuple[int, ...]
    value: Tensor
    packed: bool
    rows: int
    downstream: bool


class _Made(NamedTuple):
    """One pass that was made: its inputs and rows, the tensors of its output, and its runs."""

    x: Any
    rows: int
    output: list[Tensor]
    runs: Runs


class Probe:
    """Passes of a network over a few rows of `x`, which note the calls of layers of some types.

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

    def __init__(self, network: Network, x: Any, types: tuple[type[nn.Module], ...] = LAYERS) -> None:
        self.nodes: bool | None = None
        if isinstance(x, Graphs):  # passes are over graphs in either case
            x, self.nodes = Graphs(x.graphs), x.nodes
        if row_count(x) == 0:
            raise DataError("expected example inputs with at least one row; found none. Pass a few rows.")
        self._network, self._types, self._reached = network, types, set[str]()
        self.orders: tuple[Runs, Runs] | None = None
        self.together = self.random = self.structured = False
        self.deeds: set[str] = set()
        network.route(name for name, layer in network.layers.items() if isinstance(layer, (*SOURCES, *types)))
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
            with self._in_words(x):
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
            with self._in_words(x):
                self._go_on(x)
        self.together |= "decides" in self.deeds  # each draw may take another way

    def calls(self, name: str) -> list[list[Run]]:
        """Return the calls of a layer in every pass."""
        return [runs.get(name, []) for runs in self.passes]

    def _run(self, x: Any) -> _Made:
        """Make one pass."""
        network, rows = self._network, row_count(x)

        def passed() -> tuple[Any, _Probing]:
            inputs = batch_of(copied(x), network.copy)
            if isinstance(x, Items):
                self.structured |= _is_structured(inputs, rows)
                self.deeds.add("reads")
            now = _Probing(rows, self._types, network)
            with now.following, network.passing(now), now.calls:
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
        pairs = zip(tensors(x), tensors(moved), strict=True)
        if row_count(x) > 1 and (isinstance(x, Items) or not all(torch.equal(a, b) for a, b in pairs)):
            with suppress(Exception):
                return first, self._run(moved)
        return first, None

    def _varies(self, x: Any, output: Any) -> bool:
        """Return True if the output changes with the random numbers; some models draw them in eval mode for nothing."""

        def again() -> Any:
            torch.rand(1)  # moves the generator on
            return self._network.output(copied(x))

        pairs = zip(tensors(output), tensors(self._network.quietly(again)), strict=False)
        return not all(torch.allclose(a, b) for a, b in pairs)

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
            _check_order(first, turn)
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
        stacks = any(run.weight is not None for made in self.passes for runs in made.values() for run in runs)
        for start in range(_AT_ONCE, rows, _AT_ONCE):
            if not stacks and not self._unreached():  # how many experts are in one parameter cannot be told
                break
            self.passes.append(self._run(take_rows(x, slice(start, start + _AT_ONCE))).runs)
        names = self._unreached()
        if names:
            more = f" and {len(names) - _MOST_NAMES} others" if len(names) > _MOST_NAMES else ""
            warn(
                f"none of {rows} rows reached the parameters {names[:_MOST_NAMES]}{more}: there is no "
                "site in that branch, so what it does adds nothing to the variance. Find the sites on rows that take "
                "every branch, and pass sites=.",
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

    @contextmanager
    def _in_words(self, x: Any) -> Iterator[None]:
        """Turn what the model itself raises into an error of the inputs."""
        try:
            yield
        except (LatedropError, MemoryError):
            raise
        except Exception as error:
            check_dtypes(x, self._network.copy, error)
            raise DataError(
                f"expected the model to run on the example inputs; it raised {type(error).__name__}: {error}. "
                "Pass inputs of the shapes and dtypes that the model takes."
            ) from error


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
    if isinstance(x, Items):
        raise DataError(
            f"expected collate= to make a batch with one output for each item; found outputs of shapes {shapes[0]} for "
            f"{first.rows} items and for {second.rows} alike. It must use all items of the list that it is given."
        )
    raise DataError(
        f"expected inputs and outputs whose first axis counts the examples; found outputs of shapes {shapes[0]} for "
        f"{first.rows} rows and for {second.rows} alike: the first axis of the inputs counts something else, such as "
        "the steps of sequences. Pass inputs with the examples along the first axis; a module that transposes them can "
        "stand before the model."
    )


def _check_order(first: _Made, turn: _Made) -> None:
    """Raise where the rows of items come out the same, whatever the order in which they go in."""
    pairs = _pairs(first, turn)
    if pairs and all(torch.allclose(a.float().sort(0)[0], b.float().sort(0)[0], rtol=1e-3) for a, b in pairs):
        raise DataError(
            "expected collate= to keep the order of the items; found outputs that come in another one, as where it "
            "sorts them by length. Sort inside of the model, and undo it there."
        )


def _is_structured(batch: Any, rows: int) -> bool:
    """Return True if a batch of items holds tensors with another number of entries than items, or nothing to see."""
    parts = list(batch) if type(batch) in (tuple, list) else [batch]
    packed = [part for part in parts if isinstance(part, PackedSequence) and int(part.batch_sizes[0]) == rows]
    others = tensors([part for part in parts if not any(part is one for one in packed)])
    return any(tensor.shape[:1] != (rows,) for tensor in others) or (not others and not packed)


class Following(Guard):
    """A guard that also keeps the graph whole where a model switches gradients off or detaches.

    It notes `"asks"` where the model has asked for gradients of some tensor itself, as one that derives does of inputs.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is set_grad:
            return None
        if getattr(func, "__name__", "") in ("requires_grad_", "__set__"):
            self.deeds.add("asks")
        if func in (Tensor.detach, torch.detach) and args[0].requires_grad:
            return args[0].view_as(args[0])
        return super().__torch_function__(func, types, args, kwargs)


class _Probing(Pass):
    """A pass that notes the inputs of weight layers, and marks what comes out of them."""

    calls: WeightCalls

    def __init__(self, rows: int, types: tuple[type[nn.Module], ...], network: Network) -> None:
        super().__init__()
        self.runs, self.ran = dict[str, list[Run]](), set[str]()
        self.following = Following(bare(network.model))
        self.calls = WeightCalls(network.copy, self._meet, self._marked)
        self._types, self._rows, self._one = types, rows, torch.ones((), requires_grad=True)

    def run(self, name: str, layer: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `Pass`."""
        inputs = list(layer_inputs(layer, args, kwargs).values())
        self.ran.add(name)
        if isinstance(layer, self._types) and inputs:
            axes = (channel_axis(layer),)
            self._note(name, inputs, layer=type(layer).__name__, owner=name, weight=None, channels=axes)
        with self.calls.apart():
            output = forward(*args, **kwargs)
        return self._marked(output) if isinstance(layer, SOURCES) else output

    def _meet(self, met: WeightCall) -> dict[Any, Any]:
        """Note a weight without a layer."""
        about = {"layer": met.layer, "weight": met.weight, "channels": met.channels}
        self._note(met.name, list(met.inputs.values()), owner=met.weight.rpartition(".")[0], **about)
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

"""Probe passes: which weight layers run, on what, and whether another weight layer is upstream of them.

Autograd answers what depends on what. In a probe pass everything that comes out of a weight layer is multiplied by a 1
that asks for gradients; so a layer has another one upstream if and only if its input requires grad. Passes over two and
three rows, and over these in another order, tell which axis of an input counts the rows, and whether rows affect
each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias
from warnings import warn

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from latedrop.data.arrays import check_dtypes, map_values
from latedrop.data.items import Items, batch_of
from latedrop.data.rows import (
    copied,
    distinct_rows,
    reordered,
    reordering,
    row_count,
    row_limits,
    take_rows,
    tensors,
    turned,
)
from latedrop.errors import DataError, LatedropError, LatedropWarning, SiteError
from latedrop.network.calling import call
from latedrop.network.functional import WeightCall, WeightCalls
from latedrop.network.layers import LAYERS, SOURCES, channel_axis, layer_inputs
from latedrop.network.network import Network
from latedrop.network.passes import Pass
from latedrop.network.private_copy import Guard
from latedrop.torch_private import set_grad, unwrapped
from latedrop.wrappers import bare

__all__ = ["Following", "Probed", "Run", "Runs", "probe"]

Runs: TypeAlias = "dict[str, list[Run]]"
"""The calls of each weight layer in one pass."""
_MARKED: tuple[Any, ...] = (*SOURCES, torch.jit.ScriptModule)  # the latter holds weights, too
_AT_ONCE, _ALONE, _MOST_ROWS, _MOST_NAMES = 16, 8, 1024, 10


@dataclass
class Run:
    """One call of one weight layer in a probe pass.

    Attributes:
        layer: the type of the layer, or the torch function that takes the weight.
        owner: the name of the module that holds the weight.
        weight: the name of a weight without a module; None for a layer.
        channels: the axes of the input, from the end, along which features lie.
        downstream: whether another weight layer is upstream.
        value: the input, padded where it was packed.
        packed_steps: steps of the longest sequence, where it was packed.
        rows: examples in the pass.
    """

    layer: str
    owner: str
    weight: str | None
    channels: tuple[int, ...]
    downstream: bool
    value: Tensor
    packed_steps: int | None
    rows: int


@dataclass
class Probed:
    """What the passes over some rows told.

    Attributes:
        passes: the runs of each pass; the second has fewer rows than the first, or these in another order.
        compared: whether there is a second pass.
        orders: the runs of a pass over some rows, and of one over these in another order, if there were such.
        together: whether the rows of a batch belong together: they act on each other, or their number is fixed.
        branches: whether values decide what runs, or on how much.
        sizes: whether the size of something depends on values.
        counts: whether whole numbers of the inputs were read: they may be sizes.
        structured: whether a batch of items holds tensors that have not one entry for each of them.
        random: whether the output changes with random numbers of the model's own.
    """

    passes: list[Runs]
    compared: bool = True
    orders: tuple[Runs, Runs] | None = None
    together: bool = False
    branches: bool = False
    sizes: bool = False
    counts: bool = False
    structured: bool = False
    random: bool = False

    def calls(self, name: str) -> list[list[Run]]:
        """Return the calls of a layer in every pass."""
        return [runs.get(name, []) for runs in self.passes]


@dataclass
class _Pass:
    """One pass that was made: its rows, its output and its runs."""

    rows: int
    output: Any
    runs: Runs
    x: Any


@dataclass
class _Prober:
    """Passes over some rows of a model's inputs, and what all of them told."""

    network: Network
    types: tuple[type[nn.Module], ...]
    random: bool = False
    reads: bool = False
    decides: bool = False
    sizes: bool = False
    counts: bool = False
    structured: bool = False
    reached: set[str] = field(default_factory=set)

    def run(self, x: Any) -> _Pass:
        """Make one pass."""
        network, rows = self.network, row_count(x)
        inputs = batch_of(copied(x), network.copy)
        if isinstance(x, Items):
            self.structured |= _is_structured(inputs, rows)
            self.reads = True

        def passed() -> tuple[Any, Following, _Probing]:
            guard, now = Following(bare(network.model)), _Probing(rows, self.types)
            now.calls, now.following = WeightCalls(network.copy, now.meet, now.mark), guard
            with guard, network.passing(now), now.calls:
                return call(network.copy, inputs), guard, now

        output, guard, now = network.quietly(passed, gradients=True)
        self.random |= guard.random and self._varies(x, output)
        network.derives |= guard.derives
        self.reads |= guard.reads or guard.random or now.packed
        self.decides |= guard.decides
        self.sizes |= guard.sizes
        self.counts |= guard.counts
        self.reached |= now.ran
        for run in chain.from_iterable(now.runs.values()):
            run.value = run.value.detach()
        return _Pass(rows, [tensor.detach() for tensor in tensors(output)], now.runs, x)

    def _varies(self, x: Any, output: Any) -> bool:
        """Return True if the output changes with the random numbers; some models draw them in eval mode for nothing."""

        def again() -> Any:
            torch.rand(1)  # moves the generator on
            return self.network.output(copied(x))

        pairs = zip(tensors(output), tensors(self.network.quietly(again)), strict=False)
        return not all(torch.allclose(a, b) for a, b in pairs)

    def unreached(self) -> list[str]:
        """Return the parameters of weight layers that have not run in any pass."""
        layers = {name: layer for name, layer in self.network.layers.items() if isinstance(layer, SOURCES)}
        used = {id(weight) for name in self.reached & layers.keys() for weight in layers[name].parameters()}
        silent = [name for name in layers if name not in self.reached and _is_called(name, layers)]
        named = [(f"{name}.{own}", weight) for name in silent for own, weight in layers[name].named_parameters()]
        return [name for name, weight in named if id(weight) not in used]  # tied weights may have run elsewhere


def _is_called(name: str, layers: dict[str, nn.Module]) -> bool:
    """Return False for a part of another weight layer, which uses its weights without calling it."""
    return not any(name.startswith(f"{other}.") for other in layers if other != name)


def probe(network: Network, x: Any, types: tuple[type[nn.Module], ...] = LAYERS) -> Probed:
    """Run the network on a few rows of `x` and note the calls of layers of some types."""
    if row_count(x) == 0:
        raise DataError("expected example inputs with at least one row; found none. Pass a few rows.")
    least, most = row_limits(network.model)
    few, fixed = max(2, least), False
    network.route(name for name, layer in network.layers.items() if isinstance(layer, (*_MARKED, *types)))
    prober, turn = _Prober(network, types), None
    with torch.inference_mode(False):
        try:
            if most is not None and most <= few:
                first, second = _of_one_size(prober, distinct_rows(x, most))
            else:
                first = prober.run(distinct_rows(x, few + 1))
                second = prober.run(distinct_rows(x, few))
                turn = prober.run(reordered(distinct_rows(x, few + 1)))
        except LatedropError:
            raise
        except Exception:  # the model may insist on its batch size
            prober, fixed = _Prober(network, types), most is None or most > few
            with _what_it_raises(network.copy, x):
                first, second = _of_one_size(prober, x)
        passes = [made for made in (first, second) if made is not None]
        orders = (first.runs, turn.runs) if turn is not None else None
        found = Probed([made.runs for made in passes], second is not None, orders, fixed)
        _compare(prober, found, x, first, second, turn)
        if prober.reads and not found.together and most is None:
            with _what_it_raises(network.copy, x):
                _go_on(prober, found, x)
    found.branches, found.sizes, found.structured = prober.reads, prober.sizes, prober.structured
    found.random, found.counts = prober.random, prober.counts
    found.together |= prober.decides  # each draw may take another way
    return found


def _compare(prober: _Prober, found: Probed, x: Any, first: _Pass, second: _Pass | None, turn: _Pass | None) -> None:
    """Tell from the outputs of the passes whether rows affect each other."""
    if prober.random:
        warn(
            "the model draws random numbers by itself in eval mode (functional dropout left on, perhaps): "
            "its output varies without injection, and that variance is counted too.",
            LatedropWarning,
            stacklevel=4,
        )
        return
    if second is None:
        return
    if second.rows < first.rows:
        _check_rows(x, first, second)
        alike = _alike(first, second, slice(second.rows)) and (turn is None or _alike(first, turn, None))
    else:
        alike = _alike(first, second, slice(None), moved=1)
    if not alike:
        if not _alike(first, prober.run(first.x), slice(None)):
            raise SiteError(
                "expected a model whose output depends on its inputs alone; it gives another one for the same inputs, "
                "as it remembers earlier passes in an attribute. Reset that at the start of its forward."
            )
        found.together = True
        if isinstance(x, Items) and turn is not None:
            _check_order(first, turn)
        _warn_of_meeting()


def _go_on(prober: _Prober, found: Probed, x: Any) -> None:
    """Where values decide what runs, take more rows together, some alone, and others until every layer has run."""
    rows = min(row_count(x), _MOST_ROWS)
    some = take_rows(x, slice(0, _AT_ONCE))
    beside = prober.run(some)
    found.passes.append(beside.runs)
    with suppress(Exception):  # some models insist on an order
        found.orders = beside.runs, prober.run(reordered(some)).runs  # code that reads values may sort rows by them
    for start in sorted({i * (beside.rows - 1) // (_ALONE - 1) for i in range(_ALONE)}):
        with suppress(Exception):  # some models take no single row
            alone = prober.run(take_rows(x, slice(start, start + 1)))
            found.passes.append(alone.runs)
            if not prober.random and not _alike(beside, alone, slice(start, start + 1)) and not found.together:
                found.together = True
                _warn_of_meeting()
    stacks = any(run.weight is not None for made in found.passes for runs in made.values() for run in runs)
    for start in range(_AT_ONCE, rows, _AT_ONCE):
        if not stacks and not prober.unreached():  # how many experts are in one parameter cannot be told
            break
        found.passes.append(prober.run(take_rows(x, slice(start, start + _AT_ONCE))).runs)
    names = prober.unreached()
    if names:
        more = f" and {len(names) - _MOST_NAMES} others" if len(names) > _MOST_NAMES else ""
        warn(
            f"none of {rows} rows reached the parameters {names[:_MOST_NAMES]}{more}: there is no "
            "site in that branch, so what it does adds nothing to the variance. Find the sites on rows that take "
            "every branch, and pass sites=.",
            LatedropWarning,
            stacklevel=4,
        )


def _of_one_size(prober: _Prober, x: Any) -> tuple[_Pass, _Pass | None]:
    """Make a pass, and one with every row in the place of the next."""
    first, moved = prober.run(x), turned(x)
    if moved is None:
        return first, None
    with suppress(Exception):
        return first, prober.run(moved)
    return first, None


def _warn_of_meeting() -> None:
    warn(
        "expected examples that do not depend on each other; the output of a row changes with the rows beside "
        "it, as with batch statistics, the nodes of one graph or the steps of one sequence. Use "
        "method='sample', with all the rows that belong together in one batch, or give each graph one row; "
        "method='linear' is wrong here.",
        LatedropWarning,
        stacklevel=5,
    )


@contextmanager
def _what_it_raises(model: nn.Module, x: Any) -> Iterator[None]:
    """Turn what the model itself raises into an error of the inputs."""
    try:
        yield
    except (LatedropError, MemoryError):
        raise
    except Exception as error:
        check_dtypes(x, model, error)
        raise DataError(
            f"expected the model to run on the example inputs; it raised {type(error).__name__}: {error}. "
            "Pass inputs of the shapes and dtypes that the model takes."
        ) from error


def _pairs(first: _Pass, second: _Pass) -> list[tuple[Tensor, Tensor]]:
    """Return the outputs of two passes that have one entry per row."""
    both = zip(tensors(first.output), tensors(second.output), strict=False)
    return [
        (a, b)
        for a, b in both
        if a.shape[:1] == (first.rows,) and b.shape[:1] == (second.rows,) and a.shape[1:] == b.shape[1:]
        if a.is_floating_point() and a.numel()
    ]


def _alike(first: _Pass, second: _Pass, rows: slice | None, moved: int = 0) -> bool:
    """Return True if some rows of the first pass are those of the second; None for `rows`: in another order."""
    for a, b in _pairs(first, second):
        expected = a[reordering(len(a))] if rows is None else a.roll(moved, 0)[rows]
        rounding = 0.1 if a.dtype in (torch.float16, torch.bfloat16) else 1e-3
        if bool((expected - b).abs().max() > rounding * a.abs().max()):
            return False
    return True


def _check_rows(x: Any, first: _Pass, second: _Pass) -> None:
    """Raise where the number of rows that go in does not change anything of what comes out."""
    shapes = [[tuple(t.shape) for t in tensors(made.output) if t.is_floating_point()] for made in (first, second)]
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


def _check_order(first: _Pass, turn: _Pass) -> None:
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

    Attributes:
        asks: whether the model has asked for gradients of some tensor itself, as one that derives does of its inputs.
    """

    asks = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is set_grad:
            return None
        if getattr(func, "__name__", "") in ("requires_grad_", "__set__"):
            self.asks = True
        if func in (Tensor.detach, torch.detach) and args[0].requires_grad:
            return args[0].view_as(args[0])
        return super().__torch_function__(func, types, args, kwargs)


class _Probing(Pass):
    """A pass that notes the inputs of weight layers, and marks what comes out of them."""

    following: Following

    def __init__(self, rows: int, types: tuple[type[nn.Module], ...]) -> None:
        super().__init__()
        self.rows, self.runs, self.ran, self.packed = rows, dict[str, list[Run]](), set[str](), False
        self._types = types
        self._one = torch.ones((), requires_grad=True)

    def run(self, name: str, layer: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `Pass`."""
        inputs = list(layer_inputs(layer, args, kwargs).values())
        self.ran.add(name)
        if isinstance(layer, self._types) and inputs:
            packed = inputs[0] if isinstance(inputs[0], PackedSequence) else None
            self.packed |= packed is not None
            value = inputs[0] if packed is None else pad_packed_sequence(packed, batch_first=True)[0]
            steps = None if packed is None else len(packed.batch_sizes)
            channels = (channel_axis(layer),)
            self._note(name, type(layer).__name__, name, None, channels, inputs, value, steps)
        with self.calls.apart():
            output = forward(*args, **kwargs)
        return self.mark(output) if isinstance(layer, _MARKED) else output

    def meet(self, met: WeightCall) -> dict[Any, Any]:
        """Note a weight without a layer."""
        inputs = list(met.inputs.values())
        owner = met.weight.rpartition(".")[0]
        self._note(met.name, met.layer, owner, met.weight, met.channels, inputs, inputs[0], None)
        return {}

    def mark(self, output: Any) -> Any:
        """Return what came out of a weight layer, so that all that is computed from it requires grad."""
        return map_values(output, lambda t: t * self._one.to(t) if t.is_floating_point() else t)

    def _note(
        self,
        name: str,
        layer: str,
        owner: str,
        weight: str | None,
        channels: tuple[int, ...],
        inputs: list[Any],
        value: Tensor,
        steps: int | None,
    ) -> None:
        if torch.is_inference_mode_enabled():
            raise SiteError(
                f"expected layers that run outside of torch.inference_mode(); the model runs {name!r} inside, where "
                "nothing tells what depends on what. Use torch.no_grad() there."
            )
        given = chain.from_iterable([item.data] if isinstance(item, PackedSequence) else [item] for item in inputs)
        asking = [item for item in given if item.requires_grad]
        downstream = any(map(self._depends, asking)) if self.following.asks else bool(asking)
        run = Run(layer, owner, weight, channels, downstream, value.clone(), steps, self.rows)
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

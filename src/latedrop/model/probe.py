"""Probe passes: which weight layers run, on what, and whether another weight layer is upstream of them.

Two passes (two and three examples) run a twin of the model with each tensor that came out of a weight layer marked, and
all that is computed from it. A layer whose input carries the mark has a weight layer upstream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias
from warnings import warn

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from latedrop.errors import DataError, LatedropError, LatedropWarning
from latedrop.model.calling import call
from latedrop.model.layers import LAYERS, SOURCES, channel_axis, layer_inputs
from latedrop.model.rows import copied, map_rows, row_count, row_limits, tensors
from latedrop.model.running import Deriving, derives, quietly, rolls_dice
from latedrop.model.scripts import wrap_scripts
from latedrop.model.twin import release, reroute, twin_of
from latedrop.model.weight_calls import WeightCall, WeightCalls
from latedrop.model.weight_rules import Place
from latedrop.model.wrappers import named_layers
from latedrop.torch_inside import Operator, eager, inmost, watching

__all__ = ["Run", "probe_twice"]


@dataclass
class Run:
    """One call of one weight layer in a probe pass."""

    layer: str
    owner: str
    weight: str | None
    channels: tuple[int, ...]
    downstream: bool
    value: Tensor
    packed_steps: int | None
    rows: int


class _Marks:
    """What was computed from the outputs of weight layers, storage by storage."""

    def __init__(self) -> None:
        self._kept: dict[int, Any] = {}  # holding a storage keeps its address from being used again

    def add(self, value: Any) -> None:
        for tensor in tensors(value):
            inner = inmost(tensor)
            address = _address(inner)
            if address:
                self._kept[address] = inner.untyped_storage() if address > 0 else inner

    def on(self, value: Any) -> bool:
        return any(_address(inmost(tensor)) in self._kept for tensor in tensors(value))

    def seen(self, operator: Operator | None, args: Any, kwargs: Any, result: Any) -> None:
        """An operator has run: marks go from its arguments to its results."""
        if self.on(args) or self.on(kwargs):
            self.add(result)
            if operator is not None and operator.changes:
                self.add(args[:1])


def _address(tensor: Tensor) -> int:
    """Of a tensor's storage; below 0 one of the tensor itself, where torch keeps its numbers elsewhere (oneDNN)."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return -id(tensor)


_Runs: TypeAlias = "dict[str, list[Run]]"
_Outputs: TypeAlias = "list[tuple[int, Any, bool]]"


def probe_twice(model: nn.Module, x: Any) -> tuple[_Runs, _Runs, bool]:
    """The runs of two passes that differ in their number of rows, or where that is fixed in the order of these.

    The last tells whether the rows of a batch belong together: they act on each other, or their number is fixed.
    """
    if row_count(x) == 0:
        raise DataError("expected example inputs with at least one row; found none. Pass a few rows.")
    least, most = row_limits(model)
    few = max(2, least)
    outputs: _Outputs = []
    together = False
    try:
        if most is not None and most <= few:
            runs = _probe_turned(model, _distinct_rows(x, most), outputs)
        else:
            large = _probe(model, _distinct_rows(x, few + 1), outputs)
            runs = _probe(model, _distinct_rows(x, few), outputs), large
    except LatedropError:
        raise
    except Exception:  # the model may insist on its batch size
        outputs.clear()
        together = True
        try:
            runs = _probe_turned(model, x, outputs)
        except LatedropError:
            raise
        except Exception as error:
            raise DataError(
                f"expected the model to run on the example inputs; it raised {type(error).__name__}: {error}. "
                "Pass inputs of the shapes and dtypes that the model takes."
            ) from error
    if any(random for _, _, random in outputs):
        warn(
            "the model draws random numbers by itself in eval mode (functional dropout left on, perhaps): "
            "its output varies without injection, and that variance is counted too.",
            LatedropWarning,
            stacklevel=3,
        )
    elif len(outputs) == 2 and not (_rows_apart(*outputs) and _rows_may_turn(model, x, outputs[0])):
        together = True
        warn(
            "expected examples that do not depend on each other; the output of a row changes with the rows beside it, "
            "as with batch statistics or the nodes of one graph. Use method='sample', with all the rows that belong "
            "together in one batch, or give each graph one row; method='linear' is wrong here.",
            LatedropWarning,
            stacklevel=3,
        )
    return *runs, together


def _probe_turned(model: nn.Module, x: Any, outputs: _Outputs) -> tuple[_Runs, _Runs]:
    """A pass, and one with every row in the place of the next; none where all rows are equal, which tell nothing."""
    turned = map_rows(x, lambda t: t.roll(1, 0))
    first = _probe(model, x, outputs)
    if all(torch.equal(a, b) for a, b in zip(tensors(x), tensors(turned), strict=True)):
        return first, {}
    try:
        return first, _probe(model, turned, outputs)
    except Exception:
        return first, {}


def _rows_apart(first: tuple[int, Any, bool], second: tuple[int, Any, bool]) -> bool:
    """Whether rows came out alike in two passes: the second had fewer, or all of them moved on by one."""
    (more, outputs, _), (rows, others, _) = first, second
    for a, b in zip(tensors(outputs), tensors(others), strict=False):
        if a.shape[:1] != (more,) or b.shape[:1] != (rows,) or a.shape[1:] != b.shape[1:]:
            continue  # something else than one entry per row
        if a.is_floating_point() and a.numel() > 0:
            expected = a[:rows] if more > rows else a.roll(1, 0)
            rounding = 0.1 if a.dtype in (torch.float16, torch.bfloat16) else 1e-2
            if bool((expected - b).abs().max() > rounding * a.abs().max()):
                return False
    return True


def _rows_may_turn(model: nn.Module, x: Any, first: tuple[int, Any, bool]) -> bool:
    """Whether rows come out alike in another order: the first may act on the others."""
    rows, _, _ = first
    if rows == row_count(x) and all(torch.equal(t, t.roll(1, 0)) for t in tensors(x)):
        return True
    try:
        other = map_rows(_distinct_rows(x, rows), lambda t: t.roll(1, 0))
        turned = quietly(model, lambda: call(twin_of(model, own_gradients=derives(model)), copied(other)))
    except Exception:
        return True
    return _rows_apart(first, (rows, turned, False))


def _distinct_rows(x: Any, count: int) -> Any:
    """`count` rows of `x`; where it has fewer, they repeat at half the size to be told apart."""
    rows = row_count(x)
    index = [i % rows for i in range(count)]
    halvings = torch.tensor([0.5 ** (i // rows) for i in range(count)])

    def take(tensor: Tensor) -> Tensor:
        taken = tensor[index]
        if not tensor.is_floating_point() or rows >= count:
            return taken
        return taken * halvings.to(taken).reshape(-1, *[1] * (taken.dim() - 1))

    return map_rows(x, take)


def _probe(model: nn.Module, x: Any, outputs: _Outputs) -> _Runs:
    """The runs of one pass; its rows, what came out and whether that is random by itself go to `outputs`."""
    return quietly(model, lambda: _observed(model, x, outputs))


def _observed(model: nn.Module, x: Any, outputs: _Outputs) -> _Runs:
    twin, rows = twin_of(model, own_gradients=True), row_count(x)
    probe = _Probe(rows)
    wrap_scripts(twin, probe.script)
    calls = WeightCalls(twin, probe.meet, probe.marks.add)
    for name, module in named_layers(twin).items():
        if isinstance(module, SOURCES):
            reroute(module, partial(probe.around, name, module, calls))
    with eager():
        with watching(probe.marks.seen), calls, Deriving(model):
            calls.begin()
            try:
                output = call(twin, copied(x))
            finally:
                release(twin)
        outputs.append((rows, output, rolls_dice(model) and _varies(model, x, output)))
    return probe.runs


class _Probe:
    """What is noted in one pass."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.runs: _Runs = {}
        self.marks = _Marks()

    def around(
        self, name: str, module: nn.Module, calls: WeightCalls, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """A weight layer runs."""
        inputs = list(layer_inputs(module, args, kwargs).values())
        if isinstance(module, LAYERS) and inputs:
            packed = inputs[0] if isinstance(inputs[0], PackedSequence) else None
            value = packed.data if packed is not None else inputs[0]
            steps = len(packed.batch_sizes) if packed is not None else None
            upstream = any(self.marks.on(item) for item in inputs)
            layer, channels = type(module).__name__, (channel_axis(module),)
            self._note(name, Run(layer, name, None, channels, upstream, value, steps, self.rows))
        with calls.apart():
            output = forward(*args, **kwargs)
        self.marks.add(output)
        return output

    def script(self, script: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """A part in TorchScript runs, which holds weights."""
        output = script(*args, **kwargs)
        self.marks.add(output)
        return output

    def meet(self, found: WeightCall) -> dict[Place, Any]:
        """A weight without a layer is used."""
        inputs = list(found.inputs.values())
        owner, upstream = found.weight.rpartition(".")[0], any(self.marks.on(item) for item in inputs)
        run = Run(found.layer, owner, found.weight, found.channels, upstream, inputs[0], None, self.rows)
        self._note(found.name, run)
        return {}

    def _note(self, name: str, run: Run) -> None:
        run.value = run.value.detach().clone()
        self.runs.setdefault(name, []).append(run)


def _varies(model: nn.Module, x: Any, output: Any) -> bool:
    """Whether the output is another one with other random numbers: some models draw them in eval mode for nothing."""
    torch.rand(1)  # moves the generator on
    again = call(twin_of(model, own_gradients=derives(model)), copied(x))
    return not all(torch.equal(a, b) for a, b in zip(tensors(output), tensors(again), strict=False))

"""Probe passes: which weight layers run, on what, and whether another weight layer is upstream of them.

Two passes (two and three examples) run a twin of the model with each tensor that came out of a weight layer marked, and
all that is computed from it (`marks`). A layer whose input carries the mark has a weight layer upstream. Where values
decide what runs, and some parameter was not reached, passes over further rows follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias
from warnings import warn

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from latedrop.errors import DataError, LatedropError, LatedropWarning
from latedrop.model.arrays import check_dtypes
from latedrop.model.calling import call
from latedrop.model.items import Items, batch_of
from latedrop.model.layers import LAYERS, SOURCES, channel_axis, layer_inputs
from latedrop.model.marks import Following
from latedrop.model.rows import copied, distinct_rows, opposite, row_count, row_limits, take_rows, tensors, turned
from latedrop.model.running import Deriving, forget, may_derive, quietly, rolls_dice
from latedrop.model.scripts import wrap_scripts
from latedrop.model.storages import is_covered
from latedrop.model.twin import release, reroute, twin_of
from latedrop.model.weight_calls import WeightCall, WeightCalls
from latedrop.model.weight_rules import Place
from latedrop.model.wrappers import named_layers, plain_names
from latedrop.torch_inside import eager, watching

__all__ = ["Probed", "Run", "Runs", "probe"]


Runs: TypeAlias = "dict[str, list[Run]]"
"""The calls of each weight layer in one pass."""
_ALONE, _AT_ONCE, _MOST_ROWS = 8, 16, 1024  # rows that further passes run on
_MOST_NAMES = 10


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
    picked: bool
    rows: int


@dataclass
class Probed:
    """What the passes over some rows told.

    Attributes:
        first: the runs of the first pass.
        second: those of another pass, over another number of rows or in another order; None where there is none.
        further: those of passes over further rows.
        orders: those of a pass over some rows, and of one over the same in the opposite order, where rows may move.
        together: whether the rows of a batch belong together: they act on each other, or their number is fixed.
        branches: whether values decide what runs, or on how much.
        counts: whether whole numbers of the inputs were read: they may be sizes.
        structured: whether a batch of items holds tensors that have not one entry for each of them.
        random: whether the model draws random numbers by itself.
    """

    first: Runs
    second: Runs | None
    further: list[Runs] = field(default_factory=list)
    orders: tuple[Runs, Runs] | None = None
    together: bool = False
    branches: bool = False
    counts: bool = False
    structured: bool = False
    random: bool = False


def probe(model: nn.Module, x: Any, layers: tuple[type[nn.Module], ...] = LAYERS) -> Probed:
    """Two passes that differ in their number of rows, or where that is fixed in the order of these; more if needed.

    The calls of `layers` are noted.
    """
    if row_count(x) == 0:
        raise DataError("expected example inputs with at least one row; found none. Pass a few rows.")
    least, most = row_limits(model)
    few = max(2, least)
    forget(model)  # it may have been changed since its first pass
    probing = _Probing(model, layers)
    try:
        if most is not None and most <= few:
            found = probing.of_one_size(distinct_rows(x, most))
        else:
            large = probing.runs(distinct_rows(x, few + 1))
            found = Probed(probing.runs(distinct_rows(x, few)), large)
    except LatedropError:
        raise
    except Exception:  # the model may insist on its batch size
        probing = _Probing(model, layers)
        with _what_it_raises(model, x):
            found = probing.of_one_size(x)
        found.together = True
    outputs = probing.outputs
    if any(random for _, _, random in outputs):
        warn(
            "the model draws random numbers by itself in eval mode (functional dropout left on, perhaps): "
            "its output varies without injection, and that variance is counted too.",
            LatedropWarning,
            stacklevel=3,
        )
    elif len(outputs) == 2:
        _check_rows(x, *outputs)
        if not (_rows_apart(outputs[0], outputs[1]) and _rows_may_turn(model, x, outputs[0])):
            found.together = True
            _check_order(model, x, outputs[0])
            _warn_of_meeting()
    if not found.together and most is None:
        with _what_it_raises(model, x):
            probing.go_on(x, found)
        if found.together:
            _warn_of_meeting()
    probing.warn_of_unreached(row_count(x))
    found.branches, found.structured, found.counts = probing.branches, probing.structured, probing.counts
    found.random = rolls_dice(model)
    found.together |= probing.drawn_branches  # each draw may take another way
    return found


def _warn_of_meeting() -> None:
    warn(
        "expected examples that do not depend on each other; the output of a row changes with the rows beside "
        "it, as with batch statistics, the nodes of one graph or the steps of one sequence. Use "
        "method='sample', with all the rows that belong together in one batch, or give each graph one row; "
        "method='linear' is wrong here.",
        LatedropWarning,
        stacklevel=4,
    )


class _Probing:
    """Passes over some rows of a model's inputs, and what all of them told."""

    def __init__(self, model: nn.Module, layers: tuple[type[nn.Module], ...]) -> None:
        self.model = model
        self._layers = layers
        self.outputs: list[tuple[int, Any, bool]] = []
        self.branches, self.drawn_branches, self.moves, self.structured = False, False, False, False
        self.counts = False
        self._reached: set[tuple[int, int, int]] = set()
        self._tried = 0

    def of_one_size(self, x: Any) -> Probed:
        """A pass, and one with every row in the place of the next."""
        first, moved = self.runs(x), turned(x)
        if moved is None:
            return Probed(first, None)
        try:
            return Probed(first, self.runs(moved))
        except Exception:
            return Probed(first, None)

    def go_on(self, x: Any, found: Probed) -> None:
        """Where values decide what runs, or where rows go, take single rows; then others, to reach every parameter."""
        rows = min(row_count(x), _MOST_ROWS)
        if not self.moves and not self.branches:
            return
        some = distinct_rows(x, max(3, min(rows, _AT_ONCE)))
        found.orders = self.runs(some), self.runs(opposite(some))  # code that reads values may sort by them
        beside = self.outputs[-2]
        for start in range(min(rows, _ALONE)):
            with suppress(Exception):  # some models take no single row
                found.further.append(self.runs(take_rows(x, slice(start, start + 1))))
                random = any(random for _, _, random in self.outputs)
                found.together |= not random and not _rows_apart(beside, self.outputs[-1], start)
        for start in range(0, rows, _AT_ONCE):
            if not self.branches or not self._unreached():
                return
            found.further.append(self.runs(take_rows(x, slice(start, start + _AT_ONCE))))

    def warn_of_unreached(self, rows: int) -> None:
        """Values decide what runs, and nothing of some parameters did."""
        names = self._unreached() if self.branches else []
        if names:
            more = f" and {len(names) - _MOST_NAMES} others" if len(names) > _MOST_NAMES else ""
            warn(
                f"none of {min(rows, _MOST_ROWS)} rows reached the parameters {names[:_MOST_NAMES]}{more}: there is no "
                "site in that branch, so what it does adds nothing to the variance. Find the sites on rows that take "
                "every branch, and pass sites=.",
                LatedropWarning,
                stacklevel=4,
            )

    def _unreached(self) -> list[str]:
        plain = plain_names(self.model)
        parameters = ((plain(name), parameter) for name, parameter in self.model.named_parameters())
        return [name for name, p in parameters if p.numel() and not is_covered(p, self._reached)]

    def runs(self, x: Any) -> Runs:
        """The runs of one pass; its rows, what came out and whether that is random by itself go to `outputs`."""
        return quietly(self.model, lambda: self._observed(x))

    def _observed(self, x: Any) -> Runs:
        twin, rows = twin_of(self.model, own_gradients=True), row_count(x)
        inputs = batch_of(copied(x), twin)
        following = Following(inputs, twin.parameters())
        seen = _Pass(rows, following, self._layers)
        if isinstance(x, Items):
            self.structured |= seen.begin_with(inputs)
        wrap_scripts(twin, seen.script)
        calls = WeightCalls(twin, seen.meet, following.drawn.add)
        for name, module in named_layers(twin).items():
            if isinstance(module, (*SOURCES, *self._layers)):
                reroute(module, partial(seen.around, name, module, calls))
        with eager():
            with watching(following.seen), following, calls, Deriving(self.model):
                calls.begin()
                try:
                    output = call(twin, inputs)
                finally:
                    release(twin)
            self.outputs.append((rows, output, rolls_dice(self.model) and _varies(self.model, x, output)))
        self.branches |= following.branches
        self.counts |= following.counts
        self.drawn_branches |= following.drawn_branches
        self.moves |= following.moves
        self._reached |= following.reached
        return seen.runs


@contextmanager
def _what_it_raises(model: nn.Module, x: Any) -> Iterator[None]:
    """What the model itself raises is an error of the inputs."""
    try:
        yield
    except LatedropError:
        raise
    except Exception as error:
        check_dtypes(x, model, error)
        raise DataError(
            f"expected the model to run on the example inputs; it raised {type(error).__name__}: {error}. "
            "Pass inputs of the shapes and dtypes that the model takes."
        ) from error


def _check_rows(x: Any, first: tuple[int, Any, bool], second: tuple[int, Any, bool]) -> None:
    """Raise where the number of rows that go in does not change anything of what comes out."""
    (more, outputs, _), (rows, others, _) = first, second
    shapes = [[tuple(t.shape) for t in tensors(output) if t.is_floating_point()] for output in (outputs, others)]
    if more == rows or shapes[0] != shapes[1] or not any(shape[:1] > (1,) for shape in shapes[0]):
        return
    if isinstance(x, Items):
        raise DataError(
            f"expected collate= to make a batch with one output for each item; found outputs of shapes {shapes[0]} for "
            f"{more} items and for {rows} alike. It must use all items of the list that it is given."
        )
    raise DataError(
        f"expected inputs and outputs whose first axis counts the examples; found outputs of shapes {shapes[0]} for "
        f"{more} rows and for {rows} alike: the first axis of the inputs counts something else, such as the steps of "
        "sequences. Pass inputs with the examples along the first axis; a module that transposes them can stand "
        "before the model."
    )


def _rows_apart(first: tuple[int, Any, bool], second: tuple[int, Any, bool], start: int = 0) -> bool:
    """Whether rows came out alike in two passes: the second had fewer, from `start` on, or all moved on by one."""
    (more, outputs, _), (rows, others, _) = first, second
    for a, b in zip(tensors(outputs), tensors(others), strict=False):
        if a.shape[:1] != (more,) or b.shape[:1] != (rows,) or a.shape[1:] != b.shape[1:]:
            continue  # something else than one entry per row
        if a.is_floating_point() and a.numel() > 0:
            expected = a[start : start + rows] if more > rows else a.roll(1, 0)
            rounding = 0.1 if a.dtype in (torch.float16, torch.bfloat16) else 1e-3
            if bool((expected - b).abs().max() > rounding * a.abs().max()):
                return False
    return True


def _rows_may_turn(model: nn.Module, x: Any, first: tuple[int, Any, bool]) -> bool:
    """Whether rows come out alike in another order: the first may act on the others."""
    rows, _, _ = first
    moved = turned(distinct_rows(x, rows))
    if moved is None:
        return True
    try:
        output = quietly(model, lambda: call(twin_of(model, own_gradients=may_derive(model)), copied(moved)))
    except Exception:
        return True
    return _rows_apart(first, (rows, output, False))


class _Pass:
    """What is noted in one pass."""

    def __init__(self, rows: int, following: Following, layers: tuple[type[nn.Module], ...]) -> None:
        self.rows = rows
        self._layers = layers
        self.runs: Runs = {}
        self._following = following
        self._all_picked = False

    def begin_with(self, batch: Any) -> bool:
        """A batch of items: what has not one entry for each of them is picked; so is all, where nothing can be seen.

        Tells whether something is, but for packed sequences of all items.
        """
        parts = list(batch) if type(batch) in (tuple, list) else [batch]
        packed = [part for part in parts if isinstance(part, PackedSequence) and int(part.batch_sizes[0]) == self.rows]
        found = tensors([part for part in parts if not any(part is one for one in packed)])
        others = [tensor for tensor in found if tensor.shape[:1] != (self.rows,)]
        self._all_picked = not found and not packed
        self._following.branches = True
        self._following.picked.add([others, [one.data for one in packed]])
        return bool(others) or self._all_picked

    def around(
        self, name: str, module: nn.Module, calls: WeightCalls, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """A weight layer runs."""
        inputs = list(layer_inputs(module, args, kwargs).values())
        packed = inputs[0] if inputs and isinstance(inputs[0], PackedSequence) else None
        picked = self._picked(inputs if packed is None else packed.batch_sizes)
        if isinstance(module, self._layers) and inputs:
            value = inputs[0] if packed is None else pad_packed_sequence(packed, batch_first=True)[0]
            steps = len(packed.batch_sizes) if packed is not None else None
            upstream = any(self._following.drawn.on(item) for item in inputs)
            layer, channels = type(module).__name__, (channel_axis(module),)
            self._note(name, Run(layer, name, None, channels, upstream, value, steps, picked, self.rows))
        with calls.apart():
            output = forward(*args, **kwargs)
        if isinstance(module, SOURCES):
            self._following.drawn.add(output)
        if packed is not None and not picked:
            self._following.picked.drop(output[1])  # the last states, one for each row
        return output

    def script(self, script: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """A part in TorchScript runs, which holds weights."""
        output = script(*args, **kwargs)
        self._following.drawn.add(output)
        return output

    def meet(self, found: WeightCall) -> dict[Place, Any]:
        """A weight without a layer is used."""
        inputs = list(found.inputs.values())
        owner, upstream = found.weight.rpartition(".")[0], any(self._following.drawn.on(item) for item in inputs)
        picked = self._picked(inputs)
        run = Run(found.layer, owner, found.weight, found.channels, upstream, inputs[0], None, picked, self.rows)
        self._note(found.name, run)
        return {}

    def _picked(self, inputs: Any) -> bool:
        return self._all_picked or self._following.picked.on(inputs)

    def _note(self, name: str, run: Run) -> None:
        run.value = run.value.detach().clone()
        self.runs.setdefault(name, []).append(run)


def _check_order(model: nn.Module, x: Any, first: tuple[int, Any, bool]) -> None:
    """Raise where the rows of items come out the same, whatever the order in which they go in."""
    rows, outputs, _ = first
    moved = turned(distinct_rows(x, rows)) if isinstance(x, Items) else None
    if moved is None:
        return
    others = quietly(model, lambda: call(twin_of(model, own_gradients=may_derive(model)), copied(moved)))
    pairs = [(a, b) for a, b in zip(tensors(outputs), tensors(others), strict=True) if a.shape[:1] == (rows,)]
    if pairs and all(torch.allclose(a.float().sort(0)[0], b.float().sort(0)[0], rtol=1e-3) for a, b in pairs):
        raise DataError(
            "expected collate= to keep the order of the items; found outputs that come in another one, as where it "
            "sorts them by length. Sort inside of the model, and undo it there."
        )


def _varies(model: nn.Module, x: Any, output: Any) -> bool:
    """Whether the output is another one with other random numbers: some models draw them in eval mode for nothing."""
    torch.rand(1)  # moves the generator on
    again = call(twin_of(model, own_gradients=may_derive(model)), copied(x))
    return not all(torch.equal(a, b) for a, b in zip(tensors(output), tensors(again), strict=False))

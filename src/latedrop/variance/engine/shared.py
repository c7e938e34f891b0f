"""What all draws share runs once: layers before the first site, on N rows instead of T times N.

A `Repeated` is a tensor of `T · N` rows that are T times the same N, of which only these are held. Layers of torch that
get one run on the N rows and give one; a site multiplies the N rows by its T masks. Whoever else looks at it gets all
rows, as they would be without any of this. What such a layer gave is remembered by where it came from, so that later
chunks of draws, at any rate, do not run it again; of a chain of layers only what somebody read is held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from latedrop.masking.draws import split
from latedrop.model.by_model import ByModel
from latedrop.model.rows import map_rows, row_count, tensors
from latedrop.model.storages import storage_of
from latedrop.model.twin import reroute
from latedrop.model.wrappers import layer_named
from latedrop.torch_inside import is_torchs_own, is_wrapped

__all__ = ["Repeated", "SharedLayers", "by_draw", "worth_sharing"]


@dataclass(eq=False)
class _Source:
    """Where the N rows of a value come from: the inputs, or a layer and what it was given."""

    like: Tensor
    count: int
    layers: SharedLayers
    make: Callable[[], Tensor]
    held: Tensor | None = None
    seen: ReferenceType[Tensor] | None = None

    def rows(self, *, hold: bool) -> Tensor:
        """The N rows; with `hold`, they are kept for later passes."""
        found = self.held if self.held is not None else self.seen() if self.seen is not None else None
        if found is None:
            found = self.make()
            self.seen = ref(found)
        if hold:
            self.held = found
        return found


class Repeated(Tensor):
    """`times · N` rows, of which N are held; all of them exist once somebody has looked."""

    source: _Source
    times: int
    held: Tensor | None
    whole: Tensor | None

    @classmethod
    def of(cls, source: _Source, times: int, held: Tensor | None = None) -> Repeated:
        """Stands for `times` times the rows of a source."""
        found = source.like.expand(times * source.count, *source.like.shape[1:]).as_subclass(cls)
        found.source, found.times, found.held, found.whole = source, times, held, None
        return found

    def rows(self) -> Tensor | None:
        """The N rows; None where all exist, and may have been changed."""
        return None if self.whole is not None else self.source.rows(hold=True)

    def all_rows(self) -> Tensor:
        """All `times · N` rows."""
        if self.whole is None:
            rows = self.source.rows(hold=True)
            self.whole = torch.cat([rows] * self.times)
            self.held = None
        return self.whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer what is known without the values; for all else, all rows are there."""
        if func in _ASKS:
            return super().__torch_function__(func, types, args, kwargs or {})
        values = [value for value in args if type(value) is Repeated] if func in _ROW_BY_ROW else []
        if len(values) == 1 and values[0].whole is None:
            others = tuple(None if value is values[0] else value for value in args)
            named = tuple((kwargs or {}).items())
            numbers = all(type(item) in _NUMBERS for item in (*others, *(kwargs or {}).values()))
            if numbers and ("inplace", True) not in named:
                how = partial(_called, func, others, dict(named))
                return values[0].source.layers.given((func, others, named), how, values[0])
        return func(*_whole(args), **_whole(kwargs or {}))


def by_draw(value: Tensor, axis: int, times: int) -> Tensor:
    """A value with an axis of draws before that of the examples; what all draws share is not copied."""
    rows = value.rows() if isinstance(value, Repeated) and axis == 0 else None
    return split(value, axis, times) if rows is None else rows.expand(times, *rows.shape)


_ASKS = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "layout", "is_nested")),
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "is_floating_point", "is_complex", "__len__")),
    Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    torch.is_floating_point,
    torch.numel,
}


_NUMBERS = (int, float, bool, type(None))
_NAMES = "relu tanh sigmoid exp abs square sqrt neg add sub mul div pow"
_ROW_BY_ROW = {
    *(getattr(place, name) for name in _NAMES.split() for place in (Tensor, torch)),
    *(getattr(torch.nn.functional, name) for name in ("relu", "gelu", "silu", "elu", "leaky_relu", "softplus")),
    Tensor.__rsub__,
    Tensor.float,
}
"""Functions that act on each row of a tensor alone, where they are given nothing else but numbers."""


def _called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Tensor) -> Any:
    return func(*(rows if value is None else value for value in args), **kwargs)


def _whole(value: Any) -> Any:
    """All rows in the place of what stands for them."""
    if isinstance(value, Repeated):
        return value.all_rows()
    if type(value) in (list, tuple):
        return type(value)(_whole(item) for item in value)
    return {key: _whole(item) for key, item in value.items()} if type(value) is dict else value


_MET: ByModel[set[str]] = ByModel()
"""The names of a model's layers that were ever given what all draws share."""
_FEW = {"cpu": 2**13}  # numbers in all draws' inputs, below which it takes longer to keep track than to compute
_FEW_ELSEWHERE = 2**18  # the same on devices that compute more in the time that Python needs


def worth_sharing(x: Any, draws: int, passes: int) -> bool:
    """Whether layers before the first site take long enough."""
    if passes > 1:
        return True
    found = tensors(x)
    few = _FEW.get(found[0].device.type, _FEW_ELSEWHERE)
    return draws * sum(value.numel() for value in found) > few


class SharedLayers:
    """The layers of a twin that run on N rows where all draws share their input.

    Args:
        model: the user's, whose twins run.
    """

    def __init__(self, model: nn.Module) -> None:
        self._sources: dict[Any, _Source] = {}
        self._states: dict[Any, Any] = {}
        self._calls: Counter[str] = Counter()
        self._met = _MET.setdefault(model, set())

    def attach(self, twin: nn.Module) -> None:
        """Reroute the layers of a twin. Where an earlier one ran, those that got such inputs in it are enough."""
        known = {name: layer_named(twin, name) for name in tuple(self._met)} or dict(twin.named_modules())
        for name, layer in known.items():
            if layer is not None and _takes_rows(layer):
                around = self._recurrent if isinstance(layer, nn.RNNBase) else self._around
                reroute(layer, partial(around, name, layer), copies=False)

    def forget(self) -> None:
        """Let go of all rows."""
        self._sources.clear()
        self._states.clear()

    def inputs(self, x: Any, times: int) -> Any:
        """Inputs of one pass that stand for `times` times the rows of `x`."""
        rows = row_count(x)
        self._calls.clear()

        def stand_in(value: Tensor) -> Tensor:
            # Who reads past a stand-in finds NaN there; whole numbers have none, and would not be found out.
            if type(value) is not Tensor or value.layout is not torch.strided or not value.is_floating_point():
                return torch.cat([value] * times)
            source = self._sources.get(id(value))
            if source is None:
                source = self._sources[id(value)] = _Source(_like(value), rows, self, lambda: value, value)
            return Repeated.of(source, times)

        return map_rows(x, stand_in)

    def given(self, what: Any, function: Callable[[Tensor], Tensor], value: Repeated, *, inside: bool = False) -> Any:
        """What a function of rows makes of a value; `inside`: it changes the value itself, and gives it back."""
        source, held = self._source(what, function, value.source)
        if source is None:
            return function(value.all_rows())
        if source is value.source:
            return value
        if not inside:
            return Repeated.of(source, value.times, held)
        value.source, value.held = source, held
        return value

    def _around(self, name: str, layer: Any, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Any:
        value = args[0] if len(args) == 1 and not kwargs else None
        if type(value) is not Repeated or value.whole is not None:
            return forward(*args, **kwargs)
        inside = getattr(layer, "inplace", False)
        return self.given(
            self._call(name), partial(_out_of_place, layer, forward) if inside else forward, value, inside=inside
        )

    def _recurrent(self, name: str, layer: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A recurrent layer gives rows along the first axis, and states that have them along the second."""
        value = args[0] if len(args) == 1 and not kwargs and layer.batch_first else None
        if type(value) is not Repeated or value.whole is not None or value.dim() != 3:
            return forward(*args, **kwargs)
        call = self._call(name)
        key = call, id(value.source)

        def steps(rows: Tensor) -> Tensor:
            found, self._states[key] = forward(rows)
            return found  # type: ignore[no-any-return]

        found, times = self.given(call, steps, value), value.times
        state = self._states[key]
        states = state if isinstance(state, tuple) else (state,)
        each = tuple(one.unsqueeze(1).expand(-1, times, -1, -1).flatten(1, 2) for one in states)
        return found, each if isinstance(state, tuple) else each[0]

    def _call(self, name: str) -> tuple[str, int]:
        """A layer, and the how manieth of its calls in this pass: its code may change it in between."""
        self._met.add(name)
        self._calls[name] += 1
        return name, self._calls[name]

    def _source(
        self, what: Any, function: Callable[[Tensor], Tensor], before: _Source
    ) -> tuple[_Source | None, Tensor | None]:
        """Where the result comes from, and its rows where they were just made; None where rows do not come out."""
        key = what, id(before)
        source = self._sources.get(key)
        if source is not None:
            return source, None
        rows = before.rows(hold=False)
        found = function(rows)
        if found is rows:
            return before, None
        if type(found) is not Tensor or found.shape[:1] != rows.shape[:1] or _is_view(found, rows):
            return None, None
        source = _Source(_like(found), len(found), self, lambda: function(before.rows(hold=False)), seen=ref(found))
        self._sources[key] = source
        return source, found


def _takes_rows(layer: nn.Module) -> bool:
    """Whether a layer is one of torch's own that gives one row for each row it takes, and does nothing else."""
    single = is_torchs_own(layer) and not any(True for _ in layer.children())
    return single and not isinstance(layer, (nn.RNNCellBase, nn.Bilinear)) and "forward" not in vars(layer)


def _out_of_place(layer: Any, forward: Callable[..., Tensor], rows: Tensor) -> Tensor:
    layer.inplace = False
    try:
        return forward(rows)
    finally:
        layer.inplace = True


def _like(value: Tensor) -> Tensor:
    """A row of the same shape: NaN, so that whoever reads it past `Repeated` is found out."""
    kind = value.dtype, value.device, torch.is_inference_mode_enabled()
    found = _FILLERS.get(kind)
    if found is None:
        found = torch.full((), torch.nan if value.is_floating_point() else 0, dtype=value.dtype, device=value.device)
        if type(found) is Tensor and not is_wrapped(found):
            _FILLERS[kind] = found
    return found.expand(1, *value.shape[1:])


_FILLERS: dict[Any, Tensor] = {}


def _is_view(found: Tensor, rows: Tensor) -> bool:
    """Whether both lie in one storage; while a model is traced there is none, and nothing to be changed through it."""
    storage = storage_of(found)
    return storage is not None and storage == storage_of(rows)

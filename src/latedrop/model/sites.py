"""Where dropout goes: before every weight layer that has another weight layer upstream.

*Upstream* is judged by data flow. Two probe passes (two and three examples) run the model with each
tensor that came out of a weight layer marked, and all that is computed from it; a layer whose input
carries the mark is a site. The first layer of every branch stays clean, however many branches there
are. Comparing the two passes also tells which axis of a layer's input counts the examples, so that
one mask can serve them all. A weight layer is a module, or a call of a torch function with a weight
(`functional`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import partial
from math import prod
from numbers import Real
from typing import Any, Literal, TypeAlias
from warnings import warn

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from latedrop.errors import ArgumentError, DataError, LatedropError, LatedropWarning, SiteError
from latedrop.model.forward import bare, call, map_rows, named_layers, row_count, row_limits, tensors, undisturbed
from latedrop.model.weight_calls import Place, WeightCall, WeightCalls, weight_names

__all__ = [
    "Kind",
    "Rate",
    "Select",
    "Site",
    "Sites",
    "apart",
    "channel_axis",
    "find_sites",
    "layer_inputs",
    "missing_sites",
    "odds_by_site",
    "rates_by_site",
]

Kind: TypeAlias = Literal["element", "channel"]
Rate: TypeAlias = "float | Mapping[str, float]"
Select: TypeAlias = (
    "str | type[nn.Module] | Callable[[str, nn.Module], bool] | "
    "Sequence[str | type[nn.Module] | Callable[[str, nn.Module], bool]] | None"
)

_CONVOLUTIONS: dict[type[nn.Module], int] = {
    nn.Conv1d: 1,
    nn.ConvTranspose1d: 1,
    nn.Conv2d: 2,
    nn.ConvTranspose2d: 2,
    nn.Conv3d: 3,
    nn.ConvTranspose3d: 3,
}
_LAYERS: tuple[type[nn.Module], ...] = (
    nn.Linear,
    nn.Bilinear,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
    *_CONVOLUTIONS,
)
_SOURCES: tuple[type[nn.Module], ...] = (*_LAYERS, nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True)
class Site:
    """A place where dropout goes: the input of one weight layer.

    Attributes:
        name: the layer's name in `model.named_modules()`, less what wrappers add; for a weight without a layer the
            parameter's name, and where in it the weight starts (`"stack[3]"`).
        kind: `"element"` masks every unit by itself, `"channel"` whole channels (features).
        layer: the layer's type, or the torch function that takes the weight.
        units: shape of the mask for one example, at the probe's input size.
        calls: how often the layer runs in one forward pass.
        batch_axis: the axis of the layer's input that counts the examples; None where none does.
        interleaved: True where examples that were folded into another axis alternate in it.
        weight: the parameter's name, for a weight without a layer; None where the site is a module.
    """

    name: str
    kind: Kind
    layer: str
    units: tuple[int, ...]
    calls: int = 1
    batch_axis: int | None = 0
    interleaved: bool = False
    weight: str | None = None

    @property
    def count(self) -> int:
        """Number of units that one mask covers."""
        return prod(self.units)

    def place(self, unit: int) -> tuple[int, ...]:
        """The position of a unit, counted flat, in the mask; led by the call where the layer runs several times."""
        call, unit = divmod(unit, self.count)
        places: list[int] = []
        for size in reversed(self.units):
            unit, index = divmod(unit, size)
            places.insert(0, index)
        return (call, *places) if self.calls > 1 and self.kind == "element" else tuple(places)


class Sites(tuple[Site, ...]):
    """Sites in execution order; prints as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        rows = [("site", "layer", "masks", "units", "calls")]
        rows += [(s.name, s.layer, s.kind, f"{s.count} = " + " x ".join(map(str, s.units)), str(s.calls)) for s in self]
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)

    __repr__ = __str__

    def to_list(self) -> list[dict[str, Any]]:
        """Plain data for JSON."""
        rows = [asdict(site) for site in self]
        return [{key: value for key, value in row.items() if key != "weight" or value is not None} for row in rows]

    @classmethod
    def from_list(cls, rows: list[dict[str, Any]]) -> Sites:
        """The inverse of `to_list`."""
        return cls(Site(**{**row, "units": tuple(row["units"])}) for row in rows)


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
    _check_scripts(model)
    small, large = _probe_twice(model, x)
    modules = named_layers(model)
    owners = {name: modules.get(runs[0].owner, model) for name, runs in small.items()}
    downstream = [name for name, runs in small.items() if any(run.downstream for run in runs)]
    chosen = [name for name in downstream if _selected(select, name, owners[name])]
    if not chosen:
        raise SiteError(_no_site_message(select, downstream, [name for name in small if name not in downstream]))
    return Sites(_site(name, kind, small[name], large.get(name, []) if large else None) for name in chosen)


def missing_sites(
    model: nn.Module,
    sites: Sequence[Site],
    *,
    same_type: bool = False,
    modules: Mapping[str, nn.Module] | None = None,
) -> list[str]:
    """The names of the sites whose layer or weight the model lacks; with `same_type`, or has as another type.

    `modules` are the model's `named_layers`, where they are known.
    """
    modules = named_layers(model) if modules is None else modules
    weights = weight_names(model) if any(site.weight is not None for site in sites) else set()
    found = {s.name: s.weight in weights if s.weight is not None else s.name in modules for s in sites}
    if same_type:
        found.update({s.name: type(modules.get(s.name)).__name__ == s.layer for s in sites if s.weight is None})
    return [name for name, there in found.items() if not there]


def rates_by_site(sites: Sequence[Site], rate: Rate) -> dict[str, float]:
    """The rate of each site, by name.

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
    return {name: rate[name] if name in rate else _by_pattern(name, rate) for name in names}


def odds_by_site(sites: Sequence[Site], rate: Rate) -> Tensor:
    """`rate / (1 - rate)` of every site, `(sites,)` in float64: the variance of a mask of mean 1."""
    rates = rates_by_site(sites, rate).values()
    return torch.tensor([value / (1 - value) for value in rates], dtype=torch.float64)


def layer_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int | str, Any]:
    """The arguments of a weight layer that dropout acts on, by position or keyword."""
    if isinstance(module, nn.MultiheadAttention):
        names: tuple[str, ...] = ("query", "key", "value")
    elif isinstance(module, nn.Bilinear):
        names = ("input1", "input2")
    else:
        names = ("input",)
    found: dict[int | str, Any] = dict(enumerate(args[: len(names)]))
    found.update({name: kwargs[name] for name in names if name in kwargs})
    return {key: value for key, value in found.items() if _maskable(value)}


def apart(model: nn.Module, calls: WeightCalls) -> list[RemovableHandle]:
    """Hooks that tell `calls` while a weight layer runs: its own calls are none, as it has a site of its own."""

    def enter(_: nn.Module, args: Any) -> None:
        calls.inside += 1

    def leave(_: nn.Module, args: Any, output: Any) -> None:
        calls.inside -= 1

    handles: list[RemovableHandle] = []
    for module in model.modules():
        if isinstance(module, _SOURCES):
            handles.append(module.register_forward_pre_hook(enter, prepend=True))
            handles.append(module.register_forward_hook(leave, always_call=True))
    return handles


def channel_axis(module: nn.Module) -> int:
    """The axis of a layer's input, from the end, along which its features lie."""
    return next((-1 - spatial for layer, spatial in _CONVOLUTIONS.items() if isinstance(module, layer)), -1)


@dataclass
class _Run:
    """One call of one weight layer in a probe pass."""

    layer: str
    owner: str
    weight: str | None
    channels: tuple[int, ...]
    downstream: bool
    value: Tensor
    packed_steps: int | None
    rows: int


class _Marks(TorchDispatchMode):
    """Follows what is computed from the outputs of weight layers, storage by storage."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[int, Any] = {}  # holding a storage keeps its address from being used again

    def add(self, value: Any) -> None:
        for tensor in tensors(value):
            storage = _inmost(tensor).untyped_storage()
            self._kept[storage._cdata] = storage

    def on(self, value: Any) -> bool:
        return any(_inmost(tensor).untyped_storage()._cdata in self._kept for tensor in tensors(value))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.on(args) or self.on(kwargs):
            self.add(result)
            if func._schema.is_mutable:
                self.add(args[:1])
        return result


def _inmost(tensor: Tensor) -> Tensor:
    """What has a storage: the inside of wrappers, where a model uses `torch.func`, and values of sparse tensors."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    return tensor if tensor.layout is torch.strided else tensor.values()


_Runs: TypeAlias = "dict[str, list[_Run]]"
_Outputs: TypeAlias = "list[tuple[int, Any, bool]]"


def _check_scripts(model: nn.Module) -> None:
    """TorchScript runs outside Python, where no call can be seen."""
    if isinstance(model, torch.jit.ScriptModule):
        raise SiteError(
            "expected a model whose layers run in Python; found TorchScript, inside which nothing can be dropped. Use "
            "the Python model, or export it with torch.export and pass latedrop.load_program(path)."
        )
    scripts = [name for name, module in named_layers(model).items() if isinstance(module, torch.jit.ScriptModule)]
    outer = [name for name in scripts if not any(name.startswith(f"{other}.") for other in scripts)]
    if outer:
        warn(
            f"{outer} are TorchScript: no dropout goes inside them, only after them. Use the Python modules to reach "
            "their layers.",
            LatedropWarning,
            stacklevel=3,
        )


def _probe_twice(model: nn.Module, x: Any) -> tuple[_Runs, _Runs]:
    """The runs of two passes that differ in their number of rows, or where that is fixed in the order of these."""
    if row_count(x) == 0:
        raise DataError("expected example inputs with at least one row; found none. Pass a few rows.")
    least, most = row_limits(model)
    few = max(2, least)
    outputs: _Outputs = []
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
    elif len(outputs) == 2 and not _rows_apart(*outputs):
        warn(
            "expected examples that do not depend on each other; the output of a row changes with the rows beside it, "
            "as with batch statistics or the nodes of one graph. Use method='sample', with all the rows that belong "
            "together in one batch, or give each graph one row; method='linear' is wrong here.",
            LatedropWarning,
            stacklevel=3,
        )
    return runs


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
    runs: _Runs = {}
    marks = _Marks()
    rows = row_count(x)
    scripts = [module for module in model.modules() if isinstance(module, torch.jit.ScriptModule)]
    marks.add([parameter.detach() for module in scripts for parameter in module.parameters()])

    def before(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = list(layer_inputs(module, args, kwargs).values())
        if isinstance(module, _LAYERS) and inputs:
            packed = inputs[0] if isinstance(inputs[0], PackedSequence) else None
            value = packed.data if packed is not None else inputs[0]
            steps = len(packed.batch_sizes) if packed is not None else None
            downstream = any(marks.on(item) for item in inputs)
            run = _Run(type(module).__name__, name, None, (channel_axis(module),), downstream, value, steps, rows)
            note(name, run)

    def meet(found: WeightCall) -> dict[Place, Any]:
        inputs = list(found.inputs.values())
        owner, downstream = found.weight.rpartition(".")[0], any(marks.on(item) for item in inputs)
        run = _Run(found.layer, owner, found.weight, found.channels, downstream, inputs[0], None, rows)
        note(found.name, run)
        return {}

    def note(name: str, run: _Run) -> None:
        run.value = run.value.detach().clone()
        runs.setdefault(name, []).append(run)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        marks.add(output)

    calls = WeightCalls(model, meet, marks.add)
    handles: list[RemovableHandle] = []
    try:
        for name, module in named_layers(model).items():
            if isinstance(module, _SOURCES):
                handles.append(module.register_forward_pre_hook(partial(before, name), with_kwargs=True))
                handles.append(module.register_forward_hook(after))
        handles += apart(model, calls)
        with undisturbed(model):
            state = torch.random.get_rng_state()
            with marks, calls:
                calls.begin()
                output = call(model, x)
            drew = not torch.equal(state, torch.random.get_rng_state())
    finally:
        for handle in handles:
            handle.remove()
    outputs.append((rows, output, drew and _varies(model, x, output)))
    return runs


def _varies(model: nn.Module, x: Any, output: Any) -> bool:
    """Whether the output is another one with other random numbers: some models draw them in eval mode for nothing."""
    with undisturbed(model):
        torch.rand(1)  # moves the generator on
        again = call(model, x)
    return not all(torch.equal(a, b) for a, b in zip(tensors(output), tensors(again), strict=False))


def _site(name: str, kind: Kind, small: list[_Run], large: list[_Run] | None) -> Site:
    first = small[0]
    if first.packed_steps is not None:
        features = first.value.shape[-1]
        units: tuple[int, ...] = (features,) if kind == "channel" else (first.packed_steps, features)
        return Site(name, kind, first.layer, units, len(small), 0)
    try:
        axis, interleaved = _common_layout(name, small, large)
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


def _common_layout(name: str, small: list[_Run], large: list[_Run] | None) -> tuple[int | None, bool]:
    if large is None:
        return 0, False
    if len(large) != len(small):
        raise SiteError(
            f"expected layer {name!r} to run equally often for every batch size; it ran {len(small)} times for two "
            f"examples and {len(large)} times for three. Leave it out with select=."
        )
    layouts = {_layout(name, a, b) for a, b in zip(small, large, strict=True)}
    if len(layouts) > 1:
        raise SiteError(
            f"expected the examples along one axis in every call of layer {name!r}; found axes "
            f"{sorted(str(axis) for axis, _ in layouts)}. Use kind='channel', or leave it out with select=."
        )
    return layouts.pop()


def _layout(name: str, small: _Run, large: _Run) -> tuple[int | None, bool]:
    """The batch axis, and whether folded examples alternate along it."""
    a, b = small.value, large.value
    if small.rows == large.rows:
        return _turned_layout(a, b, small.rows)
    axes = [i for i, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n]
    if not axes:
        return None, False
    axis = axes[0]
    if len(axes) > 1 or a.shape[axis] * large.rows != b.shape[axis] * small.rows:
        raise SiteError(
            f"expected the input of layer {name!r} to grow along one axis with the number of examples; found shape "
            f"{tuple(a.shape)} for two examples and {tuple(b.shape)} for three. Leave the layer out with select=."
        )
    inner = a.shape[axis] // small.rows
    if inner == 1:
        return axis, False
    a, b = a.movedim(axis, 0).float(), b.movedim(axis, 0).float()
    close = partial(torch.allclose, rtol=1e-2, atol=1e-3 * float(a.abs().max()) + 1e-12)
    if close(a, b[: len(a)]):
        return axis, False
    if close(a.unflatten(0, (inner, small.rows)), b.unflatten(0, (inner, large.rows))[:, : small.rows]):
        return axis, True
    raise SiteError(
        f"expected the examples to be folded in order into axis {axis} of the input of layer {name!r}, of shape "
        f"{tuple(small.value.shape)}; found another order. Use kind='channel', or leave it out with select=."
    )


def _turned_layout(value: Tensor, turned: Tensor, rows: int) -> tuple[int | None, bool]:
    """The same from two passes of one size, the second with its rows moved on by one."""
    if torch.equal(value, turned):
        return None, False
    a, b = value.float(), turned.float()
    close = partial(torch.allclose, rtol=1e-3, atol=1e-4 * float(a.abs().max()))
    for axis in (axis for axis, size in enumerate(a.shape) if size % rows == 0):
        inner = a.shape[axis] // rows
        if close(a.unflatten(axis, (rows, inner)).roll(1, axis), b.unflatten(axis, (rows, inner))):
            return axis, False
        if close(a.unflatten(axis, (inner, rows)).roll(1, axis + 1), b.unflatten(axis, (inner, rows))):
            return axis, True
    return 0, False  # rows that act on each other, such as the nodes of a graph


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


def _maskable(value: Any) -> bool:
    if isinstance(value, PackedSequence):
        return True
    return isinstance(value, Tensor) and value.is_floating_point()


def _checked_rate(rate: Any) -> float:
    if isinstance(rate, bool) or not isinstance(rate, Real) or not 0 <= float(rate) < 1:
        raise ArgumentError(f"expected a rate in [0, 1); found {rate!r}. A rate is the probability that a unit drops.")
    return float(rate)


def _by_pattern(name: str, rate: Mapping[str, float]) -> float:
    return next((float(value) for pattern, value in rate.items() if fnmatchcase(name, pattern)), 0.0)

"""A model with its private copy, passes of the copy, and what is read of their output.

With `h` the input of a layer and `m` an inverted dropout mask, the layer sees `h · m`. A `Thinner` holds the masks and
returns the thinned value; a `Pass` tells it which axis of the value counts the examples. The state of a pass belongs to
the caller: layers of the copy look it up in a `ContextVar`, so that threads and tasks share one copy and never see each
other.

A tuple or list is several positional inputs; a mapping is keyword inputs where `forward` has parameters of those names,
and a single dict argument where it has not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from copy import copy
from dataclasses import fields, is_dataclass
from functools import lru_cache
from threading import RLock
from typing import Any, Protocol, TypeAlias, TypeVar
from warnings import warn

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.overrides import TorchFunctionMode

from latedrop.data.arrays import all_finite, check_inputs
from latedrop.data.rows import batch_of, tensors
from latedrop.errors import ArgumentError, LatedropError, LatedropWarning, OutputError, SiteError
from latedrop.network.functional import Place, WeightCall, WeightCalls, replaced
from latedrop.network.private_copy import private_copy
from latedrop.network.sites import SOURCES, Site, channel_axis, layer_inputs, missing_sites
from latedrop.torch_private import Watching, draws_numbers, version_of
from latedrop.weights import check_in_memory, states

__all__ = ["Network", "Pass", "Readout", "Thinner", "call", "check_finite", "check_module", "part_of", "read"]

Readout: TypeAlias = Callable[[Any], Tensor] | str | int | None
_Result = TypeVar("_Result")
_SEVERAL_INPUTS = (nn.MultiheadAttention, nn.Bilinear)
_NO_GRADIENT = ("does not require grad and does not have a grad_fn", "differentiated Tensors does not require grad")


class Thinner(Protocol):
    """Gives thinned values."""

    def thin(self, site: Site, call: int, value: Tensor, shape: tuple[int, ...], axis: int | None) -> Tensor:
        """Return `value` times the mask of a site's call, which has `shape` for one draw and is broadcast.

        `axis` is that of `value` and `shape` along which examples lie; None where they lie along none.
        """
        ...


class Pass:
    """The state of one forward pass.

    Args:
        sites: those with a mask; none for a plain pass.
        thinner: gives their thinned inputs.
        rows: examples in the batch; None where they are unknown.
        copies: how many copies of the examples the draws have, one after the other.
        shared: True: a mask serves all examples of a draw; False: each has its own.

    Attributes:
        times: how often each site has run.
        calls: follows weights without a module, where a site is one.
        mode: follows all torch functions of the pass, if something has to.
    """

    calls: WeightCalls | None = None
    mode: TorchFunctionMode | None = None

    def __init__(
        self,
        sites: Sequence[Site] = (),
        thinner: Thinner | None = None,
        rows: int | None = None,
        copies: int = 1,
        *,
        shared: bool = True,
    ) -> None:
        self.sites = {site.name: site for site in sites}
        self.thinner = thinner
        self._rows, self._copies, self._shared = rows, copies, shared
        self.times = dict.fromkeys(self.sites, 0)

    def run(self, name: str, layer: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer of the copy; its input is thinned where it is a site."""
        site = self.sites.get(name)
        if site is not None:
            channels = (channel_axis(layer),) if site.kind == "channel" else ()
            if args and type(args[0]) is Tensor and not isinstance(layer, _SEVERAL_INPUTS):
                time = 0 if channels else self.times[name]
                args = (self._thin(site, time * 3, args[0], channels), *args[1:])
                self.times[name] += 1
            else:
                args, kwargs = replaced(args, kwargs, self._thinned(site, layer_inputs(layer, args, kwargs), channels))
        if self.calls is None:
            return forward(*args, **kwargs)
        with self.calls.apart():  # a site of its own: what it calls is none
            return forward(*args, **kwargs)

    def meet(self, met: WeightCall) -> dict[Place, Any]:
        """Return the thinned inputs of a weight without a module, where it is a site."""
        return self._thinned(self.sites[met.name], met.inputs, met.channels) if met.name in self.sites else {}

    def _thinned(self, site: Site, inputs: Mapping[Place, Any], channels: tuple[int, ...]) -> dict[Place, Any]:
        """Return thinned values by place; those that are one tensor, as query, key and value often are, stay one."""
        thinned: dict[int, Any] = {}
        time = 0 if site.kind == "channel" else self.times[site.name]
        for value in inputs.values():
            if id(value) not in thinned:
                thin = self._thin_packed if isinstance(value, PackedSequence) else self._thin
                thinned[id(value)] = thin(site, time * 3 + len(thinned), value, channels)
        self.times[site.name] += 1
        return {place: thinned[id(value)] for place, value in inputs.items()}

    def _thin(self, site: Site, number: int, value: Tensor, channels: tuple[int, ...]) -> Tensor:
        assert self.thinner is not None
        layout = _layout(site, value.shape, channels, self._rows, self._copies, self._shared)
        if layout is None:
            return value
        folds, shape, axis = layout
        if folds is None:
            return self.thinner.thin(site, number, value, shape, axis)
        start = site.batch_axis or 0  # examples that are folded have an axis
        return self.thinner.thin(site, number, value.unflatten(start, folds), shape, axis).flatten(start, start + 1)

    def _thin_packed(self, site: Site, number: int, value: PackedSequence, channels: tuple[int, ...]) -> PackedSequence:
        """Thin packed steps in their padded layout `(example, step, feature)`."""
        padded, _ = pad_packed_sequence(value, batch_first=True)
        thinned, sizes = self._thin(site, number, padded, channels), value.batch_sizes
        step = torch.arange(len(sizes)).repeat_interleave(sizes).to(thinned.device)
        row = torch.cat([torch.arange(int(size)) for size in sizes]).to(thinned.device)
        row = row if value.sorted_indices is None else value.sorted_indices[row]
        return PackedSequence(thinned[row, step], sizes, value.sorted_indices, value.unsorted_indices)


_Layout: TypeAlias = "tuple[tuple[int, int] | None, tuple[int, ...], int | None]"
"""Into what the axis of the rows is unfolded, if examples are folded; shape of a mask, and the axis of the examples."""


@lru_cache(maxsize=4096)
def _layout(
    site: Site, sizes: tuple[int, ...], channels: tuple[int, ...], rows: int | None, copies: int, shared: bool
) -> _Layout | None:
    """Return how masks meet an input of these sizes; None where it has no rows."""
    axis, shape = site.batch_axis, list(sizes)
    size = 0 if axis is None else shape[axis]
    if site.kind == "channel":
        axes = [channel % len(shape) for channel in channels]
        shape = [length if i in axes else 1 for i, length in enumerate(shape)]
        if shared and copies == 1 and size % (rows or 1):
            axis = None  # one mask for all entries, whosever they are
    if axis is None:  # the entries of one draw lie together
        return None, tuple(shape), 0 if copies > 1 and sizes[0] % copies == 0 else None
    rows = size if rows is None else rows
    if rows == 0:
        return None
    examples = 1 if shared else rows // copies
    inner, rest = divmod(size, rows)
    unfolded = site.kind == "element" and len(site.units) < len(sizes)
    if rest or (inner != 1 and unfolded):  # with one entry for each example when the sites were found
        raise SiteError(
            f"expected the input of site {site.name!r} to have a multiple of {rows} entries along axis {axis}, as "
            "there are that many examples, and as many for each as when the sites were found; found shape "
            f"{tuple(sizes)}. Where the number differs from example to example, find the sites on such "
            "examples, with kind='channel'; else leave it out with select=."
        )
    if inner == 1:
        shape[axis] = examples
        return None, tuple(shape), axis
    # Folded examples: split the axis in two, so that a mask of one example broadcasts over the other part.
    folded = (1 if site.kind == "channel" else inner, examples)
    full = (*shape[:axis], *(folded if site.interleaved else folded[::-1]), *shape[axis + 1 :])
    return (inner, rows) if site.interleaved else (rows, inner), full, axis + 1 if site.interleaved else axis


_CURRENT: ContextVar[Pass | None] = ContextVar("latedrop_pass", default=None)
"""The pass that the caller's thread or task is in."""


class Network:
    """A model, and the private copy of it that runs in its place.

    Threads share the copy. They take turns only where the model writes attributes or buffers of its own in a pass; the
    first pass tells.

    A copy follows what is written into the weights of the model, as it shares them. Changes of the model's structure
    after the copy was made are not seen; `current` makes a new copy where tensors were moved or replaced.

    Args:
        model: the user's.
        gradients: whether a backward pass through the copy reaches the model's parameters.
        buffers: whether torch's own layers share their buffers with the model.

    Attributes:
        model: the user's; it is read, never run and never changed.
        copy: in eval mode; its weight layers look up the current pass.
        layers: the modules of the copy by name, without what wrappers add.
        derives: whether the model differentiates inside its `forward` (forces, physics-informed networks); None as
            long as no pass has told.
        random: whether it draws random numbers of its own; likewise.
        writes: whether a pass writes attributes or buffers of its own; likewise.
        weight: its first floating parameter, which tells device and dtype.
        watched: the names of layers that may run inside of a pass alone: all that were sites.
        notes: what others remember of this network: it goes with it.
    """

    def __init__(self, model: nn.Module, *, gradients: bool = False, buffers: bool = True) -> None:
        check_module(model)
        self.model = model
        self.copy = private_copy(model, gradients=gradients, buffers=buffers)
        self.layers = dict(self.copy.named_modules())
        self.derives: bool | None = None
        self.random: bool | None = None
        self.writes: bool | None = None
        self.notes: dict[Any, Any] = {}
        self.weight = next((p for p in self.copy.parameters() if p.is_floating_point()), torch.empty(0))
        self._places = _places(model)
        self.watched = set[str]()
        self._turn = RLock()
        for name, layer in self.layers.items():
            if isinstance(layer, SOURCES):
                _route(name, layer, self.watched)
            elif isinstance(layer, nn.TransformerEncoderLayer):  # else one fused kernel may run in place of its layers
                layer.activation_relu_or_gelu = 0
            elif isinstance(layer, nn.TransformerEncoder):
                layer.use_nested_tensor = False

    @classmethod
    def of(cls, model: nn.Module | Network) -> Network:
        """Return a network as it is, or one of a model."""
        return model if isinstance(model, Network) else cls(model)

    def current(self) -> Network:
        """Return this network, or a new one where tensors of the model were moved or replaced."""
        return self if _places(self.model) == self._places else Network(self.model)

    def watch(self, sites: Sequence[Site]) -> None:
        """Let no other thread run the layers of sites; raise where the model lacks one."""
        missing = missing_sites(self.copy, sites)
        if missing:
            raise SiteError(
                f"expected the model to have the sites' layers; {missing} are not among its modules. "
                "Find the sites again with find_sites(model, inputs)."
            )
        self.watched |= {site.name for site in sites}

    @contextmanager
    def passing(self, now: Pass) -> Iterator[None]:
        """Make `now` the current pass of whoever runs the copy inside."""
        if not now.sites.keys() <= self.watched:
            self.watch([*now.sites.values()])
        if any(site.weight is not None for site in now.sites.values()):
            now.calls = WeightCalls(self.copy, now.meet)
        token = _CURRENT.set(now)
        try:
            with now.mode or nullcontext(), now.calls or nullcontext():
                yield
        finally:
            _CURRENT.reset(token)

    def output(self, x: Any, now: Pass | None = None) -> Any:
        """Return the raw output of the copy on inputs that it may write into; by default nothing is thinned."""
        now = Pass() if now is None else now
        with self.passing(now):
            output = call(self.copy, x)
        if 0 in now.times.values():
            self.warn_of_idle(now)
        return output

    def warn_of_idle(self, now: Pass) -> None:
        """Warn of sites that should have run in a pass that is over, once for each."""
        idle = [name for name, times in now.times.items() if times == 0 and name not in self.notes]
        names = [name for name in idle if not now.sites[name].skipped]
        if names:
            self.notes.update(dict.fromkeys(names, True))
            warn(
                f"the sites {names} did not run in this batch, though they did when the sites were found: nothing is "
                "dropped there. If the model was changed since, find the sites again.",
                LatedropWarning,
                stacklevel=2,
            )

    def quietly(self, run: Callable[[], _Result], *, gradients: bool = False) -> _Result:
        """Return `run()`, which runs the copy: without gradients, and with the global random numbers as they were.

        A model that differentiates by itself gets the gradients that it needs: what `run` does is then done again.
        """
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            if self.writes is False and self.random is False and (gradients or self.derives is not None):
                with torch.set_grad_enabled(gradients or bool(self.derives)):
                    return run()
            with self._turn:  # what a pass writes into the copy, the pass of another thread must not read
                before = _contents(self.copy) if self.writes is None else None
                result = self._watched(run, gradients)
                self.writes = self.writes if before is None else _contents(self.copy) != before
                return result

    def _watched(self, run: Callable[[], _Result], gradients: bool) -> _Result:
        """Return `run()`, and find out whether it draws random numbers or differentiates."""
        on_device = [torch.cuda.default_generators[self.weight.device.index]] if self.weight.is_cuda else []
        generators = [] if self.random is False else [torch.default_generator, *on_device]
        before = [generator.get_state() for generator in generators]
        try:
            with torch.set_grad_enabled(gradients or bool(self.derives)):
                result = run()
                self.derives = self.derives if gradients else bool(self.derives)
                if self.random is None and _rolled(generators, before):
                    drawn: list[bool] = []
                    with Watching(lambda operator, *call: drawn.append(draws_numbers(operator, *call[:2]))):
                        result = run()  # another thread may have drawn them: what this one does is looked at
                    self.random = any(drawn)
                self.random = bool(self.random)
        except RuntimeError as error:
            if self.derives or not any(words in str(error) for words in _NO_GRADIENT):
                raise
            self.derives = True
            try:
                return self._watched(run, gradients)
            except RuntimeError:
                self.derives = None
                raise
        finally:
            failed = self.random is None  # before the first pass could tell
            if self.random or (failed and _rolled(generators, before)):
                for generator, state in zip(generators, before, strict=True):
                    generator.set_state(state)
        return result

    def __reduce__(self) -> Any:
        return Network, (self.model,)


def _route(name: str, layer: nn.Module, watched: set[str]) -> None:
    """Let every call of a layer of a private copy go through the current pass; watched ones run in no other thread."""
    layer_forward = with_gradients = layer.forward
    if layer.training:  # recurrent and on CUDA, see `private_copy`; in eval mode nothing is kept for a backward pass
        without = copy(layer)
        without.training = False
        layer_forward = without.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        now = _CURRENT.get()
        if now is None and name in watched:
            raise SiteError(
                f"expected layer {name!r} to run in the thread or task that makes the prediction; it runs in another "
                "one, which the model starts by itself. Leave it out with select=, or call it from the model's forward."
            )
        run = with_gradients if torch.is_grad_enabled() else layer_forward
        return run(*args, **kwargs) if now is None else now.run(name, layer, run, args, kwargs)

    layer.forward = forward


def check_module(model: Any) -> None:
    """Raise `ArgumentError` where something else than a module was given."""
    if not isinstance(model, nn.Module):
        inner = isinstance(vars(model).get("module_") if hasattr(model, "__dict__") else None, nn.Module)
        remedy = "Pass its module_, the network that the wrapper has trained" if inner else "Pass the model itself"
        raise ArgumentError(
            f"expected a torch.nn.Module; found {type(model).__name__}. {remedy}; an exported program becomes one with "
            "latedrop.load_program(program)."
        )
    check_in_memory(model)


def _rolled(generators: Sequence[torch.Generator], before: Sequence[Tensor]) -> bool:
    return not all(torch.equal(generator.get_state(), old) for generator, old in zip(generators, before, strict=True))


def _contents(model: nn.Module) -> list[Any]:
    """Return what tells that a pass has written something into a model: other attributes, other values of tensors."""
    return [
        (name, id(value), len(value) if isinstance(value, (list, dict, set)) else 0)
        for module in model.modules()
        for name, value in vars(module).items()
        if name != "forward"
    ] + [version_of(buffer) for buffer in model.buffers()]


def _places(model: nn.Module) -> list[tuple[int, int]]:
    """Return which tensors a model holds, and where their numbers lie."""
    return [(identity, place) for identity, _, place in states(model)]


def call(model: nn.Module, x: Any) -> Any:
    """Run `model` on `x`, spreading tuples and matching mappings over its arguments."""
    if isinstance(x, Tensor):
        return model(x)
    x = batch_of(x, model)
    if isinstance(x, Mapping) and _takes_keywords(model, x):
        return model(**x)
    several = isinstance(x, (tuple, list)) and not isinstance(x, PackedSequence)
    return model(*x) if several else model(x)


def part_of(output: Any, readout: Readout) -> Any:
    """Return what a readout takes of a raw output, unchecked."""
    if not callable(readout):
        return _only_tensor(output) if readout is None else _part(output, readout)
    try:
        return readout(output)
    except LatedropError:
        raise
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise OutputError(
            f"expected a readout that takes the model's output, {_described(output)}; it raised "
            f"{type(error).__name__}: {error}. Pass a function of this output."
        ) from error


def read(output: Any, readout: Readout, rows: int) -> Tensor:
    """Return the quantity of interest, `(rows, ...)`, from the raw output of a model.

    `readout` is a callable, the name or index of one part of the output, or None where the output
    holds a single floating tensor.
    """
    value = output if readout is None and isinstance(output, Tensor) else part_of(output, readout)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise OutputError(
            f"expected the readout to give a floating tensor; found {kind}. "
            "Pass a readout that returns the tensor of interest, of complex numbers their real part or size."
        )
    if value.dim() == 0 or value.shape[0] != rows:
        raise OutputError(
            f"expected an output whose first axis counts the {rows} examples; found shape "
            f"{tuple(value.shape)}. Pass a readout that keeps one entry per example; with collate=, a batch must give "
            "one for each item of the list, in its order."
        )
    return value


def check_finite(output: Tensor, when: str, inputs: Sequence[Tensor] = ()) -> None:
    """Raise `OutputError` where an output has NaN or inf, `DataError` where inputs do: a device is waited for once."""
    if not all_finite(output, *inputs):
        check_inputs(inputs)
        rows = (~torch.isfinite(output)).reshape(len(output), -1).any(1)
        raise OutputError(
            f"expected a finite output; found NaN or inf in {int(rows.sum())} of {len(output)} rows {when}. "
            "Check the model on these inputs; in half precision, try bfloat16 or a smaller rate.",
            rows=rows,
        )


def _takes_keywords(model: nn.Module, x: Mapping[str, Any]) -> bool:
    parameters = inspect.signature(model.forward).parameters.values()
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return anything or set(x) <= {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY}


def _parts(output: Any) -> dict[str | int, Any]:
    if isinstance(output, Mapping):
        return dict(output)
    if is_dataclass(output):
        return {field.name: getattr(output, field.name) for field in fields(output)}
    if isinstance(output, (tuple, list)):
        return dict(enumerate(output))
    return {}


def _described(output: Any) -> str:
    """Return type, and shape or parts, for a message."""
    shape = f"of shape {tuple(output.shape)}" if isinstance(output, Tensor) else f"with parts {[*_parts(output)]}"
    return f"{type(output).__name__} {shape}"


def _part(output: Any, name: str | int) -> Any:
    parts = _parts(output)
    if name in parts:
        return parts[name]
    attribute = getattr(output, name, None) if isinstance(name, str) and not isinstance(output, Tensor) else None
    if attribute is not None and not callable(attribute):
        return attribute
    raise OutputError(
        f"expected an output with a part {name!r}; found {_described(output)}. Name one of its parts as the readout, "
        "or pass a function of the output; of a single tensor leave the readout out."
    )


def _only_tensor(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output
    parts = [part for part in tensors(output) if part.is_floating_point()]
    if len(parts) == 1:
        return parts[0]
    pair = len(parts) == 2 and parts[0].shape == parts[1].shape
    head = " Of a mean and a variance pass readout=0 and method=Terms([VarianceHead(1, 'log_variance'), 'dropout'])."
    raise OutputError(
        f"expected one floating tensor as the model's output; found {len(parts)} in {_described(output)}. Pass "
        f"readout=: a part's name or index, or a function of the output that returns one tensor.{head if pair else ''}"
    )

"""Thinned networks as one compiled program: for predictions that are made again and again on inputs of one shape.

A chunk of draws is traced once into a graph of plain operators, with the draws' keys as inputs. What does not depend on
the keys is cut off and runs once per prediction; the rest is compiled (`torch.compile`), so that a mask is hashed,
compared and multiplied inside the kernel that makes the layer's input, and never written to memory. On a CUDA device
the whole prediction, all chunks and their moments, is then captured as a CUDA graph: one launch replays it. Rates are
inputs too, so that one program serves a whole calibration.

A program is what the model did when it was traced. New weights, hooks or submodules make a new one; a Python number
that the model's code reads, or a branch that it takes by looking at values, is fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite, prod
from typing import Any, NoReturn, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from latedrop.errors import ArgumentError
from latedrop.masking.inject import hooked
from latedrop.masking.masks import draw_keys, hashes, keys_on, threshold
from latedrop.model.forward import Readout, output_of, undisturbed
from latedrop.model.sites import Site
from latedrop.variance.engine.folding import foldable

__all__ = ["Part", "Program", "merged", "program"]

_Place: TypeAlias = "tuple[str, int, tuple[int, ...]]"
"""A mask: its site, the call, and its shape."""
_PROGRAMS: WeakKeyDictionary[nn.Module, dict[Any, Program]] = WeakKeyDictionary()
_MOST_PROGRAMS = 8  # of one model: each holds a CUDA graph's memory


def program(
    model: nn.Module,
    x: Any,
    sites: Sequence[Site],
    draws: int,
    seed: int,
    readout: Readout,
    shared: bool,
    chunk: int | None,
    fitting: Callable[[], int],
) -> Program:
    """The program of a model for inputs like `x`; compiled on the first call, and kept as long as the model is.

    `fitting` gives the draws that run at once where `chunk` does not.
    """
    flat, spec = ([x], None) if isinstance(x, Tensor) else pytree.tree_flatten(x)
    shapes = tuple((v.shape, v.dtype, v.device, v.stride()) if isinstance(v, Tensor) else v for v in flat)
    kind = next(iter(value.device.type for value in flat if isinstance(value, Tensor)))
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    masked = tuple([(site.name, site.kind) for site in sites])
    key = (shapes, spec, _state(model), cast, masked, draws, seed, readout, shared, chunk)
    kept = _PROGRAMS.setdefault(model, {})
    if key not in kept:
        if len(kept) >= _MOST_PROGRAMS:
            kept.pop(next(iter(kept)))
        kept[key] = Program(model, x, sites, draws, seed, readout, shared, chunk or fitting())
    return kept[key]


def _state(model: nn.Module) -> tuple[Any, ...]:
    """What a program takes for granted: the modules, their hooks, and where their weights lie."""
    found: list[Any] = []
    for module in model.modules():
        found.append((id(module), len(module._forward_hooks), len(module._forward_pre_hooks)))
        for weights in (module._parameters, module._buffers):
            found += [value.data_ptr() for value in weights.values() if value is not None]
    return tuple(found)


class Program:
    """All draws of one model on inputs of one shape.

    Args:
        model: in any mode; it is left as it was.
        x: an example of the inputs, placed.
        sites: those with a mask.
        draws: all draws of a prediction.
        seed: fixes all masks.
        readout: see `sample`.
        shared: see `sample`.
        chunk: draws that run at once.
        compiler: from a graph to something that runs it; None: `torch.compile`.
    """

    def __init__(
        self,
        model: nn.Module,
        x: Any,
        sites: Sequence[Site],
        draws: int,
        seed: int,
        readout: Readout,
        shared: bool,
        chunk: int,
        compiler: Callable[[fx.GraphModule], Any] | None = None,
    ) -> None:
        self.draws, self.chunk = draws, min(chunk, draws)
        flat, self._spec = pytree.tree_flatten(x)
        self._inputs = [value.clone() for value in flat if isinstance(value, Tensor)]
        self._device = self._inputs[0].device
        self._names = [site.name for site in sites]
        self._wanted: list[float] = []
        with undisturbed(model), foldable(model):
            places = _places(model, x, sites, readout, shared)
            self._chunks = self._keys(places, seed)
            self._limits = torch.zeros(len(sites), dtype=torch.int32, device=self._device)
            self._scales = torch.ones(len(sites), dtype=torch.float64, device=self._device)
            try:
                graph = _traced(model, flat, self._spec, sites, readout, shared, places, self._arguments())
            except NotImplementedError as error:  # the model runs; an operator of it cannot be written down
                _refuse(f"what cannot be traced ({error})")
        _check(graph)
        if self._device.type == "cuda":
            _fill_up_channels(graph)
        before, after = _split(graph, len(self._inputs))
        compiler = _compile if compiler is None else compiler
        self._before, self._after = compiler(before), compiler(after)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._moments = self._total = torch.empty(0)

    def __call__(self, x: Any, rates: Mapping[str, float]) -> tuple[Tensor, Tensor, bool]:
        """Mean and variance of placed inputs, at a rate for each site, and whether all inputs and means are finite."""
        leaves = [x] if isinstance(x, Tensor) else pytree.tree_leaves(x)
        values = [value for value in leaves if isinstance(value, Tensor)]
        wanted = [rates[name] for name in self._names]
        if wanted != self._wanted:
            limits = np.array([threshold(rate) - 2**31 for rate in wanted], np.int32)
            self._limits.copy_(torch.from_numpy(limits))
            self._scales.copy_(torch.tensor([1 / (1 - rate) for rate in wanted], dtype=torch.float64))
            self._wanted = wanted
        with torch.no_grad():
            if self._device.type != "cuda":
                moments, total = self._run(values)
                return moments[0], moments[1], isfinite(total.item())
            for static, value in zip(self._inputs, values, strict=True):
                static.copy_(value)
            if self._graph is None:
                self._graph = self._captured()
            self._graph.replay()
            mean, variance = self._moments.clone()
            torch.cuda.current_stream(self._device).synchronize()  # the one wait of a prediction
            return mean, variance, isfinite(self._total.item())

    def _captured(self) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(2):  # kernels are chosen and compiled outside of the capture
                self._run(self._inputs)
        torch.cuda.current_stream(self._device).wait_stream(side)
        self._total = torch.zeros((), dtype=torch.float64, pin_memory=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._moments, total = self._run(self._inputs)
            self._total.copy_(total, non_blocking=True)
        return graph

    def _run(self, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and variance, `(2, N, ...)`, and a number that is finite where all inputs and means are."""
        ready = self._before(*inputs)
        (keys, weights, done), *others = self._chunks
        origin, mean, squares = self._after(*ready, weights, self._limits, self._scales, *keys)
        for keys, weights, count in others:
            first, part, spread = self._after(*ready, weights, self._limits, self._scales, *keys)
            mean, squares, done = merged((mean, squares, done), (part + (first - origin), spread, count))
        moments = mean.new_empty((2, *mean.shape))
        torch.add(origin, mean, out=moments[0])
        torch.div(squares, done - 1, out=moments[1])
        # A sum is NaN or inf where one of its terms is; in float64 no sum of finite numbers of less precision is.
        total = moments[0].sum(dtype=torch.float64)
        for value in inputs:
            total = total + value.sum(dtype=torch.float64) if value.is_floating_point() else total
        return moments, total

    def _arguments(self) -> list[Tensor]:
        keys, weights, _ = self._chunks[0]
        return [weights, self._limits, self._scales, *keys]

    def _keys(self, places: Sequence[_Place], seed: int) -> list[tuple[list[Tensor], Tensor, int]]:
        """For each chunk the keys `(chunk, 2)` of every mask, which of its draws count, and how many do."""
        chunks = -(-self.draws // self.chunk)
        found = []
        for start in range(0, chunks * self.chunk, self.chunk):
            span = range(start, start + self.chunk)
            keys = [keys_on(draw_keys(seed, span, site, call), self._device) for site, call, _ in places]
            count = min(self.chunk, self.draws - start)
            weights = (torch.arange(self.chunk) < count).float()
            found.append((keys, weights.to(self._device), count))
        return found


Part: TypeAlias = "tuple[Tensor, Tensor, int]"
"""Mean, sum of squared deviations from it, and number of some draws."""


def merged(a: Part, b: Part) -> Part:
    """Of two sets of draws together (Chan, Golub, LeVeque 1983)."""
    (mean, squares, done), (part, spread, count) = a, b
    delta, total = part - mean, done + count
    return mean + delta * (count / total), squares + spread + delta.square() * (done * count / total), total


def _places(model: nn.Module, x: Any, sites: Sequence[Site], readout: Readout, shared: bool) -> list[_Place]:
    """The masks of one pass, in order."""
    found: dict[_Place, None] = {}

    def note(site: Site, call: int, shape: tuple[int, ...], like: Tensor) -> Any:
        found[site.name, call, shape] = None
        return 1.0

    with hooked(model, sites, note, shared=shared):
        output_of(model, x, readout)
    return list(found)


class _Thin:
    """Stands where a mask would: `value * thin` is scaled and masked in single precision or better, then rounded."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask

    def __rmul__(self, value: Tensor) -> Tensor:
        return (value * self.mask.to(torch.promote_types(value.dtype, torch.float32))).to(value.dtype)


def _traced(
    model: nn.Module,
    flat: Sequence[Any],
    spec: Any,
    sites: Sequence[Site],
    readout: Readout,
    shared: bool,
    places: Sequence[_Place],
    arguments: Sequence[Tensor],
) -> fx.GraphModule:
    """A chunk as a graph `(*inputs, weights, limits, scales, *keys) -> first draw, mean and squares relative to it`."""
    numbers = {site.name: i for i, site in enumerate(sites)}
    where = [i for i, value in enumerate(flat) if isinstance(value, Tensor)]

    def chunk(*values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inputs = list(flat)
        for i, value in zip(where, values[: len(where)], strict=True):
            inputs[i] = value
        weights, limits, scales, *keys = values[len(where) :]

        def one(*own: Tensor) -> Tensor:
            by_place = dict(zip(places, own, strict=True))

            def mask(site: Site, call: int, shape: tuple[int, ...], like: Tensor) -> Any:
                number = numbers[site.name]
                keep = hashes(by_place[site.name, call, shape], prod(shape)).view(shape) >= limits[number]
                return _Thin(torch.where(keep, scales[number].to(torch.promote_types(like.dtype, torch.float32)), 0.0))

            with hooked(model, sites, mask, shared=shared):
                return output_of(model, pytree.tree_unflatten(inputs, spec), readout)

        outputs = torch.vmap(one, randomness="same")(*keys)
        outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
        count = weights.to(outputs).view(-1, *[1] * (outputs.dim() - 1))
        off = torch.where(count > 0, outputs - outputs[0], 0.0)  # what fills up the last chunk may even be NaN
        mean = off.sum(0) / count.sum()
        return outputs[0], mean, ((off - mean).square() * count).sum(0)

    values = [value for value in flat if isinstance(value, Tensor)]
    return make_fx(torch.func.functionalize(chunk))(*values, *arguments)


def _check(graph: fx.GraphModule) -> None:
    """Raise where the graph would not say what the model says: for other draws, or for other inputs."""
    for node in graph.graph.nodes:
        tags = getattr(node.target, "tags", ())
        noise = torch.Tag.nondeterministic_seeded in tags and "scaled_dot_product" not in str(node.target)
        if noise or torch.Tag.dynamic_output_shape in tags:
            why = "noise of its own" if noise else "sizes that depend on values"
            _refuse(f"{why} ({node.target})")


def _refuse(found: str) -> NoReturn:
    raise ArgumentError(f"expected a model that a program can stand for; found {found}. Use engine='auto'.")


def _fill_up_channels(graph: fx.GraphModule) -> None:
    """Convolutions in half precision get channels of zeros, up to a multiple of 8, where tensor cores want them.

    The library would do it too, in passes over memory of its own; here it is part of the kernel that makes the input.
    """
    pad, convolution = torch.ops.aten.constant_pad_nd.default, torch.ops.aten.convolution.default
    nodes = graph.graph
    for node in nodes.find_nodes(op="call_function", target=convolution):
        value, weight, bias, *options = node.args
        if weight.op != "get_attr" or options[3] or options[-1] != 1:  # transposed, groups
            continue
        kernel = getattr(graph, weight.target)
        more_out, more_in = ((-channels) % 8 for channels in kernel.shape[:2])
        thin = min(kernel.shape[:2]) < 8  # mostly zeros: other kernels are better at these
        if kernel.dtype not in (torch.float16, torch.bfloat16) or thin or more_out + more_in == 0:
            continue
        behind = [0, 0] * (kernel.dim() - 2)
        with nodes.inserting_before(node):
            value = nodes.call_function(pad, (value, [*behind, 0, more_in], 0.0)) if more_in else value
            weight = nodes.call_function(pad, (weight, [*behind, 0, more_in, 0, more_out], 0.0))
            bias = None if bias is None else nodes.call_function(pad, (bias, [0, more_out], 0.0))
        with nodes.inserting_after(node):
            cut = nodes.call_function(torch.ops.aten.slice.Tensor, (node, 1, 0, kernel.shape[0]))
        node.replace_all_uses_with(cut, delete_user_cb=lambda user, cut=cut: user is not cut)
        node.args = (value, weight, bias, *options)
    graph.recompile()


def _split(graph: fx.GraphModule, inputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """What only the first `inputs` arguments determine, and the rest, which takes its results before all else."""
    nodes = list(graph.graph.nodes)
    arguments = [node for node in nodes if node.op == "placeholder"]
    drawn, given = set(arguments[inputs:]), set(arguments[:inputs])
    for node in nodes:
        if any(source in drawn for source in node.all_input_nodes):
            drawn.add(node)
        elif any(source in given for source in node.all_input_nodes):
            given.add(node)
    crossing = [n for n in nodes if n in given and any(user in drawn for user in n.users)]
    before, after = fx.Graph(), fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node in arguments[:inputs] or (node not in drawn and node.op != "output"):
            copies[node] = before.node_copy(node, lambda n: copies[n])
    before.output(tuple(copies[node] for node in crossing))
    copies = {node: after.placeholder(f"ready_{i}") for i, node in enumerate(crossing)}
    for node in nodes:
        if node not in given:
            copies[node] = after.node_copy(node, lambda n: copies[n])
    for part in (before, after):
        part.eliminate_dead_code()
    return fx.GraphModule(graph, before), fx.GraphModule(graph, after)


def _compile(graph: fx.GraphModule) -> Any:
    return torch.compile(graph, dynamic=False, fullgraph=True)

"""Compile predictions on inputs of a fixed shape, for many predictions with the same shape.

Latedrop runs a private copy of the network, which user code cannot change. So a function of a batch can be traced once
(`make_fx` records forward and backward passes as one graph of operators). The graph shares the weights, so changes of
their values take effect. `engine="compiled"`: `torch.compile` makes a program of it, whose fused kernels are best for
many rows; on a CUDA device it replays them as a CUDA graph. `engine="recorded"`: the operators themselves become a CUDA
graph. That takes seconds where compiling takes up to a minute, and is as fast for few rows, which wait for Python.

Masks of draws are hashed from keys that are inputs of the graph, so that one program serves all rates and seeds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from math import prod
from threading import Lock
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, fx

from latedrop.data.arrays import map_values
from latedrop.data.rows import Items, row_count, tensors
from latedrop.dropout.masks import draw_keys, hashes, kernel_for, keys_on, remembered, split, stream_of, threshold
from latedrop.dropout.moments import Engine, Moments, Sampling, Stream, out_of_memory
from latedrop.dropout.prefix import Prefix, drawn_output
from latedrop.errors import ArgumentError, LatedropError
from latedrop.network.network import Network
from latedrop.network.sites import Site
from latedrop.torch_private import clear_workspaces, draws_numbers, operator_of, plain_kernels, traced

__all__ = ["Program", "batch_function", "compiled_moments", "program_for", "readout_key", "refuse"]

_log = logging.getLogger(__name__)
_MOST = 8  # maximum number of cached programs of a network, as each uses memory
_COMPILING = Lock()
_SIZES = ("nonzero", "masked_select", "unique", "_unique2", "_pack_padded_sequence")
_SEVERAL = ("MultiheadAttention", "multi_head_attention_forward", "Bilinear", "bilinear")


def refuse(what: str, error: Exception | None = None) -> NoReturn:
    """Raise `ArgumentError` for a model that cannot be traced or compiled."""
    raise ArgumentError(f"expected a model that can be traced; found {what}. Use engine='auto'.") from error


class Program:
    """Hold a traced and compiled function of tensors of fixed shapes that runs a network; one caller at a time."""

    checked = False  # True once its results were compared with those of the uncompiled steps
    shape: Any = None  # set by the caller of `program_for`: shape of its results

    def __init__(
        self, network: Network, function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], engine: Engine
    ) -> None:
        self._device = inputs[0].device
        self._graph = _graph(network, function, [value.detach() for value in inputs])
        self._turn, self._started = Lock(), False
        mode = "reduce-overhead" if self._device.type == "cuda" else None
        compiled = engine == "compiled"
        self._run: Any = torch.compile(self._graph, fullgraph=True, dynamic=False, mode=mode) if compiled else None

    def __call__(self, *inputs: Tensor, fixed: Sequence[Tensor] = ()) -> list[Tensor]:
        """Run the program on `inputs` and on `fixed` inputs, whose values never change; return its results."""
        cast = torch.autocast(self._device.type, enabled=False)
        with self._turn, torch.inference_mode(False), torch.no_grad(), cast:
            try:
                if self._run is None:  # recorded with the first inputs; a process records one graph at a time
                    with _COMPILING:
                        self._run = _Recorded(self._graph, inputs, fixed)
                if isinstance(self._run, _Recorded):
                    results = self._run(inputs, fixed)
                else:  # copied where the next replay would overwrite them
                    results = [r.clone() if r.is_cuda else r for r in self._run(*inputs, *fixed)]
            except Exception as error:
                if self._started or out_of_memory(error):
                    raise
                refuse(f"one that cannot be compiled ({_first_line(error)})", error)
            self._started = True
            return results


class _Recorded:
    """Hold a graph of operators as a CUDA graph."""

    def __init__(self, graph: fx.GraphModule, inputs: Sequence[Tensor], fixed: Sequence[Tensor]) -> None:
        self._device = inputs[0].device
        _fold_constants(graph)
        self._inputs, self._fixed = [value.clone() for value in (*inputs, *fixed)], fixed
        self._recorded, self._last = torch.cuda.CUDAGraph(), torch.cuda.Event()
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):  # also makes its device the current one
            for _ in range(2):  # libraries choose kernels, and Triton compiles them, before anything is recorded
                graph(*self._inputs)
            clear_workspaces()  # what is recorded has its own, in the memory of the graph
            # Other threads may allocate meanwhile.
            with torch.cuda.graph(self._recorded, stream=stream, capture_error_mode="thread_local"):
                results: Sequence[Tensor] = graph(*self._inputs)
                kinds = dict.fromkeys(result.dtype for result in results)
                self._groups = [[i for i, result in enumerate(results) if result.dtype == kind] for kind in kinds]
                # Joined by dtype, as each is copied in every call.
                self._joined = [torch.cat([results[i].flatten() for i in group]) for group in self._groups]
        clear_workspaces()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        self._shapes = [result.shape for result in results]

    def __call__(self, inputs: Sequence[Tensor], fixed: Sequence[Tensor]) -> list[Tensor]:
        """Return copies of the results, which the next call overwrites."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._last)  # another thread may have called, on another stream
        for place, value in zip(self._inputs, inputs, strict=False):
            place.copy_(value)
        if any(a is not b for a, b in zip(fixed, self._fixed, strict=True)):
            for place, value in zip(self._inputs[len(inputs) :], fixed, strict=True):
                place.copy_(value)
            self._fixed = fixed
        try:
            self._recorded.replay()
            copies = [joined.clone() for joined in self._joined]
        finally:  # also where memory ran out for the copies
            self._last.record(stream)
        parts: dict[int, Tensor] = {}
        for copy, group in zip(copies, self._groups, strict=True):
            parts |= zip(group, copy.split([self._shapes[i].numel() for i in group]), strict=True)
        return [parts[i].view(shape) for i, shape in enumerate(self._shapes)]


def _fold_constants(graph: fx.GraphModule) -> None:
    """Compute nodes that depend on no input or weight once: a CUDA graph cannot copy numbers to the device."""
    values: dict[fx.Node, Any] = {}
    for node in graph.graph.nodes:
        value = getattr(graph, node.target) if node.op == "get_attr" else None
        if value is not None and value.device.type == "cpu" and not isinstance(value, torch.nn.Parameter):
            values[node] = value
        elif node.op == "call_function" and all(before in values for before in node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    for number, (node, value) in enumerate(values.items()):
        if node.op == "call_function" and not values.keys() >= node.users.keys():
            graph.register_buffer(f"constant_{number}", value, persistent=False)
            with graph.graph.inserting_before(node):
                node.replace_all_uses_with(graph.graph.get_attr(f"constant_{number}"))
    graph.graph.eliminate_dead_code()
    graph.recompile()


def program_for(network: Network, x: Any, key: Any, engine: Engine, make: Callable[[], Program]) -> Program:
    """Return the cached program for inputs shaped like `x` and a `key` of all other options, or make one."""
    if isinstance(x, Items):
        raise ArgumentError(
            f"expected engine='auto' with collate=; found engine={engine!r}, which needs batches of one shape."
        )
    kind = network.weight.device.type
    if engine == "recorded" and kind != "cuda":
        raise ArgumentError(
            f"expected a model on a CUDA device with engine='recorded'; found one on {kind!r}. Use engine='compiled'."
        )
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    whole = "program", repr(map_values(x, _form)), cast, torch.get_float32_matmul_precision(), engine, key
    programs: dict[Any, Program] = network.notes.setdefault("programs", {})
    if whole not in programs:
        with _COMPILING:
            if whole not in programs:
                if len(programs) >= _MOST:
                    programs.pop(next(iter(programs)))
                _log.info("compiling %s for inputs of this shape; it takes seconds", type(network.model).__name__)
                programs[whole] = make()
    return programs[whole]


def _form(value: Tensor) -> tuple[Any, ...]:
    """Return shape, dtype, device and strides (or layout) of a tensor, on which a program depends."""
    return value.shape, value.dtype, value.device, value.stride() if value.layout is torch.strided else value.layout


def batch_function(x: Any, function: Callable[[Any], Any]) -> tuple[Callable[..., Any], list[Tensor]]:
    """Turn a function of a batch into a function of the tensors in it; return that function and the tensors."""

    def of_tensors(*values: Tensor) -> Any:
        each = iter(values)
        return function(map_values(x, lambda _: next(each)))

    return of_tensors, tensors(x)


def compiled_moments(
    network: Network,
    x: Any,
    sites: Sequence[Site],
    rates: Mapping[str, float],
    options: Sampling,
    chunk: int,
    tries_prefix: Callable[[], bool],
) -> Moments:
    """Compute mean and variance over draws, `chunk` at once, by a program that is compiled on the first call.

    `tries_prefix` returns True if the layers before the first site can run once for all draws.
    """
    key = "draws", tuple(sites), chunk, options.shared, readout_key(options.readout)
    program = program_for(
        network, x, key, options.engine, lambda: _chunk_program(network, x, sites, options, chunk, tries_prefix())
    )
    device, stream = network.weight.device, Stream()

    def sent() -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
        """Copy the arguments that do not depend on the rows to the device."""
        limits = torch.tensor([threshold(rates[site.name]) - 2**31 for site in sites], dtype=torch.int32)
        scales = torch.tensor([1 / (1 - rates[site.name]) for site in sites], dtype=torch.float64)
        chunks = []
        for start in range(0, options.draws, chunk):
            weights = (torch.arange(chunk) < min(chunk, options.draws - start)).to(device, torch.float32)
            chunks.append((weights, _keys(sites, options.seed, range(start, start + chunk), device)))
        return [limits.to(device), scales.to(device)], chunks

    cached = remembered(network.notes, "compiled inputs", None, dict)
    fixed = key, options.seed, options.draws, stream_of(device), *rates.values()
    common, chunks = remembered(cached, fixed, _MOST, sent)
    for number, (weights, keys) in enumerate(chunks):
        origin, mean, squares = program(*tensors(x), fixed=(*common, weights, keys))
        stream.merge(origin, mean, squares, min(chunk, options.draws - number * chunk))
    return Moments(*stream.moments(), options.draws)


def _masks_of(sites: Sequence[Site]) -> list[tuple[Site, int]]:
    """Return site and call number of every mask of a pass; see `Pass.thinned`."""
    times = {site: range(1 if site.kind == "channel" else site.calls) for site in sites}
    inputs = {site: range(3 if site.layer in _SEVERAL else 1) for site in sites}
    return [(site, time * 3 + i) for site in sites for time in times[site] for i in inputs[site]]


def _keys(sites: Sequence[Site], seed: int, draws: range, device: torch.device) -> Tensor:
    """Return the keys of every mask, `(masks, draws, 2)`."""
    return keys_on(np.stack([draw_keys(seed, draws, site.name, call) for site, call in _masks_of(sites)]), device)


def _chunk_program(
    network: Network, x: Any, sites: Sequence[Site], options: Sampling, chunk: int, once: bool
) -> Program:
    """Compile a program that runs a chunk of draws.

    Its arguments are the inputs, limit and scale of every site, weights of the draws (0 for padding), and keys of every
    mask. It returns the first draw, the mean of all draws minus the first one, and the sum of squared deviations.
    """
    rows, device = row_count(x), network.weight.device

    def of_chunk(batch: Any, limits: Tensor, scales: Tensor, weights: Tensor, keys: Tensor) -> list[Tensor]:
        thinner = _Hashed(sites, keys, limits, scales, _thinned if options.engine == "recorded" else _multiplied)
        prefix = Prefix(rows) if once else None
        drawn, _ = drawn_output(network, batch, sites, thinner, chunk, options, prefix)
        outputs = split(drawn, 0, chunk)
        outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
        count = weights.to(outputs).view(-1, *[1] * (outputs.dim() - 1))
        off = torch.where(count > 0, outputs - outputs[0], 0.0)  # padding draws of the last chunk may be NaN
        mean = off.sum(0) / count.sum()
        return [outputs[0], mean, ((off - mean).square() * count).sum(0)]

    example = [torch.zeros(len(sites), dtype=torch.int32, device=device)]
    example += [torch.ones(len(sites), dtype=torch.float64, device=device), torch.ones(chunk, device=device)]
    function, inputs = batch_function((x, *example, _keys(sites, 0, range(chunk), device)), lambda all: of_chunk(*all))
    return Program(network, function, inputs, options.engine)


@torch.library.custom_op("latedrop::thinned", mutates_args=())
def _thinned(value: Tensor, keys: Tensor, shape: Sequence[int], limit: Tensor, scale: Tensor) -> Tensor:
    """Multiply a value `(draws, ...)` by masks `(draws, *shape)`, with one fused kernel if there is one."""
    kernel = kernel_for(value, keys, shape, limit, scale)
    return _multiplied(value, keys, shape, limit, scale) if kernel is None else kernel(value)


def _multiplied(value: Tensor, keys: Tensor, shape: Sequence[int], limit: Tensor, scale: Tensor) -> Tensor:
    """Multiply a value `(draws, ...)` by masks in float32 or float64, with separate operators."""
    keep = hashes(keys, prod(shape)).view(len(keys), *shape) >= limit
    wide = torch.promote_types(value.dtype, torch.float32)
    return (value * torch.where(keep, scale.to(wide), 0.0)).to(value.dtype)


class _Hashed:
    """Make masks from keys, limits and scales that are inputs of a graph; implements `Thinner`."""

    def __init__(
        self, sites: Sequence[Site], keys: Tensor, limits: Tensor, scales: Tensor, multiply: Callable[..., Tensor]
    ) -> None:
        self._numbers = {site.name: number for number, site in enumerate(sites)}
        self._keys = {(site.name, call): row for (site, call), row in zip(_masks_of(sites), keys, strict=True)}
        self._limits, self._scales, self._draws, self._multiply = limits, scales, keys.shape[1], multiply

    def thin(self, site: Site, call: int, value: Tensor, shape: tuple[int, ...], axis: int | None) -> Tensor:
        """Multiply a value by the mask of a site and call; see `Thinner`."""
        if axis is None:
            return self.thin_split(site, call, value[None], shape, 0)[0]
        return self.thin_split(site, call, split(value, axis, self._draws), shape, axis).flatten(axis, axis + 1)

    def thin_split(self, site: Site, call: int, value: Tensor, shape: tuple[int, ...], axis: int) -> Tensor:
        """Multiply a value that has an axis of draws before the rows by its masks, in float32 or float64."""
        if (site.name, call) not in self._keys:
            refuse(f"a layer that runs more often than when the sites were found ({site.name})")
        keys, number = self._keys[site.name, call], self._numbers[site.name]
        thinned = self._multiply(value.movedim(axis, 0), keys, shape, self._limits[number], self._scales[number])
        return thinned.movedim(0, axis)


def _graph(network: Network, function: Callable[..., Any], inputs: list[Tensor]) -> fx.GraphModule:
    """Trace a function that runs a network; raise `ArgumentError` if its graph is valid only for some inputs."""
    recurrent = any(isinstance(module, torch.nn.RNNBase) for module in network.copy.modules())
    try:
        with plain_kernels() if recurrent else nullcontext():  # recurrent layers are traced step by step
            graph = traced(lambda *values: network.quietly(lambda: function(*values)), inputs)
    except LatedropError:
        raise
    except Exception as error:  # the network runs, but cannot be traced
        if out_of_memory(error):
            raise
        if "_local_scalar_dense" in str(error):
            refuse("Python code that decides by values of its tensors", error)
        refuse(f"one that cannot be traced ({_first_line(error)})", error)
    for node in graph.graph.nodes:
        operator = operator_of(node.target) if node.op == "call_function" else None
        if draws_numbers(operator, node.args, node.kwargs):
            refuse(f"noise of its own ({node.target})")
        if operator is not None and operator.name in _SIZES:
            refuse(f"sizes that depend on values ({node.target})")
        if operator is not None and operator.written:  # Python code would write only once, in the trace
            refuse(f"a model that writes into tensors of its own ({node.target})")
    return graph


def readout_key(readout: Any) -> Any:
    """Return a key for a readout: its name or index, or the id of a function."""
    return id(readout) if callable(readout) else readout


def _first_line(error: Exception) -> str:
    """Return the type and the first line of an error."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"

"""Thinned networks as one compiled program: for predictions that are made again and again on inputs of one shape.

A chunk of draws is traced once into a graph of plain operators, with the draws' keys as inputs. What does not depend on
the keys is cut off and runs once per prediction; the rest is compiled (`torch.compile`), so that a mask is hashed,
compared and multiplied inside the kernel that makes the layer's input, and never written to memory. On a CUDA device
the whole prediction, all chunks and their moments, is then captured as a CUDA graph: one launch replays it. Rates are
inputs too, so that one program serves a whole calibration.

A program is what the model did when it was traced; what it takes for granted, and when it is made anew, is in
`snapshots`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from threading import Lock, RLock
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, fx, nn

from latedrop.masking.masks import draw_keys, keys_on, threshold
from latedrop.model.sites import Site
from latedrop.torch_inside import compiled, leaves_and_structure
from latedrop.variance.engine.options import Sampling
from latedrop.variance.engine.snapshots import Looks, snapshot
from latedrop.variance.engine.tracing import (
    MaskPlace,
    fill_up_channels,
    first_line,
    lifted,
    mask_places,
    refuse,
    split,
    traced_chunk,
)
from latedrop.variance.moments import merged, out_of_memory

__all__ = ["Program", "program"]

_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)
_PROGRAMS: WeakKeyDictionary[nn.Module, dict[Any, Program]] = WeakKeyDictionary()
_MOST_PROGRAMS = 8  # of one model: each holds a CUDA graph's memory
_COMPILING = RLock()


def program(model: nn.Module, x: Any, sites: Sequence[Site], options: Sampling, fitting: Callable[[], int]) -> Program:
    """The program of a model for inputs like `x`; compiled on the first call, and kept as long as the model is.

    `fitting` gives the draws that run at once where the options do not. Programs are compiled in turns.
    """
    flat, structure = ([x], None) if isinstance(x, Tensor) else leaves_and_structure(x)
    shapes = tuple((v.shape, v.dtype, v.device, v.stride()) if isinstance(v, Tensor) else v for v in flat)
    kind = next(iter(value.device.type for value in flat if isinstance(value, Tensor)))
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    switches = torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.is_inference_mode_enabled()
    key = (shapes, structure, snapshot(model), cast, switches, tuple(sites), options)
    kept = _PROGRAMS.setdefault(model, {})
    found = kept.get(key)
    if found is None or not found.looks.still_hold():
        with _COMPILING:
            if key in kept and not kept[key].looks.still_hold():
                del kept[key]
            if key not in kept:
                if len(kept) >= _MOST_PROGRAMS:
                    kept.pop(next(iter(kept)))
                _log.info("compiling %s for inputs of this shape; it takes seconds", type(model).__name__)
                kept[key] = Program(model, x, sites, options, options.chunk or fitting())
            found = kept[key]
    return found


class Program:
    """All draws of one model on inputs of one shape. Whoever calls it while it runs waits for his turn.

    Args:
        model: in any mode; it is left as it was.
        x: an example of the inputs, placed.
        sites: those with a mask.
        options: see `Sampling`.
        chunk: draws that run at once.
        compiler: from a graph to something that runs it; None: torch's.
    """

    def __init__(
        self,
        model: nn.Module,
        x: Any,
        sites: Sequence[Site],
        options: Sampling,
        chunk: int,
        compiler: Callable[[fx.GraphModule], Any] | None = None,
    ) -> None:
        together = any(site.batch_axis is None or site.moved or site.coupled for site in sites)
        self.draws, self.chunk = options.draws, 1 if together else min(chunk, options.draws)
        self._inputs = [value.clone() for value in leaves_and_structure(x)[0] if isinstance(value, Tensor)]
        self._device = self._inputs[0].device
        self._names = [site.name for site in sites]
        self._wanted: list[float] = []
        places = mask_places(model, x, sites, options)
        self._chunks = self._keys(places, options.seed)
        self._limits = torch.zeros(len(sites), dtype=torch.int32, device=self._device)
        self._scales = torch.ones(len(sites), dtype=torch.float64, device=self._device)
        self.looks = Looks()
        with self.looks:
            graph = traced_chunk(model, x, sites, options, places, self._arguments())
        if self._device.type == "cuda":
            fill_up_channels(graph)
        before, after = split(graph, len(self._inputs))
        compiler = _Compiled if compiler is None else compiler
        self._before, self._after = compiler(before), compiler(after)
        self._compiled = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._moments = self._total = torch.empty(0)
        self._turn = Lock()

    def __call__(self, x: Any, rates: Mapping[str, float]) -> tuple[Tensor, Tensor, bool]:
        """Mean and variance of placed inputs, at a rate for each site, and whether all inputs and means are finite."""
        values = [value for value in leaves_and_structure(x)[0] if isinstance(value, Tensor)]
        with self._turn, torch.no_grad():
            self._set_rates([rates[name] for name in self._names])
            if self._device.type != "cuda":
                moments, total = self._run(values) if self._compiled else self._first(lambda: self._run(values))
                return moments[0], moments[1], isfinite(total.item())
            for static, value in zip(self._inputs, values, strict=True):
                static.copy_(value)
            if self._graph is None:
                self._graph = self._first(self._captured)
            self._graph.replay()
            mean, variance = self._moments.clone()
            torch.cuda.current_stream(self._device).synchronize()  # the one wait of a prediction
            return mean, variance, isfinite(self._total.item())

    def _first(self, run: Callable[[], _Result]) -> _Result:
        """The first run, in which both parts are compiled."""
        try:
            found = run()
        except Exception as error:
            if out_of_memory(error):
                raise
            refuse(f"what cannot be compiled ({first_line(error)})", error)
        self._compiled = True
        return found

    def _set_rates(self, wanted: list[float]) -> None:
        if wanted != self._wanted:
            limits = np.array([threshold(rate) - 2**31 for rate in wanted], np.int32)
            self._limits.copy_(torch.from_numpy(limits))
            self._scales.copy_(torch.tensor([1 / (1 - rate) for rate in wanted], dtype=torch.float64))
            self._wanted = wanted

    def _captured(self) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(2):  # kernels are chosen and compiled outside of the capture
                self._run(self._inputs)
        torch.cuda.current_stream(self._device).wait_stream(side)
        self._total = torch.zeros((), dtype=torch.float64, pin_memory=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # others may work on the device meanwhile
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

    def _keys(self, places: Sequence[MaskPlace], seed: int) -> list[tuple[list[Tensor], Tensor, int]]:
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


class _Compiled:
    """A graph that is compiled when it first runs, as a function of the weights too: torch's cache serves any."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self._graph, self._held = graph, lifted(graph)
        self._run: Callable[..., Any] | None = None

    def __call__(self, *values: Tensor) -> Any:
        if self._run is None:
            self._run = compiled(self._graph, [*self._held, *values])
        return self._run(*self._held, *values)

"""What is run again and again on inputs of one shape: compiled once, on a CUDA device replayed as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import isfinite
from threading import Lock
from typing import Any, TypeAlias, TypeVar
from warnings import warn

import torch
from torch import Tensor, fx

from latedrop.errors import ArgumentError, LatedropWarning
from latedrop.torch_inside import compiled
from latedrop.variance.engine.refusing import refuse
from latedrop.variance.engine.tracing import first_line, lifted
from latedrop.variance.moments import out_of_memory

__all__ = ["Compiled", "Compiler", "Replay"]

Compiler: TypeAlias = "Callable[[fx.GraphModule], Any]"
Run: TypeAlias = "Callable[[Sequence[Tensor]], tuple[Sequence[Tensor], Tensor]]"
"""From inputs to results, and a number that is finite where all is well."""
_Result = TypeVar("_Result")
_LONG = 5000  # operators; 6252 of an LSTM of two layers and 96 steps took 140 s on a CPU


class Replay:
    """A function of tensors of one shape each. Whoever calls it while it runs waits for his turn.

    Args:
        run: compiled when it first runs.
        inputs: examples, all on one device.
    """

    def __init__(self, run: Run, inputs: Sequence[Tensor]) -> None:
        self._run, self._device = run, inputs[0].device
        self._inputs = [value.clone() for value in inputs] if self._device.type == "cuda" else []
        self._graph: torch.cuda.CUDAGraph | None = None
        self._results: Sequence[Tensor] = ()
        self._total = torch.empty(0)
        self._compiled = False
        self._turn = Lock()

    def __call__(
        self, inputs: Sequence[Tensor], prepare: Callable[[], Any] = lambda: None
    ) -> tuple[list[Tensor], bool]:
        """The results, and whether that number is finite; `prepare` is done in turn, before the run."""
        with self._turn, torch.no_grad(), self._as_traced():
            prepare()
            if self._device.type != "cuda":
                results, total = self._run(inputs) if self._compiled else self._first(lambda: self._run(inputs))
                return list(results), isfinite(total.item())
            for static, value in zip(self._inputs, inputs, strict=True):
                static.copy_(value)
            if self._graph is None:
                self._graph = self._first(self._captured)
            self._graph.replay()
            results = [result.clone() for result in self._results]
            torch.cuda.current_stream(self._device).synchronize()  # the one wait of a prediction
            return results, isfinite(self._total.item())

    def _as_traced(self) -> AbstractContextManager[Any]:
        """What autocast does is in the graph: it must not be done once more."""
        kind = self._device.type
        return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()

    def _first(self, run: Callable[[], _Result]) -> _Result:
        """The first run, in which all is compiled."""
        try:
            found = run()
        except Exception as error:
            if out_of_memory(error):
                raise
            if "C++ compiler" in str(error):
                raise ArgumentError(
                    "expected a C++ compiler for engine='compiled' on a CPU; found none that works "
                    f"({first_line(error)}). Install one, such as g++, or use engine='auto'."
                ) from error
            refuse(f"what cannot be compiled ({first_line(error)})", error)
        self._compiled = True
        return found

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
            self._results, total = self._run(self._inputs)
            self._total.copy_(total, non_blocking=True)
        return graph


class Compiled:
    """A graph that is compiled when it first runs, as a function of the weights too: torch's cache serves any."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self._graph, self._held = graph, lifted(graph)
        self._run: Callable[..., Any] | None = None

    def __call__(self, *values: Tensor) -> Any:
        """What the graph gives."""
        if self._run is None:
            self._warn_of_length()
            self._run = compiled(self._graph, [*self._held, *values])
        return self._run(*self._held, *values)

    def _warn_of_length(self) -> None:
        operators = sum(node.op == "call_function" for node in self._graph.graph.nodes)
        if operators > _LONG:
            warn(
                f"a program of {operators} operators takes minutes to compile, unless torch has kept it from before: "
                "every step of a recurrent layer is a part of it. Use engine='auto', or set TORCHINDUCTOR_CACHE_DIR "
                "to a folder that stays.",
                LatedropWarning,
                stacklevel=2,
            )

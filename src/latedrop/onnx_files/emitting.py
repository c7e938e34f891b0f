"""Operators of ONNX, one after the other, and what their inputs are called.

Sizes that depend on the rows are computed in the graph from the first input's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx

from latedrop.onnx_files.tracing import Affine, Graph, Size, name_of, refuse

__all__ = ["OPSET", "RULES", "Emitter", "Value", "rule"]

OPSET = 18
_LARGE = 1024  # numbers of a mask that is worth a byte for each instead of four

TYPES = {
    torch.float32: 1,
    torch.uint8: 2,
    torch.int8: 3,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 9,
    torch.float64: 11,
}
"""Of the elements, as ONNX numbers them."""


class Value(NamedTuple):
    """A tensor of the graph: its name, its shape and the type of its elements."""

    name: str
    shape: tuple[Size, ...]
    dtype: torch.dtype


Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}
"""From an operator of torch, with or without its variant, to a function `(emitter, result, *args, **kwargs)`.

`result` is a `Value` without a name: what will come out, or a list of them. The rule gives its name, or their names.
"""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


class Emitter:
    """Turns a traced graph into nodes and constants of ONNX.

    Attributes:
        nodes: `(operator, inputs, outputs, attributes)`.
        constants: by name.
    """

    def __init__(self, graph: Graph, inputs: Sequence[str]) -> None:
        self.nodes: list[tuple[str, list[str], list[str], dict[str, Any]]] = []
        self.constants: dict[str, np.ndarray] = {}
        self._known: dict[Any, str] = {}
        self._held: list[Tensor] = []
        self._count = 0
        self._values: dict[fx.Node, Any] = {}
        self._rows: str | None = None
        self._first = inputs[0]
        for node, name in zip(graph.inputs, inputs, strict=True):
            self._values[node] = Value(name, graph.shapes[node], _dtype(node))
        for node, tensor in graph.constants.items():
            self._values[node] = self.weight(tensor)
        for node in graph.nodes:
            self._emit(graph, node)
        self.results = [self._values[node] for node in graph.results]

    def _emit(self, graph: Graph, node: fx.Node) -> None:
        kind = name_of(node)
        if kind == "<built-in function getitem>":
            source, index = graph.arguments[node][0]
            self._values[node] = self._values[source][index]
            return
        found = RULES.get(kind) or RULES.get(kind.rpartition(".")[0])
        if found is None:
            refuse(f"with the operator {kind}, for which there is no rule")
        args, kwargs = (_filled(part, self._values) for part in graph.arguments[node])
        result = _results(graph.shapes[node], node.meta.get("val"))
        given = found(self, result, *args, **kwargs)
        if isinstance(given, str):
            self._values[node] = result._replace(name=given)
        else:
            self._values[node] = [
                None if name is None else value._replace(name=name) for value, name in zip(result, given, strict=True)
            ]

    def op(self, kind: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
        """Add a node; the name of what it gives, or the names of several."""
        names = [self._new() for _ in range(outputs)]
        sources = [source if isinstance(source, str) else source.name for source in inputs]
        self.nodes.append((kind, sources, names, attributes))
        return names[0] if outputs == 1 else names

    def constant(self, value: Any, dtype: Any = np.int64) -> str:
        """The name of a small constant."""
        array = np.asarray(value, dtype)
        key = array.tobytes(), array.shape, array.dtype.str
        if key not in self._known:
            self._known[key] = self._new("c")
            self.constants[self._known[key]] = array
        return self._known[key]

    def weight(self, tensor: Tensor) -> Value:
        """A constant tensor; a mask of 0 and one other number takes a byte for each."""
        if tensor.dtype not in TYPES:
            refuse(f"with numbers of type {tensor.dtype}")
        key = tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
        if key not in self._known:
            self._held.append(tensor)  # that nothing else comes to lie there
            tensor = tensor.detach().cpu()
            self._known[key] = self._mask(tensor) or self._whole(tensor)
        return Value(self._known[key], tuple(tensor.shape), tensor.dtype)

    def _whole(self, tensor: Tensor) -> str:
        name = self._new("w")
        self.constants[name] = tensor.contiguous().numpy()
        return name

    def _mask(self, tensor: Tensor) -> str | None:
        if tensor.numel() < _LARGE or not tensor.is_floating_point():
            return None
        most = tensor.max()
        keep = tensor == most
        if not bool(((tensor == 0) | keep).all()) or not float(most) > 0:
            return None
        bits = self._whole(keep.to(torch.uint8))
        return self.times(self.cast(bits, tensor.dtype), self.number(float(most), tensor.dtype))

    def _new(self, kind: str = "v") -> str:
        self._count += 1
        return f"/{kind}/{self._count}"  # which no argument of a function is called

    def number(self, value: Any, dtype: torch.dtype) -> str:
        """A scalar, of whatever type; an `Affine` one is computed."""
        if isinstance(value, Affine):
            return self.cast(self.op("Squeeze", self.size(value)), dtype)
        return self.constant(torch.tensor(value, dtype=dtype).numpy(), None)

    def cast(self, value: Any, dtype: torch.dtype) -> str:
        """In another type, where it is not of it."""
        if isinstance(value, Value) and value.dtype == dtype:
            return value.name
        if dtype not in TYPES:
            refuse(f"with numbers of type {dtype}")
        return self.op("Cast", value, to=TYPES[dtype])  # type: ignore[no-any-return]

    def operand(self, value: Any, dtype: torch.dtype) -> str:
        """A tensor or a number, as an input of that type."""
        return self.cast(value, dtype) if isinstance(value, Value) else self.number(value, dtype)

    def times(self, a: Any, b: Any) -> str:
        """The product."""
        return self.op("Mul", a, b)  # type: ignore[no-any-return]

    def size(self, value: Size) -> str:
        """A size as a vector of one number."""
        if not isinstance(value, Affine):
            return self.constant([value])
        if self._rows is None:
            self._rows = self.op("Shape", self._first, start=0, end=1)
        found = self._rows if value.times == 1 else self.times(self._rows, self.constant([value.times]))
        return found if value.plus == 0 else self.op("Add", found, self.constant([value.plus]))

    def shape(self, sizes: Sequence[Size]) -> str:
        """A shape as a vector."""
        if not any(isinstance(size, Affine) for size in sizes):
            return self.constant(list(sizes))
        return self.op("Concat", *(self.size(size) for size in sizes), axis=0)  # type: ignore[no-any-return]

    def reshape(self, value: Any, sizes: Sequence[Size]) -> str:
        """In another shape; a single size that depends on the rows is left to be found."""
        unknown = [i for i, size in enumerate(sizes) if isinstance(size, Affine)]
        if len(unknown) == 1:
            sizes = [-1 if i == unknown[0] else size for i, size in enumerate(sizes)]
        return self.op("Reshape", value, self.shape(sizes))  # type: ignore[no-any-return]


def _filled(argument: Any, values: dict[fx.Node, Any]) -> Any:
    if isinstance(argument, fx.Node):
        return values[argument]
    if isinstance(argument, dict):
        return {name: _filled(value, values) for name, value in argument.items()}
    return [_filled(item, values) for item in argument] if isinstance(argument, list) else argument


def _results(shape: Any, value: Any) -> Any:
    if isinstance(value, Tensor):
        return Value("", shape, value.dtype)
    return [None if v is None else Value("", s, v.dtype) for s, v in zip(shape, value, strict=True)]


def _dtype(node: fx.Node) -> torch.dtype:
    found: torch.dtype = node.meta["val"].dtype
    return found

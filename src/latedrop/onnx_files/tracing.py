"""Trace a function of a batch as one graph of plain operators, for any number of rows.

The function is traced at two numbers of rows. Both graphs are the same but for some whole numbers: where these are `a`
and `b` at `n` and `m` rows, they stand for `times · rows + plus`, with `times = (b - a) / (m - n)`. So no operator and
no line of Python has to know of unknown sizes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from latedrop.errors import LatedropError
from latedrop.onnx_files.derivatives import decompositions, refuse
from latedrop.torch_private import plain_kernels, traced

__all__ = ["refuse", "traced_for_any_rows"]

_ROWS = (3, 5)
_OTHERWISE = "that does other operations for other numbers of rows"
_LARGE = 1024  # numbers of a mask that is worth a byte for each instead of four


def traced_for_any_rows(
    function: Callable[..., Sequence[Tensor]], rows: Callable[[int], list[Tensor]]
) -> fx.GraphModule:
    """Trace `function` of tensors, which may differentiate; `rows(n)` gives inputs of n rows."""
    first, second = (_traced(function, rows(count)) for count in _ROWS)
    both = [[node for node in module.graph.nodes if node.op != "get_attr"] for module in (first, second)]
    kinds = [[(node.op, node.op == "call_function" and node.target) for node in nodes] for nodes in both]
    if kinds[0] != kinds[1]:
        refuse(_OTHERWISE)
    return _Merge(first, second, dict(zip(*both, strict=True))).module()


class _Merge:
    """Writes what a second trace tells into the first, in which sizes are then computed from the rows of an input."""

    def __init__(self, first: fx.GraphModule, second: fx.GraphModule, pairs: dict[fx.Node, fx.Node]) -> None:
        self._traces, self._graph, self._pairs = (first, second), first.graph, pairs
        self._start = next(node for node in self._graph.nodes if node.op != "placeholder")
        inputs = ((a, b) for a, b in pairs.items() if a.op == "placeholder")
        grows = next(a for a, b in inputs if a.meta["val"].shape != b.meta["val"].shape)
        with self._graph.inserting_before(self._start):
            self._rows = self._graph.call_function(torch.ops.aten.sym_size.int, (grows, 0))
        self._constants: dict[fx.Node, fx.Node] = {}

    def module(self) -> fx.GraphModule:
        for a, b in self._pairs.items():
            if a.target is torch.ops.aten.view.default:
                a.target = torch.ops.aten.reshape.default
            a.args, a.kwargs = tuple(self._merged(a.args, b.args)), self._merged(a.kwargs, b.kwargs)
        self._traces[0].recompile()
        return self._traces[0]

    def _merged(self, a: Any, b: Any) -> Any:
        """Return one argument from those of two traces."""
        if isinstance(a, fx.Node):
            if a.op == "get_attr":
                return self._constant(a, b)
            return a if self._pairs.get(a) is b else refuse(_OTHERWISE)
        if isinstance(a, dict):
            return {name: self._merged(value, b[name]) for name, value in a.items()}
        if isinstance(a, (tuple, list)):
            return [self._merged(x, y) for x, y in zip(a, b, strict=True)]
        if type(a) is int and type(b) is int and a != b:
            return self._size(a, b)
        return a if a == b or a is b else refuse("whose numbers depend on how many rows there are")

    def _size(self, a: int, b: int) -> fx.Node:
        """Return the node of a size that is `a` and `b` at the two numbers of rows."""
        times, rest = divmod(b - a, _ROWS[1] - _ROWS[0])
        if rest:
            refuse("whose sizes grow unevenly with the rows")
        with self._graph.inserting_before(self._start):
            grown = self._graph.call_function(operator.mul, (self._rows, times))
            return self._graph.call_function(operator.add, (grown, a - times * _ROWS[0]))

    def _constant(self, a: fx.Node, b: Any) -> fx.Node:
        """Return the node of a constant, whose name may differ between the traces."""
        if not isinstance(b, fx.Node) or b.op != "get_attr":
            refuse(_OTHERWISE)
        if a not in self._constants:
            value, other = (getattr(trace, str(node.target)) for trace, node in zip(self._traces, (a, b), strict=True))
            if value.shape != other.shape or not torch.equal(value, other):
                refuse("with a tensor that it makes from the number of rows, which cannot be written down")
            self._constants[a] = self._as_bytes(a, value)
        return self._constants[a]

    def _as_bytes(self, node: fx.Node, value: Tensor) -> fx.Node:
        """Store a mask of 0 and one other number as bytes; return the node of any other constant as it is."""
        if value.numel() < _LARGE or not value.is_floating_point():
            return node
        scale = float(value.max())
        keep = value == scale
        if not scale > 0 or not bool(((value == 0) | keep).all()):
            return node
        self._traces[0].register_buffer(f"mask_{node.name}", keep.to(torch.uint8))
        with self._graph.inserting_after(node):
            bits = self._graph.get_attr(f"mask_{node.name}")
        with self._graph.inserting_after(bits):
            wide = self._graph.call_function(torch.ops.aten._to_copy.default, (bits,), {"dtype": value.dtype})
        with self._graph.inserting_after(wide):
            return self._graph.call_function(torch.ops.aten.mul.Tensor, (wide, scale))


def _traced(function: Callable[..., Sequence[Tensor]], inputs: list[Tensor]) -> fx.GraphModule:
    try:
        with sdpa_kernel(SDPBackend.MATH), plain_kernels():  # attention by plain operators, too
            module = traced(function, inputs, decompositions())
    except LatedropError:
        raise
    except Exception as error:  # the model runs; what it does cannot be written down
        if "_local_scalar_dense" in str(error):
            refuse("whose Python code decides by values of its tensors (_local_scalar_dense)", error)
        refuse(f"that cannot be traced ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})", error)
    module.graph.eliminate_dead_code()
    return module

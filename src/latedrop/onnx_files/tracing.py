"""Trace a function of a batch as one graph of plain operators, for any number of rows.

The function is traced at two numbers of rows. Both graphs are the same but for some whole numbers: where these are `a`
and `b` at `n` and `m` rows, they stand for `times · rows + plus`, with `times = (b - a) / (m - n)`. So no operator and
no line of Python has to know of unknown sizes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from latedrop.errors import LatedropError
from latedrop.onnx_files.derivatives import decompositions, refuse
from latedrop.torch_private import plain_kernels, traced

__all__ = ["refuse", "traced_for_any_rows"]

_ROWS = (3, 5)
_OTHERWISE = "that does other operations for other numbers of rows"
_LARGE = 1024  # numbers of a mask that is worth a byte for each instead of four


class _Affine(NamedTuple):
    """`times · rows + plus`."""

    times: int
    plus: int


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
    """Merges two traces into one graph, in which sizes are computed from the rows of an input."""

    def __init__(self, first: fx.GraphModule, second: fx.GraphModule, pairs: dict[fx.Node, fx.Node]) -> None:
        self._traces, self._pairs = (first, second), pairs
        self._root, self._graph = nn.Module(), fx.Graph()
        self._nodes: dict[fx.Node, fx.Node] = {}
        self._sizes: dict[_Affine, fx.Node] = {}
        self._places: dict[Any, str] = {}

    def module(self) -> fx.GraphModule:
        for a, b in self._pairs.items():
            if a.op == "placeholder":
                self._nodes[a] = self._graph.placeholder(a.name)
            elif a.op == "output":
                self._graph.output(tuple(self._merged(a.args[0], b.args[0])))
            else:
                target: Any = torch.ops.aten.reshape.default if a.target is torch.ops.aten.view.default else a.target
                args, kwargs = self._merged(a.args, b.args), self._merged(a.kwargs, b.kwargs)
                self._nodes[a] = self._graph.call_function(target, tuple(args), kwargs)
        return fx.GraphModule(self._root, self._graph)

    def _merged(self, a: Any, b: Any) -> Any:
        """Return one argument from those of two traces."""
        if isinstance(a, fx.Node):
            if a.op == "get_attr":
                return self._constant(a, b)
            return self._nodes[a] if self._pairs.get(a) is b else refuse(_OTHERWISE)
        if isinstance(a, dict):
            return {name: self._merged(value, b[name]) for name, value in a.items()}
        if isinstance(a, (tuple, list)):
            return [self._merged(x, y) for x, y in zip(a, b, strict=True)]
        if type(a) is int and type(b) is int and a != b:
            return self._size(_affine(a, b))
        return a if a == b or a is b else refuse("whose numbers depend on how many rows there are")

    def _size(self, size: _Affine) -> fx.Node:
        if size not in self._sizes:
            whole = _Affine(1, 0)
            if size == whole:
                inputs = ((a, b) for a, b in self._pairs.items() if a.op == "placeholder")
                first = next(self._nodes[a] for a, b in inputs if a.meta["val"].shape != b.meta["val"].shape)
                value = self._graph.call_function(torch.ops.aten.sym_size.int, (first, 0))
            else:
                value = self._graph.call_function(operator.mul, (self._size(whole), size.times))
                value = self._graph.call_function(operator.add, (value, size.plus))
            self._sizes[size] = value
        return self._sizes[size]

    def _constant(self, a: fx.Node, b: Any) -> fx.Node:
        """Return the node of a constant, whose name may differ between the traces."""
        if not isinstance(b, fx.Node) or b.op != "get_attr":
            refuse(_OTHERWISE)
        if a not in self._nodes:
            value, other = (getattr(trace, str(node.target)) for trace, node in zip(self._traces, (a, b), strict=True))
            if value.shape != other.shape or not torch.equal(value, other):
                refuse("with a tensor that it makes from the number of rows, which cannot be written down")
            self._nodes[a] = self._mask(value) or self._buffer(value)
        return self._nodes[a]

    def _buffer(self, value: Tensor) -> fx.Node:
        place = value.data_ptr(), value.shape, value.stride(), value.dtype, value.device
        if place not in self._places:
            self._places[place] = f"constant_{len(self._places)}"
            self._root.register_buffer(self._places[place], value.detach())
        return self._graph.get_attr(self._places[place])

    def _mask(self, value: Tensor) -> fx.Node | None:
        """Store a mask of 0 and one other number as bytes."""
        if value.numel() < _LARGE or not value.is_floating_point():
            return None
        scale = float(value.max())
        keep = value == scale
        if not scale > 0 or not bool(((value == 0) | keep).all()):
            return None
        bits = self._buffer(keep.to(torch.uint8))
        wide = self._graph.call_function(torch.ops.aten._to_copy.default, (bits,), {"dtype": value.dtype})
        return self._graph.call_function(torch.ops.aten.mul.Tensor, (wide, scale))


def _affine(a: int, b: int) -> _Affine:
    """Return the size that is `a` and `b` at the two numbers of rows."""
    times, rest = divmod(b - a, _ROWS[1] - _ROWS[0])
    return _Affine(times, a - times * _ROWS[0]) if rest == 0 else refuse("whose sizes grow unevenly with the rows")


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

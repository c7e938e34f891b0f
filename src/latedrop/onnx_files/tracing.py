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
_SAME = ("alias", "clone", "detach", "lift_fresh", "lift_fresh_copy", "view_as", "contiguous", "positive")
"""Operators that return their argument."""
_VIEWS = ("permute", "transpose", "t")
"""Of weights these stay in the graph: a second copy of the weights would only make the file larger."""
_GROWING = ("expand", "repeat")
"""Operators that may make as many rows of a constant as there are."""
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
            value, other = (_value(module, node) for module, node in zip(self._traces, (a, b), strict=True))
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
    _tidy(module)
    return module


def _tidy(module: fx.GraphModule) -> None:
    """Remove copies and unused nodes, merge equal operations and compute constants."""
    graph = module.graph
    graph.eliminate_dead_code()
    known: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        source = _source(node)
        if source is None:
            key = repr((node.target, node.args, node.kwargs))
            if key not in known:
                known[key] = _folded(module, node)
            source = known[key]
        if source is not node:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _kind(target: Any) -> str:
    """Return an operator's name without its variant, such as `add`."""
    return str(target).removeprefix("aten.").partition(".")[0]


def _source(node: fx.Node) -> fx.Node | None:
    """Return the node whose value a node repeats."""
    kind = _kind(node.target)
    if kind in _SAME and isinstance(node.args[0], fx.Node):
        return node.args[0]
    if kind == "slice" and isinstance(node.args[0], fx.Node) and _meta(node.args[0]) == _meta(node):
        return node.args[0]  # of all that there is
    if kind == "mul":  # masks of ones, whose gradients alone were asked for
        for value, ones in (node.args[:2], node.args[1::-1]):
            unit = isinstance(ones, fx.Node) and _kind(ones.target) == "full" and ones.args[1] in (1, 1.0)
            if unit and isinstance(value, fx.Node) and _meta(value) == _meta(node):
                return value
    return None


def _meta(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return (value.shape, value.dtype) if isinstance(value, Tensor) else None


def _folded(module: fx.GraphModule, node: fx.Node) -> fx.Node:
    """Replace an operation on constants by its result; return any other node as it is."""
    kind, value = _kind(node.target), node.meta.get("val")
    if not node.all_input_nodes or not isinstance(value, Tensor) or kind in (*_VIEWS, *_GROWING) or not _is_fixed(node):
        return node
    name = f"_folded_{node.name}"
    module.register_buffer(name, _value(module, node).detach())
    with module.graph.inserting_before(node):
        constant = module.graph.get_attr(name)
    constant.meta["val"] = value
    return constant


def _is_fixed(node: fx.Node) -> bool:
    """Return True if a node computes from constants alone, which are nodes themselves, or views of one."""
    return all(
        source.op == "get_attr" or (_kind(source.target) in _VIEWS and _is_fixed(source))
        for source in node.all_input_nodes
    )


def _value(module: fx.GraphModule, node: fx.Node) -> Tensor:
    """Return the value of a constant, or of an operation on constants."""
    if node.op == "get_attr":
        constant: Tensor = getattr(module, str(node.target))
        return constant
    args = fx.map_arg((node.args, node.kwargs), lambda source: _value(module, source))
    return node.target(*args[0], **args[1])  # type: ignore[operator,no-any-return]

"""A function of a batch as one graph of plain operators, for any number of rows.

The function is traced at two numbers of rows. Both graphs are the same but for some whole numbers: where these are `a`
and `b` at `n` and `m` rows, they stand for `times · rows + plus`, with `times = (b - a) / (m - n)`. So no operator and
no line of Python has to know of unknown sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from latedrop.errors import ArgumentError, LatedropError
from latedrop.torch_private import plain_kernels, traced

__all__ = ["Affine", "Graph", "Size", "graph_of", "name_of", "refuse"]

SIZES = (3, 5)
_SAME = ("alias", "clone", "detach", "lift_fresh", "lift_fresh_copy", "view_as", "contiguous", "positive")
"""Operators that give what they are given."""
_VIEWS = ("permute", "transpose", "t")
"""Of weights they are left to whoever runs the file: a second copy would only make it larger."""
_OTHERWISE = "that does other operations for other numbers of rows"
_GROWING = ("expand", "repeat")
"""Operators that may make as many rows of a constant as there are."""


class Affine(NamedTuple):
    """`times · rows + plus`."""

    times: int
    plus: int


Size = int | Affine


class Graph(NamedTuple):
    """What was traced.

    Attributes:
        nodes: in order, without the inputs' and the output's.
        inputs: the nodes of the inputs.
        results: the nodes of what comes out.
        arguments: of each node, with `Affine` for what depends on the rows.
        shapes: of what each node gives, likewise; of several results, one after the other.
        constants: the tensors of nodes that have one.
    """

    nodes: list[fx.Node]
    inputs: list[fx.Node]
    results: list[Any]
    arguments: dict[fx.Node, tuple[Any, dict[str, Any]]]
    shapes: dict[fx.Node, Any]
    constants: dict[fx.Node, Tensor]


def graph_of(function: Callable[..., Sequence[Tensor]], rows: Callable[[int], list[Tensor]]) -> Graph:
    """Trace `function` of tensors; `rows(n)` gives inputs of n rows."""
    first, second = (_traced(function, rows(count)) for count in SIZES)
    both = [[node for node in module.graph.nodes if node.op != "get_attr"] for module in (first, second)]
    if [(n.op, n.op == "call_function" and n.target) for n in both[0]] != [
        (n.op, n.op == "call_function" and n.target) for n in both[1]
    ]:
        refuse(_OTHERWISE)
    twins = _Twins(first, second, dict(zip(*both, strict=True)))
    nodes, inputs, results = [], [], []
    arguments, shapes = {}, {}
    for a, b in twins.pairs.items():
        shapes[a] = _shape(a.meta.get("val"), b.meta.get("val"))
        if a.op == "placeholder":
            inputs.append(a)
        elif a.op == "output":
            results = list(twins.merged(a.args[0], b.args[0]))
        else:
            arguments[a] = twins.merged(a.args, b.args), twins.merged(a.kwargs, b.kwargs)
            nodes.append(a)
    return Graph(nodes, inputs, results, arguments, shapes, twins.constants)


class _Twins:
    """Which nodes of two traces are the same; constants may stand in another order."""

    def __init__(self, first: fx.GraphModule, second: fx.GraphModule, pairs: dict[fx.Node, fx.Node]) -> None:
        self._traces, self.pairs = (first, second), pairs
        self.constants: dict[fx.Node, Tensor] = {}

    def merged(self, a: Any, b: Any) -> Any:
        """One argument from those of two traces."""
        if isinstance(a, fx.Node):
            same = self._same_constant(a, b) if a.op == "get_attr" else self.pairs.get(a) is b
            return a if same else refuse(_OTHERWISE)
        if isinstance(a, dict):
            return {name: self.merged(value, b[name]) for name, value in a.items()}
        if isinstance(a, (tuple, list)):
            return [self.merged(x, y) for x, y in zip(a, b, strict=True)]
        if type(a) is int and type(b) is int:
            return _affine(a, b)
        return a if a == b or a is b else refuse("whose numbers depend on how many rows there are")

    def _same_constant(self, a: fx.Node, b: Any) -> bool:
        if not isinstance(b, fx.Node) or b.op != "get_attr":
            return False
        if a not in self.constants:
            ours, theirs = (_value(module, node) for module, node in zip(self._traces, (a, b), strict=True))
            if ours.shape != theirs.shape or not torch.equal(ours, theirs):
                refuse("with a tensor that it makes from the number of rows, which cannot be written down")
            self.constants[a] = ours
        return True


def name_of(node: fx.Node) -> str:
    """The operator's name with its variant, as `add.Tensor`."""
    return str(node.target).removeprefix("aten.")


def refuse(found: str, error: Exception | None = None) -> NoReturn:
    """Say why there is no file of a model."""
    raise ArgumentError(
        f"expected a model that can be written as an ONNX file; found one {found}. Deploy it with torch: save the "
        "calibration, and load both there."
    ) from error


def _traced(function: Callable[..., Sequence[Tensor]], inputs: list[Tensor]) -> fx.GraphModule:
    try:
        with sdpa_kernel(SDPBackend.MATH), plain_kernels():  # attention by plain operators, too
            graph = traced(function, inputs, _few_kinds())
    except LatedropError:
        raise
    except Exception as error:  # the model runs; what it does cannot be written down
        if "_local_scalar_dense" in str(error):
            refuse("whose Python code decides by values of its tensors (_local_scalar_dense)", error)
        refuse(f"that cannot be traced ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})", error)
    _tidy(graph)
    return graph


@cache
def _few_kinds() -> dict[Any, Any]:
    """How torch says most of its operators, and all derivatives, by others."""
    return {**torch.export.default_decompositions()}


def _tidy(module: fx.GraphModule) -> None:
    """Without copies, without what is not used, with equal operations once and constants computed."""
    graph = module.graph
    graph.eliminate_dead_code()
    known: dict[Any, fx.Node] = {}
    fixed: dict[fx.Node, Tensor | None] = {}
    for node in list(graph.nodes):
        if node.op == "get_attr":
            value = getattr(module, str(node.target))
            fixed[node] = value if isinstance(value, Tensor) else None
        if node.op != "call_function":
            continue
        source = _source(node)
        if source is None:
            key = (node.target, fx.immutable_collections.immutable_list(node.args), repr(node.kwargs))
            source = known.setdefault(repr(key), node)
            if source is node:
                known[repr(key)] = source = _folded(module, node, fixed)
        if source is not node:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _source(node: fx.Node) -> fx.Node | None:
    """What a node is the same as."""
    kind = name_of(node).partition(".")[0]
    if kind in _SAME and isinstance(node.args[0], fx.Node):
        return node.args[0]
    if kind == "mul":  # masks of ones, whose gradients alone were asked for
        for value, ones in (node.args[:2], node.args[1::-1]):
            unit = isinstance(ones, fx.Node) and name_of(ones) == "full.default" and ones.args[1] in (1, 1.0)
            if unit and isinstance(value, fx.Node) and _meta(value) == _meta(node):
                return value
    return None


def _meta(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return (value.shape, value.dtype) if isinstance(value, Tensor) else None


def _folded(module: fx.GraphModule, node: fx.Node, fixed: dict[fx.Node, Tensor | None]) -> fx.Node:
    """What stands for a node: of constants alone, one that is computed now; else itself."""
    sources = node.all_input_nodes
    value = node.meta.get("val")
    if not sources or not all(source in fixed for source in sources) or not isinstance(value, Tensor):
        return node
    kind = name_of(node).partition(".")[0]
    if kind in _GROWING:
        return node
    if kind in _VIEWS and len(sources) == 1:
        fixed[node] = None
        return node
    values = {source: _value(module, source) for source in sources}
    found = node.target(*fx.map_arg(node.args, values.get), **fx.map_arg(node.kwargs, values.get))  # type: ignore[operator]
    name = f"_folded_{node.name}"
    module.register_buffer(name, found.detach())
    with module.graph.inserting_before(node):
        made = module.graph.get_attr(name)
    made.meta["val"] = value
    fixed[made] = found
    return made


def _value(module: fx.GraphModule, node: fx.Node) -> Tensor:
    """Of a constant, or of views of one."""
    if node.op == "get_attr":
        found: Tensor = getattr(module, str(node.target))
        return found
    args = fx.map_arg(node.args, lambda source: _value(module, source))
    kwargs = fx.map_arg(node.kwargs, lambda source: _value(module, source))
    return node.target(*args, **kwargs)  # type: ignore[operator,no-any-return]


def _affine(a: int, b: int) -> Size:
    if a == b:
        return a
    times, rest = divmod(b - a, SIZES[1] - SIZES[0])
    return Affine(times, a - times * SIZES[0]) if rest == 0 else refuse("whose sizes grow unevenly with the rows")


def _shape(a: Any, b: Any) -> Any:
    if isinstance(a, Tensor):
        return tuple(_affine(x, y) for x, y in zip(a.shape, b.shape, strict=True))
    return [_shape(x, y) for x, y in zip(a, b, strict=True)] if isinstance(a, (tuple, list)) else None

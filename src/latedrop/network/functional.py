"""Weights without a module: calls of torch functions in which an activation meets a parameter.

`F.linear(h, w)`, `h @ w`, a convolution or an einsum does what a weight layer does, wherever it is called. A mode sees
every torch function of a forward pass and follows what is computed from parameters and constants alone. Such a tensor
is *fixed*. A call in which a fixed tensor that comes from a parameter meets one that is not fixed is a *weight call*,
named after the parameter:

    F.linear(h, model.w)            "w"
    h @ model.stack[3].T            "stack[3]", as it starts at that index
    F.linear(h, g * v / v.norm())   "g", the first of the parameters that the weight is computed from
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from latedrop.data.rows import operands, tensors
from latedrop.torch_private import operator_of, plain_names

__all__ = ["RECURRENT", "Place", "WeightCall", "WeightCalls", "named_weights", "operator_name", "replaced"]

Place: TypeAlias = "tuple[int | str, ...]"
"""Where an argument stands: its position or keyword, then its index where it is in a list."""
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
"""Functions that run a recurrent layer over a sequence."""


class WeightCall(NamedTuple):
    """One call of a torch function that brings activations and a weight together."""

    name: str  # of the weight: the parameter's, and where in it the weight starts
    weight: str  # the parameter's name
    layer: str  # the function's name
    inputs: dict[Place, Tensor]  # the activations
    channels: tuple[int, ...]  # the axes of an activation, from the end, that are summed over


class WeightCalls(TorchFunctionMode):
    """Follows one forward pass of a private copy, and reports every weight call that is not made by a weight layer.

    Args:
        model: the copy, whose parameters are the weights.
        before: takes a weight call, and returns new activations by place.
        after: takes what depends on a weight, the result of a weight call or of a lookup in a table, and returns what
            the model gets instead.
    """

    def __init__(
        self,
        model: nn.Module,
        before: Callable[[WeightCall], Mapping[Place, Any]],
        after: Callable[[Any], Any] = lambda result: result,
    ) -> None:
        super().__init__()
        self.before, self.after = before, after
        self.inside = 0  # so many weight layers run now, one inside the other; what they call is not followed
        self._fixed = _fixed_tensors(model)

    def __exit__(self, *error: Any) -> None:
        """Stop, and let go of all tensors that were followed."""
        super().__exit__(*error)
        self._fixed = {}

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Let a weight layer run inside: what it calls is no weight call, as the layer is a site of its own."""
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handle calls of functions that use weights; see `TorchFunctionMode`."""
        kwargs = kwargs or {}
        if self.inside:
            return func(*args, **kwargs)
        name, rule, writes = _facts(func)
        writes = writes or kwargs.get("out") is not None
        met = None if rule is None else self._met(name.removesuffix("_"), rule, args, kwargs)
        if met is None:
            result = func(*args, **kwargs)
            followed = writes or isinstance(result, (Tensor, tuple, list))
            return self._follow(name, args, kwargs, result, writes) if followed else result
        args, kwargs = replaced(args, kwargs, self.before(met))
        result = func(*args, **kwargs)
        if writes:
            self._release(args, kwargs)
        return self.after(result)

    def _met(self, layer: str, rule: _Rule, args: Any, kwargs: Any) -> WeightCall | None:
        roles = rule(layer, args, kwargs, self._is_fixed)
        if roles is None:
            return None
        values, weights, channels = roles
        source = next(filter(None, map(self._source, weights)), None)
        inputs = {place: v for place, v in values.items() if isinstance(v, Tensor) and v.is_floating_point()}
        if source is None or not inputs or not channels:
            return None
        return WeightCall(source.name, source.weight, layer, inputs, channels)

    def _is_fixed(self, value: Tensor) -> bool:
        return _address(value) in self._fixed

    def _source(self, value: Tensor) -> _Stretch | None:
        """Return the weight that a tensor is or is cut from; None for activations and constants."""
        _, weights = self._fixed.get(_address(value), (None, ()))
        if not weights:
            return None
        offset = int(value.storage_offset())
        return next((weight.at(offset) for weight in weights if weight.start <= offset < weight.end), None)

    def _follow(self, name: str, args: Any, kwargs: Any, result: Any, writes: bool) -> Any:
        """Note what a call that is no weight call computes from fixed tensors, and return its result."""
        given = operands(args, kwargs)
        fixed = all(map(self._is_fixed, given[:1] if name in _LIKE_ANOTHER else given))
        if name in _LOOKUPS or (name in _PICKS and not fixed and self._source(given[0]) is not None):
            return self.after(result)
        if fixed:
            sources = [source for source in map(self._source, given) if source is not None]
            first = min(sources, key=lambda source: source.order, default=None)
            for tensor in (*tensors(result), *(given[:1] if writes else ())):
                address = _address(tensor)
                whole, weights = self._fixed.get(address, (None, None))
                if address and (weights is None or (writes and not weights)):
                    whole = tensor.detach() if whole is None else whole
                    self._fixed[address] = whole, [] if first is None else [_stretch(whole, *first[:3])]
        elif writes:
            self._release(args, kwargs)
        return result

    def _release(self, args: Any, kwargs: Any) -> None:
        """Forget what a call has written activations into."""
        for tensor in (*operands(args, kwargs)[:1], *tensors(kwargs.get("out"))):
            self._fixed.pop(_address(tensor), None)


def operator_name(func: Any) -> str:
    """Return the plain name of a torch function, of a method of tensors, or of an operator in an exported program."""
    declared = operator_of(func)
    return getattr(func, "__name__", "") if declared is None else declared.name


class _Stretch(NamedTuple):
    """A stretch of a storage that belongs to one weight; `order` is that of the parameter in its model."""

    name: str
    weight: str
    order: int
    start: int
    end: int
    strides: tuple[int, ...]

    def at(self, offset: int) -> _Stretch:
        """Return the weight that starts at an offset of the storage."""
        if offset == self.start:
            return self
        rest, index = offset - self.start, [0] * len(self.strides)
        for axis in sorted(range(len(index)), key=lambda axis: -self.strides[axis]):
            if self.strides[axis]:
                index[axis], rest = divmod(rest, self.strides[axis])
        while index and index[-1] == 0:
            index.pop()
        return self._replace(name=f"{self.name}[{','.join(map(str, index))}]")


def _stretch(tensor: Tensor, name: str, weight: str, order: int) -> _Stretch:
    start, strides = int(tensor.storage_offset()), tensor.stride()
    end = start + 1 + sum((size - 1) * step for size, step in zip(tensor.shape, strides, strict=True))
    return _Stretch(name, weight, order, start, end, strides)


def _address(tensor: Tensor) -> int:
    """Return where a tensor's storage lies; 0 where it is empty, or torch keeps none (sparse, nested, `vmap`)."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def named_weights(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return a model's parameters as weights, by names without what wrappers and parametrizations add."""
    plain = plain_names(model)
    return [(_PARAMETRIZED.sub(r"\1\2", plain(name)), parameter) for name, parameter in model.named_parameters()]


def _fixed_tensors(model: nn.Module) -> dict[int, tuple[Tensor, list[_Stretch]]]:
    """Return a model's tensors (referred to, so that no other gets their address) and the weights in their storages."""
    fixed: dict[int, tuple[Tensor, list[_Stretch]]] = {}
    for order, (name, parameter) in enumerate(named_weights(model)):
        if address := _address(parameter):
            fixed.setdefault(address, (parameter, []))[1].append(_stretch(parameter, name, name, order))
    attributes = (value for module in model.modules() for value in vars(module).values())
    for constant in (*model.buffers(), *(value for value in attributes if isinstance(value, Tensor))):
        fixed.setdefault(_address(constant), (constant, []))
    fixed.pop(0, None)
    return fixed


def replaced(args: Any, kwargs: Any, new: Mapping[Place, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with new values in some places."""
    args, kwargs = list(args), dict(kwargs)
    for (key, *index), value in new.items():
        where: Any = kwargs if isinstance(key, str) else args
        if index:
            where[key] = list(where[key])
            where, key = where[key], index[0]
        where[key] = value
    return tuple(args), kwargs


def _arguments(args: Any, kwargs: Any, names: Iterable[tuple[int, str]]) -> dict[Place, Any]:
    return {((i,) if i < len(args) else (key,)): args[i] if i < len(args) else kwargs.get(key) for i, key in names}


def _layer(layer: str, args: Any, kwargs: Any, is_fixed: _Test) -> _Roles | None:
    """Return the roles in a function whose arguments always have the same ones."""
    inputs, names = _LAYERS[layer]
    weights = tensors(list(_arguments(args, kwargs, names).values()))
    if layer in RECURRENT:
        (second,) = _arguments(args, kwargs, [(1, "hx")]).values()
        if isinstance(second, Tensor) and not second.is_floating_point():  # batch sizes: a packed sequence
            return None
    axis = 1 - weights[0].dim() if weights and layer in _CONVOLUTIONS else -1
    return _arguments(args, kwargs, inputs), weights, (axis,)


def _product(layer: str, args: Any, kwargs: Any, is_fixed: _Test) -> _Roles | None:
    """Return the roles in a product, of which either factor may be the activation."""
    factors = _arguments(args, kwargs, _FACTORS[layer])
    which = _activation(factors, is_fixed)
    if which is None:
        return None
    (place, value), (_, other) = list(factors.items())[:: -1 if which else 1]
    return {place: value}, [other], (-2 if which == 1 and value.dim() > 1 else -1,)


def _einsum(layer: str, args: Any, kwargs: Any, is_fixed: _Test) -> _Roles | None:
    """Return the roles in an einsum: an activation is summed over the letters that it shares and the result lacks."""
    listed = len(args) == 2 and not isinstance(args[1], Tensor)
    operands = list(args[1] if listed else args[1:])
    factors: dict[Place, Any] = {(1, i) if listed else (1 + i,): value for i, value in enumerate(operands)}
    which = _activation(factors, is_fixed)
    if which is None or not isinstance(args[0], str):
        return None
    left, arrow, right = args[0].replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:
        right = "".join(letter for letter in set(left) if left.count(letter) == 1)
    value, term = operands.pop(which), terms.pop(which)
    before, _, after = term.partition("...")
    axes = {letter: i - value.dim() for i, letter in enumerate(before)}
    axes.update({letter: i - len(after) for i, letter in enumerate(after)})
    summed = set("".join(terms)) - set(right)
    return {list(factors)[which]: value}, operands, tuple(axis for letter, axis in axes.items() if letter in summed)


def _activation(factors: Mapping[Place, Any], is_fixed: _Test) -> int | None:
    """Return which factor is not fixed; None where not exactly one is, as in attention's scores."""
    if not all(isinstance(value, Tensor) for value in factors.values()):
        return None
    moving = [i for i, value in enumerate(factors.values()) if not is_fixed(value)]
    return moving[0] if len(moving) == 1 else None


_Test: TypeAlias = Callable[[Tensor], bool]
_Roles: TypeAlias = "tuple[dict[Place, Any], list[Any], tuple[int, ...]]"  # activations, weights, axes summed over
_Rule: TypeAlias = "Callable[[str, Any, Any, _Test], _Roles | None]"
_PARAMETRIZED = re.compile(r"(^|\.)parametrizations\.([^.]+)\.original\d*$")
_CONVOLUTIONS = ("convolution", *(f"conv{way}{n}d" for way in ("", "_transpose") for n in (1, 2, 3)))
_ATTENTION = [(0, "query"), (1, "key"), (2, "value")]
_LAYERS: dict[str, tuple[list[tuple[int, str]], list[tuple[int, str]]]] = {  # the inputs, and the weights
    **dict.fromkeys(("linear", *_CONVOLUTIONS), ([(0, "input")], [(1, "weight")])),
    **dict.fromkeys(RECURRENT, ([(0, "input")], [(2, "params")])),
    **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), ([(0, "input")], [(2, "w_ih")])),
    "multi_head_attention_forward": (_ATTENTION, [(5, "in_proj_weight"), (18, "q_proj_weight")]),
}
_FACTORS: dict[str, tuple[tuple[int, str], tuple[int, str]]] = {
    **dict.fromkeys(("matmul", "linalg_matmul"), ((0, "input"), (1, "other"))),
    **dict.fromkeys(("mm", "bmm"), ((0, "input"), (1, "mat2"))),
    **{"mv": ((0, "input"), (1, "vec")), "baddbmm": ((1, "batch1"), (2, "batch2"))},
    **{"addmm": ((1, "mat1"), (2, "mat2")), "addmv": ((1, "mat"), (2, "vec"))},
}
_RULES: dict[str, _Rule] = {**dict.fromkeys(_LAYERS, _layer), **dict.fromkeys(_FACTORS, _product), "einsum": _einsum}
_LIKE_ANOTHER = frozenset(("to", "type_as", "expand_as", "view_as", "reshape_as"))  # of the second, shape or dtype
_LOOKUPS = frozenset(("embedding", "embedding_bag"))
_PICKS = frozenset(("__getitem__", "index", "index_select", "gather", "take", "take_along_dim"))


@cache
def _facts(func: Any) -> tuple[str, _Rule | None, bool]:
    """Return the name of a torch function, its rule, and whether it always writes into an argument."""
    name, declared = operator_name(func), operator_of(func)
    in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    return name, _RULES.get(name.removesuffix("_")), in_place if declared is None else bool(declared.written)

"""The only file that touches torch's private parts, each of which has no public counterpart.

- `_disabled_torch_function_impl` and `_make_wrapper_subclass` make a tensor of two tensors; torch's guide to extending
  it names both.
- `_schema` tells the arguments of an operator, and which of them it writes.
- `_decomp`: the public table of decompositions leaves out operators that its core set has, such as ELU.
- `_python_dispatch` and `make_fx` see every operator of a pass; `torch.export` gives up where code looks at values.
- `_version` counts what is written into a tensor, which autograd alone looks at.
- `_torchdynamo_orig_callable` is the function that `torch.compile` was given.
- `_is_exporting_flag` and `_is_compiling_flag` tell models that they are traced.
- `_cuda_clearCublasWorkspaces` lets a CUDA graph have work space of its own, as torch does for its own graphs.
- `_set_grad_enabled` is what a mode of torch functions sees of `no_grad`.
- `DisableTorchFunction` runs what no mode of torch functions is to see.
- `_functorch` finds the tensor inside the transforms of `torch.func`, whose graph is that of the caller.
- `_call_impl` and `_compiled_call_impl` let calls of a module go elsewhere, whether it is compiled or not.
- `_orig_mod` is the module inside one that `torch.compile` made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from threading import RLock
from types import FunctionType
from typing import Any, Literal
from warnings import catch_warnings, filterwarnings

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    *("Operator", "Watching", "bare", "being_traced", "clear_workspaces", "decompositions_of", "draws_numbers"),
    *("operator_of", "plain_call", "plain_function", "plain_kernels", "plain_names", "reroute_calls", "restore_calls"),
    *("set_grad", "traced", "uncompiled", "unseen_by_modes", "unwrapped", "version_of", "without_cudnn"),
    "wrapper_tensor",
]

plain_function = torch._C._disabled_torch_function_impl
"""The `__torch_function__` of a subclass that acts on operators alone."""


@dataclass(frozen=True)
class Operator:
    """Declaration of an operator of torch.

    Attributes:
        name: without its namespace.
        arguments: their names, in order, with the defaults of some; None of others.
        written: the names of the arguments that it changes.
        overload: the name of the variant.
        random: whether it may draw from a global generator.
    """

    name: str
    arguments: Mapping[str, Any]
    written: tuple[str, ...]
    overload: str
    random: bool

    def values(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """Return all arguments of a call by name."""
        return {**self.arguments, **dict(zip(self.arguments, args, strict=False)), **kwargs}


@cache
def operator_of(func: Any) -> Operator | None:
    """Return the declaration of an operator (`torch.ops.aten...`); None for any other function."""
    declared = getattr(func, "_schema", None)
    if declared is None:
        return None
    return Operator(
        name=declared.name.partition("::")[2],
        arguments={a.name: a.default_value for a in declared.arguments},
        written=tuple(a.name for a in declared.arguments if a.alias_info is not None and a.alias_info.is_write),
        overload=declared.overload_name or "default",
        random=torch.Tag.nondeterministic_seeded in func.tags,
    )


def decompositions_of(operators: list[Any]) -> dict[Any, Callable[..., Any]]:
    """Return how torch writes operators by simpler ones."""
    return torch._decomp.get_decompositions(operators)


def draws_numbers(operator: Operator | None, args: Any, kwargs: Any) -> bool:
    """Return True if a call of an operator draws from a global generator; dropout that is off does not."""
    if operator is None or not operator.random:
        return False
    values = operator.values(args, kwargs)
    on = values.get("train", values.get("training", True)) is not False
    return on and values.get("generator") is None and values.get("dropout_p", 1.0) > 0


class Watching(TorchDispatchMode):
    """Tells `seen(operator, args, kwargs, result)` of every operator that this thread runs inside."""

    def __init__(self, seen: Callable[[Operator | None, Any, Any, Any], None]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and report it to `seen`; see `TorchDispatchMode`."""
        result = func(*args, **(kwargs or {}))
        self._seen(operator_of(func), args, kwargs or {}, result)
        return result


def wrapper_tensor(cls: type[Tensor], like: Tensor, dtype: torch.dtype) -> Any:
    """Return a tensor of a subclass with the shape, strides and device of `like`, and no memory."""
    return Tensor._make_wrapper_subclass(cls, like.shape, strides=like.stride(), dtype=dtype, device=like.device)


def uncompiled(function: Any) -> Any:
    """Return what `torch.compile` was given to make a function; None for any other object."""
    return getattr(function, "_torchdynamo_orig_callable", None) if isinstance(function, FunctionType) else None


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; 0 where torch does not count, as in inference mode."""
    return 0 if tensor.is_inference() else int(tensor._version)


_SWITCHING = RLock()
"""Whoever changes what torch has once for all threads takes turns."""


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Run without cuDNN: its recurrent functions have no backward pass in eval mode, and cannot be traced."""
    with _SWITCHING, torch.backends.cudnn.flags(enabled=False):
        yield


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Run recurrent layers by plain operators, whose derivatives are plain too."""
    with without_cudnn(), catch_warnings():
        filterwarnings("ignore", "TF32 acceleration on top of oneDNN")  # nobody asks for it
        with torch.backends.mkldnn.flags(enabled=False):
            yield


def traced(
    function: Callable[..., Any], arguments: list[Tensor], rules: Mapping[Any, Any] | None = None
) -> torch.fx.GraphModule:
    """Return a function of tensors, which may differentiate, as a graph of operators without side effects.

    With `rules`, which write operators by others, the graph becomes an ONNX file.
    """
    with _SWITCHING, _tracing(exporting=rules is not None):
        graph = make_fx(function)(*arguments)  # first as it is: what the model's code keeps must not be wrapped
        with torch.autocast(arguments[0].device.type, enabled=False):  # what is cast, is cast in the graph
            return make_fx(torch.func.functionalize(graph), dict(rules or {}))(*arguments)


_TRACING: ContextVar[Literal["", "program", "file"]] = ContextVar("latedrop_tracing", default="")


@contextmanager
def _tracing(*, exporting: bool) -> Iterator[None]:
    """Let `being_traced` tell, and models that ask `torch.compiler` whether they are exported look at no values."""
    token = _TRACING.set("file" if exporting else "program")
    flags = dict.fromkeys(("_is_exporting_flag", "_is_compiling_flag"), True)
    vars(torch.compiler).update(flags)
    try:
        yield
    finally:
        vars(torch.compiler).update(dict.fromkeys(flags, False))
        _TRACING.reset(token)


being_traced = _TRACING.get
"""Return what `traced` traces a function of this thread for, "program" or (ONNX) "file"; values are not read then."""


def clear_workspaces() -> None:
    """Let go of the work space that cuBLAS holds on CUDA devices."""
    torch._C._cuda_clearCublasWorkspaces()


unseen_by_modes = torch._C.DisableTorchFunction
"""Returns a context in which no mode of torch functions sees what is called."""

set_grad = torch._C._set_grad_enabled
"""The function that `no_grad` and its relatives call, as a mode of torch functions sees it."""


def unwrapped(tensor: Tensor) -> Tensor:
    """Return the tensor inside the transforms of `torch.func` that the caller is in."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def reroute_calls(module: nn.Module, route: Callable[..., Any]) -> None:
    """Let every call of a module go to `route(module, call, ...)`, with `call` what it would have been.

    As often as this was called, `restore_calls` must be, too.
    """
    state = vars(module)
    name = "_compiled_call_impl" if state.get("_compiled_call_impl") is not None else "_call_impl"
    if not isinstance(state.get(name), _Route):
        state[name] = _Route(module, getattr(module, name), route)
    state[name].count += 1


def restore_calls(module: nn.Module) -> None:
    """Let calls go where they went before `reroute_calls`, once nobody else wants otherwise."""
    state = vars(module)
    for name in ("_compiled_call_impl", "_call_impl"):
        rerouted = state.get(name)
        if isinstance(rerouted, _Route):
            rerouted.count -= 1
            if rerouted.count == 0:
                state.pop(name)
                if name == "_compiled_call_impl":
                    state[name] = rerouted.call


class _Route:
    """Stands where a module's call would. A copy of the module, made meanwhile, has its own call."""

    def __init__(self, module: nn.Module, call: Callable[..., Any], route: Callable[..., Any]) -> None:
        self.module, self.call, self.route, self.count = module, call, route, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.route(self.module, self.call, *args, **kwargs)

    def __reduce__(self) -> Any:
        return plain_call, (self.module,)


def plain_call(module: nn.Module) -> Any:
    """Return the call of a module as its class has it."""
    return type(module)._call_impl.__get__(module)


def bare(model: nn.Module) -> nn.Module:
    """Return the module inside wrappers that only call it."""
    while (attribute := _wrapped_attribute(type(model))) is not None:
        model = getattr(model, attribute)
    return model


def plain_names(model: nn.Module) -> Callable[[str], str]:
    """Return a function that takes wrappers out of a name of `model.named_modules()` or `state_dict()`.

    >>> plain_names(nn.Sequential(nn.DataParallel(nn.Linear(2, 2))))("0.module.weight")
    '0.weight'
    """
    outer = [(f"{name}." if name else "", _wrapped_attribute(type(module))) for name, module in model.named_modules()]
    wrappers = [(start, f"{start}{attribute}.") for start, attribute in outer if attribute]

    def plain(name: str) -> str:
        name += "."
        for start, added in reversed(wrappers):  # the innermost first
            name = start + name.removeprefix(added) if name.startswith(added) else name
        return name[:-1]

    return plain


def _wrapped_attribute(kind: type) -> str | None:
    if issubclass(kind, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return "module"
    return "_orig_mod" if kind.__name__ == "OptimizedModule" else None

"""The only file that touches torch's private parts.

Each part is looked up when it is first used. Where a version of torch has taken it away, one `LatedropWarning` says
what is slower or refused now, and why; results stay right.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from threading import RLock
from types import FunctionType
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from latedrop.errors import LatedropWarning
from latedrop.switches import held


@dataclass(frozen=True)
class Operator:
    """What an operator of torch says of itself.

    Attributes:
        name: without its namespace.
        arguments, defaults: the names of its arguments, in order, where it declares them; the defaults of some.
        written: the names of the arguments that it changes.
        seeded: whether it may draw random numbers.
        overload, returns: the name of the variant; how many results it has.
    """

    name: str
    arguments: tuple[str, ...] = ()
    defaults: Mapping[str, Any] | None = None
    written: tuple[str, ...] = ()
    seeded: bool = False
    overload: str = "default"
    returns: int = 1


@cache
def operator_of(func: Any) -> Operator | None:
    """The declaration of an operator (`torch.ops.aten...`); None for any other function."""
    declared = getattr(func, "_schema", None)
    if declared is None:
        return None
    arguments = declared.arguments
    return Operator(
        name=declared.name.partition("::")[2],
        arguments=tuple(argument.name for argument in arguments),
        defaults={argument.name: argument.default_value for argument in arguments if argument.has_default_value()},
        written=tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write),
        seeded=torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()),
        overload=declared.overload_name or "default",
        returns=len(declared.returns),
    )


Seen = Callable[[Any, Any, Any, Any], None]
"""`(operator, args, kwargs, result)`, after each operator of torch."""


def watching(seen: Seen) -> AbstractContextManager[Any]:
    """Tell `seen` of every operator that this thread runs, as long as the context lasts."""
    mode = _mode_of_operators()
    return mode(seen) if mode is not None else _Functions(seen)


@cache
def _mode_of_operators() -> Any:
    base = _part("torch.utils._python_dispatch", "TorchDispatchMode")
    if base is None:
        _lost("TorchDispatchMode", "sites are found by the torch functions that a model calls from Python alone")
        return None

    class Operators(base):  # type: ignore[misc,valid-type]
        def __init__(self, seen: Seen) -> None:
            super().__init__()
            self._seen, self.supports_higher_order_operators = seen, True  # of `torch.cond` the whole is seen

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            self._seen(operator_of(func), args, kwargs or {}, result)
            return result

    return Operators


class _Functions(TorchFunctionMode):
    """The same from torch functions, where the operators below them cannot be seen."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        first = ("self",) if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) else ()
        self._seen(Operator(name, ("self",), written=first), args, kwargs or {}, result)
        return result


def transforms() -> int:
    """How many transforms of `torch.func` are on, one inside the other."""
    functorch = _functorch()
    top = functorch.peek_interpreter_stack() if functorch is not None else None
    return 0 if top is None else int(top.level())


def is_wrapped(tensor: Tensor) -> bool:
    """Whether a transform of `torch.func` has wrapped a tensor."""
    return (functorch := _functorch()) is not None and bool(functorch.is_functorch_wrapped_tensor(tensor))


def inmost(tensor: Tensor) -> Tensor:
    """What has a storage: the inside of wrappers, where a model uses `torch.func`, and values of sparse tensors."""
    while is_wrapped(tensor):
        tensor = _functorch().get_unwrapped(tensor)
    if tensor.layout is torch.sparse_coo:
        return tensor.coalesce().values() if tensor.is_coalesced() else tensor.detach()._values()
    compressed = tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
    return tensor.values() if compressed else tensor


@cache
def _functorch() -> Any:
    found = getattr(torch._C, "_functorch", None)
    wanted = ("peek_interpreter_stack", "is_functorch_wrapped_tensor", "get_unwrapped")
    if found is None or not all(hasattr(found, name) for name in wanted):
        _lost("torch._C._functorch", "weights inside a model's own torch.func transforms are not told apart")
        return None
    return found


def wrapper_tensor(cls: type[Tensor], like: Tensor, dtype: torch.dtype) -> Any:
    """A tensor of a subclass with the shape, strides and device of `like`, and no memory."""
    return Tensor._make_wrapper_subclass(cls, like.shape, strides=like.stride(), dtype=dtype, device=like.device)


plain_function = getattr(torch._C, "_disabled_torch_function_impl", Tensor.__torch_function__)
"""What a subclass has as `__torch_function__` where it acts on operators alone."""


def wrapped_attribute(module: nn.Module) -> str | None:
    """The attribute that holds what a wrapper wraps; None where a module is none."""
    return _about(type(module))[0]  # type: ignore[arg-type]


def is_torchs_own(module: nn.Module) -> bool:
    """Whether a module is of a class that torch itself has."""
    return _about(type(module))[1]  # type: ignore[arg-type]


def parts_of(module: nn.Module) -> list[nn.Module]:
    """`module.children()`, where one that has two names may come twice: quicker."""
    return [part for part in module._modules.values() if part is not None]


def weights_of(module: nn.Module) -> list[Tensor]:
    """`module.parameters()` and `module.buffers()`, where one that is held twice comes twice: quicker."""
    found = [weight for own in (module._parameters, module._buffers) for weight in own.values() if weight is not None]
    for part in module._modules.values():
        found += weights_of(part) if part is not None else ()
    return found


def first_weight(module: nn.Module) -> Tensor | None:
    """The first floating one of `module.parameters()`, or None: quicker."""
    for weight in module._parameters.values():
        if weight is not None and weight.is_floating_point():
            return weight
    return next((found for part in parts_of(module) if (found := first_weight(part)) is not None), None)


def part_named(module: nn.Module, name: str) -> nn.Module | None:
    """`module.get_submodule(name)`, or None where there is none: quicker."""
    found: nn.Module | None = module
    for step in name.split(".") if name else ():
        found = found._modules[step] if found is not None and step in found._modules else None
    return found


_BLANK = vars(nn.Module())
HOLDERS: dict[str, Any] = {n: type(v) for n, v in _BLANK.items() if isinstance(v, (dict, set)) and "_dict_" not in n}
"""Where every module holds its parts, and the hooks of its passes."""


def shallow_copy(
    module: nn.Module,
    inner: Callable[[nn.Module], nn.Module],
    weight: Callable[[Tensor], Tensor] | None,
    value: Callable[[Any], Any],
    made: dict[int, Any],
    *,
    whole: bool = False,
) -> nn.Module:
    """A module like this one in eval mode, noted in `made` before its parts are.

    `inner` gives what stands for a submodule, `weight` for a parameter, `value` for all else that the module holds; of
    torch's own layers that is hooks and the weights of recurrent ones alone, unless `whole` is asked for.
    """
    _, torchs_own, kind, written = _about(type(module))  # type: ignore[arg-type]
    copy: nn.Module = object.__new__(kind)
    made[id(module)] = copy
    state = vars(copy)
    state.update(vars(module))
    for name, container in HOLDERS.items():  # what registers a part or a hook on the way registers it here
        held = state.get(name)
        state[name] = container(held) if held else container()
    state.pop("_compiled_call_impl", None), state.pop("_call_impl", None)
    modules, parameters, buffers = state["_modules"], state["_parameters"], state["_buffers"]
    modules.update({name: inner(part) for name, part in modules.items() if part is not None})
    if weight is not None:
        parameters.update({name: weight(item) for name, item in parameters.items() if item is not None})
    state["training"] = False
    if "forward" in state:
        state["forward"] = value(state["forward"])
    if written:
        state.update({name: function.__get__(copy) for name, function in written.items() if name not in state})
    if not torchs_own or whole or state["_forward_hooks"] or state["_forward_pre_hooks"] or "_flat_weights" in state:
        if buffers:
            state["_buffers"] = {name: value(item) for name, item in buffers.items()}
        for name, item in list(vars(module).items()):
            if type(item) not in _ATOMS and name not in _DONE and (name not in _HOOKS or item):
                state[name] = value(item)
    return copy


def uncompiled(function: Any) -> Any:
    """What `torch.compile` was given to make a function; None for any other object."""
    return getattr(function, "_torchdynamo_orig_callable", None) if isinstance(function, FunctionType) else None


@cache
def _about(kind: Any) -> tuple[str | None, bool, Any, dict[str, Any]]:
    """Where instances hold what they wrap, whether a class is torch's own, that of copies, methods before compiling."""
    parallel = issubclass(kind, (nn.DataParallel, nn.parallel.DistributedDataParallel))
    wraps = "module" if parallel else "_orig_mod" if kind.__name__ == "OptimizedModule" else None
    quiet = {"__del__": lambda self: None, "__module__": kind.__module__}  # the user's own is cleaned up after, alone
    copied_as = type(kind.__name__, (kind,), quiet) if hasattr(kind, "__del__") else kind
    methods = {name: uncompiled(item) for base in reversed(kind.__mro__) for name, item in vars(base).items()}
    written = {name: function for name, function in methods.items() if function is not None}
    return wraps, kind.__module__.startswith("torch.nn.modules."), copied_as, written


_HOOKS = HOLDERS.keys() - {"_modules", "_parameters", "_buffers"}
REPLACED = ("forward", "_call_impl", "_compiled_call_impl")  # where a module may hold a call of its own
_DONE = {*_BLANK, *REPLACED} - _HOOKS
_OF_ALL = {*_BLANK, "_call_impl"}
_ATOMS = {bool, int, float, str, bytes, torch.dtype, torch.device, type, type(None)}


def contents_of(module: nn.Module) -> tuple[list[Any], list[Tensor], dict[str, Any]]:
    """What tells its parts and names from others; its parameters and buffers; its hooks and attributes of its own."""
    state = vars(module)
    marks: list[Any] = [mark for name, part in module._modules.items() for mark in (name, id(part))]
    tensors = dict([*module._parameters.items(), *module._buffers.items()])
    marks += [mark for name, value in tensors.items() for mark in (name, value is None)]
    attributes = {name: value for name, value in state.items() if name not in _OF_ALL or (name in _HOOKS and value)}
    return marks, [value for value in tensors.values() if value is not None], attributes


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place; 0 where torch does not count, as in inference mode."""
    return 0 if tensor.is_inference() else int(tensor._version)


def reroute_calls(module: nn.Module, route: Callable[..., Any]) -> None:
    """Every call of a module goes to `route(own, ...)`, with `own` what it would have been, until `restore_calls`."""
    state = vars(module)
    name = "_compiled_call_impl" if state.get("_compiled_call_impl") is not None else "_call_impl"
    state[name] = _Route(module, name, getattr(module, name), route)


def restore_calls(module: nn.Module) -> None:
    """Calls go where they went before `reroute_calls`."""
    state = vars(module)
    for name in ("_compiled_call_impl", "_call_impl"):
        if isinstance(state.get(name), _Route):
            found = state.pop(name)
            if name == "_compiled_call_impl":
                state[name] = found.own


class _Route:
    """Stands where a module's call would. A copy of the module, made meanwhile, has its own call."""

    def __init__(self, module: nn.Module, name: str, own: Callable[..., Any], route: Callable[..., Any]) -> None:
        self.module, self.name, self.own, self.route = module, name, own, route

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.route(self.own, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return own_call(memo.get(id(self.module), self.module))

    def __reduce__(self) -> Any:
        return own_call, (self.module,)


def own_call(module: nn.Module) -> Any:
    """The call of a module as its class has it."""
    return type(module)._call_impl.__get__(module)


def eager() -> AbstractContextManager[Any]:
    """No compiled code inside, for all threads; nothing was compiled where the compiler was never imported."""
    known = "torch._dynamo" in sys.modules
    return held(lambda: torch.compiler.set_stance("force_eager"), "eager") if known else nullcontext()


def stream_of(device: torch.device) -> int:
    """The number of the stream on which a CUDA device works for this thread."""
    quick = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    own = quick(device.index) if quick and device.index is not None else torch.cuda.current_stream(device).cuda_stream
    return int(own)


def leaves_and_structure(value: Any) -> tuple[list[Any], Any]:
    """The leaves of nested tuples, lists and dicts, and what puts others in their place: `structure.unflatten(...)`."""
    return import_module("torch.utils._pytree").tree_flatten(value)  # type: ignore[no-any-return]


_TRACING = RLock()  # what torch does to trace is one for all threads


def traced(
    function: Callable[..., Any], arguments: list[Tensor], rules: Mapping[Any, Any] | None = None
) -> torch.fx.GraphModule:
    """A function of tensors, which may differentiate, as a graph of operators without side effects, said by `rules`."""
    make_fx = _part("torch.fx.experimental.proxy_tensor", "make_fx")
    if make_fx is None:
        raise NotImplementedError("make_fx, which this version of torch has not")
    with _TRACING, held(_exporting, "exporting"):
        graph = make_fx(function)(*arguments)  # first as it is: what the model's code keeps must not be wrapped
        with torch.autocast(arguments[0].device.type, enabled=False):  # what is cast, is cast in the graph
            return make_fx(torch.func.functionalize(graph), rules or {})(*arguments)  # type: ignore[no-any-return]


@contextmanager
def _exporting() -> Iterator[None]:
    """Models that ask `torch.compiler` look at no values inside; those that others have compiled run meanwhile."""
    flags = dict.fromkeys(("_is_exporting_flag", "_is_compiling_flag"), True)
    vars(torch.compiler).update(flags)
    try:
        yield
    finally:
        vars(torch.compiler).update(dict.fromkeys(flags, False))


def compiled(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
    """What runs a graph on tensors like these; torch keeps it on disk, where a later process finds it."""
    # `torch.compile` would read the graph as Python code first, which takes longer than to find it.
    compiler = _part("torch._inductor", "standalone_compile")
    if compiler is None:
        return torch.compile(graph, dynamic=False, fullgraph=True)
    with _TRACING, held(_exporting, "exporting"):
        return compiler(graph, examples, dynamic_shapes="from_example_inputs")  # type: ignore[no-any-return]


def being_traced() -> bool:
    """Whether `traced` runs in this thread: values then are not to be looked at."""
    return _tracing() is not None


def _tracing() -> Any:
    if not getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)():  # no mode at all is quickly seen
        return None
    return getattr(sys.modules.get("torch.fx.experimental.proxy_tensor"), "get_proxy_mode", lambda: None)()


def stands_for_others(tensor: Tensor) -> bool:
    """Whether a tensor was computed in what is traced: its values will be others when that runs."""
    mode = _tracing()
    known = None if mode is None else _part("torch.fx.experimental.proxy_tensor", "has_proxy_slot")
    return known is not None and bool(known(inmost(tensor), mode.tracer))


def _part(module: str, name: str) -> Any:
    try:
        return getattr(import_module(module), name, None)
    except ImportError:
        return None


def _lost(part: str, what: str) -> None:
    warn(
        f"this version of torch, {torch.__version__}, has no {part}, which latedrop used: {what}. Results stay right.",
        LatedropWarning,
        stacklevel=3,
    )

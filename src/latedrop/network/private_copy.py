"""A private copy of the user's model, which runs in its place.

The copy shares the weights and has everything else to itself: modules, flags, attributes, hooks. It is made once, in
eval mode, by `copy.deepcopy` with a memo that maps every parameter to an alias of it. The user's model is never run and
never changed, so there is nothing to put back. Whatever the copy misses (a layer that `forward` reaches through a
global, say) is an error in the first pass, because a tensor of the original shows up there.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any
from warnings import catch_warnings, filterwarnings

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from latedrop.data.rows import operands, tensors
from latedrop.errors import SiteError
from latedrop.torch_private import bare, set_grad, uncompiled

__all__ = ["Guard", "private_copy"]

_SHARED = ("_trainer", "_fabric")  # what Lightning attaches: a trainer with its data, which no forward pass needs
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_TABLES = (nn.Embedding, nn.EmbeddingBag)


def private_copy(model: nn.Module, *, gradients: bool = False, buffers: bool = True) -> nn.Module:
    """Return a copy of `model` in eval mode that shares its weights, without any wrapper inside.

    Wrappers are those of `torch.compile`, `DataParallel` and DDP. With `gradients` its parameters are those of the
    model, so that a backward pass reaches them. Torch's own layers share their `buffers`, too.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.Dropout())
    >>> own = private_copy(net)
    >>> own[0].weight.data_ptr() == net[0].weight.data_ptr(), own.training, net.training
    (True, False, True)
    """
    model = bare(model)
    scripts = [name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripts:
        raise SiteError(
            f"expected a model whose layers run in Python; found TorchScript ({scripts[0] or 'the model itself'}), "
            "inside which nothing can be dropped. Use the Python modules, or export the model with torch.export and "
            "pass latedrop.load_program(path)."
        )
    graphs = [module for module in model.modules() if isinstance(module, fx.GraphModule)]
    with torch.inference_mode(False), catch_warnings() if graphs else nullcontext():
        if graphs:  # torch warns of its own ways when it copies the graph of an exported program
            filterwarnings("ignore", ".*LeafSpec", FutureWarning)
        memo = _memo(model, gradients, buffers)
        try:
            for module in reversed(list(model.modules())):
                if bare(module) is not module:
                    memo[id(module)] = copy.deepcopy(bare(module), memo)
            made: nn.Module = copy.deepcopy(model, memo)
            for graph in graphs:
                if id(graph) in memo:  # else its owner makes it anew, as e3nn does with its generated code
                    _complete(graph, memo)
        except Exception as error:
            culprit = _culprit(model, _memo(model, gradients, buffers))
            raise SiteError(
                f"expected a model that can be copied; {culprit} cannot: {type(error).__name__}: {error}. "
                "Detach it from the model, or give its class a __deepcopy__."
            ) from error
    for module in made.modules():
        module.training = False
        if isinstance(module, nn.RNNBase) and any(weight.is_cuda for weight in module.parameters()):
            module.training, module.dropout = True, 0.0  # in eval mode cuDNN has no backward pass
        _rebind(module, memo)
    return made


def _memo(model: nn.Module, gradients: bool, buffers: bool) -> dict[int, Any]:
    """Return what `deepcopy` must not copy: by the identity of the original, what stands for it in the copy."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        written = isinstance(module, _TABLES) and module.max_norm is not None  # its forward pass changes the weight
        for parameter in module.parameters(recurse=False):
            if written or id(parameter) not in memo:
                shared = gradients and not written
                memo[id(parameter)] = parameter if shared else _alias(parameter, own=written)
        if buffers and type(module).__module__.startswith("torch.nn.modules."):
            memo.update({id(buffer): buffer.detach() for buffer in module.buffers(recurse=False)})
        for name, value in list(vars(module).items()):  # another thread may set attributes meanwhile
            if isinstance(value, Tensor) and not value.is_leaf:  # which deepcopy refuses; old-style weight_norm has one
                memo[id(value)] = value.detach().clone()
            elif name in _SHARED and value is not None:
                memo[id(value)] = value
    return memo


def _complete(graph: fx.GraphModule, memo: dict[int, Any]) -> None:
    """Copy the hooks and attributes of a graph module, which its own `__deepcopy__` leaves out."""
    state = vars(memo[id(graph)])
    for name, value in vars(graph).items():
        if name.startswith(_HOOKS) or name not in state:
            state[name] = copy.deepcopy(value, memo)


def _alias(parameter: Tensor, *, own: bool) -> Tensor:
    values = parameter.detach().clone() if own else parameter.detach()
    if type(parameter) is not nn.Parameter:
        return values
    alias = nn.Parameter(values, requires_grad=False)
    vars(alias).update(vars(parameter))
    return alias


def _rebind(module: nn.Module, memo: Mapping[int, Any]) -> None:
    """Let functions that a copied module holds refer to the copy: `deepcopy` takes functions as they are."""
    state = vars(module)
    methods = {name: item for base in reversed(type(module).__mro__) for name, item in vars(base).items()}
    for name, item in methods.items():  # some are decorated by `torch.compile`
        if (function := uncompiled(item)) is not None:
            state.setdefault(name, MethodType(function, module))
    for name, value in list(state.items()):
        if isinstance(value, (FunctionType, partial)):
            state[name] = _rebound(value, memo)
        elif name in _HOOKS and value:
            state[name] = type(value)((key, _rebound(hook, memo)) for key, hook in value.items())


def _rebound(value: Any, memo: Mapping[int, Any], depth: int = 0) -> Any:
    """Return `value` with the modules and tensors of the original replaced by those of the copy, also in closures."""
    if id(value) in memo or depth > 8:
        return memo.get(id(value), value)
    again = partial(_rebound, memo=memo, depth=depth + 1)
    if isinstance(value, MethodType):
        owner = again(value.__self__)
        return value if owner is value.__self__ else MethodType(value.__func__, owner)
    if isinstance(value, partial):
        new = again(value.func), again(value.args), again(value.keywords)
        changed = any(a is not b for a, b in zip(new, (value.func, value.args, value.keywords), strict=True))
        return type(value)(new[0], *new[1], **new[2]) if changed else value
    if isinstance(value, FunctionType):
        if (before := uncompiled(value)) is not None:
            return again(before)
        contents = [_content(cell) for cell in value.__closure__ or ()]
        cells = [again(content) for content in contents]
        defaults = again(value.__defaults__)
        if defaults is value.__defaults__ and all(a is b for a, b in zip(cells, contents, strict=True)):
            return value
        closure = tuple(CellType(cell) for cell in cells)
        made = FunctionType(value.__code__, value.__globals__, value.__name__, defaults, closure)
        made.__kwdefaults__ = value.__kwdefaults__
        return made
    if type(value) in (tuple, list) and len(value) < 1000:
        items = [again(item) for item in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else type(value)(items)
    if type(value) is dict and len(value) < 1000:
        named = {key: again(item) for key, item in value.items()}
        return value if all(named[key] is value[key] for key in value) else named
    return value


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _culprit(model: nn.Module, memo: dict[int, Any]) -> str:
    """Return the name of an attribute that `deepcopy` refuses."""
    for name, module in model.named_modules():
        for key, value in (module._buffers | vars(module)).items():
            try:
                copy.deepcopy(value, dict(memo))
            except Exception:
                if key != "_modules":
                    return f"{'.'.join(filter(None, (name, key)))} ({type(value).__name__})"
    return type(model).__name__


class Guard(TorchFunctionMode):
    """Raises where a tensor of the original is used inside a pass of the copy; also notes what a pass does.

    With `follows` it keeps the graph whole where a model switches gradients off or detaches.

    Attributes:
        deeds: `"derives"` where the model differentiated inside its `forward`, and `"cuts"` where it did so without
            `create_graph=True`; `"reads"` where its Python code read values of tensors, which may decide what runs, and
            `"decides"` where such a value depended on weights, `"counts"` where it was a whole number, which may be a
            size; `"sizes"` where the size of something depended on values; `"asks"` where it asked for gradients of
            some tensor itself, as a model that derives does of inputs.
    """

    def __init__(self, model: nn.Module, *, follows: bool = False) -> None:
        super().__init__()
        self._follows = follows
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        self._names = {id(tensor): name for name, tensor in named}
        self.deeds: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse tensors of the original model, and record functions that read values; see `TorchFunctionMode`."""
        kwargs = kwargs or {}
        if self._follows and func is set_grad:
            return None
        if self._follows and func in (Tensor.detach, torch.detach) and args[0].requires_grad:
            return args[0].view_as(args[0])
        for tensor in operands(args, kwargs):
            if id(tensor) in self._names:
                owner, _, last = self._names[id(tensor)].rpartition(".")
                raise SiteError(
                    "expected a model that reaches its layers through its own attributes; its forward pass used "
                    f"{last!r} of {owner or 'the model'} past them, as through a global variable or an object that "
                    "holds the original. latedrop runs a private copy, in which that layer would be the original's. "
                    "Store it as an attribute of the model (self.layer = ...), or wrap the model in a module."
                )
        name = getattr(func, "__name__", "").partition(".")[0]
        if name in _DECIDING:
            self.deeds |= {"reads", *(["decides"] if args[0].requires_grad else [])}
            self.deeds |= {"counts"} if args[0].dtype in (torch.int64, torch.int32) else set()
        elif name in _SIZING or (name == "__getitem__" and any(part.dtype in _MASKS for part in tensors(args[1]))):
            self.deeds |= {"reads", "sizes"}
        elif name in _READING:
            self.deeds.add("reads")
        elif name in ("requires_grad_", "__set__"):
            self.deeds.add("asks")
        elif func in (torch.autograd.grad, torch.autograd.backward, Tensor.backward):
            self.deeds |= {"derives"} if kwargs.get("create_graph") else {"derives", "cuts"}
        return func(*args, **kwargs)


_MASKS = (torch.bool, torch.uint8)
_DECIDING = ("__bool__", "__int__", "__float__", "__index__", "item", "tolist", "numpy")
_SIZING = ("nonzero", "masked_select", "unique", "unique_consecutive", "bincount", "repeat_interleave")
_READING = ("_pack_padded_sequence", "equal", "allclose", "__contains__", "topk")

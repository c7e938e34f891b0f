"""One clean forward pass: what goes into a model, how it is called, what comes out.

The first axis of every input and of the output counts the examples. A tuple or list is several
positional inputs; a mapping is keyword inputs where `forward` has parameters of those names, and
a single dict argument where it has not.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from functools import partial
from math import isfinite
from types import MethodType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from latedrop.errors import DataError, OutputError

__all__ = [
    "ROWS",
    "Readout",
    "all_finite",
    "bare",
    "call",
    "evaluating",
    "filled_up",
    "fitting_batches",
    "from_array",
    "from_table",
    "frozen",
    "generators",
    "is_table",
    "map_rows",
    "named_layers",
    "one_thread",
    "output_of",
    "place",
    "plain_names",
    "read",
    "rerouted",
    "row_count",
    "row_limits",
    "take_rows",
    "tensors",
    "undisturbed",
]

ROWS = "latedrop_rows"
"""Where a program's `meta` says how many rows it takes."""

Readout: TypeAlias = "Callable[[Any], Tensor] | str | int | None"


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor inside nested tuples, lists, mappings and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors(getattr(value, field.name))


def row_count(x: Any) -> int:
    """Number of examples in `x`: the length of the first tensor that has an axis.

    >>> row_count({"a": torch.zeros(5, 2)})
    5
    """
    for tensor in (x,) if isinstance(x, Tensor) else tensors(x):
        if tensor.dim() > 0:
            return tensor.shape[0]
    raise DataError(
        "expected inputs with at least one tensor whose first axis counts the examples; "
        f"found {type(x).__name__}. Pass a tensor, a tuple of tensors or a dict of tensors."
    )


def map_rows(x: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to every input in `x` that has as many rows as the first one."""
    count = row_count(x)
    return _map(x, lambda t: change(t) if t.dim() > 0 and t.shape[0] == count else t)


def take_rows(x: Any, index: slice) -> Any:
    """The rows `index` of every input in `x` that has as many rows as the first one."""
    return map_rows(x, lambda t: t[index])


def place(x: Any, model: nn.Module, *, check: bool = True) -> Any:
    """Move inputs to the model's device; numpy arrays and tables also take the model's floating dtype.

    With `check`, raises `DataError` where a floating input has NaN or inf.
    """
    parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
    device = parameter.device if parameter is not None else torch.device("cpu")

    def move(value: Any) -> Tensor:
        if not isinstance(value, Tensor):
            value = from_table(value, "inputs") if is_table(value) else from_array(value, "inputs")
            if value.is_floating_point() and parameter is not None:
                value = value.to(parameter.dtype)
        moved: Tensor = value.to(device)
        if check and moved.is_floating_point() and not all_finite(moved):
            bad = int((~torch.isfinite(moved)).sum())
            raise DataError(
                f"expected finite inputs; found {bad} NaN or inf among {moved.numel()} input values. "
                "Drop or impute those rows."
            )
        return moved

    return _map(x, move)


def all_finite(values: Tensor) -> bool:
    """Whether no value is NaN or inf: their sum then is finite too, mostly, and takes one pass and no memory.

    >>> all_finite(torch.tensor([3e38, 3e38])), all_finite(torch.tensor([1.0, torch.inf]))
    (True, False)
    """
    total = values.sum() if values.dtype in (torch.float32, torch.float64) else values.sum(dtype=torch.float32)
    return isfinite(total.item()) or bool(torch.isfinite(values).all())


def from_array(array: np.ndarray, what: str) -> Tensor:
    """A numpy array of numbers as a tensor; `what` names it in the error where it holds something else."""
    if array.dtype.kind not in "fiub":
        raise DataError(
            f"expected numeric {what}; found a numpy array of dtype {array.dtype}. "
            "Encode text and categories as numbers first."
        )
    # torch refuses foreign byte orders and wide floats, and warns of read-only arrays: these are copied.
    dtype = np.float64 if array.dtype.itemsize > 8 else array.dtype.newbyteorder("=")
    return torch.from_numpy(np.require(array, dtype, requirements=["C", "W"]))


def is_table(value: Any) -> bool:
    """Whether `value` is a data frame or a series, of pandas, polars or alike."""
    return hasattr(value, "to_numpy") and not isinstance(value, (Tensor, np.ndarray, type))


def from_table(table: Any, what: str) -> Tensor:
    """A data frame `(N, D)` or a series `(N,)` of numbers as a float64 tensor; missing values are NaN.

    >>> import pandas
    >>> from_table(pandas.DataFrame({"a": [1, 2], "b": [True, False]}), "inputs")
    tensor([[1., 1.],
            [2., 0.]], dtype=torch.float64)
    """
    if not hasattr(table, "columns"):
        return from_array(_numbers(getattr(table, "name", None), table, what), what)
    # pandas names its columns by `items`, polars by `iter_columns`.
    named = table.items() if hasattr(table, "items") else ((column.name, column) for column in table.iter_columns())
    columns = [_numbers(name, column, what) for name, column in named]
    return from_array(np.stack(columns, 1) if columns else np.zeros((len(table), 0)), what)


def call(model: nn.Module, x: Any) -> Any:
    """Run `model` on `x`, spreading tuples and matching mappings over its arguments."""
    if isinstance(x, Mapping):
        return model(**x) if _takes_keywords(model, x) else model(x)
    return model(*x) if isinstance(x, (tuple, list)) else model(x)


def read(output: Any, readout: Readout, rows: int) -> Tensor:
    """The quantity of interest, `(rows, ...)`, from the raw output of a model.

    `readout` is a callable, the name or index of one part of the output, or None where the output
    holds a single floating tensor.
    """
    if callable(readout):
        value = readout(output)
    elif readout is not None:
        value = _part(output, readout)
    else:
        value = _only_tensor(output)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        found = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise OutputError(
            f"expected the readout to give a floating tensor; found {found}. "
            "Pass a readout that returns the tensor of interest."
        )
    if value.dim() == 0 or value.shape[0] != rows:
        raise OutputError(
            f"expected an output whose first axis counts the {rows} examples; found shape "
            f"{tuple(value.shape)}. Pass a readout that keeps one entry per example."
        )
    return value


def output_of(model: nn.Module, x: Any, readout: Readout) -> Tensor:
    """The model's own output on `x`, read out."""
    return read(call(model, x), readout, row_count(x))


def bare(model: nn.Module) -> nn.Module:
    """The module inside wrappers that only call it: those of `torch.compile`, `DataParallel` and DDP."""
    while (attribute := _wrapped(model)) is not None:
        model = getattr(model, attribute)
    return model


def plain_names(model: nn.Module) -> Callable[[str], str]:
    """What turns a name of `model.named_modules()` or `state_dict()` into that without any wrapper.

    >>> plain_names(nn.Sequential(nn.DataParallel(nn.Linear(2, 2))))("0.module.weight")
    '0.weight'
    """
    outer = [(f"{name}." if name else "", _wrapped(module)) for name, module in model.named_modules()]
    wrappers = [(start, f"{start}{attribute}.") for start, attribute in outer if attribute]

    def plain(name: str) -> str:
        name += "."
        for start, added in reversed(wrappers):  # the innermost first
            name = start + name.removeprefix(added) if name.startswith(added) else name
        return name[:-1]

    return plain


def named_layers(model: nn.Module) -> dict[str, nn.Module]:
    """`model.named_modules()`, without wrappers and what they add to names."""
    named = list(model.named_modules())
    if not any(_wrapped(module) for _, module in named):
        return dict(named)
    plain = plain_names(model)
    return {plain(name): module for name, module in named if not _wrapped(module)}


@contextmanager
def evaluating(model: nn.Module, *, layers: bool = True) -> Iterator[None]:
    """The model in eval mode; every module's own flag comes back after.

    With `layers` the fused attention paths, which call no submodule, and compiled code are switched off, so that
    every layer is seen by its hooks.
    """
    training = [module for module in model.modules() if module.training]
    fastpath = torch.backends.mha.get_fastpath_enabled()
    try:
        for module in training:
            module.training = False
        if layers:
            torch.backends.mha.set_fastpath_enabled(False)
        with _eager() if layers else nullcontext():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        for module in training:
            module.training = True


@contextmanager
def rerouted(routes: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Each layer's `forward` becomes `route(forward, ...)`; for layers whose class has it, not they themselves."""
    try:
        for layer, route in routes.items():
            found = _Route(route, layer.forward)
            found.layer = layer
            vars(layer)["forward"] = found
        yield
    finally:
        for layer in routes:
            vars(layer).pop("forward", None)


class _Route(partial[Any]):
    """Stands where a layer's `forward` would. A copy of the layer, made meanwhile, gets its own `forward`."""

    layer: nn.Module

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = memo.get(id(self.layer), self.layer)
        return MethodType(type(copy).forward, copy)


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread inside: small tensors are no faster on more, and sums come out alike on any number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """No parameter asks for a gradient, so that no graph is built for them; the flags come back after."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _ in flags:
            parameter.requires_grad = False
        yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad = flag


@contextmanager
def undisturbed(model: nn.Module, *, layers: bool = True) -> Iterator[None]:
    """`evaluating`, without gradients, and with the global random state restored after."""
    parameter = next(model.parameters(), None)
    rolled = generators(torch.device("cpu") if parameter is None else parameter.device)
    before = [generator.get_state() for generator in rolled]
    try:
        with evaluating(model, layers=layers), torch.no_grad():
            yield
    finally:
        for generator, state in zip(rolled, before, strict=True):
            generator.set_state(state)


def generators(device: torch.device) -> list[torch.Generator]:
    """The global ones that a model on that device may draw from."""
    if device.type != "cuda":
        return [torch.default_generator]
    torch.cuda.init()
    own = device.index if device.index is not None else torch.cuda.current_device()
    return [torch.default_generator, torch.cuda.default_generators[own]]


def row_limits(model: nn.Module) -> tuple[int, int | None]:
    """The least and the largest number of rows that `model` takes: (1, None), but for some exported programs."""
    meta = getattr(bare(model), "meta", None)
    limits: tuple[int, int | None] = meta.get(ROWS, (1, None)) if isinstance(meta, dict) else (1, None)
    return limits


def fitting_batches(model: nn.Module, x: Any) -> list[tuple[Any, int]] | None:
    """`x` in parts that `model` takes, each with how many of its rows count; None where `x` fits as it is."""
    rows, (least, most) = row_count(x), row_limits(model)
    if rows == 0 or (least <= rows and (most is None or rows <= most)):
        return None
    parts = [take_rows(x, slice(start, start + (most or rows))) for start in range(0, rows, most or rows)]
    return [(filled_up(part, least), row_count(part)) for part in parts]


def filled_up(x: Any, least: int) -> Any:
    """`x` with at least so many rows; where it is short of them, the first one is repeated."""
    missing = least - row_count(x)
    if missing <= 0:
        return x
    return map_rows(x, lambda t: torch.cat([t, t[:1].expand(missing, *t.shape[1:])]))


def _wrapped(module: nn.Module) -> str | None:
    """The attribute that holds what a wrapper wraps; None where a module is none."""
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return "module"
    return "_orig_mod" if type(module).__name__ == "OptimizedModule" else None


def _eager() -> AbstractContextManager[Any]:
    """No compiled code inside; nothing was compiled where the compiler was never imported."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _numbers(name: Any, column: Any, what: str) -> np.ndarray:
    """One column of a table as float64."""
    nullable = not isinstance(column.dtype, np.dtype) and getattr(column.dtype, "kind", None) in (*"fiub",)  # pandas
    values = np.asarray(column.to_numpy(dtype=np.float64, na_value=np.nan) if nullable else column.to_numpy())
    if values.dtype.kind not in "fiub":
        raise DataError(
            f"expected numeric {what}; found column {name!r} of type {column.dtype}. Encode text, categories and dates "
            "as numbers, or leave the column out."
        )
    return values.astype(np.float64)


def _map(x: Any, change: Callable[[Any], Tensor]) -> Any:
    if isinstance(x, (Tensor, np.ndarray)) or is_table(x):
        return change(x)
    if isinstance(x, Mapping):
        return {key: _map(value, change) for key, value in x.items()}
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*(_map(value, change) for value in x))
    if isinstance(x, (tuple, list)):
        return type(x)(_map(value, change) for value in x)
    return x


def _takes_keywords(model: nn.Module, x: Mapping[str, Any]) -> bool:
    parameters = inspect.signature(model.forward).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return True
    return set(x) <= {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY}


def _parts(output: Any) -> dict[str | int, Any]:
    if isinstance(output, Mapping):
        return dict(output)
    if is_dataclass(output):
        return {field.name: getattr(output, field.name) for field in fields(output)}
    if isinstance(output, (tuple, list)):
        return dict(enumerate(output))
    return {}


def _part(output: Any, name: str | int) -> Any:
    parts = _parts(output)
    if name in parts:
        return parts[name]
    if isinstance(name, str) and hasattr(output, name):
        return getattr(output, name)
    raise OutputError(
        f"expected an output with a part {name!r}; found {type(output).__name__} with parts "
        f"{list(parts)}. Name one of these as the readout."
    )


def _only_tensor(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output
    found = [part for part in tensors(output) if part.is_floating_point()]
    if len(found) == 1:
        return found[0]
    raise OutputError(
        f"expected one floating tensor as the model's output; found {len(found)} in "
        f"{type(output).__name__} with parts {list(_parts(output))}. Pass readout=: a part's name or "
        "index, or a function of the output that returns one tensor."
    )

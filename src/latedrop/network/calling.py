"""How a model is called, and what of its output is read.

A tuple or list is several positional inputs; a mapping is keyword inputs where `forward` has parameters of those names,
and a single dict argument where it has not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from latedrop.data.arrays import all_finite, check_inputs
from latedrop.data.rows import batch_of, tensors
from latedrop.errors import LatedropError, OutputError

__all__ = ["Readout", "call", "check_finite", "part_of", "read"]

Readout: TypeAlias = Callable[[Any], Tensor] | str | int | None


def call(model: nn.Module, x: Any) -> Any:
    """Run `model` on `x`, spreading tuples and matching mappings over its arguments."""
    if isinstance(x, Tensor):
        return model(x)
    x = batch_of(x, model)
    if isinstance(x, PackedSequence):
        return model(x)
    if isinstance(x, Mapping):
        return model(**x) if _takes_keywords(model, x) else model(x)
    return model(*x) if isinstance(x, (tuple, list)) else model(x)


def part_of(output: Any, readout: Readout) -> Any:
    """What a readout takes of a raw output, unchecked."""
    if callable(readout):
        return _read_by(readout, output)
    return _only_tensor(output) if readout is None else _part(output, readout)


def read(output: Any, readout: Readout, rows: int) -> Tensor:
    """The quantity of interest, `(rows, ...)`, from the raw output of a model.

    `readout` is a callable, the name or index of one part of the output, or None where the output
    holds a single floating tensor.
    """
    value = output if readout is None and isinstance(output, Tensor) else part_of(output, readout)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        found = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise OutputError(
            f"expected the readout to give a floating tensor; found {found}. "
            "Pass a readout that returns the tensor of interest, of complex numbers their real part or size."
        )
    if value.dim() == 0 or value.shape[0] != rows:
        raise OutputError(
            f"expected an output whose first axis counts the {rows} examples; found shape "
            f"{tuple(value.shape)}. Pass a readout that keeps one entry per example; with collate=, a batch must give "
            "one for each item of the list, in its order."
        )
    return value


def check_finite(output: Tensor, when: str, inputs: Sequence[Tensor] = ()) -> None:
    """Raise `OutputError` where an output has NaN or inf, `DataError` where inputs do: a device is waited for once."""
    if not all_finite(output, *inputs):
        check_inputs(inputs)
        rows = (~torch.isfinite(output)).reshape(len(output), -1).any(1)
        raise OutputError(
            f"expected a finite output; found NaN or inf in {int(rows.sum())} of {len(output)} rows {when}. "
            "Check the model on these inputs; in half precision, try bfloat16 or a smaller rate.",
            rows=rows,
        )


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


def _read_by(readout: Callable[[Any], Tensor], output: Any) -> Any:
    try:
        return readout(output)
    except LatedropError:
        raise
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        found = (
            f"of shape {tuple(output.shape)}" if isinstance(output, Tensor) else f"with parts {list(_parts(output))}"
        )
        raise OutputError(
            f"expected a readout that takes the model's output, {type(output).__name__} {found}; it raised "
            f"{type(error).__name__}: {error}. Pass a function of this output."
        ) from error


def _part(output: Any, name: str | int) -> Any:
    parts = _parts(output)
    if name in parts:
        return parts[name]
    found = getattr(output, name, None) if isinstance(name, str) else None
    if found is not None and not callable(found):
        return found
    if isinstance(output, Tensor):
        raise OutputError(
            f"expected an output of several parts for the readout {name!r}; found one tensor of shape "
            f"{tuple(output.shape)}, without parts. Leave the readout out, or pass a function of the tensor."
        )
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
    pair = len(found) == 2 and found[0].shape == found[1].shape
    head = " Of a mean and a variance pass readout=0 and method=Terms([VarianceHead(1, 'log_variance'), 'dropout'])."
    raise OutputError(
        f"expected one floating tensor as the model's output; found {len(found)} in "
        f"{type(output).__name__} with parts {list(_parts(output))}. Pass readout=: a part's name or "
        f"index, or a function of the output that returns one tensor.{head if pair else ''}"
    )

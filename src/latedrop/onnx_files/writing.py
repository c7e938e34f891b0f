"""One ONNX file from a function of tensors: standard operators, any number of rows, checked against torch.

The function is traced (`tracing`), its operators are translated (`emitting` and the rules), and the file is run beside
torch on other numbers of rows than it was traced with before it is left at its place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from latedrop.errors import ArgumentError
from latedrop.files import write_aside
from latedrop.onnx_files import layers, operators, shapes, windows
from latedrop.onnx_files.emitting import OPSET, TYPES, Emitter, Value
from latedrop.onnx_files.metadata import sealed
from latedrop.onnx_files.tracing import Affine, graph_of, refuse
from latedrop.terminal import need

__all__ = ["write_onnx"]

_RULES = layers, operators, shapes, windows  # each registers its own when it is imported
_IR = 9
_LARGEST = 2**31 - 2**20  # bytes of one file
_ROWS = (1, 4, 7)  # that a new file is run with
_CLOSE = 1e-4  # of the spread of what comes out; more is no rounding
_JUMP = 1e-2  # likewise, of the few rows whose gradient jumps

Function = Callable[..., Mapping[str, Tensor]]


def write_onnx(
    path: str | os.PathLike[str],
    function: Function,
    rows: Callable[[int], list[Tensor]],
    names: Sequence[str],
    metadata: Mapping[str, str],
) -> Path:
    """Write a function of tensors.

    Args:
        path: of the file.
        function: from inputs, of any number of rows, to named results.
        rows: inputs of n rows.
        names: of the inputs.
        metadata: texts that the file holds besides.
    """
    need("onnx", "onnx", "onnxruntime")
    outputs: list[str] = []

    def traced(*inputs: Tensor) -> list[Tensor]:
        found = function(*inputs)
        outputs[:] = found
        return list(found.values())

    graph = graph_of(traced, rows)
    emitter = Emitter(graph, names)
    content = _serialized(
        emitter, [(name, graph, node) for name, node in zip(names, graph.inputs, strict=True)], outputs, metadata
    )
    _check(content, function, rows, names)
    path = Path(path)
    write_aside(path, content)
    return path


def _serialized(emitter: Emitter, inputs: Sequence[Any], outputs: Sequence[str], metadata: Mapping[str, str]) -> bytes:
    import onnx
    from onnx import helper, numpy_helper

    size = sum(array.nbytes for array in emitter.constants.values())
    if size > _LARGEST:
        raise ArgumentError(
            f"expected weights and masks of at most 2 GB, which one ONNX file can hold; found {size / 2**30:.1f} GB. "
            "Use fewer draws, or a smaller model."
        )
    nodes = [helper.make_node(kind, given, made, **options) for kind, given, made, options in emitter.nodes]
    for value, name in zip(emitter.results, outputs, strict=True):
        nodes.append(helper.make_node("Identity", [value.name], [name]))
    graph = helper.make_graph(
        _used(nodes, outputs),
        "latedrop",
        [_described(Value(name, graph.shapes[node], node.meta["val"].dtype)) for name, graph, node in inputs],
        [_described(value._replace(name=name)) for value, name in zip(emitter.results, outputs, strict=True)],
        [],
    )
    read = {name for node in graph.node for name in node.input}
    graph.initializer.extend(
        numpy_helper.from_array(array, name) for name, array in emitter.constants.items() if name in read
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="latedrop")
    model.ir_version = _IR
    helper.set_model_props(model, dict(metadata))
    onnx.checker.check_model(model, full_check=False)
    return sealed(model.SerializeToString())


def _used(nodes: Sequence[Any], outputs: Sequence[str]) -> list[Any]:
    """Without nodes that nobody reads."""
    wanted, kept = set(outputs), []
    for node in reversed(nodes):
        if wanted & set(node.output):
            kept.append(node)
            wanted |= set(node.input)
    return kept[::-1]


def _described(value: Value) -> Any:
    from onnx import helper

    sizes = ["rows" if size == Affine(1, 0) else None if isinstance(size, Affine) else size for size in value.shape]
    return helper.make_tensor_value_info(value.name, TYPES[value.dtype], sizes)


def _check(content: bytes, function: Function, rows: Callable[[int], list[Tensor]], names: Sequence[str]) -> None:
    """Run the file, and compare it with the function that it was made from."""
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    except Exception as error:  # classes of onnxruntime's own, which have no common base
        refuse(f"of which onnxruntime runs no such file ({_first_line(error)})", error)
    off: dict[str, list[np.ndarray]] = {}
    for count in _ROWS:
        inputs = rows(count)
        expected = function(*inputs)
        given = {name: value.detach().cpu().numpy() for name, value in zip(names, inputs, strict=True)}
        try:
            found = session.run(list(expected), given)
        except Exception as error:  # likewise
            refuse(f"whose file onnxruntime cannot run on {count} rows ({_first_line(error)})", error)
        spread = expected["std"].abs().max().item() if "std" in expected else 0.0
        for (name, value), other in zip(expected.items(), found, strict=True):
            part = _off(name, value.detach().cpu().numpy(), other, 0.0 if name == "std" else spread)
            off.setdefault(name, []).append(part)
    for name, parts in off.items():
        _judge(name, np.concatenate(parts))


def _off(name: str, value: np.ndarray, other: np.ndarray, spread: float) -> np.ndarray:
    """How far numbers are apart, as parts of what they are or of the standard deviation, where that is more; flat."""
    if value.shape != other.shape:
        refuse(f"whose file gives {name} of shape {other.shape} instead of {value.shape}")
    if value.dtype.kind != "f" or np.array_equal(value, other, equal_nan=True):
        return np.zeros(value.size)  # of classes, two may be equally likely
    size = float(np.abs(value[np.isfinite(value)]).max(initial=spread))
    apart: np.ndarray = np.abs(value.astype(np.float64) - other).ravel()
    return np.clip(apart - 1e-12, 0, None) / max(size, 1e-300)


def _judge(name: str, off: np.ndarray) -> None:
    """Refuse what is more than rounding.

    The gradient of a ReLU or of max pooling jumps where two numbers are equal. Rounding decides on which side a unit
    falls, in torch as well: the same row alone and in a batch. That moves a few rows, by little.
    """
    if bool((off <= _CLOSE).all()) or bool(np.median(off) <= _CLOSE / 10 and (off <= _JUMP).all()):
        return
    refuse(
        f"whose file gives another {name}: off by {np.max(off):.2g} of its size, half of them by {np.median(off):.2g}"
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"

"""One ONNX file from a function of tensors: standard operators, any number of rows, checked against torch.

The function is traced, forward and backward, as one graph (`tracing`); what `torch.onnx` cannot translate is written by
simpler operators (`derivatives`); `torch.onnx.export` translates the rest. Before the file is left at its place, it is
run beside torch on other numbers of rows than it was traced with.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from latedrop.errors import ArgumentError
from latedrop.files import write_aside
from latedrop.onnx_files.metadata import sealed
from latedrop.onnx_files.predictor import first_line
from latedrop.onnx_files.tracing import refuse, traced_for_any_rows
from latedrop.terminal import need

__all__ = ["write_onnx"]

_OPSET, _IR = 18, 9
_ML, _ML_OPSET = "ai.onnx.ml", 5
_MAX_BYTES = 2**31 - 2**20  # of one file
_SMALL = 1000  # numbers of constants that are computed when the file is written; masks of bytes are larger
_TYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)
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
    need("onnx", "onnx", "onnxruntime", "onnxscript")
    outputs: list[str] = []

    def listed(*inputs: Tensor) -> list[Tensor]:
        results = function(*inputs)
        outputs[:] = results
        return list(results.values())

    model = _translated(traced_for_any_rows(listed, rows), *(rows(count) for count in _ROWS[1:]))
    _rename(model.graph, names, outputs)
    model.ir_version, model.producer_name, model.producer_version = _IR, "latedrop", None
    model.metadata_props.clear()
    model.metadata_props.update(metadata)
    content = _serialized(model)
    _check(content, function, rows, names)
    path = Path(path)
    write_aside(path, content)
    return path


def _translated(module: fx.GraphModule, inputs: list[Tensor], others: list[Tensor]) -> Any:
    """Return the model of `onnx_ir`, as `torch.onnx` writes a graph whose sizes follow from the rows."""
    from onnxscript.optimizer import optimize

    for tensor in (*inputs, *module.buffers()):
        if tensor.dtype not in _TYPES:
            refuse(f"with numbers of type {tensor.dtype}")
    dim = torch.export.Dim("rows", min=2)
    free = tuple({0: dim} if a.shape != b.shape else {} for a, b in zip(inputs, others, strict=True))
    try:
        with torch.no_grad(), _quiet():
            program = torch.export.export(
                module,
                tuple(inputs),
                dynamic_shapes=free,
                strict=False,
                prefer_deferred_runtime_asserts_over_guards=True,  # the file is tried below
            )
            written: Any = torch.onnx.export(program, dynamo=True, opset_version=_OPSET, verbose=False, optimize=False)
            _place_trees(written.model)
            optimize(written.model, input_size_limit=_SMALL, output_size_limit=_SMALL)
    except Exception as error:  # any operator's own errors, and those of torch.onnx, which have no common base
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        lacking = re.search(r"No ONNX function found for .*?op='([\w.]+)'", str(cause))
        if lacking:
            refuse(f"with the operator {lacking[1]}, which torch.onnx cannot translate", error)
        refuse(f"that torch.onnx cannot translate ({first_line(cause)})", error)
    return written.model


def _place_trees(model: Any) -> None:
    """Replace the nodes that `Trees.sums` leaves in a trace by `TreeEnsemble`s in double precision."""
    import onnx_ir

    for node in [node for node in model.graph if node.domain == "latedrop"]:
        rows = onnx_ir.node("Cast", node.inputs[:1], {"to": onnx_ir.DataType.DOUBLE})
        nodes, leaves, roots = (value.const_value.numpy() for value in node.inputs[1:])
        columns = [
            onnx_ir.node("TreeEnsemble", rows.outputs, _ensemble(nodes, values, roots.astype(int)), domain=_ML)
            for values in leaves.T
        ]
        joined = onnx_ir.node("Concat", [column.outputs[0] for column in columns], {"axis": 1})
        made = [rows, *columns, joined]
        onnx_ir.convenience.replace_nodes_and_values(model.graph, node, [node], made, node.outputs, joined.outputs)
        model.opset_imports[_ML] = _ML_OPSET
    model.opset_imports.pop("latedrop", None)


def _ensemble(nodes: np.ndarray, values: np.ndarray, roots: np.ndarray) -> dict[str, Any]:
    """Return the attributes of a `TreeEnsemble`, which counts branches and leaves apart; a root is a branch always."""
    import onnx_ir

    feature, threshold, child = nodes[:, 0].astype(int), nodes[:, 1].astype(float), nodes[:, 2].astype(int)
    leaf = np.isinf(threshold)
    branch = ~leaf
    branch[roots] = True
    first = child[branch]
    ways = {"true": first, "false": np.where(leaf[branch], first, first + 1)}
    place = {True: leaf.cumsum() - 1, False: branch.cumsum() - 1}
    return {
        "n_targets": 1,
        "tree_roots": place[False][roots].tolist(),
        "nodes_featureids": feature[branch].tolist(),
        "nodes_splits": onnx_ir.tensor(threshold[branch]),
        "nodes_modes": onnx_ir.tensor(np.zeros(len(first), np.uint8)),  # x[feature] <= split
        **{f"nodes_{way}leafs": leaf[ids].astype(int).tolist() for way, ids in ways.items()},
        **{
            f"nodes_{way}nodeids": np.where(leaf[ids], place[True][ids], place[False][ids]).tolist()
            for way, ids in ways.items()
        },
        "leaf_targetids": [0] * int(leaf.sum()),
        "leaf_weights": onnx_ir.tensor(values[leaf].astype(float)),
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out torch's warnings about its own code, and about packages that are not installed."""
    logs = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


def _rename(graph: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Name inputs and outputs as asked for and all else by numbers; drop notes on the source code and on shapes."""
    import onnx_ir

    free = {value.shape[0] for value in graph.inputs if value.shape.is_dynamic()}
    for number, node in enumerate(graph):
        node.name = None
        node.metadata_props.clear()
        for place, value in enumerate(node.outputs):
            value.name = f"/v/{number}/{place}"  # which no argument of a function is called
    for number, value in enumerate(list(graph.initializers.values())):
        value.name = f"/c/{number}"
    for value, name in zip((*graph.inputs, *graph.outputs), (*inputs, *outputs), strict=True):
        sizes = ["rows" if size in free else size if isinstance(size, int) else None for size in value.shape]
        value.name, value.shape = name, onnx_ir.Shape(sizes)


def _serialized(model: Any) -> bytes:
    import onnx
    import onnx_ir

    size = sum(value.const_value.nbytes for value in model.graph.initializers.values())
    if size > _MAX_BYTES:
        raise ArgumentError(
            f"expected weights and masks of at most 2 GB, which one ONNX file can hold; found {size / 2**30:.1f} GB. "
            "Use fewer draws, or a smaller model."
        )
    proto = onnx_ir.to_proto(model)
    del proto.graph.value_info[:]
    onnx.checker.check_model(proto, full_check=False)
    return sealed(proto.SerializeToString())


def _check(content: bytes, function: Function, rows: Callable[[int], list[Tensor]], names: Sequence[str]) -> None:
    """Run the file, and compare it with the function that it was made from."""
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    except Exception as error:  # classes of onnxruntime's own, which have no common base
        refuse(f"of which onnxruntime runs no such file ({first_line(error)})", error)
    off: dict[str, list[np.ndarray]] = {}
    for count in _ROWS:
        inputs = rows(count)
        expected = function(*inputs)
        given = {name: value.detach().cpu().numpy() for name, value in zip(names, inputs, strict=True)}
        try:
            results = session.run(list(expected), given)
        except Exception as error:  # likewise
            refuse(f"whose file onnxruntime cannot run on {count} rows ({first_line(error)})", error)
        spread = expected["std"].abs().max().item() if "std" in expected else 0.0
        for (name, value), other in zip(expected.items(), results, strict=True):
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

"""Exported programs as models: what `torch.export` wrote runs without the code that it was made from.

A program is a graph of operators with its weights. It has no weight layers, but each operator that takes a weight is
seen when it is called (`functional`), so that all of latedrop works on it: sites have the parameters' names.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any
from warnings import catch_warnings, filterwarnings
from zipfile import BadZipFile, ZipFile

import torch
from torch import nn

from latedrop.errors import FileError
from latedrop.files import readable
from latedrop.torch_private import operator_of

__all__ = ["load_program"]


def load_program(
    source: str | os.PathLike[str] | torch.export.ExportedProgram,
    *,
    device: str | torch.device | None = None,
) -> nn.Module:
    """Read a `torch.export` archive as a model that every function of latedrop takes.

    Args:
        source: the path of a `.pt2` file that `torch.export.save` wrote, or a program that is in memory already.
        device: where it should run; where it was exported, by default.

    Raises:
        FileError: the file is missing, is no archive of an exported program, holds pickled objects besides tensors, or
            a program that was exported in train mode or for a fixed number of rows.

    >>> net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1)).eval()
    >>> rows = {0: torch.export.Dim("rows")}
    >>> program = load_program(torch.export.export(net, (torch.zeros(2, 3),), dynamic_shapes=(rows,)))
    >>> from latedrop.network.find_sites import find_sites
    >>> print(find_sites(program, torch.zeros(8, 3)))
    site      layer   masks    units  calls
    2.weight  linear  element  8 = 8  1
    """
    program = source if isinstance(source, torch.export.ExportedProgram) else _read(Path(source))
    _check_mode(program)
    _check_rows(program)
    if device is not None:
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(deepcopy(program) if program is source else program, device)
    model = program.module()
    spec: Any = program.call_spec.in_spec
    args, _ = spec.unflatten([None] * spec.num_leaves)
    positions = list(inspect.signature(model.forward).parameters)[: len(args)]
    model.register_forward_pre_hook(partial(_by_position, positions), prepend=True, with_kwargs=True)
    return model


def _by_position(names: list[str], _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pass inputs that were exported by position in that way, also where they were given by name."""
    moved = [kwargs[name] for name in names[len(args) :] if name in kwargs]
    return (*args, *moved), {name: value for name, value in kwargs.items() if name not in names[len(args) :]}


def _read(path: Path) -> torch.export.ExportedProgram:
    with readable(path, "an exported program"):
        content = path.read_bytes()
    try:
        names = ZipFile(BytesIO(content)).namelist()
    except BadZipFile:
        names = []
    program = any(name.endswith(("/models/model.json", "serialized_exported_program.json")) for name in names)
    if not program or any("/aotinductor/" in name for name in names):  # machine code, which would be loaded
        raise FileError(
            f"expected an archive that torch.export.save wrote; found another kind of file, half of one, or machine "
            f"code at {path}. Export the Python model: torch.export.save(torch.export.export(model, inputs, "
            "dynamic_shapes=...), path)."
        )
    try:
        with _tensors_alone():
            return torch.export.load(BytesIO(content))
    except Exception as error:
        if "weights_only" in str(error):
            raise FileError(
                f"expected tensors only in {path}; it holds pickled objects, which can run any code. Export a model "
                "whose inputs are tensors in tuples, lists and dicts, or load the program by torch.export.load and "
                "pass that."
            ) from error
        raise FileError(
            f"expected a program that this torch, {torch.__version__}, can read from {path}; it raised "
            f"{type(error).__name__}: {str(error).partition(chr(10))[0]} Export the model again with this version."
        ) from error


@contextmanager
def _tensors_alone() -> Iterator[None]:
    """Let torch unpickle tensors alone, where it would try again with any pickle; and keep its log quiet."""
    names = ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # what matters of failed attempts is in the error
    os.environ[names[0]] = "1"
    try:
        with catch_warnings():
            filterwarnings("ignore", "The given buffer is not writable")  # torch 2.11, of its own way to read
            yield
    finally:
        logging.disable(level)
        del os.environ[names[0]]
        os.environ.update(before)


def _check_mode(program: torch.export.ExportedProgram) -> None:
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    training = sorted({str(node.target) for graph in graphs for node in graph.nodes if _trains(node)})
    if training:
        raise FileError(
            f"expected a program that was exported in eval mode; found {training} in train mode. Call model.eval() "
            "before torch.export.export, and leave no dropout on."
        )


def _trains(node: torch.fx.Node) -> bool:
    """Return whether a node draws random numbers, or takes its statistics from the batch, as in training."""
    declared = operator_of(node.target)
    if declared is None:
        return False
    values = declared.values(node.args, node.kwargs)
    train = values.get("train", values.get("training")) is True
    if "running_mean" in values:
        return train and values["running_mean"] is not None
    if "dropout" in values:
        return train and values["dropout"] > 0
    return train or values.get("dropout_p", 0) > 0


def _check_rows(program: torch.export.ExportedProgram) -> None:
    """Raise `FileError` where the program takes one number of rows alone."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    inputs = [values.get(str(name)) for name in program.graph_signature.user_inputs]
    sizes = [value.shape[0] for value in inputs if isinstance(value, torch.Tensor) and value.dim() > 0]
    if sizes and all(isinstance(size, int) for size in sizes):
        raise FileError(
            f"expected a program of any number of rows; found one that was exported for {sizes[0]}. Export it "
            "with a dynamic batch dimension: torch.export.export(model, inputs, dynamic_shapes=({0: "
            'torch.export.Dim("rows")},)).'
        )

"""Load the user's model by name: from Python code, with weights from a file, or as an exported program.

`package.module:callable` is imported with the current folder on the path; the callable returns a module, or is one.
A `.pt2` file is a program of `torch.export`. Weights are read without unpickling objects, from safetensors or with
`torch.load(weights_only=True)`.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import secrets
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path, PureWindowsPath
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from latedrop.devices import chosen_device
from latedrop.errors import ArgumentError, FileError, LatedropError
from latedrop.files import readable
from latedrop.programs import load_program
from latedrop.terminal import listed
from latedrop.weights import weight_marks

__all__ = ["as_arguments", "input_names", "load_function", "load_model", "readout_of"]

_log = logging.getLogger(__name__)
_NESTED = ("state_dict", "model_state_dict", "model")
_SHOWN = 4


def load_model(name: str, weights: str | None = None, *, device: str = "auto", untrained: bool = False) -> nn.Module:
    """Load the model with this name.

    Args:
        name: `package.module:callable`, or a `.pt2` file.
        weights: a `.safetensors` file, or one written by `torch.save(model.state_dict(), path)`.
        device: `"auto"`, `"cpu"`, `"cuda"`, ...; auto is a GPU where there is one, or where a program was exported.
        untrained: accept random weights; else a callable that gives other weights each time is refused.
    """
    where = chosen_device(device)
    if Path(name).suffix.lower() == ".pt2" and ":" not in Path(name).name:
        if weights is not None:
            raise ArgumentError(f"expected no weights beside {name}, which has its own; found {weights}. Leave it out.")
        return load_program(name, device=None if device == "auto" else where)
    made = _from_code(name, trained=not untrained and weights is None)
    if weights is not None:
        _load_weights(made, name, weights)
    _log.info("model %s: %s, on %s", name, type(made).__name__, where)
    return made.to(where)


def load_function(name: str) -> Callable[..., Any]:
    """Import the callable `package.module:name`."""
    target = _attribute(name)
    if not callable(target):
        raise ArgumentError(f"expected a function at {name}; found {type(target).__name__}.")
    return target  # type: ignore[no-any-return]


def readout_of(text: str | int | None) -> Any:
    """Return the readout that a text means: a function where it names one, an index, or a name."""
    if not isinstance(text, str):
        return text
    return load_function(text) if ":" in text else int(text) if text.removeprefix("-").isdecimal() else text


def as_arguments(model: nn.Module, arrays: Any) -> Any:
    """Return inputs as arguments: of those by name one alone, several by name if the model has these, else in order."""
    if not isinstance(arrays, Mapping):
        return arrays
    if len(arrays) == 1:
        return next(iter(arrays.values()))
    program = getattr(model, "_in_spec", None)
    if program is not None:  # an exported program takes by name only what was exported by name
        accepted = set(program.children()[1].context)
    else:
        parameters = inspect.signature(model.forward).parameters.values()
        accepted = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return dict(arrays) if set(arrays) <= accepted else tuple(arrays.values())


def input_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the model's inputs, in order; none if it takes any number of them."""
    if isinstance(model, torch.fx.GraphModule):
        return tuple(str(node.target) for node in model.graph.nodes if node.op == "placeholder")
    parameters = inspect.signature(model.forward).parameters.values()
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return ()
    return tuple(p.name for p in parameters)


def _from_code(name: str, *, trained: bool) -> nn.Module:
    """Return the module that code makes; with `trained`, refuse a callable that makes other weights each time."""
    target = _attribute(name)
    if isinstance(target, nn.Module):
        return target
    if not callable(target):
        raise ArgumentError(
            f"expected a module or a function that returns one at {name}; found {type(target).__name__}."
        )
    # The first one is let go before the second is made: there may be memory for one alone.
    before = _marks(_called(name, target)) if trained else {}
    made = _called(name, target)
    random = [key for key, mark in _marks(made).items() if mark != before.get(key)] if trained else []
    if random:
        raise ArgumentError(
            f"expected {name} to have trained weights; found random ones: made twice, {listed(random, _SHOWN)} came "
            "out different. Pass --weights FILE, have the code load them, or pass --untrained to go on."
        )
    return made


def _called(name: str, make: Callable[[], Any]) -> nn.Module:
    try:
        made = make()
    except Exception as error:
        raise LatedropError(
            f"expected {name}() to return a model; it raised {type(error).__name__}: {error}. It is called without "
            "arguments."
        ) from error
    if not isinstance(made, nn.Module):
        raise ArgumentError(f"expected {name}() to return a torch.nn.Module; found {type(made).__name__}.")
    return made


def _marks(model: nn.Module) -> dict[str, bytes]:
    """Return marks that tell weights apart; lazy weights, which do not exist yet, are never the same."""
    lazy = [name for name, value in model.named_parameters() if is_lazy(value)]
    return {name: secrets.token_bytes(8) for name in lazy} if lazy else weight_marks(model)


def _attribute(name: str) -> Any:
    module_name, colon, path = name.partition(":")
    if not colon or not module_name or not path:
        raise ArgumentError(
            f"expected package.module:callable or a .pt2 file; found {name!r}. For the function net in my_model.py "
            "write my_model:net; weights go to --weights."
        )
    if module_name.endswith(".py") or "/" in module_name or "\\" in module_name:
        plain = PureWindowsPath(module_name).with_suffix("").as_posix().strip("/.").replace("/", ".")
        raise ArgumentError(f"expected package.module:callable; found {name!r}. Write {plain}:{path}, without .py.")
    target: Any = _imported(module_name)
    for part in path.split("."):
        if not hasattr(target, part):
            raise ArgumentError(f"expected {part!r} in {module_name}; it is not there. {_hint(target, part)}")
        target = getattr(target, part)
    return target


def _imported(module_name: str) -> Any:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)  # and left there: the user's code may import more of itself later
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise LatedropError(
                f"expected to import {module_name}; it needs {error.name}, which is not installed."
            ) from error
        raise ArgumentError(
            f"expected a Python module {module_name!r} in the current folder or installed; found none."
        ) from error
    except Exception as error:
        raise LatedropError(
            f"expected to import {module_name}; it raised {type(error).__name__}: {error}. Mend it first: "
            f"python -c 'import {module_name}'."
        ) from error


def _hint(module: Any, name: str) -> str:
    own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    close = get_close_matches(name, own, n=1)
    return f"Did you mean {close[0]!r}?" if close else f"What can be called there: {listed(own, _SHOWN)}."


def _load_weights(model: nn.Module, name: str, path: str) -> None:
    weights = _safetensors(path) if Path(path).suffix.lower() == ".safetensors" else _tensors(path)
    if isinstance(weights, Mapping):
        weights = next((weights[key] for key in _NESTED if isinstance(weights.get(key), Mapping)), weights)
    if not isinstance(weights, Mapping) or not any(isinstance(value, Tensor) for value in weights.values()):
        raise FileError(f"expected weights by name in {path}; found {type(weights).__name__}. Save model.state_dict().")
    try:
        model.load_state_dict(_without_wrapper(dict(weights), set(model.state_dict())))
    except (RuntimeError, TypeError, AttributeError) as error:
        said = " ".join(str(error).split())
        raise FileError(f"expected weights of {name} in {path}; torch says: {said[:500].rstrip('.')}.") from error


def _tensors(path: str) -> Any:
    try:
        with readable(path, "a file"):
            return torch.load(path, map_location="cpu", weights_only=True)
    except FileError:
        raise
    except Exception as error:  # whatever the unpickler stumbles over
        raise FileError(
            f"expected tensors in {path}; reading it raised {type(error).__name__}, as if damaged or holding other "
            "objects, which are not unpickled. Save model.state_dict(); or load the file in your own code, and name "
            "that: package.module:callable."
        ) from error


def _safetensors(path: str) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise LatedropError(
            'expected safetensors to read these weights; it is not installed. Run: pip install "latedrop[safetensors]"'
        ) from error
    try:
        with readable(path, "a file"):
            return load_file(path)
    except SafetensorError as error:
        raise FileError(f"expected safetensors in {path}; it is damaged or another file: {error}.") from error


def _without_wrapper(given: dict[str, Any], wanted: set[str]) -> dict[str, Any]:
    """Return the weights without the prefix of DDP, `torch.compile` or Lightning."""
    starts = {name.partition(".")[0] for name in given}
    if len(starts) == 1 and not wanted & set(given):
        stripped = {name.partition(".")[2]: value for name, value in given.items()}
        return stripped if wanted & set(stripped) else given
    return given

"""The package as a whole: imports point one way, importing is quick and silent, the public names are there."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import latedrop

SOURCE = Path(latedrop.__file__).parent
ROOMS = [
    {"errors"},
    {"records", "numerals", "quantiles", "wrappers"},
    {"torch_private", "files", "devices", "addresses", "terminal", "progress"},
    {"metrics", "plots", "web"},
    {"data"},
    {"programs"},
    {"network"},
    {"dropout"},
    {"propagation"},
    {"terms"},
    {"streams"},
    {"onnx_files"},
    {"calibration"},
    {"report"},
    {"adapters", "serving"},
    {"crowd"},
    {"console"},
    {"cli"},
    {"__main__"},
]
"""From the bottom to the top: a room imports from those before it, and from itself."""
FILES = {".".join(path.relative_to(SOURCE).with_suffix("").parts): path for path in sorted(SOURCE.rglob("*.py"))}


def imports(name: str) -> set[str]:
    """Files of latedrop that a file imports, anywhere in it; a package is its `__init__`."""
    found = set()
    for node in ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "latedrop":
            module = node.module.partition(".")[2]
            for alias in node.names:
                inner = f"{module}.{alias.name}" if module else alias.name
                options = (inner, f"{inner}.__init__", module, f"{module}.__init__")
                found |= {next((option for option in options if option in FILES), "__init__")}
    return found - {"__init__"}


def level(name: str) -> int:
    return next(i for i, rooms in enumerate(ROOMS) if name.partition(".")[0] in rooms)


@pytest.mark.parametrize("name", [name for name in FILES if name != "__init__"])
def test_imports_point_one_way(name: str) -> None:
    room = name.partition(".")[0]
    above = [other for other in imports(name) if level(other) >= level(name) and other.partition(".")[0] != room]
    assert above == [], f"{name} imports from its own level or above"


def test_no_file_imports_itself_through_others() -> None:
    tuple(TopologicalSorter({name: imports(name) for name in FILES if name != "__init__"}).static_order())


def test_private_parts_of_torch_are_used_in_one_file() -> None:
    private = re.compile(r"torch\._[a-zA-Z]|from torch[\w.]*\._|torch\.fx\.experimental|\b_torchdynamo")
    users = {name for name, path in FILES.items() if private.search(path.read_text(encoding="utf-8"))}
    assert users <= {"torch_private"}


def test_importing_is_silent_and_light() -> None:
    code = """
import random, sys
import numpy as np, torch
before = torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
import latedrop
after = torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
heavy = {"matplotlib", "pandas", "scipy", "sklearn", "typer", "rich"} & set(sys.modules)
assert not heavy, heavy
assert not torch.jit.is_scripting()
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_public_names_exist() -> None:
    for name in latedrop.__all__:
        assert getattr(latedrop, name) is not None

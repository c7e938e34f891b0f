"""The package as a whole: imports point one way, importing is quick and silent, the public names are there."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import latedrop

SOURCE = Path(latedrop.__file__).parent
ROOMS = [
    {"errors"},
    {"records", "numerals", "quantiles", "switches", "lazy"},
    {"torch_inside", "files", "devices", "addresses", "terminal", "progress"},
    {"metrics", "plots", "web"},
    {"model"},
    {"masking"},
    {"variance"},
    {"terms"},
    {"streams"},
    {"onnx_files"},
    {"calibration"},
    {"report"},
    {"adapters", "serving"},
    {"crowd"},
    {"console", "explore"},
    {"studies"},
    {"cli"},
    {"__main__"},
]
"""From the bottom to the top: a room imports from those before it, and from itself."""
FILES = {".".join(path.relative_to(SOURCE).with_suffix("").parts): path for path in sorted(SOURCE.rglob("*.py"))}
LONGEST_FILE, LONGEST_FUNCTION = 400, 60


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


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """From `def` to the end; only the code of a function whose signature and docstring describe many options.

    Such a one (`calibrate` has 25 arguments, each with its line of help) hands its options on: it has no branch but an
    expression, no loop and no function inside.
    """
    assert function.end_lineno is not None
    whole = function.end_lineno - function.lineno + 1
    flat = (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr)
    if whole > LONGEST_FUNCTION and ast.get_docstring(function) and all(isinstance(s, flat) for s in function.body):
        return function.end_lineno - function.body[1].lineno + 1
    return whole


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_long(name: str) -> None:
    text = FILES[name].read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LONGEST_FILE
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert [f"{f.name}: {lines_of(f)} lines" for f in functions if lines_of(f) > LONGEST_FUNCTION] == []


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

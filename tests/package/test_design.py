"""Both packages as a whole: imports point one way, importing is quick and silent, loggers tell what is done."""

import ast
import importlib
import logging
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import latedrop
import latedrop_crowd
from networks import mlp, noisy

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
ROOMS = [
    {"errors"},
    {"files", "numerals"},
    {"options", "records"},
    {"quantiles", "stored_tensors", "torch_private", "devices", "terminal"},
    {"weights"},
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
    {"prediction"},
    {"boxes", "evaluation", "multilabel", "named"},
    {"report"},
    {"adapters", "serving"},
    {"cli"},
    {"__main__"},
]
CROWD_ROOMS = [
    {"blocks", "frames"},
    {"density", "mcnn", "regions"},
    {"layouts"},
    {"calibration", "scenes"},
    {"counting", "training"},
    {"panels"},
    {"console"},
    {"cli"},
]
"""From the bottom to the top: a room imports from those before it, and from itself."""
ORDER = {"latedrop": ROOMS, "latedrop_crowd": CROWD_ROOMS}
SOURCES = {package.__name__: Path(package.__file__ or "").parent for package in (latedrop, latedrop_crowd)}
FILES = {
    ".".join((package, *path.relative_to(source).with_suffix("").parts)): path
    for package, source in SOURCES.items()
    for path in sorted(source.rglob("*.py"))
}


def imported(name: str) -> set[tuple[str, str]]:
    """The modules and names that a file imports from either package, anywhere in it."""
    return {
        (node.module, alias.name)
        for node in ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in ORDER
        for alias in node.names
    }


def imports(name: str) -> set[str]:
    """Files of its own package that a file imports; a package is its `__init__`, and the outermost is left out."""
    package = name.partition(".")[0]
    files = set()
    for module, inner in imported(name):
        options = (f"{module}.{inner}", f"{module}.{inner}.__init__", module, f"{module}.__init__")
        files.add(next(option for option in options if option in FILES))
    return {file for file in files if file.partition(".")[0] == package} - {f"{package}.__init__"}


def room(name: str) -> str:
    return name.split(".")[1]


def level(name: str) -> int:
    return next(i for i, rooms in enumerate(ORDER[name.partition(".")[0]]) if room(name) in rooms)


@pytest.mark.parametrize("name", [name for name in FILES if room(name) != "__init__"])
def test_imports_point_one_way(name: str) -> None:
    above = [other for other in imports(name) if level(other) >= level(name) and room(other) != room(name)]
    assert above == [], f"{name} imports from its own level or above"


def test_no_file_imports_itself_through_others() -> None:
    tuple(TopologicalSorter({name: imports(name) for name in FILES if room(name) != "__init__"}).static_order())


def test_the_library_does_not_import_the_counter() -> None:
    users = [name for name in FILES if name.startswith("latedrop.") and "latedrop_crowd" in str(imported(name))]
    assert users == []


def public_names() -> set[tuple[str, str]]:
    """The names of latedrop that docs/reference shows: what others may rely on."""
    names = set()
    for page in REFERENCE.glob("*.md"):
        module = ""
        for kind, value in re.findall(r"^\.\. (\w+):: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            if kind == "automodule":
                names |= {(value, name) for name in importlib.import_module(value).__all__}
            elif kind == "currentmodule":
                module = value
            else:
                names.add((module, value))
    return names


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("latedrop_crowd.")])
def test_the_counter_uses_public_names_alone(name: str) -> None:
    used = {(module, inner) for module, inner in imported(name) if module.partition(".")[0] == "latedrop"}
    assert used - public_names() == set()


def test_private_parts_of_torch_are_used_in_one_file() -> None:
    private = re.compile(r"torch\._[a-zA-Z]|from torch[\w.]*\._|torch\.fx\.experimental|\b_torchdynamo")
    users = {name for name, path in FILES.items() if private.search(path.read_text(encoding="utf-8"))}
    assert users <= {"latedrop.torch_private"}


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


def test_a_calibration_is_told_to_loggers(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    net = mlp(2, 20, 1)
    rows = noisy(net, 40, noise=1.0, inputs=2)
    caplog.set_level(logging.INFO, "latedrop")
    latedrop.calibrate(net, rows, progress=False).save(tmp_path / "cal.json")
    messages = [record.getMessage() for record in caplog.records]
    assert str(tmp_path / "cal.json") in messages[-1]
    assert {record.name.partition(".")[0] for record in caplog.records} == {"latedrop"}
    caplog.clear()
    caplog.set_level(logging.DEBUG, "latedrop")
    latedrop.calibrate(net, rows, method=latedrop.Sampling(rates=[0.1, 0.3], draws=6), progress=False)
    assert any("rate 0.3" in record.getMessage() for record in caplog.records)


@pytest.mark.slow
def test_nothing_is_heard_unless_asked_for() -> None:
    code = """
import logging, torch, latedrop
from torch import nn
torch.manual_seed(0)
x = torch.randn(40, 2)
net = nn.Sequential(nn.Linear(2, 9), nn.ReLU(), nn.Linear(9, 1))
latedrop.calibrate(net, (x, net(x).detach() + torch.randn(40, 1)), progress=False)
assert logging.getLogger().handlers == []
assert [type(handler) for handler in logging.getLogger("latedrop").handlers] == [logging.NullHandler]
assert logging.getLogger("latedrop").level == logging.NOTSET
"""
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")

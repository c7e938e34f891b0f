"""The package as a whole: imports point one way, importing is quick and silent, the public names are there."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import latedrop

SOURCE = Path(latedrop.__file__).parent
ORDER = [
    {"errors", "gaussian", "masks_cuda"},
    {"devices", "files", "forward", "masks", "metrics", "tables", "terminal"},
    {"folding", "functional", "programs", "scale", "batches", "plots", "writing"},
    {"sites", "intervals", "fit", "models"},
    {"inject", "prefix", "record"},
    {"compiled"},
    {"sample"},
    {"linear", "propagate_rules"},
    {"propagate"},
    {"calibrate"},
    {"predict"},
    {"evaluate", "feed"},
    {"report"},
    {"demo", "cli_model", "crowd_cli"},
    {"cli"},
]


def imports(path: Path) -> set[str]:
    """Rooms of latedrop that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module.startswith("latedrop."):
                found.add(node.module.split(".")[1])
            elif node.module == "latedrop":
                found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("path", sorted(SOURCE.glob("*.py")), ids=lambda path: path.stem)
def test_imports_point_one_way(path: Path) -> None:
    if path.stem == "__init__":
        return
    level = next(i for i, rooms in enumerate(ORDER) if path.stem in rooms)
    below = set().union(*ORDER[:level])
    known = set().union(*ORDER)
    assert (imports(path) & known) <= below, f"{path.stem} imports from its own level or above"
    if level < len(ORDER) - 2:
        assert not imports(path) & {"crowd", "studies", "adapters"}, f"{path.stem} imports what is built on it"


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

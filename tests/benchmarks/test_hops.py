"""Functions that a call enters are counted exactly, and alike each time."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.hops import cases, entered, walked

ONE = """
def start(other):
    for _ in range(2):
        other.middle(inside)
    return [other.leaf() for _ in range(3)]

def inside():
    return 1
"""
TWO = """
def middle(back):
    leaf()
    return back()

def leaf():
    return 0
"""


@pytest.fixture
def modules(tmp_path: Path) -> list[ModuleType]:
    modules = []
    for name, text in (("one", ONE), ("two", TWO)):
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        modules.append(importlib.util.module_from_spec(spec))
        spec.loader.exec_module(modules[-1])
    return modules


def test_functions_of_a_folder_are_counted_once(modules: list[ModuleType], tmp_path: Path) -> None:
    one, two = modules
    seen = entered(lambda: one.start(two), tmp_path)
    assert {code.co_name for code in seen} == {"start", "middle", "leaf", "inside"}
    assert {Path(code.co_filename).name for code in seen} == {"one.py", "two.py"}
    before = sys.getprofile()
    with pytest.raises(ZeroDivisionError):
        entered(lambda: one.start(two) and 1 / 0, tmp_path / "elsewhere")
    assert sys.getprofile() is before
    assert entered(lambda: one.start(two), tmp_path / "elsewhere") == set()


@pytest.mark.filterwarnings("ignore::latedrop.LatedropWarning")
def test_a_walk_is_the_same_each_time() -> None:
    run = cases()["predict, sample, CNN"]
    first, second = walked(run), walked(run)
    assert first == second
    assert first["functions"] >= first["files"] > 1

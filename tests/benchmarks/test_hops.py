"""Walks through the source are counted exactly, and alike each time."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import hops, timing
from benchmarks.hops import Walk, cases, markdown, walked

ONE = """
from contextlib import contextmanager

def start(other):
    for _ in range(2):
        other.middle(inside)
    return [other.leaf() for _ in range(3)]

def inside():
    return 1

def fail(other):
    try:
        other.broken()
    except ValueError:
        return inside()

@contextmanager
def around():
    yield 1

def use():
    with around():
        inside()
"""
TWO = """
def middle(back):
    leaf()
    return back()

def leaf():
    return 0

def broken():
    raise ValueError
"""


@pytest.fixture
def modules(tmp_path: Path) -> tuple[Path, ModuleType, ModuleType]:
    found = []
    for name, text in (("one", ONE), ("two", TWO)):
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found.append(module)
    return tmp_path, found[0], found[1]


def test_calls_and_ways_back_are_counted(modules: tuple[Path, ModuleType, ModuleType]) -> None:
    folder, one, two = modules
    walk = Walk(folder)
    walk.follow(lambda: one.start(two))
    assert {code.co_name for code in walk.functions} == {"start", "middle", "leaf", "inside"}
    assert {tuple(code.co_name for code in way) for way in walk.ways} == {
        *(("start", "middle"), ("middle", "inside"), ("start", "leaf"))
    }
    assert walk.files == {"one.py", "two.py"}
    assert walk.depth == 3
    assert walk.calls == 1 + 2 * 3 + 3


def test_errors_and_generators_end_their_walk(modules: tuple[Path, ModuleType, ModuleType]) -> None:
    folder, one, two = modules
    walk = Walk(folder)
    walk.follow(lambda: one.fail(two))
    assert (len(walk.ways), walk.depth, walk.calls) == (1, 2, 3)
    walk = Walk(folder)
    walk.follow(one.use)
    assert (len(walk.ways), walk.depth) == (0, 2)
    walk.follow(one.inside)
    assert walk.depth == 2  # nothing was left on the stack


def test_other_folders_do_not_count_and_the_profiler_is_given_back(
    modules: tuple[Path, ModuleType, ModuleType], tmp_path: Path
) -> None:
    _, one, two = modules
    walk = Walk(tmp_path / "elsewhere")
    before = sys.getprofile()
    with pytest.raises(ZeroDivisionError):
        walk.follow(lambda: one.start(two) and 1 / 0)
    assert sys.getprofile() is before
    assert (walk.files, walk.depth, walk.calls) == (set(), 0, 0)


@pytest.mark.parametrize("name", ["calibrate, linear, MLP", "predict, sample, CNN"])
def test_a_walk_is_the_same_each_time(name: str) -> None:
    first, second = (walked(cases()[name]) for _ in range(2))
    assert first == second
    assert first["files"] > 1
    assert first["calls"] >= first["depth"] > 1
    assert first["calls"] >= first["functions"] >= first["files"]


def test_the_table_is_made_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(hops, "measure", lambda: {"cases": {"predict": dict.fromkeys(hops.LABELS, 7) | {"files": 3}}})
    monkeypatch.setattr(timing, "RESULTS", tmp_path)
    monkeypatch.setattr(hops, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["hops"])
    hops.main()
    printed = capsys.readouterr().out
    assert "| predict | 3 | 7 |" in printed
    monkeypatch.setattr(sys, "argv", ["hops", "--tables"])
    hops.main()
    assert capsys.readouterr().out == printed
    assert markdown(json.loads((tmp_path / "hops.json").read_text())) + "\n" == printed

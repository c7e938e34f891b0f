"""Walks through the source are counted exactly, and alike each time."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

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
    # Twice: to middle, back into inside, back to middle, back to start. Three times: to leaf and back.
    assert walk.pairs == {("one.py", "two.py"): 2 * 4 + 3 * 2}
    assert walk.files == {"one.py", "two.py"}
    assert walk.depth == 3
    assert walk.calls == 1 + 2 * 3 + 3


def test_errors_and_generators_end_their_walk(modules: tuple[Path, ModuleType, ModuleType]) -> None:
    folder, one, two = modules
    walk = Walk(folder)
    walk.follow(lambda: one.fail(two))
    assert (walk.pairs.total(), walk.depth, walk.calls) == (2, 2, 3)
    walk = Walk(folder)
    walk.follow(one.use)
    assert (walk.pairs.total(), walk.depth) == (0, 2)
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
    assert sum(count for *_, count in first["most"]) <= first["switches"]


def test_versions_stand_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def told(_: str, arguments: list[str], source: Path) -> dict[str, Any]:
        assert arguments == ["--measure"]
        number = len(source.name)
        row = dict.fromkeys(hops.LABELS, 7) | {"files": number, "switches": 10 * number, "most": []}
        return {"machine": {"source": "digest"}, "cases": {"predict": row}}

    monkeypatch.setattr(hops, "answer_of", told)
    monkeypatch.setattr(timing, "RESULTS", tmp_path)
    monkeypatch.setattr(hops, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["hops", "--source", "a", "bb", "--labels", "before", "after"])
    hops.main()
    printed = capsys.readouterr().out
    assert "| call (before / after) | files |" in printed
    assert "| predict | 1 / 2 |" in printed
    assert "| 10 / 20 |" in printed
    assert markdown(json.loads((tmp_path / "hops.json").read_text())) + "\n" == printed
    monkeypatch.setattr(sys, "argv", ["hops", "--source", "a", "bb", "--labels", "before"])
    with pytest.raises(SystemExit):
        hops.main()

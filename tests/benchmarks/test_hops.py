"""Functions that a call enters are counted exactly, and alike each time."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from benchmarks.hops import cases, entered, walked

SOURCE = """
def start():
    for _ in range(2):
        leaf()
    return [leaf() for _ in range(3)]

def leaf():
    return 0
"""


def test_functions_of_a_folder_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "counted_once.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("counted_once")
    seen = entered(module.start, tmp_path)
    assert {code.co_name for code in seen} == {"start", "leaf"}
    before = sys.getprofile()
    with pytest.raises(ZeroDivisionError):
        entered(lambda: module.leaf() or 1 / 0, tmp_path)
    assert sys.getprofile() is before
    assert entered(module.start, tmp_path / "elsewhere") == set()


@pytest.mark.filterwarnings("ignore::latedrop.LatedropWarning")
def test_a_walk_is_the_same_each_time() -> None:
    run = cases()["predict, sample, CNN"]
    first, second = walked(run), walked(run)
    assert first == second
    assert first["functions"] >= first["files"] > 1

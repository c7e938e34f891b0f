"""Throughput under threads: everything done is counted once, and wrong answers and errors are told."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import threads, timing
from benchmarks.threads import compared, markdown, measured, throughput


def test_all_that_is_done_is_counted_in_as_many_threads() -> None:
    calls: list[int] = []

    def work() -> bool:
        calls.append(get_ident())
        return True

    done, taken, wrong, errors = throughput(work, threads=4, seconds=0.05)
    assert done == len(calls) > 0
    assert len(set(calls)) <= 4
    assert taken >= 0.05
    assert (wrong, errors) == (0, [])


def test_wrong_answers_and_errors_are_told() -> None:
    numbers = itertools.count()

    def work() -> bool:
        number = next(numbers)
        if number == 2:
            raise RuntimeError("another thread was here")
        return number != 1

    done, _, wrong, errors = throughput(work, threads=1, seconds=0.05)
    assert done == next(numbers) - 1
    assert wrong == 1
    assert errors == ["RuntimeError: another thread was here"]


def test_answers_are_compared_with_the_first() -> None:
    values = itertools.chain([1.0, 1.0, 1.0, 3.0], itertools.repeat(1.0))

    def predict() -> Any:
        value = torch.tensor([next(values)])
        return SimpleNamespace(mean=value, variance=value)

    found = compared(predict, threads=2, seconds=0.02, repeats=2)
    assert found["wrong"] == 1
    assert found["ratio"] == found["many"] / found["one"]


def test_a_network_is_measured_with_one_thread_of_torch() -> None:
    options = argparse.Namespace(
        device="cpu", nets=["uci_mlp"], threads=2, draws=4, engine="auto", seconds=0.02, repeats=1
    )
    found = measured(options)
    assert found["kind"] == "cpu"
    assert list(found["nets"]["uci_mlp"]) == ["1"]  # the default, too, where tests run
    assert found["nets"]["uci_mlp"]["1"]["one"] > 0


def test_versions_stand_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def told(_: str, arguments: list[str], source: Path) -> dict[str, Any]:
        assert arguments[:2] == ["--measure", "--nets"]
        assert arguments[arguments.index("--threads") + 1] == "8"
        row = {"one": 10.0, "many": 10.0 * len(source.name), "ratio": len(source.name), "wrong": 0, "failed": 0}
        return {"kind": "cpu", "machine": {"source": "digest"}, "nets": {"uci_mlp": {"1": row}}}

    monkeypatch.setattr(threads, "answer_of", told)
    monkeypatch.setattr(timing, "RESULTS", tmp_path)
    monkeypatch.setattr(threads, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["threads", "--source", "a", "bb", "--labels", "before", "after"])
    threads.main()
    printed = capsys.readouterr().out
    assert "| uci mlp | before | 1 | 10 | 10 | 1.00 | 0 | 0 |" in printed
    assert "| uci mlp | after | 1 | 10 | 20 | 2.00 | 0 | 0 |" in printed
    assert markdown(json.loads((tmp_path / "threads_cpu.json").read_text())) + "\n" == printed
    monkeypatch.setattr(sys, "argv", ["threads", "--tables"])
    threads.main()
    assert capsys.readouterr().out == printed

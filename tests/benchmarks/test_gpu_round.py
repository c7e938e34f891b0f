"""The round and the guard: intervals, what is named, and that other ways to run a convolution give the same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_round, guard
from benchmarks.architectures import architectures
from benchmarks.gpu_round import Turns, interval, markdown
from benchmarks.guard import ratios, slower

CPU = torch.device("cpu")


def test_an_interval_leaves_extremes_out_where_there_are_enough_rounds() -> None:
    assert interval([float(i) for i in range(11)]) == [2.0, 5.0, 8.0]
    assert interval([1.0, 9.0]) == [1.0, 5.0, 9.0]


def test_candidates_take_turns_and_a_failure_stops_nobody() -> None:
    calls: list[str] = []

    def fails() -> None:
        raise RuntimeError("no kernel")

    found = Turns(4, 10.0, CPU)({"a": lambda: calls.append("a"), "b": lambda: calls.append("b"), "c": fails}, "a")
    assert found["failed"] == {"c": "RuntimeError: no kernel"}
    assert found["rounds"] >= 4
    assert found["ratios"].keys() == {"a", "b"}
    assert found["ratios"]["a"] == [1.0, 1.0, 1.0]
    assert {calls[i] for i in range(4, len(calls), 6)} == {"a", "b"}  # the order changes


def test_what_is_measured_stays_when_a_run_is_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def unit(name: str) -> Any:
        def measure() -> dict[str, Any]:
            asked.append(name)
            if name == "second" and len(asked) == 2:
                raise KeyboardInterrupt
            return {"value": name}

        return name, measure

    path = tmp_path / "round.json"
    monkeypatch.setattr(gpu_round, "PARTS", {"part": lambda setting: [unit("first"), unit("second")]})
    monkeypatch.setattr("sys.argv", ["round", "--device", "cpu", "--out", str(path)])
    with pytest.raises(KeyboardInterrupt):
        gpu_round.main()
    gpu_round.main()
    assert asked == ["first", "second", "second"]
    assert json.loads(path.read_text())["units"].keys() == {"part, first", "part, second"}


def test_the_guard_names_what_is_slower_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = {"steady": [[1.0, 1.1, 1.2]] * 2, "noisy": [[2.0, 2.1, 2.2], [1.0, 1.1, 1.2]], "slow": [[2.0, 2.1, 2.2]] * 2}
    path = tmp_path / "guard.json"
    path.write_text(json.dumps({"units": {f"one_row, {name}: auto": [1.0, 1.1, 1.2] for name in now}}))

    def units(setting: Any) -> Any:
        for name, ends in now.items():
            left = list(ends)
            yield name, lambda left=left: {"base": "plain", "ratios": {"auto": left.pop(0)}}

    monkeypatch.setattr(guard, "PARTS", {"one_row": units})
    monkeypatch.setattr("sys.argv", ["guard", "--only", "one_row", "--results", str(path)])
    assert guard.main() == 1
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("slower")]
    assert said == ["slower: one_row, slow: auto, 1.00 to 1.20 before, 2.00 to 2.20 now"]
    assert slower({}, ratios("new", {"base": "a", "ratios": {"b": [1.0, 1.0, 1.0]}})) == {}


def test_a_table_has_a_row_for_each_unit() -> None:
    unit = {"seconds": {"plain": 0.002}, "ratios": {"plain": [1, 1, 1], "linear": [2.0, 2.5, 3.0]}, "base": "plain"}
    lines = list(markdown({"units": {"first_order, net, 1": unit, "mcnn, other": {}}}, "first_order"))
    assert lines[0] == "| network | plain [ms] | linear |"
    assert lines[2:] == ["| net, 1 | 2 | 2.50 (2.00 to 3.00) |"]


@pytest.mark.parametrize("net", architectures(small=True), ids=lambda net: net.name)
def test_small_networks_run(net: Any) -> None:
    with torch.no_grad():
        output = net.made(CPU)(net.rows(2, CPU))
    assert (output if net.readout is None else net.readout(output)).shape[0] == 2

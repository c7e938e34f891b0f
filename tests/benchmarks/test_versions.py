"""Two versions side by side: both are asked in turns, the reference is right, and what fails is said."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import latedrop
from benchmarks import versions
from benchmarks.nets import Forecaster, Residual
from benchmarks.trees import answer_of, digest, environment
from benchmarks.versions import Bench, Worker, best_chunk, copying_rows, markdown, measure
from latedrop import find_sites, sample
from rounding import assert_same_up_to_rounding

SOURCE = Path(latedrop.__file__).parents[1]
NETS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)), (5, 4)),
    "residual": (lambda: Residual(6, 1), (3, 3, 8, 8)),
    "lstm": (lambda: Forecaster(6), (3, 5, 16)),
}


@pytest.mark.parametrize("name", NETS)
def test_copying_rows_draws_thinned_networks(name: str) -> None:
    build, shape = NETS[name]
    draws = 800
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, x = build().eval().requires_grad_(False), torch.randn(shape)
        sites = find_sites(model, x)
        mean, variance = copying_rows(model, x, sites, 0.2, draws, chunk=300)
        nothing = copying_rows(model, x, sites, 0.0, 4, chunk=3)
    expected = sample(model, x, 0.2, draws, sites=sites)
    # Four standard errors of one row: rows share masks, so that averaging them gains little.
    tolerance = 4 * (1 / draws) ** 0.5
    assert float((variance.sqrt() / expected.variance.sqrt()).mean()) == pytest.approx(1, abs=tolerance)
    off = (mean - expected.mean) / expected.variance.sqrt()
    assert float(off.abs().max()) < 2**0.5 * tolerance
    assert_same_up_to_rounding(nothing[0], model(x))
    assert_same_up_to_rounding(nothing[1], torch.zeros_like(nothing[1]))
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_best_chunk_stops_where_it_gets_slower_too_long_or_too_large() -> None:
    tried: list[int] = []

    def seconds(each: dict[int, float]) -> Any:
        def of(chunk: int) -> float:
            tried.append(chunk)
            if each[chunk] < 0:
                raise RuntimeError("out of memory")
            return each[chunk]

        return of

    assert best_chunk(seconds({1: 1.0, 2: 1.1, 5: 0.5, 10: 0.9, 25: 0.8}), 50, budget=100) == 5
    assert tried == [1, 2, 5, 10, 25]
    assert best_chunk(seconds({1: 1.0, 2: 0.9, 5: -1}), 20, budget=100) == 2
    assert best_chunk(seconds({1: 1.0, 2: 0.5, 5: 0.4}), 20, budget=4) == 2
    assert best_chunk(seconds({1: 1.0, 2: 0.5, 3: 0.4}), 3, budget=100) == 3
    with pytest.raises(RuntimeError, match="memory"):
        best_chunk(seconds({1: -1}), 3, budget=100)


class Told:
    """Stands for a worker: gives told times, and notes what it was asked."""

    def __init__(self, name: str, log: list[str], seconds: float, error: str | None = None) -> None:
        self.name, self.log, self.seconds, self.error = name, log, seconds, error

    def ask(self, **request: Any) -> dict[str, Any]:
        if request["do"] == "prepare":
            return {"error": self.error} if self.error else {"rows": 3, "machine": {}}
        self.log.append(f"{request['do']} {self.name} {request['candidate']}")
        if request["do"] == "first":
            return {"bytes": 2**20, "std": 0.5, "first_seconds": self.seconds, "spent": self.seconds}
        return {"seconds": self.seconds, "spent": self.seconds}


def test_candidates_take_turns_in_an_order_that_changes() -> None:
    log: list[str] = []
    workers = {"old": Told("old", log, 0.2), "new": Told("new", log, 0.1)}
    found = measure(workers, {}, {"old": "auto", "new": "auto"}, repeats=6, cap=100)
    times = [line for line in log if line.startswith("time")]
    rounds = [tuple(times[i : i + 3]) for i in range(0, len(times), 3)]
    assert len(rounds) == 6
    assert {len(set(turn)) for turn in rounds} == {3}
    assert len(set(rounds)) > 1
    assert {name: entry["seconds"] for name, entry in found["candidates"].items()} == {
        "old": 0.2,
        "new": 0.1,
        "copies": 0.1,
    }


def test_a_candidate_gets_no_round_beyond_its_cap_and_a_version_may_fail() -> None:
    log: list[str] = []
    workers = {"old": Told("old", log, 0.1, error="SiteError: no"), "new": Told("new", log, 6)}
    found = measure(workers, {}, {"old": "auto", "new": "auto"}, repeats=3, cap=10)
    assert log == ["first new sample", "first new copies"]
    assert found["candidates"]["old"] == {"error": "SiteError: no"}
    assert found["candidates"]["new"]["seconds"] == 6
    assert found["candidates"]["new"]["rounds"] == 0
    table = markdown({"nets": {"mlp": {"small": found}}})
    assert "| mlp | 3 | - | 6e+03 | 6e+03 | - | 1.00 | - | 1 | 1 | - |" in table
    assert "mlp, 3 rows, old: SiteError: no" in table


def test_a_bench_measures_both_candidates() -> None:
    bench = Bench("uci_mlp", "cpu", "small", "cpu", draws=6, threads=1, cap=1.0, engine="loop")
    assert bench.about()["rows"] == 1
    first = bench.first("sample")
    assert first["bytes"] > 0
    assert first["std"] > 0
    copies = bench.first("copies")
    assert 1 <= copies["at_once"] <= 6
    assert bench.time("copies", expected=copies["first_seconds"])["seconds"] > 0


@pytest.mark.slow
def test_a_worker_says_what_went_wrong_and_goes_on() -> None:
    worker = Worker(SOURCE, patience=120)
    try:
        setup = {"kind": "cpu", "batch": "small", "device": "cpu", "draws": 4, "threads": 1, "cap": 1, "engine": "auto"}
        assert "error" in worker.ask(do="prepare", net="no such", **setup)
        answer = worker.ask(do="prepare", net="uci_mlp", **setup)
        assert answer["machine"]["source"] == digest()
    finally:
        worker.close()


@pytest.mark.slow
def test_two_trees_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "versions.json"
    options = "--nets uci_mlp --batch small --device cpu --draws 4 --repeats 1 --cap 2"
    monkeypatch.setattr(
        sys, "argv", ["versions", "--old", str(SOURCE), "--new", str(SOURCE), "--out", str(out), *options.split()]
    )
    versions.main()
    record = json.loads(out.read_text())
    assert "error" not in str(record)
    assert str(SOURCE) not in out.read_text()
    printed = capsys.readouterr().out
    assert "| uci mlp | 1 |" in printed
    monkeypatch.setattr(sys, "argv", ["versions", "--tables", "--out", str(out)])
    versions.main()
    assert capsys.readouterr().out == printed


def test_a_folder_without_the_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="expected a folder with the package latedrop"):
        environment(tmp_path)


def test_a_tree_is_where_latedrop_comes_from(tmp_path: Path) -> None:
    package = tmp_path / "latedrop"
    package.mkdir()
    (package / "__init__.py").write_text('__version__ = "of another tree"\n')
    (package / "tell.py").write_text("import json, latedrop\nprint(json.dumps(latedrop.__version__))\n")
    assert answer_of("latedrop.tell", [], tmp_path) == "of another tree"

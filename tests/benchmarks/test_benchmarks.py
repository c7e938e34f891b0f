"""What the pages say of the benchmarks is what the committed results hold."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import costs, growth, pages, uci, video
from benchmarks.nets import SpeedNet, nets, speed_nets, uci_task
from latedrop.crowd import MCNN

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda path: path.name)
def test_tables_of_pages_follow_the_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "<!-- table: " in text
    assert pages.filled(text) == text, "run: python -m benchmarks.pages"


def test_every_axis_and_network_was_measured() -> None:
    growing, costing = (
        json.loads((RESULTS / f"{name}_cpu.json").read_text(encoding="utf-8")) for name in ("growth", "costs")
    )
    assert growing["axes"].keys() == growth.LABELS.keys()
    assert costing["nets"].keys() == {net.name for net in speed_nets("cpu")}


def test_tables_of_the_uci_study_repeat_the_json() -> None:
    found = {
        "seconds_for_all": {"loader": 100.4, "loop": 40.0, "stacked": 2.0},
        "times_faster": {"loader": 50.2, "loop": 20},
    }
    table = uci.markdown({"sets": {"yacht": found}}).splitlines()
    assert table[2:] == ["| yacht | 100 s | 40 s | 2 s | 50 and 20 |"]


def test_the_people_counter_is_the_package_s() -> None:
    for size in ("small", "cpu", "gpu"):
        net = next(net for net in nets(size) if net.name == "mcnn_count")
        assert net.build is MCNN


def video_row(frames: int, precision: str, engine: str, speed: float = 1.0) -> dict[str, Any]:
    return {"frames": frames, "precision": precision, "engine": engine, "frames_per_second": speed}


def test_frames_measured_apart_are_kept_in_order() -> None:
    known = [video_row(1, "float32", "auto"), video_row(8, "tf32", "compiled"), video_row(8, "float16", "auto")]
    found = [video_row(8, "float16", "auto", 2.0), video_row(1, "float16", "compiled"), video_row(8, "tf32", "auto")]
    merged = video.merged(known, found)
    assert [(row["frames"], row["precision"], row["engine"]) for row in merged] == [
        (1, "float32", "auto"),
        (1, "float16", "compiled"),
        (8, "tf32", "auto"),
        (8, "tf32", "compiled"),
        (8, "float16", "auto"),
    ]
    assert merged[-1]["frames_per_second"] == 2
    assert sorted(video.MEASURED) == sorted(video.PRECISIONS)
    assert video.MEASURED[0] == "float16"


def test_frames_of_another_machine_are_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "video_gpu.json"
    now: dict[str, Any] = {"machine": {"device": "a GPU"}, "draws": 50, "rate": 0.01, "size": [480, 640], "rows": []}
    assert video.kept_rows(path, now) == []
    rows = [video_row(1, "float16", "auto")]
    path.write_text(json.dumps(now | {"rows": rows, "floor": {}}), encoding="utf-8")
    assert video.kept_rows(path, now) == rows
    assert video.kept_rows(path, now | {"machine": {"device": "another"}}) == []


def test_committed_frames_are_in_order() -> None:
    record = json.loads((RESULTS / "video_gpu.json").read_text(encoding="utf-8"))
    assert video.merged([], record["rows"]) == record["rows"]


def test_reference_of_the_frames_is_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Softplus(), nn.Conv2d(2, 1, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert not torch.backends.cudnn.allow_tf32
            return self.layers(x)

    monkeypatch.setattr(video, "SIZE", (8, 8))
    monkeypatch.setattr(video, "network", lambda dtype, device: Counter().to(device, dtype).eval())
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
        mean, std = video.reference(3, torch.device("cpu"))
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before
    assert mean.shape == std.shape == (3,)
    assert mean.dtype == torch.float32
    assert bool((std > 0).all())


def run_main(module: Any, path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(module, "RESULTS", path)
    monkeypatch.setattr("benchmarks.timing.RESULTS", path)
    monkeypatch.setattr(sys, "argv", ["benchmark", "--device", "cpu", "--repeats", "1", *arguments])
    module.main()


@pytest.mark.slow
def test_growth_measures_every_axis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {axis: (field, (1, 2, 4)) for axis, (field, _) in growth.RANGES["cpu"].items()}
    monkeypatch.setitem(growth.RANGES, "cpu", small | {"draws": ("draws", (2, 4, 8))})
    monkeypatch.setitem(growth.SHAPES, "cpu", growth.Shape(draws=4, rows=4, width=4))
    run_main(growth, tmp_path, monkeypatch, "--budget", "0.01")
    record = json.loads((tmp_path / "growth_cpu.json").read_text(encoding="utf-8"))
    assert list(record["axes"]) == list(growth.LABELS)
    assert record["axes"]["draws"]["values"] == [2, 4, 8]
    assert all(row["rounds"] >= 1 and min(row["bytes"]) > 0 for row in record["axes"].values())
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(growth, "IMAGES", tmp_path)
    assert growth.figure(record, tmp_path / "growth.png").stat().st_size > 10_000


def test_sizes_of_growth_are_larger_on_a_gpu() -> None:
    assert growth.RANGES["cpu"].keys() == growth.RANGES["gpu"].keys() == growth.LABELS.keys()
    for kind, ranges in growth.RANGES.items():
        for field, values in ranges.values():
            assert getattr(growth.SHAPES[kind], field) in values or field == "sites"
    assert growth.SHAPES["gpu"].rows * growth.SHAPES["gpu"].width > 100 * growth.SHAPES["cpu"].rows


def test_costs_keep_the_order_of_the_networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def small() -> nn.Module:
        return nn.Sequential(nn.Linear(13, 4), nn.ReLU(), nn.Linear(4, 1))

    made = [SpeedNet(name, small, uci_task, {"small": 1, "large": 4}) for name in ("first", "second")]
    monkeypatch.setattr(costs, "speed_nets", lambda kind: made)
    for name in ("second", "first"):
        run_main(costs, tmp_path, monkeypatch, "--nets", name, "--budget", "0.01")
    record = json.loads((tmp_path / "costs_cpu.json").read_text(encoding="utf-8"))
    assert list(record["nets"]) == ["first", "second"]
    for row in record["nets"].values():
        assert row["rows"] == 4
        assert 4 <= row["draws"] <= 100
        assert row["rounds"] >= 1


def test_fewer_draws_where_a_network_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(costs, "seconds_of", lambda run, device: 0.04)  # of four draws
    device = torch.device("cpu")
    assert costs.fitting_draws(asked.append, 100, 2.0, device) == 100
    assert costs.fitting_draws(asked.append, 100, 0.3, device) == 25
    assert costs.fitting_draws(asked.append, 100, 0.0, device) == 6
    assert costs.fitting_draws(asked.append, 4, 0.0, device) == 4
    assert asked == [4, 100, 4, 25, 4, 6, 4, 4]


def test_tables_name_the_devices_where_there_are_two(tmp_path: Path) -> None:
    record = json.loads((RESULTS / "costs_cpu.json").read_text(encoding="utf-8"))
    (tmp_path / "costs_cpu.json").write_text(json.dumps(record), encoding="utf-8")
    table = costs.markdown(record)
    assert pages.by_device(costs, "costs", tmp_path) == table
    (tmp_path / "costs_gpu.json").write_text(json.dumps(record | {"machine": {"device": "a GPU"}}), encoding="utf-8")
    assert pages.by_device(costs, "costs", tmp_path) == f"CPU:\n\n{table}\n\na GPU:\n\n{table}"

"""The commands of people counting: what they print and write, and one line for everything that can go wrong."""

import csv
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from counters import network
from latedrop_crowd.calibration import CrowdCalibration
from latedrop_crowd.counting import CountFile
from latedrop_crowd.layouts import CrowdSet
from latedrop_crowd.mcnn import Trained, save_weights

SHAPE = (72, 96)
GRID = (18, 24)
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, trained: Trained, scenes: CrowdSet, free: CrowdCalibration) -> Path:
    """Weights with their calibration beside them, other weights without, and a folder of three frames."""
    home = tmp_path_factory.mktemp("crowd")
    save_weights(home / "w.safetensors", trained)
    free.save(home / "w.calibration.json")
    save_weights(home / "other.safetensors", Trained(network(1)))
    roi = torch.ones(GRID, dtype=torch.bool)
    save_weights(home / "roi.safetensors", Trained(network(0), roi))
    (home / "frames").mkdir()
    for k, index in enumerate(scenes.test[:3]):
        pixels = (255 * scenes.image(index)[0].numpy()).astype(np.uint8)
        Image.fromarray(pixels).save(home / "frames" / f"f{k}.png")
    return home


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_help_loads_nothing_heavy() -> None:
    code = """
import sys
from latedrop.cli.app import main
try:
    main(["crowd", "--help"])
except SystemExit:
    pass
heavy = {
    "matplotlib", "scipy", "PIL", "av", "safetensors", "latedrop_crowd.mcnn", "latedrop.report.page"
} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_count_a_folder(call: Run, home: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    code, printed, err = call("crowd", "count", home / "frames", "-w", home / "w.safetensors", "--panels", "--out", out)
    assert (code, err) == (0, "")
    actual = rows(out / "counts.csv")
    assert [row["frame"] for row in actual] == ["f0.png", "f1.png", "f2.png"]
    first = actual[0]
    assert f"f0.png: {float(first['count']):.1f} people, 90 % interval {float(first['low']):.1f} to" in printed
    assert sorted(path.name for path in out.glob("*.png")) == [f"f{k}.png.panel.png" for k in range(3)]
    assert f"written: {out / 'counts.csv'}, panels in {out}" in printed


def test_count_to_json(call: Run, home: Path, tmp_path: Path) -> None:
    arguments = ("--weights", home / "w.safetensors", "--out", tmp_path, "--no-panels", "--json")
    code, printed, err = call("crowd", "count", home / "frames", *arguments, "--level", "0.5", "--every", "2")
    assert (code, err) == (0, "")
    records = [json.loads(line) for line in printed.splitlines()]
    assert [record["frame"] for record in records] == ["f0.png", "f2.png"]
    assert [float(row["high"]) for row in rows(tmp_path / "counts.csv")] == [record["high"] for record in records]
    assert not list(tmp_path.glob("*.png"))
    (tmp_path / "counts.csv").unlink()
    _, wide, _ = call("crowd", "count", home / "frames", *arguments, "--level", "0.95", "--every", "2")
    assert json.loads(wide.splitlines()[0])["high"] > records[0]["high"]


def test_resume(call: Run, home: Path, tmp_path: Path) -> None:
    common = ("--weights", home / "w.safetensors", "--out", tmp_path, "--no-panels")
    assert call("crowd", "count", home / "frames" / "f1.png", *common)[0] == 0
    code, _, err = call("crowd", "count", home / "frames", *common)
    assert code == 1
    assert err.startswith("latedrop: expected no counts in")
    code, printed, err = call("crowd", "count", home / "frames", *common, "--resume")
    assert code == 0
    assert f"skipping 1 frame that {tmp_path / 'counts.csv'}" in err
    assert len(err.splitlines()) == 1
    assert [row["frame"] for row in rows(tmp_path / "counts.csv")] == ["f1.png", "f0.png", "f2.png"]
    assert "f1.png" not in printed
    assert call("crowd", "count", home / "frames", *common, "--resume")[0] == 0
    again = ("crowd", "count", home / "frames", *common, "--resume", "--level", "0.8")
    one_line(call, "expected counts of these weights, this calibration and this level", *again)


def test_resuming_with_other_pictures_of_the_same_names(call: Run, home: Path, tmp_path: Path) -> None:
    common = ("--weights", home / "w.safetensors", "--out", tmp_path / "out", "--no-panels")
    other = tmp_path / "other"
    other.mkdir()
    for name, source in (("f0.png", "f1.png"), ("f1.png", "f2.png"), ("f2.png", "f0.png")):
        (other / name).write_bytes((home / "frames" / source).read_bytes())
    assert call("crowd", "count", home / "frames" / "f1.png", *common)[0] == 0
    before = (tmp_path / "out" / "counts.csv").read_bytes()
    one_line(
        call, "found another picture under the name f1.png", "crowd", "count", other / "f1.png", *common, "--resume"
    )
    assert (tmp_path / "out" / "counts.csv").read_bytes() == before
    assert call("crowd", "count", home / "frames", *common, "--resume")[0] == 0


def one_line(call: Run, match: str, *arguments: object, code: int = 1) -> str:
    actual, out, err = call(*arguments)
    assert actual == code
    assert match in err
    assert err.startswith("latedrop: ")
    assert "Traceback" not in err
    return out


def test_bad_input_of_count(call: Run, home: Path, tmp_path: Path) -> None:
    weights, frames, plain = home / "w.safetensors", home / "frames", tmp_path / "plain.json"
    record = json.loads((home / "w.calibration.json").read_text(encoding="utf-8"))["crowd"]["count"]
    plain.write_text(json.dumps({"latedrop": record, "checksum": ""}))
    other, calibration = home / "other.safetensors", ("-c", home / "w.calibration.json")
    for match, code, source, *words in (
        ("there is no such file", 1, tmp_path / "nowhere", "-w", weights),
        ("expected weights at", 1, frames, "-w", tmp_path / "no.safetensors"),
        ("expected the name of shipped weights", 2, frames, "-w", "nosuchname"),
        ("expected --calibration, as there is no other.calibration.json", 2, frames, "-w", other),
        ("it was made for others", 1, frames, "-w", other, *calibration),
        ("region of interest (18 x 24 cells)", 1, frames, "-w", home / "roi.safetensors", *calibration),
        ("found that of a single readout", 1, frames, "-w", weights, "-c", plain),
        ("level", 2, frames, "-w", weights, "--level", "2"),
        ("expected --device auto, cpu or cuda; found 'tpu9'", 2, frames, "-w", weights, "--device", "tpu9"),
        ("every=0", 2, frames, "-w", weights, "--every", "0"),
    ):
        one_line(call, match, "crowd", "count", source, *words, "--out", tmp_path / "out", code=code)
    assert not (tmp_path / "out" / "counts.csv").exists()


def test_frames_that_do_not_fit(call: Run, home: Path, tmp_path: Path) -> None:
    small, good = tmp_path / "a_small.png", home / "frames" / "f0.png"
    Image.fromarray(np.zeros((60, 96), np.uint8)).save(small)
    common = ("-w", home / "w.safetensors", "--no-panels", "--out")
    match = "receptive field of the network; found 60 x 96 in a_small.png"
    one_line(call, match, "crowd", "count", small, good, *common, tmp_path / "one")
    code, out, err = call("crowd", "count", small, good, *common, tmp_path / "two", "--skip-bad")
    assert code == 0
    assert err.startswith("latedrop: warning: skipped: expected 72 pixels")
    assert [row["frame"] for row in rows(tmp_path / "two" / "counts.csv")] == ["f0.png"]
    assert "f0.png" in out
    match = "expected frames that can be counted; all 1 were skipped"
    code, _, err = call("crowd", "count", small, *common, tmp_path / "three", "--skip-bad")
    assert code == 1
    assert match in err


def test_finished_frames_stay(call: Run, home: Path, tmp_path: Path) -> None:
    broken = tmp_path / "z.png"
    broken.write_bytes((home / "frames" / "f0.png").read_bytes()[:500])
    out = tmp_path / "out"
    command = ("crowd", "count", home / "frames", broken, "-w", home / "w.safetensors", "--no-panels", "--out", out)
    code, printed, err = call(*command)
    assert code == 1
    assert len(rows(out / "counts.csv")) == 3
    assert printed.count("people") == 3
    first, second = err.splitlines()
    assert f"{out / 'counts.csv'} has 3 frames" in first
    assert "--resume" in first
    assert "expected a whole image at" in second
    assert call(*command, "--resume", "--skip-bad")[0] == 0


def test_interrupt_keeps_what_is_finished(
    call: Run, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from latedrop_crowd import counting

    plain = counting.count_people

    def interrupted(*arguments: object, **settings: object) -> object:
        yield next(plain(*arguments, **settings))  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(counting, "count_people", interrupted)
    code, _, err = call(
        "crowd", "count", home / "frames", "-w", home / "w.safetensors", "--no-panels", "--out", tmp_path
    )
    assert code == 130
    first, second = err.splitlines()
    assert "counts.csv has 1 frame" in first
    assert "stopped" in second
    assert len(rows(tmp_path / "counts.csv")) == 1


def test_out_that_cannot_be_written(call: Run, home: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    common = ("crowd", "count", home / "frames", "-w", home / "w.safetensors", "--no-panels")
    one_line(call, f"expected a folder at {taken}; found a file", *common, "--out", taken)
    one_line(call, "expected to make the folder", *common, "--out", taken / "below")
    command = ("crowd", "calibrate", "--set", "scenes", "-w", home / "w.safetensors", "-o", taken / "c.json")
    one_line(call, "expected a folder at", *command)


def test_calibrate_then_count(call: Run, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from latedrop_crowd import scenes as room

    plain = room.make_scenes
    monkeypatch.setattr(room, "make_scenes", lambda *_: plain(6, 10, 0, shape=SHAPE))
    path = tmp_path / "mine.json"
    command = ("crowd", "calibrate", "--set", "scenes", "-w", home / "w.safetensors", "-o", path)
    page = tmp_path / "mine.html"
    code, out, err = call(*command, "--report", page)
    assert (code, err) == (0, "")
    assert "10 validation frames of scenes" in out
    assert f"written: {path}, {page}" in out
    text = page.read_text(encoding="utf-8")
    assert 'class="verdict"' in text
    assert "names of frames and heads, SHA-256" in text
    one_line(call, "expected --report and --output to be two files", *command, "--report", path, code=2)
    frame = home / "frames" / "f0.png"
    common = ("-w", home / "w.safetensors", "-c", path, "--no-panels", "--out", tmp_path)
    assert call("crowd", "count", frame, *common)[0] == 0
    one_line(call, "expected the folder of mall; found none", *command[:3], "mall", *command[4:], code=2)
    one_line(call, "expected a set among", *command[:3], "town", *command[4:], "--data", tmp_path, code=2)


def test_train(call: Run, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from latedrop_crowd import scenes as room
    from latedrop_crowd.training import network

    plain = room.make_scenes
    monkeypatch.setattr(room, "make_scenes", lambda: plain(8, 6, 2, shape=(64, 64)))
    monkeypatch.setattr(network, "check_better", lambda record: None)  # so short a training is no better than the mean
    out = tmp_path / "deep" / "net.safetensors"
    options = ("--epochs", "2", "--batch", "4", "--crop", "32", "--seed", "3", "--device", "cpu")
    command = ("crowd", "train", "--set", "scenes", *options, "--out", out)
    code, printed, err = call(*command)
    assert code == 0, err
    assert "test: MAE" in printed
    log = json.loads(out.with_suffix(".log.json").read_text())
    assert log["settings"]["seed"] == 3
    assert str(tmp_path) not in log["command"]
    one_line(call, "seed 3 instead of 4", *command[:-5], "4", *command[-4:])
    one_line(call, "a multiple of 4 from 16 on", *command, "--crop", "33", code=2)
    one_line(call, "expected the folder of mall; found none", "crowd", "train", "--set", "mall", "--out", out, code=2)
    one_line(call, "expected a set among mall", "crowd", "train", "--set", "x", "--data", home, "--out", out, code=2)


def test_the_page_of_training_names_only_options_that_there_are(call: Run) -> None:
    page = (Path(__file__).parents[2] / "docs" / "crowd_training.md").read_text(encoding="utf-8")
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page)) - {"--weights"}  # of `crowd calibrate`
    words = call("crowd", "train", "--help")[1]
    assert [option for option in sorted(options) if option not in words] == []


def test_no_output_takes_the_place_of_an_input(call: Run, home: Path, tmp_path: Path) -> None:
    weights, frames, data = home / "w.safetensors", home / "frames", tmp_path / "data.safetensors"
    data.mkdir()
    calibrate = ("crowd", "calibrate", "--set", "scenes", "--weights", weights)
    for words, said in (
        (("crowd", "count", frames, "--weights", weights, "--out", frames, "--panels"), "expected --out and SOURCE"),
        ((*calibrate, "-o", weights), "expected --output and --weights to be two files"),
        ((*calibrate, "--data", frames, "-o", frames / "f1.png"), "expected --output and --data"),
        (("crowd", "train", "--set", "mall", "--data", data, "--out", data), "expected --out and --data to be two"),
    ):
        before = (frames / "f1.png").read_bytes(), weights.read_bytes()
        one_line(call, said, *words, code=2)
        assert before == ((frames / "f1.png").read_bytes(), weights.read_bytes())


def test_one_run_at_a_time_adds_to_a_file_of_counts(call: Run, home: Path, tmp_path: Path) -> None:
    pytest.importorskip("fcntl", reason="locks of POSIX")
    path = tmp_path / "counts.csv"
    words = ("crowd", "count", home / "frames", "--weights", home / "w.safetensors", "--out", tmp_path, "--resume")
    with CountFile(path, resume=True):
        assert one_line(call, f"expected {path} for this run alone; another run is writing to it", *words) == ""
    assert call(*words)[0] == 0
    assert len(rows(path)) == 3

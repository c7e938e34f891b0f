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

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("scipy")
pytest.importorskip("safetensors")
pytest.importorskip("PIL")
pytest.importorskip("matplotlib")

from PIL import Image

from counters import network
from latedrop.cli import app as cli
from latedrop.errors import LatedropError, OutputError
from latedrop_crowd import train as training
from latedrop_crowd.calibration import calibrate_counter
from latedrop_crowd.counting import CountFile
from latedrop_crowd.mcnn import Trained, save_weights
from latedrop_crowd.scenes import make_scenes
from rounding import rounding

SHAPE = (72, 96)
GRID = (18, 24)
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights with their calibration beside them, other weights without, and a folder of three frames."""
    home = tmp_path_factory.mktemp("crowd")
    scenes = make_scenes(6, 10, 3, shape=SHAPE)
    trained = Trained(network(0), None, {"set": "scenes"})
    save_weights(home / "w.safetensors", trained)
    calibrate_counter(trained, scenes, policy=False, progress=False).save(home / "w.calibration.json")
    save_weights(home / "other.safetensors", Trained(network(1)))
    roi = torch.ones(GRID, dtype=torch.bool)
    save_weights(home / "roi.safetensors", Trained(network(0), roi))
    (home / "frames").mkdir()
    for k, index in enumerate(scenes.test):
        pixels = (255 * scenes.image(index)[0].numpy()).astype(np.uint8)
        Image.fromarray(pixels).save(home / "frames" / f"f{k}.png")
    return home


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_help(call: Run) -> None:
    code, out, _ = call("crowd", "--help")
    assert code == 0
    assert all(name in out for name in ("count", "calibrate", "train", "demo"))
    for name, options in {
        "count": (
            "--weights",
            "--calibration",
            "--level",
            "--skip-bad",
            "--resume",
            "--jsonl",
            "--every",
            "--labels",
            "--stream",
        ),
        "calibrate": ("--set", "--data", "--method", "--draws", "--input-scale", "--density-scale", "--relu"),
        "recalibrate": ("--labels", "--weights", "--output"),
        "train": ("--set", "--data", "--minutes", "--fresh", "--precision"),
        "demo": ("--out", "--json"),
    }.items():
        code, out, _ = call("crowd", name, "--help")
        assert code == 0
        assert f"Example: latedrop crowd {name}" in out
        assert all(option in out for option in options)


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
    found = rows(out / "counts.csv")
    assert [row["frame"] for row in found] == ["f0.png", "f1.png", "f2.png"]
    first = found[0]
    assert f"f0.png: {float(first['count']):.1f} people, 90 % interval {float(first['low']):.1f} to" in printed
    assert sorted(path.name for path in out.glob("*.png")) == [f"f{k}.png.panel.png" for k in range(3)]
    assert f"written: {out / 'counts.csv'}, panels in {out}" in printed


def test_count_to_json(call: Run, home: Path, tmp_path: Path) -> None:
    arguments = ("--weights", home / "w.safetensors", "--out", tmp_path, "--no-panels", "--json", "--jsonl")
    code, printed, err = call("crowd", "count", home / "frames", *arguments, "--level", "0.5", "--every", "2")
    assert (code, err) == (0, "")
    records = [json.loads(line) for line in printed.splitlines()]
    assert [record["frame"] for record in records] == ["f0.png", "f2.png"]
    assert (tmp_path / "counts.jsonl").read_text(encoding="utf-8") == printed
    assert not list(tmp_path.glob("*.png"))
    (tmp_path / "counts.jsonl").unlink()
    _, wide, _ = call("crowd", "count", home / "frames", *arguments, "--level", "0.95", "--every", "2")
    assert json.loads(wide.splitlines()[0])["high"] > records[0]["high"]
    (tmp_path / "counts.jsonl").unlink()
    _, relaxed, _ = call("crowd", "count", home / "frames", *arguments, "--scale", "relaxed", "--every", "2")
    assert json.loads(relaxed.splitlines()[0])["std"] != records[0]["std"]


def test_resume(call: Run, home: Path, tmp_path: Path) -> None:
    common = ("--weights", home / "w.safetensors", "--out", tmp_path, "--no-panels")
    assert call("crowd", "count", home / "frames" / "f1.png", *common)[0] == 0
    code, _, err = call("crowd", "count", home / "frames", *common)
    assert code == 1
    assert err.startswith("latedrop: expected no counts in")
    code, printed, err = call("crowd", "count", home / "frames", *common, "--resume")
    assert code == 0
    assert f"{tmp_path / 'counts.csv'} has: 1 frame" in err
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
    found, out, err = call(*arguments)
    assert found == code
    assert match in err
    assert err.startswith("latedrop: ")
    assert "Traceback" not in err
    return out


def test_bad_input_of_count(call: Run, home: Path, tmp_path: Path) -> None:
    weights, frames, empty = home / "w.safetensors", home / "frames", tmp_path / "empty"
    empty.mkdir()
    note = tmp_path / "note.png"
    note.write_text("not an image")
    other = tmp_path / "linear.safetensors"
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(2, 2)}, other)
    to = ("--out", tmp_path / "out", "--no-panels")

    def fails(match: str, source: Path, *more: object, code: int = 1) -> None:
        one_line(call, match, "crowd", "count", source, *more, *to, code=code)

    fails("found another kind of file", note, "-w", weights)
    fails("expected images in the folder", empty, "-w", weights)
    fails("there is no such file", tmp_path / "nowhere", "-w", weights)
    fails("found those of another architecture: missing", frames, "-w", other)
    fails("expected weights at", frames, "-w", tmp_path / "no.safetensors")
    fails("expected the name of shipped weights", frames, "-w", "nosuchname", code=2)
    fails(
        "expected --calibration, as there is no other.calibration.json",
        frames,
        "-w",
        home / "other.safetensors",
        code=2,
    )
    calibration = ("-c", home / "w.calibration.json")
    fails("it was made for others", frames, "-w", home / "other.safetensors", *calibration)
    fails("region of interest (18 x 24 cells)", frames, "-w", home / "roi.safetensors", *calibration)
    plain = tmp_path / "plain.json"
    record = json.loads((home / "w.calibration.json").read_text(encoding="utf-8"))["crowd"]["count"]
    plain.write_text(json.dumps({"latedrop": record, "checksum": ""}))
    fails("found that of a single readout", frames, "-w", weights, "-c", plain)
    fails("level", frames, "-w", weights, "--level", "2", code=2)
    fails("expected --scale optimal or relaxed; found 'wide'", frames, "-w", weights, "--scale", "wide", code=2)
    fails("expected --device auto, cpu or cuda; found 'tpu9'", frames, "-w", weights, "--device", "tpu9", code=2)
    fails("every=0", frames, "-w", weights, "--every", "0", code=2)
    assert not (tmp_path / "out" / "counts.csv").exists()


def test_frames_that_do_not_fit(call: Run, home: Path, tmp_path: Path) -> None:
    small, good = tmp_path / "a_small.png", home / "frames" / "f0.png"
    Image.fromarray(np.zeros((60, 96), np.uint8)).save(small)
    common = ("-w", home / "w.safetensors", "--no-panels", "--out")
    match = "receptive field of the network; found 60 x 96 in a_small.png"
    one_line(call, match, "crowd", "count", small, good, *common, tmp_path / "one")
    code, out, err = call("crowd", "count", small, good, *common, tmp_path / "two", "--skip-bad")
    assert code == 0
    assert err.startswith("latedrop: warning: left out: expected 72 pixels")
    assert [row["frame"] for row in rows(tmp_path / "two" / "counts.csv")] == ["f0.png"]
    assert "f0.png" in out
    match = "expected frames that can be counted; all 1 were left out"
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


def test_video_that_ends_early(call: Run, home: Path, tmp_path: Path) -> None:
    av = pytest.importorskip("av", reason="PyAV reads videos")
    path = tmp_path / "clip.avi"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = SHAPE[1], SHAPE[0], "yuv420p"
        rng = np.random.default_rng(0)
        for _ in range(12):
            image = rng.integers(0, 255, (*SHAPE, 3), dtype=np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    content = path.read_bytes()
    path.write_bytes(content[: int(0.6 * len(content))])
    out = tmp_path / "out"
    code, printed, err = call("crowd", "count", path, "-w", home / "w.safetensors", "--no-panels", "--out", out)
    assert code == 1
    found = rows(out / "counts.csv")
    assert 3 <= len(found) < 12
    assert [row["frame"] for row in found] == [f"clip.avi#{k:06d}" for k in range(len(found))]
    assert len(printed.splitlines()) == len(found)
    assert f"has {len(found)} frames of this run" in err
    assert "it stopped after" in err


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
    one_line(call, "expected to write", *common, "--out", tmp_path, "--csv", tmp_path / "no" / "c.csv")
    command = ("crowd", "calibrate", "--set", "scenes", "-w", home / "w.safetensors", "-o", taken / "c.json")
    one_line(call, "expected a folder at", *command)


def test_calibrate_then_count(call: Run, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from latedrop_crowd import scenes as room

    plain = room.make_scenes
    monkeypatch.setattr(room, "make_scenes", lambda *_: plain(6, 10, 0, shape=SHAPE))
    path = tmp_path / "mine.json"
    command = ("crowd", "calibrate", "--set", "scenes", "-w", home / "w.safetensors", "-o", path)
    page = tmp_path / "mine.html"
    code, out, err = call(*command, "--method", "sample", "--draws", "2", "--rates", "0.05", "--report", page)
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
    one_line(call, "expected --method sampling-free or sample; found 'luck'", *command, "--method", "luck", code=2)
    one_line(call, "expected --rates as numbers", *command, "--rates", "a,b", code=2)
    one_line(call, "expected the folder of mall; found none", *command[:3], "mall", *command[4:], code=2)
    one_line(call, "expected a set among", *command[:3], "town", *command[4:], "--data", tmp_path, code=2)


def test_train_hands_its_options_on(call: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[training.Request] = []

    def run(request: training.Request, *, command: str) -> dict[str, object]:
        heard.append(request)
        raise OutputError("expected better")

    monkeypatch.setattr(training, "run", run)
    out = tmp_path / "w.safetensors"
    command = ("crowd", "train", "--set", "mall", "--out", out)
    one_line(call, "expected better", *command, "--data", "d", "--crop", "0", "--no-roi", "--fresh")
    request = heard[0]
    assert (request.set, request.out, request.data) == ("mall", out, Path("d"))
    assert (request.roi, request.fresh, request.checked, request.progress) == (False, True, True, False)
    assert request.settings is not None
    assert (request.settings.crop, request.settings.epochs) == (None, training.RECOMMENDED["mall"].epochs)
    code, _, err = call(*command, "--part", "x")
    assert code == 2
    assert "--part" in err
    one_line(call, "expected one of --resume and --fresh", *command, "--resume", "--fresh", code=2)
    with pytest.raises(OutputError):
        cli.main([*map(str, command), "--debug"])


def test_debug_keeps_the_traceback(home: Path) -> None:
    with pytest.raises(LatedropError, match="there is no such file"):
        cli.main(["crowd", "count", "nowhere", "-w", str(home / "w.safetensors"), "--debug"])


class TestFilesApart:
    def test_counts_do_not_take_the_place_of_what_is_read(self, call: Run, home: Path, tmp_path: Path) -> None:
        frame = home / "frames" / "f0.png"
        for words, message in (
            (("--csv", frame), "expected --csv and SOURCE .*f0.png to be two files"),
            (("--csv", home / "w.safetensors", "--resume"), "expected --csv and --weights to be two files"),
            (("--out", home / "frames", "--panels"), "expected --out and SOURCE .*frames to be two files"),
        ):
            before = frame.read_bytes(), (home / "w.safetensors").read_bytes()
            out = () if words[0] == "--out" else ("--out", tmp_path)
            code, _, err = call("crowd", "count", home / "frames", "--weights", home / "w.safetensors", *out, *words)
            assert (code, err.count("\n")) == (2, 1)
            assert re.search(message, err)
            assert before == (frame.read_bytes(), (home / "w.safetensors").read_bytes())

    def test_a_calibration_does_not(self, call: Run, home: Path) -> None:
        weights = home / "w.safetensors"
        words = ("crowd", "calibrate", "--set", "scenes", "--weights", weights)
        code, _, err = call(*words, "-o", weights)
        assert (code, "expected --output and --weights to be two files" in err) == (2, True)
        code, _, err = call(*words, "--data", home / "frames", "-o", home / "frames" / "f1.png")
        assert (code, "expected --output and --data" in err) == (2, True)

    def test_training_does_not(self, call: Run, tmp_path: Path) -> None:
        data = tmp_path / "data.safetensors"
        data.mkdir()
        code, _, err = call("crowd", "train", "--set", "mall", "--data", data, "--out", data)
        assert (code, "expected --out and --data to be two files" in err) == (2, True)

    def test_one_run_at_a_time_adds_to_a_file_of_counts(self, call: Run, home: Path, tmp_path: Path) -> None:
        pytest.importorskip("fcntl", reason="locks of POSIX")
        path = tmp_path / "counts.csv"
        words = ("crowd", "count", home / "frames", "--weights", home / "w.safetensors", "--out", tmp_path)
        with CountFile(path, resume=True):
            code, out, err = call(*words, "--resume", "--no-panels")
            assert (code, out) == (1, "")
            assert f"expected {path} for this run alone; another one is writing to it" in err
        assert call(*words, "--resume", "--no-panels")[0] == 0
        assert len(rows(path)) == 3

    def test_names_that_are_formulas(self, call: Run, home: Path, tmp_path: Path) -> None:
        frames = tmp_path / "frames"
        frames.mkdir()
        (frames / "=1+1.png").write_bytes((home / "frames" / "f0.png").read_bytes())
        words = ("crowd", "count", frames, "--weights", home / "w.safetensors", "--out", tmp_path, "--no-panels")
        assert call(*words)[0] == 0
        assert [row["frame"] for row in rows(tmp_path / "counts.csv")] == ["'=1+1.png"]
        code, out, _ = call(*words, "--resume")
        assert (code, "=1+1.png:" in out) == (0, False)
        code, _, err = call(*words, "--csv", tmp_path / "counts.csv.gz")
        assert (code, "expected a file of counts that ends in .csv or .jsonl; found 'counts.csv.gz'" in err) == (
            2,
            True,
        )


class TestLabels:
    def test_intervals_follow_labels(self, call: Run, home: Path, tmp_path: Path) -> None:
        common = ("--weights", home / "w.safetensors", "--no-panels")
        assert call("crowd", "count", home / "frames", *common, "--out", tmp_path / "plain")[0] == 0
        plain = rows(tmp_path / "plain" / "counts.csv")
        labels = tmp_path / "labels.csv"
        labels.write_text(f"frame,count\nf0.png,{float(plain[0]['count']) + 40000}\n")
        options = ("--labels", labels, "--stream", tmp_path / "state.json", "--out", tmp_path / "followed")
        assert call("crowd", "count", home / "frames", *common, *options)[0] == 0
        found = rows(tmp_path / "followed" / "counts.csv")
        for name in ("count", "low", "high"):  # a label is used after its frame
            assert float(found[0][name]) == pytest.approx(float(plain[0][name]), rel=rounding())
        for row, own in zip(found[1:], plain[1:], strict=True):
            assert float(row["count"]) > float(own["count"]) + 1
            assert float(row["high"]) - float(row["count"]) > float(own["high"]) - float(own["count"])
            assert float(row["count_kept"]) <= float(row["count"])

    def test_late_labels_count_in_the_next_run(self, call: Run, home: Path, tmp_path: Path) -> None:
        common = ("--weights", home / "w.safetensors", "--no-panels", "--out", tmp_path)
        state, labels = tmp_path / "state.json", tmp_path / "labels.csv"
        assert call("crowd", "count", home / "frames" / "f0.png", *common, "--stream", state)[0] == 0
        first = rows(tmp_path / "counts.csv")[0]
        labels.write_text(f"count,frame\n{float(first['count']) + 40},f0.png\n7,elsewhere.png\n")
        code, _, err = call(
            "crowd", "count", home / "frames", *common, "--stream", state, "--labels", labels, "--resume"
        )
        assert (code, err) == (0, f"latedrop: passing over what {tmp_path / 'counts.csv'} has: 1 frame.\n")
        assert call("crowd", "count", home / "frames", *common[:-1], tmp_path / "plain")[0] == 0
        plain, found = rows(tmp_path / "plain" / "counts.csv"), rows(tmp_path / "counts.csv")
        assert float(found[1]["count"]) > float(plain[1]["count"]) + 1
        from latedrop.streams import Stream

        with pytest.raises(LatedropError, match="of another model"):
            Stream(path=state)
        assert json.loads(state.read_text())["latedrop stream"]["labels"] == 1

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            ("name,count\n", "expected the columns frame, count"),
            ("frame,count\nf0.png,many\n", "in line 2 of"),
            ("frame,count\nf0.png,-1\n", "in line 2 of"),
            ("frame,count\nf0.png,1\nf0.png,2\n", "in line 3 of"),
            ("frame,count\n,1\n", "on line 2 of"),
        ],
        ids=["columns", "word", "negative", "twice", "nameless"],
    )
    def test_bad_labels(self, call: Run, home: Path, tmp_path: Path, content: str, said: str) -> None:
        labels = tmp_path / "labels.csv"
        labels.write_text(content)
        code, _, err = call(
            "crowd",
            "count",
            home / "frames",
            "--weights",
            home / "w.safetensors",
            "--labels",
            labels,
            "--out",
            tmp_path,
        )
        assert code == 1
        assert said in err

    def test_files_stay_apart(self, call: Run, home: Path, tmp_path: Path) -> None:
        labels = tmp_path / "labels.csv"
        labels.write_text("frame,count\n")
        common = ("crowd", "count", home / "frames", "--weights", home / "w.safetensors", "--out", tmp_path)
        for option in ("--csv", "--stream"):
            code, _, err = call(*common, "--labels", labels, option, labels)
            assert code == 2
            assert "to be two files; found one" in err
        assert labels.read_text() == "frame,count\n"

    def test_labels_of_no_frame_are_told(self, call: Run, home: Path, tmp_path: Path) -> None:
        labels = tmp_path / "labels.csv"
        labels.write_text("frame,count\nframe0.png,3\n")
        common = ("crowd", "count", home / "frames", "--weights", home / "w.safetensors", "--no-panels")
        code, _, err = call(*common, "--out", tmp_path / "a", "--labels", labels)
        assert code == 0
        assert "no label in" in err
        assert "it has 'frame0.png', where frames are called 'f2.png'" in err
        labels.write_text("frame,count\nframe0.png,3\nf1,3\n")
        assert call(*common, "--out", tmp_path / "b", "--labels", labels)[2] == ""
        code, _, err = call(*common, "--out", tmp_path / "b", "--labels", labels, "--resume")
        assert code == 0
        assert "without --stream, what was learned from labels before is lost" in err
        assert "no label in" not in err

    def test_a_file_has_counts_that_follow_or_plain_ones(self, call: Run, home: Path, tmp_path: Path) -> None:
        common = ("crowd", "count", "--weights", home / "w.safetensors", "--no-panels")
        state = ("--stream", tmp_path / "state.json")
        assert call(*common, home / "frames" / "f0.png", "--out", tmp_path / "a")[0] == 0
        assert call(*common, home / "frames" / "f0.png", "--out", tmp_path / "b", *state)[0] == 0
        for out, more in (("a", state), ("b", ())):
            code, _, err = call(*common, home / "frames", "--out", tmp_path / out, "--resume", *more)
            assert code == 1
            assert "all with --labels or --stream, or none; found others" in err
        code, _, err = call(*common, home / "frames", "--out", tmp_path / "b", "--resume", *state)
        assert code == 0, err

    def test_an_alarm_is_one_line(self, call: Run, home: Path, tmp_path: Path) -> None:
        frames, labels = tmp_path / "frames", tmp_path / "labels.csv"
        frames.mkdir()
        lines = ["frame,count"]
        for k in range(40):
            (frames / f"g{k:02}.png").write_bytes((home / "frames" / f"f{k % 3}.png").read_bytes())
            lines.append(f"g{k:02}.png,{50000 if k > 7 else 0}")
        labels.write_text("\n".join(lines) + "\n")
        options = ("--labels", labels, "--no-panels", "--out", tmp_path / "out")
        code, _, err = call("crowd", "count", frames, "--weights", home / "w.safetensors", *options)
        assert code == 0
        assert re.fullmatch(
            r"latedrop: alarm: errors are no longer as they were, since frame g\d\d\.png at the latest\n", err
        )

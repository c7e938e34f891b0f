"""`latedrop crowd` with frames and counters of one's own: calibrate, count, recalibrate; and wrong input."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from latedrop_crowd.scenes import make_scenes

Run = Callable[..., tuple[int, str, str]]
SHAPE = (64, 80)
CODE = """
import torch
from torch import nn


class Theirs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(1, 6, 9, stride=2, padding=4)
        self.b = nn.Conv2d(6, 6, 5, stride=4, padding=2)
        self.c = nn.Conv2d(6, 1, 1)

    def forward(self, x):
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


def untrained():
    return Theirs()


def counter():
    torch.manual_seed(0)
    net = Theirs()
    with torch.no_grad():
        for value in net.parameters():
            value.uniform_(-0.01, 0.05)
        net.a.weight /= 255
    return net
"""


@pytest.fixture
def camera(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of twelve frames with heads, code of a counter, and a working directory for both."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "their_net.py").write_text(CODE)
    folder = tmp_path / "camera"
    (folder / "frames").mkdir(parents=True)
    scenes = make_scenes(0, 0, 50, shape=SHAPE)
    rows = ["frame,x,y"]
    for k, index in enumerate(scenes.test):
        Image.fromarray((255 * scenes.image(index)[0].numpy()).astype(np.uint8)).save(folder / "frames" / f"f{k}.png")
        rows += [f"f{k}.png,{x},{y}" for x, y in scenes.frames[index].points] or [f"f{k}.png,,"]
    (folder / "heads.csv").write_text("\n".join(rows))
    return folder


OURS = ("--weights", "their_net:counter", "--input-scale", "255", "--density-scale", "0.02", "--relu", "--stride", "8")


def test_their_counter_on_own_frames(call: Run, camera: Path) -> None:
    code, out, err = call("crowd", "calibrate", "--set", "own", "--data", camera, *OURS, "-o", "cal.json")
    assert code == 0, err
    assert "validation frames of own" in out
    record = json.loads(Path("cal.json").read_text())["crowd"]
    assert record["about"]["counter"] == {"input_scale": 255.0, "density_scale": 0.02, "relu": True}
    assert record["usual"]["size"] == list(SHAPE)
    common = ("crowd", "count", camera / "frames", "--calibration", "cal.json", "--no-panels", "--every", "20")
    code, out, err = call(*common, *OURS, "--out", "counts")
    assert code == 0, err
    with Path("counts/counts.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["frame"] for row in rows] == ["f0.png", "f20.png", "f40.png"]
    assert all(float(row["low"]) <= float(row["count"]) <= float(row["high"]) for row in rows)
    assert len({row["provenance"].partition(".")[0] for row in rows}) == 1
    changed = [word if word != "0.02" else "0.03" for word in OURS]
    code, _, err = call(*common, *changed, "--out", "other")
    assert code == 1
    assert "it was made for others (of the set own), or with another scaling of frames or map" in err
    labels = Path("labels.csv")
    labels.write_text("frame,count\n" + "".join(f"f{k},{k % 5 + 3}\n" for k in range(0, 48, 4)))
    where = ("crowd", "recalibrate", camera / "frames", "-c", "cal.json", *OURS)
    code, out, err = call(*where, "--labels", labels, "-o", "scene.json")
    assert code == 0, err
    assert "recalibrated on 12 frames of the scene" in out
    scene = json.loads(Path("scene.json").read_text())["crowd"]["recalibration"]
    assert 1 <= scene["effective"] <= 12
    code, again, err = call(*common[:4], "scene.json", *common[5:], *OURS, "--out", "scene", "--json")
    assert code == 0, err
    assert json.loads(again.splitlines()[0])["count"] != float(rows[0]["count"])
    labels.write_text("frame,count\nf1,3\nf2,3\nf3,3\nf4,3\nf99,3\n")
    code, _, err = call(*where, "--labels", labels)
    assert code == 1
    assert "expected all 5 labelled frames among the frames; missing: f99" in err
    labels.write_text("frame,count\nf1,3\nf2,3\n")
    code, _, err = call(*where, "--labels", labels)
    assert code == 1
    assert "expected the people of 5 frames or more, better of 20 spread over the scene; found 2" in err


def test_counts_are_enough(call: Run, camera: Path) -> None:
    (camera / "heads.csv").unlink()
    (camera / "counts.csv").write_text("frame,count\n" + "".join(f"f{k},{k % 7}\n" for k in range(50)))
    (camera / "validation.txt").write_text("\n".join(f"f{k}" for k in range(12)))
    (camera / "train.txt").write_text("\n".join(f"f{k}" for k in range(12, 24)))
    code, out, err = call("crowd", "calibrate", "--set", "own", "--data", camera, *OURS, "-o", "cal.json")
    assert code == 0, err
    assert "cells: not calibrated, as only counts are known" in out
    frame = camera / "frames" / "f3.png"
    code, out, err = call("crowd", "count", frame, "-c", "cal.json", *OURS, "--out", "counts", "--panels")
    assert code == 0, err
    assert Path("counts/f3.png.panel.png").exists()


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"their_net:counter": "their_net:nobody"}, "expected 'nobody' in their_net"),
        ({"their_net:counter": "their_net:untrained"}, "expected their_net:untrained to have trained weights"),
        ({"8": "4"}, "from the counter, a cell for 4 x 4 pixels"),
        ({"0.02": "0"}, "expected density_scale above 0"),
        ({"their_net:counter": "mall"}, "expected --input-scale, --density-scale, --relu, --stride only with package"),
        ({"their_net:counter": "nothing.pt2"}, "nothing.pt2"),
    ],
    ids=["name", "untrained", "stride", "scale", "ours", "program"],
)
def test_counters_that_are_refused(call: Run, camera: Path, changed: dict[str, str], match: str) -> None:
    words = [changed.get(word, word) for word in OURS]
    code, _, err = call("crowd", "calibrate", "--set", "own", "--data", camera, *words, "-o", "cal.json")
    assert code in (1, 2)
    assert match in err
    assert "Traceback" not in err
    assert not Path("cal.json").exists()


def test_an_exported_program_counts(call: Run, camera: Path) -> None:
    import sys

    sys.path.insert(0, ".")
    try:
        from their_net import counter
    finally:
        sys.path.remove(".")
    net = counter().eval()
    frames = ({0: torch.export.Dim("frames")},)
    torch.export.save(torch.export.export(net, (torch.rand(2, 1, *SHAPE),), dynamic_shapes=frames), "net.pt2")
    words = ("--weights", "net.pt2", *OURS[2:])
    code, _, err = call("crowd", "calibrate", "--set", "own", "--data", camera, *words, "-o", "net.calibration.json")
    assert code == 0, err
    code, out, err = call("crowd", "count", camera / "frames" / "f3.png", *words, "--no-panels")
    assert code == 0, err
    assert "f3.png: " in out

"""Counts that follow labels: what they follow, what they watch, and names of frames."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("scipy")
pytest.importorskip("safetensors")

from counters import network
from latedrop.errors import FileError, OutputError
from latedrop_crowd.calibration import CrowdCalibration, calibrate_counter
from latedrop_crowd.calibration.recalibration import fit_recalibration
from latedrop_crowd.calibration.record import Reading
from latedrop_crowd.counting import CountedFrame, count_people
from latedrop_crowd.labelled import counts_stream, followed, label_of, read_labels
from latedrop_crowd.mcnn import Trained
from latedrop_crowd.recalibrating import recalibrate_counter
from latedrop_crowd.scenes import make_scenes
from rounding import assert_same_up_to_rounding

SHAPE = (72, 96)
Frames = list[tuple[str, torch.Tensor]]


@pytest.fixture(scope="module")
def trained() -> Trained:
    return Trained(network(0), None, {"set": "scenes"})


@pytest.fixture(scope="module")
def calibration(trained: Trained) -> CrowdCalibration:
    return calibrate_counter(trained, make_scenes(6, 10, 0, shape=SHAPE), policy=False, progress=False)


@pytest.fixture(scope="module")
def frames() -> Frames:
    scenes = make_scenes(0, 0, 6, shape=SHAPE)
    return [(f"f{k}.png", scenes.image(index)) for k, index in enumerate(scenes.test)]


@pytest.fixture
def moved(calibration: CrowdCalibration) -> CrowdCalibration:
    """Recalibrated for a scene where counts are 500 higher."""
    count = calibration.count.table[0].rmses[0] * np.linspace(1, 2, 12)
    unit = np.full(12, calibration.count.table[0].rmses[0] ** 2)
    return replace(calibration, recalibration=fit_recalibration(count, unit, count + 500))


def ends(rows: list[CountedFrame]) -> list[tuple[float, ...]]:
    return [(row.count, row.std, row.low, row.high, row.count_kept) for row in rows]


def test_what_is_followed_is_what_is_reported(trained: Trained, moved: CrowdCalibration, frames: Frames) -> None:
    plain = list(count_people(trained, moved, frames))
    found = list(followed(plain, counts_stream(moved), {}))
    assert_same_up_to_rounding(ends(found), ends(plain))
    assert all(row.provenance == f"{own.provenance}+stream" for row, own in zip(found, plain, strict=True))


def test_the_guard_of_size_and_brightness_is_followed(
    trained: Trained, calibration: CrowdCalibration, frames: Frames
) -> None:
    name, image = frames[0]
    plain = list(count_people(trained, calibration, [(name, 0.6 + 0.4 * image)]))
    assert plain[0].reasons
    found = list(followed(plain, counts_stream(calibration), {}))
    assert_same_up_to_rounding(ends(found), ends(plain))


def test_standard_deviations_widen_with_intervals(
    trained: Trained, calibration: CrowdCalibration, frames: Frames
) -> None:
    plain = list(count_people(trained, calibration, frames))
    labels = {row.name: row.count + 10 * (-1) ** k * row.std for k, row in enumerate(plain)}
    stream = counts_stream(calibration)
    last, own = list(followed(plain, stream, labels))[-1], plain[-1]
    assert last.high - last.count > 2 * (own.high - own.count)
    assert last.std / own.std == pytest.approx((last.high - last.count) / (own.high - own.count))


def test_strange_frames_raise_an_alarm_without_labels(
    trained: Trained, calibration: CrowdCalibration, frames: Frames
) -> None:
    (usual,) = count_people(trained, calibration, frames[:1])
    (dark,) = count_people(trained, calibration, [("dark", 0.3 * frames[0][1])])
    assert usual.strangeness < 1 < dark.strangeness
    alarms: list[str] = []
    stream = counts_stream(calibration)
    rows = [replace(usual, name=f"f{k}") for k in range(100)] + [replace(dark, name=f"d{k}") for k in range(30)]
    list(followed(rows, stream, {}, alarms.append))
    assert any(alarm.startswith("strangeness is no longer as it was") and "since frame d" in alarm for alarm in alarms)


def test_a_state_belongs_to_a_calibration(
    trained: Trained, calibration: CrowdCalibration, moved: CrowdCalibration, frames: Frames, tmp_path: Path
) -> None:
    state = tmp_path / "state.json"
    list(followed(count_people(trained, calibration, frames[:1]), counts_stream(calibration, path=state), {}))
    assert counts_stream(calibration, path=state).waiting == ("f0.png",)
    with pytest.raises(FileError, match="of another model or calibration"):
        counts_stream(moved, path=state)


def test_names_of_labels(tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"
    path.write_text("\ufeffFrame, Count\nf1 ,3\nclip.mp4#7,2.5\nclip,9\n", encoding="utf-8")
    labels = read_labels(path)
    assert label_of("f1.png", labels) == 3
    assert label_of("clip.mp4#000007", labels) == 2.5
    assert label_of("clip.mp4#000008", labels) is None
    assert label_of("f2.png", labels) is None


def test_recalibration_finds_the_first_frame_of_a_video(
    trained: Trained, calibration: CrowdCalibration, frames: Frames
) -> None:
    video = [(f"clip.mp4#{k:06}", image) for k, (_, image) in enumerate(frames)]

    def until_the_last() -> Iterator[tuple[str, torch.Tensor]]:
        yield from video
        raise FileError("it stopped after 6")

    with pytest.warns(UserWarning, match="only 6 labelled frames"):
        found = recalibrate_counter(trained, calibration, until_the_last(), {str(k): 5 for k in range(6)})
    assert found.recalibration is not None
    assert found.recalibration.frames == 6


def test_digits_of_an_image_are_its_name(trained: Trained, calibration: CrowdCalibration, frames: Frames) -> None:
    images = [(f"{k:02}.png", image) for k, (_, image) in enumerate(frames)]
    with pytest.raises(Exception, match=r"missing: 1\.png"):
        recalibrate_counter(trained, calibration, images, {f"{k}.png": 5 for k in range(1, 6)})


def test_recalibration_refuses_what_is_not_counted(
    trained: Trained, calibration: CrowdCalibration, frames: Frames, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = CrowdCalibration.read

    def below(self: CrowdCalibration, trained: Trained, image: torch.Tensor, **options: bool) -> Reading:
        found = plain(self, trained, image, **options)
        return replace(found, count=replace(found.count, output=-1 - found.count.output.abs()))

    monkeypatch.setattr(CrowdCalibration, "read", below)
    with pytest.raises(OutputError, match="expected a density that sums to people"):
        recalibrate_counter(trained, calibration, frames, {name: 3 for name, _ in frames})

"""Recalibration of a counter: names of labelled frames, and what is refused."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from counters import network
from latedrop.errors import FileError, OutputError
from latedrop_crowd.calibration import CrowdCalibration, calibrate_counter
from latedrop_crowd.calibration.counter import recalibrate_counter
from latedrop_crowd.calibration.record import Reading
from latedrop_crowd.mcnn import Trained
from latedrop_crowd.scenes import make_scenes

SHAPE = (72, 96)
Frames = list[tuple[str, torch.Tensor]]


@pytest.fixture(scope="module")
def trained() -> Trained:
    return Trained(network(0), None, {"set": "scenes"})


@pytest.fixture(scope="module")
def calibration(trained: Trained) -> CrowdCalibration:
    return calibrate_counter(trained, make_scenes(6, 10, 0, shape=SHAPE), progress=False)


@pytest.fixture(scope="module")
def frames() -> Frames:
    scenes = make_scenes(0, 0, 6, shape=SHAPE)
    return [(f"f{k}.png", scenes.image(index)) for k, index in enumerate(scenes.test)]


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

"""Shipped calibrations on frames unlike any that they have seen: each is flagged, and its interval is wider."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from counters import shipped_counter
from latedrop.records import checked, plain
from latedrop_crowd.calibration import CrowdCalibration
from latedrop_crowd.calibration.record import STRANGE, Usual
from latedrop_crowd.counting import CountedFrame, count_people
from latedrop_crowd.mcnn import Trained
from latedrop_crowd.scenes import make_scenes
from rounding import rounding


def noise(image: Tensor) -> Tensor:
    return torch.rand(image.shape, generator=torch.Generator().manual_seed(0))


def half_size(image: Tensor) -> Tensor:
    return F.interpolate(image[None], scale_factor=0.5, mode="bilinear", antialias=True)[0]


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "noise": noise,
    "black": torch.zeros_like,
    "half size": half_size,
}


def counted(trained: Trained, calibration: CrowdCalibration, image: Tensor) -> CountedFrame:
    (row,) = count_people(trained, calibration, [("frame", image)])
    return row


@pytest.mark.parametrize("kind", ["noise", "black", "half size"])  # scenes without people look like blurred ones
def test_strange_scenes(kind: str) -> None:
    trained, calibration = shipped_counter()
    scenes = make_scenes(0, 0, 3)
    plain = counted(trained, calibration, scenes.image(scenes.test[1]))
    assert plain.strangeness < STRANGE
    row = counted(trained, calibration, KINDS[kind](scenes.image(scenes.test[1])))
    assert row.strangeness > STRANGE
    assert row.reasons
    assert row.std > plain.std
    assert 0 <= row.low <= row.count <= row.high


@pytest.mark.parametrize("name", ["mall", "ucsd", "pets", "scenes"])
def test_every_shipped_calibration_knows_what_is_usual(name: str) -> None:
    _, calibration = shipped_counter(name)
    terms = calibration.count.terms
    assert calibration.usual is not None
    assert calibration.usual.size is not None
    assert terms is not None
    assert terms.guard is not None
    assert terms.reference_rows >= 80
    says = {"mall": "follows the count only: ", "pets": "is the same for every frame: "}.get(name, "")
    assert calibration.width.startswith(says)
    assert f"the width of the count's interval {calibration.width}" in str(calibration)
    assert CrowdCalibration.from_json(calibration.to_json()).to_json() == calibration.to_json()


def test_size_and_brightness() -> None:
    usual = Usual.of([torch.full((1, 40, 60), value) for value in (0.4, 0.5)])
    assert usual.size == (40, 60)
    assert (usual.darkest, usual.brightest) == (pytest.approx(0.35), pytest.approx(0.55))
    assert checked(Usual, plain(usual), "usual", "") == usual
    assert usual.strangeness(torch.full((1, 40, 60), 0.45)) == (pytest.approx(0, abs=rounding()), ())
    assert usual.strangeness(torch.full((1, 40, 60), 0.54))[0] < 1
    actual, words = usual.strangeness(torch.full((1, 40, 60), 0.9))
    assert actual == pytest.approx(4.5)
    assert words == ("brightness 0.90, usually 0.35 to 0.55",)
    actual, words = usual.strangeness(torch.full((1, 20, 30), 0.45))
    assert actual == 4 * STRANGE
    assert words == ("20 x 30 pixels, not 40 x 60",)
    several = Usual.of([torch.zeros(1, 4, 4), torch.zeros(1, 4, 5)])
    assert several.size is None
    assert several.strangeness(torch.zeros(1, 9, 9))[1] == ()

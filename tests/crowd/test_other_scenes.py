"""Counters that come to another camera: 20 labels make them better or leave them alone, and intervals hold."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from counters import shipped_counter
from latedrop_crowd import CrowdCalibration, Trained, make_scenes, open_set
from latedrop_crowd.calibration.counter import recalibrate_counter
from latedrop_crowd.calibration.record import Reading

DATA = Path(__file__).parents[3] / "shared" / "data"
FRAMES, LABELS, TRIALS = 80, 20, 10
Shots = list[tuple[Tensor, int]]


@dataclass(frozen=True)
class Camera:
    """Frames of one camera with their true counts, and the size and light in which it sees them."""

    size: tuple[int, int]
    light: float = 1.0

    def shots(self, images: Sequence[Tensor], counts: Sequence[int]) -> Shots:
        resized = (F.interpolate(i[None], self.size, mode="bilinear", align_corners=False)[0] for i in images)
        return [((self.light * image).clamp(0, 1), count) for image, count in zip(resized, counts, strict=True)]


def released(name: str, folder: str, camera: Camera) -> Shots:
    if not (DATA / folder).is_dir():
        pytest.skip(f"needs the frames of {folder}")
    actual = open_set(name, DATA / folder)
    chosen = np.linspace(0, len(actual.frames) - 1, FRAMES).round().astype(int).tolist()
    return camera.shots([actual.image(i, 1) for i in chosen], [len(actual.heads(i)) for i in chosen])


def pets_crop() -> Shots:
    """The lower left of PETS2009, half as bright: another place, another size of people, other light."""
    if not (DATA / "pets2009").is_dir():
        pytest.skip("needs the frames of pets2009")
    actual = open_set("pets", DATA / "pets2009")
    chosen = np.linspace(0, len(actual.frames) - 1, FRAMES).round().astype(int).tolist()
    heads = [actual.heads(i) for i in chosen]
    inside = [int(((p[:, 0] < 480) & (p[:, 1] >= 120) & (p[:, 1] < 480)).sum()) for p in heads]
    return Camera((180, 240), 0.5).shots([actual.image(i, 1)[:, 120:480, :480] for i in chosen], inside)


def synthetic(seed: int, camera: Camera) -> Shots:
    actual = make_scenes(0, 0, FRAMES, seed=seed)
    return camera.shots([actual.image(i, 1) for i in range(FRAMES)], [len(actual.heads(i)) for i in range(FRAMES)])


SCENES: dict[str, tuple[str, Callable[[], Shots]]] = {
    "synthetic, tall and dark": ("mall", lambda: synthetic(3, Camera((240, 320), 0.6))),
    "synthetic, small and bright": ("pets", lambda: synthetic(5, Camera((120, 160), 1.3))),
    "ucsd": ("mall", lambda: released("ucsd", "ucsd", Camera((240, 360)))),
    "pets, a dark part": ("mall", pets_crop),
    "mall by the counter of scenes": ("scenes", lambda: released("mall", "mall", Camera((240, 320)))),
}


@pytest.mark.parametrize("name", list(SCENES))
def test_twenty_labels_at_another_camera(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    which, make = SCENES[name]
    shots = make()
    trained, calibration = shipped_counter(which)
    images = [image for image, _ in shots]
    truth = np.array([count for _, count in shots], dtype=float)
    network = CrowdCalibration.read
    before = [network(calibration, trained, image, deviations=False) for image in images]
    counted = {id(image): reading for image, reading in zip(images, before, strict=True)}

    def once(self: CrowdCalibration, trained: Trained, image: Tensor, *, deviations: bool = True) -> Reading:
        seen = counted[id(image)]  # each frame goes through the network once
        return self.judge(seen.count, seen.fitted_variance, image, seen.density, seen.std)

    monkeypatch.setattr(CrowdCalibration, "read", once)
    covered = []
    for trial in range(TRIALS):
        rng = np.random.default_rng(trial)
        labelled = sorted(rng.choice(FRAMES, LABELS, replace=False).tolist())
        names = {f"{i:03}.png": int(truth[i]) for i in labelled}
        fitted = recalibrate_counter(trained, calibration, [(f"{i:03}.png", images[i]) for i in labelled], names)
        fitted = CrowdCalibration.from_json(fitted.to_json())  # the file is one that can be read
        scene = fitted.recalibration
        assert scene is not None
        assert scene.mae_after <= scene.mae_before
        assert scene.slope >= -1
        others = [i for i in range(FRAMES) if i not in labelled]
        after = [fitted.read(trained, images[i]) for i in others]
        assert all(type(r.variance) is float and r.variance > 0 and r.deviation > 0 for r in after)
        worse = [
            abs(max(0, r.mean) - truth[i]) - abs(max(0, before[i].mean) - truth[i])
            for i, r in zip(others, after, strict=True)
        ]
        assert np.mean(worse) <= np.std(worse, ddof=1) / len(worse) ** 0.5
        ends = [r.interval(0.9) for r in after]
        covered += [low <= truth[i] <= high for i, (low, high) in zip(others, ends, strict=True)]
    assert np.mean(covered) >= 0.85


def test_labels_that_contradict_the_counter_leave_it_as_it_was() -> None:
    """More people where it sees fewer: a falling line is refused."""
    from latedrop_crowd.calibration.recalibration import fit_recalibration

    count = np.linspace(5, 45, 20)
    actual = fit_recalibration(count, np.full(20, 4.0), 60 - count)
    assert actual.form != "line"
    assert actual.apply(45.0, 4.0)[0] > actual.apply(5.0, 4.0)[0]
    assert torch.isfinite(torch.tensor(actual.variance))

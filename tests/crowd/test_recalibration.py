"""Counts of a new scene from a few labelled frames: the fit, what it is drawn to, and how it is kept."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import norm, t

from latedrop.errors import DataError, FileError, OutputError
from latedrop.records import checked, plain
from latedrop_crowd.calibration import CrowdCalibration
from latedrop_crowd.calibration.counter import recalibrate_counter
from latedrop_crowd.calibration.recalibration import Recalibration, effective_frames, fit_recalibration, t_quantile
from latedrop_crowd.calibration.record import Reading
from latedrop_crowd.mcnn import Trained
from latedrop_crowd.scenes import make_scenes
from rounding import rounding


def labelled(rng: np.random.Generator, n: int, bias: float, slope: float, std: float) -> tuple[np.ndarray, np.ndarray]:
    count = rng.uniform(5, 30, n)
    return count, count + bias + slope * (count - 17) + std * rng.standard_normal(n)


def test_many_frames_decide_by_themselves() -> None:
    rng = np.random.default_rng(0)
    count, truth = labelled(rng, 4000, -3, -0.2, 1.5)
    actual = fit_recalibration(count, np.full(4000, 9.0), truth)
    mean, variance = actual.apply(25.0, 9.0)
    assert mean == pytest.approx(25 - 3 - 0.2 * 8, abs=0.15)  # three standard errors of a line at its end
    assert variance**0.5 == pytest.approx(1.5, rel=0.05)
    assert actual.effective > 2000
    assert actual.mae_after < actual.mae_before


def test_no_information_leaves_the_old_calibration() -> None:
    """Frames that are one and the same are worth a single one: the slope stays, and the intervals are wide."""
    actual = fit_recalibration(np.full(20, 10.0), np.full(20, 4.0), np.full(20, 12.0))
    assert actual.slope == pytest.approx(0, abs=rounding(torch.float64))
    assert 0 < actual.offset <= 2
    drifting = np.cumsum(np.random.default_rng(1).standard_normal(40)) / 2
    count = np.full(40, 20.0) + np.linspace(-1, 1, 40)
    alike = fit_recalibration(count, np.full(40, 4.0), count + drifting)
    assert alike.effective < 15
    assert t_quantile(0.9, alike.dof) > 1.75


@pytest.mark.parametrize("n", [10, 20, 40])
def test_intervals_hold_on_average_over_scenes(n: int) -> None:
    rng = np.random.default_rng(n)
    inside = []
    for _ in range(300):
        count, truth = labelled(rng, n + 50, rng.normal(0, 4), rng.normal(0, 0.15), 2.0)
        actual = fit_recalibration(count[:n], np.full(n, 4.0), truth[:n])
        for c, y in zip(count[n:], truth[n:], strict=True):
            mean, variance = actual.apply(c, 4.0)
            inside.append(abs(y - mean) <= t_quantile(0.9, actual.dof) * variance**0.5)
    # 300 scenes: a standard error of 0.004 over them.
    assert np.mean(inside) == pytest.approx(0.9, abs=0.03)


def test_a_variance_twice_as_large_stays_so() -> None:
    rng = np.random.default_rng(3)
    count, truth = labelled(rng, 400, 0, 0, 1)
    actual = fit_recalibration(count, np.full(400, 4.0), truth)
    assert actual.apply(17, 8.0)[1] / actual.apply(17, 4.0)[1] == pytest.approx(2, rel=0.02)


def test_effective_frames() -> None:
    rng = np.random.default_rng(0)
    assert effective_frames(rng.standard_normal(500)) > 250
    rho, values = 0.9, [0.0]
    for _ in range(4000):
        values.append(rho * values[-1] + rng.standard_normal())
    assert 4000 / effective_frames(values) == pytest.approx((1 + rho) / (1 - rho), rel=0.5)
    assert effective_frames([2.0] * 9) == 9  # no errors left to be alike


def test_quantiles_and_records() -> None:
    assert t_quantile(0.9, 7) == pytest.approx(t.ppf(0.95, 7))
    assert t_quantile(0.9, 1e9) == pytest.approx(norm.ppf(0.95), rel=1e-6)  # nearly normal
    actual = fit_recalibration(np.arange(8.0), np.ones(8), np.arange(8.0) + 1, strangeness=7.0)
    assert checked(Recalibration, plain(actual), "recalibration", "") == actual
    assert actual.strangeness == 7
    assert "8 frames of the scene" in str(actual)
    for wrong in ({"dof": 1.0}, {"variance": -1.0}, {"frames": 2}, {"slope": None}):
        with pytest.raises(DataError, match=r"recalibration\."):
            checked(Recalibration, plain(actual) | wrong, "recalibration", "")


def test_too_few_frames_and_variances_below_zero_are_refused() -> None:
    with pytest.raises(DataError, match=r"of the same 5 frames or more, better 20 .*; found 4, 4 and 4"):
        fit_recalibration(np.ones(4), np.ones(4), np.ones(4))
    with pytest.raises(DataError, match="expected finite counts, and variances above 0"):
        fit_recalibration(np.arange(8.0), np.array([1.0] * 7 + [-0.1]), np.arange(8.0))


def test_a_fit_that_worsens_left_out_labels_is_refused() -> None:
    """Errors without a pattern: an offset fitted to some blocks is farther from the others than none at all."""
    count = np.linspace(5, 30, 20)
    error = np.repeat([2.0, -2.0, 2.0, -2.0, 0.0], 4)
    actual = fit_recalibration(count, np.full(20, 4.0), count + error)
    assert actual.form == "as before"
    assert actual.apply(12.0, 4.0)[0] == 12
    assert actual.mae_after == actual.mae_before == pytest.approx(np.abs(error).mean())
    assert "the count stays as it was" in str(actual)


def test_intervals_follow_labels_where_the_count_stays() -> None:
    count, sign = np.linspace(5, 30, 20), np.tile([1.0, -1.0], 10)
    small, large = (fit_recalibration(count, np.ones(20), count + size * sign) for size in (0.2, 8.0))
    assert large.variance > 50 * small.variance


SHAPE = (72, 96)
Frames = list[tuple[str, torch.Tensor]]


@pytest.fixture(scope="module")
def frames() -> Frames:
    scenes = make_scenes(0, 0, 6, shape=SHAPE)
    return [(f"f{k}.png", scenes.image(index)) for k, index in enumerate(scenes.test)]


def test_recalibration_finds_the_first_frame_of_a_video(
    trained: Trained, free: CrowdCalibration, frames: Frames
) -> None:
    video = [(f"clip.mp4#{k:06}", image) for k, (_, image) in enumerate(frames)]

    def until_the_last() -> Iterator[tuple[str, torch.Tensor]]:
        yield from video
        raise FileError("it stopped after 6")

    with pytest.warns(UserWarning, match="only 6 labelled frames"):
        actual = recalibrate_counter(trained, free, until_the_last(), {str(k): 5 for k in range(6)})
    assert actual.recalibration is not None
    assert actual.recalibration.frames == 6


def test_digits_of_an_image_are_its_name(trained: Trained, free: CrowdCalibration, frames: Frames) -> None:
    images = [(f"{k:02}.png", image) for k, (_, image) in enumerate(frames)]
    with pytest.raises(Exception, match=r"missing: 1\.png"):
        recalibrate_counter(trained, free, images, {f"{k}.png": 5 for k in range(1, 6)})


def test_recalibration_refuses_what_is_not_counted(
    trained: Trained, free: CrowdCalibration, frames: Frames, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = CrowdCalibration.read

    def below(self: CrowdCalibration, trained: Trained, image: torch.Tensor, **options: bool) -> Reading:
        actual = plain(self, trained, image, **options)
        return replace(actual, count=replace(actual.count, output=-1 - actual.count.output.abs()))

    monkeypatch.setattr(CrowdCalibration, "read", below)
    with pytest.raises(OutputError, match="expected a density that sums to people"):
        recalibrate_counter(trained, free, frames, {name: 3 for name, _ in frames})

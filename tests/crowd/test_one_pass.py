"""A frame counted in one pass says the same as in several."""

import pickle
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from counters import shipped_counter
from latedrop.errors import OutputError
from latedrop_crowd.calibration import CrowdCalibration
from latedrop_crowd.mcnn import Trained, faster, load_weights, shipped
from latedrop_crowd.scenes import make_scenes
from rounding import assert_same_up_to_rounding, rounding


@pytest.fixture(scope="module")
def counter() -> tuple[Trained, CrowdCalibration]:
    return shipped_counter()


def with_dropout(calibration: CrowdCalibration) -> CrowdCalibration:
    """Return a calibration with a share of dropout in the variance, so that a backward pass is needed too."""
    terms = calibration.count.terms
    assert terms is not None
    used = tuple(0.5 if name.startswith("dropout") else 0.03 for name in terms.columns)
    return replace(calibration, count=replace(calibration.count, terms=replace(terms, coefficients=(used,))))


@pytest.mark.parametrize("dropout", [False, True], ids=["no dropout", "dropout"])
def test_one_pass_says_the_same(counter: tuple[Trained, CrowdCalibration], dropout: bool) -> None:
    trained, calibration = counter
    calibration = with_dropout(calibration) if dropout else calibration
    image = make_scenes(0, 1, 0).image(0)
    all_of_it, quick = (calibration.read(trained, image, deviations=deviations) for deviations in (True, False))
    assert quick.mean == pytest.approx(all_of_it.mean, rel=rounding())
    assert quick.variance == pytest.approx(all_of_it.variance, rel=rounding())
    assert quick.strangeness == pytest.approx(all_of_it.strangeness, rel=rounding())
    assert_same_up_to_rounding(quick.density, all_of_it.density)
    assert not quick.std.any()
    assert all_of_it.std.any()


def test_the_network_runs_once(counter: tuple[Trained, CrowdCalibration]) -> None:
    trained, passes = load_weights(shipped("scenes")), []
    trained.model.fuse.register_forward_hook(lambda *_: passes.append(1))
    counter[1].read(trained, make_scenes(0, 1, 0).image(0), deviations=False)
    assert len(passes) == 1


def test_frames_share_one_private_copy(counter: tuple[Trained, CrowdCalibration]) -> None:
    trained, image = load_weights(shipped("scenes")), make_scenes(0, 1, 0).image(0)
    before = counter[1].read(trained, image)
    network = trained.network
    counter[1].read(trained, image)
    assert trained.network is network
    for copied in (deepcopy(trained), pickle.loads(pickle.dumps(trained))):
        assert copied.network is not network
        assert counter[1].read(copied, image).mean == pytest.approx(before.mean, rel=rounding())
    with torch.no_grad():
        trained.model.fuse.weight = torch.nn.Parameter(2 * trained.model.fuse.weight)  # replaced, not written into
        trained.model.fuse.bias.mul_(2)
    assert counter[1].read(trained, image).mean == pytest.approx(2 * before.mean, rel=rounding())


def test_weights_laid_out_for_speed_count_the_same(counter: tuple[Trained, CrowdCalibration]) -> None:
    _, calibration = counter
    trained, image = load_weights(shipped("scenes")), make_scenes(0, 1, 0).image(0)
    before = calibration.read(trained, image, deviations=False)
    after = calibration.read(faster(trained), image, deviations=False)
    assert after.mean == pytest.approx(before.mean, rel=rounding())
    assert torch.equal(trained.model.fuse.weight, load_weights(shipped("scenes")).model.fuse.weight)


def test_the_variance_before_the_guard_is_that_without_one(counter: tuple[Trained, CrowdCalibration]) -> None:
    """Also where the guard's ceiling cuts its growth off, so that the grown variance does not tell the fitted one."""
    trained, calibration = counter
    terms, image = calibration.count.terms, torch.rand(1, 144, 192, generator=torch.Generator().manual_seed(0))
    assert terms is not None
    assert terms.guard is not None
    unguarded = replace(calibration, count=replace(calibration.count, terms=replace(terms, guard=None)), usual=None)
    plain = unguarded.read(trained, image, deviations=False)
    guard = replace(terms.guard, centres=(plain.mean,), spreads=(1.1 * plain.variance,))
    capped = replace(calibration, count=replace(calibration.count, terms=replace(terms, guard=guard)), usual=None)
    actual = capped.read(trained, image, deviations=False)
    assert actual.strangeness > 5
    assert actual.variance == pytest.approx(1.1 * plain.variance)
    assert actual.fitted_variance == pytest.approx(plain.variance)


def test_a_variance_below_zero_is_no_reading(counter: tuple[Trained, CrowdCalibration]) -> None:
    trained, calibration = counter
    reading = calibration.read(trained, make_scenes(0, 1, 0).image(0), deviations=False)
    with pytest.raises(OutputError, match="expected a finite count and variances of at least 0"):
        replace(reading, variance=-1.0)

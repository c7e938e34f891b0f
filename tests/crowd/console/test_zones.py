"""Zones: cells inside, counts and variances of their own sums, and how likely a limit is exceeded."""

import numpy as np
import pytest
import torch
from scipy import stats

from counters import shipped_counter
from latedrop import sample
from latedrop.errors import DataError
from latedrop_crowd.console.counter import LiveCounter
from latedrop_crowd.console.zones import (
    Amount,
    Shares,
    cells_of,
    checked_points,
    drawn_points,
    first_order_shares,
    probability_above,
)
from latedrop_crowd.scenes import make_scenes
from rounding import rounding

LEFT = ((0.0, 0.0), (0.5, 0.0), (0.5, 1.0), (0.0, 1.0))
RIGHT = ((0.5, 0.0), (1.0, 0.0), (1.0, 1.0), (0.5, 1.0))


@pytest.fixture(scope="module")
def counter() -> LiveCounter:
    return LiveCounter(*shipped_counter())


def test_cells_of_a_polygon() -> None:
    triangle = cells_of(((0, 0), (1, 0), (0, 1)), (40, 60))
    assert triangle.mean() == pytest.approx(0.5, abs=0.02)
    assert cells_of((), (3, 4)).all()
    both = cells_of(LEFT, (7, 9)).astype(int) + cells_of(RIGHT, (7, 9))
    assert (both == 1).all()  # neighbours share no cell and leave none out


@pytest.mark.parametrize(
    "value", ["[[0, 0]]", [[0, 0], [1, 1]], [[0, 0], [2, 0], [0, 1]], "nonsense", [[0, 0, 1]] * 3, 7]
)
def test_corners_that_make_no_zone(value: object) -> None:
    with pytest.raises(DataError, match="corners"):
        checked_points(value)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "an area"),
        ([[0.3, 0.3]] * 3, "found 1 different corners"),
        ([[0.1, 0.1], [0.5, 0.5], [0.9, 0.9]], "an area"),
        ([[0.1, 0.1], [0.9, 0.1], [0.1, 0.1], [0.9, 0.1]], "cross or touch"),
        ([[0.1, 0.1], [0.101, 0.1], [0.1, 0.101]], "an area"),
        ([[0, 0], [1, 1], [1, 0.1], [0, 0.8]], "cross or touch"),
        ([[0.1, 0.1], [0.9, 0.9], [0.9, 0.1], [0.1, 0.9]], "cross or touch"),  # both halves are as large
        ([[0, 0], [1, 0], [1, 1], [0.5, 0], [0, 1]], "cross or touch"),  # a corner on another side
        ([[0, 0], [0.4, 0.4], [0.8, 0.8], [0.2, 0.2], [0, 1]], "cross or touch"),  # goes back over itself
    ],
    ids=["none", "one corner", "a line", "there and back", "tiny", "a bow", "an even bow", "touching", "a spike"],
)
def test_outlines_that_make_no_zone(value: object, said: str) -> None:
    with pytest.raises(DataError, match=said):
        drawn_points(value)


def test_a_corner_that_is_clicked_twice_counts_once() -> None:
    assert drawn_points([*LEFT[:2], *LEFT[1:], LEFT[0]]) == LEFT


def test_probability_above_a_limit() -> None:
    assert probability_above(Amount(18.0, 9.0), 20) == pytest.approx(stats.norm.sf(2.5 / 3))
    assert probability_above(Amount(18.0, 9.0, 6.0), 20) == pytest.approx(stats.t.sf(2.5 / 3, 6))
    assert probability_above(Amount(18.0, 9.0), 20.4) == probability_above(Amount(18.0, 9.0), 20)  # people are whole


def test_the_whole_picture_has_the_count_and_its_variance(counter: LiveCounter) -> None:
    pixels = make_scenes(0, 1, 0).frames[0].pixels
    assert pixels is not None
    count = counter.count("a", pixels, [(), LEFT, RIGHT])
    whole, left, right = count.amounts
    assert whole.mean == pytest.approx(count.reading.mean)
    assert whole.variance == pytest.approx(count.reading.variance, rel=rounding())
    assert left.mean + right.mean == pytest.approx(whole.mean, rel=rounding())
    assert 0 < left.variance < whole.variance * 1.2


def test_frames_may_change_their_size(counter: LiveCounter) -> None:
    pixels = make_scenes(0, 1, 0).frames[0].pixels
    assert pixels is not None
    for frame in (pixels, pixels[:, : pixels.shape[1] // 2], pixels):
        whole, left = counter.count("a", frame, [(), LEFT]).amounts
        assert 0 <= left.mean <= whole.mean


def test_shares_are_those_of_draws_of_the_zones_own_sums(counter: LiveCounter) -> None:
    trained, calibration = counter.trained, counter.calibration
    image = make_scenes(0, 1, 0).image(0)[:, 40:120, 40:136]
    shape = (image.shape[1] // 4, image.shape[2] // 4)
    masks = np.stack([cells_of(points, shape) for points in (LEFT, RIGHT)])
    chosen = torch.from_numpy(np.concatenate([np.ones_like(masks[:1]), masks])).float()

    def sums(density: torch.Tensor) -> torch.Tensor:
        return torch.einsum("nhw,zhw->nz", density[:, 0], chosen)

    draws = 200
    drawn = sample(trained.model, image[None], 1e-4, draws, 0, calibration.count.sites, sums).variance[0]
    actual = first_order_shares(trained, calibration, image, masks)
    # A ratio of two variances over n draws: standard error at most 2 / sqrt(n) of it.
    np.testing.assert_allclose(actual, (drawn[1:] / drawn[0]).numpy(), rtol=3 * 2 / draws**0.5)


def test_people_on_the_edge_widen_a_zone(counter: LiveCounter) -> None:
    density = np.zeros((20, 20))
    shares = Shares.measured(counter.trained, counter.calibration, torch.zeros(1, 80, 80), density, [LEFT])
    inside, edge = density.copy(), density.copy()
    inside[10, 2] = edge[10, 9] = 1.0
    far, near = (shares.amounts(Amount(1.0, 1e-9), where)[0] for where in (inside, edge))
    assert far.variance < 1e-3
    assert 0.1 < near.variance < 0.26  # a person who may be on either side: at most a quarter


def test_labels_move_zones_with_the_count(counter: LiveCounter) -> None:
    density = np.full((20, 20), 0.05)
    shares = Shares.measured(counter.trained, counter.calibration, torch.zeros(1, 80, 80), density, [(), LEFT, RIGHT])
    moved = shares.amounts(Amount(30.0, 4.0), density)
    assert moved[0].mean == pytest.approx(30.0)
    assert moved[1].mean + moved[2].mean == pytest.approx(30.0, rel=0.05)

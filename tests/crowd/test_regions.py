"""Regions of density maps and their features, and policies of rejecting some of them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from density_maps import SHAPE, as_heavy_as_people, bump, light, made
from latedrop.errors import ArgumentError, DataError
from latedrop.records import checked, plain
from latedrop_crowd.regions import Maps, Policy, RegionTable, find_regions, fit_policy, usual_threshold
from rounding import rounding


def test_features_of_two_regions() -> None:
    density, std = np.zeros((8, 10)), np.zeros((8, 10))
    density[1, 1], density[2, 2] = 0.3, 0.1  # touch at a corner: one region
    density[6, 8] = 0.2
    std[1, 1], std[2, 2], std[6, 8], std[0, 9] = 0.1, 0.1, 0.3, 5.0
    regions = find_regions(density, std, threshold=0.05)
    assert len(regions) == 2
    np.testing.assert_allclose(regions.mass, [0.4, 0.2])
    np.testing.assert_allclose(regions.ratio, [0.5, 1.5])
    np.testing.assert_allclose(regions.isolation, np.hypot(6, 4))
    assert regions.mask(np.array([False, True])).sum() == 1


def test_no_region_and_one_region() -> None:
    empty = find_regions(np.zeros(SHAPE), threshold=0.01)
    assert len(empty) == 0
    assert empty.near(np.array([[3.0, 3.0]])).shape == (0,)
    assert empty.mask(np.zeros(0, dtype=bool)).sum() == 0
    alone = find_regions(bump(10, 10), threshold=0.01)
    assert alone.isolation.tolist() == [pytest.approx(np.hypot(*SHAPE))]
    assert alone.ratio.tolist() == [0]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), share=st.floats(0.02, 0.6))
def test_isolation_is_the_least_distance_of_cells(seed: int, share: float) -> None:
    mask = np.random.default_rng(seed).random((14, 11)) < share
    regions = find_regions(mask.astype(float), threshold=0.5)
    cells = [np.argwhere(regions.labels == k + 1) for k in range(len(regions))]
    for k, own in enumerate(cells):
        others = [other for j, other in enumerate(cells) if j != k]
        gaps = [np.linalg.norm(own[:, None] - other[None], axis=2).min() for other in others]
        assert regions.isolation[k] == pytest.approx(min([*gaps, np.hypot(14, 11)]))


def test_near_reaches_two_cells_and_no_more() -> None:
    density = np.zeros(SHAPE)
    density[10, 10] = density[10, 30] = 0.5
    regions = find_regions(density, threshold=0.1)
    near = [regions.near(np.array([[10 + d, 10.0]])).tolist() for d in (0, 0.5, 2, 2.1, 5)]
    assert near == [[True, False], [True, False], [True, False], [False, False], [False, False]]
    assert regions.near(np.zeros((0, 2))).tolist() == [False, False]
    # A head in a corner, outside the grid by less than a cell, belongs to its last cell.
    density[29, 39] = 0.5
    assert find_regions(density, threshold=0.1).near(np.array([[39.4, 29.4]])).tolist() == [False, False, True]


def test_a_policy_rejects_regions_that_meet_all_three_conditions() -> None:
    density = bump(8, 8) + bump(30, 20, 0.3)
    regions = find_regions(density, 0.2 * bump(8, 8) + 0.3 * bump(30, 20), threshold=0.005)
    policy = Policy(threshold=0.005, greatest_mass=0.5, least_ratio=0.5, least_isolation=3)
    assert policy.rejects(regions).tolist() == [False, True]
    for change in ({"greatest_mass": 0.2}, {"least_ratio": 2.0}, {"least_isolation": 90.0}):
        assert not replace(policy, **change).rejects(regions).any()
    assert Policy(0.005).rejects_nothing
    assert not Policy(0.005).rejects(regions).any()


def test_faint_regions_are_light_and_apart() -> None:
    density = bump(8, 8) + bump(30, 20, 0.2) + bump(12, 8, 0.2, 0.5)
    regions = find_regions(density, threshold=0.005)
    assert len(regions) == 2  # the light bump beside a person is part of it
    marked = Policy(0.005, faint_mass=0.5, faint_isolation=5).faint(regions)
    assert marked.tolist() == [False, True]
    assert not Policy(0.005, faint_mass=0.5, faint_isolation=90).faint(regions).any()
    assert not Policy(0.005, greatest_mass=2.0, faint_mass=0.5).faint(regions).any()  # rejected, not only faint


def test_the_rate_of_faint_regions_is_that_of_other_frames() -> None:
    policy = fit_policy(made(60, 13, light), features=("mass", "isolation"))
    assert 0.3 < policy.faint_mass < 0.75
    assert policy.least_ratio == 0
    fresh = made(60, 14, light)
    table = RegionTable.of(fresh, policy.threshold, 2.0)
    marked = (table.mass <= policy.faint_mass) & (table.isolation >= policy.faint_isolation)
    assert (marked & table.true_region).sum() / marked.sum() == pytest.approx(
        1 - policy.faint_false / policy.faint_seen, abs=0.1
    )
    assert marked.sum() > 0.7 * (~table.true_region).sum()
    assert f"{policy.faint_false} of {policy.faint_seen} were false" in str(policy)


def test_where_light_regions_are_people_none_is_faint() -> None:
    density = np.stack([bump(8, 8, 0.3) + bump(30, 20, 1.0)] * 12)
    policy = fit_policy(Maps(density, 0 * density, [np.array([[8.0, 8.0], [30.0, 20.0]])] * 12))
    assert (policy.faint_mass, policy.faint_seen) == (0, 0)
    assert "no region is called faint" in str(policy)


def test_policy_survives_json() -> None:
    for policy in (Policy(0.1, 0.5, 0.2, 3.0, "regions", 0.4, 2.0, 9, 7), Policy(0.1)):
        assert checked(Policy, plain(policy), "policy", "") == policy
    with pytest.raises(DataError, match=r"expected a field policy.greatest_mass; it is missing"):
        checked(Policy, {"threshold": 0.1}, "policy", "")
    with pytest.raises(DataError, match=r"expected policy.faint_false to be at most 9; found 10"):
        checked(Policy, {**plain(policy), "faint_seen": 9, "faint_false": 10}, "policy", "")
    assert "none is rejected" in str(Policy(0.1))
    assert "at most 0.5 people" in str(Policy(0.1, 0.5))


def test_policy_finds_what_only_uncertainty_tells() -> None:
    policy = fit_policy(made(60, 0, as_heavy_as_people))
    assert 0.25 < policy.least_ratio < 0.75  # people are below 0.3, clutter is above 0.6
    assert policy.objective == "count"
    fewer = fit_policy(made(60, 0, as_heavy_as_people), objective="regions")
    assert 0.25 < fewer.least_ratio < 0.75


def test_nothing_is_rejected_where_nothing_helps() -> None:
    maps = made(40, 1, light, rate=0)
    policy = fit_policy(maps)
    assert policy.rejects_nothing
    nobody = Maps(np.zeros((3, *SHAPE)), np.zeros((3, *SHAPE)), [np.zeros((0, 2))] * 3)
    assert fit_policy(nobody).rejects_nothing


def test_people_are_not_rejected_to_make_up_for_others() -> None:
    """Every bump is a person and all are too heavy: rejecting some would mend the count, and must not be done."""
    maps = made(40, 2, light, rate=0)
    heavy = Maps(1.3 * maps.mean, maps.std, maps.heads)
    assert fit_policy(heavy).rejects_nothing


def test_region_of_interest() -> None:
    roi = np.zeros(SHAPE, dtype=bool)
    roi[:, :20] = True
    maps = Maps((bump(8, 8) + bump(30, 8))[None], np.ones((1, *SHAPE)), [np.array([[8.0, 8.0]])], roi)
    assert maps.predicted.tolist() == [pytest.approx(1, abs=rounding())]
    assert maps.true.tolist() == [1]
    assert len(find_regions(*maps.frame(0), threshold=0.01)) == 1


def test_usual_threshold_is_a_tenth_of_the_peak() -> None:
    maps = np.stack([k * bump(8, 8) for k in (1, 2, 5)])
    assert usual_threshold(maps) == pytest.approx(0.2 * bump(8, 8).max())
    assert usual_threshold(np.zeros((1, *SHAPE))) > 0


def test_wrong_arguments() -> None:
    with pytest.raises(
        DataError, match=r"expected one map \(h, w\), and deviations of the same shape; found \(2, 3, 4\)"
    ):
        find_regions(np.zeros((2, 3, 4)))
    with pytest.raises(DataError, match="deviations of the same shape"):
        find_regions(np.zeros(SHAPE), np.zeros((3, 3)))
    with pytest.raises(ArgumentError, match="expected a positive threshold"):
        find_regions(np.zeros(SHAPE), threshold=0)
    with pytest.raises(DataError, match=r"found .* and 2\."):
        Maps(np.zeros((1, *SHAPE)), np.zeros((1, *SHAPE)), [np.zeros((0, 2))] * 2)
    with pytest.raises(DataError, match="expected a region of interest of"):
        Maps(np.zeros((1, *SHAPE)), np.zeros((1, *SHAPE)), [np.zeros((0, 2))], np.ones((2, 2), dtype=bool))
    with pytest.raises(ArgumentError, match="expected objective 'count' or 'regions'; found 'people'"):
        fit_policy(made(2, 0, light), objective="people")  # type: ignore[arg-type]

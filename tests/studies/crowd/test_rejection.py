"""The measured worth of rejecting regions of density maps."""

import json

import numpy as np
import pytest

pytest.importorskip("scipy")

from density_maps import as_heavy_as_people, light, made
from latedrop_crowd.regions import Maps, find_regions
from studies.crowd.rejection import measure_rejection


def test_helps_where_uncertainty_tells() -> None:
    result = measure_rejection(made(60, 3, as_heavy_as_people), made(120, 4, as_heavy_as_people))
    before, after, controls = result["before"], result["after"], result["controls"]
    assert result["verdict"] == "helps"
    assert after["mae"] < 0.7 * before["mae"]
    assert after["mae"] < controls["low_density"]["mae"]
    assert after["mae"] < controls["random"]["mae"]["mean"] - 3 * controls["random"]["mae"]["std"]
    assert before["false_kept"] == result["regions"]["false"] > 150
    assert after["false_kept"] < 0.2 * before["false_kept"]
    assert after["true_rejected"] <= 5
    assert after["rejected"] == before["false_kept"] - after["false_kept"] + after["true_rejected"]
    assert controls["lowest_mass"]["rejected"] == controls["random"]["rejected"]["mean"] == after["rejected"]
    assert result["separation"]["ratio"] > 0.99
    assert result["separation"]["low_mass"] < 0.9
    assert result["separation"]["all"] > 0.99
    assert result["separation"]["without_ratio"] < 0.9
    assert json.loads(json.dumps(result)) == result


def test_low_density_gets_the_credit_where_it_tells_as_much() -> None:
    result = measure_rejection(made(60, 5, light, rate=4), made(120, 6, light, rate=4))
    assert result["verdict"] == "helps without uncertainty"
    assert result["differences"]["after_minus_before"]["high"] < 0
    assert result["separation"]["low_mass"] > 0.99


def test_verdict_where_nothing_is_rejected() -> None:
    result = measure_rejection(made(40, 7, light, rate=0), made(40, 8, light, rate=0))
    assert result["verdict"] == "nothing rejected"
    assert result["before"] == result["after"]
    assert set(result["separation"].values()) == {None}


def test_hurts_where_test_frames_are_unlike_validation() -> None:
    """On the validation frames uncertain regions are clutter, on the test frames they are people."""
    validation, test = made(60, 9, as_heavy_as_people), made(60, 10, as_heavy_as_people)
    heads = [np.argwhere(find_regions(m, threshold=0.02).labels > 0)[:, ::-1] for m in test.mean]
    result = measure_rejection(validation, Maps(test.mean, test.std, heads))
    assert result["verdict"] == "hurts"


def test_the_same_seed_gives_the_same_numbers() -> None:
    validation, test = made(20, 11, as_heavy_as_people), made(20, 12, as_heavy_as_people)
    first, second = (measure_rejection(validation, test, 5, repeats=10, resamples=50) for _ in range(2))
    assert first == second
    other = measure_rejection(validation, test, 6, repeats=10, resamples=50)
    assert other["controls"]["random"] != first["controls"]["random"]
    assert other["after"] == first["after"]

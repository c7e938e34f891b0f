"""Standard errors of splits that share rows, exact t quantiles, and Holm's correction."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from studies.significance import holm, split_error, student_inside, student_p, student_quantile

stats = pytest.importorskip("scipy.stats", reason="the reference")
FREEDOMS = [1, 2, 3, 4, 5, 19, 20, 47, 200]


@pytest.mark.parametrize("freedom", [*FREEDOMS, None])
@pytest.mark.parametrize("level", [0.1, 0.5, 0.9, 0.95, 0.999])
def test_quantiles_are_students(freedom: int | None, level: float) -> None:
    reference = stats.norm if freedom is None else stats.t(freedom)
    assert student_quantile(level, freedom) == pytest.approx(reference.ppf((1 + level) / 2), rel=1e-10)


@pytest.mark.parametrize("freedom", [*FREEDOMS, None])
@pytest.mark.parametrize("t", [-40.0, -2.5, 0.0, 1e-3, 1.0, 7.0])
def test_p_values_are_students(freedom: int | None, t: float) -> None:
    reference = stats.norm if freedom is None else stats.t(freedom)
    assert student_p(t, freedom) == pytest.approx(2 * reference.sf(abs(t)), abs=1e-12)


def test_without_freedom_nothing_is_known() -> None:
    assert student_quantile(0.95, 0) == math.inf
    assert student_p(100.0, 0) == 1.0
    assert student_p(math.inf, 3) == 0.0
    assert student_inside(math.inf, 3) == 1.0


def test_error_of_splits_that_share_rows() -> None:
    values = [1.0, 2.0, 4.0, 5.0]  # variance 10 / 3
    assert split_error(values) == pytest.approx(math.sqrt(10 / 3 / 4))
    assert split_error(values, overlap=31 / 222) == pytest.approx(math.sqrt(10 / 3 * (1 / 4 + 31 / 222)))
    assert split_error([1.0]) == math.inf


def test_the_error_is_right_where_splits_share_most_of_a_mean() -> None:
    """Values with correlation r have a mean of variance `var (1 / J + r / (1 - r))`, in terms of the expected `var`."""
    rng, splits, common = np.random.default_rng(0), 10, 0.25
    shared = math.sqrt(common) * rng.normal(size=(4000, 1))
    values = shared + math.sqrt(1 - common) * rng.normal(size=(4000, splits))
    expected = np.mean([split_error(row, overlap=common / (1 - common)) ** 2 for row in values])
    # The variance of 4000 normal means is known to sqrt(2 / 4000), 2.2 %.
    assert values.mean(1).var() == pytest.approx(expected, rel=4 * 0.022)


def test_holm_by_hand() -> None:
    # Sorted 0.005, 0.01, 0.03, 0.04: times 4, 3, 2, 1, each at least the one before.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_rejects_what_the_step_down_procedure_does(p: list[float]) -> None:
    order = sorted(range(len(p)), key=lambda place: p[place])
    rejected: set[int] = set()
    for step, place in enumerate(order):
        if (len(p) - step) * p[place] > 0.05:
            break
        rejected.add(place)
    assert {place for place, value in enumerate(holm(p)) if value <= 0.05} == rejected

"""The measures of a cut, on numbers that can be checked by hand, and that rows which fill up do not count."""

import math

import pytest
import torch

from studies.regression.scores import Predicted
from studies.shift.study import MEASURES, _columns, shift_scores


def predicted(variance: list[float], target: list[float]) -> Predicted:
    rows = torch.tensor([variance, target], dtype=torch.float64)[:, None]
    return Predicted(torch.zeros_like(rows[0]), rows[0], rows[1])


def test_measures_by_hand() -> None:
    shifted, inside = predicted([4.0, 16.0], [2.0, -12.0]), predicted([1.0, 4.0, 1.0], [1.0, 1.0, 2.0])
    found = shift_scores(shifted, inside)
    assert set(found) == set(MEASURES)
    assert found["coverage"] == 0.5  # 1 and 3 standard deviations off
    assert found["inside_coverage"] == pytest.approx(2 / 3)
    assert found["rmse"] == pytest.approx(math.sqrt(74))
    assert found["nll"] == pytest.approx((1 + math.log(4) + 9 + math.log(16)) / 4)
    assert found["ranking"] == pytest.approx(1)
    assert found["error_growth"] == pytest.approx(math.log(74 / 2))
    assert found["variance_growth"] == pytest.approx(math.log(10 / 2))
    assert found["auroc"] == pytest.approx((2.5 + 3) / 6)  # one of the variances of 4 is shifted, one is not


def test_rows_that_fill_up_do_not_count() -> None:
    shifted, inside = predicted([4.0, 16.0], [2.0, -12.0]), predicted([1.0, 4.0, 1.0], [1.0, 1.0, 2.0])
    filled = predicted([4.0, 16.0, 16.0, 16.0], [2.0, -12.0, -12.0, -12.0])
    found = _columns({"shifted": filled, "inside": inside, "validation": inside}, (2,))
    assert found == {name: [float(f"{value:.4g}")] for name, value in shift_scores(shifted, inside).items()}

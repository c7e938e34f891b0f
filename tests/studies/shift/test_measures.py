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
    measures = shift_scores(shifted, inside)
    assert set(measures) == set(MEASURES)
    assert measures["coverage"] == 0.5  # 1 and 3 standard deviations off
    assert measures["inside_coverage"] == pytest.approx(2 / 3)
    assert measures["rmse"] == pytest.approx(math.sqrt(74))
    assert measures["nll"] == pytest.approx((1 + math.log(4) + 9 + math.log(16)) / 4)
    assert measures["ranking"] == pytest.approx(1)
    assert measures["error_growth"] == pytest.approx(math.log(74 / 2))
    assert measures["variance_growth"] == pytest.approx(math.log(10 / 2))
    assert measures["auroc"] == pytest.approx((2.5 + 3) / 6)  # one of the variances of 4 is shifted, one is not


def test_rows_that_fill_up_do_not_count() -> None:
    shifted, inside = predicted([4.0, 16.0], [2.0, -12.0]), predicted([1.0, 4.0, 1.0], [1.0, 1.0, 2.0])
    filled = predicted([4.0, 16.0, 16.0, 16.0], [2.0, -12.0, -12.0, -12.0])
    columns = _columns({"shifted": filled, "inside": inside, "validation": inside}, (2,))
    assert columns == {name: [float(f"{value:.4g}")] for name, value in shift_scores(shifted, inside).items()}

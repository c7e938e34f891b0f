"""Figures of `benchmarks.asked` by hand."""

import math

import pytest
import torch

from benchmarks import asked
from rounding import assert_same_up_to_rounding


def test_rows_until_an_error_lie_between_two_rounds() -> None:
    errors = [0.5, 0.4, 0.6, 0.2]  # of 40, 60, 80 and 100 rows; a worse round does not count
    assert asked._until(errors, 0.5) == 40
    assert asked._until(errors, 0.45) == pytest.approx(50)
    assert asked._until(errors, 0.3) == pytest.approx(90)
    assert asked._until(errors, 0.1) == math.inf


def test_missed_labels_count_by_row() -> None:
    labels = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    inside = torch.tensor([[True, False], [True, True], [False, False], [False, False]])
    assert asked._missed(inside, labels) == pytest.approx((0.5 + 0 + 0 + 1) / 4)


def test_the_error_of_probabilities_is_the_mean_distance_over_bins() -> None:
    p = torch.linspace(0.1, 0.9, 15).double().repeat_interleave(2)  # 15 bins of two, one of each label
    labels = torch.tensor([0.0, 1.0]).repeat(15)
    expected = float((p - 0.5).abs().mean())
    assert_same_up_to_rounding(asked._label_ece(p[:, None], labels[:, None]), expected)


def test_parts_are_divided_without_a_row_twice() -> None:
    rows = torch.arange(20.0)[:, None], torch.arange(20.0)[:, None]
    parts = asked.divided(rows, 0, (0.5, 0.3, 0.2))
    assert [len(x) for x, _ in parts] == [10, 6, 4]
    assert sorted(torch.cat([x for x, _ in parts])[:, 0].tolist()) == list(range(20))

"""Figures of the benchmarks of labels and of choosing rows by hand, and what small networks share."""

import math

import pytest
import torch

from benchmarks import acquire, labels
from benchmarks.nets import calibration_error, divided, members, mlp, random_batches, scaled, trained
from benchmarks.steps import Case
from rounding import assert_same_up_to_rounding


def test_rows_until_an_error_lie_between_two_rounds() -> None:
    errors = [0.5, 0.4, 0.6, 0.2]  # of 40, 60, 80 and 100 rows; a worse round does not count
    assert acquire.until(errors, 0.5) == 40
    assert acquire.until(errors, 0.45) == pytest.approx(50)
    assert acquire.until(errors, 0.3) == pytest.approx(90)
    assert acquire.until(errors, 0.1) == math.inf


def test_missed_labels_count_by_row() -> None:
    there = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    inside = torch.tensor([[True, False], [True, True], [False, False], [False, False]])
    assert labels.missed(inside, there) == pytest.approx((0.5 + 0 + 0 + 1) / 4)


def test_the_error_of_probabilities_is_the_mean_distance_over_bins() -> None:
    p = torch.linspace(0.1, 0.9, 15).double().repeat_interleave(2)  # 15 bins of two, one of each label
    there = torch.tensor([0.0, 1.0]).repeat(15)
    assert_same_up_to_rounding(calibration_error(p, there), float((p - 0.5).abs().mean()))


def test_parts_are_divided_without_a_row_twice_and_scaled_by_the_first() -> None:
    rows = torch.arange(20.0)[:, None], torch.arange(20.0)[:, None]
    parts = divided(rows, 0, (0.5, 0.3, 0.2))
    assert [len(x) for x, _ in parts] == [10, 6, 4]
    assert sorted(torch.cat([x for x, _ in parts])[:, 0].tolist()) == list(range(20))
    (x, y), *_ = scaled(parts, targets=False)
    assert_same_up_to_rounding(x.std(), torch.tensor(1.0))
    assert torch.equal(y, parts[0][1])


def test_a_small_network_learns_and_stops_at_its_best() -> None:
    x = torch.randn(120, 3, generator=torch.Generator().manual_seed(0))
    rows, stop = (x[:100], x[:100, 0]), (x[100:], x[100:, 0])
    batches = random_batches(100, torch.Generator().manual_seed(0), steps=200)
    net = trained(mlp(3), rows, stop, batches=batches)
    with torch.no_grad():
        assert float((net(x)[:, 0] - x[:, 0]).square().mean()) < 0.1


def test_members_have_weights_and_rows_of_their_own() -> None:
    (first, some), (second, all_rows) = members(3, [10, 200], seed=0, steps=5)
    assert some.shape == all_rows.shape == (5, 64)
    assert int(some.max()) < 10 < int(all_rows.max()) < 200
    assert not torch.equal(first[0].weight, second[0].weight)


@pytest.mark.parametrize("work", ["plain", "by hand", "draws", "first order"])
def test_a_step_runs_on_any_machine(work: str) -> None:
    Case("MLP").call(work, 2)()

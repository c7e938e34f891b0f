"""The benchmark of streams: what it compares follows a drift, and its tables repeat the JSON."""

import numpy as np
import pytest
import torch
from torch import nn

import latedrop
from benchmarks import stream
from benchmarks.stream import TITLES, crowd


def test_measures() -> None:
    half = np.array([1.0, 2.0, 1.0])
    measured = stream.judged(np.array([0.5, -3.0, 1.0]), -half, half)
    assert measured["held"] == pytest.approx(2 / 3)
    assert measured["score"] == pytest.approx((2 + (4 + 20) + 2) / 3)
    assert measured["mae"] == pytest.approx(1.5)


def test_labels_are_spread_over_the_frames() -> None:
    assert [stream.phase(30, 10, k)[0] for k in range(stream.PHASES)] == [1, 3, 5, 7, 9]
    assert stream.phase(30, 10, 4) == [9, 19, 29]


@pytest.mark.parametrize("name", TITLES)
def test_series_of_counts_are_whole(name: str) -> None:
    series = crowd(name)
    assert len(series.mean) == len(series.std) == len(series.truth) > 200
    assert series.std.min() > 0
    assert series.usual.errors is not None


def test_a_stream_is_compared_on_both_sides_of_a_change() -> None:
    torch.manual_seed(0)
    x = torch.randn(400, 2)
    y = x[:, 0] + 0.3 * torch.randn(400)
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False))
    with torch.no_grad():  # the first input, as relu(x) - relu(-x)
        model[0].weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
        model[2].weight.copy_(torch.tensor([[1.0, -1.0]]))
    predictor = latedrop.calibrate(model, (x[:100], y[:100, None]), progress=False)
    before, after = stream.compared(predictor, [(x[100:200], y[100:200]), (x[200:], y[200:] + 2)])
    assert before["own held"] > 0.8
    assert after["own held"] < 0.2
    assert after["stream held"] > 0.7
    assert after["stream score"] < after["own score"]


def test_delays_are_summed_up() -> None:
    summed = stream.summary([5, 9, None, -3])
    assert summed == {"streams": 4, "false": 0.25, "found": pytest.approx(2 / 3), "delay": 9}
    assert stream.summary([None, None, 3])["delay"] is None

"""Inputs of a classifier's calibration: labels of any type, tables, large logits, rows that do not fit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import latedrop
from latedrop.errors import OutputError
from latedrop.prediction.predictor import ClassPredictor
from networks import Net, mlp, noisy
from rounding import assert_same_up_to_rounding


def case(factor: float = 3.0, classes: int = 3, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    """A network whose logits are multiplied, with rows and labels."""
    layers = mlp(4, 20, classes, seed=seed)
    x, logits = noisy(layers, 120, seed, 0.2, inputs=4)
    return Net(lambda net, x: net.layers(x) * factor, layers=layers), x, logits.argmax(1)


def calibrated(*args: Any, **options: Any) -> ClassPredictor:
    uq = latedrop.calibrate(*args, progress=False, **options)
    return uq


def same(one: Any, other: Any) -> None:
    assert_same_up_to_rounding(one.probabilities, other.probabilities, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize("task", ["auto", pytest.param("classification", marks=pytest.mark.slow)])
def test_labels_of_any_whole_type(dtype: torch.dtype, task: Any) -> None:
    model, x, y = case()
    y = y.clamp_max(1)
    same(calibrated(model, (x, y.to(dtype)), task=task).predict(x), calibrated(model, (x, y)).predict(x))


@pytest.mark.parametrize("factor", [1e-30, *(pytest.param(f, marks=pytest.mark.slow) for f in (1e-8, 1e4, 1e8, 1e20))])
def test_logits_of_any_size_come_back_from_a_file(factor: float, tmp_path: Path) -> None:
    model, x, y = case(factor)
    uq = calibrated(model, (x, y))
    uq.save(tmp_path / "uq.json")
    prediction = latedrop.load(tmp_path / "uq.json", model).predict(x)
    same(prediction, uq.predict(x))
    assert bool(prediction.probabilities.isfinite().all())


@pytest.mark.parametrize("classes", [2, *(pytest.param(k, marks=pytest.mark.slow) for k in (3, 20))])
def test_labels_that_are_all_right(classes: int) -> None:
    for seed in range(4):
        model, x, _ = case(1.0, classes, seed)
        with torch.no_grad():
            x = x[:50]
            y = model(x).argmax(1)
        if len(y.unique()) < 2:
            continue
        uq = calibrated(model, (x, y))
        assert all(math.isfinite(actual.gain) for actual in uq.calibration.candidates)
        assert bool(uq.predict(100 * x).probabilities.isfinite().all())


@pytest.mark.parametrize("size", [1, 40])
def test_a_sigmoid_is_refused(size: int) -> None:
    model, x, _ = case(4.0, 1)
    y = (torch.sigmoid(model(x)[:, 0]) > torch.rand(len(x), generator=torch.Generator().manual_seed(0))).long()
    ended, loader = nn.Sequential(model, nn.Sigmoid()), DataLoader(TensorDataset(x, y), batch_size=size)
    with pytest.raises(OutputError, match="before a sigmoid"):
        calibrated(ended, loader, task="classification")
    uq = calibrated(ended, (x, y), task="classification", readout=lambda p: p.clamp(1e-7, 1 - 1e-7).logit())
    expected = calibrated(model, (x, y), task="classification")
    assert_same_up_to_rounding(uq.predict(x).probabilities, expected.predict(x).probabilities)


def test_small_logits_of_one_sign_are_no_probabilities() -> None:
    x = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    y = (torch.arange(200) % 3 > 0).long()  # two in three, a logit of 0.7
    head = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    with torch.no_grad():
        head[2].weight.mul_(1e-2)
        head[2].bias.fill_(0.7)
    assert calibrated(head, (x, y), task="classification").predict(x).label.all()


@pytest.mark.parametrize("size", [1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_softmax_is_refused_in_any_precision_and_batch(size: int, dtype: torch.dtype) -> None:
    model, x, y = case()
    ended = nn.Sequential(model, nn.Softmax(1)).to(dtype)
    with pytest.raises(OutputError, match="before a softmax"):
        calibrated(ended, DataLoader(TensorDataset(x.to(dtype), y), batch_size=size))

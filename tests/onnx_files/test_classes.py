"""Classifiers as ONNX files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import latedrop
from networks import mlp
from rounding import assert_same_up_to_rounding


def trained(classes: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 4, generator=generator)
    y = ((x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 1).long()) % classes
    return mlp(4, 24, classes if classes > 2 else 1, act=nn.ReLU), x, y


def same(uq: Any, path: Path, x: torch.Tensor) -> Any:
    prediction, p = latedrop.load_onnx(uq.to_onnx(path, x[:5])).predict(x.numpy()), uq.predict(x)
    expected = p.to_dict()
    missing = set(expected) - set(prediction.to_dict())
    assert missing <= {"mutual_information"}
    for name, value in prediction.to_dict().items():
        if name in expected:
            assert_same_up_to_rounding(value, expected[name].numpy())
    assert_same_up_to_rounding(prediction.outputs["energy"], p.energy.numpy())
    assert prediction.names == p.names
    return prediction


@pytest.mark.parametrize(
    ("classes", "way"),
    [
        (2, "temperature"),
        (3, "draws"),
        *(pytest.param(30, way, marks=pytest.mark.slow) for way in ("temperature", "draws")),
    ],
)
def test_probabilities_and_scores(classes: int, way: str, tmp_path: Path) -> None:
    model, x, y = trained(classes)
    options = {"method": latedrop.Sampling(rates=[0.2], draws=6)} if way == "draws" else {}
    uq = latedrop.calibrate(model, (x[:300], y[:300]), task="classification", progress=False, **options)
    if way == "draws":  # in use, whatever the rows ask for
        uq = uq._as(type(uq), calibration=replace(uq.calibration, rate=0.2, draws=6))
    prediction = same(uq, tmp_path / "model.onnx", x[300:])
    assert ("mutual_information" in prediction.outputs) == (way == "draws")
    assert prediction.novelty is not None
    assert len(prediction) == 100


def test_images(tmp_path: Path) -> None:
    layers = [nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 3)).eval()
    x = torch.randn(120, 1, 6, 6)
    uq = latedrop.calibrate(model, (x[:100], torch.arange(100) % 3), progress=False)
    assert uq.calibration.guard.terms == ("gradients", "leverage")
    same(uq, tmp_path / "model.onnx", 3 * x[100:])


@pytest.mark.slow
def test_sets(tmp_path: Path) -> None:
    model, x, y = trained(3)
    uq = latedrop.calibrate(
        model, (x[:200], y[:200]), task=latedrop.Classification(names=["a", "b", "c"]), progress=False
    )
    plain = same(uq, tmp_path / "plain.onnx", x[300:])
    with pytest.raises(latedrop.LatedropError, match="prediction sets by 'lac'"):
        plain.prediction_set(0.9)
    with_sets = uq.conformal((x[200:300], y[200:300]), "lac", per_class=False)
    rows = torch.cat([x[300:], 50 * x[300:]])
    prediction = same(with_sets, tmp_path / "sets.onnx", rows)
    assert set(prediction.names) <= {"a", "b", "c"}
    for level in (0.5, 0.9):
        assert np.array_equal(prediction.prediction_set(level), with_sets.predict(rows).prediction_set(level).numpy())
    with pytest.raises(latedrop.LatedropError, match="at least 999 conformal rows"):
        prediction.prediction_set(0.999)


@pytest.mark.slow
def test_a_rule(tmp_path: Path) -> None:
    model, x, y = trained(3)
    uq = latedrop.calibrate(model, (x[:200], y[:200]), progress=False)
    ruled = uq.reject((x[200:300], y[200:300]), risk=0.5)
    prediction, expected = same(ruled, tmp_path / "rule.onnx", x[300:]), ruled.predict(x[300:])
    assert np.array_equal(prediction.to_dict()["kept"], expected.kept().numpy())
    assert np.array_equal(prediction.kept(), expected.kept().numpy())
    for name in ("confidence", "entropy", "energy"):
        assert_same_up_to_rounding(getattr(prediction, name), getattr(expected, name).numpy())
    with pytest.raises(latedrop.LatedropError, match="a predictor with a rule; found one without"):
        same(uq, tmp_path / "plain.onnx", x[300:]).kept()


@pytest.mark.slow
def test_an_absurd_row_is_flagged(tmp_path: Path) -> None:
    model, x, y = trained(3)
    uq = latedrop.calibrate(model, (x[:200], y[:200]), task="classification", progress=False)
    uq = uq.reject((x[200:300], y[200:300]), risk=0.9)
    odd = x[300:310].numpy().copy()
    odd[3] = 3e38
    file = latedrop.load_onnx(uq.to_onnx(tmp_path / "rule.onnx", x[:5]))
    prediction, usual, others = file.predict(odd), file.predict(x[300:310].numpy()), [i for i in range(10) if i != 3]
    assert_same_up_to_rounding(prediction.probabilities[others], usual.probabilities[others])
    assert np.array_equal(prediction.kept()[others], usual.kept()[others])
    assert not prediction.kept()[3]
    assert prediction.novelty[3] > 1e38
    assert all(np.isfinite(values).all() for values in prediction.to_dict().values())

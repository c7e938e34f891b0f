"""Targets that were transformed for training: predictions, intervals and scores in the original unit."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

import latedrop
from latedrop import Log, Standardized
from latedrop.calibration.targets import Transform
from latedrop.errors import ArgumentError, DataError
from latedrop.evaluation.evaluation import compare, likelihood, verdict
from networks import mlp, noisy
from rounding import assert_same_doubles, rounding

TERMS = latedrop.Terms(["dropout", "leverage", "gradients"])
"""Without a forest, whose splits may follow the last bit of a target."""
METHODS: list[dict[str, Any]] = [
    {"method": TERMS, "intervals": "gaussian"},
    {"method": latedrop.FirstOrder(floor=True)},
    {"method": latedrop.Propagation(rates=[0.1, 0.3])},
    {"method": latedrop.Sampling(rates=[0.1, 0.3], draws=10)},
]


def network(outputs: int = 1) -> nn.Module:
    return mlp(3, 16, outputs).double()


rows = partial(noisy, seed=1, noise=0.2, dtype=torch.float64)
others = partial(rows, seed=2)
"""Rows that were not calibrated with."""


def calibrated(model: nn.Module, y: Tensor, target: Transform | None, **options: Any) -> latedrop.Predictor:
    return latedrop.calibrate(model, (rows(model)[0], y), target=target, progress=False, **options)


@settings(deadline=None)
@given(m=st.floats(-3, 3), v=st.floats(0.01, 1.5))
def test_log_is_a_log_normal(m: float, v: float) -> None:
    mean, variance = Log().moments(torch.tensor([m], dtype=torch.float64), torch.tensor([v], dtype=torch.float64))
    exact = stats.lognorm(math.sqrt(v), scale=math.exp(m))
    assert float(mean) == pytest.approx(exact.mean(), rel=rounding(torch.float64))
    assert float(variance) == pytest.approx(exact.var(), rel=rounding(torch.float64))


@pytest.mark.parametrize("options", METHODS, ids=lambda o: o["method"].name)
def test_standardized_is_the_same_prediction_in_another_unit(options: dict[str, Any]) -> None:
    model = network()
    x, t = rows(model)
    plain, unit = (
        calibrated(model, t, None, **options),
        calibrated(model, t * 50 + 200, Standardized(200, 50), **options),
    )
    x, t = others(model)
    a, b = plain.predict(x), unit.predict(x)
    assert_same_doubles(b.mean, a.mean * 50 + 200)
    assert_same_doubles(b.std, a.std * 50)
    for mine, plain_row in zip(b.interval(0.8), a.interval(0.8), strict=True):
        assert_same_doubles(mine, plain_row * 50 + 200)
    for mine, plain_row in zip(compare(b, t * 50 + 200), compare(a, t), strict=True):
        assert mine.label == plain_row.label
        assert (mine.rmse, mine.width) == pytest.approx((50 * plain_row.rmse, 50 * plain_row.width))
        assert mine.nll == pytest.approx((plain_row.nll or 0) + math.log(50))
        assert (mine.coverage, mine.ma, mine.correlation) == pytest.approx(
            (plain_row.coverage, plain_row.ma, plain_row.correlation)
        )
    mine, plain_row = unit.calibration.table[0], plain.calibration.table[0]
    assert (mine.rmse, mine.nll_scaled) == pytest.approx((50 * plain_row.rmse, plain_row.nll_scaled + math.log(50)))
    assert str(verdict(b, t * 50 + 200)) == str(verdict(a, t))
    assert unit.explain(x[:1]).mean == pytest.approx(plain.explain(x[:1]).mean * 50 + 200)
    assert unit.explain(x[:1]).sites == pytest.approx(plain.explain(x[:1]).sites)


@pytest.mark.parametrize("options", METHODS, ids=lambda o: o["method"].name)
def test_log_predicts_log_normals(options: dict[str, Any]) -> None:
    model = network()
    x, t = rows(model)
    uq = calibrated(model, t.exp(), Log(), **options)
    x, t = others(model)
    prediction = uq.predict(x)
    plain = prediction.in_model_unit()
    exact = stats.lognorm(plain.std.numpy(), scale=np.exp(plain.mean.numpy()))
    assert_same_doubles(prediction.mean, exact.mean())
    assert_same_doubles(prediction.std, exact.std())
    assert_same_doubles(prediction.quantile([0.1, 0.5]), [exact.ppf(0.1), exact.ppf(0.5)])
    nll = -exact.logpdf(t.exp().numpy()).mean()
    assert likelihood(prediction, t.exp()) == pytest.approx(nll)
    assert compare(prediction, t.exp())[0 if options["method"] is TERMS else 1].nll == pytest.approx(nll)


@pytest.mark.filterwarnings("ignore:.* of these rows are rows that the calibration was fitted to")
@pytest.mark.parametrize("unit", [Standardized([5.0], [2.0]), Log()], ids=["standardized", "log"])
@pytest.mark.parametrize("kind", ["conformal", "isotonic"])
def test_fitted_intervals_are_transformed(unit: Transform, kind: str) -> None:
    model = network()
    x, t = rows(model)
    options: dict[str, Any] = {"intervals": "gaussian" if kind == "conformal" else kind, "method": TERMS}
    uq, bare = calibrated(model, unit.inverse(t), unit, **options), calibrated(model, t, None, **options)
    if kind == "conformal":
        uq, bare = uq.conformal((x[:40], unit.inverse(t)[:40])), bare.conformal((x[:40], t[:40]))
    prediction, plain = uq.predict(x), bare.predict(x)
    for mine, expected_rows in zip(prediction.interval(0.8), plain.interval(0.8), strict=True):
        assert_same_doubles(mine, unit.inverse(expected_rows))


@pytest.mark.parametrize("unit", [Standardized(5.0, 2.0), Log()], ids=["standardized", "log"])
def test_saved_and_loaded(unit: Transform, tmp_path: Path) -> None:
    model = network()
    x, t = rows(model)
    uq = calibrated(model, unit.inverse(t), unit)
    uq.save(tmp_path / "cal.json")
    again = latedrop.load(tmp_path / "cal.json", model)
    assert again.calibration.target == unit
    assert f"trained on transformed targets, {unit}" in str(again.calibration)
    assert_same_doubles(again.predict(x).mean, uq.predict(x).mean)


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: Standardized("a", 1), "expected mean of the training targets"),
        (lambda: Standardized(0, 0), "expected a std above 0"),
        (lambda: Standardized([0, 1], [1, 2, 3]), "expected a std above 0"),
        (lambda: calibrated(network(), torch.zeros(60, 1), "log"), "expected target= as"),  # type: ignore[arg-type]
        (lambda: Log().forward(torch.tensor([1.0, 0.0, -2.0])), "expected targets above 0.*found 2 of 3"),
        (lambda: Standardized([1, 2], [1, 2]).forward(torch.ones(3)), r"expected targets \(N, 2\)"),
    ],
    ids=["text", "zero", "lengths", "name", "log", "outputs"],
)
def test_wrong_arguments(attempt: Any, message: str) -> None:
    with pytest.raises((ArgumentError, DataError), match=message):
        attempt()


def test_a_forgotten_transform_is_noticed() -> None:
    model = network()
    _, t = rows(model)
    with pytest.warns(latedrop.LatedropWarning, match=r"no better than.*pass target=Standardized"):
        calibrated(model, t * 50 + 200, None)

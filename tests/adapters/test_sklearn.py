"""A network that `fit` calibrates goes wherever a regressor does, with `return_std` where that is passed on."""

import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import latedrop
from frameworks import AnyWidth
from latedrop.adapters.sklearn import CalibratedClassifier, CalibratedRegressor, neg_nll_score
from latedrop.errors import ArgumentError, DataError, LatedropError
from networks import mlp
from rounding import assert_same_up_to_rounding


@pytest.fixture
def net() -> nn.Module:
    return mlp(3, 20, 1, act=nn.ReLU)


@pytest.fixture
def data(net: nn.Module) -> tuple[np.ndarray, np.ndarray]:
    dice = np.random.default_rng(0)
    x = dice.normal(size=(60, 3))
    mean = net(torch.tensor(x, dtype=torch.float32))[:, 0].detach().numpy()
    return x, mean + 0.2 * np.abs(x[:, 0]) * dice.normal(size=60)


# What scikit-learn's checks ask for and a network that is trained already does not give; docs/adapters.md says so too.
EXPECTED_FAILED = {
    "check_estimators_overwrite_params": "compares hashes, and a copy of a torch module has another hash",
    "check_regressors_train": "asks for a good score after fit, which does not train the network",
    "check_regressor_multioutput": "fits several targets, and the network of this test has one output",
    "check_classifiers_train": "asks for a good score after fit, which does not train the network",
    "check_classifiers_classes": "fits texts of two and of three classes; the network has as many outputs as it has",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "estimator",
    [
        lambda: CalibratedRegressor(AnyWidth()),
        lambda: CalibratedRegressor(AnyWidth(), method=latedrop.Sampling([0.1], draws=5)),
        lambda: CalibratedClassifier(AnyWidth(4), options={"method": latedrop.Terms(["leverage"])}),
    ],
    ids=["terms", "sample", "classes"],
)
def test_what_applies_of_scikit_learns_checks(estimator: Callable[[], Any]) -> None:
    from sklearn.utils.estimator_checks import check_estimator

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(estimator(), expected_failed_checks=EXPECTED_FAILED, on_fail=None)
    status = {result["check_name"]: result["status"] for result in results}
    assert [name for name, actual in status.items() if actual == "failed"] == []
    assert {name for name, actual in status.items() if actual == "xfail"} <= set(EXPECTED_FAILED)
    passed = {name for name, actual in status.items() if actual == "passed"}
    assert {"check_estimators_unfitted", "check_n_features_in", "check_dict_unchanged"} <= passed


def test_fit_calibrates(net: nn.Module, data: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = data
    uq = latedrop.calibrate(net, (x, y), progress=False)
    regressor = CalibratedRegressor(net).fit(x, y)
    mean, std, low, high = regressor.predict(x, return_std=True, return_interval=0.8)
    p = uq.predict(x)
    for ours, expected_rows in zip((mean, std, low, high), (p.mean, p.std, *p.interval(0.8)), strict=True):
        assert_same_up_to_rounding(ours, expected_rows[:, 0].numpy())
    method = latedrop.Sampling([0.2], 8, seed=3)
    assert CalibratedRegressor(net, method=method).fit(x, y).predictor_.calibration.seed == 3
    assert [part.shape for part in regressor.predict(x, return_interval=0.9)] == [(60,)] * 3
    with pytest.raises(ArgumentError, match=r"expected model=, a trained .* found NoneType"):
        CalibratedRegressor().fit(x, y)


def test_a_predictor_is_used_as_it_is(net: nn.Module, data: tuple[np.ndarray, np.ndarray]) -> None:
    from sklearn.base import clone, is_regressor
    from sklearn.metrics import r2_score
    from sklearn.model_selection import cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    x, y = data
    regressor = CalibratedRegressor(latedrop.calibrate(net, (x, y), progress=False))
    pipeline = make_pipeline(StandardScaler().fit(x), regressor)
    mean = pipeline.predict(x)
    assert pipeline.fit(x, y).score(x, y) == pytest.approx(r2_score(y, mean))
    assert cross_val_score(regressor, x, y, cv=4)[0] == pytest.approx(regressor.score(x[:15], y[:15]))
    assert is_regressor(clone(regressor))
    assert clone(regressor).model is regressor.model
    wide = nn.Sequential(nn.Linear(3, 20), nn.ReLU(), nn.Linear(20, 2))
    uq = latedrop.calibrate(wide, (x, np.stack([y, y], 1)), progress=False)
    assert [part.shape for part in CalibratedRegressor(uq).predict(x, return_std=True)] == [(60, 2)] * 2


def test_an_absent_scikit_learn_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("latedrop.adapters.sklearn.validate_data", None)
    with pytest.raises(LatedropError, match=r"expected scikit-learn 1\.6 or newer; not found"):
        CalibratedRegressor()


def test_clones_share_the_network_and_forget_the_fit(net: nn.Module, data: tuple[np.ndarray, np.ndarray]) -> None:
    from sklearn.base import clone
    from sklearn.exceptions import NotFittedError

    fitted = CalibratedRegressor(net, method="linear").fit(*data)
    twin = clone(fitted)
    assert twin.model is net
    assert twin.get_params() == fitted.get_params()
    with pytest.raises(NotFittedError):
        twin.predict(data[0])
    again = pickle.loads(pickle.dumps(fitted))
    # A pickle keeps every bit, and the batch is the same.
    np.testing.assert_array_equal(again.predict(data[0]), fitted.predict(data[0]))


def test_pipelines_pass_return_std_on(net: nn.Module, data: tuple[np.ndarray, np.ndarray]) -> None:
    from sklearn.frozen import FrozenEstimator
    from sklearn.model_selection import cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    x, y = data
    scaler = FrozenEstimator(StandardScaler().fit(x))
    pipeline = make_pipeline(scaler, CalibratedRegressor(net)).fit(x, y)
    mean, std = pipeline.predict(x, return_std=True)
    alone = CalibratedRegressor(net).fit(scaler.transform(x), y)
    assert_same_up_to_rounding(std, alone.predict(scaler.transform(x), return_std=True)[1])
    by_hand = -0.5 * (np.log(2 * np.pi * std.astype(float) ** 2) + (y - mean) ** 2 / std.astype(float) ** 2).mean()
    assert neg_nll_score(pipeline, x, y) == pytest.approx(by_hand)
    scores = cross_val_score(pipeline, x, y, scoring=neg_nll_score, cv=3)
    part = make_pipeline(scaler, CalibratedRegressor(net)).fit(x[20:], y[20:])
    assert scores[0] == pytest.approx(neg_nll_score(part, x[:20], y[:20]))


def test_a_grid_over_methods(net: nn.Module, data: tuple[np.ndarray, np.ndarray]) -> None:
    from sklearn.model_selection import GridSearchCV

    x, y = data
    grid = {"method": [*(latedrop.Sampling([rate]) for rate in (0.001, 0.3)), "terms", "linear"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # so few draws at so small a rate
        search = GridSearchCV(CalibratedRegressor(net), grid, scoring=neg_nll_score, cv=2, error_score="raise")
        search.fit(x, y)
    assert [entry["method"] for entry in search.cv_results_["params"]] == grid["method"]
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    best = search.best_estimator_
    np.testing.assert_array_equal(search.predict(x), best.predict(x))  # the same call on the same batch
    assert [part.shape for part in best.predict(x, return_std=True)] == [(60,), (60,)]


@pytest.mark.parametrize("kind", ["fit calibrates", "calibrated before"])
def test_targets_in_another_unit(net: nn.Module, data: tuple[np.ndarray, np.ndarray], kind: str) -> None:
    """It takes arrays alone from predict: the mean goes back to the unit, the std is asked of the regressor inside."""
    from sklearn.compose import TransformedTargetRegressor
    from sklearn.preprocessing import StandardScaler

    x, z = data
    y = 100 + 50 * z
    units = StandardScaler().fit(y[:, None])
    uq = latedrop.calibrate(net, (x, units.transform(y[:, None])), progress=False)
    inner = CalibratedRegressor(net) if kind == "fit calibrates" else CalibratedRegressor(uq)
    outer = TransformedTargetRegressor(inner, transformer=StandardScaler()).fit(x, y)
    assert_same_up_to_rounding(outer.predict(x), units.inverse_transform(uq.predict(x).mean)[:, 0])
    _, std = outer.regressor_.predict(x, return_std=True)
    assert_same_up_to_rounding(std, uq.predict(x).std[:, 0])


def test_columns_are_checked(net: nn.Module, data: tuple[np.ndarray, np.ndarray]) -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(data[0], columns=["a", "b", "c"])
    regressor = CalibratedRegressor(net).fit(table, data[1])
    assert regressor.feature_names_in_.tolist() == ["a", "b", "c"]
    with pytest.raises(ValueError, match="feature names should match"):
        regressor.predict(table[["c", "b", "a"]])
    uq = latedrop.calibrate(net, (table, data[1]), progress=False)
    known = CalibratedRegressor(uq)
    assert_same_up_to_rounding(known.predict(table[["c", "b", "a"]]), known.predict(data[0]))
    with pytest.raises(DataError, match="expected the inputs in the columns that the calibration was made with"):
        known.predict(table[["a", "b"]])
    with pytest.raises(ValueError, match="contains NaN"):
        known.predict(np.full((2, 3), np.nan))

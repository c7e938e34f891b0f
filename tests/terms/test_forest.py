"""Trees as arrays and the forest of squared errors, against scikit-learn's own predictions."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.ensemble import RandomForestRegressor
from torch import Tensor, nn

import latedrop
from latedrop import Network, find_sites
from latedrop.errors import DataError
from latedrop.records import FieldError
from latedrop.terms import BatchContext, ErrorForest
from latedrop.terms.forest import Trees, grow
from rounding import assert_same_up_to_rounding


def rows_of(count: int = 400, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Errors whose standard deviation follows the first input: 0.2 below 0, 2 above."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 4))
    return x, rng.normal(size=(count, 1)) * np.where(x[:, :1] > 0, 2, 0.2)


def batch(x: np.ndarray, outputs: int = 1, weights: np.ndarray | None = None, *, fitted: bool = False) -> BatchContext:
    """Rows whose table is x and whose prediction is 0; the validation rows themselves where they are to be fitted."""
    net = nn.Sequential(nn.Linear(x.shape[1], 3), nn.Tanh(), nn.Linear(3, outputs))
    table = torch.from_numpy(np.float32(x))
    rows = BatchContext(
        Network(net), table, find_sites(net, table[:2]), None, None, torch.arange(len(x)) if fitted else None
    )
    rows.remember(mean=torch.zeros(len(x), outputs), table=table)
    rows.weights = None if weights is None else torch.from_numpy(weights)
    return rows


def learned(x: np.ndarray, error: np.ndarray, weights: np.ndarray | None = None, trees: int = 100) -> ErrorForest:
    return ErrorForest(trees).learned_from_errors(
        batch(x, error.shape[1], weights, fitted=True), torch.from_numpy(error)
    )


def columns_of(model: ErrorForest) -> np.ndarray:
    return model.out_of_bag.numpy()


def predicted(model: ErrorForest, x: np.ndarray, outputs: int = 1) -> np.ndarray:
    return model.values(batch(x, outputs)).double().numpy()


def sums(trees: Trees, x: np.ndarray) -> Tensor:
    return trees.sums(torch.from_numpy(np.float32(x)))


@pytest.mark.parametrize("count", [100, 700])
def test_the_forest_is_the_one_that_scikit_learn_grows(count: int) -> None:
    """Both draw rows and inputs by the same numbers, on one thread or on several."""
    x, y = (np.round(part * 2**16) / 2**16 for part in rows_of(count))
    y = np.concatenate([y, x[:, 1:2]], 1) ** 2
    x = np.float32(x)
    trees, out_of_bag = grow(x, y, None, 30, 5)
    least = max(5, round(0.01 * count))
    options = {"min_samples_leaf": least, "max_depth": 8, "oob_score": True, "random_state": 5}
    model = RandomForestRegressor(30, **options).fit(x, np.round(y * 2**16) / 2**16)
    assert_same_up_to_rounding(sums(trees, x), torch.from_numpy(model.predict(x)))
    assert_same_up_to_rounding(out_of_bag, model.oob_prediction_)


def test_values_at_a_threshold_go_where_scikit_learn_sends_them() -> None:
    x = np.float32(np.random.default_rng(0).integers(0, 9, (200, 2))) / np.float32(10)
    y = np.random.default_rng(1).normal(size=200)
    model = RandomForestRegressor(20, random_state=0).fit(x, y)
    trees = Trees.joined([each.tree_ for each in model.estimators_], 1 / 20, 2)
    cuts = np.concatenate([each.tree_.threshold[each.tree_.feature == 0] for each in model.estimators_])
    grid = np.stack([np.float32(cuts), np.full(len(cuts), 0.35, np.float32)], 1)
    assert_same_up_to_rounding(sums(trees, grid)[:, 0], model.predict(grid))


def test_the_forest_finds_where_errors_are_large() -> None:
    x, error = rows_of()
    model = learned(x, error)
    new = np.random.default_rng(2).normal(size=(500, 4))
    variance, large, columns = predicted(model, new)[:, 0], new[:, 0] > 0, columns_of(model)
    assert np.median(variance[large]) == pytest.approx(4, rel=0.4)
    assert np.median(variance[~large]) < 1
    assert np.median(columns[x[:, 0] > 0]) > 5 * np.median(columns[x[:, 0] <= 0])


def test_the_unit_of_the_errors_is_kept_for_each_output() -> None:
    x, error = rows_of()
    model = learned(x, np.concatenate([error, 1e4 * error], 1), trees=20)
    for columns in (columns_of(model), predicted(model, x, 2)):
        assert_same_up_to_rounding(columns[:, 1], 1e8 * columns[:, 0])


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("nodes", (0, 2), 10**6),
        ("nodes", (1, 2), -1),
        ("nodes", (0, 0), 99),
        ("nodes", (0, 0), 0.5),
        ("roots", (0,), 10**6),
        ("leaves", (0, 0), float("inf")),
        ("depth", None, -1),
    ],
)
def test_trees_that_point_nowhere_are_refused(name: str, place: tuple[int, ...] | None, value: float) -> None:
    trees = learned(*rows_of(), trees=5).grown
    assert trees.checked() is trees
    changed = value if place is None else getattr(trees, name).clone()
    if place is not None:
        changed[place] = value
    with pytest.raises(FieldError):
        replace(trees, **{name: changed}).checked()


def test_few_rows_and_other_inputs_are_refused() -> None:
    x, error = rows_of()
    with pytest.raises(DataError, match="expected at least 60 validation rows for an error forest; found 59"):
        learned(x[:59], error[:59])
    with pytest.raises(DataError, match="expected rows of 5 numbers for trees; found 4"):
        predicted(learned(x, error, trees=5), x[:, :3])


def test_it_looks_at_logarithms_of_terms_before_it() -> None:
    x, _ = rows_of()
    rows = batch(x, fitted=True)
    rows.totals["leverage"] = torch.exp(torch.arange(400.0))[:, None].clamp_max(1e30)
    rows.totals["dropout"] = torch.zeros(400, 1)
    forest = ErrorForest().looking_at(rows)
    assert forest.beside == ("leverage", "dropout")
    numbers = forest.numbers(rows)
    assert numbers.shape == (400, 4 + 1 + 2)
    assert_same_up_to_rounding(numbers[:60, 5] * float(forest.spread[5]), torch.arange(60.0))
    assert bool(numbers.isfinite().all())


def test_rows_that_are_no_table_have_components_of_features() -> None:
    rng = np.random.default_rng(4)
    features = rng.normal(size=(80, 50)) @ rng.normal(size=(50, 50)) + 3
    rows = batch(np.zeros((80, 4)), fitted=True)
    rows.x = None
    del rows.table
    rows.remember(features=torch.from_numpy(features), mean=torch.zeros(80, 1))
    numbers = ErrorForest().looking_at(rows).numbers(rows)
    expected = PCA(32, svd_solver="full").fit_transform(features)
    assert_same_up_to_rounding(numbers[:, :32].abs(), np.abs(expected / expected.std(0)))
    assert numbers.shape == (80, 33)


def test_predictions_do_not_need_scikit_learn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    x, error = rows_of(200)
    table = torch.from_numpy(x).float()
    y = net(table).detach() + torch.from_numpy(error).float()
    uq = latedrop.calibrate(net, (table, y), progress=False)
    assert "forest" in uq.calibration.terms.choice
    uq.save(tmp_path / "uq.json")
    expected = uq.predict(table).std
    for name in ("sklearn", "sklearn.ensemble"):
        monkeypatch.setitem(sys.modules, name, None)
    torch.testing.assert_close(latedrop.load(tmp_path / "uq.json", net).predict(table).std, expected)

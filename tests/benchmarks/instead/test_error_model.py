"""Trees as arrays and the forest of squared errors, against scikit-learn's own predictions."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.decomposition import PCA
from sklearn.ensemble import RandomForestRegressor

from benchmarks.instead import error_model
from benchmarks.instead.error_model import Components, ErrorModel, error_inputs
from benchmarks.instead.trees import Trees
from latedrop.errors import DataError


def rows_of(count: int = 400, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Errors whose standard deviation follows the first input: 0.2 below 0, 2 above."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 4))
    return x, rng.normal(size=(count, 1)) * np.where(x[:, :1] > 0, 2, 0.2)


def test_trees_predict_what_scikit_learn_predicts() -> None:
    x, y = rows_of()
    y = np.concatenate([y, x[:, 1:2] ** 2], 1)
    forest = RandomForestRegressor(30, min_samples_leaf=3, random_state=0).fit(x, y)
    trees = Trees.joined([each.tree_ for each in forest.estimators_], 1 / 30, np.zeros(2), 4)
    new = np.random.default_rng(1).normal(size=(300, 4)) * 2
    np.testing.assert_allclose(trees.predict(new), forest.predict(new), rtol=1e-5, atol=1e-6)


def test_values_at_a_threshold_go_where_scikit_learn_sends_them() -> None:
    x = np.float32(np.random.default_rng(0).integers(0, 9, (200, 2))) / np.float32(10)
    y = np.random.default_rng(1).normal(size=200)
    forest = RandomForestRegressor(20, random_state=0).fit(x, y)
    trees = Trees.joined([each.tree_ for each in forest.estimators_], 1 / 20, np.zeros(1), 2)
    cuts = np.concatenate([each.tree_.threshold[each.tree_.feature == 0] for each in forest.estimators_])
    grid = np.stack([np.float32(cuts), np.full(len(cuts), 0.35, np.float32)], 1)
    np.testing.assert_allclose(trees.predict(grid)[:, 0], forest.predict(grid), rtol=1e-5, atol=1e-6)


def test_rows_in_parts_are_predicted_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x, error = rows_of()
    model, _ = ErrorModel.fit(x, error, trees=10)
    expected = model.predict(x)
    monkeypatch.setattr("benchmarks.instead.trees._CELLS", 70)
    np.testing.assert_array_equal(model.predict(x), expected)
    assert model.predict(x[:0]).shape == (0, 1)


def test_the_forest_finds_where_errors_are_large() -> None:
    x, error = rows_of()
    model, columns = ErrorModel.fit(x, error)
    new = np.random.default_rng(2).normal(size=(500, 4))
    found = model.predict(new)[:, 0]
    large = new[:, 0] > 0
    assert np.median(found[large]) == pytest.approx(4, rel=0.4)
    assert np.median(found[~large]) < 1
    assert columns.shape == (400, 1)
    assert np.median(columns[x[:, 0] > 0]) > 5 * np.median(columns[x[:, 0] <= 0])


def test_columns_of_noise_are_out_of_bag() -> None:
    """In bag a tree's own rows would make the column follow the squared errors, though nothing can be predicted."""
    rng = np.random.default_rng(3)
    x, error = rng.normal(size=(500, 3)), rng.normal(size=(500, 1))
    model, columns = ErrorModel.fit(x, error)
    inside = np.corrcoef(model.predict(x)[:, 0], error[:, 0] ** 2)[0, 1]
    outside = np.corrcoef(columns[:, 0], error[:, 0] ** 2)[0, 1]
    assert inside > 0.5
    assert abs(outside) < 4 / np.sqrt(500)


def test_the_unit_of_the_errors_is_kept_for_each_output() -> None:
    x, error = rows_of()
    both = np.concatenate([error, 1e4 * error], 1)
    model, columns = ErrorModel.fit(x, both, trees=20)
    np.testing.assert_allclose(columns[:, 1], 1e8 * columns[:, 0], rtol=1e-5)
    np.testing.assert_allclose(model.predict(x)[:, 1], 1e8 * model.predict(x)[:, 0], rtol=1e-5)


def test_of_many_rows_a_tree_sees_some(monkeypatch: pytest.MonkeyPatch) -> None:
    x, error = rows_of(500)
    monkeypatch.setattr(error_model, "_TREE_ROWS", 100)
    model, columns = ErrorModel.fit(x, error, trees=20)
    assert len(model.trees.roots) == 20
    assert len(model.trees.feature) <= 20 * (2 * 100 // 5)
    assert np.median(columns[x[:, 0] > 0]) > 3 * np.median(columns[x[:, 0] <= 0])


def test_rows_that_count_nothing_change_nothing() -> None:
    x, error = rows_of(300)
    weights = np.r_[np.ones(200), np.zeros(100)]
    wrong = error.copy()
    wrong[200:] *= 100
    one, other = (ErrorModel.fit(x, e, weights, trees=20)[0].predict(x) for e in (error, wrong))
    np.testing.assert_allclose(one, other)


def test_the_state_holds_arrays_and_comes_back() -> None:
    x, error = rows_of()
    model, _ = ErrorModel.fit(x, error, trees=15)
    lists = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in model.state().items()}
    np.testing.assert_array_equal(ErrorModel.from_state(lists).predict(x), model.predict(x))


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("child", 0, 10**6),
        ("child", 1, -1),
        ("feature", 0, 99),
        ("roots", 0, 10**6),
        ("depth", None, -1),
    ],
)
def test_trees_that_point_nowhere_are_refused(name: str, place: object, value: int) -> None:
    x, error = rows_of()
    state = ErrorModel.fit(x, error, trees=5)[0].state()
    if place is None:
        state[name] = value
    else:
        state[name] = state[name].copy()
        state[name][place] = value
    with pytest.raises(DataError, match="expected trees whose nodes and inputs exist"):
        ErrorModel.from_state(state)


def test_few_rows_and_other_inputs_are_refused() -> None:
    x, error = rows_of()
    with pytest.raises(DataError, match="expected at least 60 rows for an error model; found 59"):
        ErrorModel.fit(x[:59], error[:59])
    with pytest.raises(DataError, match=r"expected rows of 4 inputs; found shape \(400, 3\)"):
        ErrorModel.fit(x, error, trees=5)[0].predict(x[:, :3])


def test_inputs_are_joined_with_logarithms() -> None:
    found = error_inputs(np.ones((2, 3)), np.zeros((2, 2)), np.array([[1.0], [np.e]]), np.zeros((2, 1)))
    assert found.shape == (2, 7)
    np.testing.assert_allclose(found[:, 5], [0, 1])
    assert np.isfinite(np.float32(error_inputs(np.full((1, 1), 1e300), np.zeros((1, 1)), np.zeros((1, 1))))).all()


def test_components_are_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(4)
    features = rng.normal(size=(80, 50)) @ rng.normal(size=(50, 50)) + 3
    found = Components.fit(features, 5).of(features)
    expected = PCA(5, svd_solver="full").fit_transform(features)
    np.testing.assert_allclose(np.abs(found), np.abs(expected), rtol=1e-8, atol=1e-8)
    assert Components.fit(features[:, :3]).of(features[:, :3]).shape == (80, 3)

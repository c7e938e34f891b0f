"""Weights of rows: a row of weight w counts as w rows, in fits and in scores."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import latedrop
from latedrop import metrics
from latedrop.calibration.cross_validation import CrossValidation, effective_rows, standard_error
from latedrop.calibration.fitted_terms import Block, fit_terms
from latedrop.calibration.scale import fit_floor, optimal_scale, relaxed_scale, tradeoff
from latedrop.errors import ArgumentError, DataError
from networks import mlp
from rounding import assert_same_doubles

METHODS: list[dict[str, Any]] = [
    {},
    {"method": latedrop.FirstOrder(floor=True)},
    {"method": latedrop.Propagation(rates=[0.1, 0.3], floor=True)},
    {"method": latedrop.Sampling(rates=[0.1, 0.3], draws=10)},
]
SCORES = ("nll", "crps", "rmse", "mae", "ideal_nll", "coverage", "interval_width")


def network(outputs: int = 1) -> nn.Module:
    return mlp(3, 8, 8, outputs).double()


def rows(outputs: int = 1, count: int = 50) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets with errors that grow with the first input, and whole numbers as weights."""
    dice = torch.Generator().manual_seed(1)
    x = torch.randn(count, 3, generator=dice, dtype=torch.float64)
    noise = torch.randn(count, outputs, generator=dice, dtype=torch.float64)
    y = network(outputs)(x).detach() + (0.1 + 0.2 * x[:, :1].abs()) * noise
    return x, y, torch.randint(0, 4, (count,), generator=dice)


def repeated(values: Tensor, weights: Tensor) -> Tensor:
    return values.repeat_interleave(weights, 0)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 1000), outputs=st.integers(1, 3), per_output=st.booleans())
def test_scores_count_a_row_as_often_as_its_weight(seed: int, outputs: int, per_output: bool) -> None:
    dice = torch.Generator().manual_seed(seed)
    mean, target = torch.randn(2, 20, outputs, generator=dice)
    variance, weights = torch.rand(20, outputs, generator=dice) + 0.1, torch.randint(0, 4, (20,), generator=dice)
    weights[0] = 1
    again = [repeated(part, weights) for part in (mean, variance, target)]
    for name in SCORES:
        score = getattr(metrics, name)(mean, variance, target, per_output=per_output, weights=weights)
        assert_same_doubles(score, getattr(metrics, name)(*again, per_output=per_output))
    for name in ("calibration_curve", "miscalibration_area"):
        score = getattr(metrics, name)(mean, variance, target, per_output=per_output, weights=0.1 * weights)
        assert_same_doubles(score, getattr(metrics, name)(*again, per_output=per_output))


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 1000), per_output=st.booleans())
def test_scales_count_a_row_as_often_as_its_weight(seed: int, per_output: bool) -> None:
    dice = torch.Generator().manual_seed(seed)
    mean, target = torch.randn(2, 30, 2, generator=dice, dtype=torch.float64)
    variance = torch.rand(30, 2, generator=dice, dtype=torch.float64) + 0.1
    weights = torch.randint(1, 4, (30,), generator=dice)
    whole, again = (mean, variance, target), [repeated(part, weights) for part in (mean, variance, target)]
    options: dict[str, Any] = {"per_output": per_output}
    for fit in (optimal_scale, relaxed_scale, fit_floor):
        # Two searches, which end near the same place.
        torch.testing.assert_close(
            fit(*whole, **options, weights=weights.double()), fit(*again, **options), rtol=1e-3, atol=1e-6
        )
    ends = [(torch.full((1,), float(s)), torch.zeros(1)) for s in (1, 2)]
    assert [step.nll for step in tradeoff(*whole, *ends, weights=weights.double())] == pytest.approx(
        [step.nll for step in tradeoff(*again, *ends)]
    )


def test_fits_count_a_row_as_often_as_its_weight() -> None:
    columns = torch.rand(2000, 1, 2, dtype=torch.float64)
    error = torch.randn(2000, 1, dtype=torch.float64) * (0.2 + columns.sum(-1)).sqrt()
    weights = torch.randint(1, 4, (2000,))
    normal = weights.double() / weights.double().mean()
    blocks = [Block([0], 0.2), Block([1], 0.2)]
    same: Any = {"worth": 2000.0, "sizes": columns.mean(0)}
    found_terms = fit_terms(error, columns, blocks, weights=normal, **same)
    again_terms = fit_terms(repeated(error, weights), repeated(columns, weights), blocks, **same)
    assert_same_doubles(found_terms.constants, again_terms.constants)
    torch.testing.assert_close(found_terms.variance(columns), again_terms.variance(columns), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("options", METHODS, ids=lambda o: f"{o.get('method', 'terms')}")
@pytest.mark.parametrize("outputs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_equal_weights_change_nothing_and_others_do(options: dict[str, Any], outputs: int) -> None:
    model, (x, y, weights) = network(outputs), rows(outputs)
    plain = latedrop.calibrate(model, (x, y), progress=False, **options)
    equal = latedrop.calibrate(model, (x, y), row_weights=torch.full((50,), 7.0), progress=False, **options)
    assert torch.equal(equal.predict(x).std, plain.predict(x).std)
    assert equal.calibration.verdict == plain.calibration.verdict
    other = latedrop.calibrate(model, (x, y), row_weights=weights.tolist(), progress=False, **options)
    assert not torch.allclose(other.predict(x).std, plain.predict(x).std, rtol=1e-3)
    by_batch = [(x[:20], y[:20]), (x[20:], y[20:])]
    again = latedrop.calibrate(model, by_batch, row_weights=weights.numpy(), progress=False, **options)
    assert_same_doubles(again.predict(x).std, other.predict(x).std)


def test_standard_errors() -> None:
    values, weights = torch.randn(2, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = weights.exp()
    assert standard_error(values, CrossValidation(weights=torch.ones(400))) == pytest.approx(standard_error(values))
    assert standard_error(values, CrossValidation(weights=weights)) == pytest.approx(
        effective_rows(weights, 400) ** -0.5, rel=0.15
    )
    assert effective_rows(None, 7) == effective_rows(torch.full((7,), 2.0), 7) == 7


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.ones(49), "expected one weight for each of the 50 rows"),
        (-torch.ones(50), "expected weights that are finite"),
        (torch.zeros(50), "expected weights that are finite"),
        (torch.full((50,), torch.nan), "expected weights that are finite"),
    ],
    ids=["count", "negative", "zero", "nan"],
)
def test_wrong_weights(weights: Tensor, message: str) -> None:
    x, y, _ = rows()
    with pytest.raises(DataError, match=message):
        latedrop.calibrate(network(), (x, y), row_weights=weights, progress=False)


def test_isotonic_intervals_take_no_weights() -> None:
    x, y, weights = rows()
    with pytest.raises(ArgumentError, match="expected other intervals than 'isotonic' with row_weights="):
        latedrop.calibrate(network(), (x, y), row_weights=weights, intervals="isotonic", progress=False)


@pytest.mark.parametrize("name", ["target", "row_weights"])
def test_classes_have_no_transform_and_no_weights(name: str) -> None:
    x, _, weights = rows(3)
    options: dict[str, Any] = {name: {"target": latedrop.Log(), "row_weights": weights.numpy()}[name]}
    with pytest.raises(ArgumentError, match=f"expected options that classes have; found {name}"):
        latedrop.calibrate(network(3), (x, weights), task="classification", progress=False, **options)


@pytest.mark.filterwarnings("ignore:only 3 validation rows")
@pytest.mark.parametrize("options", [{}, {"method": latedrop.Terms(folds="blocks")}, {"method": "linear"}])
def test_few_rows_that_count(options: dict[str, Any]) -> None:
    x, y, _ = rows()
    weights = torch.zeros(50)
    weights[[7, 8, 9]] = 1.0
    uq = latedrop.calibrate(network(), (x, y), row_weights=weights, progress=False, **options)
    assert bool(uq.predict(x).variance.isfinite().all())
    assert np.isfinite(uq.calibration.verdict.gain_error)
    weights[[7, 8]] = 0.0
    with pytest.raises(DataError, match="at least 2 validation rows"):
        latedrop.calibrate(network(), (x, y), row_weights=weights, progress=False, **options)


@pytest.mark.parametrize("options", METHODS, ids=lambda o: f"{o.get('method', 'terms')}")
def test_rows_of_weight_0_are_as_if_they_were_not_there(options: dict[str, Any]) -> None:
    (x, y, _), weights = rows(count=90), torch.ones(90)
    weights[::4] = 0.0
    weights[1::4] = 2.0
    counted = weights > 0
    by_batch = [(x[:4], y[:4]), (x[4:5], y[4:5]), (x[5:], y[5:])]  # one of which has no row that counts
    uq = latedrop.calibrate(network(), by_batch, row_weights=weights, progress=False, **options)
    data = x[counted], y[counted]
    expected = latedrop.calibrate(network(), data, row_weights=weights[counted], progress=False, **options)
    assert uq.calibration.rows == int(counted.sum())
    assert_same_doubles(uq.predict(x).std, expected.predict(x).std)

"""Mean, variance and tail from validation rows: noise that varies, shift, few rows, the record."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.instead.mask_gradients import Leverage
from benchmarks.instead.variance_model import VarianceModel
from latedrop.errors import DataError
from rounding import assert_same_doubles

UNITS, FEATURES = 6, 4


def rows_of(count: int, seed: int = 0, *, outputs: int = 1, shift: float = 0.0) -> dict[str, Tensor]:
    """Rows whose noise is 0.2 where the first input is below 0 and 1 above; `shift` moves the mask gradients.

    Where it is below 0 it moves the features instead.
    """
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 3))
    mean = np.repeat(x[:, 1:2], outputs, 1)
    noise = rng.normal(size=(count, outputs)) * np.where(x[:, :1] > 0, 1, 0.2)
    phi = 0.1 * rng.normal(size=(count, outputs, UNITS)) + max(shift, 0)
    features = 0.1 * rng.normal(size=(count, FEATURES)) + min(shift, 0)
    parts = {"x": x, "mean": mean, "phi": phi, "features": features, "target": mean + noise}
    return {name: torch.from_numpy(part) for name, part in parts.items()}


def metrics_of(rows: dict[str, Tensor]) -> dict[str, Leverage]:
    return {"metric": Leverage.fit([rows["phi"]]), "feature_metric": Leverage.fit([rows["features"][:, None]])}


def fitted(rows: dict[str, Tensor], *, reference: bool = True, corrected: bool = False) -> VarianceModel:
    metrics = metrics_of(rows_of(500, 9, outputs=rows["mean"].shape[1]) if reference else rows)
    return VarianceModel.fit(**rows, **metrics, reference=reference, corrected=corrected)[0]


def predicted(model: VarianceModel, rows: dict[str, Tensor]):  # type: ignore[no-untyped-def]
    return model.predict(rows["x"], rows["mean"], rows["phi"], rows["features"])


@pytest.mark.parametrize("reference", [True, False])
def test_noise_that_varies_is_found(reference: bool) -> None:
    model = fitted(rows_of(500), reference=reference)
    new = rows_of(2000, 1)
    found = predicted(model, new)
    width = found.variance.sqrt() * math.sqrt(model.tail.variance)
    large = new["x"][:, 0] > 0
    assert float(width[large].median()) == pytest.approx(1, rel=0.25)
    assert float(width[~large].median()) < 0.4
    half = model.tail.interval(0.9) * found.variance.sqrt()
    inside = ((new["target"] - found.mean).abs() <= half).double()
    for side in (large, ~large):
        assert float(inside[side].mean()) == pytest.approx(0.9, abs=0.08)


def test_the_trees_are_not_shown_their_own_errors() -> None:
    """What is said of validation rows holds for new rows: the mean likelihoods agree up to their standard errors."""
    rows = rows_of(500)
    metrics = metrics_of(rows_of(500, 9))
    model, crossed = VarianceModel.fit(**rows, **metrics, reference=True)
    new = rows_of(4000, 2)
    found = predicted(model, new)
    claimed = model.tail.nll(crossed.error, crossed.variance)
    true = model.tail.nll(new["target"] - found.mean, found.variance)
    error = math.sqrt(float(claimed.var()) / 500 + float(true.var()) / 4000)
    assert abs(float(claimed.mean() - true.mean())) < 3 * error


@pytest.mark.parametrize("moved", ["mask gradients", "features"])
def test_strange_rows_are_new_and_wide(moved: str) -> None:
    model = fitted(rows_of(300))
    usual, strange = (
        predicted(model, rows_of(200, 3, shift=shift)) for shift in (0.0, -1.0 if moved == "features" else 1.0)
    )
    assert float((usual.novelty > 1).double().mean()) < 0.2  # a twentieth for each kind of leverage, give or take
    assert bool((strange.novelty > 5).all())
    assert bool((strange.variance > 2 * usual.variance.median()).all())
    bound = model.guard.spreads + (strange.mean - model.guard.centres).square()
    assert bool((strange.variance <= 1.5 * bound).all())


def test_few_rows_have_the_typical_shape_without_a_forest() -> None:
    model = fitted(rows_of(20))
    assert model.forest is None
    assert model.tail.nu == 20
    shares = torch.cat([model.shape.floors[:, None], model.shape.coefficients * _sizes(model)], 1)[0]
    torch.testing.assert_close(shares / shares.sum(), torch.tensor([0.5, 0.2, 0.2, 0.1]).double(), rtol=0.3, atol=0)


def _sizes(model: VarianceModel) -> Tensor:
    samples = model.metric.sample.mean(0), model.feature_metric.sample.mean(0)
    return torch.stack([*samples, model.metric.dropout], 1)


def test_a_bias_is_corrected_where_it_is_asked_for() -> None:
    rows, new = rows_of(400), rows_of(1000, 4)
    for part in (rows, new):
        part["target"] = part["target"] + 2 * (part["x"][:, 2:] > 0)
    plain, corrected = fitted(rows), fitted(rows, corrected=True)
    errors = [(new["target"] - predicted(model, new).mean).square().mean() for model in (plain, corrected)]
    assert float(errors[1]) < 0.5 * float(errors[0])
    assert corrected.correction is not None
    assert float(corrected.correction.gain[0]) == pytest.approx(1 - float(errors[1] / errors[0]), abs=0.15)
    widths = [predicted(model, new).variance.median() for model in (plain, corrected)]
    assert float(widths[1]) < float(widths[0])


def test_outputs_in_other_units_have_the_same_answer() -> None:
    rows = rows_of(300, outputs=2)
    unit = torch.tensor([1.0, 1000.0]).double()
    scaled = {**rows, "mean": rows["mean"] * unit, "target": rows["target"] * unit, "phi": rows["phi"] * unit[:, None]}
    models = [VarianceModel.fit(**part, **metrics_of(part), reference=False)[0] for part in (rows, scaled)]
    one, other = (predicted(model, part) for model, part in zip(models, (rows, scaled), strict=True))
    # Trees split where numbers round, so that a few rows change sides.
    torch.testing.assert_close(other.variance, one.variance * unit.square(), rtol=0.05, atol=0)
    assert_same_doubles(other.novelty, one.novelty)


@pytest.mark.parametrize("count", [12, 200])
def test_the_state_comes_back(count: int) -> None:
    rows = rows_of(count, outputs=2)
    model = fitted(rows, corrected=count >= 60)
    again = VarianceModel.from_state(model.state())
    new = rows_of(50, 5, outputs=2)
    for one, other in zip(predicted(model, new), predicted(again, new), strict=True):
        assert_same_doubles(one, other)
    assert again.tail == model.tail


def test_rows_that_count_nothing_change_nothing() -> None:
    rows = rows_of(150)
    wrong = {**rows, "target": rows["target"].clone()}
    wrong["target"][100:] += 50
    weights = torch.cat([torch.ones(100), torch.zeros(50)])
    metrics = metrics_of(rows_of(500, 9))
    one, other = (VarianceModel.fit(**r, **metrics, weights=weights, reference=True)[0] for r in (rows, wrong))
    new = rows_of(50, 6)
    torch.testing.assert_close(predicted(one, new).variance, predicted(other, new).variance, rtol=1e-6, atol=0)


def test_of_very_many_rows_a_sample_is_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.instead.variance_model.MOST_ROWS", 150)
    rows = rows_of(400)
    metrics = metrics_of(rows_of(500, 9))
    model, crossed = VarianceModel.fit(**rows, **metrics, reference=True)
    assert len(crossed.rows.unique()) == 150
    sample = {name: part[crossed.rows] for name, part in rows.items()}
    again, _ = VarianceModel.fit(**sample, **metrics, reference=True)
    assert_same_doubles(predicted(model, rows).variance, predicted(again, rows).variance)


def test_a_corrected_mean_is_refused_for_few_rows() -> None:
    with pytest.raises(DataError, match="expected at least 60 validation rows for a corrected mean; found 40"):
        fitted(rows_of(40), corrected=True)

"""Processing of a variance: fits on the validation rows, applied to all parts."""

import pytest
import torch

from latedrop import metrics
from studies.regression.scores import Predicted, fits, processed, rate_measures

NONE = torch.zeros(8, dtype=torch.float64)


def spread(seed: int, k: int = 8, n: int = 90) -> Predicted:
    """Errors that follow `floor + scale · variance`, with a larger floor in each row of K."""
    g = torch.Generator().manual_seed(seed)
    mean, noise = (torch.randn(k, n, generator=g, dtype=torch.float64) for _ in range(2))
    variance = torch.rand(k, n, generator=g, dtype=torch.float64).square() * 3 + 1e-3
    floor = torch.linspace(0, 4, k, dtype=torch.float64)[:, None]
    return Predicted(mean, variance, mean + noise * (variance * 2 + floor).sqrt())


def test_what_is_fitted_on_the_validation_rows_is_applied_to_all_parts() -> None:
    held_out, inside = spread(2), spread(3, n=31)
    fit = fits(held_out)["floor"]
    measures = processed({"validation": held_out, "inside": inside}, NONE)["floor"]["inside"]
    torch.testing.assert_close(measures.variance, inside.variance * fit.scale[:, None] + fit.floor[:, None])
    lifted = processed({"validation": held_out, "inside": inside}, NONE + 50.0, ["raw"])["raw"]["inside"]
    assert bool((lifted.variance == 50).all())


def test_treatments_are_nested_on_the_rows_that_they_are_fitted_on() -> None:
    measures = rate_measures({"validation": spread(4), "test": spread(5)}, NONE)["validation"]
    assert bool((measures["nll_scaled"] <= measures["nll_unscaled"] + 1e-12).all())
    assert bool((measures["nll_floor"] <= measures["nll_scaled"] + 1e-12).all())
    assert bool((measures["nll_ideal"] < measures["nll_floor"]).all())
    assert bool((measures["floor_share"] >= 0).all() and (measures["floor_share"] <= 1).all())


def test_rates_have_the_ranking_of_the_raw_variance_and_the_share_of_the_floor() -> None:
    held_out, test = spread(6), spread(7)
    measures = rate_measures({"validation": held_out, "test": test}, NONE)["test"]
    for k in range(8):
        row = test.mean[k], test.variance[k], test.target[k]
        assert float(measures["ranking"][k]) == pytest.approx(float(metrics.rank_correlation(*row)))
        mean = measures["floor_scale"][k] * test.variance[k].mean() + measures["floor"][k]
        assert float(measures["floor_share"][k]) == pytest.approx(float(measures["floor"][k] / mean))


def test_ideal_nll_and_rows_without_variance() -> None:
    data = spread(9, k=3)
    data.variance[0, 5] = 0
    data.variance[2] = 0
    measures = rate_measures({"validation": data}, NONE[:3])["validation"]
    assert all(bool(torch.isfinite(value).all()) for value in measures.values())
    expected = metrics.ideal_nll(data.mean[1], None, data.target[1], constant=False)
    assert float(measures["nll_ideal"][1]) == pytest.approx(float(expected))
    assert bool((measures["nll_ideal"] < measures["nll_scaled"]).all())

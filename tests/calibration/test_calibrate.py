"""The search over rates: what the record says is what sampling and the metrics give, and the model stays as it was."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import networks
from latedrop import Batches, Calibration, Sampling, calibrate, find_sites, metrics, sample
from latedrop.calibration.methods import PAPER_RATES
from latedrop.calibration.scale import apply_scale, fit_floor, optimal_scale, relaxed_scale
from quick import quick
from rounding import assert_same_up_to_rounding, rounding

RATES = (0.05, 0.3)
DRAWS = 20
quietly = quick(RATES, DRAWS)


def deep(outputs: int = 1) -> nn.Module:
    """Two sites, named 2 and 4."""
    return networks.mlp(3, 30, 30, outputs, act=nn.ReLU)


data_for = partial(networks.noisy, count=120, seed=1)


def test_the_record_says_what_was_asked_and_found() -> None:
    model = deep()
    x, y = data_for(model)
    method = Sampling(seed=5, criterion="unscaled", scale="relaxed")
    calibration = quietly(model, (x, y), method=method, per_output=False).calibration
    assert isinstance(calibration, Calibration)
    assert [row.rate for row in calibration.table] == list(RATES)
    options = calibration.criterion, calibration.method, calibration.mean, calibration.choice
    assert options == ("unscaled", "sample", "draws", "relaxed")
    assert (calibration.draws, calibration.seed, calibration.shared, calibration.per_output) == (DRAWS, 5, True, False)
    assert (calibration.rows, calibration.output_shape) == (120, (1,))
    assert calibration.sites == find_sites(model, x)
    assert (calibration.readout, calibration.custom_readout, calibration.intervals) == (None, None, None)
    assert calibration.versions["torch"] == torch.__version__
    chosen = next(row for row in calibration.table if row.rate == calibration.rate)
    assert (calibration.scales, calibration.floors) == (chosen.scale, chosen.floor)
    assert calibration.floor == 0
    assert calibration.path == calibration.tradeoff()
    assert calibration.path[0].scale == pytest.approx(calibration.scales)
    assert calibration.path[-1].scale == pytest.approx(calibration.row.relaxed_scale)
    assert calibration.path[0].nll == pytest.approx(chosen.nll_scaled, abs=rounding())
    assert calibration.path[-1].ma == pytest.approx(chosen.ma_relaxed, abs=rounding())
    assert set(calibration.curves) == {"levels", "unscaled", "scaled", "relaxed", "constant"}
    assert all(len(curve) == 99 for curve in calibration.curves.values())


@pytest.mark.parametrize("floor", [False, True], ids=["scale", "floor"])
@pytest.mark.parametrize("mean", ["draws", "model"])
@pytest.mark.parametrize(("outputs", "per_output"), [(1, True), (2, True), (2, False)])
def test_the_table_is_what_sampling_and_metrics_give(outputs: int, per_output: bool, mean: str, floor: bool) -> None:
    model = deep(outputs)
    x, y = data_for(model)
    calibration = quietly(
        model, (x, y), method=Sampling(floor=floor, mean=mean, seed=3), per_output=per_output, batches=Batches(50)
    ).calibration
    own = per_output and outputs > 1
    for row in calibration.table:
        moments = sample(model, x, row.rate, DRAWS, 3)
        center = moments.mean if mean == "draws" else model(x).detach()
        raw = moments.variance
        if floor:
            optimal = fit_floor(center, raw, y, per_output=own)
        else:
            scale = optimal_scale(center, raw, y, per_output=own)
            optimal = (scale, torch.zeros_like(scale))
        # Batches change the last bits of the moments, which the steps of the relaxed scale and the flat floor enlarge.
        close = partial(pytest.approx, rel=1e-3, abs=1e-4)
        rmse = metrics.rmse(center, None, y, per_output=own)
        assert row.rmses == close(tuple(rmse.tolist()) if own else (float(rmse),))
        assert row.nll_unscaled == close(float(metrics.nll(center, raw, y)))
        assert row.nll_scaled == close(float(metrics.nll(center, apply_scale(raw, *optimal), y)))
        assert row.nll_ideal == close(float(metrics.ideal_nll(center, None, y)))
        assert row.ma_unscaled == pytest.approx(float(metrics.miscalibration_area(center, raw, y)), abs=2e-3)
        assert row.ma_scaled == pytest.approx(
            float(metrics.miscalibration_area(center, apply_scale(raw, *optimal), y)), abs=2e-3
        )
        if not floor:
            relaxed = relaxed_scale(center, raw, y, per_output=own)
            assert row.scale == close(tuple(optimal[0].tolist()))
            assert row.relaxed_scale == pytest.approx(tuple(relaxed.tolist()), rel=0.02)
            assert row.floor == row.relaxed_floor == (0,) * len(row.scale)
        relaxed = (torch.tensor(row.relaxed_scale), torch.tensor(row.relaxed_floor))
        fitted = apply_scale(raw, *relaxed)
        assert row.nll_relaxed == close(float(metrics.nll(center, fitted, y)))
        assert row.ma_relaxed == pytest.approx(float(metrics.miscalibration_area(center, fitted, y)), abs=2e-3)
        levels, observed = metrics.calibration_curve(center, fitted, y, per_output=own)
        balance = (observed - levels).mean(-1)
        assert float(balance.abs().max()) < 1e-4 + 1 / 120 / 2  # the tolerance, and half of one row's step
        assert row.nll_ideal <= row.nll_scaled <= min(row.nll_relaxed, row.nll_unscaled) + 1e-6
        assert row.zero_variances == 0
        assert len(row.scale) == (outputs if own else 1)


@pytest.mark.filterwarnings("ignore:the best rate, 0.5, is the largest")
@pytest.mark.parametrize("criterion", ["scaled", "unscaled"])
def test_the_criterion_picks_its_smallest_nll(criterion: str) -> None:
    model = deep()
    calibration = quietly(model, data_for(model), method=Sampling(PAPER_RATES[4::2], criterion=criterion)).calibration
    scores = {row.rate: getattr(row, f"nll_{criterion}") for row in calibration.table}
    assert calibration.rate == min(scores, key=scores.get)
    assert len(scores) == len(PAPER_RATES[4::2])


def test_the_same_seed_gives_the_same_record() -> None:
    model = deep()
    x, y = data_for(model)
    first = quietly(model, (x, y)).calibration
    torch.manual_seed(99)
    torch.rand(3)
    second = quietly(model, (x, y)).calibration
    assert first == second
    assert quietly(model, (x, y), method=Sampling(seed=1)).calibration.scales != first.scales


class Counted(Dataset):
    """Counts how often each row is read."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.reads = x, y, [0] * len(x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        self.reads[i] += 1
        return self.x[i], self.y[i]

    def __len__(self) -> int:
        return len(self.x)


@pytest.mark.parametrize("method", ["sample", "linear"])
def test_the_data_are_read_once(method: str) -> None:
    model = deep()
    data = Counted(*data_for(model, count=40))
    quietly(model, DataLoader(data, batch_size=16), method=method)
    assert data.reads == [1] * 40
    parts = iter([(data.x[:20], data.y[:20]), (data.x[20:], data.y[20:])])
    assert quietly(model, parts, method=method).calibration.rows == 40
    assert next(parts, None) is None


def test_rates_may_differ_by_site() -> None:
    model = deep()
    x, y = data_for(model)
    choices = [{"2": 0.2, "4": 0.1}, {"*": 0.1}, {"4": 0.3}, 0.1]
    uq = quietly(model, (x, y), method=Sampling(rates=choices), batches=Batches(1000))
    table = uq.calibration.table
    assert [row.rate for row in table] == choices
    assert replace(table[1], rate=0.1) == table[3]
    scores = [row.nll_scaled for row in table]
    assert uq.calibration.rate == choices[scores.index(min(scores))]
    raw = sample(model, x, {"4": 0.3}, DRAWS)
    assert table[2].nll_unscaled == pytest.approx(float(metrics.nll(raw.mean, raw.variance, y)), rel=rounding())
    one, several = (quietly(model, (x, y), method=Sampling(rates)).calibration for rates in (0.1, np.array([0.1])))
    assert one == several  # one rate needs no list


@pytest.mark.parametrize(
    ("form", "readout"),
    [
        (lambda out: {"aux": out * 2, "y": out}, "y"),
        (lambda out: (out * 2, out), lambda parts: parts[1]),
        (lambda out: {"y": out, "tokens": out.argmax(1)}, None),
    ],
    ids=["name", "function", "only one floating"],
)
def test_a_readout_takes_its_part(form: Callable[[Tensor], Any], readout: Any) -> None:
    whole, model = deep(), networks.Net(lambda net, x: form(net.inner(x)), inner=deep())
    x, y = data_for(whole)
    uq, expected = quietly(model, (x, y), readout=readout), quietly(whole, (x, y))
    # The sites have other names and so other masks, which hardly move the error at a small rate.
    assert uq.calibration.output_shape == (1,)
    assert uq.calibration.table[0].rmse == pytest.approx(expected.calibration.table[0].rmse, rel=0.05)
    remaining = readout if not callable(readout) else None
    assert uq.calibration.readout == remaining
    assert (uq.calibration.custom_readout is not None) == callable(readout)
    direct = sample(model, x, uq.calibration.rate, DRAWS, readout=readout)
    assert_same_up_to_rounding(uq.predict(x).raw_variance, direct.variance)


@pytest.mark.parametrize("options", [{}, {"method": Sampling(RATES, DRAWS)}], ids=["terms", "sample"])
def test_few_rows_are_warned_of(options: dict[str, Any]) -> None:
    from latedrop import LatedropWarning

    model = deep()
    with pytest.warns(LatedropWarning, match="only 9 validation rows") as seen:
        calibrate(model, data_for(model, count=9), **options)
    assert [one.filename for one in seen] == [__file__] * len(seen)
    quietly(model, data_for(model, count=10))

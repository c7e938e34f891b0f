"""Predictions, their intervals, and the way through a file."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import latedrop
import networks
from latedrop import Prediction, Predictor, Sampling, calibrate, find_sites, load, metrics, sample
from latedrop.calibration.methods import checked_method
from latedrop.errors import DataError, LatedropWarning
from networks import mlp
from quick import quick
from rounding import assert_same_up_to_rounding

DRAWS = 20
quietly = quick((0.1, 0.2), DRAWS)


data_for = partial(networks.noisy, count=100, seed=1)


@pytest.fixture
def fitted() -> tuple[Predictor, Tensor, Tensor]:
    """A calibrated network of two outputs, inputs and targets."""
    model = mlp(3, 40, 2)
    x, y = data_for(model)
    return quietly(model, (x, y), method=Sampling(floor=True)), x, y


def noisy(model: nn.Module, rows: int, seed: int, noise: Callable[..., np.ndarray]) -> tuple[Tensor, Tensor]:
    """Targets whose noise has the standard deviation that dropout has at rate 0.2, times `noise`, of unit variance."""
    rng = np.random.default_rng(seed)
    x = torch.tensor(rng.normal(size=(rows, 3)), dtype=torch.float32)
    with torch.no_grad():
        hidden = model[:-1](x)
        std = (0.25 * hidden.square() @ model[-1].weight.square().T).sqrt()
        return x, model(x) + std * torch.tensor(noise(rng, size=(rows, 1)), dtype=torch.float32)


def coverage(prediction: Prediction, y: Tensor, level: float) -> float:
    low, high = prediction.interval(level)
    return float(((low <= y) & (y <= high)).double().mean())


@pytest.fixture(scope="module")
def plain() -> tuple[Predictor, list[tuple[Tensor, Tensor]]]:
    """A calibrated network, and its rows in three batches."""
    model = mlp(3, 40, 1)
    x, y = data_for(model, count=60)
    pairs = list(zip(x.split(20), y.split(20), strict=True))
    return calibrate(model, pairs, task="regression", method="linear", progress=False), pairs


def test_batches_that_are_refused_say_where_they_go(plain: tuple[Predictor, list[tuple[Tensor, Tensor]]]) -> None:
    uq, pairs = plain
    with pytest.raises(DataError, match=r"go to predict_batches\(batches, unpack\)"):
        uq.predict(pairs)
    assert len(list(uq.predict_batches(pairs))) == 3
    with pytest.raises(DataError, match=r"read more than once; found a generator\. Pass a DataLoader"):
        find_sites(uq.model, (pair[0] for pair in pairs))
    with pytest.raises(DataError, match=r"found a dict\. Pass one batch as a list of one"):
        uq.predict_labelled({"input": pairs[0][0], "y": pairs[0][1]})


def test_a_prediction_is_the_moments_with_the_scale_applied(fitted: tuple[Predictor, Tensor, Tensor]) -> None:
    predictor, x, _ = fitted
    record = predictor.calibration
    moments = sample(predictor.model, x, record.rate, DRAWS)
    predicted = predictor.predict(x)
    assert_same_up_to_rounding(predicted.mean, moments.mean)
    assert_same_up_to_rounding(predicted.raw_variance, moments.variance)
    expected = moments.variance * torch.tensor(record.scales) + torch.tensor(record.floors)
    assert_same_up_to_rounding(predicted.variance, expected)
    assert_same_up_to_rounding(predicted.std, expected.sqrt())
    assert len(predicted) == 100
    assert predicted.mean.shape == predicted.std.shape == (100, 2)
    assert torch.equal(predictor(x).mean, predicted.mean)  # the same call on the same batch
    assert "Sequential" in repr(predictor)


@pytest.mark.parametrize("choice", ["optimal", "relaxed", 3])
def test_the_choice_of_scale_can_be_made_at_any_stage(choice: Any) -> None:
    model = mlp(3, 40, 2)
    x, y = data_for(model)
    first = quietly(model, (x, y), method=Sampling(scale=choice, floor=True))
    later = quietly(model, (x, y), method=Sampling(floor=True))
    record = first.calibration
    scale, floor = {
        "optimal": (record.scales, record.floors),
        "relaxed": (record.row.relaxed_scale, record.row.relaxed_floor),
    }.get(choice, ((float(choice),) * 2 if not isinstance(choice, str) else (), record.floors))
    expected = first.predict(x).raw_variance * torch.tensor(scale) + torch.tensor(floor)
    assert_same_up_to_rounding(first.predict(x).variance, expected)
    assert_same_up_to_rounding(later.scaled(choice).predict(x).variance, first.predict(x).variance)
    assert_same_up_to_rounding(later.predict(x).scaled(choice).variance, first.predict(x).variance)
    assert_same_up_to_rounding(record.variance(later.predict(x).raw_variance, choice), first.predict(x).variance)
    assert later.calibration.choice == "optimal"
    assert_same_up_to_rounding(first.scaled("optimal").predict(x).variance, later.predict(x).variance)


def test_intervals_and_quantiles_are_gaussian(fitted: tuple[Predictor, Tensor, Tensor]) -> None:
    predictor, x, _ = fitted
    predicted = predictor.predict(x)
    low, high = predicted.interval()
    reference = stats.norm(predicted.mean.double(), predicted.std.double())
    assert_same_up_to_rounding(low, reference.ppf(0.05))
    assert_same_up_to_rounding(high, reference.ppf(0.95))
    assert_same_up_to_rounding(predicted.quantile(0.3), reference.ppf(0.3))
    assert_same_up_to_rounding(predicted.quantile(0.5), predicted.mean)
    several = predicted.quantile([0.05, 0.5, 0.95])
    assert several.shape == (3, 100, 2)
    assert_same_up_to_rounding(several[0], low)
    assert_same_up_to_rounding(several[2], high)
    assert_same_up_to_rounding(predicted.quantile(np.array([0.1, 0.2])), predicted.quantile((0.1, 0.2)))


@pytest.mark.parametrize(
    "options",
    [
        {"method": Sampling((0.1,), scale="relaxed", draws=400)},
        {"method": Sampling((0.1,), scale="optimal", draws=400)},
        {"method": latedrop.FirstOrder(scale="relaxed")},
        {"method": latedrop.Propagation((0.1,), scale="optimal")},
    ],
    ids=["relaxed", "optimal", "linear", "propagate"],
)
def test_intervals_hold_on_new_data(options: dict[str, Any]) -> None:
    """Where the noise is Gaussian and as uneven as the dropout variance, 90 % are 90 %."""
    model, rows, fresh = mlp(3, 40, 1), 1000, 2000
    predictor = quietly(model, noisy(model, rows, 0, np.random.Generator.normal), **options)
    x, y = noisy(model, fresh, 1, np.random.Generator.normal)
    predicted = predictor.predict(x)
    for level in (0.5, 0.9):
        # The standard error has two parts: the binomial's of the fresh rows, and that of log(scale), which is at most
        # 2 pi / sqrt(12 rows) (see test_scale), times the slope z phi(z) of the coverage in it. Three of them, and
        # 0.01 for variances over 400 draws, 7 % off each.
        z = stats.norm.ppf((1 + level) / 2)
        slope = z * stats.norm.pdf(z)
        error = math.hypot(math.sqrt(level * (1 - level) / fresh), slope * 2 * math.pi / math.sqrt(12 * rows))
        assert abs(coverage(predicted, y, level) - level) < 3 * error + 0.01, level
    if predictor.calibration.method != "linear":  # which fits the rate itself
        levels, observed = metrics.calibration_curve(predicted.mean, predicted.raw_variance, y)
        assert float((observed - levels).mean()) < -0.05


def skewed(rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    return rng.exponential(size=size) - 1


@pytest.mark.parametrize("method", ["sample", "linear"])
def test_isotonic_intervals_hold_where_gaussian_ones_do_not(method: str) -> None:
    model, rows, fresh = mlp(3, 40, 1), 1000, 2000
    data = noisy(model, rows, 0, skewed)
    x, y = noisy(model, fresh, 1, skewed)
    fit = partial(quietly, model, data, method=Sampling(mean="model") if method == "sample" else method)
    kinds = {kind: fit(intervals=kind) for kind in ("isotonic", "gaussian")}
    off = {}
    for kind, predictor in kinds.items():
        below = [float((y <= predictor.predict(x).quantile(q)).double().mean()) - q for q in (0.05, 0.25, 0.5, 0.9)]
        off[kind] = max(map(abs, below))
    # A frequency among the fresh rows, of a quantile from the others: at most sqrt(1/4 (1/1000 + 1/2000)), four times.
    error = math.sqrt((1 / rows + 1 / fresh) / 4)
    assert off["isotonic"] < 4 * error
    assert off["gaussian"] > 4 * error
    predicted = kinds["isotonic"].predict(x[:5])
    with pytest.warns(LatedropWarning, match="isotonic intervals keep the scale"):
        again = predicted.scaled("relaxed")
    assert torch.equal(again.interval()[0], predicted.interval()[0])  # they keep the scale they were fitted with
    assert not torch.equal(again.std, predicted.std)


@pytest.mark.parametrize("kind", ["gaussian", "isotonic", "conformal"])
@pytest.mark.parametrize("method", ["sample", "linear", "propagate"])
def test_a_file_brings_the_same_predictions_back(tmp_path: Path, kind: str, method: str) -> None:
    model = mlp(3, 40, 2)
    x, y = data_for(model)
    named = replace(checked_method(method), floor=True, scale=1.7)
    if kind == "conformal":
        predictor = quietly(model, (x, y), method=named).conformal(data_for(model, count=30, seed=2))
    else:
        predictor = quietly(model, (x, y), intervals=kind, method=named)
    path = tmp_path / "model.latedrop.json"
    predictor.save(path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    again = load(path, mlp(3, 40, 2))
    assert again.calibration == predictor.calibration
    before, after = predictor.predict(x), again.predict(x)
    assert torch.equal(before.mean, after.mean)  # a file keeps every digit, and the batch is the same
    assert torch.equal(before.std, after.std)
    for a, b in zip(before.interval(0.9), after.interval(0.9), strict=True):
        assert torch.equal(a, b)
    again.save(str(path))  # over the old one
    assert load(str(path), model).calibration == predictor.calibration


def test_a_file_keeps_the_name_of_a_readout_and_asks_for_a_function(tmp_path: Path) -> None:
    def parts(net: networks.Net, x: Tensor) -> dict[str, Tensor]:
        return {"double": 2 * net.inner(x), "y": net.inner(x)}

    model = networks.Net(parts, inner=mlp(3, 40, 1))
    x, y = data_for(model.inner)
    path = tmp_path / "parts.json"
    predictor = quietly(model, (x, y), readout="y")
    predictor.save(path)
    # A file keeps every digit, and the batch is the same.
    assert torch.equal(load(path, model).predict(x).std, predictor.predict(x).std)

    def readout(output: dict[str, Tensor]) -> Tensor:
        return output["y"]

    predictor = quietly(model, (x, y), readout=readout)
    predictor.save(path)
    # A file keeps every digit, and the batch is the same.
    assert torch.equal(load(path, model, readout).predict(x).std, predictor.predict(x).std)


def test_a_map_without_a_channel_axis_takes_any_size() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1), nn.Flatten(1, 2))
    x = torch.randn(12, 1, 6, 7, generator=torch.Generator().manual_seed(0))
    predictor = quietly(model, (x, model(x).detach() + 0.1))
    assert len(predictor.calibration.scales) == 1
    assert predictor.predict(torch.randn(2, 1, 8, 9)).std.shape == (2, 8, 9)

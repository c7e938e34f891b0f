"""One absurd row is flagged, and changes no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import latedrop
from latedrop.calibration.guard import LARGEST
from latedrop.errors import DataError, LatedropWarning, OutputError
from networks import Net, mlp
from rounding import assert_same_up_to_rounding

DICE = torch.Generator().manual_seed(0)
X = torch.randn(160, 3, generator=DICE)
Y = X.sum(1, keepdim=True).sin() + 0.1 * torch.randn(160, 1, generator=DICE)
LABELS = (X.sum(1) > 0).long() + (X[:, 0] > 1).long()
NEW, ABSURD = X[120:140], 3
OTHERS = [i for i in range(len(NEW)) if i != ABSURD]

WAYS: list[dict[str, Any]] = [
    {},
    {"method": latedrop.Terms(["dropout"])},
    {"method": latedrop.Terms(["size"])},
    {"method": latedrop.Terms(["neighbours"])},
    {"method": latedrop.Sampling(rates=[0.1], draws=5)},
    {"method": "linear"},
    {"method": "propagate"},
]


def net(outputs: int = 1) -> nn.Module:
    return mlp(3, 20, outputs, act=nn.ReLU, seed=1)


def with_value(value: float) -> Tensor:
    x = NEW.clone()
    x[ABSURD, 1] = value
    return x


@pytest.fixture(scope="module")
def default() -> latedrop.Predictor:
    return latedrop.calibrate(net(), (X[:120], Y[:120]), task="regression", progress=False)


@pytest.mark.filterwarnings("ignore::latedrop.LatedropWarning")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: str(way.get("terms", [way.get("method", "default")])[0]))
def test_one_absurd_row_is_flagged(way: dict[str, Any]) -> None:
    uq = latedrop.calibrate(net(), (X[:120], Y[:120]), task="regression", progress=False, **way)
    usual = uq.predict(NEW)
    for value in (1e20, -3e38):
        is_flagged(uq.predict(with_value(value)), usual)


def is_flagged(actual: latedrop.Prediction, usual: latedrop.Prediction) -> None:
    low, high = actual.interval(0.9)
    assert_same_up_to_rounding(actual.mean[OTHERS], usual.mean[OTHERS])
    assert_same_up_to_rounding(actual.std[OTHERS], usual.std[OTHERS])
    assert float(actual.std[ABSURD]) > 1e5 * float(usual.std.max())
    assert float(high[ABSURD] - low[ABSURD]) > 1e5 * float(usual.std.max())
    for values in (actual.std, actual.variance, low, high):
        assert bool(values.isfinite().all())
    if actual.novelty is not None:
        assert float(actual.novelty[ABSURD]) > 1e30
        assert_same_up_to_rounding(actual.novelty[OTHERS], usual.novelty[OTHERS])


def test_it_warns_of_the_row_and_keeps_a_finite_mean(default: latedrop.Predictor) -> None:
    with pytest.warns(LatedropWarning, match="nothing is known of 1 of 20 rows") as seen:
        prediction = default.predict(with_value(1e30))
    assert seen[0].filename == __file__
    assert bool(prediction.mean.isfinite().all())
    assert float(prediction.quantile(0.5)[ABSURD]) == float(prediction.mean[ABSURD])


def test_a_number_that_does_not_fit_the_dtype_is_flagged_too(default: latedrop.Predictor) -> None:
    x = NEW.double()
    x[ABSURD] = 1e300
    with pytest.warns(LatedropWarning, match="1 of 20 rows"):
        prediction = default.predict(x.numpy())
    assert_same_up_to_rounding(prediction.std[OTHERS], default.predict(NEW).std[OTHERS])
    assert float(prediction.novelty[ABSURD]) == pytest.approx(LARGEST)
    with pytest.raises(DataError, match=r"expected inputs that fit torch\.float32"):
        default.predict(x[ABSURD : ABSURD + 1])


def test_absurd_items() -> None:
    """There are no items of zeros: where none is left, it is an error."""
    batches = latedrop.Batches(size=2, collate=torch.stack)
    uq = latedrop.calibrate(net(), (list(X[:120]), Y[:120]), batches=batches, task="regression", progress=False)
    far = [torch.full((3,), 1e30)] * 2
    with pytest.warns(LatedropWarning, match="2 of 6 rows"):
        prediction = uq.predict([*far, *NEW[:4]])
    assert_same_up_to_rounding(prediction.std[2:], uq.predict(list(NEW[:4])).std)
    assert float(prediction.std[:2].min()) > 1e5
    with pytest.raises(latedrop.LatedropError):
        uq.predict(far)


def test_a_row_without_an_output(default: latedrop.Predictor) -> None:
    """Its mean is NaN, its interval the widest; where no row has an output, that is an error."""
    overflowing = Net(lambda model, x: model.inner(x) + x[:, :1].square() - x[:, :1].square(), inner=net())
    uq = latedrop.calibrate(overflowing, (X[:120], Y[:120]), task="regression", progress=False)
    x = NEW.clone()
    x[ABSURD, 0] = 1e30
    with pytest.warns(LatedropWarning, match="1 of 20 rows"):
        prediction = uq.predict(x)
    low, high = prediction.interval(0.5)
    assert bool(prediction.mean[ABSURD].isnan())
    assert bool(prediction.mean[OTHERS].isfinite().all())
    assert float(low[ABSURD]) < -1e38
    assert float(high[ABSURD]) > 1e38
    with pytest.raises(OutputError, match="expected a finite output"):
        uq.predict(x[ABSURD : ABSURD + 1])
    with pytest.warns(LatedropWarning, match="1 of 20 rows"):
        assert bool(uq.stream().predict(x).high.isfinite().all())


@pytest.mark.filterwarnings("ignore::latedrop.LatedropWarning")
@pytest.mark.parametrize(("value", "rate"), [(1e20, None), (1e20, 0.1), (3e38, None)])
def test_one_absurd_row_of_a_classifier(value: float, rate: float | None) -> None:
    uq = latedrop.calibrate(net(3), (X[:120], LABELS[:120]), task="classification", progress=False)
    uq = uq.reject((X[140:], LABELS[140:]), risk=0.9)
    usual = uq.predict(NEW, rate=rate)
    prediction = uq.predict(with_value(value), rate=rate)
    assert_same_up_to_rounding(prediction.probabilities[OTHERS], usual.probabilities[OTHERS])
    assert torch.equal(prediction.kept()[OTHERS], usual.kept()[OTHERS])
    assert prediction.probabilities[ABSURD].tolist() == pytest.approx([1 / 3] * 3)
    assert not bool(prediction.kept()[ABSURD])
    assert float(prediction.novelty[ABSURD]) == pytest.approx(LARGEST)


def test_the_logarithm_of_a_row_beyond_numbers_has_the_largest_deviation() -> None:
    net = mlp(3, 16, 16, 1, act=nn.ReLU)
    targets = (net(X).detach() + 0.1 * Y).exp()
    uq = latedrop.calibrate(net, (X, targets), reference=X + 0.01, target=latedrop.Log(), progress=False)
    with pytest.warns(LatedropWarning, match="1 of 20 rows"):
        prediction = uq.predict(with_value(3e38))
    assert bool(prediction.std.isfinite().all())
    assert float(prediction.std[ABSURD]) == pytest.approx(LARGEST)


def test_adapted_and_joint_predictors_refuse_rows_beyond_numbers() -> None:
    net = mlp(3, 16, 16, 2, act=nn.ReLU)
    targets = net(X).detach() + 0.1 * torch.randn(len(X), 2, generator=torch.Generator().manual_seed(1))
    uq = latedrop.calibrate(net, (X[:80], targets[:80]), progress=False)
    for other in (uq.joint((X[80:], targets[80:])), uq.adapted(X[:40], (X[80:], targets[80:]))):
        with pytest.raises((DataError, OutputError), match="found 1 of 20 rows of a batch that overflow"):
            other.predict(with_value(3e38))

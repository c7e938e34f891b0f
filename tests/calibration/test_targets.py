"""Models that are no better than a constant, constant targets, and targets that overflow: said, with the output."""

import warnings

import pytest
import torch
from torch import Tensor, nn

import latedrop
from latedrop.calibration.targets import as_output
from latedrop.errors import DataError, LatedropWarning
from latedrop.evaluation.evaluation import compare, evaluate
from quick import quick


class Sum(nn.Module):
    """Nearly the sum of its inputs, in units of one's own, `outputs` times."""

    def __init__(self, outputs: int = 1, unit: float = 1.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 6), nn.Linear(6, outputs)
        self.unit = unit
        with torch.no_grad():
            self.first.weight.copy_(torch.cat([torch.eye(3), -torch.eye(3)]))
            self.first.bias.zero_()
            self.second.weight.copy_(torch.tensor([1.0, 1, 1, -1, -1, -1]).expand(outputs, 6))
            self.second.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x).relu())
        return self.unit * out


def rows(count: int = 60) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(0)
    x = torch.randn(count, 3, generator=dice)
    return x, x.sum(1, keepdim=True) + 0.1 * torch.randn(count, 1, generator=dice)


def calibrated(model: nn.Module, y: Tensor, **options: object) -> latedrop.Predictor:
    return latedrop.calibrate(
        model, (rows()[0], y), method=latedrop.Sampling(rates=[0.1], draws=10), progress=False, **options
    )  # type: ignore[arg-type]


@pytest.mark.filterwarnings("error")
def test_a_good_model_is_not_warned_of() -> None:
    x, y = rows()
    uq = calibrated(Sum(), y)
    compare(uq.predict(x + 0.1), y + 0.3)
    evaluate(uq.predict(x).mean, uq.predict(x).variance, y, label="scaled")


@pytest.mark.parametrize("options", [{}, {"method": "linear"}, {"method": "propagate"}])
def test_other_units_are_warned_of(options: dict[str, object]) -> None:
    x, y = rows()
    with pytest.warns(LatedropWarning, match=r"no better than their average does: RMSE .* against 1\.\d+"):
        uq = quick([0.1], 100)(Sum(unit=1000.0), (x, y), **options)
    with pytest.warns(LatedropWarning, match="predicts the targets of the test rows no better"):
        compare(uq.predict(x + 0.1), y + 0.3)


def test_the_output_is_named_and_only_that() -> None:
    x, y = rows()
    both = torch.cat([y, 1000 * y], 1)
    with pytest.warns(LatedropWarning, match="no better than their average") as seen:
        uq = calibrated(Sum(outputs=2), both)
    (text,) = [str(one.message) for one in seen if "no better" in str(one.message)]
    assert "output 1: RMSE" in text
    assert "output 0" not in text
    with pytest.warns(LatedropWarning, match="no better") as seen:
        compare(uq.predict(x), torch.cat([y, y + 50], 1))
    assert ["output 1: RMSE 50" in str(one.message) for one in seen] == [True]


def test_constant_targets_are_warned_of() -> None:
    x, y = rows()
    with pytest.warns(LatedropWarning, match="the targets of all 60 validation rows are the same: 3. "):
        calibrated(Sum(), torch.full_like(y, 3.0))
    with pytest.warns(LatedropWarning, match="the same: output 1: -2. Nothing"):
        uq = calibrated(Sum(outputs=2), torch.cat([y, torch.full_like(y, -2.0)], 1))
    with pytest.warns(LatedropWarning, match="the targets of all 60 test rows are the same: output 0: 1;"):
        compare(uq.predict(x), torch.ones(60, 2))


@pytest.mark.parametrize("size", [1e20, 3e37])
def test_targets_whose_squares_overflow(size: float) -> None:
    x, y = rows()
    message = r"expected targets below 1\.8e\+19, as their squares have to fit torch.float32, .*; found \d.*e\+\d\d"
    for options in ({"method": latedrop.Sampling(draws=5)}, {"method": "linear"}):
        with pytest.raises(DataError, match=message):
            quick([0.1], 5)(Sum(), (x, y * size), **options)
    with pytest.raises(DataError, match=message):
        as_output(torch.zeros(60, 1), y.double() * size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LatedropWarning)
        uq = latedrop.calibrate(Sum().double(), (x.double(), y.double() * size), method=latedrop.Sampling([0.1], 5))
    assert uq.calibration.scales[0] > 0
    prediction = calibrated(Sum(), y).predict(x)
    with pytest.raises(DataError, match=message):
        compare(prediction, y.double() * size)

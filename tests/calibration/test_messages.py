"""Messages for new users name the remedy that fits the mistake."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import latedrop
from latedrop.errors import ArgumentError, DataError, OutputError
from latedrop.terms import VarianceHead
from networks import Net
from rounding import assert_same_up_to_rounding, rounding

X = torch.randn(80, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1)


def mlp(outputs: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs))


@pytest.mark.parametrize("target", [Y, Y[:, None]], ids=["(N,)", "(N, 1)"])
@pytest.mark.parametrize("method", ["terms", "sample", "linear", "propagate"])
def test_several_outputs_and_one_target(target: Tensor, method: str) -> None:
    with pytest.raises(DataError, match=r"each of the 3 outputs of a row.*Pass readout=lambda output: output\[:, 0\]"):
        latedrop.calibrate(mlp(3), (X, target), method=method, progress=False)
    with pytest.raises(DataError, match=r"Pass readout=.*VarianceHead"):
        latedrop.calibrate(mlp(2), (X, target), method=method, progress=False)


def test_a_pair_of_mean_and_log_variance() -> None:
    def run(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
        h = net.body(x)
        return net.mean(h), net.log_variance(h)

    model = Net(run, body=mlp(8), mean=nn.Linear(8, 1), log_variance=nn.Linear(8, 1))
    with pytest.raises(OutputError, match=r"pass readout=0 and method=Terms\(\[VarianceHead\(1, 'log_variance'\)"):
        latedrop.calibrate(model, (X, Y), progress=False)
    method = latedrop.Terms([VarianceHead(1, "log_variance"), "dropout"])
    assert latedrop.calibrate(model, (X, Y), readout=0, method=method, progress=False).predict(X).std.shape == (80, 1)


def test_a_wrapper_around_a_trained_module() -> None:
    wrapper = SimpleNamespace(module_=mlp(), predict=None)  # as skorch's NeuralNet has it
    with pytest.raises(ArgumentError, match="Pass its module_, the network that the wrapper has trained"):
        latedrop.calibrate(wrapper, (X, Y))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="Pass the model itself"):
        latedrop.calibrate(3, (X, Y))  # type: ignore[arg-type]


class Moving:
    """A batch of one's own that moves itself in place."""

    def __init__(self, rows: list[Tensor]) -> None:
        self.rows = torch.stack(rows)

    def to(self, device: Any) -> None:
        self.rows = self.rows.to(device)


def test_a_batch_whose_to_returns_nothing() -> None:
    model, items = Net(lambda net, batch: net.inner(batch.rows), inner=mlp()), list(X)
    uq = latedrop.calibrate(model, (items, Y), batches=latedrop.Batches(collate=Moving), progress=False)
    torch.testing.assert_close(uq.predict(items).mean, model.inner(X).detach())


def test_validation_rows_as_they_were_left_out() -> None:
    uq = latedrop.calibrate(mlp(), (X, Y), progress=False)
    rows = uq.cross_validated
    torch.testing.assert_close(rows.mean, uq.predict(X).mean.double())
    torch.testing.assert_close(rows.errors, (Y[:, None].double() - rows.mean) / rows.variance.sqrt())
    inside = (rows.errors.abs() <= 1.6448536).double().mean()
    assert float(inside) == pytest.approx(uq.calibration.verdict.coverage)
    assert not torch.allclose(rows.variance, uq.predict(X).variance.double())


@pytest.mark.parametrize("unit", [latedrop.Log(), latedrop.Standardized(1.0, 2.0)])
def test_rows_that_were_left_out_are_in_the_unit_of_the_targets(unit: Any) -> None:
    target = Y.exp()
    uq = latedrop.calibrate(mlp(), (X, target), target=unit, progress=False)
    rows = uq.cross_validated
    assert_same_up_to_rounding(rows.target[:, 0], target.double())
    assert_same_up_to_rounding(rows.errors, (target.double()[:, None] - rows.mean) / rows.variance.sqrt())
    # Each row's variance is that of a fit to other rows, and close to that of the fit to all.
    assert 0.5 < float((rows.variance / uq.predict(X).variance).median()) < 2


def test_classes_as_they_were_left_out(tmp_path: Path) -> None:
    model, labels = mlp(3), (Y > 0).long() + (Y > 1).long()
    uq = latedrop.calibrate(model, (X, labels), progress=False)
    rows = uq.cross_validated
    assert torch.equal(rows.labels, labels)
    assert_same_up_to_rounding(rows.probabilities.sum(1), torch.ones(80, dtype=torch.float64))
    nll = -rows.probabilities[range(80), labels].log().mean()
    assert float(nll) == pytest.approx(uq.calibration.verdict.nll, rel=rounding(torch.float64))
    uq.save(tmp_path / "cal.json")
    assert latedrop.load(tmp_path / "cal.json", model).cross_validated is None


def test_every_result_is_one_line() -> None:
    numbers = latedrop.calibrate(mlp(), (X, Y), reference=X + 0.1, progress=False)
    classes = latedrop.calibrate(mlp(3), (X, (Y > 0).long() + (Y > 1).long()), progress=False)
    images, pixels = torch.randn(4, 1, 8, 8), torch.randint(0, 3, (4, 8, 8))
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1))
    maps = latedrop.calibrate(net, (images, pixels), progress=False)
    for result in (
        numbers,
        numbers.calibration,
        numbers.cross_validated,
        numbers.predict(X),
        numbers.detector(X),
        numbers.detector(X)(X),
        numbers.conformal((X + 0.1, Y)),
        classes,
        classes.calibration,
        classes.cross_validated,
        classes.predict(X),
        maps.predict(images),
        latedrop.sample(mlp(), X, 0.1, 5, keep_draws=True),
        latedrop.linearize(mlp(), X),
        classes.detector(X),
    ):
        assert len(repr(result).splitlines()) == 1, type(result)
        assert len(repr(result)) < 500, type(result)

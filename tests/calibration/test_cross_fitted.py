"""A model trained on all rows, calibrated by the errors of networks that left rows out."""

import pytest
import torch
from torch import Tensor, nn

import latedrop
from latedrop.errors import ArgumentError
from networks import mlp
from rounding import rounding

X = torch.randn(90, 2, generator=torch.Generator().manual_seed(0))
Y = X[:, :1].sin() + 0.1 * torch.randn(90, 1, generator=torch.Generator().manual_seed(1))
FOLDS = torch.arange(90).chunk(3)


def network(seed: int) -> nn.Module:
    return mlp(2, 12, 1, seed=seed)


def fold(seed: int, rows: Tensor) -> tuple[nn.Module, tuple[Tensor, Tensor], Tensor]:
    return network(seed), (X[rows], Y[rows]), X[torch.isin(torch.arange(90), rows, invert=True)]


def test_errors_are_those_of_the_networks_that_left_the_rows_out() -> None:
    folds = [fold(seed, rows) for seed, rows in enumerate(FOLDS)]
    model = network(9)
    uq = latedrop.calibrate_cross_fitted(model, (X, Y), folds, reference=X, progress=False)
    with torch.no_grad():
        errors = torch.cat([net(x) - y for net, (x, y), _ in folds])
        assert torch.equal(uq.predict(X).mean, model(X))
    assert uq.calibration.rows == 90
    assert uq.calibration.table[0].rmse == pytest.approx(float(errors.square().mean().sqrt()), rel=rounding())
    assert uq.calibration.fingerprint == latedrop.fingerprint(model)


def test_folds_of_the_model_itself_are_a_plain_calibration() -> None:
    model = network(9)
    others = torch.randn(120, 2, generator=torch.Generator().manual_seed(2))
    folds = [(model, (X[rows], Y[rows]), others) for rows in FOLDS]
    fitted = latedrop.calibrate_cross_fitted(model, (X, Y), folds, reference=others, progress=False)
    method = latedrop.Terms(["dropout", "leverage", "gradients"])  # a forest would have seen the errors
    plain: latedrop.Predictor = latedrop.calibrate(model, (X, Y), reference=others, method=method, progress=False)
    torch.testing.assert_close(fitted.predict(X).variance, plain.predict(X).variance, rtol=rounding(), atol=0)


def test_wrong_arguments() -> None:
    with pytest.raises(ArgumentError, match=r"at least one fold; found none\. Call calibrate\(\)"):
        latedrop.calibrate_cross_fitted(network(0), (X, Y), [])
    with pytest.raises(ArgumentError, match=r"expected method=Terms\(\.\.\.\) for folds; found 'sample'"):
        latedrop.calibrate_cross_fitted(network(0), (X, Y), [fold(0, FOLDS[0])], method=latedrop.Sampling())  # type: ignore[arg-type]
    forest = latedrop.Terms(["dropout", "forest"])
    with pytest.raises(ArgumentError, match=r"expected terms that learn nothing from errors for folds"):
        latedrop.calibrate_cross_fitted(network(0), (X, Y), [fold(0, FOLDS[0])], method=forest)

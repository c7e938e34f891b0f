"""SWAG: draws have the covariance that the snapshots say, and the snapshots are of the last quarter."""

import pytest
import torch
from torch import Tensor

from studies.regression import methods as uci_swag
from studies.regression.methods import swag
from studies.regression.training import Plan, train


def test_draws_have_the_covariance_of_the_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uci_swag, "_DRAWS", 20_000)
    g = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    # The hidden units are far above 0 and only the last layer moves, so that the output is linear in what is drawn.
    first, last, bias = randn(3, 4), randn(4, 1), randn(1)
    history = [
        ((first, first.new_full((4,), 50.0)), (last + 0.1 * randn(4, 1), bias + 0.1 * randn(1))) for _ in range(6)
    ]
    x = randn(5, 3)
    mean, variance = swag(history, {"test": x}, 0)["test"]
    features = torch.cat([x @ first + 50, torch.ones(5, 1, dtype=torch.float64)], 1)
    flat = torch.stack([torch.cat([w.flatten(), b]) for _, (w, b) in history])
    off = flat - flat.mean(0)
    covariance = torch.diag(off.square().mean(0)) / 2 + off.T @ off / (2 * (len(history) - 1))
    exact = (features @ covariance * features).sum(1)
    # 20,000 draws: 1 % on the variance, and its root's share on the mean.
    torch.testing.assert_close(variance, exact, rtol=0.05, atol=0)
    assert float(((mean - features @ flat.mean(0)).abs() / (exact / 20_000).sqrt()).max()) < 4.5
    assert torch.equal(variance, swag(history, {"test": x}, 0)["test"][1])  # the same call on the same batch


@pytest.mark.parametrize(("epochs", "count"), [(2, 2), (7, 2), (40, 10), (400, 20)])
def test_snapshots_are_of_the_last_quarter(epochs: int, count: int) -> None:
    x, y = torch.randn(2, 8, 3), torch.randn(2, 8)
    plan = Plan((4,), (0.0,), 1e-2, 8, epochs, snapshots=20)
    stack = train(x, y, plan, [1, 2])
    assert len(stack.snapshots) == count
    for (weight, bias), (w, b) in zip(stack.history(1, 0)[-1], stack.member(1, 0), strict=True):
        assert torch.equal(weight, w)  # moved, not computed
        assert torch.equal(bias, b)
    if epochs == 40:
        early = train(x, y, Plan((4,), (0.0,), 1e-2, 8, 31), [1, 2])
        torch.testing.assert_close(stack.history(0, 0)[0][0][0], early.member(0, 0)[0][0])

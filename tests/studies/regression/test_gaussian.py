"""Gaussian heads: the hand-written gradient against autograd, and the variance that they learn."""

import pytest
import torch
from torch import Tensor

from rounding import assert_same_up_to_rounding
from studies.regression.training import GaussianTraining, Plan, heads, train


def gradients(training: GaussianTraining, rows: slice) -> list[Tensor]:
    """Of every member's mean NLL, by autograd, for the flat parameters of `training`."""
    leaves = [part.detach().clone().double().requires_grad_() for layer in training.layers for part in layer]
    each = len(training.plan.rates)
    rates = torch.tensor(training.plan.rates, dtype=torch.float64).repeat(training.splits).view(-1, 1, 1)
    a, at = training.xs[:, rows].double().repeat_interleave(each, 0), 0
    for index, width in enumerate(training.plan.hidden):
        a = torch.relu(a @ leaves[2 * index] + (leaves[2 * index + 1] if index else 0))
        if training.masked:
            numbers = (training.numbers[:, rows, at : at + width] / training.unit).double()
            a = a * (numbers.repeat_interleave(each, 0) > rates) / (1 - rates)
        at += width
    mean, log_variance = (a @ leaves[-2] + leaves[-1]).unbind(-1)
    error = training.ys[:, rows].double().repeat_interleave(each, 0) - mean
    loss = (error.square() / log_variance.exp() + log_variance).mean(1).sum() / 2
    return list(torch.autograd.grad(loss, leaves, materialize_grads=True))


@pytest.mark.parametrize("rates", [(0.0,), (0.0, 0.3)], ids=["no dropout", "dropout"])
@pytest.mark.parametrize("hidden", [(6,), (7, 5), (6, 6), (7, 5, 8), (6, 6, 6), (6, 6, 6, 6)], ids=str)
def test_the_gradient_is_that_of_autograd(hidden: tuple[int, ...], rates: tuple[float, ...]) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(3, 45, 4), torch.randn(3, 45)
    training = GaussianTraining(x, y, Plan(hidden, rates, 1e-3, 16, 1), [1, 2, 3], lambda rows: None)
    training._draw()
    for rows in (slice(0, 16), slice(16, 32), slice(32, 45)):
        training._step(rows)
        found = [part.double() for layer in training.gradients for part in layer]
        for ours, theirs in zip(found, gradients(training, rows), strict=True):
            assert_same_up_to_rounding(ours, theirs)
            assert not ours.numel() or float(ours.abs().max()) > 0


def test_the_variance_follows_the_noise() -> None:
    torch.manual_seed(1)
    x = torch.rand(2, 2000, 1) * 2 - 1
    std = (x[..., 0] - 1).exp()
    stack = train(
        x, x[..., 0] + std * torch.randn(2, 2000), Plan((20,), (0.0,), 5e-3, 64, 60), [1, 2], kind=GaussianTraining
    )
    at = torch.tensor([[-0.5], [0.5]])
    for split in range(2):
        mean, variance = heads(stack.member(split, 0), at)
        torch.testing.assert_close(mean, at[:, 0], atol=0.15, rtol=0)
        torch.testing.assert_close(variance.sqrt(), (at[:, 0] - 1).exp(), rtol=0.2, atol=0)

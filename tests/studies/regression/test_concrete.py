"""Concrete dropout: the hand-written gradient against autograd, and what it learns."""

import pytest
import torch

from rounding import assert_same_up_to_rounding
from studies.regression.training import Plan, _ConcreteTraining, train_concrete


@pytest.mark.parametrize("hidden", [(6,), (6, 6), (7, 5), (6, 6, 6), (5, 8, 7), (6, 6, 6, 6)], ids=str)
def test_gradient_is_that_of_autograd(hidden: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 30, 4), torch.randn(2, 30)
    training = _ConcreteTraining(x, y, Plan(hidden, (0.0,), 1e-3, 30, 1), [1, 2], lambda rows: None)
    training.own[:-1] = torch.linspace(-2, 0.5, 2 * len(hidden)).view(-1, 2)
    training.own[-1] = torch.tensor([0.3, -1.0])
    training._draw()
    for _ in range(2):  # the second time over what the first left
        training._step(slice(0, 30))
    parts = [part.detach().clone().double().requires_grad_() for layer in training.layers for part in layer]
    own = training.own.detach().clone().double().requires_grad_()
    *thetas, log_noise = (value.view(-1, 1, 1) for value in own)
    a, at, cost = training.xs.double(), 0, parts[0].square().sum((1, 2)) * 1e-4 / 2
    for index, (theta, width) in enumerate(zip(thetas, hidden, strict=True)):
        p = theta.sigmoid()
        u = (training.numbers[..., at : at + width].double() * 0.1).sigmoid()
        q = torch.sigmoid((torch.log(p / (1 - p)) + torch.log(u / (1 - u))) / 0.1)
        a = torch.relu(a @ parts[2 * index] + (parts[2 * index + 1] if index else 0)) * (1 - q) / (1 - p)
        entropy = -(p * p.log() + (1 - p) * (1 - p).log())
        square = (parts[2 * index + 2].square() / (1 - p)).sum((1, 2))
        cost = cost + 1e-4 * square / 2 - width * entropy.flatten()
        at += width
    fit = (a @ parts[-2] + parts[-1] - training.ys.double()[..., None]).square() / (2 * log_noise.exp()) + log_noise / 2
    expected = torch.autograd.grad((fit.mean((1, 2)) + cost / 30).sum(), [*parts, own], materialize_grads=True)
    assert training.own.grad is not None
    found = [*(part for layer in training.gradients for part in layer), training.own.grad]
    for ours, theirs in zip(found, expected, strict=True):
        assert_same_up_to_rounding(ours.double(), theirs)
        assert not ours.numel() or float(ours.abs().max()) > 0


@pytest.mark.parametrize("hidden", [(20,), (20, 20, 20)], ids=str)
def test_noise_is_learned_and_rates_stay_inside(hidden: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    x = torch.randn(3, 400, 3)
    y = x[..., 0] + torch.tensor([0.1, 0.3, 1.0])[:, None] * torch.randn(3, 400)
    found = train_concrete(x, y, Plan(hidden, (0.0,), 5e-3, 64, 120), [1, 2, 3])
    assert found.rate.shape == (3, len(hidden))
    assert bool((found.rate > 0).all() and (found.rate < 0.5).all())
    assert bool((found.noise.diff() > 0).all())
    assert 0.5 < float(found.noise[2]) < 1.4

"""Concrete dropout: the hand-written gradient against autograd, and what it learns."""

import torch

from latedrop.studies.uci.concrete import _ConcreteTraining, train_concrete
from latedrop.studies.uci.stacked import Plan


def test_gradient_is_that_of_autograd() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 30, 4), torch.randn(2, 30)
    training = _ConcreteTraining(x, y, Plan((6,), (0.0,), 1e-3, 30, 1), [1, 2], lambda rows: None)
    training.own[1] = torch.tensor([0.3, -1.0])
    training._draw()
    training._step(slice(0, 30))
    (first, _), (second, bias) = training.layers
    leaves = [value.detach().clone().double().requires_grad_() for value in (first, second, bias, training.own)]
    w1, w2, b2, own = leaves
    theta, log_noise = own[0].view(-1, 1, 1), own[1].view(-1, 1, 1)
    p, u = theta.sigmoid(), training.numbers.double().clamp(1e-6, 1 - 1e-6)
    q = torch.sigmoid((torch.log(p / (1 - p)) + torch.log(u / (1 - u))) / 0.1)
    out = (torch.relu(training.xs.double() @ w1) * (1 - q) / (1 - p)) @ w2 + b2
    fit = (out - training.ys.double()[..., None]).square() / (2 * log_noise.exp()) + log_noise / 2
    entropy = -(p * p.log() + (1 - p) * (1 - p).log())
    squares = w1.square().sum((1, 2)) + (w2.square() / (1 - p)).sum((1, 2))
    loss = fit.mean((1, 2)) + (1e-4 * squares / 2 - 6 * entropy.flatten()) / 30
    expected = torch.autograd.grad(loss.sum(), leaves)
    assert training.own.grad is not None
    found = (training.gradients[0][0], *training.gradients[1], training.own.grad)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=1e-5)


def test_noise_is_learned_and_rates_stay_inside() -> None:
    torch.manual_seed(1)
    x = torch.randn(3, 400, 3)
    y = x[..., 0] + torch.tensor([0.1, 0.3, 1.0])[:, None] * torch.randn(3, 400)
    found = train_concrete(x, y, Plan((20,), (0.0,), 5e-3, 64, 120), [1, 2, 3])
    assert bool((found.rate > 0).all() and (found.rate < 0.5).all())
    assert bool((found.noise.diff() > 0).all())
    assert 0.6 < float(found.noise[2]) < 1.4

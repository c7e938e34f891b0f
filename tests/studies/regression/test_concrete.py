"""Concrete dropout: its loss, and what it learns."""

import pytest
import torch

from rounding import assert_same_up_to_rounding
from studies.regression.training import ConcreteTraining, Plan, train


def test_the_loss_is_the_evidence_bound() -> None:
    torch.manual_seed(0)
    x, y, hidden = torch.randn(2, 30, 4), torch.randn(2, 30), (7, 5)
    training = ConcreteTraining(x, y, Plan(hidden, (0.0,), 1e-3, 30, 1), [1, 2], lambda rows: None)
    with torch.no_grad():
        training.own[:-1] = torch.linspace(-2, 0.5, 4).view(-1, 2)
        training.own[-1] = torch.tensor([0.3, -1.0])
    training._draw()
    (w1, b1), *others = [(layer.weight, layer.bias) for layer in training.layers]
    a, at, weight, bias = training.xs, 0, w1, b1
    cost = (w1.square().sum((1, 2)) + b1.square().sum((1, 2))) * 1e-4 / 2
    for theta, width, (after, next_bias) in zip(training.own[:-1, :, None, None], hidden, others, strict=True):
        p, u = theta.sigmoid(), training.numbers[..., at : at + width].sigmoid()
        q = torch.sigmoid((torch.log(p / (1 - p)) + torch.log(u / (1 - u))) / 0.1)
        a = torch.relu(a @ weight + bias) * (1 - q) / (1 - p)
        entropy = -(p * p.log() + (1 - p) * (1 - p).log())
        cost = cost + 1e-4 * (after.square() / (1 - p)).sum((1, 2)) / 2 - width * entropy.flatten()
        at, weight, bias = at + width, after, next_bias
    noise = training.own[-1, :, None].exp()
    fit = (a @ weight + bias)[..., 0].sub(training.ys).square() / (2 * noise) + noise.log() / 2
    assert_same_up_to_rounding(training._loss(slice(0, 30)), (fit.mean(1) + cost / 30).sum())


@pytest.mark.parametrize("hidden", [(20,), (20, 20, 20)], ids=str)
def test_noise_is_learned_and_rates_stay_inside(hidden: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    x = torch.randn(3, 400, 3)
    y = x[..., 0] + torch.tensor([0.1, 0.3, 1.0])[:, None] * torch.randn(3, 400)
    learned = train(x, y, Plan(hidden, (0.0,), 5e-3, 64, 120), [1, 2, 3], kind=ConcreteTraining)
    assert learned.own is not None
    rates, noise = learned.own[:-1].sigmoid(), learned.own[-1].exp()
    assert rates.shape == (len(hidden), 3)
    assert bool((rates > 0).all() and (rates < 0.5).all())
    assert bool((noise.diff() > 0).all())
    assert 0.5 < float(noise[2]) < 1.4

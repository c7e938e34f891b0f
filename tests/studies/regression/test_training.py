"""The stack against one network at a time, and against itself in other company."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from latedrop.errors import OutputError
from rounding import assert_same_up_to_rounding
from studies.regression import training as stacked
from studies.regression.training import (
    ConcreteTraining,
    GaussianTraining,
    Plan,
    Stack,
    Training,
    heads,
    initial,
    key,
    train,
)

SPLITS, ROWS, INPUTS = 3, 45, 4
SEEDS = [key("test", split) for split in range(SPLITS)]


def data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(SPLITS, ROWS, INPUTS, generator=g)
    return x, x[..., 0].sin() + 0.3 * x[..., 1] * x[..., 2] + 0.1 * torch.randn(SPLITS, ROWS, generator=g)


def plain(x: Tensor, y: Tensor, plan: Plan, rate: float, seed: int, units: int) -> nn.Sequential:
    """A network of `torch.nn` trained with `torch.optim.Adam`, masks cut from the numbers that the stack draws."""
    sizes = [x.shape[1], *plan.hidden, 1]
    linears = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    with torch.no_grad():
        for layer, (weight, bias) in zip(linears, initial(sizes, seed), strict=True):
            layer.weight.copy_(weight.T)
            layer.bias.copy_(bias)
    optimiser = torch.optim.Adam([p for layer in linears for p in layer.parameters()], lr=plan.learning_rate)
    orders, masks = (torch.Generator().manual_seed(key(seed, name)) for name in ("order", "masks"))
    for _ in range(plan.epochs):
        order = torch.rand(len(x), generator=orders).argsort()
        numbers = 1 - torch.rand(len(x), units, generator=masks) if units else torch.ones(len(x), sum(plan.hidden))
        for start in range(0, len(x), plan.batch):
            rows, at = slice(start, start + plan.batch), 0
            a = x[order[rows]]
            for layer in linears[:-1]:
                a = torch.relu(layer(a))
                a = a * (numbers[rows, at : at + a.shape[1]] > rate) / (1 - rate)
                at += a.shape[1]
            loss = nn.functional.mse_loss(linears[-1](a)[:, 0], y[order[rows]])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return nn.Sequential(*linears)


def assert_same(first: Stack, split: int, rate: int, second: Stack, other_split: int, other_rate: int) -> None:
    for (w, b), (v, c) in zip(first.member(split, rate), second.member(other_split, other_rate), strict=True):
        assert_same_up_to_rounding(w, v)
        assert_same_up_to_rounding(b, c)


@pytest.mark.parametrize("hidden", [(8,), (8, 6, 7), (6, 6), (6, 6, 6)], ids=str)
@pytest.mark.parametrize("rates", [(0.0,), (0.0, 0.1, 0.5)])
def test_members_are_networks_trained_alone(hidden: tuple[int, ...], rates: tuple[float, ...]) -> None:
    x, y = data()
    plan = Plan(hidden, rates, 1e-2, 16, 12)
    stack = train(x, y, plan, SEEDS)
    units = sum(hidden) if any(rates) else 0
    for split in range(SPLITS):
        for index, rate in enumerate(rates):
            net = plain(x[split], y[split], plan, rate, SEEDS[split], units)
            for layer, (weight, bias) in zip(net, stack.member(split, index), strict=True):
                torch.testing.assert_close(weight, layer.weight.detach().T, rtol=2e-3, atol=2e-4)
                torch.testing.assert_close(bias, layer.bias.detach(), rtol=2e-3, atol=2e-4)


def test_a_member_does_not_depend_on_who_trains_beside_it() -> None:
    x, y = data()
    together = train(x, y, Plan((8,), (0.0, 0.05, 0.3), 1e-2, 16, 8), SEEDS)
    alone = train(x[1:2], y[1:2], Plan((8,), (0.3,), 1e-2, 16, 8), SEEDS[1:2])
    assert_same(together, 1, 2, alone, 0, 0)
    rate_zero = train(x, y, Plan((8,), (0.0,), 1e-2, 16, 8), SEEDS)
    assert_same(together, 2, 0, rate_zero, 2, 0)


def test_groups_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data()
    plan = Plan((8,), (0.0, 0.2), 1e-2, 16, 5)
    whole = train(x, y, plan, SEEDS)
    monkeypatch.setattr(stacked, "_GROUP_FLOATS", 1)
    grouped = train(x, y, plan, SEEDS)
    for split in range(SPLITS):
        assert_same(whole, split, 1, grouped, split, 1)


def test_divergence_is_an_error() -> None:
    x, y = data()
    with pytest.raises(OutputError, match="Lower the learning rate"):
        train(x, y * 1e38, Plan((8,), (0.0,), 1e30, 16, 20), SEEDS)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_epochs_are_the_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = (part.cuda() for part in data())
    plan = Plan((8, 6), (0.0, 0.2), 1e-2, 16, 9, snapshots=2)

    def runs() -> list[Stack]:
        return [train(x, y, plan, SEEDS, kind=kind) for kind in (ConcreteTraining, Training, GaussianTraining)]

    replayed = runs()
    monkeypatch.setattr(stacked.Training, "_captured", lambda self: self._epoch())
    for first, second in zip(replayed, runs(), strict=True):
        assert_same(first, 1, 0, second, 1, 0)


def test_a_gaussian_head_learns_the_noise() -> None:
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

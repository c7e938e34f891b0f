"""The study's variances: to first order against `linearize`, and exact ones against draws."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from latedrop.dropout import first_order as linear
from studies.regression.scores import first_order, mask_numbers, sampled


def network(hidden: tuple[int, ...], seed: int) -> tuple[nn.Sequential, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(seed)
    sizes = [4, *hidden, 1]
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    net = nn.Sequential(*layers[:-1]).double()
    return net, [(m.weight.detach().T, m.bias.detach()) for m in net if isinstance(m, nn.Linear)]


@pytest.mark.parametrize("hidden", [(8,), (8, 6), (6, 6), (8, 6, 5), (6, 6, 6), (5, 8, 6, 7), (6, 6, 6, 6)], ids=str)
def test_first_order_variance_is_that_of_linearize(hidden: tuple[int, ...]) -> None:
    net, member = network(hidden, 4)
    x = torch.randn(9, 4, dtype=torch.float64)
    expected = linear.linearize(net, x)
    mean, by_site = first_order(member, x)
    torch.testing.assert_close(mean, expected.mean[:, 0])
    torch.testing.assert_close(by_site, expected.variance_by_site[:, 0])


@pytest.mark.parametrize("rate", [0.01, 0.3])
def test_exact_variance_agrees_with_draws_within_the_standard_error(rate: float) -> None:
    _, member = network((50,), 5)
    x, draws = torch.randn(40, 4, dtype=torch.float64), 1000
    mean, by_site = first_order(member, x)
    exact = rate / (1 - rate) * by_site[:, 0]
    drawn_mean, drawn = sampled(member, x, [rate], mask_numbers(member, draws, 0))
    assert float(((drawn_mean - mean).abs() / (exact / draws).sqrt()).max()) < 4.5
    # At a small rate few units are ever dropped, and the kurtosis of a mask widens the error of the variance.
    kurtosis = max(0.0, 1 / (rate * (1 - rate)) - 6)
    relative = math.sqrt((2 + kurtosis) / (draws - 1))
    assert float((drawn / exact - 1).abs().max()) < 4.5 * relative
    assert float((drawn / exact - 1).mean().abs()) < 3 * relative


def test_deep_draws_meet_the_first_order_at_small_rates() -> None:
    _, member = network((20, 20, 20), 6)
    x = torch.randn(30, 4, dtype=torch.float64)
    rate, draws = 0.002, 20_000
    exact = rate / (1 - rate) * first_order(member, x)[1].sum(1)
    _, drawn = sampled(member, x, [rate] * 3, mask_numbers(member, draws, 1))
    assert float((drawn.sum() / exact.sum()).log().abs()) < 0.15


def test_each_site_has_its_rate() -> None:
    _, member = network((20, 20), 8)
    x, numbers = torch.randn(9, 4, dtype=torch.float64), mask_numbers(member, 2000, 2)
    last = sampled(member, x, [0.0, 0.3], numbers)[1]
    exact = 0.3 / 0.7 * first_order(member, x)[1][:, 1]
    torch.testing.assert_close(last, exact, rtol=4.5 * math.sqrt(2 / 1999), atol=0)
    both, first = (sampled(member, x, rates, numbers)[1] for rates in ([0.3, 0.3], [0.3, 0.0]))
    assert bool((both > last).all() and (both > first).all())

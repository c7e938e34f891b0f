"""The mean softmax of uncertain logits, the spread of logits, and what thinned networks disagree about."""

import math

import pytest
import torch
from torch import nn

import latedrop
from latedrop.calibration.fit_classes import information
from rounding import assert_same_doubles
from studies.classification.doubt import differences, log_mean_softmax, mutual_information

ROWS = 200


def network() -> tuple[nn.Module, torch.Tensor, latedrop.Sites]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4))
        x = 2 * torch.randn(ROWS, 4)
    return net, x, latedrop.find_sites(net, x)


@pytest.mark.parametrize("k", [2, 10])
def test_without_doubt_it_is_a_softmax(k: int) -> None:
    z = torch.randn(7, k, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
    logs = log_mean_softmax(z, z.new_zeros(7, k, k), z.new_full((7,), 1.7))
    # A variance of 0 counts as 1e-12.
    torch.testing.assert_close(logs, torch.log_softmax(z / 1.7, 1), atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("size", "most"), [(0.01, 1e-6), (1.0, 1e-6), (3.0, 1e-4), (6.0, 0.01), (9.0, 0.03), (40.0, 0.01)]
)
def test_of_two_classes_it_is_an_integral(size: float, most: float) -> None:
    """Also for labels that are very unlikely, and for a doubt that is large."""
    mean = torch.linspace(-20, 9, 59, dtype=torch.float64)
    t = torch.arange(-40, 40, 1e-3, dtype=torch.float64)
    log_density = -t.square() / 2 - math.log(2 * math.pi) / 2 + math.log(1e-3)
    expected = (torch.nn.functional.logsigmoid(mean[:, None] + size * t) + log_density).logsumexp(1)
    z = torch.stack([mean, torch.zeros_like(mean)], 1)
    spread = size**2 * (1 - torch.eye(2, dtype=torch.float64)).expand(len(z), 2, 2)
    logs = log_mean_softmax(z, spread, torch.ones(len(z), dtype=torch.float64))
    assert_same_doubles(logs.exp().sum(1), torch.ones(len(z), dtype=torch.float64))
    torch.testing.assert_close(logs[:, 0], expected, atol=most, rtol=0)


def test_differences_are_those_of_single_outputs() -> None:
    net, x, sites = network()
    spread = differences(net, x, sites)
    for k, j in ((0, 1), (1, 3), (2, 0)):
        one = latedrop.linearize(net, x, sites, readout=lambda z, k=k, j=j: z[:, k] - z[:, j])
        assert_same_doubles(spread[:, k, j], one.variance_by_site[:, 0].sum(1))


def test_the_mean_softmax_and_mutual_information_agree_with_draws() -> None:
    net, x, sites = network()
    rate, z, spread = 0.05, net(x).detach(), differences(net, x, sites)
    drawn = latedrop.sample(net, x, rate, 2000, sites=sites, keep_draws=True).outputs
    assert drawn is not None
    logs, odds = torch.log_softmax(drawn, 2), rate / (1 - rate)
    mean, by_formula = logs.logsumexp(0) - math.log(2000), log_mean_softmax(z, odds * spread, torch.ones(ROWS))
    labels = torch.multinomial(mean.exp(), 1, generator=torch.Generator().manual_seed(1))
    nll = [float(-each.gather(1, labels).mean()) for each in (by_formula, mean)]
    assert abs(nll[0] - nll[1]) < 0.002
    information_by_formula, expected = mutual_information(z, odds * spread, draws=2000), information(logs)
    assert float(torch.corrcoef(torch.stack([information_by_formula, expected]))[0, 1]) > 0.97
    assert float(information_by_formula.mean() / expected.mean()) == pytest.approx(
        1, abs=0.15
    )  # first order against draws

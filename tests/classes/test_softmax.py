"""The mean softmax of uncertain logits, the spread of logits, and what thinned networks disagree about."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import latedrop
from latedrop.calibration.classes.softmax import (
    MOST,
    TOP,
    entropy,
    information,
    log_mean_softmax,
    mutual_information,
    read_classes,
)
from latedrop.dropout.first_order import differences
from rounding import assert_same_doubles


def _spread(covariance: torch.Tensor) -> torch.Tensor:
    d = covariance.diagonal(dim1=-2, dim2=-1)
    return d[..., :, None] + d[..., None, :] - 2 * covariance


def _net(classes: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, classes))


def test_a_sure_row_has_no_minus_zero() -> None:
    logs = torch.tensor([[0.0, -1e9, -torch.inf]])
    for found in (entropy(logs), information(torch.stack([logs] * 4))):
        assert found.tolist() == [0.0]
        assert not bool(found.signbit().any())


@pytest.mark.parametrize("k", [2, 3, 10, 40])
def test_no_doubt_is_a_softmax(k: int) -> None:
    z = torch.randn(7, k, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
    t = torch.full((7,), 1.7, dtype=torch.float64)
    size = read_classes(z).shape[1]
    found = log_mean_softmax(z, torch.zeros(7, size, size, dtype=torch.float64), t)
    # A variance of 0 counts as 1e-12.
    torch.testing.assert_close(found, torch.log_softmax(z / 1.7, 1), atol=1e-12, rtol=0)
    assert_same_doubles(log_mean_softmax(z, None, t), torch.log_softmax(z / 1.7, 1))


@pytest.mark.parametrize("k", [2, 5])
@pytest.mark.parametrize("size", [0.3, 2.0])
def test_the_mean_of_gaussian_logits(k: int, size: float) -> None:
    generator = torch.Generator().manual_seed(1)
    z = 2 * torch.randn(20, k, dtype=torch.float64, generator=generator)
    root = size * torch.randn(20, k, k, dtype=torch.float64, generator=generator) / k**0.5
    noise = torch.randn(20_000, k, dtype=torch.float64, generator=generator)
    drawn = torch.log_softmax(z + torch.einsum("nkj,tj->tnk", root, noise), 2).exp().mean(0)
    found = log_mean_softmax(z, _spread(root @ root.mT), torch.ones(20, dtype=torch.float64)).exp()
    plain = torch.softmax(z, 1)

    def apart(p: torch.Tensor) -> float:
        return float((drawn * (drawn.log() - p.log())).sum(1).mean())

    assert apart(found) < 0.25 * apart(plain)  # it explains most of what the doubt does
    assert apart(found) < {0.3: 1e-5, 2.0: 0.01}[size]
    assert float((found - drawn).abs().max()) < {0.3: 0.003, 2.0: 0.15}[size]


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
    found = log_mean_softmax(z, spread, torch.ones(len(z), dtype=torch.float64))
    assert_same_doubles(found.exp().sum(1), torch.ones(len(z), dtype=torch.float64))
    torch.testing.assert_close(found[:, 0], expected, atol=most, rtol=0)


def test_a_temperature_divides_logits_and_doubt() -> None:
    generator = torch.Generator().manual_seed(4)
    z = torch.randn(5, 6, dtype=torch.float64, generator=generator)
    root = torch.randn(5, 6, 6, dtype=torch.float64, generator=generator)
    spread, t = _spread(root @ root.mT), torch.linspace(0.5, 4, 5, dtype=torch.float64)
    one = torch.ones(5, dtype=torch.float64)
    found = log_mean_softmax(z, spread, t)
    assert_same_doubles(found, log_mean_softmax(z / t[:, None], spread / t[:, None, None].square(), one))


@pytest.mark.parametrize("k", [2, 3, 30])
def test_it_can_be_fitted_also_without_any_doubt(k: int) -> None:
    z = torch.randn(4, k, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    size = read_classes(z).shape[1]
    odds = torch.zeros((), dtype=torch.float64, requires_grad=True)
    t = torch.ones(4, dtype=torch.float64, requires_grad=True)
    spread = 1 - torch.eye(size, dtype=torch.float64).expand(4, -1, -1)
    log_mean_softmax(z, odds * spread, t)[:, 0].sum().backward()
    assert odds.grad is not None
    assert t.grad is not None
    assert bool(odds.grad.isfinite())
    assert bool(t.grad.isfinite().all())


def test_many_classes_agree_with_all_pairs_where_the_rest_is_unlikely() -> None:
    k = MOST + 8
    generator = torch.Generator().manual_seed(2)
    z = torch.randn(6, k, dtype=torch.float64, generator=generator)
    top = z.topk(TOP, 1).indices
    z.scatter_(1, top, z.gather(1, top) + 12)
    root = torch.randn(6, TOP, 4, dtype=torch.float64, generator=generator)
    covariance = torch.zeros(6, TOP + 1, TOP + 1, dtype=torch.float64)
    covariance[:, :TOP, :TOP] = root @ root.mT
    found = log_mean_softmax(z, _spread(covariance), torch.ones(6, dtype=torch.float64))
    assert_same_doubles(found.exp().sum(1), torch.ones(6, dtype=torch.float64))
    few = log_mean_softmax(z.gather(1, top), _spread(root @ root.mT), torch.ones(6, dtype=torch.float64))
    # What the rest has, some e^-12, is left out of the one.
    torch.testing.assert_close(found.gather(1, top).exp(), few.exp(), atol=1e-3, rtol=0)


def test_differences_are_those_of_single_outputs() -> None:
    net, x = _net(3), torch.randn(5, 4)
    sites = latedrop.find_sites(net, x)
    spread = differences(net, x, sites)
    for k, j in ((0, 1), (1, 2), (2, 0)):
        one = latedrop.linearize(net, x, sites, readout=lambda z, k=k, j=j: z[:, k] - z[:, j])
        assert_same_doubles(spread[:, :, k, j], one.variance_by_site[:, 0])


def test_the_mean_softmax_of_a_network_agrees_with_draws() -> None:
    net, x, rate = _net(4), 2 * torch.randn(200, 4, generator=torch.Generator().manual_seed(0)), 0.05
    sites = latedrop.find_sites(net, x)
    z, spread = net(x).detach(), differences(net, x, sites)
    found = log_mean_softmax(z, rate / (1 - rate) * spread.sum(1), torch.ones(len(x)))
    drawn = latedrop.sample(net, x, rate, 2000, sites=sites, keep_draws=True).outputs
    assert drawn is not None
    mean = torch.log_softmax(drawn, 2).logsumexp(0) - torch.log(torch.tensor(2000.0))
    labels = torch.multinomial(mean.exp(), 1, generator=torch.Generator().manual_seed(1))
    nll = [float(-logs.gather(1, labels).mean()) for logs in (found, mean)]
    assert abs(nll[0] - nll[1]) < 0.002


def test_mutual_information_of_gaussian_logits_and_of_draws() -> None:
    net, x, rate = _net(4), 2 * torch.randn(40, 4, generator=torch.Generator().manual_seed(3)), 0.02
    sites = latedrop.find_sites(net, x)
    z, spread = net(x).detach(), differences(net, x, sites)
    found = mutual_information(z, rate / (1 - rate) * spread.sum(1), torch.ones(len(x)), draws=2000)
    drawn = latedrop.sample(net, x, rate, 2000, sites=sites, keep_draws=True).outputs
    assert drawn is not None
    expected = information(torch.log_softmax(drawn, 2))
    correlation = torch.corrcoef(torch.stack([found, expected]))[0, 1]
    assert float(correlation) > 0.97
    # First order against draws.
    assert float(found.mean() / expected.mean()) == pytest.approx(1, abs=0.15)


def test_entropy_of_certain_and_even_rows() -> None:
    logs = torch.tensor([[0.0, -torch.inf], [-0.6931471806, -0.6931471806]])
    assert entropy(logs).tolist() == pytest.approx([0, 0.6931471806])

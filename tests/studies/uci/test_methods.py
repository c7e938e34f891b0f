"""Laplace against a plain Bayesian regression, conformal against its definition, linear against the floor fit."""

import math

import pytest
import torch
from torch import Tensor

from latedrop.calibration.scale import fit_floor
from latedrop.studies.uci import methods as uci_methods
from latedrop.studies.uci.methods import Network, conformal_scores, constant, laplace, linear, network


@pytest.fixture
def net() -> Network:
    g = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    member = [(randn(3, 8), randn(8)), (randn(8, 1), randn(1))]
    x = {"train": randn(200, 3), "validation": randn(99, 3), "test": randn(50, 3)}
    plain = network(member, x, {part: rows[:, 0] for part, rows in x.items()})
    target = {part: plain.mean[part] + (0.3 + plain.by_site[part][:, 0].sqrt()) * randn(len(x[part])) for part in x}
    return network(member, x, target)


def test_constant_is_the_validation_error(net: Network) -> None:
    assert float(constant(net)[7]) == pytest.approx(float(net.error("validation").square().mean()))


def test_linear_is_the_floor_fit_for_one_site(net: Network) -> None:
    part = net.mean["validation"], net.by_site["validation"][:, 0], net.target["validation"]
    scale, floor = fit_floor(*part)
    torch.testing.assert_close(
        linear(net, per_site=False), net.by_site["test"][:, 0] * scale + floor, rtol=1e-4, atol=0
    )


def test_laplace_is_the_posterior_at_the_largest_evidence(net: Network) -> None:
    features = uci_methods._with_ones(torch.relu(net.x["train"] @ net.member[0][0] + net.member[0][1]))
    weight = torch.cat([net.member[1][0].flatten(), net.member[1][1]])
    error = net.error("train")

    def evidence(alpha: float, noise: float) -> float:
        precision = features.T @ features / noise + alpha * torch.eye(9, dtype=torch.float64)
        fit = -len(error) / 2 * math.log(noise) - float(error.square().sum()) / (2 * noise)
        return (
            fit - alpha / 2 * float(weight.square().sum()) - float(torch.logdet(precision)) / 2 + 4.5 * math.log(alpha)
        )

    alpha, noise = (float(value) for value in uci_methods._evidence(features, weight, error)[:2])
    best = evidence(alpha, noise)
    for a, n in ((1.05, 1), (0.95, 1), (1, 1.05), (1, 0.95)):
        assert evidence(alpha * a, noise * n) < best
    precision = features.T @ features / noise + alpha * torch.eye(9, dtype=torch.float64)
    test = uci_methods._with_ones(torch.relu(net.x["test"] @ net.member[0][0] + net.member[0][1]))
    expected = (test @ torch.linalg.inv(precision) * test).sum(1) + noise
    torch.testing.assert_close(laplace(net), expected)


def test_conformal_ranks_the_validation_errors(net: Network) -> None:
    found = conformal_scores(net, None, 2.0)
    radius = float(net.error("validation").abs().sort().values[math.ceil(100 * 0.9) - 1])
    assert found["width"] == pytest.approx(2 * radius * 2)
    assert found["coverage"] == pytest.approx(float((net.error("test").abs() <= radius).double().mean()))
    spread = {part: net.by_site[part][:, 0].sqrt() for part in ("validation", "test")}
    assert 0 <= conformal_scores(net, spread, 2.0)["ma"] < 0.2

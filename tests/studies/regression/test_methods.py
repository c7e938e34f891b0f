"""Laplace against a plain Bayesian regression, conformal against its definition, the default against the library."""

import math

import pytest
import torch
from torch import Tensor

import latedrop
from latedrop.calibration.scale import fit_floor
from rounding import assert_same_up_to_rounding
from studies.regression import methods as uci_methods
from studies.regression.methods import (
    Network,
    conformal_scores,
    constant,
    default,
    dropout,
    ensemble,
    gaussian_ensemble,
    laplace,
    network,
    per_site,
    rate_in,
    spread,
)
from studies.regression.training import heads


@pytest.fixture
def net() -> Network:
    g = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    member = [(randn(3, 8), randn(8)), (randn(8, 1), randn(1))]
    x = {"train": randn(200, 3), "validation": randn(99, 3), "test": randn(50, 3), "inside": randn(20, 3)}
    plain = network(member, x, {part: rows[:, 0] for part, rows in x.items()})
    target = {part: plain.mean[part] + (0.3 + plain.by_site[part][:, 0].sqrt()) * randn(len(x[part])) for part in x}
    return network(member, x, target)


def test_constant_is_the_validation_error(net: Network) -> None:
    parts = constant(net)
    assert float(parts["test"][1][7]) == pytest.approx(float(net.error("validation").square().mean()))
    assert list(parts) == ["validation", "test", "inside"]


def test_per_site_is_the_floor_fit_for_one_site(net: Network) -> None:
    part = net.mean["validation"], net.by_site["validation"][:, 0], net.target["validation"]
    scale, floor = fit_floor(*part)
    expected = net.by_site["inside"][:, 0] * scale + floor
    assert_same_up_to_rounding(per_site(net)["inside"][1], expected)


def test_dropout_has_exact_variance_or_draws_and_noise(net: Network) -> None:
    exact = dropout(net, [0.2], None, 0, noise=0.5)["test"]
    torch.testing.assert_close(exact[1], 0.25 * net.by_site["test"][:, 0] + 0.5)
    drawn = dropout(net, [0.2], 4000, 0, noise=0.5, parts=["test"])
    assert list(drawn) == ["test"]
    torch.testing.assert_close(drawn["test"][1], exact[1], rtol=0.15, atol=0)


def test_rate_in_has_one_rate_for_each_site_and_call(net: Network) -> None:
    for part in net.judged:
        odds = rate_in(net)[part][1] / net.by_site[part][:, 0]
        used = odds[net.by_site[part][:, 0] > 0]
        assert 0 < float(used.max()) < 1
        torch.testing.assert_close(used, used[:1].expand_as(used))


def test_ensembles_are_mixtures(net: Network) -> None:
    others = [network([(w * f, b) for w, b in net.member], net.x, net.target) for f in (1.1, 0.8)]
    mixture = ensemble([net, *others])["inside"]
    outputs = torch.stack([net.mean["inside"], *(other.mean["inside"] for other in others)])
    torch.testing.assert_close(mixture[0], outputs.mean(0))
    torch.testing.assert_close(mixture[1], outputs.var(0))
    single = spread(net, {"inside": mixture})["inside"]
    assert torch.equal(single[0], net.mean["inside"])  # moved, not computed
    assert torch.equal(single[1], mixture[1])
    (first, (weight, bias)), g = net.member, torch.Generator().manual_seed(5)
    two = [
        [first, (torch.cat([weight, 0.1 * torch.randn(8, 1, generator=g).double()], 1), bias.repeat(2) * f)]
        for f in (1.0, 2.0)
    ]
    mean, variance = gaussian_ensemble(two, net.x)["test"]
    each = [heads(member, net.x["test"]) for member in two]
    draws = torch.stack([m for m, _ in each]), torch.stack([v for _, v in each])
    torch.testing.assert_close(mean, draws[0].mean(0))
    torch.testing.assert_close(variance, (draws[1] + draws[0].square()).mean(0) - draws[0].mean(0).square())


@pytest.mark.parametrize("reference", [False, True])
def test_default_is_what_calibrate_says(net: Network, reference: bool) -> None:
    model = uci_methods._sequential(net.member).float()
    x = {part: rows.float() for part, rows in net.x.items()}
    options = {"reference": x["train"]} if reference else {}
    made = latedrop.calibrate(
        model, (x["validation"], net.target["validation"].float()[:, None]), progress=False, **options
    )
    mean, variance = default(net, reference=reference)["inside"]
    torch.testing.assert_close(variance, made.predict(x["inside"]).variance[:, 0].double())
    assert_same_up_to_rounding(mean, net.mean["inside"])


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
    torch.testing.assert_close(laplace(net)["test"][1], expected)


def test_conformal_ranks_the_validation_errors(net: Network) -> None:
    scores = conformal_scores(net, None, 2.0)
    radius = float(net.error("validation").abs().sort().values[math.ceil(100 * 0.9) - 1])
    assert scores["width"] == pytest.approx(2 * radius * 2)
    assert scores["coverage"] == pytest.approx(float((net.error("test").abs() <= radius).double().mean()))
    assert scores["ranking"] == 0
    std = {part: net.by_site[part][:, 0].sqrt() for part in ("validation", "inside")}
    scaled = conformal_scores(net, std, 2.0, "inside")
    assert 0 <= scaled["ma"] < 0.3
    assert scaled["ranking"] != 0

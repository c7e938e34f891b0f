"""Leverage of mask gradients against direct computations, closed forms and gradients by factors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import networks
from latedrop import Network, find_sites, linearize
from latedrop.errors import DataError
from latedrop.terms import BatchContext, GradientLeverage, Leverage
from latedrop.terms.features import folded
from networks import Net
from rounding import assert_same_doubles, assert_same_up_to_rounding


def mlp(outputs: int = 1) -> nn.Sequential:
    return networks.mlp(3, 12, 8, outputs)


def gradients(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    rows = BatchContext(Network(model), x, find_sites(model, x), None, None, gradients=True)
    return rows.mean, rows.gradients


def measured(term: GradientLeverage, phi: Tensor, *, own: bool = False) -> Tensor:
    """The leverage `(n, K)` of mask gradients `(n, K, D)`."""
    rows = BatchContext(
        Network(mlp()), None, find_sites(mlp(), torch.ones(2, 3)), None, None, torch.zeros(1) if own else None
    )
    rows.remember(mean=torch.zeros(phi.shape[:2]), gradients=phi)
    return term.values(rows)


def direct(phi: Tensor, reference: Tensor, ridge: float) -> Tensor:
    """The quadratic form of one output, `(n,)`, with an inverse."""
    constant = reference.square().sum(1).mean().sqrt()
    rows, vectors = (torch.cat([part, constant.expand(len(part), 1)], 1) for part in (reference, phi))
    gram = rows.T @ rows / len(rows)
    size = gram.trace() / len(gram) * ridge * max(1, len(gram) / len(rows)) ** 2
    inverse = torch.linalg.inv(gram + size * torch.eye(len(gram), dtype=gram.dtype))
    return torch.einsum("ni,ij,nj->n", vectors, inverse, vectors)


def test_gradients_of_one_site_are_the_terms_of_the_last_layer() -> None:
    net = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)).eval()
    x = torch.randn(7, 3)
    output, phi = gradients(net, x)
    expected = net[:2](x).detach()[:, None] * net[2].weight.detach()
    assert_same_up_to_rounding(phi, expected)
    assert_same_up_to_rounding(output, net(x).detach())


def test_their_squares_add_up_to_the_dropout_variance() -> None:
    model, x = mlp(2), torch.randn(20, 3)
    _, phi = gradients(model, x)
    assert_same_up_to_rounding(phi.square().sum(2), linearize(model, x).variance_by_site.sum(2))


def test_a_convolution_has_one_number_per_channel() -> None:
    def run(net: Net, x: Tensor, factor: float | Tensor = 1.0) -> Tensor:
        return net.last(net.second(net.first(x).relu() * factor).relu().mean((2, 3)))

    layers = {"first": nn.Conv2d(2, 5, 3), "second": nn.Conv2d(5, 4, 3), "last": nn.Linear(4, 2)}
    model, x = Net(run, **layers), torch.randn(6, 2, 9, 9)
    _, phi = gradients(model, x)
    assert phi.shape == (6, 2, 5 + 4)
    factor = torch.ones(6, 5, 1, 1, requires_grad=True)
    output = model(x, factor)
    for k in range(2):
        (expected,) = torch.autograd.grad(output[:, k].sum(), factor, retain_graph=True)
        assert_same_up_to_rounding(phi[:, k, :5], expected.flatten(1), scale=float(phi.abs().max()))


def test_leverage_is_the_quadratic_form_for_every_output() -> None:
    torch.manual_seed(2)
    reference, phi = torch.randn(40, 2, 6).double(), torch.randn(9, 2, 6).double()
    metric = GradientLeverage(0.01).learned_from(reference.split(11), False)
    expected = torch.stack([direct(phi[:, k], reference[:, k], 0.01) for k in range(2)], 1)
    assert_same_doubles(measured(metric, phi), expected)
    assert_same_doubles(metric.directions(phi).square().sum(2).T, expected)
    of_features = Leverage(0.01).learned_from([part[:, 0] for part in reference.split(11)], False)
    assert_same_doubles(of_features.directions(phi[:, :1]).square().sum(2)[0], expected[:, 0])


def test_fewer_rows_than_units_have_a_larger_ridge() -> None:
    torch.manual_seed(3)
    reference, phi = torch.randn(10, 1, 30).double(), torch.randn(9, 1, 30).double()
    values = measured(GradientLeverage(0.01).learned_from([reference], False), phi)[:, 0]
    assert_same_doubles(values, direct(phi[:, 0], reference[:, 0], 0.01))


def test_a_reference_row_is_left_out_for_itself() -> None:
    """Equal to leverage with the matrix of the other rows, at the ridge of all."""
    torch.manual_seed(4)
    rows = torch.randn(30, 1, 4).double()
    own = GradientLeverage(0.05).learned_from([rows], True)
    constant = rows.square().sum(2).mean().sqrt()
    h = torch.cat([rows[:, 0], constant.expand(30, 1)], 1)
    total = h.T @ h + 30 * 0.05 * (h.T @ h / 30).trace() / 5 * torch.eye(5).double()
    expected = [h[i] @ torch.linalg.inv(total - torch.outer(h[i], h[i])) @ h[i] * 29 for i in range(30)]
    assert_same_doubles(measured(own, rows, own=True)[:, 0], torch.stack(expected))
    assert own.sample is None
    sample = GradientLeverage(0.05).learned_from([rows], False).sample
    assert_same_doubles(sample[:, 0], torch.stack(expected))


def test_a_long_reference_is_sampled_evenly() -> None:
    torch.manual_seed(6)
    rows = torch.randn(5000, 1, 3).double()
    sample = GradientLeverage().learned_from(rows.split(700), False).sample
    every = measured(GradientLeverage().learned_from([rows], True), rows, own=True)
    assert 512 <= len(sample) <= 1024
    assert_same_doubles(sample, every[:: -(-5000 // len(sample))])


def test_a_fold_keeps_inner_products_on_average() -> None:
    torch.manual_seed(7)
    pairs = torch.randn(400, 2, 300).double()
    narrow = folded(pairs, 64)
    off = (narrow[:, 0] * narrow[:, 1]).sum(1) - (pairs[:, 0] * pairs[:, 1]).sum(1)
    assert abs(float(off.mean())) < 4 * float(off.std()) / 20
    assert folded(pairs, 300) is pairs


def test_rows_of_other_widths_and_single_rows_are_refused() -> None:
    with pytest.raises(DataError, match="expected at least 2 reference rows; found 1"):
        GradientLeverage().learned_from([torch.randn(1, 1, 4)], False)
    with pytest.raises(DataError, match="without sites whose width changes with the input"):
        measured(GradientLeverage().learned_from([torch.randn(5, 1, 4)], False), torch.randn(5, 1, 3))

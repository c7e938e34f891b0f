"""Leverage of mask gradients against direct computations, closed forms and gradients by factors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from benchmarks.instead.mask_gradients import Leverage, folded, largest_logit, mask_gradients
from latedrop import find_sites, linearize
from latedrop.errors import DataError
from latedrop.network.network import Network
from rounding import assert_same_doubles, assert_same_up_to_rounding


def mlp(outputs: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, outputs)).eval()


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Conv2d(2, 5, 3), nn.Conv2d(5, 4, 3)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor, factor: Tensor | None = None) -> Tensor:
        h = self.first(x).relu()
        h = self.second(h if factor is None else h * factor).relu()
        return self.last(h.mean((2, 3)))


def gradients(model: nn.Module, x: Tensor, readout: object = None) -> tuple[Tensor, Tensor]:
    parts = list(mask_gradients(Network.of(model), x, find_sites(model, x), readout))  # type: ignore[arg-type]
    return torch.cat([output for output, _ in parts]), torch.cat([phi for _, phi in parts])


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
    model, x = Cnn().eval(), torch.randn(6, 2, 9, 9)
    _, phi = gradients(model, x)
    assert phi.shape == (6, 2, 5 + 4)
    factor = torch.ones(6, 5, 1, 1, requires_grad=True)
    output = model(x, factor)
    for k in range(2):
        (expected,) = torch.autograd.grad(output[:, k].sum(), factor, retain_graph=True)
        assert_same_up_to_rounding(phi[:, k, :5], expected.flatten(1), scale=float(phi.abs().max()))


def test_the_largest_logit_is_the_one_that_is_differentiated() -> None:
    model, x = mlp(4), torch.randn(15, 3)
    logits, each = gradients(model, x)
    output, phi = gradients(model, x, largest_logit())
    assert_same_up_to_rounding(output[:, 0], logits.amax(1))
    assert_same_up_to_rounding(phi[:, 0], each[torch.arange(15), logits.argmax(1)])


def test_leverage_is_the_quadratic_form_for_every_output() -> None:
    torch.manual_seed(2)
    reference, phi = torch.randn(40, 2, 6).double(), torch.randn(9, 2, 6).double()
    metric = Leverage.fit(reference.split(11), ridge=0.01)
    expected = torch.stack([direct(phi[:, k], reference[:, k], 0.01) for k in range(2)], 1)
    assert_same_doubles(metric.values(phi), expected)
    assert_same_doubles(metric.directions(phi).square().sum(2), expected)
    assert_same_doubles(metric.dropout, reference.square().sum(2).mean(0))


def test_fewer_rows_than_units_have_a_larger_ridge() -> None:
    torch.manual_seed(3)
    reference, phi = torch.randn(10, 1, 30).double(), torch.randn(9, 1, 30).double()
    found = Leverage.fit([reference], ridge=0.01).values(phi)[:, 0]
    assert_same_doubles(found, direct(phi[:, 0], reference[:, 0], 0.01))


def test_a_reference_row_is_left_out_for_itself() -> None:
    """The same as with the matrix of the other rows, at the ridge of all."""
    torch.manual_seed(4)
    rows = torch.randn(30, 1, 4).double()
    metric = Leverage.fit([rows], ridge=0.05)
    constant = rows.square().sum(2).mean().sqrt()
    h = torch.cat([rows[:, 0], constant.expand(30, 1)], 1)
    total = h.T @ h + 30 * 0.05 * (h.T @ h / 30).trace() / 5 * torch.eye(5).double()
    expected = [h[i] @ torch.linalg.inv(total - torch.outer(h[i], h[i])) @ h[i] * 29 for i in range(30)]
    assert_same_doubles(metric.values(rows, reference=True)[:, 0], torch.stack(expected))
    assert_same_doubles(metric.sample, metric.values(rows, reference=True))


def test_the_unit_of_the_output_cancels() -> None:
    torch.manual_seed(5)
    reference, phi = torch.randn(40, 1, 6).double(), torch.randn(9, 1, 6).double()
    expected = Leverage.fit([reference]).values(phi)
    for unit in (1e-6, 1e6):
        assert_same_doubles(Leverage.fit([reference * unit]).values(phi * unit), expected)


def test_a_long_reference_is_sampled_evenly() -> None:
    torch.manual_seed(6)
    rows = torch.randn(5000, 1, 3).double()
    metric = Leverage.fit(rows.split(700))
    every = metric.values(rows, reference=True)
    assert 512 <= len(metric.sample) <= 1024
    assert_same_doubles(metric.sample, every[:: -(-5000 // len(metric.sample))])


def test_a_fold_keeps_inner_products_on_average() -> None:
    torch.manual_seed(7)
    a, b = torch.randn(300).double(), torch.randn(300).double()
    products = torch.stack([folded(a, 64, seed) @ folded(b, 64, seed) for seed in range(400)])
    error = products.std() / 20
    assert abs(float(products.mean() - a @ b)) < 4 * float(error)
    assert folded(a, 300, 0) is a


def test_many_units_are_ordered_as_without_a_fold() -> None:
    """Units of real networks are correlated: here 3000 of them follow 20 factors, and new rows leave these."""
    torch.manual_seed(8)
    loadings = torch.randn(20, 3000).double()
    reference = (torch.randn(600, 20).double() @ loadings)[:, None]
    off = torch.linspace(0, 2, 50).double()[:, None] * torch.randn(50, 3000).double()
    new = (torch.randn(50, 20).double() @ loadings + off)[:, None]
    whole = Leverage.fit([reference], widest=3000).values(new)[:, 0]
    metric = Leverage.fit([reference], widest=256)
    found = metric.values(new)[:, 0]
    assert metric.root.shape == (1, 257, 257)
    assert float(torch.corrcoef(torch.stack([whole.log(), found.log()]))[0, 1]) > 0.95


def test_many_outputs_share_the_memory() -> None:
    metric = Leverage.fit([torch.randn(30, 300, 200)])
    assert metric.root.numel() < 2**22 * 1.1
    assert metric.values(torch.randn(3, 300, 200)).shape == (3, 300)


def test_the_state_is_arrays_and_numbers() -> None:
    torch.manual_seed(9)
    metric = Leverage.fit([torch.randn(50, 2, 700)], widest=64, seed=3)
    again = Leverage.from_state(metric.state())
    phi = torch.randn(8, 2, 700)
    assert_same_doubles(again.values(phi), metric.values(phi))
    assert all(type(value).__name__ in ("ndarray", "int") for value in metric.state().values())


def test_rows_of_other_widths_and_single_rows_are_refused() -> None:
    with pytest.raises(DataError, match="expected mask gradients of 1 outputs and 4 units in every batch"):
        Leverage.fit([torch.randn(5, 1, 4), torch.randn(5, 1, 6)])
    with pytest.raises(DataError, match="expected at least 2 reference rows; found 1"):
        Leverage.fit([torch.randn(1, 1, 4)])
    with pytest.raises(DataError, match="Calibrate again with the sites"):
        Leverage.fit([torch.randn(5, 1, 4)]).values(torch.randn(5, 1, 3))

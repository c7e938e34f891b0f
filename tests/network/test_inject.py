import pytest
import torch
from torch import Tensor, nn

from latedrop import LatedropWarning, find_sites, inject, sample
from latedrop.errors import ArgumentError, SiteError
from latedrop.network.network import Network
from rounding import assert_same_up_to_rounding
from zoo import mlp


def test_each_pass_is_the_next_draw_unless_fixed() -> None:
    model, x = mlp(), torch.randn(4, 5)
    sites = find_sites(model, x)
    with torch.no_grad():
        with inject(model, sites, 0.3) as injection:
            first, second = model(x), model(x)
            injection.draw = 0
            again = model(x)
        with inject(model, sites, 0.3, draw=1):
            fixed = [model(x[:2]), model(x[2:])]
    assert not torch.equal(first, second)
    assert torch.equal(first, again)  # the same call on the same batch
    assert_same_up_to_rounding(torch.cat(fixed), second)


def test_a_mapping_sets_rates_apart() -> None:
    model, x = mlp(), torch.randn(4, 5)
    sites = find_sites(model, x)
    only = sample(model, x, {"4": 0.3}, 10, sites=sites)
    alone = sample(model, x, 0.3, 10, sites=find_sites(model, x, select="4"))
    assert_same_up_to_rounding(only.mean, alone.mean)
    with pytest.raises(ArgumentError, match="matches none"), inject(model, sites, {"head": 0.1}):
        pass


def test_gradients_flow_where_the_caller_wants_them() -> None:
    model, x = mlp(), torch.randn(4, 5)
    with inject(model, find_sites(model, x), 0.3):
        model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_foreign_sites_are_errors_and_silent_ones_are_warned_about() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 1)
            self.direct = False

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return h @ self.second.weight.T if self.direct else self.second(h)

    model, x = Branch(), torch.randn(4, 3)
    sites = find_sites(model, x)
    model.direct = True
    network = Network(model)
    with pytest.warns(LatedropWarning, match=r"the sites \['second'\] did not run in this batch"):
        assert not bool(sample(network, x, 0.1, 5, sites=sites).variance.any())
    sample(network, x, 0.1, 5, sites=sites)  # once is enough: warnings are errors here
    with pytest.raises(SiteError, match="not among its modules"):
        sample(mlp(), torch.randn(4, 5), 0.1, 5, sites=sites)
    assert not model._forward_hooks
    assert not model.second._forward_pre_hooks


def test_seed_must_be_an_integer() -> None:
    model, x = mlp(), torch.randn(4, 5)
    with pytest.raises(ArgumentError, match="expected seed to be a whole number"):
        sample(model, x, 0.1, 5, seed=0.5)

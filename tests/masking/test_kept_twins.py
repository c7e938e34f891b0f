"""Twins that are kept between predictions: whatever is changed on the model in between counts as it would without."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from latedrop.dropout.thinning import IDLE
from latedrop.masking import twins
from torch import Tensor, nn

from latedrop import Site, find_sites, inject, linearize, sample


class Own(nn.Module):
    """A network with code of its own, an attribute that it reads, and one that it writes where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.act, self.writes = 1.0, F.relu, False
        self.first, self.norm, self.last = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            self.gain = self.gain * 2
        return self.last(self.act(self.norm(self.first(x)))) * self.gain


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))


MODELS: dict[str, Callable[[], nn.Module]] = {"own": Own, "sequential": sequential}
LAST = {"own": "last", "sequential": "4"}
Found = tuple[Tensor, Tensor]


def by_draws(model: nn.Module, x: Tensor, sites: list[Site]) -> Found:
    found = sample(model, x, 0.3, 20, sites=sites)
    return found.mean, found.variance


def to_first_order(model: nn.Module, x: Tensor, sites: list[Site]) -> Found:
    found = linearize(model, x, sites)
    return found.mean, found.variance_by_site


WAYS = {"draws": by_draws, "first order": to_first_order}


def last(model: nn.Module) -> Any:
    return list(model.modules())[-1]


def weights_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        last(model).weight.mul_(3)


def weights_behind_torchs_back(model: nn.Module) -> None:
    last(model).weight.data = last(model).weight.data * 3


def another_weight(model: nn.Module) -> None:
    last(model).weight = nn.Parameter(torch.full((1, 8), 0.7))


def an_equal_weight_that_then_changes(model: nn.Module) -> None:
    last(model).bias = nn.Parameter(last(model).bias.detach().clone())
    with torch.no_grad():
        last(model).bias.add_(1)


def another_layer(model: nn.Module) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        setattr(model, LAST["own" if isinstance(model, Own) else "sequential"], nn.Linear(8, 1))


def training(model: nn.Module) -> None:
    model.train()


def statistics(model: nn.Module) -> None:
    next(m for m in model.modules() if isinstance(m, nn.BatchNorm1d)).running_mean.add_(1)


def other_statistics(model: nn.Module) -> None:
    next(m for m in model.modules() if isinstance(m, nn.BatchNorm1d)).running_var = torch.full((8,), 4.0)


def a_hook(model: nn.Module) -> None:
    last(model).register_forward_hook(lambda module, args, output: output * 2)


def a_hook_before(model: nn.Module) -> None:
    last(model).register_forward_pre_hook(lambda module, args: (args[0] + 1,))


def own_forward(model: nn.Module) -> None:
    layer = last(model)
    layer.forward = lambda h: F.linear(h, layer.weight * 2, layer.bias)


def double(model: nn.Module) -> None:
    model.double()


def gradients(model: nn.Module) -> None:
    model.requires_grad_(False)


class Twice(nn.Linear):
    def forward(self, h: Tensor) -> Tensor:
        return 2 * super().forward(h)


def another_class(model: nn.Module) -> None:
    last(model).__class__ = Twice


def parametrized(model: nn.Module) -> None:
    layer = last(model)
    nn.utils.parametrizations.weight_norm(layer)
    with torch.no_grad():
        layer.parametrizations.weight.original0.mul_(2)


CHANGES = [
    weights_in_place,
    weights_behind_torchs_back,
    another_weight,
    an_equal_weight_that_then_changes,
    another_layer,
    training,
    statistics,
    other_statistics,
    a_hook,
    a_hook_before,
    own_forward,
    double,
    gradients,
    another_class,
    parametrized,
]


def made(name: str) -> tuple[nn.Module, Tensor, list[Site]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, x = MODELS[name]().eval(), torch.randn(4, 3)
    return model, x, list(find_sites(model, x))


def kept(model: nn.Module) -> int:
    return sum(map(len, twins._KEPT.get(model, {}).values()))


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_what_changes_between_predictions_is_noticed(name: str, way: str, change: Callable[[nn.Module], None]) -> None:
    model, x, sites = made(name)
    fresh = deepcopy(model)
    for _ in range(3):
        before = WAYS[way](model, x, sites)
    assert kept(model) == 1
    change(fresh)
    change(model)
    x = x.to(next(model.parameters()).dtype)
    found, expected = WAYS[way](model, x, sites), WAYS[way](fresh, x, sites)
    assert all(map(torch.equal, found, expected))
    if change not in (training, gradients, double):
        assert not torch.equal(found[0], before[0])


@pytest.mark.parametrize("way", WAYS)
def test_what_a_model_reads_and_writes_is_its_own(way: str) -> None:
    model, x, sites = made("own")
    once = WAYS[way](model, x, sites)
    WAYS[way](model, x, sites)
    model.gain = 3.0
    assert torch.allclose(WAYS[way](model, x, sites)[0], 3 * once[0])
    model.gain, model.writes = 1.0, True
    for _ in range(3):
        assert torch.allclose(WAYS[way](model, x, sites)[0], 2 * once[0])  # what a pass writes goes with its twin
    assert model.gain == 1.0
    assert kept(model) == 0


def test_a_twin_is_used_again_and_holds_nothing_of_the_pass() -> None:
    model, x, sites = made("sequential")
    by_draws(model, x, sites)
    by_draws(model, x, sites)
    (pool,) = twins._KEPT[model].values()
    (twin,) = pool
    by_draws(model, 2 * x, sites)
    assert pool == [twin]
    assert twin.thinning.thinner is IDLE


def test_a_twin_goes_where_a_pass_fails() -> None:
    model, x, sites = made("sequential")
    for _ in range(2):
        by_draws(model, x, sites)
    with pytest.raises(RuntimeError):
        sample(model, x[:, :2], 0.3, 20, sites=sites, engine="rows")
    assert kept(model) == 0
    assert by_draws(model, x, sites)[0].isfinite().all()


def test_kept_twins_do_not_keep_the_model() -> None:
    model, x, sites = made("own")
    for way in WAYS.values():
        way(model, x, sites)
        way(model, x, sites)
    gone = weakref.ref(model)
    weight = weakref.ref(model.last.weight)
    del model
    assert gone() is None
    gc.collect()
    assert weight() is None


def test_twins_kept_for_several_choices_of_sites_are_few() -> None:
    model, x, _ = made("sequential")
    for _ in range(20):
        sample(model, x, 0.3, 20)  # which finds the sites anew
    assert kept(model) <= twins._MOST


def test_a_model_with_injected_dropout_is_predicted_as_it_is() -> None:
    model, x, sites = made("sequential")
    expected = by_draws(model, x, sites)
    by_draws(model, x, sites)
    with inject(model, sites, 0.5):
        assert all(map(torch.equal, by_draws(model, x, sites), expected))
    assert all(map(torch.equal, by_draws(model, x, sites), expected))


@pytest.mark.parametrize("way", WAYS)
def test_large_and_odd_networks_are_not_kept(way: str) -> None:
    for model in (
        nn.Sequential(nn.Linear(3, 2**19), nn.ReLU(), nn.Linear(2**19, 1)),
        nn.Sequential(*[nn.Linear(3, 3) for _ in range(70)]),
    ):
        x = torch.randn(2, 3)
        sites = list(find_sites(model, x))[-1:]
        for _ in range(2):
            WAYS[way](model, x, sites)
        assert kept(model) == 0

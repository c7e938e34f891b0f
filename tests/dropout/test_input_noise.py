"""Noise of the inputs, carried through the layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from latedrop import propagate
from latedrop.errors import ArgumentError
from rounding import assert_same_up_to_rounding


def test_a_linear_layer_is_exact() -> None:
    layer, x = nn.Linear(3, 5).eval(), torch.randn(4, 3)
    std = torch.tensor([0.1, 0.5, 0.0])
    found = propagate(layer, x, 0.0, sites=[], input_std=std)
    assert_same_up_to_rounding(found.variance, (layer.weight * std).square().sum(1).expand(4, 5).detach())
    assert_same_up_to_rounding(found.mean, layer(x).detach())


def test_it_is_near_noisy_passes_and_adds_to_dropout() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 60), nn.ReLU(), nn.Linear(60, 1)).eval()
    x = torch.randn(5, 6)
    with torch.no_grad():
        drawn = torch.stack([model(x + 0.2 * torch.randn_like(x)) for _ in range(4000)]).var(0)
    alone = propagate(model, x, 0.0, input_std=0.2)
    assert 0.3 < float((alone.variance / drawn).median()) < 3  # units of a layer are taken as independent
    dropped, both = propagate(model, x, 0.1), propagate(model, x, 0.1, input_std=0.2)
    assert bool((both.variance > dropped.variance).all())
    assert bool((both.variance > alone.variance).all())


@pytest.mark.parametrize(("std", "message"), [(-1.0, "at least 0"), (torch.ones(4), "broadcast with inputs")])
def test_other_sizes_are_refused(std: object, message: str) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1)).eval()
    with pytest.raises(ArgumentError, match=message):
        propagate(model, torch.randn(2, 3), 0.1, input_std=std)  # type: ignore[arg-type]

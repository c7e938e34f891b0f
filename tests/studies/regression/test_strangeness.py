"""Leverage and neighbours are those of `latedrop.terms`."""

import torch
from torch import nn

from latedrop.network.find_sites import find_sites
from latedrop.terms.features import Features
from latedrop.terms.leverage import Leverage
from latedrop.terms.neighbours import Neighbours
from latedrop.terms.term import Rows
from studies.regression.methods import leverage, neighbours, network


def test_they_are_the_library_terms() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 1)).double()
    member = [(layer.weight.T.detach(), layer.bias.detach()) for layer in net[::2]]
    x = {"train": torch.randn(60, 3).double(), "shifted": 2 + torch.randn(20, 3).double()}
    sites = find_sites(net, x["train"][:5])
    rows = {part: Rows(net, values, sites, None, Features.all(sites)) for part, values in x.items()}
    found = network(member, x, {part: values[:, 0] for part, values in x.items()})
    for ours, theirs in ((leverage, Leverage()), (neighbours, Neighbours())):
        wanted = theirs.learned_from([rows["train"].features], False).values(rows["shifted"])
        moments = ours(found)
        assert set(moments) == {"shifted"}
        mean, variance = moments["shifted"]
        torch.testing.assert_close(mean, net(x["shifted"])[:, 0].detach())
        torch.testing.assert_close(variance, wanted.double(), rtol=1e-4, atol=1e-6)

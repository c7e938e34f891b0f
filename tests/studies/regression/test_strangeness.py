"""Neighbours are those of `latedrop.terms`; leverage is too, with a constant of 1 beside the features."""

import torch
from torch import nn

from latedrop import Network
from latedrop.network.find_sites import find_sites
from latedrop.terms.features import Features
from latedrop.terms.leverage import Neighbours
from latedrop.terms.term import BatchContext
from rounding import assert_same_up_to_rounding
from studies.regression.methods import leverage, neighbours, network


def test_they_are_the_library_terms() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 1)).double()
    member = [(layer.weight.T.detach(), layer.bias.detach()) for layer in net[::2]]
    x = {"train": torch.randn(60, 3).double(), "shifted": 2 + torch.randn(20, 3).double()}
    sites = find_sites(net, x["train"][:5])
    rows = {part: BatchContext(Network(net), values, sites, None, Features.all(sites)) for part, values in x.items()}
    model = network(member, x, {part: values[:, 0] for part, values in x.items()})
    h, new = (torch.cat([part.features, torch.ones(len(part.features), 1)], 1) for part in rows.values())
    gram = h.T @ h / len(h)
    gram = gram + 1e-3 * gram.trace() / len(gram) * torch.eye(len(gram))
    of_rows = (new * torch.linalg.solve(gram, new.T).T).sum(1)
    nearest = Neighbours().learned_from([rows["train"].features], False).values(rows["shifted"])
    for ours, wanted in ((leverage, of_rows), (neighbours, nearest)):
        moments = ours(model)
        assert set(moments) == {"shifted"}
        mean, variance = moments["shifted"]
        torch.testing.assert_close(mean, net(x["shifted"])[:, 0].detach())
        assert_same_up_to_rounding(variance, wanted.double())

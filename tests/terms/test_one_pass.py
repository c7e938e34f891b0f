"""First order and features are taken in one pass of the network, and each is what it is alone."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import latedrop
from latedrop import find_sites
from latedrop.network.network import Network
from latedrop.network.sites import Sites
from latedrop.terms.features import Features
from latedrop.terms.term import BatchContext
from networks import Net, noisy
from rounding import assert_same_up_to_rounding

RUNS: list[int] = []
"""Rows of each pass of `Counting`; what a network writes into itself is thrown away."""


def counting(again: bool = False) -> Net:
    """Note how often it runs; the middle layer may run once more in the backward pass."""

    def run(net: Net, x: Tensor) -> Tensor:
        def middle(h: Tensor) -> Tensor:
            return net.middle(h).relu()

        RUNS.append(len(x))
        h = net.first(x).relu()
        return net.last(checkpoint(middle, h, use_reentrant=False) if again else middle(h))

    torch.manual_seed(0)
    return Net(run, first=nn.Linear(4, 16), middle=nn.Linear(16, 16), last=nn.Linear(16, 1))


def packed() -> Net:
    """Sequences of different lengths, packed."""

    def run(net: Net, x: Tensor) -> Tensor:
        lengths = x.shape[1] - (x[:, 0, 0] > 0).long()
        rows = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        _, (h, _) = net.lstm(rows)
        return net.head(h[-1])

    return Net(run, lstm=nn.LSTM(3, 8, batch_first=True), head=nn.Linear(8, 1))


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))


NETWORKS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "plain": (counting, (4,)),
    "checkpointed": (lambda: counting(again=True), (4,)),
    "packed": (packed, (5, 3)),
    "convolutions, two outputs": (convolutions, (1, 6, 6)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_both_are_what_they_are_alone(name: str) -> None:
    make, shape = NETWORKS[name]
    model, x = make().eval(), torch.randn(6, *shape, generator=torch.Generator().manual_seed(1))
    sites = Sites(find_sites(model, x))
    wanted = Features.all(sites)
    rows = BatchContext(Network.of(model), x, sites, None, wanted)
    first = latedrop.linearize(model, x, sites)
    assert_same_up_to_rounding(rows.linear.variance_by_site, first.variance_by_site)
    assert_same_up_to_rounding(rows.linear.mean, first.mean)
    rows.x = None  # what follows needs no other pass
    assert_same_up_to_rounding(rows.features, wanted.of(Network(model), x, sites)[0])


def test_a_prediction_runs_the_network_once() -> None:
    model = counting()
    x = torch.randn(300, 4, generator=torch.Generator().manual_seed(1))
    y = x.sum(1, keepdim=True)
    terms = latedrop.Terms(["dropout", "leverage"])
    uq = latedrop.calibrate(model, (x[:200], y[:200]), method=terms, reference=x[200:])
    RUNS.clear()
    prediction = uq.predict(x[:7])
    assert prediction.novelty is not None
    assert RUNS == [7]


def test_calibrating_runs_each_batch_once() -> None:
    net = counting()
    x, y = noisy(net, 1024, noise=0.1, inputs=4)
    RUNS.clear()
    latedrop.calibrate(net, (x, y), reference=x + 0.01, progress=False)
    # Four batches each of validation and reference rows; two passes more of the first tell which features can be had.
    assert RUNS.count(256) == 4 + 4 + 2

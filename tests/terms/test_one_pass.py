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
from rounding import assert_same_up_to_rounding

RUNS: list[int] = []
"""Rows of each pass of `Counting`; what a network writes into itself is thrown away."""


class Counting(nn.Module):
    """Says how often it ran; the middle layer may run once more in the backward pass."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(16, 1)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        RUNS.append(len(x))
        h = self.first(x).relu()
        h = checkpoint(self._middle, h, use_reentrant=False) if self.again else self._middle(h)
        return self.last(h)

    def _middle(self, h: Tensor) -> Tensor:
        return self.middle(h).relu()


class Packed(nn.Module):
    """Sequences of different lengths, packed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.head = nn.LSTM(3, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        lengths = x.shape[1] - (x[:, 0, 0] > 0).long()
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        _, (h, _) = self.lstm(packed)
        return self.head(h[-1])


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))


NETWORKS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "plain": (Counting, (4,)),
    "checkpointed": (lambda: Counting(again=True), (4,)),
    "packed": (Packed, (5, 3)),
    "convolutions, two outputs": (convolutions, (1, 6, 6)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_both_are_what_they_are_alone(name: str) -> None:
    make, shape = NETWORKS[name]
    model, x = make().eval(), torch.randn(6, *shape, generator=torch.Generator().manual_seed(1))
    sites = Sites(find_sites(model, x))
    wanted = Features.all(sites)
    assert wanted is not None
    rows = BatchContext(Network.of(model), x, sites, None, wanted)
    first = latedrop.linearize(model, x, sites)
    assert_same_up_to_rounding(rows.linear.variance_by_site, first.variance_by_site)
    assert_same_up_to_rounding(rows.linear.mean, first.mean)
    rows.x = None  # what follows needs no other pass
    assert_same_up_to_rounding(rows.features, wanted.of(Network(model), x, sites)[0])


def test_a_prediction_runs_the_network_once() -> None:
    model = Counting().eval()
    x = torch.randn(300, 4, generator=torch.Generator().manual_seed(1))
    y = x.sum(1, keepdim=True)
    uq = latedrop.calibrate(
        model, (x[:200], y[:200]), method=latedrop.Terms(["dropout", "leverage"]), reference=x[200:]
    )
    RUNS.clear()
    prediction = uq.predict(x[:7])
    assert prediction.novelty is not None
    assert RUNS == [7]


def test_calibrating_runs_each_batch_once() -> None:
    x = torch.randn(1024, 4, generator=torch.Generator().manual_seed(0))
    net = Counting()
    noise = 0.1 * torch.randn(1024, 1, generator=torch.Generator().manual_seed(1))
    y = net(x).detach() + noise
    RUNS.clear()
    latedrop.calibrate(net, (x, y), reference=x + 0.01, progress=False)
    # Four batches each of validation and reference rows; two passes more of the first tell which features can be had.
    assert RUNS.count(256) == 4 + 4 + 2

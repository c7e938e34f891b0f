"""Recurrent layers over many draws at once give what they give one draw after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from latedrop import find_sites, sample


class Forecaster(nn.Module):
    def __init__(self, layer: type[nn.RNNBase], batch_first: bool, state: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 6), nn.Linear(6, 6)
        self.rnn = layer(6, 5, num_layers=2, bidirectional=True, batch_first=batch_first)
        self.head, self.batch_first, self.state = nn.Linear(10, 1), batch_first, state

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(self.first(x if self.batch_first else x.transpose(0, 1)))
        start = torch.zeros(4, len(x), 5)
        if self.state == "masked":
            start = start + h.mean((1 if self.batch_first else 0, 2))[:, None] * torch.arange(5)
        given: Any = {"none": None, "plain": start, "masked": start}[self.state]
        if given is not None and isinstance(self.rnn, nn.LSTM):
            given = (given, given + 1)
        out, last = self.rnn(h, given)
        last = last[0] if isinstance(last, tuple) else last
        return self.head(out[:, -1] if self.batch_first else out[-1]) + last.sum((0, 2))[:, None]


@pytest.mark.parametrize("state", ["none", "plain", "masked"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_vectorised_equals_loop(layer: type[nn.RNNBase], batch_first: bool, state: str) -> None:
    model, x = Forecaster(layer, batch_first, state), torch.randn(4, 7, 3)
    sites = find_sites(model, x)
    assert [site.name for site in sites] == ["second", "rnn", "head"]
    loop = sample(model, x, 0.2, 9, sites=sites, engine="loop", keep_draws=True)
    fast = sample(model, x, 0.2, 9, sites=sites, engine="vmap", chunk=4, keep_draws=True)
    torch.testing.assert_close(fast.outputs, loop.outputs)
    assert float(loop.variance.min()) > 0


def test_the_layer_is_called_once_for_all_draws() -> None:
    model, x = Forecaster(nn.LSTM, True, "none"), torch.randn(4, 7, 3)
    sites = find_sites(model, x)
    calls = []
    model.rnn.register_forward_hook(lambda *_: calls.append(1))
    sample(model, x, 0.2, 50, sites=sites)
    assert len(calls) == 1
    assert "forward" not in model.rnn.__dict__


def test_a_layer_with_a_forward_of_its_own_is_left_alone() -> None:
    class Last(nn.LSTM):
        def forward(self, x: Tensor, *, scale: float = 2.0) -> Tensor:  # type: ignore[override]
            return scale * super().forward(x)[0][:, -1]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 6), Last(6, 5, batch_first=True), nn.Linear(5, 1))
    x = torch.randn(4, 7, 3)
    sites = find_sites(model, x)
    moments = sample(model, x, 0.2, 5, sites=sites)
    torch.testing.assert_close(moments.variance, sample(model, x, 0.2, 5, sites=sites, engine="loop").variance)

"""Draws that are rows of one batch give what they give one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from counting import Runs
from latedrop import Network, find_sites, sample
from networks import Net
from rounding import assert_same_up_to_rounding

pytestmark = [
    pytest.mark.filterwarnings("ignore:the draws of this model run one by one"),
    pytest.mark.filterwarnings("ignore:expected examples that do not depend on each other"),  # batch statistics
]


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
    fast = sample(model, x, 0.2, 9, sites=sites, engine="rows", chunk=4, keep_draws=True)
    assert_same_up_to_rounding(fast.outputs, loop.outputs)
    assert float(loop.variance.min()) > 0


def test_the_layer_is_called_once_for_all_draws() -> None:
    model, x = Forecaster(nn.LSTM, True, "none"), torch.randn(4, 7, 3)
    sites, calls = find_sites(model, x), []
    model.rnn.register_forward_hook(lambda *_: calls.append(1))
    network = Network(model)
    sample(network, x, 0.2, 50, sites=sites)  # the first of its kind checks that draws can be rows
    calls.clear()
    sample(network, x, 0.2, 50, sites=sites)
    assert len(calls) == 1
    assert "forward" not in model.rnn.__dict__


def agree(model: nn.Module, x: Tensor, **options: Any) -> None:
    """Draws at once are draws one by one."""
    sites = find_sites(model, x, **options)
    loop = sample(model, x, 0.2, 7, sites=sites, engine="loop", keep_draws=True)
    fast = sample(model, x, 0.2, 7, sites=sites, chunk=4, keep_draws=True)
    assert_same_up_to_rounding(fast.outputs, loop.outputs)
    assert float(loop.variance.max()) > 0


def test_linear_layers_are_one_operator() -> None:
    model, x = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 1)), torch.randn(16, 5)
    sites, network = find_sites(model, x), Network(model)
    sample(network, x, 0.2, 50, sites=sites)
    with Runs(model) as runs:
        sample(network, x, 0.2, 50, sites=sites)
    assert runs.operators["addmm"] == 3
    assert not any(name in runs.operators for name in ("mm", "bmm"))


def before(use: Callable[[Any, Tensor], Tensor]) -> Net:
    """Something functional before the first site, which is the second layer, and something that uses it after."""
    torch.manual_seed(0)
    layers = {"first": nn.Linear(5, 6), "second": nn.Linear(6, 6), "head": nn.Linear(6, 1)}
    return Net(lambda net, x: net.head(use(net, x)), **layers, factor=torch.arange(1.0, 7))


def added(net: Any, x: Tensor) -> Tensor:
    h = net.first(x).tanh()
    return net.second(h) + h * net.factor


def added_in_place(net: Any, x: Tensor) -> Tensor:
    h = net.first(x).tanh_()
    out = net.second(h)
    out += h
    return out


def joined(net: Any, x: Tensor) -> Tensor:
    h = F.gelu(net.first(x))
    return torch.cat([net.second(h)[:, :3], h[:, 3:]], 1)


def time_first(net: Any, x: Tensor) -> Tensor:
    h = net.first(x)[:, None].repeat(1, 4, 1).transpose(0, 1).sin()
    return (net.second(h) + h).mean(0)


def filled(net: Any, x: Tensor) -> Tensor:
    h = net.first(x).tanh()
    out = torch.zeros(len(net.second(h)), 6)
    out[:, :3] += net.second(h)[:, :3]
    out[:, 3:] = h[:, 3:]
    return out


def counted(net: Any, x: Tensor) -> Tensor:
    rows = len(x)
    h = net.second(net.first(x).tanh())
    return h.view(rows, 2, 3).flip(1).reshape(rows, 6)


def typed(net: Any, x: Tensor) -> Tensor:
    h = net.first(x).tanh()
    return net.second(h) @ net.second.weight.type_as(x) + h


@pytest.mark.parametrize("use", [added, added_in_place, joined, time_first, filled, counted, typed])
@pytest.mark.parametrize("rows", [1, 3, 6])
def test_what_was_computed_before_a_site_is_used_after_it(use: Callable[[Any, Tensor], Tensor], rows: int) -> None:
    agree(before(use), torch.randn(rows, 5), select=["second", "head"])


@pytest.mark.parametrize("use", [added, added_in_place, joined, time_first])
@pytest.mark.parametrize("chunk", [None, 10])
def test_functions_before_the_first_site_run_once(use: Callable[[Any, Tensor], Tensor], chunk: int | None) -> None:
    model, x = before(use), torch.randn(40, 5)
    sites, network = find_sites(model, x), Network(model)
    sample(network, x, 0.2, 50, sites=sites, chunk=chunk)
    seen: list[tuple[str, int]] = []

    class Counting(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(func, "__name__", "") in ("tanh", "tanh_", "gelu", "sin"):
                seen.append((func.__name__, args[0].numel()))
            return func(*args, **(kwargs or {}))

    with Counting():
        sample(network, x, 0.2, 50, sites=sites, chunk=chunk)
    assert len(seen) == 1
    assert seen[0][1] in (40 * 6, 4 * 40 * 6)


def test_what_runs_once_is_not_held_where_no_pass_follows() -> None:
    alive: list[bool] = []

    def noting(net: Any, x: Tensor) -> Tensor:
        h = net.first(x)
        first = ref(h)
        h = h.tanh()
        alive.append(first() is not None)
        return net.second(h)

    model, x = before(noting), torch.randn(40, 5)
    sites, network = find_sites(model, x), Network(model)
    for chunk, held_out in ((50, False), (10, True)):
        sample(network, x, 0.2, 50, sites=sites, chunk=chunk)
        alive.clear()
        sample(network, x, 0.2, 50, sites=sites, chunk=chunk)
        assert set(alive) == {held_out}

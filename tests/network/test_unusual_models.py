"""Models that are written in unusual ways, and run like any other; or are refused in words."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from latedrop import calibrate, find_sites, inject, linearize, propagate, sample
from latedrop.dropout.sampling import own_output
from latedrop.errors import DataError, SiteError

pytestmark = [
    pytest.mark.filterwarnings("ignore:the draws of this model run one by one"),
    pytest.mark.filterwarnings("ignore:expected examples that do not depend on each other"),
]

TINY = 1e-9  # a rate that is as good as none


ENGINES = pytest.mark.parametrize("engine", ["auto", "loop"])


def net(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(widths[0], 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


def drawn(model: nn.Module, x: Any, sites: Any, rate: Any, draws: int) -> Tensor:
    """One pass after the other, as the user would."""
    outputs = []
    with torch.no_grad():
        for draw in range(draws):
            with inject(model, sites, rate, draw=draw):
                outputs.append(model(x))
    return torch.stack(outputs)


class WritesIntoInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net(8)

    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return self.net(x)


class WritesIntoHidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h.masked_fill_(h < 0, 0.5)
        return self.c(self.b(h).relu())


@ENGINES
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("make", [WritesIntoInput, WritesIntoHidden])
def test_draws_are_those_of_inject(make: type[nn.Module], rows: int, engine: Any) -> None:
    model, rate = make(), 0.3
    x = torch.randn((rows, 8), generator=torch.Generator().manual_seed(1))
    before, sites = x.clone(), find_sites(model, x)
    expected = drawn(model, x.clone(), sites, rate, 20) if make is not WritesIntoInput else None
    for chunk in (None, 5):
        moments = sample(model, x, rate, 20, sites=sites, engine=engine, chunk=chunk, keep_draws=True)
        assert torch.equal(x, before)
        if expected is not None:
            torch.testing.assert_close(moments.outputs, expected)
    linearize(model, x, sites)
    own_output(model, x)
    assert torch.equal(x, before)
    if expected is None:
        torch.testing.assert_close(sample(model, x, TINY, 5, sites=sites).mean, model(x.clone()).detach())


def test_rows_of_a_prediction_are_let_go() -> None:
    model, x = nn.Sequential(nn.Linear(8, 4000), nn.Linear(4000, 8), nn.ReLU(), nn.Linear(8, 1)), torch.randn(50, 8)
    sites = find_sites(model, x)
    gc.disable()
    try:
        for _ in range(3):
            sample(model, x, 0.3, 6, sites=sites, chunk=2)
        alive = sum(type(o) is Tensor and o.shape == (50, 4000) for o in gc.get_objects())
    finally:
        gc.enable()
    assert alive == 0


class Net(nn.Module):
    """Three layers, with something of a test's own between the first two."""

    def __init__(self, middle: Callable[[Net, Tensor, Tensor], Tensor] = lambda net, h, x: net.m(h)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.m, self.b = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.middle(self, self.a(x).relu(), x).relu())


def rows(count: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, generator=generator) * (0.2 + 3 * torch.rand(count, 1, generator=generator))


class Compiled(Net):
    @torch.compile(backend="eager")
    def block(self, h: Tensor) -> Tensor:
        return self.m(h).relu()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not")
@pytest.mark.parametrize("how", ["method", "attribute"])
def test_methods_that_are_compiled(how: str) -> None:
    model: Any = Compiled(lambda net, h, x: net.block(h) if how == "method" else net.fast(h))
    model.fast = torch.compile(lambda h: model.m(h).relu(), backend="eager")
    x = rows(12)
    by_rows, one_by_one = (sample(model.eval(), x, 0.2, 5, engine=engine) for engine in ("auto", "loop"))
    torch.testing.assert_close(by_rows.mean, one_by_one.mean)
    torch.testing.assert_close(sample(model, x, 0.0, 2).mean, model(x).detach())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ["element", "channel"])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=["strided", "jagged"])
def test_nested_tensors_are_refused(layout: Any, kind: Any) -> None:
    class Nested(Net):
        def forward(self, x: Tensor) -> Tensor:
            parts = [row[: 1 + i % 3] for i, row in enumerate(x)]
            nested = torch.nested.as_nested_tensor(parts, layout=layout)
            return self.b(torch.nested.to_padded_tensor(self.m(self.a(nested).tanh()), 0.0).sum(1))

    with pytest.raises(SiteError, match="'m'; found a nested one"):
        find_sites(Nested().eval(), torch.randn(12, 4, 3), kind=kind)


class TwoRanks(nn.Module):
    """One projection of the pooled tokens and of all of them."""

    def __init__(self, tokens_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens_first = tokens_first
        self.e, self.m, self.h = nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.e(x).tanh()
        if self.tokens_first:
            k, q = self.m(h), self.m(h.mean(1))
        else:
            q, k = self.m(h.mean(1)), self.m(h)
        actual: Tensor = self.h((q[:, None] * k).tanh().mean(1))
        return actual


@pytest.mark.parametrize("tokens_first", [True, False])
def test_a_layer_that_gets_more_axes_in_one_of_its_calls(tokens_first: bool) -> None:
    model, x = TwoRanks(tokens_first), torch.randn(40, 5, 3)
    sites = find_sites(model, x, kind="channel")
    alone = torch.cat([linearize(model, x[i : i + 1], sites).variance(0.1) for i in range(5)])
    for count in (5, 8):  # as many rows as tokens, and others
        torch.testing.assert_close(linearize(model, x[:count], sites).variance(0.1)[:5], alone)
    drawn = sample(model, x[:5], 0.001, 20_000, sites=sites).variance / 0.001
    torch.testing.assert_close(drawn, linearize(model, x[:5], sites).variance(0.001) / 0.001, rtol=0.15, atol=1e-3)
    uq = calibrate(model, (x, torch.randn(40, 1)), progress=False)
    assert bool(uq.predict(x).std.isfinite().all())


@pytest.mark.parametrize("run", [sample, propagate, linearize])
def test_no_rows(run: Any) -> None:
    model, x = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 1)), torch.randn(0, 3)
    sites = find_sites(model, torch.randn(3, 3))
    options = {} if run is linearize else {"rate": 0.1}
    with pytest.raises(DataError, match="expected inputs with at least one row"):
        run(model, x, sites=sites, **options)
    with inject(model, sites, 0.1):
        assert model(x).shape == (0, 1)


def test_a_model_that_remembers_earlier_batches_is_refused() -> None:
    """Its rows meet those of the batch before, of which there are more or fewer."""

    def remembered(net: Any, h: Tensor, x: Tensor) -> Tensor:
        net.past = h if net.past is None else net.past + h
        actual: Tensor = net.m(net.past)
        return actual

    model: Any = Net(remembered)
    model.past = None
    with pytest.raises(DataError, match="expected the model to run on the example inputs; it raised RuntimeError"):
        find_sites(model, rows(12))

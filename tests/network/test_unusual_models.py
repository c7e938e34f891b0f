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
from networks import Net

pytestmark = [
    pytest.mark.filterwarnings("ignore:the draws of this model run one by one"),
    pytest.mark.filterwarnings("ignore:expected examples that do not depend on each other"),
]


def drawn(model: nn.Module, x: Any, sites: Any, rate: Any, draws: int) -> Tensor:
    """One pass after the other, as the user would."""
    outputs = []
    with torch.no_grad():
        for draw in range(draws):
            with inject(model, sites, rate, draw=draw):
                outputs.append(model(x))
    return torch.stack(outputs)


def writes_into_input(net: Net, x: Tensor) -> Tensor:
    x += 1
    return net.c(net.b(net.a(x)).relu())


def writes_into_hidden(net: Net, x: Tensor) -> Tensor:
    h = net.a(x)
    h.masked_fill_(h < 0, 0.5)
    return net.c(net.b(h).relu())


@pytest.mark.parametrize("engine", ["auto", "loop"])
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("run", [writes_into_input, writes_into_hidden])
def test_draws_are_those_of_inject(run: Callable[..., Tensor], rows: int, engine: Any) -> None:
    model, rate = Net(run, a=nn.Linear(8, 16), b=nn.Linear(16, 16), c=nn.Linear(16, 1)), 0.3
    x = torch.randn((rows, 8), generator=torch.Generator().manual_seed(1))
    before, sites = x.clone(), find_sites(model, x)
    expected = drawn(model, x.clone(), sites, rate, 20) if run is writes_into_hidden else None
    for chunk in (None, 5):
        moments = sample(model, x, rate, 20, sites=sites, engine=engine, chunk=chunk, keep_draws=True)
        assert torch.equal(x, before)
        if expected is not None:
            torch.testing.assert_close(moments.outputs, expected)
    linearize(model, x, sites)
    own_output(model, x)
    assert torch.equal(x, before)
    if expected is None:
        torch.testing.assert_close(sample(model, x, 1e-9, 5, sites=sites).mean, model(x.clone()).detach())


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


def layers() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {"a": nn.Linear(3, 8), "m": nn.Linear(8, 8), "b": nn.Linear(8, 1)}


class Compiled(Net):
    @torch.compile(backend="eager")
    def block(self, h: Tensor) -> Tensor:
        return self.m(h).relu()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not")
@pytest.mark.parametrize("how", ["method", "attribute"])
def test_methods_that_are_compiled(how: str) -> None:
    def run(net: Any, x: Tensor) -> Tensor:
        return net.b((net.block if how == "method" else net.fast)(net.a(x).relu()))

    model: Any = Compiled(run, **layers())
    model.fast = torch.compile(lambda h: model.m(h).relu(), backend="eager")
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
    by_rows, one_by_one = (sample(model.eval(), x, 0.2, 5, engine=engine) for engine in ("auto", "loop"))
    torch.testing.assert_close(by_rows.mean, one_by_one.mean)
    torch.testing.assert_close(sample(model, x, 0.0, 2).mean, model(x).detach())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ["element", "channel"])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=["strided", "jagged"])
def test_nested_tensors_are_refused(layout: Any, kind: Any) -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        parts = [row[: 1 + i % 3] for i, row in enumerate(x)]
        nested = torch.nested.as_nested_tensor(parts, layout=layout)
        return net.b(torch.nested.to_padded_tensor(net.m(net.a(nested).tanh()), 0.0).sum(1))

    with pytest.raises(SiteError, match="'m'; found a nested one"):
        find_sites(Net(run, **layers()), torch.randn(12, 4, 3), kind=kind)


@pytest.mark.parametrize("tokens_first", [True, False])
def test_a_layer_that_gets_more_axes_in_one_of_its_calls(tokens_first: bool) -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        """One projection of the pooled tokens and of all of them."""
        h = net.a(x).tanh()
        if tokens_first:
            k, q = net.m(h), net.m(h.mean(1))
        else:
            q, k = net.m(h.mean(1)), net.m(h)
        return net.b((q[:, None] * k).tanh().mean(1))

    model, x = Net(run, **layers()), torch.randn(40, 5, 3)
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

    def remembered(net: Net, x: Tensor) -> Tensor:
        h = net.a(x).relu()
        net.past = h if net.past is None else net.past + h
        return net.b(net.m(net.past).relu())

    with pytest.raises(DataError, match="expected the model to run on the example inputs; it raised RuntimeError"):
        find_sites(Net(remembered, **layers(), past=None), torch.randn(12, 3))

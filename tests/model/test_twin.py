"""A twin computes what its model computes, and nothing that happens to it is seen on the model."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from latedrop.model.twin import release, reroute, twin_of
from torch import Tensor, nn

from latedrop import calibrate, find_sites, inject, linearize, sample
from untouched import assert_same, state
from zoo import ZOO, Case


@pytest.mark.parametrize("case", ZOO, ids=lambda case: case.name)
@pytest.mark.parametrize("layers", [True, False])
def test_it_computes_the_same(case: Case, layers: bool) -> None:
    model, x = case.make()
    run = partial(_call, x=x)
    with torch.no_grad():
        torch.testing.assert_close(run(twin_of(model, layers=layers)), run(model))
        torch.testing.assert_close(run(twin_of(twin_of(model))), run(model))


def test_weights_are_shared_and_modules_are_not() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Dropout(), nn.Linear(3, 1)))
    twin = twin_of(model)
    assert [id(p) for p in twin.parameters()] == [id(p) for p in model.parameters()]
    assert not {id(m) for m in twin.modules()} & {id(m) for m in model.modules()}
    assert all(m.training for m in model.modules())
    assert not any(m.training for m in twin.modules())


class Stateful(nn.Module):
    """Keeps an activation, a counter in a buffer, a list, a dict and a tensor that is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 1)
        self.register_buffer("calls", torch.zeros(1))
        self.last, self.count, self.log, self.seen, self.table = None, 0, [], {}, torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.second(self.first(x).relu())
        self.calls += 1
        self.count += 1
        self.log.append(self.last)
        self.seen["last"] = self.last
        self.table.add_(1)
        return self.head(self.last)


@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_what_a_model_writes_into_itself_is_thrown_away(engine: Any) -> None:
    model, x, y = Stateful(), torch.randn(16, 4), torch.randn(16, 1)
    before = state(model)
    sites = find_sites(model, x)
    sample(model, x, 0.2, 5, sites=sites, engine=engine)
    linearize(model, x, sites)
    uq = calibrate(model, (x, y), rates=[0.1], draws=5, engine=engine)
    uq.predict(x)
    with inject(model, sites, 0.2):
        model(x)
    assert_same(before, state(model))
    assert model.last is None
    assert (model.count, model.log, model.seen) == (0, [], {})
    assert not model.table.any()
    copy.deepcopy(model)
    pickle.dumps(model)


class Growing(nn.Module):
    """Gives itself, and layers of torch that have none, parts and hooks in its first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
        self.bare = Late()

    def forward(self, x: Tensor) -> Tensor:
        self.body[1].register_buffer("last", x.detach().clone())
        self.body[1].inner = nn.Identity()
        self.body[0].register_full_backward_hook(lambda *_: None)
        return self.body(self.bare(x))


class Late(nn.Module):
    """Makes its parts when it is first called."""

    def forward(self, x: Tensor) -> Tensor:
        self.late, self.weight = nn.Identity(), nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.ones(1))
        return self.late(x)


def test_parts_and_hooks_that_a_pass_adds_are_thrown_away() -> None:
    model, x = Growing().eval(), torch.randn(6, 4)
    before = state(model)
    sites = find_sites(model, x)
    sample(model, x, 0.2, 5, sites=sites)
    with inject(model, sites, 0.2):
        model(x)
    assert_same(before, state(model))
    assert list(model.state_dict()) == list(before["values"])


class Entangled(nn.Module):
    """Its layers are also reached by lists, closures, bound methods and partial functions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.fourth = (nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 1)
        second = self.second
        self.steps = [self.first, {"then": [self.third]}]
        self.closure = lambda h: second(h).relu()
        self.method = self.fourth.forward
        self.bound = partial(self.activated, scale=2.0)
        self.head.register_forward_pre_hook(self.noted)
        self.heard = 0

    def activated(self, h: Tensor, scale: float) -> Tensor:
        return scale * h.tanh()

    def noted(self, *_: Any) -> None:
        self.heard += 1

    def forward(self, x: Tensor) -> Tensor:
        h = self.closure(self.steps[0](x))
        h = self.bound(self.method(self.steps[1]["then"][0](h)))
        return self.head(h)


def test_layers_that_are_reached_in_other_ways_are_the_twins_too() -> None:
    model, x = Entangled(), torch.randn(6, 4)
    sites = find_sites(model, x)
    assert [site.name for site in sites] == ["second", "third", "fourth", "head"]
    rows = sample(model, x, 0.3, 20, sites=sites, keep_draws=True)
    loop = sample(model, x, 0.3, 20, sites=sites, engine="loop", keep_draws=True)
    torch.testing.assert_close(rows.outputs, loop.outputs)
    assert model.heard == 0
    with inject(model, sites, 0.3, draw=4), torch.no_grad():
        torch.testing.assert_close(model(x), loop.outputs[4])


def test_a_twin_does_not_keep_its_model_alive() -> None:
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)), torch.randn(5, 4)
    gc.disable()
    try:
        sites = find_sites(model, x)
        sample(model, x, 0.1, 4, sites=sites)
        linearize(model, x, sites)
        gone = weakref.ref(model)
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_released_layers_run_as_their_class_does() -> None:
    model, x = nn.Sequential(nn.Linear(4, 2)), torch.randn(3, 4)
    twin = twin_of(model)
    reroute(twin[0], lambda forward, h: forward(h) + 1)
    assert torch.equal(twin(x), model(x) + 1)
    release(twin)
    assert torch.equal(twin(x), model(x))


def _call(model: nn.Module, x: Any) -> Any:
    return model(*x) if isinstance(x, tuple) else model(x)


class Padded(nn.Module):
    """A transformer whose sequences end at different places: in eval mode torch makes nested tensors of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        self.head = nn.Linear(8, 1)

    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        states = self.encoder(self.embed(tokens), src_key_padding_mask=padding)
        kept = (~padding).to(states)[..., None]
        return self.head((states * kept).sum(1) / kept.sum(1))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("method", ["terms", "sample", "linear"])
def test_padded_sequences_in_a_transformer(method: Any) -> None:
    torch.manual_seed(0)
    model = Padded().eval()
    x = (torch.randint(9, (40, 5)), torch.arange(5) >= torch.randint(1, 6, (40, 1)))
    with torch.no_grad():
        own = model(*x)
        torch.testing.assert_close(twin_of(model)(*x), own)
    options: dict[str, Any] = {"rates": [0.01], "draws": 8} if method == "sample" else {}
    p = calibrate(model, (x, own + torch.randn(40, 1)), method=method, **options).predict(x)
    assert p.std.isfinite().all()
    if method != "sample":
        torch.testing.assert_close(p.mean, own)
    assert model.encoder.use_nested_tensor

"""Models that do odd things: what a review found wrong once, each with its test."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from latedrop import calibrate, find_sites, inject, linearize, sample
from latedrop.dropout.sampling import plain_output

TINY = 1e-9  # a rate that is as good as none
ENGINES = pytest.mark.parametrize("engine", ["auto", "loop"])
pytestmark = [
    pytest.mark.filterwarnings("ignore:the draws of this model run one by one"),
    pytest.mark.filterwarnings("ignore:expected examples that do not depend on each other"),
    pytest.mark.filterwarnings("ignore:.*torch.jit"),
]


def net(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(widths[0], 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


def drawn(model: nn.Module, x: Any, sites: Any, rate: Any, draws: int) -> Tensor:
    """One pass after the other, as the user would."""
    found = []
    with torch.no_grad():
        for draw in range(draws):
            with inject(model, sites, rate, draw=draw):
                found.append(model(x))
    return torch.stack(found)


class Tokens(nn.Module):
    def __init__(self, look: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.e, self.b, self.c, self.look = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 1), look

    def forward(self, tokens: Tensor) -> Tensor:
        return self.c(self.b(self.look(self.e.weight, tokens).mean(1)).relu())


def mapped(weight: Tensor, tokens: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: nn.functional.embedding(row, weight))(tokens)


def scripted() -> Any:
    def look(weight: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.embedding(weight, tokens)

    return torch.jit.script(look)


@ENGINES
@pytest.mark.parametrize("look", [mapped, scripted], ids=["mapped", "scripted"])
def test_what_reads_past_python_reads_the_rows(look: Any, engine: Any) -> None:
    model, tokens = Tokens(look() if look is scripted else look), torch.randint(0, 20, (30, 10))
    found = sample(model, tokens, TINY, draws=50, engine=engine)
    torch.testing.assert_close(found.mean, model(tokens).detach())


class Hyper(nn.Module):
    """Its weights are made by another network, which is thinned."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.z, self.h1, self.h2 = nn.Parameter(torch.randn(1, 8)), nn.Linear(8, 8), nn.Linear(8, 64)
        self.main, self.out = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.h2(self.h1(self.z).relu()).view(8, 8)
        return self.out(functional_call(self.main, {"weight": weight}, (x,)).relu())


class Dilated(nn.Module):
    """One kernel, several dilations: a layer that changes between its calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv1d(1, 4, 3, padding="same"), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for dilation in (1, 2, 4):
            self.conv.dilation = (dilation,)
            found.append(self.conv(x))
        return self.head((found[0] + 2 * found[1] + 3 * found[2]).flatten(1))


class Keeps(nn.Module):
    """Adds to what earlier passes left behind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.past = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1), None

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x).relu())
        self.past = h if self.past is None else self.past + h
        return self.c(self.past.relu())


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
@pytest.mark.parametrize(
    ("make", "rate"),
    [
        (Hyper, {"h2": 0.3, "out": 0.0}),
        (Hyper, 0.3),
        (Dilated, 0.3),
        (Keeps, 0.3),
        (WritesIntoInput, 0.3),
        (WritesIntoHidden, 0.3),
    ],
)
def test_draws_are_those_of_inject(make: type[nn.Module], rate: Any, rows: int, engine: Any) -> None:
    model = make()
    x = torch.randn((rows, 1, 16) if make is Dilated else (rows, 8), generator=torch.Generator().manual_seed(1))
    before, sites = x.clone(), find_sites(model, x)
    expected = drawn(model, x.clone(), sites, rate, 20) if make is not WritesIntoInput else None
    for chunk in (None, 5):
        found = sample(model, x, rate, 20, sites=sites, engine=engine, chunk=chunk, keep_draws=True)
        assert torch.equal(x, before)
        if expected is not None:
            torch.testing.assert_close(found.outputs, expected)
    linearize(model, x, sites)
    plain_output(model, x)
    assert torch.equal(x, before)
    if expected is None:
        torch.testing.assert_close(sample(model, x, TINY, 5, sites=sites).mean, model(x.clone()).detach())


def test_inputs_are_the_same_for_every_rate() -> None:
    model, x = WritesIntoInput(), torch.randn(20, 8)
    y, before = torch.randn(20, 1), x.clone()
    uq = calibrate(model, (x, y), rates=[0.1, 0.2], draws=10, method="linear")
    assert torch.equal(uq.predict(x).mean, uq.predict(x).mean)
    assert torch.equal(x, before)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.n, self.d, self.b, self.c = (
            nn.Linear(8, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.5),
            nn.Linear(8, 8),
            nn.Linear(8, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.d(self.n(self.a(x)).relu())).relu())


class Runner:
    def __init__(self, layers: list[nn.Module]) -> None:
        self.layers = layers

    def __call__(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def by_closure(model: nn.Module) -> None:
    own = model.forward
    model.forward = lambda *args: own(*args)


def by_default(model: nn.Module) -> None:
    model.forward = lambda x, own=model.forward: own(x)


def by_object(model: Any) -> None:
    model.run = Runner([model.a, model.n, model.d, model.b, model.c])
    type(model).forward = lambda self, x: self.run(x)


def by_hidden_container(model: Any) -> None:
    model.run = [nn.Sequential(model.a, model.n, model.d, model.b, model.c)]
    type(model).forward = lambda self, x: self.run[0](x)


@pytest.mark.parametrize("change", [by_closure, by_default, by_object, by_hidden_container])
def test_modules_that_are_reached_on_other_ways_run_as_twins(change: Callable[[Any], None]) -> None:
    class Own(Normed):
        pass

    model, x = Own(), torch.randn(60, 8)
    change(model)
    expected = model.eval()(x).detach()
    model.train()
    before = model.n.running_mean.clone()
    sites = find_sites(model, x)
    assert [site.name for site in sites] == ["b", "c"]
    torch.testing.assert_close(sample(model, x, 0.0, draws=2, sites=sites).mean, expected)
    sample(model, x, 0.3, draws=5, sites=sites)
    assert torch.equal(before, model.n.running_mean)


class HooksItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: list[Tensor] = []
        hook = self.b.register_forward_hook(lambda module, args, output: found.append(output))
        y = self.c(self.b(self.a(x)))
        hook.remove()
        return y + found[0].mean(1, keepdim=True)


def test_hooks_of_one_pass_are_not_seen_in_another_thread() -> None:
    model, x = HooksItself(), torch.randn(8, 20, 8)
    sites = find_sites(model, x[0])
    alone = [sample(model, rows, 0.3, draws=10, sites=sites).mean for rows in x]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(10):
            if not torch.equal(sample(model, x[i], 0.3, draws=10, sites=sites).mean, alone[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert not model.b._forward_hooks


def test_a_call_of_ones_own_runs_once() -> None:
    class Pixels(nn.Sequential):
        def __call__(self, x: Tensor) -> Tensor:
            return super().__call__(x / 255)

    model, x = Pixels(*net(8)), 255 * torch.rand(4, 8)
    with inject(model, find_sites(model, x), 0.0):
        assert torch.equal(model(x), model(x))
        inside = model(x)
    assert torch.equal(inside, model(x))


def test_readouts_that_mix_rows() -> None:
    model, x = net(8), torch.randn(40, 8)
    for shared in (True, False):
        fast, slow = (
            sample(model, x, 0.3, 20, readout=lambda o: 10 * o.softmax(0), shared=shared, engine=engine).mean
            for engine in ("auto", "loop")
        )
        torch.testing.assert_close(fast, slow)


def test_models_that_take_another_way_for_large_batches() -> None:
    class Big(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (2 if len(x) > 100 else 1)

    model, x = Big(*net(8)), torch.randn(40, 8)
    sites = find_sites(model, x)
    sample(model, x[:2], 0.3, draws=6, sites=sites)
    fast, slow = (sample(model, x, 0.3, 50, sites=sites, engine=engine).mean for engine in ("auto", "loop"))
    torch.testing.assert_close(fast, slow)


def test_nobody_waits_for_an_injected_compiled_model() -> None:
    x, compiled, other = torch.randn(4, 8), torch.compile(net(8), backend="eager"), net(8)
    with inject(compiled, find_sites(compiled, x), 0.3):
        thread = threading.Thread(target=find_sites, args=(other, x), daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()


def test_a_copy_made_inside_is_a_model_like_any_other() -> None:
    model, x = net(8), torch.randn(40, 8)
    sites = find_sites(model, x)
    with inject(model, sites, 0.3):
        made = copy.deepcopy(model)
    assert find_sites(made, x) == sites
    torch.testing.assert_close(sample(made, x, 0.3, 5, sites=sites).mean, sample(model, x, 0.3, 5, sites=sites).mean)


def test_nothing_is_kept_and_nothing_of_the_users_is_closed() -> None:
    class Resource:
        open = True

    class Owner(nn.Sequential):
        def __init__(self, *layers: nn.Module) -> None:
            super().__init__(*layers)
            self.file = Resource()

        def __del__(self) -> None:
            self.file.open = False

        def read(self, output: Tensor) -> Tensor:
            return output

    model, x = Owner(*net(8)), torch.randn(40, 8)
    file = model.file
    sample(model, x, 0.3, draws=4, readout=model.read)
    gc.collect()
    assert file.open
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_buffer_and_a_view_of_it_stay_together() -> None:
    class View(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 1)
            self.register_buffer("kv", torch.zeros(2, 8))
            self.k = self.kv[0]

        def forward(self, x: Tensor) -> Tensor:
            self.kv[0] = self.a.bias
            return self.b((self.a(x) + 3 * self.k).relu())

    model, x = View(), torch.randn(5, 8)
    found = sample(model, x, 0.0).mean
    assert not model.kv.any()
    with torch.no_grad():
        assert torch.equal(found, model(x))


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


def test_methods_that_remember_run() -> None:
    class Cached(nn.Sequential):
        @cache  # noqa: B019
        def ones(self, width: int) -> Tensor:
            return torch.ones(width)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.ones(8))

    model, x = Cached(*net(8)), torch.randn(5, 8)
    assert sample(model, x, 0.3, draws=4).mean.shape == (5, 1)

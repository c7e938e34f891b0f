"""Models that are written in unusual ways: what a third review found wrong, each with its test."""

from __future__ import annotations

import types
from collections import UserDict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state

from latedrop import calibrate, find_sites, inject, linearize, propagate, sample
from latedrop.errors import DataError, SiteError

pytestmark = [
    pytest.mark.filterwarnings("ignore:the draws of this model run one by one"),
    pytest.mark.filterwarnings("ignore:expected examples that do not depend on each other"),
]


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


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def changed(model: nn.Module, before: dict[str, Tensor]) -> list[str]:
    return [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]


def even_and_odd(net: Net, h: Tensor, x: Tensor) -> Tensor:
    order = torch.cat([torch.arange(0, len(h), 2), torch.arange(1, len(h), 2)])
    return net.m(h[order])[order.argsort()]


def by_size(net: Net, h: Tensor, x: Tensor) -> Tensor:
    rank = x[:, 0].argsort().argsort()
    ordered = torch.zeros_like(h).index_copy(0, rank, h)
    return net.m(ordered)[rank]


def by_chance(net: Net, h: Tensor, x: Tensor) -> Tensor:
    order = torch.randperm(len(h))
    return net.m(h[order])[order.argsort()]


ORDERS: dict[str, Callable[[Net, Tensor, Tensor], Tensor]] = {
    "flip": lambda net, h, x: net.m(h.flip(0)).flip(0),
    "roll": lambda net, h, x: net.m(h.roll(1, 0)).roll(-1, 0),
    "even and odd": even_and_odd,
    "by size": by_size,
    "by chance": by_chance,
}


@pytest.mark.parametrize("order", ORDERS)
def test_rows_in_another_order_inside(order: str) -> None:
    model, x = Net(ORDERS[order]).eval(), rows(9)
    sites = find_sites(model, x)
    assert {site.name: site.moved for site in sites} == {"m": True, "b": False}
    together = linearize(model, x, sites).variance_by_site
    alone = torch.cat([linearize(model, x[i : i + 1], sites).variance_by_site for i in range(9)])
    torch.testing.assert_close(together, alone)
    by_rows, one_by_one = (sample(model, x, 0.3, 20, sites=sites, engine=engine) for engine in ("auto", "loop"))
    torch.testing.assert_close(by_rows.variance, one_by_one.variance)


@pytest.mark.parametrize("part", ["conj", "neg"])
def test_conjugated_tensors_keep_their_sign(part: str) -> None:
    model = Net(lambda net, h, x: torch.fft.ifft(torch.fft.fft(net.m(h)) * net.k).real)
    wave = torch.fft.fft(torch.randn(8, generator=torch.Generator().manual_seed(0))).conj()
    model.register_buffer("k", wave if part == "conj" else wave.imag)
    x = rows(4)
    torch.testing.assert_close(sample(model, x, 0.0, 2).mean, model(x).detach())


def test_rows_that_begin_to_meet() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)
    ).eval()
    x = rows(12)
    sites = find_sites(model, x)
    sample(model, x, 0.2, 20, sites=sites)
    model[3].track_running_stats, model[3].running_mean, model[3].running_var = False, None, None
    by_rows, one_by_one = (sample(model, x, 0.2, 20, sites=sites, engine=engine) for engine in ("auto", "loop"))
    torch.testing.assert_close(by_rows.mean, one_by_one.mean)


class Line(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def test_code_and_dicts_that_are_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, other = (nn.Sequential(nn.Linear(3, 8), nn.ReLU(), Line(8, 1)) for _ in range(2))
    x = rows(200)
    uq = calibrate(model, (x, torch.randn(200, 1)), progress=False)
    for _ in range(2):
        uq.predict(x[:3])
    monkeypatch.setattr(Line, "forward", lambda self, h: 100 + F.linear(h, self.weight, self.bias))
    torch.testing.assert_close(uq.predict(x[:3]).mean, model(x[:3]).detach())
    sites = find_sites(model, x)
    for _ in range(2):
        linearize(model, x, sites)
    model.__dict__ = other.__dict__
    torch.testing.assert_close(linearize(model, x, sites).mean, other(x).detach())


class Equal(Net):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)

    def __hash__(self) -> int:
        return 1


def test_models_that_compare_as_equal() -> None:
    one, two, x = Equal(), Equal(), rows(4)
    nn.init.normal_(two.b.weight)
    sites = find_sites(one, x)
    for _ in range(2):
        linearize(one, x, sites)
    torch.testing.assert_close(linearize(two, x, sites).mean, two(x).detach())


def by_function(net: Any, h: Tensor, x: Tensor) -> Tensor:
    return F.batch_norm(net.m(h), net.n.running_mean, net.n.running_var, None, None, True, 0.1)


def in_training(net: Any, h: Tensor, x: Tensor) -> Tensor:
    found: Tensor = net.n.train()(net.m(h))
    return found


def in_place(net: Any, h: Tensor, x: Tensor) -> Tensor:
    net.n.running_mean.lerp_(h.mean(0).detach(), 0.1)
    net.n.seen += 1
    found: Tensor = net.n(net.m(h))
    return found


@pytest.mark.parametrize("middle", [by_function, in_training, in_place], ids=lambda middle: middle.__name__)
@pytest.mark.parametrize("method", ["sample", "linearize"])
def test_what_is_written_into_torchs_own_layers(middle: Any, method: str) -> None:
    model: Any = Net(middle)
    model.n = nn.BatchNorm1d(8)
    model.n.seen = torch.zeros(1)
    model.eval()
    before, x = state_of(model), rows(20)
    sites = find_sites(model, x)
    for _ in range(3):
        sample(model, x, 0.2, 10, sites=sites) if method == "sample" else linearize(model, x, sites)
    assert changed(model, before) == []
    assert model.n.seen == 0


def test_an_embedding_that_renormalises_its_rows() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 8, max_norm=0.5), nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))
    before, x = state_of(model), torch.arange(10).reshape(5, 2)
    moments = sample(model, x, 1e-9, 4)
    assert changed(model, before) == []
    torch.testing.assert_close(moments.mean, model(x).detach())


Pair = namedtuple("Pair", ["first", "second", "third"])


class OwnList(list):  # type: ignore[type-arg]
    pass


class Slots:
    __slots__ = ("items",)

    def __init__(self, items: Any) -> None:
        self.items = list(items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


@dataclass(frozen=True)
class Frozen:
    items: tuple[Any, ...]

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "deque": deque,
    "namedtuple": lambda layers: Pair(*layers),
    "own list": OwnList,
    "user dict": lambda layers: UserDict(dict(enumerate(layers))),
    "proxy": lambda layers: types.MappingProxyType(dict(enumerate(layers))),
    "slots": Slots,
    "frozen": lambda layers: Frozen(tuple(layers)),
    "namespace": lambda layers: types.SimpleNamespace(items=list(layers)),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_layers_that_are_held_in_other_ways(holder: str) -> None:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList([nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)])
            self.h = HOLDERS[holder](self.layers)

        def forward(self, x: Tensor) -> Tensor:
            layers = self.h.items if holder == "namespace" else self.h
            found: Tensor = layers[2](layers[1](layers[0](x)).relu())
            return found

    model, x = Held().train(), rows(12)
    before = state_of(model)
    found = linearize(model, x)
    assert changed(model, before) == []
    assert [site.name for site in found.sites] == ["layers.2"]
    torch.testing.assert_close(found.mean, model.eval()(x).detach())


def test_whole_numbers_that_are_read_past_python() -> None:
    class Kinds(Net):
        def forward(self, x: Tensor, kind: Tensor) -> Tensor:  # type: ignore[override]
            table = torch.arange(40.0).reshape(5, 8) / 40
            known = torch.vmap(lambda k: (torch.arange(5) == k).float() @ table)(kind)
            return self.b(self.m((self.a(x) + known).relu()).relu())

    model, x = Kinds(), (rows(24), torch.arange(24) // 5)
    by_rows, one_by_one = (sample(model, x, 0.3, 30, engine=engine) for engine in ("auto", "loop"))
    torch.testing.assert_close(by_rows.variance, one_by_one.variance)


def test_points_in_a_sparse_tensor() -> None:
    class Points(Net):
        def forward(self, x: Tensor) -> Tensor:
            points = x.to_sparse(2)
            h = self.m(self.a(points.values()).tanh()).tanh()
            return self.b(torch.zeros(len(x), 8).index_add(0, points.indices()[0], h))

    with pytest.raises(SiteError, match="expected as many entries for every row"):
        find_sites(Points(), torch.randn(3, 4, 3))


def test_dicts_by_layer_and_attributes_of_weights() -> None:
    model: Any = Net(lambda net, h, x: net.m(h) * net.scales[net.m] * net.m.weight.scale)
    model.scales, model.m.weight.scale = {model.m: 2.0}, 3.0
    count = Net(lambda net, h, x: net.m(h) * sum(isinstance(p, nn.Parameter) for p in net.parameters()))
    x = rows(5)
    for each in (model, count):
        sites = find_sites(each, x)
        torch.testing.assert_close(sample(each, x, 0.0, 2, sites=sites).mean, each(x).detach())
        torch.testing.assert_close(linearize(each, x, sites).mean, each(x).detach())


def test_noise_that_is_switched_on_later() -> None:
    model: Any = Net(lambda net, h, x: F.dropout(net.m(h), 0.5, net.noisy))
    model.noisy = False
    x = rows(12)
    find_sites(model, x)
    model.noisy = True
    with pytest.warns(UserWarning, match="draws random numbers by itself"):
        sites = find_sites(model, x)
    state = torch.get_rng_state()
    sample(model, x, 0.2, 10, sites=sites)
    assert torch.equal(state, torch.get_rng_state())


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


class Slotted(Net):
    __slots__ = ("gain",)


ODD: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "slots": lambda net, h, x: net.m(h) * net.gain,
    "quantised": lambda net, h, x: net.m(h) * net.q.dequantize(),
    "cond": lambda net, h, x: torch.cond(x.sum() > 0, lambda h: h * 2, lambda h: h + 1, (net.m(h),)),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:The .grad attribute of a Tensor that is not")
@pytest.mark.parametrize("odd", ODD)
def test_odd_things_that_run(odd: str) -> None:
    model: Any = Slotted(ODD[odd])
    model.gain = 2.0
    if odd == "quantised":
        model.register_buffer("q", torch.quantize_per_tensor(torch.rand(8), 0.1, 0, torch.qint8))
    x = rows(12).abs()
    torch.testing.assert_close(sample(model, x, 0.0, 2).mean, model(x).detach())


PRODUCTS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "matmul": lambda net, h, x: torch.linalg.matmul(h, net.w),
    "multi_dot": lambda net, h, x: torch.linalg.multi_dot([h, net.w, net.w]),
    "addmm_": lambda net, h, x: torch.zeros(len(x), 8).addmm_(h, net.w) @ net.w,
    "out": lambda net, h, x: torch.mm(h.detach(), net.w.detach(), out=torch.empty(len(x), 8)) @ net.w,
}


@pytest.mark.parametrize("product", PRODUCTS)
def test_products_by_rarer_names(product: str) -> None:
    model: Any = Net(PRODUCTS[product])
    model.w = nn.Parameter(torch.randn(8, 8))
    x = rows(8)
    sites = find_sites(model, x)
    assert [site.name for site in sites] == ["w", "b"]
    by_rows, one_by_one = (sample(model, x, 0.2, 10, sites=sites, engine=engine) for engine in ("auto", "loop"))
    torch.testing.assert_close(by_rows.variance, one_by_one.variance)


def test_an_ensemble_of_stacked_weights() -> None:
    class Members(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            members: list[nn.Module] = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)) for _ in range(3)]
            self.stacked = nn.ParameterDict({k.replace(".", "_"): v for k, v in stack_module_state(members)[0].items()})
            self.one, self.head = [members[0]], nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            weights = {name.replace("_", "."): weight for name, weight in self.stacked.items()}
            outputs = torch.vmap(lambda own: functional_call(self.one[0], own, (x,)))(weights)
            found: Tensor = self.head(outputs.squeeze(-1).T)
            return found

    model, x = Members(), rows(6)
    assert [site.name for site in find_sites(model, x)] == ["head"]
    torch.testing.assert_close(sample(model, x, 0.0, 2).mean, model(x).detach())


def test_a_sparse_buffer() -> None:
    model: Any = Net(lambda net, h, x: (net.eye @ net.m(h).T).T)
    model.register_buffer("eye", torch.eye(8).to_sparse())
    x = rows(60)
    uq = calibrate(model, (x, torch.randn(60, 1)), progress=False)
    torch.testing.assert_close(uq.predict(x[:5]).mean, model(x[:5]).detach())


class RowsLast(nn.Module):
    """The rows lie along the third axis at `m`, as code with windows has them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.e, self.m, self.h = nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.h(self.m(self.e(x).relu().permute(1, 2, 0, 3)).relu().mean((0, 1)))
        return found


@pytest.mark.parametrize("size", [(4, 4), (4, 1), (4, 3)])
@pytest.mark.parametrize("kind", ["element", "channel"])
def test_rows_along_a_later_axis(size: tuple[int, int], kind: Any) -> None:
    model, x = RowsLast(), torch.randn(6, *size, 3)
    sites = find_sites(model, x, kind=kind)
    outputs = [
        sample(model, x, 0.3, 5, sites=sites, engine=engine, keep_draws=True).outputs
        for engine in ("rows", "loop", "auto")  # warnings are errors
    ]
    for found in outputs[1:]:
        torch.testing.assert_close(found, outputs[0])


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
        found: Tensor = self.h((q[:, None] * k).tanh().mean(1))
        return found


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

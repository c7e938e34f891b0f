"""Weights that no module calls: they are found, named after their parameter, and dropped as layers are."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.functional import jacobian
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import register_parametrization

import latedrop
from latedrop import find_sites, inject, linearize, propagate, sample
from latedrop.dropout.first_order import unit_variances
from latedrop.errors import DataError, LatedropWarning, OutputError, SiteError
from latedrop.network.sites import Sites
from networks import Net, Raw
from quick import quick
from rounding import assert_same_up_to_rounding
from seen import inputs_of

RATE = 0.2


@pytest.fixture(autouse=True)
def nothing_is_left_on() -> Iterator[None]:
    yield
    assert torch._C._len_torch_function_stack() == 0
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def names(sites: Sites) -> list[str]:
    return [site.name for site in sites]


def in_modules(raw: Raw) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 2))
    parameters = (raw.w1, raw.b1, raw.w2.t(), raw.b2, raw.w3, raw.b3)
    with torch.no_grad():
        for own, other in zip(model.parameters(), parameters, strict=True):
            own.copy_(other)
    return model


def test_raw_parameters_are_sites_but_for_the_first() -> None:
    sites = find_sites(Raw(), torch.randn(6, 5))
    assert [(s.name, s.layer, s.units) for s in sites] == [("w2", "matmul", (16,)), ("w3", "addmm", (8,))]
    assert str(sites).splitlines()[1].split() == ["w2", "matmul", "element", "16", "=", "16", "1"]


def test_the_same_in_modules_has_the_same_first_order_variance() -> None:
    raw, x = Raw(), torch.randn(6, 5)
    other = in_modules(raw)
    assert_same_up_to_rounding(linearize(raw, x).variance_by_site, linearize(other, x).variance_by_site)
    draws = 3000
    ours, variance = sample(raw, x, RATE, draws).variance, sample(other, x, RATE, draws).variance
    assert float((ours / variance - 1).abs().max()) < 5 * (4 / (draws - 1)) ** 0.5
    assert_same_up_to_rounding(propagate(raw, x, RATE).variance, propagate(other, x, RATE).variance)


def matrix(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


CALLS: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], dict[str, tuple[int, ...]]]] = {
    "linear": (lambda m, h: F.linear(h, m.w), {"w": (3, 6)}),
    "linear_keywords": (lambda m, h: F.linear(input=h, weight=m.w), {"w": (3, 6)}),
    "operator": (lambda m, h: torch.ops.aten.linear.default(h, m.w), {"w": (3, 6)}),
    "matmul": (lambda m, h: h @ m.w, {"w": (6, 3)}),
    "transposed": (lambda m, h: h @ m.w.T, {"w": (3, 6)}),
    "from_the_left": (lambda m, h: (m.w @ h.T).T, {"w": (3, 6)}),
    "vector": (lambda m, h: h @ m.w, {"w": (6,)}),
    "mm": (lambda m, h: torch.mm(h, m.w), {"w": (6, 3)}),
    "mm_from_the_left": (lambda m, h: torch.mm(m.w, h.mT).mT, {"w": (3, 6)}),
    "mv": (lambda m, h: torch.mv(h, m.w), {"w": (6,)}),
    "bmm": (lambda m, h: torch.bmm(h[:, None], m.w.expand(len(h), 6, 3))[:, 0], {"w": (6, 3)}),
    "baddbmm": (lambda m, h: torch.baddbmm(m.b, h[:, None], m.w.expand(len(h), 6, 3))[:, 0], {"b": (3,), "w": (6, 3)}),
    "addmm": (lambda m, h: torch.addmm(m.b, h, m.w), {"b": (3,), "w": (6, 3)}),
    "addmm_in_place": (lambda m, h: h.new_zeros(len(h), 3).addmm_(h, m.w), {"w": (6, 3)}),
    "addmv": (lambda m, h: torch.addmv(m.b.expand(len(h)), h, m.w), {"b": (1,), "w": (6,)}),
    "einsum": (lambda m, h: torch.einsum("bi,io->bo", h, m.w), {"w": (6, 3)}),
    "einsum_implicit": (lambda m, h: torch.einsum("ij,jk", [h, m.w]), {"w": (6, 3)}),
    "einsum_ellipsis": (lambda m, h: torch.einsum("oi,...i->...o", m.w, h), {"w": (3, 6)}),
    "einsum_two_axes": (lambda m, h: torch.einsum("bij,ijo->bo", h.view(-1, 2, 3), m.w), {"w": (2, 3, 2)}),
    "view": (lambda m, h: h @ m.w.view(6, 3), {"w": (18,)}),
    "slice": (lambda m, h: h @ m.w[:, :3], {"w": (6, 5)}),
    "to_dtype": (lambda m, h: F.linear(h.double(), m.w.to(torch.float64)).float(), {"w": (3, 6)}),
    "type_as": (lambda m, h: F.linear(h, m.w.type_as(h)), {"w": (3, 6)}),
    "conv1d": (lambda m, h: F.conv1d(h.view(-1, 2, 3), m.w, padding=1), {"w": (2, 2, 3)}),
    "conv2d": (lambda m, h: F.conv2d(h.view(-1, 1, 2, 3), m.w, padding="same"), {"w": (2, 1, 1, 3)}),
    "conv3d": (lambda m, h: F.conv3d(h.view(-1, 1, 1, 2, 3), m.w), {"w": (2, 1, 1, 2, 2)}),
    "conv_transpose1d": (lambda m, h: F.conv_transpose1d(h.view(-1, 2, 3), m.w, stride=2), {"w": (2, 1, 2)}),
    "conv_transpose2d": (lambda m, h: F.conv_transpose2d(h.view(-1, 1, 2, 3), m.w), {"w": (1, 1, 2, 2)}),
    "conv_transpose3d": (lambda m, h: F.conv_transpose3d(h.view(-1, 1, 1, 2, 3), m.w), {"w": (1, 2, 1, 2, 2)}),
    "merged": (lambda m, h: F.linear(h, m.w + m.up @ m.down), {"w": (3, 6), "up": (3, 1), "down": (1, 6)}),
    "weight_norm": (lambda m, h: F.linear(h, m.g * m.v / m.v.norm(dim=1, keepdim=True)), {"g": (3, 1), "v": (3, 6)}),
    "masked": (lambda m, h: F.linear(h, m.w * torch.ones(3, 6).tril()), {"w": (3, 6)}),
}


class Headed(nn.Module):
    """A linear layer, and a head that is a call."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor], shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.first, self.call = nn.Linear(4, 6), call
        self.in_place = call is CALLS["addmm_in_place"][0]
        for name, shape in shapes.items():
            setattr(self, name, matrix(*shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, torch.tanh(self.first(x))).reshape(len(x), -1)


@pytest.fixture(params=CALLS, ids=CALLS.keys())
def headed(request: pytest.FixtureRequest) -> Headed:
    return Headed(*CALLS[request.param])


def test_every_call_has_its_exact_first_order_variance(headed: Headed) -> None:
    """`sum_i (h_i dy/dh_i)^2` from the Jacobian of the call alone."""
    x = torch.randn(5, 4)
    sites = find_sites(headed, x)
    assert names(sites) == ["g" if hasattr(headed, "g") else "w"]
    assert sites[0].weight == sites[0].name
    linear = linearize(headed, x, sites)
    for row in range(len(x)):
        h = torch.tanh(headed.first(x[row : row + 1])).detach()
        slopes = jacobian(lambda v: headed.call(headed, v).flatten(), h).flatten(1)
        exact = (slopes * h.flatten()).square().sum(1)
        assert_same_up_to_rounding(linear.variance_by_site[row, :, 0].float(), exact)


def test_every_call_draws_alike_in_both_engines_and_in_any_batch(headed: Headed) -> None:
    x = torch.randn(5, 4)
    for kind in ("element", "channel"):
        sites = find_sites(headed, x, kind=kind)
        loop = sample(headed, x, RATE, 12, sites=sites, engine="loop", keep_draws=True)
        engine = "auto" if headed.in_place else "rows"  # no operator may write many draws into one tensor
        fast = sample(headed, x, RATE, 12, sites=sites, engine=engine, keep_draws=True)
        assert_same_up_to_rounding(fast.outputs, loop.outputs)
        assert bool((loop.variance.sum(1) > 0).all())
        alone = sample(headed, x[2:4], RATE, 12, sites=sites)
        assert_same_up_to_rounding(alone.variance, loop.variance[2:4])
        with inject(headed, sites, RATE) as injection, torch.no_grad():
            for draw in range(3):
                assert injection.draw == draw
                assert_same_up_to_rounding(headed(x), loop.outputs[draw])
        same = sample(headed, x[:1].expand_as(x), RATE, 12, sites=sites, shared=False, keep_draws=True).outputs
        assert not torch.allclose(same[:, 0], same[:, 4])


def test_what_is_no_layer_is_left_alone() -> None:
    """Scales, scores, tables of constants and products of weights are not weight calls."""

    def run(net: Net, x: Tensor) -> Tensor:
        h = net.first(x) * net.scale + (net.left @ net.right).mean()
        h = h + torch.einsum("bi,i->bi", h, net.scale)
        h = h @ net.table + ((h[:, :, None] @ h[:, None]).softmax(-1) @ h[:, :, None])[..., 0]
        return net.last(F.layer_norm(h, (4,), net.scale))

    weights = {"scale": matrix(4), "left": matrix(4, 4), "right": matrix(4, 4), "table": torch.randn(4, 4)}
    model = Net(run, first=nn.Linear(4, 4), last=nn.Linear(4, 1), **weights)
    assert names(find_sites(model, torch.randn(6, 4))) == ["last"]


def test_no_double_dropout_and_layers_that_are_not_chosen_stay_clean() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        h = net.second(net.first(x).relu()).relu()
        h = h + net.attention(h[:, None], h[:, None], h[:, None])[0][:, 0]
        return F.linear(h, net.third.weight, net.third.bias)

    layers = {"first": nn.Linear(4, 8), "second": nn.Linear(8, 8), "third": nn.Linear(8, 1)}
    model, x = Net(run, **layers, attention=nn.MultiheadAttention(8, 2, batch_first=True)), torch.randn(5, 4)
    sites = find_sites(model, x)
    assert [(s.name, s.calls) for s in sites] == [("second", 1), ("attention", 1), ("third.weight", 1)]
    head = find_sites(model, x, select="third*")
    assert names(head) == ["third.weight"]
    seen: list[Tensor] = []
    with torch.no_grad():
        for chosen, rate in ((head, 0.5), (sites, 0.0), (sites, 0.5)):
            with inputs_of(model.second) as inputs, inject(model, chosen, rate, draw=0):
                model(x)
            seen += inputs
    assert torch.equal(seen[0], seen[1])  # the first layer has no site, and the batch is the same
    alive = seen[0] != 0
    ratios = (seen[2] / seen[0])[alive]
    assert bool(((ratios == 0) | (ratios == 2)).all())  # one mask, not two
    both = linearize(model, x, sites).variance_by_site
    assert_same_up_to_rounding(both[..., 2], linearize(model, x, head).variance_by_site[..., 0])


def test_select_by_owner_and_rates_by_name() -> None:
    class Dense(nn.Module):
        def __init__(self, size: int, out: int) -> None:
            super().__init__()
            self.weight = matrix(size, out)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    model = nn.Sequential(Dense(4, 8), nn.ReLU(), Dense(8, 8), nn.ReLU(), nn.Linear(8, 1))
    x = torch.randn(6, 4)
    assert names(find_sites(model, x)) == ["2.weight", "4"]
    assert names(find_sites(model, x, select=Dense)) == ["2.weight"]
    assert names(find_sites(model, x, select=lambda name, module: isinstance(module, nn.Linear))) == ["4"]
    with pytest.raises(SiteError, match=r"Sites: \['2.weight', '4'\]; first layers, which are never sites: \['0.weig"):
        find_sites(model, x, select="nothing")
    only = sample(model, x, {"*.weight": RATE}, 10)
    alone = sample(model, x, RATE, 10, sites=find_sites(model, x, select="2.*"))
    assert_same_up_to_rounding(only.mean, alone.mean)


def test_slices_of_one_parameter_are_sites_of_their_own() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        for layer in range(4):
            x = torch.tanh(x @ net.stack[layer].T)
        return x

    model, x = Net(run, stack=matrix(4, 5, 5)), torch.randn(6, 5)
    sites = find_sites(model, x)
    assert [(s.name, s.weight, s.calls) for s in sites] == [(f"stack[{i}]", "stack", 1) for i in (1, 2, 3)]
    assert names(find_sites(model, x, select="stack[2]")) == ["stack[2]"]
    moments = sample(model, x, {"stack[2]": RATE}, 10, sites=sites)
    assert_same_up_to_rounding(moments.mean, sample(model, x, RATE, 10, sites=sites[1:2]).mean)


def test_lookups_count_as_upstream_and_tied_weights_keep_their_name() -> None:
    def run(net: Net, tokens: Tensor) -> Tensor:
        h = net.table[tokens] if net.lookup == "index" else F.embedding(tokens, net.table)
        return torch.tanh(h.mean(1) @ net.w) @ net.table.T

    for lookup in ("index", "embedding"):
        model = Net(run, table=matrix(7, 4), w=matrix(4, 4), lookup=lookup)
        assert names(find_sites(model, torch.randint(7, (5, 3)))) == ["w", "table"]


def test_a_recurrence_by_hand_counts_its_calls() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        h = torch.zeros(len(x), 6)
        for step in x.unbind(1):
            h = torch.tanh(step @ net.w_in + h @ net.w)
        return h @ net.out

    weights = {"w_in": matrix(2, 6), "w": nn.Parameter(torch.randn(6, 6) / 3), "out": matrix(6, 1)}
    model, x = Net(run, **weights), torch.randn(5, 4, 2)
    sites = find_sites(model, x)
    assert [(s.name, s.calls) for s in sites] == [("w", 3), ("out", 1)]  # the first product is with zeros
    loop = sample(model, x, RATE, 10, sites=sites, engine="loop")
    assert_same_up_to_rounding(sample(model, x, RATE, 10, sites=sites, engine="rows").variance, loop.variance)
    longer = sample(model, torch.randn(5, 6, 2), RATE, 10, sites=sites)
    assert bool((longer.variance > 0).all())


def test_attention_by_function() -> None:
    def by_function(net: Net, x: Tensor) -> Tensor:
        h = net.embed(x).transpose(0, 1)
        zeros = torch.zeros(24), torch.zeros(8)
        mixed, _ = F.multi_head_attention_forward(
            h, h, h, 8, 2, net.in_proj_weight, zeros[0], None, None, False, 0.0, net.out_proj, zeros[1]
        )
        return net.head(mixed.mean(0))

    def by_module(net: Net, x: Tensor) -> Tensor:
        h = net.embed(x).transpose(0, 1)
        return net.head(net.module(h, h, h)[0].mean(0))

    x, layers = torch.randn(5, 4, 3), {"embed": nn.Linear(3, 8), "head": nn.Linear(8, 1)}
    model = Net(by_function, **layers, in_proj_weight=matrix(24, 8), out_proj=matrix(8, 8))
    sites = find_sites(model, x)
    assert [(s.name, s.layer, s.units) for s in sites] == [
        ("in_proj_weight", "multi_head_attention_forward", (4, 8)),
        ("head", "Linear", (8,)),
    ]
    other = Net(by_module, **layers, module=nn.MultiheadAttention(8, 2))
    state = {"in_proj_weight": model.in_proj_weight, "out_proj.weight": model.out_proj}
    other.module.load_state_dict(state, strict=False)
    assert_same_up_to_rounding(linearize(model, x).variance_by_site, linearize(other, x).variance_by_site)
    rows, loop = (sample(model, x, RATE, 8, engine=engine).variance for engine in ("rows", "loop"))
    assert_same_up_to_rounding(rows, loop)
    with pytest.raises(SiteError, match="found a layer of type multi_head_attention_forward in the model"):
        propagate(model, x, RATE)


def test_recurrent_functions_and_cells() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        h, zeros = net.embed(x), x.new_zeros(1, len(x), 4)
        weights = list(net.lstm.parameters())
        states = torch.lstm(h, (zeros, zeros), weights, True, 1, 0.0, False, False, True)[0]
        return torch.gru_cell(states[:, -1], zeros[0], *net.cell.parameters())

    layers = {"embed": nn.Linear(2, 4), "cell": nn.GRUCell(4, 4), "lstm": nn.LSTM(4, 4, batch_first=True)}
    model, x = Net(run, **layers), torch.randn(5, 3, 2)
    sites = find_sites(model, x)
    assert [(s.name, s.layer, s.units) for s in sites] == [
        ("lstm.weight_ih_l0", "lstm", (3, 4)),
        ("cell.weight_ih", "gru_cell", (4,)),
    ]
    assert bool((sample(model, x, RATE, 10).variance > 0).all())
    assert bool((linearize(model, x).variance_by_site > 0).all())
    with pytest.raises(SiteError, match="found a layer of type lstm in the model"):
        propagate(model, x, RATE)


def test_parametrized_layers_and_parameters() -> None:
    class Symmetric(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w.triu() + w.triu(1).mT

    def run(net: Net, x: Tensor) -> Tensor:
        return net.spectral(net.normed(torch.tanh(net.first(x)) @ net.w))

    normed = parametrizations.weight_norm(nn.Linear(4, 4)), parametrizations.spectral_norm(nn.Linear(4, 4))
    model, x = Net(run, first=nn.Linear(3, 4), w=matrix(4, 4), normed=normed[0], spectral=normed[1]), torch.randn(6, 3)
    register_parametrization(model, "w", Symmetric())
    sites = find_sites(model, x)
    assert [(s.name, s.weight, s.layer) for s in sites] == [
        ("w", "w", "matmul"),
        ("normed", None, "ParametrizedLinear"),
        ("spectral", None, "ParametrizedLinear"),
    ]
    loop = sample(model, x, RATE, 10, sites=sites, engine="loop")
    assert_same_up_to_rounding(sample(model, x, RATE, 10, sites=sites, engine="rows").variance, loop.variance)


def test_channels_of_an_einsum_are_all_that_is_summed_over() -> None:
    model = Headed(*CALLS["einsum_two_axes"])
    assert find_sites(model, torch.randn(5, 4), kind="channel")[0].units == (2, 3)
    conv = Headed(*CALLS["conv1d"])
    assert find_sites(conv, torch.randn(5, 4), kind="channel")[0].units == (2,)


def test_calibrate_save_load_predict_and_explain(tmp_path) -> None:
    model, x = Raw(), torch.randn(80, 5)
    y = model(x).detach() + 0.1 * torch.randn(80, 2)
    uq = quick([0.05, 0.2], 20)(model, (x, y), method="linear")
    uq.save(tmp_path / "c.json")
    # A file keeps every digit, and the batch is the same.
    assert torch.equal(latedrop.load(tmp_path / "c.json", model).predict(x).variance, uq.predict(x).variance)
    assert set(uq.explain(x[:1]).sites) == {"w2", "w3"}
    with pytest.raises(latedrop.errors.FileError, match=r"its layers \['w2', 'w3'\] are missing"):
        latedrop.load(tmp_path / "c.json", in_modules(model))
    mean, columns = unit_variances(model, x[:1], uq.calibration.sites)
    assert mean.shape == (1, 2)
    assert columns[0]["w2"].shape == (16,)


def test_weights_inside_of_transforms_are_refused() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: torch.tanh(row) @ net.w)(net.first(x))

    with pytest.raises(DataError, match="escaped from inside a function being vmapped"):
        find_sites(Net(run, first=nn.Linear(3, 4), w=matrix(4, 1)), torch.randn(5, 3))


def graph(links: Tensor) -> Net:
    """The rows are nodes of one graph."""

    def run(net: Net, x: Tensor) -> Tensor:
        return net.links @ torch.tanh(net.links @ net.first(x)) @ net.w

    return Net(run, first=nn.Linear(3, 4), w=matrix(4, 1), links=links)


def test_sparse_matrices_are_followed() -> None:
    model, x = graph((torch.rand(6, 6).gt(0.5) + torch.eye(6)).to_sparse()), torch.randn(6, 3)
    with pytest.warns(LatedropWarning, match="do not depend on each other"):
        sites = find_sites(model, x)
    assert names(sites) == ["w"]
    assert bool((sample(model, x, RATE, 10, sites=sites).variance > 0).all())


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_sparse_matrices_that_torch_cannot_copy_are_named() -> None:
    with pytest.raises(SiteError, match=r"a model that can be copied; links \(Tensor\) cannot"):
        find_sites(graph(torch.eye(6).to_sparse_csr()), torch.randn(6, 3))


def test_sites_without_gradients_have_no_first_order() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(w)
            return x @ w

        @staticmethod
        def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
            return slope @ ctx.saved_tensors[0].T, None

    def run(net: Net, x: Tensor) -> Tensor:
        return net.last(Product.apply(torch.tanh(net.first(x)), net.w))

    model, x = Net(run, first=nn.Linear(3, 4), w=matrix(4, 4), last=nn.Linear(4, 1)), torch.randn(5, 3)
    assert names(find_sites(model, x)) == ["w", "last"]
    assert bool((sample(model, x, {"w": RATE}, 10).variance > 0).all())
    with pytest.raises(OutputError, match=r"the model runs \['w'\] without"):
        linearize(model, x)
    assert linearize(model, x, find_sites(model, x, select="last")).mean.shape == (5, 1)

"""The private copy shares the weights and nothing else; what it cannot reach is an error, never silent."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from latedrop import Network, calibrate, find_sites, linearize, sample
from latedrop.dropout.sampling import own_output
from latedrop.errors import LatedropWarning, OutputError, SiteError
from latedrop.network.private_copy import private_copy
from networks import Net
from rounding import assert_same_up_to_rounding
from untouched import assert_same, state


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 1))


def ran(model: nn.Module, x: Tensor) -> list[int]:
    """Run the copy of a model; return the identities of the modules that ran, of whichever model."""
    seen: list[int] = []
    forward = nn.Linear.forward

    def noted(self: nn.Linear, value: Tensor) -> Tensor:
        seen.append(id(self))
        return forward(self, value)

    nn.Linear.forward = noted  # type: ignore[method-assign]
    try:
        with torch.no_grad():
            private_copy(model)(x)
    finally:
        nn.Linear.forward = forward  # type: ignore[method-assign]
    return seen


def by_closure(model: nn.Module) -> None:
    before = model.forward
    model.forward = lambda x: before(x) * 2


def by_dict(model: nn.Module) -> None:
    outer = {"forward": model.forward}
    model.forward = lambda x: outer["forward"](x) * 2


def by_partial(model: nn.Module) -> None:
    before = model.forward
    model.forward = partial(lambda layers, x: before(layers[0](x)) if False else before(x), [model[0]])


def by_default(model: nn.Module) -> None:
    model.forward = lambda x, layers=tuple(model): reduce(lambda value, layer: layer(value), layers, x)


def by_list(model: nn.Module) -> None:
    model.hidden = [nn.Sequential(*model)]  # type: ignore[misc]
    model.forward = lambda x: model.hidden[0](x)


def by_hook(model: nn.Module) -> None:
    layer = model[0]
    model[3].register_forward_hook(lambda module, args, output: output + 0 * layer.weight.sum())


@pytest.mark.parametrize("change", [by_closure, by_dict, by_partial, by_default, by_list, by_hook])
def test_functions_that_hold_layers_run_those_of_the_copy(change: Any) -> None:
    """A plain deepcopy takes functions as they are: the layers of the original would run."""
    model, x = net(), torch.randn(5, 4)
    change(model)
    model.eval()
    originals = {id(module) for module in model.modules()}
    assert not originals & set(ran(model, x))
    with torch.no_grad():
        assert_same_up_to_rounding(private_copy(model)(x), model(x))
    before = state(model)
    model.train()
    find_sites(model, x)
    sample(model, x, 0.2, 4)
    model.eval()
    assert_same(before, state(model))  # the statistics of BatchNorm among them


_OUTER: dict[str, Any] = {}


def test_a_wrapped_forward_in_a_global_is_an_error_too() -> None:
    model, x, y = net(), torch.randn(3, 4), torch.randn(3, 1)
    _OUTER["forward"] = model.forward
    model.forward = lambda x: _OUTER["forward"](x) * 2
    before = state(model)
    with pytest.raises(SiteError, match=r"used 'weight' of 0 past them"):
        calibrate(model, (x, y), progress=False)
    assert_same(before, state(model))


def test_statistics_of_batch_normalization_are_shared_and_followed() -> None:
    model, x = net().eval(), torch.randn(3, 4)
    own = private_copy(model)
    with torch.no_grad():
        model[1].running_mean += 1.0
        assert_same_up_to_rounding(own(x), model(x))  # a plain deepcopy has the statistics of before


def test_batch_normalization_that_trains_inside_is_refused_and_moves_nothing() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        return net.b(net.norm.train()(net.a(x)))

    model, x = Net(run, a=nn.Linear(4, 8), norm=nn.BatchNorm1d(8), b=nn.Linear(8, 1)).eval(), torch.randn(6, 4)
    before = state(model)
    with (
        pytest.warns(LatedropWarning, match="do not depend on each other"),
        pytest.raises(SiteError, match=r"its forward pass writes into \['norm.running_mean', 'norm.running_var'"),
    ):
        find_sites(model, x)
    assert_same(before, state(model))


def test_tied_weights_stay_tied_and_keep_their_attributes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model[0].weight.group = "decay"
    own = private_copy(model)
    assert own[0].weight is own[1].weight
    assert own[0].weight.group == "decay"


def test_an_embedding_with_max_norm_writes_into_its_own_weights() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        return net.last(net.head(net.table(x)).relu())

    layers = {"table": nn.Embedding(9, 4, max_norm=0.1), "head": nn.Linear(4, 4), "last": nn.Linear(4, 1)}
    model, x = Net(run, **layers), torch.randint(0, 9, (6,))
    before, network = model.table.weight.clone(), Network(model)
    sites = find_sites(network, x)
    sample(network, x, 0.2, 4, sites=sites)
    linearize(network, x, sites)
    assert torch.equal(model.table.weight, before)
    with torch.no_grad():
        model.head.weight.mul_(2)  # all other weights are shared: the copy follows, as one by deepcopy does not
        output = own_output(network, x)
        assert torch.equal(model.table.weight, before)
        assert_same_up_to_rounding(output, model(x))  # which now writes into the table
    assert not torch.equal(model.table.weight, before)


def test_old_style_weight_norm_can_be_copied() -> None:
    """Its weight is computed from others, and a plain deepcopy refuses it."""
    with pytest.warns(FutureWarning):
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.utils.weight_norm(nn.Linear(8, 1)))
    x = torch.randn(5, 4)
    model(x)
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(model)
    assert float(sample(model, x, 0.3, 20).variance.min()) > 0


def test_a_spectral_norm_in_train_mode_is_left_as_it_is() -> None:
    """Whoever reads its weight moves the vectors that it keeps."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.utils.parametrizations.spectral_norm(nn.Linear(8, 1)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sample(model, torch.randn(5, 4), 0.3, 5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_that_cannot_be_copied_names_the_attribute() -> None:
    model = net()
    model[3].lock = threading.Lock()
    with pytest.raises(SiteError, match=r"a model that can be copied; 3.lock \(lock\) cannot"):
        find_sites(model, torch.randn(3, 4))


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class MakesItsGraphAnew(nn.Module):
    """Leaves its generated code out of its state, as layers of e3nn do, and with it out of the memo of a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.code = nn.Parameter(torch.ones(3)), torch.fx.symbolic_trace(Scaled())

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_modules": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.code = torch.fx.symbolic_trace(Scaled())

    def forward(self, x: Tensor) -> Tensor:
        return self.code(x * self.weight)  # type: ignore[no-any-return]


def test_a_layer_may_make_its_graph_module_anew() -> None:
    model = nn.Sequential(nn.Linear(3, 3), MakesItsGraphAnew()).eval()
    made, x = private_copy(model), torch.ones(2, 3)
    with torch.no_grad():
        model[1].weight.mul_(3)
    torch.testing.assert_close(made(x), model(x), rtol=0, atol=0)
    assert made[1].code is not model[1].code


def test_a_network_follows_the_weights_and_notices_those_that_are_replaced() -> None:
    model, x = net().eval(), torch.randn(5, 4)
    network = Network(model)
    assert network.current() is network
    with torch.no_grad():
        model[0].weight += 1
    assert network.current() is network
    assert_same_up_to_rounding(sample(network, x, 0.2, 9).variance, sample(model, x, 0.2, 9).variance)
    model[4] = nn.Linear(8, 1)
    assert network.current() is not network
    model.double()
    assert next(network.current().copy.parameters()).dtype == torch.float64


def test_a_predictor_moves_with_its_model() -> None:
    model, x = net().eval(), torch.randn(60, 4)
    uq = calibrate(model, (x, torch.randn(60, 1)), progress=False)
    before = uq.predict(x)
    model.double()
    with pytest.warns(LatedropWarning, match="weights were changed"):
        after = uq.predict(x.double())
    assert_same_up_to_rounding(after.mean, before.mean.double(), dtype=torch.float32)


def test_a_layer_that_runs_in_a_thread_of_the_models_own_is_an_error() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(net.b, net.a(x)).result()

    with pytest.raises(SiteError, match="layer 'b' to run in the thread or task that makes the prediction"):
        find_sites(Net(run, a=nn.Linear(4, 8), b=nn.Linear(8, 1)), torch.randn(3, 4))


def test_a_function_without_a_backward_pass_is_said_in_words() -> None:
    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.round()

    def run(net: Net, x: Tensor) -> Tensor:
        return net.c(Rounded.apply(net.b(net.a(x))))

    model, x = Net(run, a=nn.Linear(4, 8), b=nn.Linear(8, 8), c=nn.Linear(8, 1)), torch.randn(40, 4)
    with pytest.raises(Exception, match=r"a model that autograd can differentiate.*Use method='sample'"):
        linearize(model, x)
    assert calibrate(model, (x, torch.randn(40, 1)), progress=False).predict(x).std.shape == (40, 1)  # by draws


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_checkpoint_around_a_weight_without_a_module_goes_by_draws(reentrant: bool) -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        return net.c(checkpoint(lambda h: F.linear(h, net.w).tanh(), net.a(x).relu(), use_reentrant=reentrant))

    weight = nn.Parameter(torch.randn(8, 8))
    model, x = Net(run, a=nn.Linear(4, 8), c=nn.Linear(8, 1), w=weight), torch.randn(40, 4)
    with pytest.raises(OutputError, match=r"Use method='sample'"):
        linearize(model, x)
    assert calibrate(model, (x, torch.randn(40, 1)), progress=False).predict(x).std.shape == (40, 1)

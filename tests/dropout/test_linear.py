"""First-order variance: exact where the network is affine in the masks, the limit of small rates elsewhere."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from latedrop import LatedropWarning, Network, calibrate, find_sites, linearize, sample
from latedrop.data.rows import map_rows
from latedrop.dropout import first_order
from latedrop.dropout.first_order import unit_variances
from latedrop.errors import ArgumentError, OutputError, SiteError
from latedrop.network.network import part_of
from networks import Net
from rounding import assert_same_doubles, assert_same_up_to_rounding
from zoo import ZOO, Case, columns, mlp

SMALL = 4e-3


def test_exact_where_the_output_is_affine_in_the_masks() -> None:
    model, x = nn.Sequential(nn.Linear(4, 30), nn.ReLU(), nn.Linear(30, 3)).double(), torch.randn(6, 4).double()
    result = linearize(model, x)
    with torch.no_grad():
        expected = (model[1](model[0](x))[:, None] * model[2].weight).square().sum(-1)
        assert_same_doubles(result.mean, model(x))
    assert_same_doubles(result.variance_by_site, expected[..., None])


def test_exact_for_a_convolution_summed_to_a_count() -> None:
    model, x = (
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 1, 3)).double(),
        torch.randn(5, 1, 9, 9).double(),
    )
    result = linearize(model, x, readout=lambda y: y.sum((1, 2, 3)))
    with torch.no_grad():
        hidden = model[1](model[0](x))
        ones = torch.ones(1, 1, 5, 5, dtype=torch.float64)
        weight = nn.functional.conv_transpose2d(ones, model[2].weight)
        expected = (hidden * weight).square().sum((1, 2, 3))
    assert_same_doubles(result.variance_by_site, expected[:, None, None])


@pytest.mark.parametrize("kind", ["element", "channel"])
@pytest.mark.parametrize("case", ZOO, ids=lambda case: case.name)
def test_it_is_the_limit_of_sampling_at_small_rates(case: Case, kind: str) -> None:
    model, x = case.make()
    model, x = model.double(), map_rows(x, lambda t: t.double() if t.is_floating_point() else t)
    sites = find_sites(model, x, kind=kind)
    result = linearize(model, x, sites, case.readout)
    assert result.variance_by_site.shape == (6, result.mean[0].numel(), len(sites))
    linear = result.variance(SMALL)
    draws = 4000
    moments = sample(model, x, SMALL, draws, sites=sites, readout=case.readout, keep_draws=True)
    fourth = (moments.outputs - moments.mean).pow(4).mean(0)
    error = ((fourth - moments.variance.square()).clamp_min(0) / draws).sqrt()
    # Second-order terms are of relative size rate; drops are rare, so that the error itself is an estimate.
    assert float(((moments.variance - linear).abs() / (error + 0.02 * linear)).mean()) < 2
    relative = error.mean() / moments.variance.mean()
    assert abs(float(moments.variance.mean() / linear.mean()) - 1) < 4 * float(relative) + 0.02


@pytest.mark.parametrize("case", ZOO, ids=lambda case: case.name)
def test_rows_do_not_depend_on_their_batch(case: Case) -> None:
    model, x = case.make()
    sites = find_sites(model, x)
    whole = linearize(model, x, sites, case.readout)
    parts = linearize(model, x, sites, case.readout, chunk=4)
    assert_same_doubles(whole.mean, parts.mean)
    assert_same_doubles(whole.variance_by_site, parts.variance_by_site)


def test_one_output_costs_one_backward_pass() -> None:
    model, x = columns(), torch.randn(4, 1, 8, 8)
    sites = find_sites(model, x)
    backward, forward = [], []
    handle = model.fuse.register_full_backward_hook(lambda *_: backward.append(1))
    model.fuse.register_forward_hook(lambda *_: forward.append(1))
    linearize(model, x, sites, readout=lambda y: y.sum((1, 2, 3)))
    handle.remove()
    assert len(backward) == len(forward) == 1


def test_without_batching_rules_outputs_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(5, 32), nn.GELU(), nn.Linear(32, 20)), torch.randn(6, 5)
    batched = linearize(model, x)
    grad = torch.autograd.grad

    def refuse(*args: object, is_grads_batched: bool = False, **kwargs: object) -> object:
        if is_grads_batched:
            raise RuntimeError("Batching rule not implemented for aten::something")
        return grad(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", refuse)
    looped = linearize(model, x)
    assert_same_doubles(batched.variance_by_site, looped.variance_by_site)


@pytest.mark.parametrize("kind", ["element", "channel"])
@pytest.mark.parametrize("case", ZOO, ids=lambda case: case.name)
def test_large_models_go_output_by_output(case: Case, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without masks and with a graph that is kept; here for small ones, too."""
    model, x = case.make()
    sites = find_sites(model, x, kind=kind)

    def three(output: Any) -> Tensor:
        value = part_of(output, case.readout).flatten(1)[:, :1]
        return torch.cat([value, value.sin(), value.square()], 1)

    together = linearize(model, x, sites, three)
    monkeypatch.setattr(first_order, "_LARGE", 0)
    assert_same_doubles(linearize(model, x, sites, three).variance_by_site, together.variance_by_site)


def test_out_of_memory_halves_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = mlp(), torch.randn(10, 5)
    sites = find_sites(model, x)
    expected = linearize(model, x, sites)
    seen = []

    def readout(y: Tensor) -> Tensor:
        seen.append(len(y))
        if len(y) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return y

    linear = linearize(model, x, sites, readout)
    assert seen == [10, 5, 2, 2, 2, 2, 2]
    assert_same_doubles(linear.variance_by_site, expected.variance_by_site)


def test_inputs_from_inference_mode_and_callers_without_gradients() -> None:
    model = mlp()
    with torch.inference_mode():
        x = torch.randn(3, 5)
    with torch.no_grad():
        assert linearize(model, x).variance_by_site.shape == (3, 1, 2)


def test_variance_at_a_rate() -> None:
    result = linearize(mlp(), torch.ones(4, 5))
    names = [site.name for site in result.sites]
    each = result.variance_by_site.reshape(*result.mean.shape, len(names))
    assert_same_doubles(result.variance(0.2), 0.25 * each.sum(-1))
    assert_same_doubles(result.variance({names[-1]: 0.5}), each[..., -1])
    with pytest.raises(ArgumentError, match="expected a rate in"):
        result.variance(1.5)


def test_units_add_up_to_their_site() -> None:
    model, x = columns(), torch.randn(1, 1, 8, 8)
    sites = find_sites(model, x)
    count = lambda y: y.sum((1, 2, 3))  # noqa: E731
    _, parts = unit_variances(model, x, sites, count)
    result = linearize(model, x, sites, count)
    for i, site in enumerate(sites):
        assert parts[0][site.name].shape == (site.count,)
        assert_same_doubles(parts[0][site.name].sum(), result.variance_by_site[0, 0, i])
    with pytest.raises(ArgumentError, match="expected one example; found 2"):
        unit_variances(model, x.expand(2, 1, 8, 8), sites, count)


def test_errors() -> None:
    no_graph = Net(torch.no_grad()(lambda net, x: net.inner(x)), inner=mlp())
    with pytest.raises(OutputError, match=r"one without a graph.*method='sample'"):
        linearize(no_graph, torch.randn(3, 5))
    with pytest.raises(ArgumentError, match=r"at most 1024 outputs.*found 4096.*propagate"):
        linearize(nn.Sequential(nn.Conv2d(1, 2, 1), nn.Conv2d(2, 1, 1)), torch.randn(2, 1, 64, 64))
    with pytest.raises(OutputError, match="NaN or inf in 3 of 3 rows"):
        linearize(mlp(), torch.randn(3, 5), readout=lambda y: y / 0)
    with pytest.raises(ArgumentError, match="at least 1 row"):
        linearize(mlp(), torch.randn(3, 5), chunk=0)


@pytest.mark.parametrize("outputs", [1, 3, 20])
@pytest.mark.parametrize("kind", ["element", "channel"])
def test_checkpointed_parts(outputs: int, kind: Any) -> None:
    """They run once more in the backward pass, in the same private copy."""

    def run(net: Net, x: Tensor) -> Tensor:
        def part(h: Tensor) -> Tensor:
            return net.body(h).tanh()

        h = net.enter(x).tanh()
        return net.leave(net.through(part, net.through(part, h)))

    layers = {"enter": nn.Linear(3, 8), "body": nn.Linear(8, 8), "leave": nn.Linear(8, outputs)}
    plain, x = Net(run, **layers, through=lambda part, h: part(h)), torch.randn(5, 3)
    expected = linearize(plain, x, find_sites(plain, x, kind=kind))
    linear = linearize(Net(run, **layers, through=partial(checkpoint, use_reentrant=False)), x, expected.sites)
    assert_same_doubles(linear.variance_by_site, expected.variance_by_site)


def adds(net: Net, x: Tensor) -> Tensor:
    """Add in place to what a layer has read."""
    h = net.a(x).relu()
    more = net.b(h).relu()
    return net.c(h.add_(more) if net.in_place else h + more)


def writes_over(net: Net, x: Tensor) -> Tensor:
    """Write over what entered a layer, after it ran; the output does not change."""
    h = net.a(x).tanh()
    y = net.b(h)
    if net.in_place:
        h.detach().zero_()
    return net.c(y.tanh())


@pytest.mark.parametrize("run", [adds, writes_over])
def test_inputs_of_sites_that_are_written_over(run: Any) -> None:
    layers, x = {"a": nn.Linear(4, 16), "b": nn.Linear(16, 16), "c": nn.Linear(16, 1)}, torch.randn(60, 4)
    model, usual = (Net(run, **layers, in_place=in_place) for in_place in (True, False))
    assert_same_up_to_rounding(linearize(model, x).variance_by_site, linearize(usual, x).variance_by_site)
    assert calibrate(model, (x, torch.randn(60, 1)), progress=False).predict(x[:2]).std.shape == (2, 1)


def cut(how: str) -> Net:
    """The output of a site goes on without its gradients."""

    def run(net: Net, x: Tensor) -> Any:
        h = torch.tanh(net.a(x))
        if how == "inference_mode":
            with torch.inference_mode():
                h = torch.tanh(net.b(h))
            return net.c(h)
        scores = net.b(h)
        if how == "argmax":
            return net.c(torch.tanh(h + scores.argmax(1, keepdim=True)))
        h = torch.tanh(scores)
        return {"y": net.c(h.detach() if how == "detach" else h), "other": net.unused(h)}

    torch.manual_seed(0)
    layers = {"a": nn.Linear(4, 10), "b": nn.Linear(10, 10), "c": nn.Linear(10, 1), "unused": nn.Linear(10, 1)}
    return Net(run, **layers)


@pytest.mark.parametrize("how", ["detach", "argmax"])
def test_sites_that_count_nothing_are_named_once(how: str) -> None:
    model, x = cut(how), torch.randn(32, 4)
    readout = "y" if how == "detach" else None
    sites, network = find_sites(model, x), Network(model)
    with pytest.warns(LatedropWarning, match=r"depends on the sites \['b'\] in a way that has no gradient") as caught:
        linearize(network, x, sites, readout)
    assert len(caught) == 1
    linearize(network, x, sites, readout)  # without a word


def test_a_branch_that_a_readout_leaves_out_is_no_such_site() -> None:
    model, x = cut("nothing"), torch.randn(32, 4)
    sites = linearize(model, x, find_sites(model, x), "y")  # warnings are errors here
    assert dict(zip([site.name for site in sites.sites], sites.variance_by_site.mean((0, 1)) > 0, strict=True)) == {
        **dict.fromkeys("bc", True),
        "unused": False,
    }


def test_a_part_in_inference_mode_is_refused() -> None:
    model, x = cut("inference_mode"), torch.randn(32, 4)
    with pytest.raises(SiteError, match=r"outside of torch.inference_mode\(\); the model runs 'b' inside"):
        linearize(model, x)

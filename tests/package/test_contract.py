"""The invariants of the design, over the zoo."""

import warnings
from contextlib import suppress

import pytest
import torch
from torch import nn

from latedrop import Sampling, calibrate, find_sites, inject, linearize, propagate, sample
from latedrop.data.rows import map_rows, row_count, take_rows
from latedrop.errors import LatedropWarning, SiteError
from latedrop.network.network import call, read
from rounding import assert_same_up_to_rounding
from seen import inputs_of
from untouched import assert_same, state
from zoo import ZOO, Case

RATE = 0.2
DRAWS = 12


@pytest.fixture(params=ZOO, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def targets(model: nn.Module, x: object, case: Case) -> torch.Tensor:
    output = read(call(model, x), case.readout, row_count(x)).detach()
    return output + torch.linspace(0.5, 1, output.numel()).reshape(output.shape)


def test_sites_are_those_with_a_weight_layer_upstream(case: Case) -> None:
    model, x = case.make()
    assert tuple(site.name for site in find_sites(model, x)) == case.sites


@pytest.mark.parametrize("train", [False, True])
def test_the_model_is_the_users(case: Case, train: bool) -> None:
    model, x = case.make()
    model.register_forward_hook(lambda *_: None)
    next(model.children()).register_forward_pre_hook(lambda *_: None)
    first = next(model.parameters())
    first.requires_grad_(False)
    if train:
        model.train()
        list(model.modules())[-1].eval()
    before = state(model)
    y = targets(case.make()[0], x, case)
    sites = find_sites(model, x)
    assert_same(before, state(model))
    sample(model, x, RATE, DRAWS, readout=case.readout)
    linearize(model, x, sites, case.readout)
    with suppress(SiteError), warnings.catch_warnings():
        warnings.simplefilter("ignore", LatedropWarning)  # of maps that are averaged
        propagate(model, x, RATE, sites, case.readout)
    assert_same(before, state(model))
    with inject(model, sites, RATE), torch.no_grad():
        call(model, x)
    assert_same(before, state(model))
    with pytest.warns(UserWarning, match="validation rows"):
        calibrate(model, (x, y), method=Sampling(rates=[RATE], draws=DRAWS), readout=case.readout).predict(x)
    assert_same(before, state(model))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_the_model_is_clean_after_an_interruption(case: Case, error: type[BaseException], engine: str) -> None:
    model, x = case.make()
    sites = find_sites(model, x)
    before = state(model)

    def readout(output: object) -> torch.Tensor:
        raise error("stop")

    with pytest.raises(error, match="stop"):
        sample(model, x, RATE, DRAWS, sites=sites, readout=readout, engine=engine)
    with pytest.raises(error, match="stop"):
        linearize(model, x, sites, readout)
    with pytest.raises(error, match="stop"):
        calibrate(model, (x, torch.zeros(6, 1)), readout=readout)
    assert_same(before, state(model))
    with pytest.raises(error, match="stop"), inject(model, sites, RATE):
        raise error("stop")
    assert_same(before, state(model))


def test_batchnorm_and_dropout_stay_in_eval_mode(case: Case) -> None:
    model, x = case.make()
    model.train()
    seen = []
    for module in model.modules():
        module.register_forward_hook(lambda module, *_: seen.append(module.training))
    with inject(model, find_sites(model, x), RATE), torch.no_grad():
        call(model, x)
    sample(model, x, RATE, DRAWS, readout=case.readout)
    assert seen
    assert not any(seen)


def test_rate_zero_is_the_plain_model_bit_for_bit(case: Case) -> None:
    model, x = case.make()
    model.requires_grad_(False)  # torch folds some products in another way where weights ask for gradients
    sites = find_sites(model, x)
    with torch.no_grad():
        plain = read(call(model, x), case.readout, 6)
        with inject(model, sites, 0.0):
            injected = read(call(model, x), case.readout, 6)
    moments = sample(model, x, 0.0, sites=sites, readout=case.readout)
    assert torch.equal(plain, injected)  # rate 0 multiplies by 1, on the same batch
    assert torch.equal(plain, moments.mean)  # rate 0 multiplies by 1, on the same batch
    assert not moments.variance.any()


@pytest.mark.parametrize("kind", ["element", "channel"])
def test_vectorised_equals_loop_and_inject(case: Case, kind: str) -> None:
    model, x = case.make()
    sites = find_sites(model, x, kind=kind)
    loop = sample(model, x, RATE, DRAWS, sites=sites, readout=case.readout, engine="loop", keep_draws=True)
    fast = sample(model, x, RATE, DRAWS, sites=sites, readout=case.readout, engine="rows", keep_draws=True)
    assert_same_up_to_rounding(fast.outputs, loop.outputs)
    assert_same_up_to_rounding(fast.variance, loop.variance)
    with inject(model, sites, RATE) as injection, torch.no_grad():
        for draw in range(DRAWS):
            assert injection.draw == draw
            assert_same_up_to_rounding(read(call(model, x), case.readout, 6), loop.outputs[draw])


@pytest.mark.parametrize("kind", ["element", "channel"])
def test_prediction_does_not_depend_on_batch_order_or_chunk(case: Case, kind: str) -> None:
    model, x = case.make()
    sites = find_sites(model, x, kind=kind)
    whole = sample(model, x, RATE, DRAWS, sites=sites, readout=case.readout)
    for part in (slice(0, 1), slice(2, 6)):
        alone = sample(model, take_rows(x, part), RATE, DRAWS, sites=sites, readout=case.readout, chunk=5)
        assert_same_up_to_rounding(alone.mean, whole.mean[part])
        assert_same_up_to_rounding(alone.variance, whole.variance[part])
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    turned = sample(model, map_rows(x, lambda t: t[order]), RATE, DRAWS, sites=sites, readout=case.readout, chunk=1)
    assert_same_up_to_rounding(turned.mean, whole.mean[order])
    assert_same_up_to_rounding(turned.variance, whole.variance[order])


@pytest.mark.parametrize("kind", ["element", "channel"])
def test_masks_of_its_own_for_every_example(case: Case, kind: str) -> None:
    model, x = case.make()
    copies = map_rows(x, lambda t: t[:1].expand_as(t))
    sites = find_sites(model, x, kind=kind)
    shared = sample(model, copies, RATE, DRAWS, sites=sites, readout=case.readout, keep_draws=True)
    own = sample(model, copies, RATE, DRAWS, sites=sites, readout=case.readout, shared=False, keep_draws=True)
    assert_same_up_to_rounding(shared.outputs[:, 0], shared.outputs[:, 5])
    assert not torch.allclose(own.outputs[:, 0], own.outputs[:, 5])


def test_masks_are_nested_in_the_rate(case: Case) -> None:
    model, x = case.make()
    sites = find_sites(model, x)
    zeros = []
    for rate in (0.1, 0.3):
        layer = model.get_submodule(sites[0].name)
        with inputs_of(layer) as seen, inject(model, sites, rate, draw=0), torch.no_grad():
            call(model, x)
        zeros.append(seen[0] == 0)
    assert bool((zeros[0] <= zeros[1]).all())
    assert zeros[0].sum() < zeros[1].sum()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_precisions(case: Case, dtype: torch.dtype) -> None:
    model, x = case.make()
    reference = sample(model, x, RATE, 40, readout=case.readout)
    model = model.to(dtype)
    x = map_rows(x, lambda t: t.to(dtype) if t.is_floating_point() else t)
    moments = sample(model, x, RATE, 40, readout=case.readout)
    assert moments.mean.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # The masks are the same; only the arithmetic of the model is coarser.
    rounding = {torch.float64: 1e-5, torch.bfloat16: 0.1, torch.float16: 0.02}[dtype]
    spread = reference.variance.sqrt().mean()
    assert float((moments.mean - reference.mean).abs().mean()) < rounding * max(1, float(reference.mean.abs().mean()))
    assert float((moments.variance.sqrt() - reference.variance.sqrt()).abs().mean() / spread) < 2 * rounding


def test_frozen_parameters_and_inference_tensors(case: Case) -> None:
    model, x = case.make()
    expected = sample(model, x, RATE, DRAWS, readout=case.readout)
    model.requires_grad_(False)
    with torch.no_grad():
        frozen = sample(model, x, RATE, DRAWS, readout=case.readout)
    assert_same_up_to_rounding(frozen.variance, expected.variance)
    assert not expected.mean.requires_grad

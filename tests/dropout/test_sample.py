"""Moments against closed forms (facts 1, 2 and 4 of the method), and the habits of the sampler."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from latedrop import find_sites, sample
from latedrop.dropout.moments import moments_of
from latedrop.dropout.sampling import _ThinnedNetworks as ThinnedNetworks
from networks import Net
from rounding import assert_same_up_to_rounding
from zoo import mlp

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def one_site(seed: int = 0) -> tuple[nn.Sequential, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 30), nn.ReLU(), nn.Linear(30, 2)).double()
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model, torch.randn(20, 4, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.5])
@pytest.mark.parametrize("shared", [True, False])
def test_fact_1_mean_and_variance_before_a_linear_layer(rate: float, shared: bool) -> None:
    model, x = one_site()
    draws = 20_000
    moments = sample(model, x, rate, draws, shared=shared, keep_draws=True)
    with torch.no_grad():
        hidden = model[1](model[0](x))
        mean = model(x)
        variance = rate / (1 - rate) * (hidden[:, None] * model[2].weight).square().sum(-1)
    fourth = (moments.outputs - mean).pow(4).mean(0)
    mean_error = (variance / draws).sqrt()
    variance_error = ((fourth - variance.square()) / draws).sqrt()
    # 40 values, all shared draws correlated: 5 standard errors leave less than 1e-4 for a false alarm.
    assert bool(((moments.mean - mean).abs() < 5 * mean_error).all())
    assert bool(((moments.variance - variance).abs() < 5 * variance_error).all())


def test_fact_4_the_standard_error_of_the_variance() -> None:
    model, x = one_site()
    draws, repeats = 50, 200
    estimates = torch.stack([sample(model, x[:1], 0.5, draws, seed=seed).variance[0, 0] for seed in range(repeats)])
    relative = float(estimates.std() / estimates.mean())
    predicted = math.sqrt(2 / (draws - 1))
    # The spread of a standard deviation over 200 repeats is 5 %; outputs of 30 dropped units are nearly Gaussian.
    assert abs(relative / predicted - 1) < 0.2


def test_moments_are_those_of_the_draws() -> None:
    model, x = one_site()
    for chunk in (1, 7, 64, 1000):
        moments = sample(model, x, 0.3, 100, chunk=chunk, keep_draws=True)
        assert moments.outputs.shape == (100, 20, 2)
        assert_same_up_to_rounding(moments.mean, moments.outputs.mean(0))
        assert_same_up_to_rounding(moments.variance, moments.outputs.var(0))


def test_variance_survives_a_large_mean() -> None:
    model, x = mlp(), torch.randn(8, 5)
    reference = sample(model.double(), x.double(), 0.1, 200).variance
    model = model.float()
    model[-1].bias.data += 1000.0
    shifted = sample(model, x, 0.1, 200, chunk=16).variance
    # Outputs near 1000 are rounded to 6e-5, which the variance inherits; naive sums of squares would be off by 0.1.
    torch.testing.assert_close(shifted.double(), reference, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_accumulated_in_float32(dtype: torch.dtype) -> None:
    model, x = mlp().to(dtype), torch.randn(8, 5).to(dtype)
    moments = sample(model, x, 0.2, 500, chunk=50, keep_draws=True)
    assert moments.mean.dtype == moments.variance.dtype == torch.float32
    exact = moments.outputs.double()
    assert_same_up_to_rounding(moments.mean.double(), exact.mean(0))
    assert_same_up_to_rounding(moments.variance.double(), exact.var(0))


def test_out_of_memory_halves_the_chunk_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = mlp(), torch.randn(8, 5)
    expected = sample(model, x, 0.2, 30)
    sizes = []
    run = ThinnedNetworks._pass

    def limited(self: ThinnedNetworks, x: Any, draws: range, prefix: Any) -> Tensor:
        sizes.extend([len(draws)] if len(draws) > 1 else [])  # one draw is run alone, to compare
        if len(draws) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return run(self, x, draws, prefix)

    monkeypatch.setattr(ThinnedNetworks, "_pass", limited)
    moments = sample(model, x, 0.2, 30, chunk=16)
    assert sizes[:3] == [16, 8, 4]
    assert sum(sizes[2:]) == 30
    assert_same_up_to_rounding(moments.mean, expected.mean)
    assert_same_up_to_rounding(moments.variance, expected.variance)


def test_memory_that_is_not_there_is_an_error_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(self: ThinnedNetworks, *_: Any) -> Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")

    monkeypatch.setattr(ThinnedNetworks, "_pass", never)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        sample(mlp(), torch.randn(8, 5), 0.2, 30)


def test_noise_of_the_models_own_is_counted_in_every_draw() -> None:
    run = lambda net, x: net.second(nn.functional.dropout(net.first(x), 0.5))  # noqa: E731
    model = Net(run, first=nn.Linear(3, 8), second=nn.Linear(8, 1))
    x = torch.randn(60, 3)  # so many numbers that layers before the first site would run once
    with pytest.warns(UserWarning, match="random numbers by itself") as caught:
        sites = find_sites(model, x)
    assert len(caught) == 1
    state = torch.random.get_rng_state()
    moments = sample(model, x, 1e-6, 50, sites=sites)
    assert bool((moments.variance > 1e-4).all())
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("draws", [2, 7, 50, 800])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, NEEDS_CUDA])])
def test_draws_that_are_all_equal_have_no_variance(draws: int, dtype: torch.dtype, device: str) -> None:
    for seed in range(50):
        one = torch.randn(5, dtype=dtype, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed % 16 - 8)
        mean, variance = moments_of(one.to(device).expand(draws, 5).contiguous())
        assert torch.equal(mean.cpu(), one)  # a mean of equal numbers is that number
        assert not bool(variance.any())

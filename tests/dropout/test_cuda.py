"""The contract of draws on a GPU; skipped where there is none."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from latedrop import Network, calibrate, find_sites, linearize, sample
from latedrop import Sampling as Draws
from latedrop.data.rows import map_rows
from latedrop.dropout.masks import draw_keys, kernel_for, keys_on, masks_from_keys, threshold
from latedrop.dropout.moments import Sampling
from latedrop.dropout.sampling import _ThinnedNetworks
from quick import quick
from zoo import ZOO, Case

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk"),
]

RATE = threshold(0.3), 1 / 0.7


@pytest.fixture(autouse=True)
def _exact_float32() -> None:
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def on_gpu(case: Case) -> tuple[nn.Module, object]:
    model, x = case.make()
    return model.cuda(), map_rows(x, lambda t: t.cuda())


@pytest.mark.parametrize("case", ZOO, ids=lambda case: case.name)
def test_vectorised_equals_loop_and_rows_are_independent(case: Case) -> None:
    model, x = on_gpu(case)
    state = torch.cuda.get_rng_state()
    sites = find_sites(model, x)
    assert tuple(site.name for site in sites) == case.sites
    auto = sample(model, x, 0.2, 12, sites=sites, readout=case.readout, chunk=5)
    loop = sample(model, x, 0.2, 12, sites=sites, readout=case.readout, engine="loop")
    torch.testing.assert_close(auto.mean, loop.mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(auto.variance, loop.variance, rtol=1e-3, atol=1e-6)
    alone = sample(model, map_rows(x, lambda t: t[2:4]), 0.2, 12, sites=sites, readout=case.readout)
    torch.testing.assert_close(auto.mean[2:4], alone.mean, rtol=1e-4, atol=1e-5)
    assert auto.mean.is_cuda
    assert torch.equal(state, torch.cuda.get_rng_state())


@pytest.mark.parametrize("case", ZOO, ids=lambda case: case.name)
def test_first_order_variance_is_that_of_the_cpu(case: Case) -> None:
    model, x = case.make()
    expected = linearize(model, x, readout=case.readout).variance_by_site
    model, x = on_gpu(case)
    variances = linearize(model, x, readout=case.readout).variance_by_site
    torch.testing.assert_close(variances.cpu(), expected, rtol=1e-3, atol=1e-8)


def channels_last(*shape: int) -> torch.Tensor:
    return torch.randn(shape[0] * shape[1], *shape[2:]).to(memory_format=torch.channels_last).unflatten(0, shape[:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("value", "shape"),
    [
        (torch.randn(3, 7, 50), (1, 50)),
        (torch.randn(7, 50).expand(3, 7, 50), (1, 50)),
        (torch.randn(3, 7, 50), (7, 50)),
        (torch.randn(3, 5000, 2), (1, 2)),
        (torch.randn(3, 2, 5000), (1, 5000)),
        (torch.randn(3, 1, 1), (1, 1)),
        (torch.randn(3, 9, 4, 11), (9, 1, 11)),
        (torch.randn(4, 3, 5).movedim(1, 0), (1, 5)),
        (torch.randn(3, 4, 5, 6)[..., ::2], (1, 5, 3)),
        (torch.randn(3, 4, 1, 6).expand(3, 4, 5, 6), (1, 5, 6)),
        (torch.randn(3, 4, 8, 6, 7), (1, 8, 6, 7)),
        (torch.randn(3, 4, 8, 6, 7), (1, 8, 1, 1)),
        (channels_last(3, 4, 8, 6, 7), (1, 8, 6, 7)),
        (channels_last(3, 4, 8, 6, 7), (1, 8, 1, 1)),
    ],
    ids=lambda given: str(tuple(given.shape) if isinstance(given, torch.Tensor) else given),
)
def test_the_fused_product_is_that_with_the_masks(
    value: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    value = value.to("cuda", dtype)
    keys = keys_on(draw_keys(5, range(3), "fc", 0), value.device)
    mask = masks_from_keys(keys, shape, 0.3)
    kernel = kernel_for(value, keys, shape, *RATE)
    for values in (value, 2 * value, torch.cat([value.flatten()] * 2)[1:][: value.numel()].view_as(value)):
        if values.stride() == value.stride():  # the last starts between two multiples of 16 bytes
            assert torch.equal(kernel(values), (values * mask).to(dtype))
    least = torch.tensor(RATE[0] - 2**31, dtype=torch.int32, device="cuda")
    from_memory = kernel_for(value, keys, shape, least, torch.tensor(RATE[1]).double().cuda())
    assert from_memory is not None
    assert torch.equal(from_memory(value), kernel(value))
    product = kernel(value)
    if 0 not in value.stride() and value[0].is_contiguous():
        assert product.is_contiguous()


def test_axes_that_the_fused_product_leaves_to_the_masks() -> None:
    keys = keys_on(draw_keys(5, range(3), "fc", 0), torch.device("cuda"))
    assert kernel_for(torch.randn(3, 4, 8, 6, device="cuda", dtype=torch.float64), keys, (1, 8, 6), *RATE) is None
    assert kernel_for(channels_last(3, 4, 8, 6, 7).cuda(), keys, (4, 8, 6, 7), *RATE) is None
    assert kernel_for(torch.randn(3, 0, 8, device="cuda"), keys, (1, 8), *RATE) is None


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_no_draw_waits_for_the_device() -> None:
    model, x = (
        nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 1)).cuda(),
        torch.randn(9, 5).cuda(),
    )
    sites, network = find_sites(model, x), Network(model)
    for chunk in (1, 3, 12):
        sample(network, x, 0.2, 12, sites=sites, chunk=chunk)  # kernels are compiled
        networks = _ThinnedNetworks(network, x, sites, Sampling(12, chunk=chunk))
        networks._rates = dict.fromkeys((site.name for site in sites), 0.2)
        try:
            torch.cuda.set_sync_debug_mode("error")
            outputs = list(networks._chunks())
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert sum(map(len, outputs)) == 12


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_a_call_waits_once() -> None:
    model = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 1)).cuda()
    x = torch.randn(1, 3, device="cuda")
    sites, model = find_sites(model, x), Network(model)
    sample(model, x, 0.1, 20, sites=sites)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            sample(model, x, 0.1, 20, sites=sites)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum("synchroniz" in str(warning.message) for warning in seen) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    for case in ZOO:
        model, x = on_gpu(case)
        model, x = model.to(dtype), map_rows(x, lambda t: t.to(dtype) if t.is_floating_point() else t)
        moments = sample(model, x, 0.2, 20, readout=case.readout)
        assert moments.variance.dtype == torch.float32
        assert bool(torch.isfinite(moments.variance).all())


def test_memory_does_not_grow_with_draws_and_running_out_halves_the_chunk() -> None:
    model = nn.Sequential(nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 1, 3, padding=1)).cuda()
    x = torch.randn(8, 1, 256, 256, device="cuda")
    sites = find_sites(model, x)
    peaks = []
    for draws in (20, 200):
        torch.cuda.reset_peak_memory_stats()
        sample(model, x, 0.1, draws, sites=sites)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] < 1.1 * peaks[0]
    expected = sample(model, x, 0.1, 64, sites=sites, chunk=2)
    _, total = torch.cuda.mem_get_info()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(4 * 2**30 / total)
    try:
        moments = sample(model, x, 0.1, 64, sites=sites, chunk=64)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    torch.testing.assert_close(moments.variance, expected.variance, rtol=1e-3, atol=1e-7)


def test_calibrate_takes_cpu_data_and_arrays() -> None:
    model = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 1)).cuda()
    x, y = torch.randn(64, 3), torch.randn(64)
    for method in ("sample", "linear", "propagate"):
        uq = quick([0.1, 0.3], 50)(model, (x.numpy(), y.numpy()), method=method)
        low, high = uq.predict(x).interval(0.9)
        assert low.is_cuda
        assert bool((low < high).all())


@pytest.mark.parametrize("case", ZOO, ids=lambda case: case.name)
def test_a_recorded_graph_draws_as_the_steps_do(case: Case) -> None:
    model, x = on_gpu(case)
    sites, network = find_sites(model, x), Network(model)
    for rate, seed in ((0.2, 0), (0.4, 1), (0.2, 0)):
        options = {"sites": sites, "readout": case.readout, "chunk": 5}
        recorded, auto = (sample(network, x, rate, 12, seed, engine=each, **options) for each in ("recorded", "auto"))
        torch.testing.assert_close(recorded.mean, auto.mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(recorded.variance, auto.variance, rtol=1e-3, atol=1e-6)


@pytest.mark.filterwarnings("ignore:only .* validation rows")
def test_recorded_predictions_of_several_threads() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)).cuda()
    x, y = torch.randn(200, 5), torch.randn(200, 1)
    for method in ("terms", "linear", Draws([0.1], 20)):
        uq = calibrate(model, (x, y), method=method, progress=False)
        batches = [torch.randn(64, 5).cuda() for _ in range(12)]
        steps = [uq.predict(batch) for batch in batches]
        uq.engine = "recorded"
        uq.predict(batches[0])

        def predicted(batch: torch.Tensor, uq: Any = uq) -> Any:
            with torch.cuda.stream(torch.cuda.Stream()):
                prediction = uq.predict(batch)
                torch.cuda.current_stream().synchronize()
            return prediction

        with ThreadPoolExecutor(4) as pool:
            recorded = list(pool.map(predicted, batches * 3))
        for one, other in zip(recorded, steps * 3, strict=True):
            torch.testing.assert_close(one.mean, other.mean, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(one.std, other.std, rtol=1e-3, atol=1e-6)
        with torch.no_grad():
            model[0].weight.mul_(1.1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            after = uq.predict(batches[0])
            uq.engine = "auto"
            torch.testing.assert_close(after.std, uq.predict(batches[0]).std, rtol=1e-3, atol=1e-6)

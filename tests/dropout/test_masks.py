import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from latedrop import Network, Site, find_sites, inject, sample
from latedrop.dropout import masks as room
from latedrop.dropout.masks import DrawMasks, draw_keys, hashes, keys_on, masks_from_keys, threshold
from rounding import assert_same_up_to_rounding, rounding

FLOAT = torch.zeros(())
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
]


def masks(
    seed: int, draws: Sequence[int], site: str, call: int, shape: tuple[int, ...], rate: float, like: Tensor
) -> Tensor:
    keys = draw_keys(seed, draws, site, call)
    on_device = keys if like.is_cpu else keys_on(keys, like.device)
    return masks_from_keys(on_device, shape, rate, double=like.dtype == torch.float64)


def uniforms(seed: int, draws: Sequence[int], site: str, call: int, shape: tuple[int, ...]) -> torch.Tensor:
    """The numbers in [0, 1) that are compared with a rate, by plain operators."""
    numbers = hashes(keys_on(draw_keys(seed, draws, site, call), FLOAT.device), math.prod(shape))
    return ((numbers.double() + 2**31) / 2**32).view(len(draws), *shape)


def test_numbers_depend_on_seed_draw_site_and_call_alone() -> None:
    base = uniforms(1, [2], "fc", 0, (64,))
    assert torch.equal(base, uniforms(1, [2], "fc", 0, (64,)))  # random numbers of the same key
    for other in ((2, [2], "fc", 0), (1, [3], "fc", 0), (1, [2], "fd", 0), (1, [2], "fc", 1)):
        assert not torch.equal(base, uniforms(*other, (64,)))


def test_the_numbers_of_a_known_unit() -> None:
    """Written down, so that results can be had again with later versions and on other machines."""
    numbers = (uniforms(7, [0, 5], "fc", 1, (3,)) * 2**32).long()
    assert numbers.tolist() == [[1848254676, 2739018590, 3305243690], [1366486670, 3288952557, 2517085695]]


@pytest.mark.parametrize("shape", [(3, 4), (70_000,), (7, 11, 1000)])
def test_a_chunk_holds_the_same_numbers_as_its_draws(shape: tuple[int, ...]) -> None:
    chunk = uniforms(0, range(5, 9), "fc", 0, shape)
    for i, draw in enumerate(range(5, 9)):
        assert torch.equal(chunk[i], uniforms(0, [draw], "fc", 0, shape)[0])  # random numbers of the same key


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_masks_are_the_numbers_that_reach_the_rate(dtype: torch.dtype, device: str) -> None:
    like = torch.zeros((), dtype=dtype, device=device)
    mask = masks(3, range(4), "fc", 2, (70, 1000), 0.2, like)
    wide = torch.promote_types(dtype, torch.float32)
    assert (mask.dtype, mask.device.type, mask.shape) == (wide, device, (4, 70, 1000))
    assert torch.equal(mask.cpu() > 0, uniforms(3, range(4), "fc", 2, (70, 1000)) >= 0.2)
    assert_same_up_to_rounding(mask[mask > 0].unique().cpu(), torch.tensor([1.25], dtype=wide))


def test_plain_operators_give_the_same_masks() -> None:
    keys = draw_keys(3, range(4), "fc", 2)
    plain = masks_from_keys(keys_on(keys, torch.device("cpu")), (500,), 0.3)
    assert torch.equal(plain, masks_from_keys(keys, (500,), 0.3))  # random numbers of the same key


def test_threads_give_the_same_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = masks(0, range(3), "fc", 0, (1001,), 0.3, FLOAT)
    monkeypatch.setattr(room, "_PARALLEL", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert torch.equal(masks(0, range(3), "fc", 0, (1001,), 0.3, FLOAT), expected)


def test_small_masks_are_remembered_and_are_the_same() -> None:
    """Masks of two calls, rates, shapes and dtypes of one site never stand for each other."""
    site = Site("fc", "element", "Linear", (5,))
    notes: dict[Any, Any] = {}

    def thinned(seed: int = 0, call: int = 0, rate: float = 0.3, rows: int = 1, dtype: Any = FLOAT.dtype) -> Tensor:
        draws = range(6)
        made = DrawMasks.of_network(notes, torch.device("cpu"), seed, {"fc": rate}, draws, draws)
        return made.thin(site, call, torch.ones(6 * rows, 5, dtype=dtype), (1, 5), 0)

    cases: list[dict[str, Any]] = [{}, {"seed": 1}, {"call": 1}, {"rate": 0.4}, {"rows": 2}, {"dtype": torch.float64}]
    first = [thinned(**case) for case in cases]
    remembered = notes["masks"][next(iter(notes["masks"]))].ready
    assert remembered
    again = [thinned(**case) for case in reversed(cases)][::-1]
    assert notes["masks"][next(iter(notes["masks"]))].ready is remembered
    for case, one, other in zip(cases, first, again, strict=True):
        notes.clear()
        assert torch.equal(one, other)  # random numbers of the same key
        assert torch.equal(one, thinned(**case))


def test_a_network_remembers_masks_of_a_bounded_number_of_seeds_in_threads_too() -> None:
    notes: dict[Any, Any] = {}

    def made(seed: int) -> DrawMasks:
        return DrawMasks.of_network(notes, torch.device("cpu"), seed % 200, {"fc": 0.1}, range(2), range(2))

    with ThreadPoolExecutor(4) as pool:
        assert [masks.seed for masks in pool.map(made, range(1000))] == [seed % 200 for seed in range(1000)]
    assert len(notes["masks"]) == room._MOST_MASKS
    assert made(999) is made(999)


@pytest.mark.parametrize("rate", [0.0007, 0.01, 0.3, 0.9])
def test_masks_keep_their_share_and_their_mean(rate: float) -> None:
    n = 400_000
    mask = masks(0, [0], "fc", 0, (n,), rate, FLOAT.double())[0]
    assert abs(float((mask == 0).double().mean()) - rate) < 4 * math.sqrt(rate * (1 - rate) / n)
    assert abs(float(mask.mean()) - 1) < 4 * math.sqrt(rate / (1 - rate) / n)
    assert mask.max().item() == pytest.approx(1 / (1 - rate), rel=rounding(torch.float64))


def test_thresholds_at_the_ends() -> None:
    assert threshold(0.5) == 2**31
    assert threshold(1 - 2**-40) == 2**32 - 1


def test_draws_of_neighbouring_seeds_are_independent() -> None:
    a, b = (uniforms(seed, range(100), "fc", 0, (100,)).flatten() for seed in (0, 1))
    correlation = torch.corrcoef(torch.stack([a, b]))[0, 1]
    assert abs(float(correlation)) < 4 / math.sqrt(a.numel())


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5])
def test_units_and_draws_drop_independently(rate: float) -> None:
    """Pairs at the distances of rows, channels and draws drop together as often as chance has it."""
    dropped = (uniforms(0, range(200), "fc", 0, (20_000,)) < rate).numpy()
    for distance in (1, 2, 16, 240, 320, 1024, 4096):
        pairs = int((dropped[:, distance:] & dropped[:, :-distance]).sum())
        expected = dropped[:, distance:].size * rate**2
        assert abs(pairs - expected) < 4 * math.sqrt(expected), distance
    between = np.corrcoef(dropped)[np.triu_indices(200, 1)]
    # 19,900 correlations: a standard error of 0.5 %.
    assert np.std(between) == pytest.approx(1 / math.sqrt(20_000), rel=0.05)
    for axis, size in ((1, 20_000), (0, 200)):
        counts = dropped.sum(axis)
        assert np.var(counts) == pytest.approx(size * rate * (1 - rate), rel=4 * math.sqrt(2 / len(counts)))


def test_what_is_remembered_is_no_tensor_of_the_mode_that_asked_first() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)), torch.randn(2, 3)
    sites = find_sites(model, x)
    network = Network(model)
    with torch.inference_mode():
        sample(network, x, 0.3, 2, seed=77, sites=sites, engine="loop")
    assert not any(mask.is_inference() for made in network.notes["masks"].values() for mask in made.ready.values())
    with inject(model, sites, 0.3, seed=77):
        model(x).sum().backward()
    with inject(model, sites, 0.3, draw=0):
        expected = model(x)
        torch.func.functionalize(model)(x)
        assert torch.equal(model(x), expected)  # the same call on the same batch
        with FakeTensorMode(allow_non_fake_inputs=True):
            model(x)
        assert type(model(x)) is torch.Tensor

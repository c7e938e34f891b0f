import math
from itertools import pairwise

import torch

from latedrop.masks import masks, uniforms

CPU = torch.device("cpu")


def test_numbers_depend_on_seed_draw_site_and_call_alone() -> None:
    base = uniforms(1, [2], "fc", 0, (64,), CPU)
    assert torch.equal(base, uniforms(1, [2], "fc", 0, (64,), CPU))
    for other in ((2, [2], "fc", 0), (1, [3], "fc", 0), (1, [2], "fd", 0), (1, [2], "fc", 1)):
        assert not torch.equal(base, uniforms(*other, (64,), CPU))


def test_a_chunk_holds_the_same_numbers_as_its_draws() -> None:
    chunk = uniforms(0, range(5, 9), "fc", 0, (3, 4), CPU)
    for i, draw in enumerate(range(5, 9)):
        assert torch.equal(chunk[i], uniforms(0, [draw], "fc", 0, (3, 4), CPU)[0])


def test_masks_keep_their_share_and_their_mean() -> None:
    n, rate = 200_000, 0.3
    mask = masks(uniforms(0, [0], "fc", 0, (n,), CPU)[0], rate, torch.float64)
    error = math.sqrt(rate * (1 - rate) / n)
    assert abs(float((mask == 0).double().mean()) - rate) < 4 * error
    assert abs(float(mask.mean()) - 1) < 4 * math.sqrt(rate / (1 - rate) / n)
    assert set(mask.unique().tolist()) == {0.0, 1 / (1 - rate)}


def test_masks_are_nested_in_the_rate() -> None:
    numbers = uniforms(0, range(3), "fc", 0, (500,), CPU)
    dropped = [masks(numbers, rate, torch.float32) == 0 for rate in (0.001, 0.01, 0.1, 0.5, 0.9)]
    for small, large in pairwise(dropped):
        assert bool((small <= large).all())


def test_draws_of_neighbouring_seeds_are_independent() -> None:
    a, b = (uniforms(seed, range(100), "fc", 0, (100,), CPU).flatten() for seed in (0, 1))
    correlation = torch.corrcoef(torch.stack([a, b]))[0, 1]
    assert abs(float(correlation)) < 4 / math.sqrt(a.numel())

"""Keep-masks of (seed, draw, site): the only place that rolls dice.

One uniform number per unit, `u ~ U[0, 1)`, comes from a generator seeded by `(seed, draw, site, call)` and
from nothing else. A unit is kept where `u >= rate` and then divided by `1 - rate` (inverted dropout), so
that the same numbers serve every rate and what is dropped at a small rate is dropped at a larger one.
The numbers depend on the kind of device, and not on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

__all__ = ["masks", "uniforms"]


def uniforms(
    seed: int, draws: Sequence[int], site: str, call: int, shape: Sequence[int], device: torch.device
) -> Tensor:
    """Uniform numbers `(len(draws), *shape)` of some draws of one site.

    >>> cpu = torch.device("cpu")
    >>> both = uniforms(0, [3, 4], "fc", 0, (5,), cpu)
    >>> torch.equal(both[1], uniforms(0, [4], "fc", 0, (5,), cpu)[0])
    True
    """
    generator = torch.Generator(device)
    numbers = torch.empty((len(draws), *shape), device=device)
    for row, draw in zip(numbers, draws, strict=True):
        generator.manual_seed(_key(seed, draw, site, call))
        row.uniform_(generator=generator)
    return numbers


def masks(numbers: Tensor, rate: float, dtype: torch.dtype) -> Tensor:
    """Inverted dropout masks from uniform numbers: 0, or `1 / (1 - rate)` where `u >= rate`."""
    return (numbers >= rate).to(dtype) / (1.0 - rate)


def _key(seed: int, draw: int, site: str, call: int) -> int:
    digest = blake2b(f"{seed}/{draw}/{site}/{call}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1

"""Keep-masks of (seed, draw, site): the only place that rolls dice.

A unit's number is a hash of where it is: `u = hash(seed, draw, site, call, unit) / 2^32`, uniform in [0, 1). A unit is
kept where `u >= rate` and then divided by `1 - rate` (inverted dropout), so that the same numbers serve every rate and
what is dropped at a small rate is dropped at a larger one. Nothing is stored between units: they come out alike in any
order, on any device and in any batch. The mixing is that of a 32-bit integer hash of three multiplications (constants
found by C. Wellons' search, 2018), with the draw's key put in twice.

The rows of a batch are `(draw, example)`, draws first. A value is seen as `(..., T, N, ...)` at the axis of its rows,
and multiplied by masks `(..., T, 1, ...)`: one for each draw, the same for all of its examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache
from hashlib import blake2b
from itertools import product
from math import ceil, prod
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from latedrop.errors import ArgumentError
from latedrop.network.sites import Site
from latedrop.torch_private import being_traced

__all__ = [
    *("ROUNDS", "STEP", "DrawMasks", "checked_seed", "draw_keys", "hashes", "keys_for", "keys_on", "masks"),
    *("masks_from_keys", "mixed", "signed", "split", "thinned", "threshold"),
]

ROUNDS = ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB), (14, 1))
"""Of the hash: `x ^= x >> shift`, then `x *= factor`."""

_ROUNDS = tuple((np.uint32(shift), np.uint32(factor)) for shift, factor in ROUNDS)
STEP, *_TIMES = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_BY = tuple(np.uint64(n) for n in (30, 27, 31))
_BLOCK = 2**16  # units that are hashed at once: their work space stays in the cache of a core
_PARALLEL = 2**19  # units from which threads are worth their start
_SMALL = {"cpu": 2**14, "cuda": 2**21}  # units of masks that are remembered: less work than to make them again
_FEW = 2**22  # numbers for which a plain product is quicker than the start of a kernel that also makes the mask


@dataclass
class DrawMasks:
    """The masks of some draws: a `Thinner`."""

    seed: int  # with the draw and the site it fixes every mask
    rates: Mapping[str, float]  # by site
    draws: range  # those that are rows of the batch, or the only one
    of: range  # all that will be asked for, one part after the other

    def thin(self, site: Site, call: int, value: Tensor, shape: tuple[int, ...], axis: int | None) -> Tensor:
        """Zero the units that the draws drop, and divide the others by `1 - rate`."""
        one = axis == 0 and shape[0] == 1 and len(value) == len(self.draws) and type(value) is Tensor
        if one and not _worth_a_kernel(value, self.draws, shape):
            return self._times(value, site, call, shape[1:], 0)  # one row: the same, in one operator
        if axis is None:
            return self.thin_split(site, call, value[None], shape, 0)[0]
        return self.thin_split(site, call, split(value, axis, len(self.draws)), shape, axis).flatten(axis, axis + 1)

    def thin_split(self, site: Site, call: int, value: Tensor, shape: tuple[int, ...], axis: int) -> Tensor:
        """Thin a value with an axis of draws before that of the examples."""
        rate, draws = self.rates[site.name], self.draws
        if rate == 0:
            return value
        if axis == 0 and _worth_a_kernel(value, draws, shape):
            keys = keys_for(self.seed, self.of, site.name, call, value.device)
            keys = keys if draws == self.of else keys[draws.start - self.of.start : draws.stop - self.of.start]
            thin = thinned(value, keys, shape, rate)
            if thin is not None:
                return thin
        return self._times(value, site, call, shape, axis)

    def _times(self, value: Tensor, site: Site, call: int, shape: tuple[int, ...], axis: int) -> Tensor:
        """Multiply by masks `(draws, *shape)`; in half precision the product alone is rounded."""
        made = masks(self.seed, self.draws, site.name, call, shape, self.rates[site.name], value)
        thin = value * (made.movedim(0, axis) if axis else made)
        return thin if thin.dtype == value.dtype else thin.to(value.dtype)


def split(value: Tensor, axis: int, times: int) -> Tensor:
    """Return the axis of the rows as two: draws, and the examples of each."""
    shape = value.shape
    return value.view(*shape[:axis], times, shape[axis] // times, *shape[axis + 1 :])


def checked_seed(seed: Any) -> int:
    """Return the seed as an int, or raise `ArgumentError`."""
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise ArgumentError(f"expected an integer seed; found {seed!r}.")
    return int(seed)


def _worth_a_kernel(value: Tensor, draws: range, shape: tuple[int, ...]) -> bool:
    """Return True if hash and product go into one: where masks or the value are large."""
    if value.device.type != "cuda" or (_are_small(draws, shape, value.device) and value.numel() <= _FEW):
        return False
    return not (value.requires_grad and torch.is_grad_enabled())


def masks(
    seed: int, draws: Sequence[int], site: str, call: int, shape: tuple[int, ...], rate: float, like: Tensor
) -> Tensor:
    """Return masks of some draws of one site, `(len(draws), *shape)`, in single precision, or double as `like`.

    Small masks are remembered, and are not to be changed in place.
    """
    device, double = like.device, like.dtype == torch.float64

    def make() -> Tensor:
        return masks_from_keys(keys_for(seed, draws, site, call, device), shape, rate, double=double)

    key = seed, draws, site, call, shape, rate, double
    return _remembered(key, device, make) if _are_small(draws, shape, device) else make()


def _are_small(draws: Sequence[int], shape: Sequence[int], device: torch.device) -> bool:
    """Return True if masks are remembered."""
    return len(draws) * prod(shape) <= _SMALL.get(device.type, 0)


def draw_keys(seed: int, draws: Sequence[int], site: str, call: int) -> npt.NDArray[np.uint32]:
    """Two 32-bit keys for each draw, `(len(draws), 2)`."""
    start = _start(seed, site, call)
    with np.errstate(over="ignore"):
        keys: npt.NDArray[np.uint32] = mixed(np.asarray(draws, np.uint64) * STEP + start).view(np.uint32)
    return keys.reshape(-1, 2)


def mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix numbers as splitmix64 does (Steele, Lea, Flood 2014); they are `STEP` apart."""
    z = (numbers ^ (numbers >> _BY[0])) * _TIMES[0]
    z = (z ^ (z >> _BY[1])) * _TIMES[1]
    return z ^ (z >> _BY[2])  # type: ignore[no-any-return]


def keys_for(seed: int, draws: Sequence[int], site: str, call: int, device: torch.device) -> Any:
    """Return the keys as `masks_from_keys` takes them on that device."""
    if device.type == "cpu":
        return draw_keys(seed, draws, site, call)
    return _remembered((seed, draws, site, call), device, lambda: keys_on(draw_keys(seed, draws, site, call), device))


def keys_on(keys: npt.NDArray[np.uint32], device: torch.device) -> Tensor:
    """Return the keys as an int32 tensor `(draws, 2)`, without waiting for the device."""
    return torch.from_numpy(keys.view(np.int32)).to(device, non_blocking=True)


def threshold(rate: float) -> int:
    """Return the hash below which a unit is dropped: `u < rate` in whole numbers."""
    return min(ceil(rate * 2**32), 2**32 - 1)


def masks_from_keys(keys: Any, shape: Sequence[int], rate: float, *, double: bool = False) -> Tensor:
    """Return masks from the keys of the draws: an array on the CPU, a tensor elsewhere."""
    units = prod(shape)
    if isinstance(keys, Tensor):
        keep = hashes(keys, units) >= threshold(rate) - 2**31
        return (keep.to(torch.float64 if double else torch.float32) * (1 / (1 - rate))).view(len(keys), *shape)
    values = np.empty((len(keys), units), np.float64 if double else np.float32)
    lowest, scale = np.uint32(threshold(rate)), values.dtype.type(1.0) / values.dtype.type(1.0 - rate)

    def fill(start: int, stop: int) -> None:
        """Hash the units of all draws by blocks, in place."""
        width = min(max(stop - start, 1), _BLOCK)
        height = min(_BLOCK // width, len(keys))
        counter = np.arange(width, dtype=np.uint32)
        work = np.empty((2, height, width), np.uint32)
        for top, left in product(range(0, len(keys), height), range(start, stop, width)):
            part, size = keys[top : top + height], min(width, stop - left)
            x, shifted = work[:, : len(part), :size]
            np.add(counter[:size], part[:, :1] + np.uint32(left), out=x)
            for number, (shift, factor) in enumerate(_ROUNDS):
                np.right_shift(x, shift, out=shifted)
                np.bitwise_xor(x, shifted, out=x)
                if factor > 1:
                    np.multiply(x, factor, out=x)
                if number == 0:
                    np.bitwise_xor(x, part[:, 1:], out=x)
            np.multiply(x >= lowest, scale, out=values[top : top + height, left : left + size])

    threads = min(torch.get_num_threads(), values.size // _PARALLEL)
    if threads > 1:
        ends = [units * i // threads for i in range(threads + 1)]
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(fill, ends[:-1], ends[1:]))
    else:
        fill(0, units)
    return torch.from_numpy(values).view(len(keys), *shape)


def thinned(value: Tensor, keys: Tensor, shape: Sequence[int], rate: float) -> Tensor | None:
    """`value` `(draws, ...)` times masks `(draws, *shape)` by CUDA keys, in one kernel; None where there is none."""
    kernels = _kernels() if value.dtype in (torch.float32, torch.float16, torch.bfloat16) else None
    if kernels is None:
        return None
    return kernels.product(value, keys, shape, threshold(rate), 1.0 / (1.0 - rate))  # type: ignore[no-any-return]


def hashes(keys: Tensor, units: int) -> Tensor:
    """Hash by plain tensor operators, for keys `(..., 2)`: int32 `(..., units)`, the hash less `2^31`.

    For devices without a kernel, and to be compiled.
    """
    a, b = keys.unsqueeze(-1).unbind(-2)
    x = torch.arange(units, dtype=torch.int32, device=keys.device) + a
    for number, (shift, factor) in enumerate(ROUNDS):
        x = x ^ ((x >> shift) & ((1 << (32 - shift)) - 1))  # torch shifts the sign along
        x = x * signed(factor)
        if number == 0:
            x = x ^ b
    return x ^ signed(2**31)


def signed(number: int) -> int:
    """32 bits as a signed number."""
    return number - 2**32 if number >= 2**31 else number


@lru_cache(maxsize=4096)
def _start(seed: int, site: str, call: int) -> Any:
    """Where the keys of a site begin."""
    digest = blake2b(f"{seed}/{site}/{call}".encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def _remembered(key: tuple[Any, ...], device: torch.device, make: Callable[[], Tensor]) -> Tensor:
    """Return `make()`, or what it gave before; but what a mode of torch has wrapped is for that mode alone."""
    stream = 0
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return make()
        stream = torch.cuda.current_stream(device).cuda_stream  # a copy is there for what comes later on its stream
    place = key, device, stream, torch.is_inference_mode_enabled()
    tensor = _KEPT.get(place)
    if tensor is None:
        tensor = make()
        if type(tensor) is Tensor and not being_traced():
            with _KEEPING:
                _KEPT[place] = tensor
                while len(_KEPT) > _MOST_KEPT or sum(mask.nbytes for mask in _KEPT.values()) > _MOST_BYTES:
                    _KEPT.pop(next(iter(_KEPT)))
    return tensor


_KEPT: dict[tuple[Any, ...], Tensor] = {}
_KEEPING = Lock()
_MOST_KEPT, _MOST_BYTES = 128, 2**28


@cache
def _kernels() -> Any:
    """Return the module of kernels for CUDA; None where Triton is not installed."""
    try:
        from latedrop.dropout import kernels
    except ImportError:
        return None
    return kernels

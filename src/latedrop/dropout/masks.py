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
from dataclasses import dataclass, field
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
    *("ROUNDS", "STEP", "DrawMasks", "checked_seed", "draw_keys", "hashes", "kernel_for", "keys_on"),
    *("masks_from_keys", "mixed", "remembered", "signed", "split", "stream_of", "threshold"),
]

ROUNDS = ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB), (14, 1))
"""Of the hash: `x ^= x >> shift`, then `x *= factor`."""

_ROUNDS = tuple((np.uint32(shift), np.uint32(factor)) for shift, factor in ROUNDS)
STEP, *_TIMES = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_BY = tuple(np.uint64(n) for n in (30, 27, 31))
_BLOCK = 2**16  # units that are hashed at once: their work space stays in the cache of a core
_PARALLEL = 2**19  # units from which threads are worth their start
_SMALL = {"cpu": 2**14, "cuda": 2**21}  # units of masks that are remembered: less work than to make them again
_ROOM, _MOST_KEYS, _MOST_MASKS = 2**22, 2**12, 64  # bytes of masks of some draws; keys, and `DrawMasks`, of a network


@dataclass
class DrawMasks:
    """The masks of some draws: a `Thinner`. Small masks and kernels that are ready to run are remembered."""

    seed: int  # with the draw and the site it fixes every mask
    rates: Mapping[str, float]  # by site
    draws: range  # those that are rows of the batch, or the only one
    of: range  # all that will be asked for, one part after the other
    keys: dict[Any, Tensor] = field(default_factory=dict)  # of all draws, on a device
    ready: dict[Any, Any] = field(default_factory=dict)
    room: int = _ROOM

    @classmethod
    def of_network(
        cls, notes: dict[Any, Any], device: torch.device, seed: int, rates: Mapping[str, float], draws: range, of: range
    ) -> DrawMasks:
        """Return the same object for the same draws, from the notes of a network."""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return cls(seed, rates, draws, of)
        stream = stream_of(device)
        keys = remembered(notes, ("keys", stream), None, dict)
        if len(keys) > _MOST_KEYS:
            keys.clear()
        key, made = (seed, draws, of, stream, *rates.items()), remembered(notes, "masks", None, dict)
        masks: DrawMasks = remembered(made, key, _MOST_MASKS, lambda: cls(seed, rates, draws, of, keys))
        if len(masks.ready) > _MOST_KEYS:
            masks.ready, masks.room = {}, _ROOM
        return masks

    def thin(self, site: Site, call: int, value: Tensor, shape: tuple[int, ...], axis: int | None) -> Tensor:
        """Zero the units that the draws drop, and divide the others by `1 - rate`."""
        if axis is None:
            return self.thin_split(site, call, value[None], shape, 0)[0]
        if axis == 0 and shape[0] == 1 and value.shape[0] == len(self.draws):
            return self.thin_split(site, call, value, shape[1:], 0)  # one row
        return self.thin_split(site, call, split(value, axis, len(self.draws)), shape, axis).flatten(axis, axis + 1)

    def thin_split(self, site: Site, call: int, value: Tensor, shape: tuple[int, ...], axis: int) -> Tensor:
        """Thin a value with an axis of draws before that of the examples."""
        rate = self.rates[site.name]
        if rate == 0:
            return value
        if value.is_cuda and not (value.requires_grad and torch.is_grad_enabled()):
            draws_first = value.movedim(axis, 0) if axis else value
            place = site.name, call, axis, value.shape, value.stride(), value.dtype
            kernel: Any = self.ready.get(place)
            if kernel is None:  # False: there is none
                keys = self._keys(site.name, call, value.device)
                kernel = kernel_for(draws_first, keys, shape, threshold(rate), 1.0 / (1.0 - rate)) or False
                self.ready[place] = kernel
            if kernel:
                thinned: Tensor = kernel(draws_first)
                return thinned.movedim(0, axis) if axis else thinned
        made = self._mask(site.name, call, shape, rate, value)
        thin = value * (made.movedim(0, axis) if axis else made)
        return thin if thin.dtype == value.dtype else thin.to(value.dtype)  # the product alone is rounded

    def _mask(self, site: str, call: int, shape: tuple[int, ...], rate: float, like: Tensor) -> Tensor:
        """Return masks `(draws, *shape)`, not to be changed in place."""
        double = like.dtype == torch.float64
        place = site, call, shape, double
        mask: Tensor | None = self.ready.get(place)
        if mask is None:
            mask = masks_from_keys(self._keys(site, call, like.device), shape, rate, double=double)
            small = mask.numel() <= _SMALL.get(like.device.type, 0) and mask.nbytes <= self.room
            if small and type(mask) is Tensor and not being_traced():
                self.ready[place], self.room = mask, self.room - mask.nbytes
        return mask

    def _keys(self, site: str, call: int, device: torch.device) -> Any:
        """Return the keys of the draws: an array on a CPU, else a part of the keys of all draws on the device."""
        if device.type == "cpu":
            return draw_keys(self.seed, self.draws, site, call)
        place, start = (self.seed, self.of, site, call, device), self.draws.start - self.of.start
        keys = self.keys.get(place)
        if keys is None:
            keys = self.keys[place] = keys_on(draw_keys(self.seed, self.of, site, call), device)
        return keys[start : start + len(self.draws)]


def stream_of(device: torch.device) -> int:
    """Return the current stream of a CUDA device, 0 elsewhere: a copy is there for what comes later on its stream."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def remembered(cache: dict[Any, Any], key: Any, most: int | None, make: Callable[[], Any]) -> Any:
    """Return the value of a key, made where there is none; the oldest of `most` values makes room for it."""
    value = cache.get(key)
    if value is None:
        with _REMEMBERING:
            value = cache.get(key)
            if value is None:
                while most is not None and len(cache) >= most:
                    cache.pop(next(iter(cache)))
                value = cache[key] = make()
    return value


_REMEMBERING = Lock()


def split(value: Tensor, axis: int, times: int) -> Tensor:
    """Return the axis of the rows as two: draws, and the examples of each."""
    shape = value.shape
    return value.view(*shape[:axis], times, shape[axis] // times, *shape[axis + 1 :])


def checked_seed(seed: Any) -> int:
    """Return the seed as an int, or raise `ArgumentError`."""
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise ArgumentError(f"expected an integer seed; found {seed!r}.")
    return int(seed)


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


def kernel_for(
    value: Tensor, keys: Tensor, shape: Sequence[int], least: int | Tensor, scale: float | Tensor
) -> Callable[[Tensor], Tensor] | None:
    """Return a function that multiplies values like this one, `(draws, ...)`, by masks `(draws, *shape)`.

    It is one CUDA kernel, see `kernels.product`; None where there is none for such values.
    """
    kernels = _kernels() if value.dtype in (torch.float32, torch.float16, torch.bfloat16) else None
    if kernels is None or type(value) is not Tensor or (being_traced() and not isinstance(least, Tensor)):
        return None
    return kernels.product(value, keys, shape, least, scale)  # type: ignore[no-any-return]


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


@cache
def _kernels() -> Any:
    """Return the module of kernels for CUDA; None where Triton is not installed."""
    try:
        from latedrop.dropout import kernels
    except ImportError:
        return None
    return kernels

"""Mean and variance over thinned networks, streamed.

With `y_t` the output of draw `t`, the mean is `sum_t y_t / T` and the variance `sum_t (y_t - mean)^2 / (T - 1)`,
whose relative standard error is about `sqrt(2 / (T - 1))`. Draws run in chunks, vectorised with `torch.vmap`
over the masks: what comes before the first site is computed once per chunk. Chunks are merged as in Chan,
Golub, LeVeque (1983), so that memory does not grow with the number of draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias
from warnings import catch_warnings, filterwarnings

import torch
from torch import Tensor, nn

from latedrop.errors import ArgumentError, LatedropError, OutputError
from latedrop.forward import Readout, bare, fitting_batches, output_of, place, row_count, undisturbed
from latedrop.inject import checked_seed, hooked
from latedrop.masks import masks, uniforms
from latedrop.sites import Rate, Site, find_sites, rates_by_site

__all__ = ["Engine", "Moments", "check_finite", "checked_draws", "out_of_memory", "plain_output", "sample", "widened"]

Engine: TypeAlias = Literal["auto", "vmap", "loop"]

_CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 2 * 2**30}


@dataclass(frozen=True)
class Moments:
    """Mean and variance over draws.

    Attributes:
        mean: `(N, ...)`, float32 or float64.
        variance: `(N, ...)`, the unbiased variance over draws.
        draws: how many thinned networks were run.
        outputs: `(draws, N, ...)`, every draw, where they were kept.
    """

    mean: Tensor
    variance: Tensor
    draws: int
    outputs: Tensor | None = None

    def first(self, rows: int) -> Moments:
        """Those of the first rows."""
        outputs = self.outputs[:, :rows] if self.outputs is not None else None
        return Moments(self.mean[:rows], self.variance[:rows], self.draws, outputs)

    @classmethod
    def joined(cls, parts: Sequence[Moments]) -> Moments:
        """One batch after the other."""
        kept = [part.outputs for part in parts if part.outputs is not None]
        outputs = torch.cat(kept, 1) if kept else None
        mean, variance = torch.cat([part.mean for part in parts]), torch.cat([part.variance for part in parts])
        return cls(mean, variance, parts[0].draws, outputs)


def sample(
    model: nn.Module,
    x: Any,
    rate: Rate,
    draws: int = 100,
    seed: int = 0,
    sites: Sequence[Site] | None = None,
    readout: Readout = None,
    chunk: int | None = None,
    shared: bool = True,
    *,
    keep_draws: bool = False,
    engine: Engine = "auto",
) -> Moments:
    """Run `draws` thinned copies of `model` on `x` and return the moments of their outputs.

    Args:
        model: any trained module; it is left as it was.
        x: inputs with N rows: a tensor or array, a tuple (several inputs) or a mapping.
        rate: probability that a unit is dropped; a float, or a mapping from name patterns to floats.
        draws: number of thinned networks, at least 2.
        seed: fixes all masks.
        sites: from `find_sites`; found by a probe pass where None.
        readout: what of the output to take, before the moments.
        chunk: draws that run at once; chosen to fit memory where None, halved when memory runs out.
        shared: True: a draw is one thinned network for all examples; False: every example has its own masks.
        keep_draws: also return every draw.
        engine: `"vmap"`, `"loop"`, or `"auto"`: vmap where every operator of the model allows it.

    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> moments = sample(net, torch.ones(5, 2), rate=0.1, draws=20)
    >>> moments.mean.shape, moments.variance.shape, moments.draws
    (torch.Size([5, 1]), torch.Size([5, 1]), 20)
    """
    draws, seed = checked_draws(draws), checked_seed(seed)
    if chunk is not None and chunk < 1:
        raise ArgumentError(f"expected chunk to be at least 1 draw; found {chunk}.")
    if engine not in ("auto", "vmap", "loop"):
        raise ArgumentError(f"expected engine 'auto', 'vmap' or 'loop'; found {engine!r}.")
    x = place(x, model)
    sites = find_sites(model, x) if sites is None else sites
    rates = rates_by_site(sites, rate)
    parts = fitting_batches(model, x)
    if parts is not None:
        run = partial(sample, keep_draws=keep_draws, engine=engine)
        options = (rate, draws, seed, sites, readout, chunk, shared)
        return Moments.joined([run(model, part, *options).first(rows) for part, rows in parts])
    active = [site for site in sites if rates[site.name] > 0]
    if not active:
        mean = plain_output(model, x, readout)
        kept = mean.expand(draws, *mean.shape).clone() if keep_draws else None
        return Moments(mean, torch.zeros_like(mean), draws, kept)
    model = bare(model)
    stream, kept_draws = _Stream(), []
    with undisturbed(model):
        for outputs in _Draws(model, x, active, rates, seed, readout, shared).chunks(draws, chunk, engine):
            outputs = widened(outputs)
            stream.add(outputs)
            if keep_draws:
                kept_draws.append(outputs)
    check_finite(stream.mean, f"at rate {rate}")
    return Moments(stream.mean, stream.variance, draws, torch.cat(kept_draws) if keep_draws else None)


def plain_output(model: nn.Module, x: Any, readout: Readout = None) -> Tensor:
    """The model's own output on `x`, read out, `(N, ...)` in float32 or better; nothing is injected."""
    x = place(x, model)
    parts = fitting_batches(model, x)
    if parts is not None:
        return torch.cat([plain_output(model, part, readout)[:rows] for part, rows in parts])
    with undisturbed(model, layers=False):
        output = widened(output_of(model, x, readout))
    check_finite(output, "without dropout")
    return output


def checked_draws(draws: Any) -> int:
    """The number of draws as an int, or `ArgumentError`."""
    if isinstance(draws, bool) or not hasattr(draws, "__index__") or int(draws) < 2:
        raise ArgumentError(f"expected at least 2 draws, as one has no variance; found {draws!r}.")
    return int(draws)


class _Draws:
    """Outputs of thinned networks, chunk by chunk."""

    def __init__(
        self,
        model: nn.Module,
        x: Any,
        sites: Sequence[Site],
        rates: dict[str, float],
        seed: int,
        readout: Readout,
        shared: bool,
    ) -> None:
        self.model, self.x, self.sites, self.rates = model, x, sites, rates
        self.seed, self.readout, self.shared = seed, readout, shared
        self._current: range = range(0)
        self._index: Tensor | int = 0

    def chunks(self, draws: int, chunk: int | None, engine: Engine) -> Iterator[Tensor]:
        """Yield outputs `(t, N, ...)` until `draws` are done."""
        chunk = min(draws, chunk or self._fitting_chunk())
        vectorise = engine != "loop"
        done = 0
        with hooked(self.model, self.sites, self._mask, shared=self.shared):
            while done < draws:
                self._current = range(done, min(done + chunk, draws))
                before = self._random_states() if done == 0 else []
                try:
                    outputs = self._vectorised() if vectorise else self._one_by_one()
                except LatedropError:
                    raise
                except Exception as error:
                    if out_of_memory(error) and chunk > 1:
                        chunk = chunk // 2
                        torch.cuda.empty_cache()
                    elif vectorise and engine == "auto" and not out_of_memory(error):
                        vectorise = False  # some operator of this model has no batching rule
                    else:
                        raise
                else:
                    if vectorise and done == 0 and engine == "auto" and self._drew_by_itself(before):
                        vectorise = False  # vmap would give all draws of a chunk the model's own noise of one
                        continue
                    yield outputs
                    done += len(outputs)

    def _random_states(self) -> list[Tensor]:
        device = next(self.model.parameters()).device
        own = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
        return [torch.random.get_rng_state(), *own]

    def _drew_by_itself(self, before: list[Tensor]) -> bool:
        return not all(torch.equal(a, b) for a, b in zip(before, self._random_states(), strict=True))

    def _vectorised(self) -> Tensor:
        def one(index: Tensor) -> Tensor:
            self._index = index
            return output_of(self.model, self.x, self.readout)

        device = next(self.model.parameters()).device
        with catch_warnings():
            filterwarnings("ignore", message="There is a performance drop because we have not yet implemented")
            result: Tensor = torch.vmap(one, randomness="same")(torch.arange(len(self._current), device=device))
        return result

    def _one_by_one(self) -> Tensor:
        self._index, self._current = 0, self._current[:1]
        return output_of(self.model, self.x, self.readout)[None]

    def _mask(self, site: Site, call: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
        numbers = uniforms(self.seed, self._current, site.name, call, shape, like.device)
        return masks(numbers, self.rates[site.name], like.dtype)[self._index]

    def _fitting_chunk(self) -> int:
        parameter = next(self.model.parameters())
        units = sum(site.count * site.calls for site in self.sites)
        per_draw = 3 * units * (row_count(self.x) + 1) * parameter.element_size()
        return max(1, _CHUNK_BYTES.get(parameter.device.type, 2**28) // per_draw)


class _Stream:
    """Running mean and sum of squared deviations over chunks of draws."""

    def __init__(self) -> None:
        self.count = 0
        self._origin: Tensor | None = None
        self._mean: Tensor | None = None
        self._squares: Tensor | None = None

    def add(self, outputs: Tensor) -> None:
        if self._origin is None:
            self._origin = outputs[0].clone()
        # Relative to the first draw: draws that are all equal then have a variance of exactly 0.
        outputs = outputs - self._origin
        count = len(outputs)
        mean = outputs.mean(0)
        squares = (outputs - mean).square_().sum(0)
        if self._mean is None or self._squares is None:
            self._mean, self._squares = mean, squares
        else:
            delta = mean - self._mean
            total = self.count + count
            self._mean = self._mean + delta * (count / total)
            self._squares = self._squares + squares + delta.square() * (self.count * count / total)
        self.count += count

    @property
    def mean(self) -> Tensor:
        assert self._origin is not None
        assert self._mean is not None
        return self._origin + self._mean

    @property
    def variance(self) -> Tensor:
        assert self._squares is not None
        return self._squares / (self.count - 1)


def widened(output: Tensor) -> Tensor:
    """The tensor in float32, or in float64 where it is."""
    return output if output.dtype == torch.float64 else output.float()


def check_finite(output: Tensor, when: str) -> None:
    """Raise `OutputError` where an output has NaN or inf."""
    if not bool(torch.isfinite(output).all()):
        rows = int((~torch.isfinite(output)).reshape(len(output), -1).any(1).sum())
        raise OutputError(
            f"expected a finite output; found NaN or inf in {rows} of {len(output)} rows {when}. "
            "Check the model on these inputs; in half precision, try bfloat16 or a smaller rate."
        )


def out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory ran out, on any device."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in str(error)

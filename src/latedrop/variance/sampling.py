"""Mean and variance over thinned networks, streamed.

With `y_t` the output of draw `t`, the mean is `sum_t y_t / T` and the variance `sum_t (y_t - mean)^2 / (T - 1)`,
whose relative standard error is about `sqrt(2 / (T - 1))`. Draws run in chunks, vectorised with `torch.vmap`
over the masks, or one by one where that is faster; what no mask reaches is computed once for all draws and
rates (`prefix`). Chunks are merged as in Chan, Golub, LeVeque (1983), so that memory does not grow with the
number of draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from threading import RLock
from typing import Any, Literal, TypeAlias, get_args
from warnings import catch_warnings, filterwarnings

import torch
from torch import Tensor, nn
from torch._functorch.vmap import lazy_load_decompositions, vmap_increment_nesting  # type: ignore[attr-defined]

from latedrop.errors import ArgumentError, LatedropError, OutputError
from latedrop.masking.inject import checked_seed, hooked, mask_for
from latedrop.masking.masks import are_small, keys_for, masks, masks_from_keys
from latedrop.model.forward import (
    Readout,
    all_finite,
    bare,
    fitting_batches,
    generators,
    named_layers,
    output_of,
    place,
    row_count,
    undisturbed,
)
from latedrop.model.sites import Rate, Site, find_sites, rates_by_site
from latedrop.variance.engine.compiled import Part, merged, program
from latedrop.variance.engine.folding import Fused, batched, foldable
from latedrop.variance.engine.prefix import Prefix

__all__ = [
    "ENGINES",
    "Engine",
    "Moments",
    "check_finite",
    "checked_draws",
    "out_of_memory",
    "own_output",
    "plain_output",
    "sample",
    "sample_rates",
    "widened",
]

Engine: TypeAlias = Literal["auto", "vmap", "loop", "compiled"]
ENGINES = get_args(Engine)

_CACHE_BYTES = {"cpu": 32 * 2**20}  # of all draws that run at once, where these are small; beyond it caches overflow
_SMALL_BYTES = 256 * 2**20  # the same on other devices, which have no such cache to lose
_ONE_AT_A_TIME = RLock()  # hooks, patched layers and torch's switches are the same for all threads
_FEW = 2**12  # outputs for which one operator is quicker than three; it takes longer for each
_FULL = 20  # draws that fill any other device; with more, only memory would grow


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
        engine: `"auto"`: many draws at once with `torch.vmap`, or one by one where that is faster or some operator
            does not allow it; `"vmap"` and `"loop"` force one of them; `"compiled"`: see `compiled`, for many
            predictions on inputs of one shape, as the first takes seconds to compile.

    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> moments = sample(net, torch.ones(5, 2), rate=0.1, draws=20)
    >>> moments.mean.shape, moments.variance.shape, moments.draws
    (torch.Size([5, 1]), torch.Size([5, 1]), 20)
    """
    draws, seed = checked_draws(draws), checked_seed(seed)
    options = _Options(draws, seed, readout, chunk, shared, keep_draws, engine)
    x = place(x, model, check=engine != "compiled")
    sites = find_sites(model, x) if sites is None else sites
    return _sampled(model, x, [rate], sites, options, lambda: None)[0]


def sample_rates(
    model: nn.Module,
    x: Any,
    rates: Sequence[Rate],
    sites: Sequence[Site],
    draws: int,
    seed: int = 0,
    readout: Readout = None,
    chunk: int | None = None,
    shared: bool = True,
    *,
    engine: Engine = "auto",
    tick: Callable[[], Any] = lambda: None,
) -> list[Moments]:
    """`sample` at several rates, on inputs that were placed; what the rates share is computed once.

    `tick` is called after each rate.
    """
    options = _Options(checked_draws(draws), checked_seed(seed), readout, chunk, shared, engine=engine)
    return _sampled(model, x, rates, sites, options, tick)


def plain_output(model: nn.Module, x: Any, readout: Readout = None) -> Tensor:
    """The model's own output on `x`, read out, `(N, ...)` in float32 or better; nothing is injected."""
    return own_output(model, place(x, model), readout)


def own_output(model: nn.Module, x: Any, readout: Readout = None) -> Tensor:
    """`plain_output` of inputs that were placed."""
    parts = fitting_batches(model, x)
    if parts is not None:
        return torch.cat([own_output(model, part, readout)[:rows] for part, rows in parts])
    with undisturbed(model, layers=False):
        output = widened(output_of(model, x, readout))
    check_finite(output, "without dropout")
    return output


def checked_draws(draws: Any) -> int:
    """The number of draws as an int, or `ArgumentError`."""
    if isinstance(draws, bool) or not hasattr(draws, "__index__") or int(draws) < 2:
        raise ArgumentError(f"expected at least 2 draws, as one has no variance; found {draws!r}.")
    return int(draws)


@dataclass(frozen=True)
class _Options:
    """The arguments of `sample` that all rates share."""

    draws: int
    seed: int
    readout: Readout
    chunk: int | None
    shared: bool
    keep: bool = False
    engine: Engine = "auto"

    def __post_init__(self) -> None:
        if self.chunk is not None and self.chunk < 1:
            raise ArgumentError(f"expected chunk to be at least 1 draw; found {self.chunk}.")
        if self.engine not in ENGINES:
            raise ArgumentError(f"expected engine to be one of {ENGINES}; found {self.engine!r}.")
        if self.engine == "compiled" and self.keep:
            raise ArgumentError("expected another engine with keep_draws=True; the compiled one has moments alone.")


def _sampled(
    model: nn.Module, x: Any, rates: Sequence[Rate], sites: Sequence[Site], options: _Options, tick: Callable[[], Any]
) -> list[Moments]:
    parts = fitting_batches(model, x)
    if parts is not None:
        found = [[m.first(n) for m in _sampled(model, part, rates, sites, options, lambda: None)] for part, n in parts]
        return [Moments.joined(moments) for moments in zip(*found, strict=True)]
    by_site = [rates_by_site(sites, rate) for rate in rates]
    active = [site for site in sites if any(found[site.name] > 0 for found in by_site)]
    results = []
    plain = None if all(any(wanted.values()) for wanted in by_site) else own_output(model, x, options.readout)
    with _ONE_AT_A_TIME, ExitStack() as stack:
        networks: _Draws | None = None
        for rate, wanted in zip(rates, by_site, strict=True):
            if plain is not None and not any(wanted.values()):
                results.append(_unmoved(plain, options))
                continue
            if options.engine == "compiled":
                results.append(_compiled(bare(model), x, active, wanted, options))
                tick()
                continue
            if networks is None:
                networks = _Draws(bare(model), x, active, options, passes=len(rates))
                stack.enter_context(networks.running())
            results.append(networks.moments(rate, wanted))
            tick()
    return results


def _unmoved(mean: Tensor, options: _Options) -> Moments:
    """At rate 0 every draw is the model itself."""
    kept = mean.expand(options.draws, *mean.shape).clone() if options.keep else None
    return Moments(mean, torch.zeros_like(mean), options.draws, kept)


def _compiled(
    model: nn.Module, x: Any, sites: Sequence[Site], rates: Mapping[str, float], options: _Options
) -> Moments:
    fitting = partial(fitting_chunk, model, x, sites)
    run = program(model, x, sites, options.draws, options.seed, options.readout, options.shared, options.chunk, fitting)
    mean, variance, finite = run(x, rates)
    if not finite:
        place(x, model)
        check_finite(mean, f"at rates {dict(rates)}")
    return Moments(mean, variance, options.draws)


class _Draws:
    """Thinned networks of one model on one batch, run chunk by chunk.

    Args:
        passes: how often moments will be asked for.
    """

    def __init__(self, model: nn.Module, x: Any, sites: Sequence[Site], options: _Options, passes: int = 1) -> None:
        self.model, self.x, self.sites, self.options = model, x, sites, options
        self.device = next(model.parameters()).device
        self._rates: Mapping[str, float] = {}
        self._chunk = min(options.draws, options.chunk or fitting_chunk(model, x, sites))
        self._vectorise = options.engine != "loop"
        self._checked = False
        several = passes > 1 or self._chunk < options.draws
        self._prefix = Prefix(model, sites if several else None)
        self._current: range = range(0)
        self._level: int | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Hooks are on, and what the draws share is kept, while the context lasts."""
        shared = self.options.shared
        with (
            undisturbed(self.model),
            foldable(self.model),
            self._prefix.patched(),
            hooked(self.model, self.sites, self._mask, shared=shared),
        ):
            yield

    def moments(self, rate: Rate, by_site: Mapping[str, float]) -> Moments:
        """Mean and variance over all draws at one rate."""
        self._rates = by_site
        stream, kept = _Stream(), []
        for outputs in self.chunks():
            outputs = widened(outputs)
            stream.add(outputs)
            if self.options.keep:
                kept.append(outputs.clone())  # a model may write every output to one place
        check_finite(stream.mean, f"at rate {rate}")
        return Moments(stream.mean, stream.variance, self.options.draws, torch.cat(kept) if kept else None)

    def chunks(self) -> Iterator[Tensor]:
        """Yield outputs `(t, N, ...)` until all draws are done."""
        draws, auto = self.options.draws, self.options.engine == "auto"
        done = 0
        while done < draws:
            self._current = range(done, min(done + self._chunk, draws))
            try:
                outputs = self._vectorised() if self._vectorise else self._one_by_one()
            except LatedropError:
                raise
            except Exception as error:
                if out_of_memory(error) and self._chunk > 1:
                    self._chunk //= 2
                    torch.cuda.empty_cache()
                elif (self._vectorise or self._prefix.shares) and auto and not out_of_memory(error):
                    self._vectorise = False  # some operator of this model has no batching rule
                    self._prefix.forget()
                else:
                    raise
            else:
                if outputs is not None:
                    yield outputs
                    done += len(outputs)

    def _vectorised(self) -> Tensor | None:
        """The current draws at once; None where the model rolls dice of its own, which `vmap` would share."""
        before = None if self._checked else self._random_states()
        with nullcontext() if self._prefix.ready else self._prefix.recorded():
            outputs = self._mapped()
        if self.options.engine == "auto":
            if before is not None and self._random_states() != before:
                self._vectorise = False
                self._prefix.forget()
                return None
            self._checked = True
            self._vectorise = self._chunk > 1 or self.device.type != "cpu" or not self._prefix.ready
        return outputs

    def _mapped(self) -> Tensor:
        """As `torch.vmap` does, but that the masks, not an input, have the draws; its checks of arguments cost more."""
        lazy_load_decompositions()
        with catch_warnings(), vmap_increment_nesting(len(self._current), "same") as level:
            filterwarnings("ignore", message="There is a performance drop because we have not yet implemented")
            self._level = level
            try:
                output = self._run()
                self._prefix.read(output)
            finally:
                self._level = None
            result: Tensor = torch._C._functorch._remove_batch_dim(output, level, len(self._current), 0)
        if len(result) != len(self._current):
            raise RuntimeError("the model has kept a tensor of an earlier pass")
        return result

    def _one_by_one(self) -> Tensor:
        self._current = self._current[:1]
        return self._run()[None]

    def _run(self) -> Tensor:
        self._prefix.begin()
        return output_of(self.model, self.x, self.options.readout)

    def _random_states(self) -> list[bytes]:
        return [generator.get_state().numpy().tobytes() for generator in generators(self.device)]

    def _mask(self, site: Site, call: int, shape: tuple[int, ...], like: Tensor) -> Any:
        rate = self._rates[site.name]
        if rate == 0:
            # A batch of ones, all the same: at another rate, what is behind the site differs between draws.
            return self._picked(
                torch.ones(len(self._current), *(1 for _ in shape), dtype=like.dtype, device=like.device)
            )
        options, current = self.options, self._current
        if like.device.type == "cpu" or are_small(current, shape, like.device):
            made = partial(masks, options.seed, current, site.name, call, shape, rate, like)
            return mask_for(made, rate, like, self._picked)
        keys = keys_for(options.seed, range(options.draws), site.name, call, like.device)
        keys = keys[current.start : current.stop]
        plain = partial(mask_for, partial(masks_from_keys, keys, shape, rate, like), rate, like, self._picked)
        self._prefix.read(like)
        return Fused(keys, shape, rate, self._level, plain)

    def _picked(self, masks: Tensor) -> Tensor:
        """Of the masks of the current draws the only one, or all as a batch of `vmap`."""
        return masks[0] if self._level is None else batched(masks, self._level)


def fitting_chunk(model: nn.Module, x: Any, sites: Sequence[Site]) -> int:
    """How many draws to run at once.

    On a CPU, what fits its caches. Elsewhere as many as are small; of large ones 20, or what fits a sixteenth of the
    device's memory.
    """
    parameter = next(model.parameters())
    layers = named_layers(model)
    widest = max(site.count * max(1.0, _widening(layers.get(site.name))) for site in sites)
    per_draw = int(3 * widest * (row_count(x) + 1) * parameter.element_size())
    device = parameter.device
    few = _CACHE_BYTES.get(device.type, _SMALL_BYTES) // per_draw
    if device.type != "cuda":
        return max(1, few)
    most = torch.cuda.get_device_properties(device).total_memory // 16 // per_draw
    return max(1, few, min(most, _FULL))


def _widening(layer: nn.Module | None) -> float:
    """Outputs of a layer for each of its inputs, where it tells."""
    if isinstance(layer, nn.Linear):
        return layer.out_features / layer.in_features
    if isinstance(layer, nn.RNNBase):
        return 4 * layer.hidden_size / layer.input_size  # gates
    return layer.out_channels / layer.in_channels if isinstance(layer, nn.Conv2d) else 1.0


class _Stream:
    """Running mean and sum of squared deviations over chunks of draws."""

    def __init__(self) -> None:
        self._origin: Tensor | None = None
        self._part: Part | None = None

    def add(self, outputs: Tensor) -> None:
        if self._origin is None:
            self._origin = outputs[0].clone()
        # Relative to the first draw: draws that are all equal then have a variance of exactly 0.
        outputs = outputs - self._origin
        if 0 < outputs.numel() <= _FEW:
            spread, mean = torch.var_mean(outputs, 0, correction=0)
            part = mean, spread * len(outputs), len(outputs)
        else:
            mean = outputs.mean(0)
            part = mean, (outputs - mean).square_().sum(0), len(outputs)
        self._part = part if self._part is None else merged(self._part, part)

    @property
    def mean(self) -> Tensor:
        assert self._origin is not None
        assert self._part is not None
        return self._origin + self._part[0]

    @property
    def variance(self) -> Tensor:
        assert self._part is not None
        return self._part[1] / (self._part[2] - 1)


def widened(output: Tensor) -> Tensor:
    """The tensor in float32, or in float64 where it is."""
    return output if output.dtype == torch.float64 else output.float()


def check_finite(output: Tensor, when: str) -> None:
    """Raise `OutputError` where an output has NaN or inf."""
    if not all_finite(output):
        rows = int((~torch.isfinite(output)).reshape(len(output), -1).any(1).sum())
        raise OutputError(
            f"expected a finite output; found NaN or inf in {rows} of {len(output)} rows {when}. "
            "Check the model on these inputs; in half precision, try bfloat16 or a smaller rate."
        )


def out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory ran out, on any device."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in str(error)

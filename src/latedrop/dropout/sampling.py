"""Mean and variance over thinned networks: draws are rows.

With `y_t` the output of draw `t`, the mean is `sum_t y_t / T` and the variance `sum_t (y_t - mean)^2 / (T - 1)`. In
eval mode the examples of a batch do not affect each other, so N rows are repeated T times and the network runs once
over `T · N` rows; each site multiplies its input, seen as `(T, N, ...)`, by masks `(T, 1, ...)`. Where rows do affect
each other, or a site's input has no rows, draws run one by one. Whether they do is tried once, then believed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn

from latedrop.data.arrays import check_inputs, floating, widened
from latedrop.data.batches import is_loader
from latedrop.data.rows import Collate, Graphs, Items, copied, row_count, rows_are_nodes, take_rows
from latedrop.dropout.compiled import compiled_moments, refuse
from latedrop.dropout.masks import DrawMasks, split
from latedrop.dropout.moments import PROGRAMS, Engine, Moments, Sampling, Stream, moments_of, out_of_memory
from latedrop.dropout.prefix import REMEMBERED, Copying, Prefix, drawn_output, worth_it
from latedrop.errors import ArgumentError, LatedropWarning
from latedrop.network.find_sites import placed_batches
from latedrop.network.network import Network, Readout, check_finite, read
from latedrop.network.sites import Rate, Site, rates_by_site
from latedrop.torch_private import being_traced

__all__ = ["fitting_chunk", "own_output", "sample", "sample_rates", "try_prefix"]

_log = logging.getLogger(__name__)
_SOME = 8  # rows that are run alone, to see whether draws may be rows
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3}
"""How much a row may change with the rows beside it, of the largest output; more in half precision."""
_CACHE_BYTES = 16 * 2**20  # on a CPU, of all draws that run at once, where these are small; beyond it caches overflow
_SMALL_BYTES = 512 * 2**20  # the same on other devices, which have no such cache to lose
_CUDA_BYTES = 2**31  # and on a CUDA device, where each pass costs its launches; a sixteenth of its memory at most
_FULL = 20  # draws that fill any other device; with more, only memory would grow


def sample(
    model: nn.Module | Network,
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
    collate: Collate = None,
) -> Moments:
    """Run `draws` thinned copies of `model` on `x` and return the moments of their outputs.

    Args:
        model: any trained module; it is left as it was. For many calls, a `Network` of it saves making its private
            copy each time.
        x: inputs with N rows: a tensor or array, a tuple (several inputs) or a mapping; or a `DataLoader` or data set,
            which is read batch by batch.
        rate: probability that a unit is dropped; a float, or a mapping from name patterns to floats.
        draws: number of thinned networks, at least 2.
        seed: fixes all masks.
        sites: from `find_sites`; found by a probe pass where None.
        readout: what of the output to take, before the moments.
        chunk: draws that run at once; chosen to fit memory where None, halved when memory runs out.
        shared: True: a draw is one thinned network for all examples; False: every example has its own masks.
        keep_draws: also return every draw.
        engine: `"auto"`: draws are rows of one batch, or run one by one where rows affect each other; `"rows"` and
            `"loop"` force one of them; `"compiled"`: by `torch.compile`, for many predictions on inputs of one shape,
            as the first takes up to a minute; `"recorded"`: by a CUDA graph, likewise, whose first takes seconds.
        collate: from a list of items to what `model` takes, where `x` is a list of objects; see `find_sites`.

    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> moments = sample(net, torch.ones(5, 2), rate=0.1, draws=20)
    >>> moments.mean.shape, moments.variance.shape, moments.draws
    (torch.Size([5, 1]), torch.Size([5, 1]), 20)
    """
    options = Sampling(draws, seed, readout, chunk, shared, keep_draws, engine)
    network = Network.of(model)
    if not shared and not isinstance(x, Tensor) and collate is None and is_loader(x):
        raise ArgumentError(
            "expected shared=True with a loader or a data set; found shared=False. Rows of different batches would "
            "have the same masks: pass tensors, or sample the batches one by one with a seed for each."
        )
    sites, batches = placed_batches(network, x, sites, collate, check=False)
    return Moments.joined([sample_rates(network, batch, [rate], sites, options)[0] for batch in batches])


def sample_rates(
    model: nn.Module | Network,
    x: Any,
    rates: Sequence[Rate],
    sites: Sequence[Site],
    options: Sampling,
    tick: Callable[[], Any] = lambda: None,
) -> list[Moments]:
    """Sample at several rates, on inputs that were placed; what the rates share is computed once.

    Whether the inputs are finite is found out together with the outputs. `tick` is called after each rate.
    """
    network = Network.of(model)
    by_site = [rates_by_site(sites, rate) for rate in rates]
    active = [site for site in sites if any(values[site.name] > 0 for values in by_site)]
    rowless = [site.name for site in active if site.batch_axis is None]
    if rowless and not options.shared:
        raise ArgumentError(
            f"expected sites whose inputs have rows with shared=False; {rowless} have none, or any number for each "
            "example. Use shared=True, or leave these out with select=."
        )
    thinned = _ThinnedNetworks(network, x, active, options, len(rates)) if active else None
    results, inputs = [], floating(x)
    try:
        for rate, values in zip(rates, by_site, strict=True):
            if thinned is None or not any(values.values()):
                check_inputs(inputs)
                results.append(
                    Moments.unmoved(own_output(network, x, options.readout), options.draws, keep=options.keep)
                )
            else:
                results.append(thinned.moments(values))
                check_finite(results[-1].mean, f"at rate {rate}", inputs)
            inputs = []
            tick()
    except Exception:
        check_inputs(inputs)  # which a model may fail on in any way
        raise
    return results


def own_output(model: nn.Module | Network, x: Any, readout: Readout = None, *, check: bool = True) -> Tensor:
    """Return the model's own output on placed inputs, `(N, ...)` in float32 or better; without `check` any number."""
    network = Network.of(model)
    output = network.quietly(lambda: widened(read(network.output(copied(x)), readout, row_count(x)).detach()))
    if check:
        check_finite(output, "without dropout")
    return output


def try_prefix(network: Network, x: Any, sites: Sequence[Site], readout: Readout) -> None:
    """Find out whether what comes before the first site can run once: while a function is traced nobody can look."""
    _ThinnedNetworks(network, x, sites, Sampling(2, readout=readout), 2).tries_prefix()


class _ThinnedNetworks:
    """Thinned networks of one model on one batch `x`, run chunk by chunk.

    `sites` are those with a mask at some rate; `passes` tells how often moments will be asked for.
    """

    def __init__(self, network: Network, x: Any, sites: Sequence[Site], options: Sampling, passes: int = 1) -> None:
        self._network, self._x, self._sites, self._options = network, x, sites, options
        self._rows = row_count(x)
        draws, self._traced = options.draws, being_traced()  # a graph has all draws as rows
        chunk = draws if self._traced else options.chunk
        self._chunk = min(draws, chunk) if chunk else fitting_chunk(network, x, sites, draws)
        self._rates: Mapping[str, float] = {site.name: 0.5 for site in sites}
        self._reason = ""  # for draws that run one by one
        copies = isinstance(x, Graphs)  # which stay together in each of several copies of the batch
        together = [s.name for s in sites if s.moved or ((s.batch_axis is None or s.coupled) and not copies)]
        if together and options.engine == "rows":
            raise ArgumentError(
                f"expected rows that do not affect each other with engine='rows'; at the sites {together} they do. "
                "Use engine='auto', which runs the draws of such a model one by one."
            )
        self._as_rows = options.engine != "loop" and not together
        self._prefix: Prefix | None = None
        known, passes = network.notes.get("prefix"), passes * -(-draws // self._chunk)
        if self._as_rows and known is not False and not isinstance(x, Items):
            asked = options.engine in PROGRAMS or worth_it(x, draws, passes, len(sites))
            if known if self._traced else asked:
                self._prefix = Prefix(self._rows, REMEMBERED.get(network.weight.device.type, 0) if passes > 1 else 0)
        once = ", first layers once" if self._prefix else ""
        _log.debug("%d draws of %d rows, %d at once%s", draws, self._rows, self._chunk, once)

    def moments(self, rates: Mapping[str, float]) -> Moments:
        """Return mean and variance over all draws, at a rate for each site."""
        self._rates = rates
        if self._options.engine in PROGRAMS:
            chunk = self._chunk if self._as_rows else 1
            return compiled_moments(self._network, self._x, self._sites, rates, self._options, chunk, self.tries_prefix)
        stream, outputs_by_chunk, draws = Stream(), [], self._options.draws
        for outputs in self._chunks():
            outputs = widened(outputs)
            if len(outputs) == draws:
                return Moments(*moments_of(outputs), draws, outputs.clone() if self._options.keep else None)
            stream.add(outputs)
            if self._options.keep:
                outputs_by_chunk.append(outputs.clone())  # a model may write every output to one place
        return Moments(*stream.moments(), draws, torch.cat(outputs_by_chunk) if outputs_by_chunk else None)

    def tries_prefix(self) -> bool:
        """Return True if what comes before the first site can run once, after trying it."""
        if self._prefix is not None:
            next(self._chunks())
            if not self._as_rows:
                refuse("rows that affect each other")
        return self._prefix is not None

    def _chunks(self) -> Iterator[Tensor]:
        """Yield outputs `(t, N, ...)` until all draws are done."""
        done, draws = 0, self._options.draws
        while done < draws:
            size = self._chunk if self._as_rows else 1
            span = range(done, min(done + size, draws))
            try:
                outputs = self._pass(self._x, span, self._prefix)
                alike = not self._as_rows or self._alike(outputs, span)
            except Exception as error:
                self._recover(error, size)
                continue
            if self._prefix is not None and (not alike or self._network.random):
                self._without_prefix("the draws were others")
            elif not alike:
                self._as_rows, self._reason = False, "a row of its output changes with the rows beside it"
            else:
                if self._reason:
                    warn(
                        f"the draws of this model run one by one, {draws} passes instead of a few: {self._reason}. "
                        "engine='loop' does the same without trying.",
                        LatedropWarning,
                        stacklevel=2,
                    )
                    self._reason = ""
                yield outputs
                done += len(outputs)

    def _recover(self, error: Exception, size: int) -> None:
        """Go on in another way after an error, or raise it."""
        memory = out_of_memory(error)
        if memory and size > 1:
            self._chunk = size // 2
            _log.info("out of memory with %d draws at once; going on with %d", size, self._chunk)
            torch.cuda.empty_cache()
        elif self._prefix is not None and not memory:
            self._without_prefix(error)
        elif not memory and self._as_rows and self._options.engine == "auto" and not self._traced:
            self._as_rows = False
            first = str(error).partition("\n")[0]
            self._reason = f"with the rows of several draws it raised {type(error).__name__}: {first}"
        else:
            raise error

    def _without_prefix(self, why: Any) -> None:
        self._prefix, self._network.notes["prefix"] = None, False
        _log.debug("what comes before the first site runs with every draw, as running it once failed: %s", why)

    def _pass(self, x: Any, draws: range, prefix: Prefix | None) -> Tensor:
        """Return `(t, N, ...)` of some draws, from one pass."""
        network, options = self._network, self._options
        device, every = network.weight.device, range(options.draws)
        masks = DrawMasks.of_network(network.notes, device, options.seed, self._rates, draws, every)
        output, now = network.quietly(lambda: drawn_output(network, x, self._sites, masks, len(draws), options, prefix))
        if isinstance(now, Copying) and not network.writes:
            now.remember()
        return split(output, 0, len(draws))

    def _alike(self, outputs: Tensor, draws: range) -> bool:
        """Return True if the last draw, run alone, is what it was among others; asked once for a kind of batch.

        Where examples have masks of their own all rows run again, else some from all of the batch.
        """
        if self._traced or (self._options.engine == "rows" and self._prefix is None):
            return True
        names = tuple(site.name for site in self._sites)
        readout = getattr(self._options.readout, "__code__", self._options.readout)
        key = "alike", names, outputs.shape, readout, self._prefix is not None, self._options.shared
        if key in self._network.notes:
            return True
        rows = sorted({i * (self._rows - 1) // (_SOME - 1) for i in range(_SOME)})
        if not self._options.shared or rows_are_nodes(self._x):
            rows = [*range(self._rows)]
        x = take_rows(self._x, rows) if len(rows) < self._rows else self._x
        alone = widened(self._pass(x, draws[-1:], None)[0])
        beside = widened(outputs[:, rows])
        if alone.numel() and not self._network.random:
            if not bool(alone.isfinite().all()):
                return True
            spread = beside.std(0).max() if len(beside) > 1 else 0.0
            off, most = (alone - beside[-1]).abs().max(), alone.abs().max()
            if not bool(off <= 0.05 * spread + _ROUNDING.get(outputs.dtype, 0.05) * most):
                return False
        self._network.notes[key] = True
        if self._prefix is not None:
            self._network.notes["prefix"] = True
        return True


def fitting_chunk(network: Network, x: Any, sites: Sequence[Site], draws: int) -> int:
    """Return how many of so many draws to run at once.

    On a CPU, what fits its caches. On a CUDA device as many as are small; of large ones 20, or what fits a sixteenth of
    its memory. Elsewhere as many as are small. The last pass has as many as all others, or nearly: programs fill it up.
    """
    parameter = network.weight
    widest = max(site.count * max(1.0, _widening(network.layers.get(site.name))) for site in sites)
    per_draw = int(3 * widest * (row_count(x) + 1) * parameter.element_size())
    device = parameter.device
    if device.type == "cuda":
        sixteenth = _memory(device) // 16
        few = max(_SMALL_BYTES, min(_CUDA_BYTES, sixteenth)) // per_draw
        most = max(1, few, min(sixteenth // per_draw, _FULL))
    else:
        most = max(1, (_CACHE_BYTES if device.type == "cpu" else _SMALL_BYTES) // per_draw)
    passes = -(-draws // most)
    return -(-draws // passes)


@cache
def _memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory


def _widening(layer: nn.Module | None) -> float:
    """Outputs of a layer for each of its inputs, where it tells."""
    if isinstance(layer, nn.Linear):
        return layer.out_features / layer.in_features
    return layer.out_channels / layer.in_channels if isinstance(layer, nn.Conv2d) else 1.0

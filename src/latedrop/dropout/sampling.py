"""Mean and variance over thinned networks: draws are rows.

With `y_t` the output of draw `t`, the mean is `sum_t y_t / T` and the variance `sum_t (y_t - mean)^2 / (T - 1)`. In
eval mode the examples of a batch do not affect each other, so N rows are repeated T times and the network runs once
over `T · N` rows; each site multiplies its input, seen as `(T, N, ...)`, by masks `(T, 1, ...)`. Where rows do affect
each other, or a site's input has no rows, draws run one by one. Whether they do is tried once, then believed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn

from latedrop.data.arrays import check_inputs, floating, place, widened
from latedrop.data.datasets import inputs_loaded, is_loader
from latedrop.data.items import Collate, Items, as_items
from latedrop.data.rows import copied, fitting_batches, repeated, row_count, row_limits, some_rows, take_rows
from latedrop.dropout.chunks import fitting_chunk
from latedrop.dropout.compiled import compiled_moments
from latedrop.dropout.draws import DrawMasks, split
from latedrop.dropout.moments import Moments, Stream, moments_of, out_of_memory
from latedrop.dropout.options import Engine, Sampling
from latedrop.dropout.prefix import Prefix, Repeating, worth_it
from latedrop.errors import ArgumentError, LatedropWarning
from latedrop.network.calling import Readout, check_finite
from latedrop.network.find_sites import find_sites
from latedrop.network.network import Network
from latedrop.network.passes import Pass
from latedrop.network.sites import Rate, Site, rates_by_site
from latedrop.torch_private import being_traced

__all__ = ["own_output", "plain_output", "sample", "sample_rates"]

_log = logging.getLogger(__name__)
_SOME = 8  # rows that are run alone, to see whether draws may be rows
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3}
"""How much a row may change with the rows beside it, of the largest output; more in half precision."""


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
            as the first takes seconds to compile.
        collate: from a list of items to what `model` takes, where `x` is a list of objects; see `find_sites`.

    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> moments = sample(net, torch.ones(5, 2), rate=0.1, draws=20)
    >>> moments.mean.shape, moments.variance.shape, moments.draws
    (torch.Size([5, 1]), torch.Size([5, 1]), 20)
    """
    options = Sampling(draws, seed, readout, chunk, shared, keep_draws, engine)
    network = Network.of(model)
    if is_loader(x) and collate is None:
        if not shared:
            raise ArgumentError(
                "expected shared=True with a loader or a data set; found shared=False. Rows of different batches would "
                "have the same masks: pass tensors, or sample the batches one by one with a seed for each."
            )
        sites = find_sites(network, x) if sites is None else sites
        placed = (place(part, network.copy, check=False) for part in inputs_loaded(x, network.model))
        return Moments.joined([sample_rates(network, part, [rate], sites, options)[0] for part in placed])
    x = place(as_items(x, collate), network.copy, check=sites is None)
    sites = find_sites(network, x) if sites is None else sites
    return sample_rates(network, x, [rate], sites, options)[0]


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
    batches = fitting_batches(network.model, x)
    if batches is not None:
        by_batch = [[m.first(n) for m in sample_rates(network, part, rates, sites, options)] for part, n in batches]
        return [Moments.joined(moments) for moments in zip(*by_batch, strict=True)]
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
            if not any(values.values()) or thinned is None:
                check_inputs(inputs)
                moments = Moments.unmoved(own_output(network, x, options.readout), options.draws, keep=options.keep)
            else:
                if options.engine == "compiled":
                    moments = compiled_moments(network, x, active, values, options)
                else:
                    moments = thinned.moments(values)
                check_finite(moments.mean, f"at rate {rate}", inputs)
            inputs = []
            results.append(moments)
            tick()
    except Exception:
        check_inputs(inputs)  # which a model may fail on in any way
        raise
    return results


def plain_output(model: nn.Module | Network, x: Any, readout: Readout = None) -> Tensor:
    """Return the model's own output on `x`, read out, `(N, ...)` in float32 or better; nothing is injected."""
    network = Network.of(model)
    return own_output(network, place(x, network.copy), readout)


def own_output(model: nn.Module | Network, x: Any, readout: Readout = None, *, check: bool = True) -> Tensor:
    """Return `plain_output` of inputs that were placed; without `check` it may have NaN and inf."""
    network = Network.of(model)
    batches = fitting_batches(network.model, x)
    if batches is not None:
        return torch.cat([own_output(network, part, readout, check=check)[:rows] for part, rows in batches])
    output = network.quietly(lambda: widened(network.read(copied(x), readout, row_count(x)).detach()))
    if check:
        check_finite(output, "without dropout")
    return output


class _ThinnedNetworks:
    """Thinned networks of one model on one batch, run chunk by chunk.

    Args:
        network: whose copy runs.
        x: the batch, placed.
        sites: those with a mask at some rate.
        options: see `Sampling`.
        passes: how often moments will be asked for.
    """

    def __init__(self, network: Network, x: Any, sites: Sequence[Site], options: Sampling, passes: int = 1) -> None:
        self._network, self._x, self._sites, self._options = network, x, sites, options
        self._rows = some_rows(x)
        draws, self._traced = options.draws, being_traced()  # a graph has all draws as rows
        chunk = draws if self._traced else options.chunk
        self._chunk = min(draws, chunk) if chunk else fitting_chunk(network, x, sites, draws)
        self._rates: Mapping[str, float] = {}
        self._reason = ""  # for draws that run one by one
        self._as_rows = options.engine != "loop" and self._may_be_rows()
        self._prefix: Prefix | None = None
        plain = not isinstance(x, Items) and not any(site.weight is not None for site in sites)
        chunks = passes * -(-draws // self._chunk)
        plain = plain and self._as_rows and "no prefix" not in network.notes
        if plain and self._traced and Prefix.is_known(network, sites):
            self._prefix = Prefix(network, x, sites).empty()
        elif plain and not self._traced and worth_it(x, draws, chunks):
            self._prefix = Prefix(network, x, sites)
        _log.debug(
            "%d draws of %d rows, %s%s",
            draws,
            self._rows,
            f"{self._chunk} at once" if self._as_rows else "one by one",
            ", first layers once" if self._prefix else "",
        )

    def moments(self, rates: Mapping[str, float]) -> Moments:
        """Return mean and variance over all draws, at a rate for each site."""
        self._rates = rates
        stream, outputs_by_chunk, draws = Stream(), [], self._options.draws
        for outputs in self._chunks():
            outputs = widened(outputs)
            if len(outputs) == draws:
                return Moments(*moments_of(outputs), draws, outputs.clone() if self._options.keep else None)
            stream.add(outputs)
            if self._options.keep:
                outputs_by_chunk.append(outputs.clone())  # a model may write every output to one place
        return Moments(*stream.moments(), draws, torch.cat(outputs_by_chunk) if outputs_by_chunk else None)

    def _chunks(self) -> Iterator[Tensor]:
        """Yield outputs `(t, N, ...)` until all draws are done."""
        done, draws = 0, self._options.draws
        while done < draws:
            size = self._chunk if self._as_rows else 1
            span = range(done, min(done + size, draws))
            try:
                outputs = self._outputs(span)
                alike = not self._as_rows or self._alike(outputs, span)
            except Exception as error:
                self._recover(error, size)
                continue
            if not alike and self._prefix is not None:  # rows lie elsewhere than where the prefix looks for them
                self._prefix = None
                self._network.notes["no prefix"] = True
                continue
            if not alike:
                self._as_rows, self._reason = False, "a row of its output changes with the rows beside it"
                continue
            if self._reason:
                self._warn_of_loop()
            yield outputs
            done += len(outputs)

    def _recover(self, error: Exception, size: int) -> None:
        """Go on in another way after an error, or raise it."""
        if out_of_memory(error) and size > 1:
            self._chunk = size // 2
            _log.info("out of memory with %d draws at once; going on with %d", size, self._chunk)
            torch.cuda.empty_cache()
        elif out_of_memory(error):
            raise error
        elif self._prefix is not None:
            self._prefix = None
            _log.debug("the first layers run with every draw, as running them once raised %s", _first_line(error))
        elif self._as_rows and self._options.engine == "auto" and not self._traced:
            self._as_rows = False
            self._reason = f"with the rows of several draws it raised {_first_line(error)}"
        else:
            raise error

    def _warn_of_loop(self) -> None:
        warn(
            f"the draws of this model run one by one, {self._options.draws} passes instead of a few: {self._reason}. "
            "engine='loop' does the same without trying.",
            LatedropWarning,
            stacklevel=2,
        )
        self._reason = ""

    def _may_be_rows(self) -> bool:
        together = [site.name for site in self._sites if site.batch_axis is None or site.moved or site.coupled]
        if together and self._options.engine == "rows":
            raise ArgumentError(
                f"expected rows that do not affect each other with engine='rows'; at the sites {together} they do. "
                "Use engine='auto', which runs the draws of such a model one by one."
            )
        if together:
            return False
        _, most = row_limits(self._network.model)
        if most is not None:
            self._chunk = min(self._chunk, most // max(self._rows, 1))
        return self._chunk > 0 and (most is None or self._chunk > 1)

    def _outputs(self, draws: range) -> Tensor:
        """Return `(t, N, ...)` of some draws."""
        return split(self._pass(self._x, draws, self._rows, self._prefix), 0, len(draws))

    def _pass(self, x: Any, draws: range, rows: int, prefix: Prefix | None) -> Tensor:
        """Return the output of one pass over the `rows` examples of `x` for each draw, `(draws · rows, ...)`."""
        network, options, copies = self._network, self._options, len(draws)
        masks = DrawMasks(options.seed, self._rates, draws, range(options.draws))

        def run() -> Tensor:
            now: Pass = network.begin(self._sites, masks, rows * copies, copies, shared=options.shared)
            batch = repeated(x, copies)
            if prefix is not None:
                now = Repeating(prefix, self._sites, masks, rows * copies, copies=copies, shared=options.shared)
                now.copies_of(batch, x)
            return network.read(batch, options.readout, rows * copies, now).detach()

        return network.quietly(run)

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
        some = sorted({i * (self._rows - 1) // (_SOME - 1) for i in range(_SOME)})
        rows = some if self._options.shared else [*range(self._rows)]
        x = take_rows(self._x, rows) if len(rows) < self._rows else self._x
        alone = widened(self._pass(x, draws[-1:], len(rows), None))
        beside = widened(outputs[:, rows])
        if alone.numel() and not self._network.random:
            if not bool(alone.isfinite().all()):
                return True
            spread = beside.std(0).max() if len(beside) > 1 else 0.0
            off, most = (alone - beside[-1]).abs().max(), alone.abs().max()
            if not bool(off <= 0.05 * spread + _ROUNDING.get(outputs.dtype, 0.05) * most):
                return False
        self._network.notes[key] = True
        return True


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"

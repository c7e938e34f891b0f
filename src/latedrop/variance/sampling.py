"""Mean and variance over thinned networks.

With `y_t` the output of draw `t`, the mean is `sum_t y_t / T` and the variance `sum_t (y_t - mean)^2 / (T - 1)`. Draws
run in chunks, as rows of one batch (`engine.rows`); layers before the first site run once for all draws and rates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from latedrop.errors import ArgumentError, LatedropError
from latedrop.model.arrays import check_inputs, floating, place, widened
from latedrop.model.calling import Readout, call, check_finite, read
from latedrop.model.datasets import inputs_loaded, is_loader
from latedrop.model.finding import find_sites
from latedrop.model.items import Collate, Items, as_items
from latedrop.model.rows import copied, fitting_batches, row_count
from latedrop.model.running import may_derive, quietly
from latedrop.model.sites import Rate, Site, rates_by_site
from latedrop.model.twin import twin_of
from latedrop.variance.engine.checking import check_program
from latedrop.variance.engine.chunks import fitting_chunk
from latedrop.variance.engine.compiled import program
from latedrop.variance.engine.options import Engine, Sampling
from latedrop.variance.engine.rows import ThinnedNetworks
from latedrop.variance.moments import Moments, out_of_memory

__all__ = ["own_output", "plain_output", "sample", "sample_rates"]


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
    collate: Collate = None,
) -> Moments:
    """Run `draws` thinned copies of `model` on `x` and return the moments of their outputs.

    Args:
        model: any trained module; it is left as it was.
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
            `"loop"` force one of them; `"compiled"`: see `engine.compiled`, for many predictions on inputs of one
            shape, as the first takes seconds to compile.
        collate: from a list of items to what `model` takes, where `x` is a list of objects; see `find_sites`.

    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> moments = sample(net, torch.ones(5, 2), rate=0.1, draws=20)
    >>> moments.mean.shape, moments.variance.shape, moments.draws
    (torch.Size([5, 1]), torch.Size([5, 1]), 20)
    """
    options = Sampling(draws, seed, readout, chunk, shared, keep_draws, engine)
    if is_loader(x) and collate is None:
        if not shared:
            raise ArgumentError(
                "expected shared=True with a loader or a data set; found shared=False. Rows of different batches would "
                "have the same masks: pass tensors, or sample the batches one by one with a seed for each."
            )
        sites = find_sites(model, x) if sites is None else sites
        placed = (place(part, model, check=False) for part in inputs_loaded(x, model))
        return Moments.joined([sample_rates(model, part, [rate], sites, options)[0] for part in placed])
    x = place(as_items(x, collate), model, check=sites is None)
    sites = find_sites(model, x) if sites is None else sites
    return sample_rates(model, x, [rate], sites, options)[0]


def sample_rates(
    model: nn.Module,
    x: Any,
    rates: Sequence[Rate],
    sites: Sequence[Site],
    options: Sampling,
    tick: Callable[[], Any] = lambda: None,
) -> list[Moments]:
    """`sample` at several rates, on inputs that were placed; what the rates share is computed once.

    Whether the inputs are finite is found out together with the outputs. `tick` is called after each rate.
    """
    parts = fitting_batches(model, x)
    if parts is not None:
        found = [[m.first(n) for m in sample_rates(model, part, rates, sites, options)] for part, n in parts]
        return [Moments.joined(moments) for moments in zip(*found, strict=True)]
    by_site = [rates_by_site(sites, rate) for rate in rates]
    active = [site for site in sites if any(found[site.name] > 0 for found in by_site)]
    rowless = [site.name for site in active if site.batch_axis is None]
    if rowless and not options.shared:
        raise ArgumentError(
            f"expected sites whose inputs have rows with shared=False; {rowless} have none, or any number for each "
            "example. Use shared=True, or leave these out with select=."
        )
    engine = options.engine if active else None
    networks = ThinnedNetworks(model, x, active, options, len(rates)) if engine not in (None, "compiled") else None
    results, inputs = [], floating(x)
    try:
        for rate, wanted in zip(rates, by_site, strict=True):
            if not any(wanted.values()):
                check_inputs(inputs)
                moments = Moments.unmoved(own_output(model, x, options.readout), options.draws, keep=options.keep)
            elif networks is None:
                moments = _compiled(model, x, active, wanted, options)
            else:
                moments = networks.moments(wanted)
                check_finite(moments.mean, f"at rate {rate}", inputs)
            inputs = []
            results.append(moments)
            tick()
    except Exception:
        check_inputs(inputs)  # which a model may fail on in any way
        raise
    finally:
        if networks is not None:
            networks.close()
    return results


def plain_output(model: nn.Module, x: Any, readout: Readout = None) -> Tensor:
    """The model's own output on `x`, read out, `(N, ...)` in float32 or better; nothing is injected."""
    return own_output(model, place(x, model), readout)


def own_output(model: nn.Module, x: Any, readout: Readout = None, *, check: bool = True) -> Tensor:
    """`plain_output` of inputs that were placed; without `check` it may have NaN and inf."""
    parts = fitting_batches(model, x)
    if parts is not None:
        return torch.cat([own_output(model, part, readout, check=check)[:rows] for part, rows in parts])

    def run() -> Tensor:
        twin = twin_of(model, layers=False, own_gradients=may_derive(model))
        return widened(read(call(twin, copied(x)), readout, row_count(x)).detach())

    output = quietly(model, run)
    if check:
        check_finite(output, "without dropout")
    return output


def _compiled(
    model: nn.Module, x: Any, sites: Sequence[Site], rates: Mapping[str, float], options: Sampling
) -> Moments:
    if isinstance(x, Items):
        raise ArgumentError("expected another engine with collate=; batches of items have no one shape to compile for.")
    fitting = partial(fitting_chunk, model, x, sites, options.draws)
    run = program(model, x, sites, options, fitting)

    def drawn(batch: Any, draws: int) -> list[Tensor]:
        networks = ThinnedNetworks(model, batch, sites, replace(options, engine="auto", draws=draws))
        try:
            found = networks.moments(rates)
        finally:
            networks.close()
        return [found.mean, found.variance]

    if not run.checked:
        few = run.few()
        check_program(model, x, lambda batch: run(batch, rates, few)[:2], lambda batch: drawn(batch, few))
        run.checked = True
    try:
        mean, variance, finite = run(x, rates)
    except Exception as error:
        if not isinstance(error, LatedropError) and not out_of_memory(error):
            drawn(x, run.few())  # it ran for other inputs: what fails with these is said as ever
        raise
    if not finite:
        check_finite(mean, f"at rates {dict(rates)}", floating(x))
    return Moments(mean, variance, options.draws)

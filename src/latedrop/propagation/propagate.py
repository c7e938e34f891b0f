"""One pass that carries a mean and a variance for every unit: maps of variance without draws.

With `m` and `v` the mean and variance of a site's input, the masked input has mean `m` and variance
`v / (1 - rate) + m^2 · rate / (1 - rate)`. Every operator after it turns means and variances into those of its output,
as if all units were independent (`rules`); what comes before the first site stays plain. For dropout this was done by
Postels et al. (2019) and by Brach, Sick, Duerr (2020).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any, NamedTuple
from warnings import warn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from latedrop.data.arrays import widened
from latedrop.data.rows import Collate, copied, row_count, tensors
from latedrop.dropout.moments import Moments
from latedrop.dropout.sampling import own_output
from latedrop.errors import LatedropWarning, SiteError
from latedrop.network.find_sites import placed_batches
from latedrop.network.functional import RECURRENT, operator_name
from latedrop.network.network import Network, Pass, Readout, check_finite, read
from latedrop.network.sites import Rate, Site, rates_by_site
from latedrop.propagation.rules import NoRule, Pair
from latedrop.torch_private import Operator, Watching

__all__ = ["propagate"]

_REFUSED = (*RECURRENT, *(f"{name}_cell" for name in RECURRENT), "multi_head_attention_forward")
"""Layers that pairs are stopped before: some devices break them up into operators with rules."""
_DERIVATIVES = (torch.autograd.grad, Tensor.backward, torch.autograd.backward)
_WINDOWS = ("avg_pool2d", "avg_pool3d")
_REDUCTIONS = ("sum", "mean", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", *_WINDOWS)
_READOUT = "the readout"


def propagate(
    model: nn.Module | Network,
    x: Any,
    rate: Rate,
    sites: Sequence[Site] | None = None,
    readout: Readout = None,
    *,
    collate: Collate = None,
) -> Moments:
    """Return mean and variance of every output unit under injected dropout, from one forward pass.

    Meant for maps, where `linearize` would need a backward pass per pixel. The mean is the propagated one: after a
    nonlinearity it differs from the model's own output, as the mean over draws does. At rate 0 it is that output.

    Args:
        model: any trained module; it is left as it was. For many calls, a `Network` of it saves making its private
            copy each time.
        x: inputs with N rows, or a `DataLoader` or data set, as for `sample`.
        rate: probability that a unit is dropped; a float, or a mapping from name patterns to floats.
        sites: from `find_sites`, with `element` masks; found by a probe pass where None.
        readout: what of the output to take.
        collate: from a list of items to what `model` takes, where `x` is a list of objects; see `find_sites`.

    Returns:
        Moments with `draws=0`, in float32 or float64.

    Raises:
        SiteError: an operator has no rule (softmax, comparisons, recurrent layers), or a channel mask covers several
            positions. The message names the module.

    Warns:
        LatedropWarning: the model or the readout sums or averages a map. The variance of a sum is not the sum of the
            variances; use `linearize` or `sample` for counts.

    >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 1, 3))
    >>> moments = propagate(net, torch.ones(2, 1, 8, 8), rate=0.1)
    >>> moments.variance.shape, moments.draws
    (torch.Size([2, 1, 4, 4]), 0)
    """
    network = Network.of(model)
    sites, batches = placed_batches(network, x, sites, collate)
    return Moments.joined([_propagated(network, batch, rate, sites, readout) for batch in batches])


def _propagated(network: Network, x: Any, rate: Rate, sites: Sequence[Site], readout: Readout) -> Moments:
    """Return mean and variance of one batch."""
    rates = rates_by_site(sites, rate)
    sites = [site for site in sites if rates[site.name] > 0]
    if not sites:
        return Moments.unmoved(own_output(network, x, readout), 0)
    output, summing = _passed(network, x, sites, rates, readout)
    mean, variance = (output.m, output.v) if isinstance(output, Pair) else (widened(output), torch.zeros_like(output))
    check_finite(torch.stack([mean, variance], 1), f"propagated at rate {rate}")
    if summing:
        warn(
            f"expected units that are not summed; {summing[0]} sums or averages them as if they were independent, "
            "which the pixels of a map are not: the variance may be far too small. Use method='linear' or "
            "method='sample'.",
            LatedropWarning,
            stacklevel=3,
        )
    return Moments(mean, variance.to(mean.dtype), 0)


def _passed(
    network: Network, x: Any, sites: Sequence[Site], rates: dict[str, float], readout: Any
) -> tuple[Tensor, list[str]]:
    """Return the output of one pass, a `Pair` where noise reaches it, and the modules that sum or average units."""
    names = {module: name for name, module in network.layers.items()}
    rows, noise = row_count(x), _Noise(rates)

    def run() -> tuple[Tensor, list[str]]:
        places: list[str] = []

        def seen(operator: Operator | None, args: Any, kwargs: Any, result: Any) -> None:
            name = "" if operator is None else operator.name
            if name in _REDUCTIONS and isinstance(args[0], Pair) and result.numel() < args[0].numel():
                owner = _owner((frame for frame, _ in walk_stack(None)), names)
                if owner == _READOUT or name not in _WINDOWS:  # a model may pool over windows, and not count
                    places.append(owner)

        now = Pass(sites, noise, rows)
        with _Refusing(), Watching(seen):
            return read(network.output(copied(x), now), readout, rows), places

    try:
        return network.quietly(run)
    except (NoRule, RuntimeError) as error:
        if not isinstance(error, NoRule) and "have storage" not in str(error) and "subclass" not in str(error):
            raise
        reason = error if isinstance(error, NoRule) else "a derivative (torch.func) or a read of raw memory"
        frames = reversed([frame for frame, _ in walk_tb(error.__traceback__)])
        raise SiteError(
            f"expected operators that take a mean and a variance; found {reason} in {_owner(frames, names)}. "
            "Use method='sample' or method='linear'."
        ) from error


class _Noise(NamedTuple):
    """All masks of a site at once: what comes out is a pair of mean and variance."""

    rates: dict[str, float]

    def thin(self, site: Site, call: int, value: Tensor, shape: tuple[int, ...], axis: int | None) -> Tensor:
        rows = 1 if axis is None else value.shape[axis]
        one_unit_each = prod(shape) * rows == value.numel() and site.calls == 1
        if site.kind == "channel" and not one_unit_each:
            raise SiteError(
                f"expected a mask of its own for every unit; site {site.name!r} drops whole channels of an input of "
                f"shape {tuple(value.shape)}, {site.calls} times. Use kind='element', or method='sample' or "
                "method='linear'."
            )
        odds = self.rates[site.name] / (1 - self.rates[site.name])
        m, v = (value.m, value.v) if isinstance(value, Pair) else (widened(value), 0)
        return Pair(m.clone(), v + (m.square() + v) * odds, value.dtype)


class _Refusing(TorchFunctionMode):
    """Stops pairs before recurrent layers and attention, which have no rule, and before derivatives."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator_name(func)
        refused = name in _REFUSED or func in _DERIVATIVES
        if refused and any(isinstance(value, Pair) for value in tensors((args, kwargs))):
            raise NoRule("a derivative (torch.autograd.grad)" if func in _DERIVATIVES else f"a layer of type {name}")
        return func(*args, **(kwargs or {}))


def _owner(frames: Iterable[FrameType], names: dict[nn.Module, str]) -> str:
    """Return the module whose method is innermost; `frames` go outwards."""
    for frame in frames:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module in names:
            return f"{repr(names[module]) if names[module] else 'the model'} ({type(module).__name__})"
    return _READOUT

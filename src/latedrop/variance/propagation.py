"""One pass that carries a mean and a variance for every unit: maps of variance without draws.

With `m` and `v` the mean and variance of a site's input, the masked input has mean `m` and variance
`v / (1 - rate) + m^2 · rate / (1 - rate)`. Every operator after it turns means and variances into those of its output,
as if all units were independent (`propagate_rules`); what comes before the first site stays plain. For dropout this
was done by Postels et al. (2019) and by Brach, Sick, Duerr (2020).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from latedrop.errors import LatedropWarning, SiteError
from latedrop.masking.inject import hooked
from latedrop.model.forward import (
    Readout,
    bare,
    call,
    fitting_batches,
    named_layers,
    place,
    read,
    row_count,
    tensors,
    undisturbed,
)
from latedrop.model.sites import Rate, Site, find_sites, rates_by_site
from latedrop.model.weight_calls import RECURRENT, operator_name
from latedrop.variance.propagation_rules import NoRule, Pair
from latedrop.variance.sampling import Moments, check_finite, plain_output, widened

__all__ = ["propagate"]

_REFUSED = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
_REFUSED_CALLS = (*RECURRENT, *(f"{name}_cell" for name in RECURRENT), "multi_head_attention_forward")
_REDUCTIONS = ("sum", "mean", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
_LOCAL_REDUCTIONS = ("avg_pool2d", "avg_pool3d")


def propagate(
    model: nn.Module, x: Any, rate: Rate, sites: Sequence[Site] | None = None, readout: Readout = None
) -> Moments:
    """Mean and variance of every output unit under injected dropout, from one forward pass.

    Meant for maps, where `linearize` would need a backward pass per pixel. The mean is the propagated one: after a
    nonlinearity it differs from the model's own output, as the mean over draws does. At rate 0 it is that output.

    Args:
        model: any trained module; it is left as it was.
        x: inputs with N rows: a tensor or array, a tuple (several inputs) or a mapping.
        rate: probability that a unit is dropped; a float, or a mapping from name patterns to floats.
        sites: from `find_sites`, with `element` masks; found by a probe pass where None.
        readout: what of the output to take.

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
    x = place(x, model)
    sites = find_sites(model, x) if sites is None else sites
    rates = rates_by_site(sites, rate)
    parts = fitting_batches(model, x)
    if parts is not None:
        return Moments.joined([propagate(model, part, rate, sites, readout).first(rows) for part, rows in parts])
    active = [site for site in sites if rates[site.name] > 0]
    if not active:
        mean = plain_output(model, x, readout)
        return Moments(mean, torch.zeros_like(mean), 0)
    model = bare(model)
    names = {module: name for name, module in named_layers(model).items()}
    inside, after = _Reductions(names, _REDUCTIONS), _Reductions({}, _REDUCTIONS + _LOCAL_REDUCTIONS)
    with torch.inference_mode(False), undisturbed(model):  # in inference mode torch does not break up its operators
        try:
            with _refusing(model, active), hooked(model, active, partial(_noise, rates)), inside:
                output = call(model, x)
            with after:
                output = read(output, readout, row_count(x))
        except NoRule as error:
            frames = reversed([frame for frame, _ in walk_tb(error.__traceback__)])
            raise SiteError(
                f"expected operators that take a mean and a variance; found {error} in {_owner(frames, names)}. "
                "Use method='sample' or method='linear'."
            ) from error
    mean, variance = (output.m, output.v) if isinstance(output, Pair) else (widened(output), torch.zeros_like(output))
    check_finite(torch.stack([mean, variance], 1), f"propagated at rate {rate}")
    for where in (inside.seen or after.seen)[:1]:
        warn(
            f"expected units that stay apart; {where} sums or averages them as if they were independent, which the "
            "pixels of a map are not: the variance may be far too small. Use method='linear' or method='sample'.",
            LatedropWarning,
            stacklevel=2,
        )
    return Moments(mean, variance.to(mean.dtype), 0)


class _Noise:
    """Stands for all masks of a site at once: `value * noise` is a pair."""

    def __init__(self, rate: float) -> None:
        self.odds = rate / (1 - rate)

    def __rmul__(self, value: Tensor) -> Pair:
        m, v = (value.m, value.v) if isinstance(value, Pair) else (widened(value), 0)
        return Pair(m.clone(), v + (m.square() + v) * self.odds, value.dtype)


def _noise(rates: dict[str, float], site: Site, call: int, shape: tuple[int, ...], like: Tensor) -> Any:
    rows = 1 if site.batch_axis is None else like.shape[site.batch_axis]
    one_unit_each = len(shape) == like.dim() and prod(shape) * rows == like.numel() and site.calls == 1
    if site.kind == "channel" and not one_unit_each:
        raise SiteError(
            f"expected a mask of its own for every unit; site {site.name!r} drops whole channels of an input of shape "
            f"{tuple(like.shape)}, {site.calls} times. Use kind='element', or method='sample' or method='linear'."
        )
    return _Noise(rates[site.name])


@contextmanager
def _refusing(model: nn.Module, sites: Sequence[Site]) -> Iterator[None]:
    """Stop pairs before recurrent and attention layers, which some devices break up into operators with rules."""
    random = {site.name for site in sites}

    def before(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if name in random or any(isinstance(tensor, Pair) for tensor in tensors((args, kwargs))):
            raise NoRule(f"a layer of type {type(module).__name__}")

    handles = []
    try:
        for name, module in named_layers(model).items():
            if isinstance(module, _REFUSED):
                hook = partial(before, name)
                handles.append(module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))
        with _RefusedCalls():
            yield
    finally:
        for handle in handles:
            handle.remove()


class _RefusedCalls(TorchFunctionMode):
    """Stops pairs before such layers where they are called as functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator_name(func)
        if name in _REFUSED_CALLS and any(isinstance(tensor, Pair) for tensor in tensors((args, kwargs))):
            raise NoRule(f"a layer of type {name}")
        return func(*args, **(kwargs or {}))


class _Reductions(TorchDispatchMode):
    """Notes where units of a map are summed or averaged."""

    def __init__(self, names: dict[nn.Module, str], operators: Sequence[str]) -> None:
        super().__init__()
        self.names, self.operators = names, operators
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name.removeprefix("aten::") in self.operators and isinstance(args[0], Pair):
            frames = (frame for frame, _ in walk_stack(None))
            self.seen += [_owner(frames, self.names)] if result.numel() < args[0].numel() else []
        return result


def _owner(frames: Iterable[FrameType], names: dict[nn.Module, str]) -> str:
    """The module of the innermost method; `frames` go outwards."""
    for frame in frames:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module in names:
            name = repr(names[module]) if names[module] else "the model"
            return f"{name} ({type(module).__name__})"
    return "the readout"

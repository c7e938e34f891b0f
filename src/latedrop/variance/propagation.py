"""One pass that carries a mean and a variance for every unit: maps of variance without draws.

With `m` and `v` the mean and variance of a site's input, the masked input has mean `m` and variance
`v / (1 - rate) + m^2 · rate / (1 - rate)`. Every operator after it turns means and variances into those of its output,
as if all units were independent (`propagation_rules`); what comes before the first site stays plain. For dropout this
was done by Postels et al. (2019) and by Brach, Sick, Duerr (2020).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from math import prod
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from latedrop.errors import ArgumentError, LatedropWarning, SiteError
from latedrop.masking.thinning import Thinning
from latedrop.model.arrays import place, widened
from latedrop.model.calling import Readout, call, check_finite, read
from latedrop.model.datasets import inputs_loaded, is_loader
from latedrop.model.finding import find_sites
from latedrop.model.items import Collate, as_items
from latedrop.model.rows import copied, fitting_batches, map_rows, row_count, some_rows, tensors
from latedrop.model.running import DIFFERENTIATE, derives, may_derive, running
from latedrop.model.scripts import wrap_scripts
from latedrop.model.sites import Rate, Site, rates_by_site
from latedrop.model.twin import release, reroute, twin_of
from latedrop.model.weight_calls import operator_name
from latedrop.model.weight_rules import RECURRENT
from latedrop.model.wrappers import named_layers
from latedrop.torch_inside import Operator, watching
from latedrop.variance.moments import Moments
from latedrop.variance.propagation_rules import NoRule, Pair
from latedrop.variance.sampling import plain_output

__all__ = ["propagate"]

_REFUSED = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
_REFUSED_CALLS = (*RECURRENT, *(f"{name}_cell" for name in RECURRENT), "multi_head_attention_forward")
_REDUCTIONS = ("sum", "mean", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
_LOCAL_REDUCTIONS = ("avg_pool2d", "avg_pool3d")


def propagate(
    model: nn.Module,
    x: Any,
    rate: Rate,
    sites: Sequence[Site] | None = None,
    readout: Readout = None,
    *,
    input_std: Tensor | float | None = None,
    collate: Collate = None,
) -> Moments:
    """Mean and variance of every output unit under injected dropout, from one forward pass.

    Meant for maps, where `linearize` would need a backward pass per pixel. The mean is the propagated one: after a
    nonlinearity it differs from the model's own output, as the mean over draws does. At rate 0 it is that output.

    Args:
        model: any trained module; it is left as it was.
        x: inputs with N rows, or a `DataLoader` or data set, as for `sample`.
        rate: probability that a unit is dropped; a float, or a mapping from name patterns to floats.
        sites: from `find_sites`, with `element` masks; found by a probe pass where None.
        readout: what of the output to take.
        input_std: of independent noise of the floating inputs, carried along; a number or a tensor that broadcasts.
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
    if is_loader(x) and collate is None:
        sites = find_sites(model, x) if sites is None else sites
        found = (propagate(model, p, rate, sites, readout, input_std=input_std) for p in inputs_loaded(x, model))
        return Moments.joined(list(found))
    some_rows(x := place(as_items(x, collate), model))
    sites = find_sites(model, x) if sites is None else sites
    rates = rates_by_site(sites, rate)
    parts = fitting_batches(model, x)
    if parts is not None:
        each = (propagate(model, p, rate, sites, readout, input_std=input_std).first(rows) for p, rows in parts)
        return Moments.joined(list(each))
    active = [site for site in sites if rates[site.name] > 0]
    if not active and input_std is None:
        mean = plain_output(model, x, readout)
        return Moments(mean, torch.zeros_like(mean), 0)
    output, reduced = _passed(model, x if input_std is None else _noisy(x, input_std), active, rates, readout)
    mean, variance = (output.m, output.v) if isinstance(output, Pair) else (widened(output), torch.zeros_like(output))
    check_finite(torch.stack([mean, variance], 1), f"propagated at rate {rate}")
    _warn_of(reduced)
    return Moments(mean, variance.to(mean.dtype), 0)


def _warn_of(reduced: list[str]) -> None:
    """Units that were summed or averaged."""
    if reduced:
        warn(
            f"expected units that are not summed; {reduced[0]} sums or averages them as if they were independent, "
            "which the pixels of a map are not: the variance may be far too small. "
            "Use method='linear' or method='sample'.",
            LatedropWarning,
            stacklevel=3,
        )


def _passed(
    model: nn.Module, x: Any, sites: Sequence[Site], rates: dict[str, float], readout: Readout
) -> tuple[Tensor, list[str]]:
    """The output of one pass, a `Pair` where a site reaches it, and where units were summed or averaged."""
    twin = twin_of(model, own_gradients=may_derive(model))
    names = {module: name for name, module in named_layers(twin).items()}
    inside, after = _Reductions(names, _REDUCTIONS), _Reductions({}, _REDUCTIONS + _LOCAL_REDUCTIONS)
    thinning = Thinning(twin, sites, _Noise(rates))
    for module, name in names.items():
        if isinstance(module, _REFUSED):
            reroute(module, partial(_refuse_pairs, module, name in [site.name for site in sites]))
    wrap_scripts(twin, _refuse_scripted)
    with torch.inference_mode(False), running(model):  # in inference mode torch does not break up its operators
        try:
            with _RefusedCalls(), thinning.passing(x), watching(inside.seen):
                output = call(twin, copied(x))
            with watching(after.seen):
                return read(output, readout, row_count(x)), inside.found or after.found
        except (NoRule, RuntimeError) as error:
            if not isinstance(error, NoRule) and not derives(model):
                raise
            found = error if isinstance(error, NoRule) else "a derivative (torch.func)"
            frames = reversed([frame for frame, _ in walk_tb(error.__traceback__)])
            raise SiteError(
                f"expected operators that take a mean and a variance; found {found} in {_owner(frames, names)}. "
                "Use method='sample' or method='linear'."
            ) from error
        finally:
            release(twin)


def _noisy(x: Any, std: Tensor | float) -> Any:
    """The floating inputs as pairs of mean and variance."""
    size = torch.as_tensor(std)
    if not bool(torch.isfinite(size).all()) or bool((size < 0).any()):
        raise ArgumentError(f"expected finite standard deviations of at least 0 for the inputs; found {std}.")

    def pair(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        mean = widened(value).clone()
        try:
            return Pair(mean, size.to(mean).square().expand(mean.shape), value.dtype)
        except RuntimeError as error:
            raise ArgumentError(
                f"expected standard deviations that broadcast with inputs {tuple(value.shape)}; found "
                f"{tuple(size.shape)}."
            ) from error

    return map_rows(x, pair)


class _Noise:
    """All masks of a site at once: what comes out is a pair of mean and variance."""

    def __init__(self, rates: dict[str, float]) -> None:
        self._rates = rates

    def thin(self, site: Site, call: int, value: Tensor, shape: tuple[int, ...], axis: int | None) -> Tensor:
        rows = 1 if axis is None else value.shape[axis]
        one_unit_each = prod(shape) * rows == value.numel() and site.calls == 1
        if site.kind == "channel" and not one_unit_each:
            raise SiteError(
                f"expected a mask of its own for every unit; site {site.name!r} drops whole channels of an input of "
                f"shape {tuple(value.shape)}, {site.calls} times. Use kind='element', or method='sample' or "
                "method='linear'."
            )
        odds = self._rates[site.name] / (1 - self._rates[site.name])
        m, v = (value.m, value.v) if isinstance(value, Pair) else (widened(value), 0)
        return Pair(m.clone(), v + (m.square() + v) * odds, value.dtype)

    def thin_packed(self, site: Site, *_: Any) -> Tensor:
        raise NoRule("a packed sequence")


def _refuse_pairs(module: nn.Module, is_site: bool, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Stop pairs before recurrent and attention layers, which some devices break up into operators with rules."""
    if is_site or any(isinstance(tensor, Pair) for tensor in tensors((args, kwargs))):
        raise NoRule(f"a layer of type {type(module).__name__}")
    return forward(*args, **kwargs)


def _refuse_scripted(script: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Stop pairs before TorchScript, which may read what they have no memory for."""
    if any(isinstance(tensor, Pair) for tensor in tensors((args, kwargs))):
        raise NoRule("a part in TorchScript")
    return script(*args, **kwargs)


class _RefusedCalls(TorchFunctionMode):
    """Stops pairs before such layers where they are called as functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator_name(func)
        if func in DIFFERENTIATE and any(isinstance(tensor, Pair) for tensor in tensors((args, kwargs))):
            raise NoRule("a derivative (torch.autograd.grad)")
        if name in _REFUSED_CALLS and any(isinstance(tensor, Pair) for tensor in tensors((args, kwargs))):
            raise NoRule(f"a layer of type {name}")
        return func(*args, **(kwargs or {}))


class _Reductions:
    """Notes where units of a map are summed or averaged."""

    def __init__(self, names: dict[nn.Module, str], operators: Sequence[str]) -> None:
        self._names, self._operators = names, operators
        self.found: list[str] = []

    def seen(self, operator: Operator | None, args: Any, kwargs: Any, result: Any) -> None:
        """An operator has run."""
        if operator is not None and operator.name in self._operators and isinstance(args[0], Pair):
            frames = (frame for frame, _ in walk_stack(None))
            self.found += [_owner(frames, self._names)] if result.numel() < args[0].numel() else []


def _owner(frames: Iterable[FrameType], names: dict[nn.Module, str]) -> str:
    """The module of the innermost method; `frames` go outwards."""
    for frame in frames:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module in names:
            name = repr(names[module]) if names[module] else "the model"
            return f"{name} ({type(module).__name__})"
    return "the readout"

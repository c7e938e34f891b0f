"""One pass that carries a mean and a variance for every unit: variance maps without draws.

With `m`, `v` the mean and variance of a site's input and `rate` its rate, the masked input has the mean `m` and the
variance `v / (1 - rate) + m^2 · rate / (1 - rate)`. Every operator after it turns a mean and a variance into those of its
output, as if all units were independent (`propagate_rules` has the rules). What comes before the first site stays plain.
Assumed density filtering, as in Loquercio, Segu, Scaramuzza (2020); Postels et al. (2019) and Brach, Sick, Duerr (2020)
propagate dropout in this way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from types import TracebackType
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from latedrop.errors import LatedropWarning, OutputError, SiteError
from latedrop.forward import Readout, call, place, read, row_count, tensors, undisturbed
from latedrop.inject import hooked
from latedrop.propagate_rules import Pair, Unsupported
from latedrop.sample import Moments, plain_output
from latedrop.sites import Rate, Site, find_sites, rates_by_site

__all__ = ["propagate"]

_REFUSED = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
_REDUCTIONS = ("sum", "mean", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d")


def propagate(
    model: nn.Module, x: Any, rate: Rate, sites: Sequence[Site] | None = None, readout: Readout = None
) -> Moments:
    """Mean and variance of every output unit under injected dropout, from one forward pass.

    The mean is the propagated one: after a nonlinearity it differs from the model's own output, as the mean over draws
    does. At rate 0 it is the model's own output.

    Args:
        model: any trained module; it is left as it was.
        x: inputs with N rows: a tensor or array, a tuple (several inputs) or a mapping.
        rate: probability that a unit is dropped; a float, or a mapping from name patterns to floats.
        sites: from `find_sites`, with `element` masks; found by a probe pass where None.
        readout: what of the output to take. One that sums or averages units gets a warning: the variance of a sum is not
            the sum of the variances.

    Returns:
        Moments with `draws=0`, in float32 or float64.

    Raises:
        SiteError: an operator has no rule (softmax, recurrent layers, comparisons), or a channel mask covers several
            positions; the message names the module.

    >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 1, 3))
    >>> moments = propagate(net, torch.ones(2, 1, 8, 8), rate=0.1)
    >>> moments.variance.shape, moments.draws
    (torch.Size([2, 1, 4, 4]), 0)
    """
    x = place(x, model)
    sites = find_sites(model, x) if sites is None else sites
    rates = rates_by_site(sites, rate)
    active = [site for site in sites if rates[site.name] > 0]
    if not active:
        mean = plain_output(model, x, readout)
        return Moments(mean, torch.zeros_like(mean), 0)
    watch = _Reductions()
    with undisturbed(model):
        try:
            with hooked(model, active, partial(_noise, rates)), _refusing(model):
                output = call(model, x)
            with watch:
                output = read(output, readout, row_count(x))
        except Unsupported as error:
            raise SiteError(
                f"expected operators that take a mean and a variance; found {error} {_place(error, model)}. "
                "Use method='sample' or method='linear', or leave out the sites before it with select=."
            ) from error
    mean, variance = (output.m, output.v) if isinstance(output, Pair) else (output, torch.zeros_like(output))
    _check_finite(mean, variance, rate)
    if watch.seen:
        warn(
            "the readout sums or averages units whose variances were propagated as if they were independent, which the "
            "pixels of a map are not: the variance of a count comes out wrong. Use method='linear' or method='sample' "
            "for sums, and propagate for maps.",
            LatedropWarning,
            stacklevel=2,
        )
    return Moments(mean, variance, 0)


class _Noise:
    """Stands in for a mask: `value * noise` is the pair of the masked value's mean and variance."""

    __array_ufunc__ = None

    def __init__(self, rate: float) -> None:
        self.odds = rate / (1 - rate)

    def __rmul__(self, value: Tensor) -> Pair:
        m, v = (value.m, value.v) if isinstance(value, Pair) else (_wide(value), None)
        noise = m.square() * self.odds
        return Pair(m.clone(), noise if v is None else v * (1 + self.odds) + noise)


def _wide(value: Tensor) -> Tensor:
    return value if value.dtype == torch.float64 else value.float()


def _noise(rates: dict[str, float], site: Site, call: int, shape: tuple[int, ...], like: Tensor) -> Any:
    rows = 1 if site.batch_axis is None else like.shape[site.batch_axis]
    own = len(shape) == like.dim() and prod(shape) * rows == like.numel() and site.calls == 1
    if site.kind == "channel" and not own:
        raise SiteError(
            f"expected independent units; site {site.name!r} drops whole channels of an input of shape "
            f"{tuple(like.shape)}, and the positions of a channel share their mask. Use kind='element', or "
            "method='sample' or method='linear'."
        )
    return _Noise(rates[site.name])


@contextmanager
def _refusing(model: nn.Module) -> Iterator[None]:
    """Stop pairs before recurrent and attention layers: torch may break these up into operators that do have rules."""

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        if any(isinstance(tensor, Pair) for tensor in tensors((args, kwargs))):
            raise Unsupported(f"the layer {type(module).__name__}")

    handles = []
    try:
        for module in model.modules():
            if isinstance(module, _REFUSED):
                handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Reductions(TorchDispatchMode):
    """Notes whether the readout sums or averages units."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= func._schema.name.removeprefix("aten::") in _REDUCTIONS and isinstance(args[0], Pair)
        return func(*args, **(kwargs or {}))


def _place(error: Exception, model: nn.Module) -> str:
    """The innermost module of `model` whose method the error came through."""
    names = {id(module): name for name, module in model.named_modules()}
    found = "in the readout"
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        owner = trace.tb_frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(owner, nn.Module) and id(owner) in names:
            name = names[id(owner)]
            found = f"in {name!r} ({type(owner).__name__})" if name else f"in the model itself ({type(owner).__name__})"
        trace = trace.tb_next
    return found


def _check_finite(mean: Tensor, variance: Tensor, rate: Rate) -> None:
    finite = torch.isfinite(mean) & torch.isfinite(variance)
    if not bool(finite.all()):
        rows = int((~finite).reshape(len(finite), -1).any(1).sum())
        raise OutputError(
            f"expected finite moments; found NaN or inf in {rows} of {len(finite)} rows at rate {rate}. "
            "Check the model on these inputs, and try a smaller rate."
        )

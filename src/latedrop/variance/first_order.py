"""The variance without drawing: exact to first order in the masks, for all rates at once.

Write a mask as `m = 1 + d`, with `E d = 0` and `Var d = rate / (1 - rate)`, independent for every unit. To first order
the output is `y + sum_i d_i · h_i · dy/dh_i`, so that

    Var y = sum over sites s of  rate_s / (1 - rate_s) · v_s,     v_s = sum over the units i of s of (h_i · dy/dh_i)^2.

`h_i · dy/dh_i` is the gradient of the output with respect to the mask at 1: one forward and one backward pass per
scalar output give every `v_s`. Where the output is affine in the masks (one site before the last layer) nothing is
left out; elsewhere it takes the slope for what dropping one unit does, the limit of small rates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from latedrop.errors import ArgumentError, OutputError, SiteError
from latedrop.masking.thinning import Thinner
from latedrop.masking.twins import worn
from latedrop.model.arrays import constants, place, widened
from latedrop.model.calling import Readout, call, check_finite, read
from latedrop.model.datasets import inputs_loaded, is_loader
from latedrop.model.finding import find_sites
from latedrop.model.items import Collate, as_items
from latedrop.model.rows import copied, filled_up, row_count, row_limits, some_rows, take_rows, tensors
from latedrop.model.running import derives, differentiating, running
from latedrop.model.scripts import wrap_scripts
from latedrop.model.sites import Rate, Site, Sites, odds_by_site
from latedrop.model.weight_rules import RECURRENT
from latedrop.switches import without_cudnn
from latedrop.torch_inside import being_traced
from latedrop.variance.mask_gradients import IN_PLACE, Beside, Key, NeedMasksError, Probes, UnitMasks
from latedrop.variance.moments import out_of_memory
from latedrop.variance.silent import warn_of_silent

__all__ = ["Linearization", "gradients_by_rows", "linearize", "unit_variances", "watched"]

_MOST_OUTPUTS = 1024
_OUTPUTS_AT_ONCE = 16


@dataclass(frozen=True)
class Linearization:
    """The model's own output, and what each site adds to its variance.

    Attributes:
        mean: `(N, ...)`, the output of the model as it is.
        variance_by_site: `(N, outputs, sites)`, per unit of `rate / (1 - rate)`; `outputs` counts the entries of one
            example's output.
        sites: in the order of the last axis.
    """

    mean: Tensor
    variance_by_site: Tensor
    sites: Sites

    def variance(self, rate: Rate) -> Tensor:
        """`sum_s rate_s / (1 - rate_s) · v_s`, in the shape of `mean`.

        `rate` is a number, or a mapping from site names or patterns to numbers, as for `sample`.

        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> linearize(net, torch.ones(5, 2)).variance(0.1).shape
        torch.Size([5, 1])
        """
        odds, by_site = odds_by_site(self.sites, rate), self.variance_by_site
        if len(set(odds)) == 1:
            found = (by_site.sum(-1) if len(odds) > 1 else by_site[..., 0]) * odds[0]
        else:
            found = by_site @ constants(odds).to(by_site)
        return found if found.shape == self.mean.shape else found.reshape(self.mean.shape)


def linearize(
    model: nn.Module,
    x: Any,
    sites: Sequence[Site] | None = None,
    readout: Readout = None,
    *,
    chunk: int | None = None,
    collate: Collate = None,
) -> Linearization:
    """First-order variance of `model` on `x`, site by site, without any draw.

    Args:
        model: any trained module that autograd can differentiate; it is left as it was.
        x: inputs with N rows, or a `DataLoader` or data set, as for `sample`.
        sites: from `find_sites`; found by a probe pass where None.
        readout: what of the output to take. A readout that sums a map to a count costs one backward pass.
        chunk: rows that run at once; all where None, halved when memory runs out.
        collate: from a list of items to what `model` takes, where `x` is a list of objects; see `find_sites`.

    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> result = linearize(net, torch.ones(5, 2))
    >>> result.mean.shape, result.variance_by_site.shape
    (torch.Size([5, 1]), torch.Size([5, 1, 1]))
    """
    loads = is_loader(x) and collate is None
    x = x if loads else place(as_items(x, collate), model)
    found = Sites(find_sites(model, x) if sites is None else sites)
    if loads:
        parts = (_by_rows(model, place(p, model), found, readout, chunk) for p in inputs_loaded(x, model))
        return _joined(found, chain.from_iterable(parts))
    return _joined(found, _by_rows(model, x, found, readout, chunk))


_Watcher = TypeVar("_Watcher", bound=Thinner)


def watched(
    model: nn.Module, x: Any, sites: Sites, readout: Readout, watch: Callable[[int], _Watcher]
) -> tuple[Linearization, list[tuple[_Watcher, int]]]:
    """`linearize`, while another looks at the inputs of the sites: `watch` makes one for so many rows that run at once.

    Also those who looked, each with the number of rows of `x` that it saw first; others fill a batch up. The inputs
    must have been placed.
    """
    looking: list[_Watcher] = []
    found: list[tuple[_Watcher, int]] = []

    def look(rows: int) -> _Watcher:
        looking.append(watch(rows))
        return looking[-1]

    def parts() -> Iterator[_Part]:
        for mean, columns in _by_rows(model, x, sites, readout, None, look=look):
            found.append((looking[-1], len(mean)))  # others were of passes that had to be made once more
            yield mean, columns

    return _joined(sites, parts()), found


def _joined(sites: Sites, parts: Iterable[_Part]) -> Linearization:
    means, variances = [], []
    for mean, columns in parts:
        means.append(mean)
        variances.append(torch.stack(columns, 1) if len(columns) > 1 else columns[0][:, None])
    if len(means) == 1:
        return Linearization(means[0].clone(), variances[0], sites)  # a model may write every output to one place
    return Linearization(torch.cat(means), torch.cat(variances), sites)


def unit_variances(
    model: nn.Module, x: Any, sites: Sequence[Site], readout: Readout = None
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """The model's output on one example, and for each of its entries the variance of every unit of every site."""
    x = place(x, model)
    if row_count(x) != 1:
        raise ArgumentError(f"expected one example; found {row_count(x)}. Pass a batch of one row, such as x[:1].")
    mean, columns = next(_by_rows(model, x, Sites(sites), readout, None, lambda g: g.square().flatten()))
    return mean, columns


def gradients_by_rows(model: nn.Module, x: Any, sites: Sites, readout: Readout = None) -> Iterator[_Part]:
    """Outputs of some rows after the others, and for each entry of an output the mask gradients of every site.

    These are `(rows, units)`. The inputs must have been placed.
    """
    return _by_rows(model, x, sites, readout, None, lambda gradients: gradients)


_Reduce = Callable[[Tensor], Tensor] | None
"""What is made of the gradients `(rows, units)` of one site; None: the sum of their squares, `(rows,)`."""
_Look = Callable[[int], Thinner]
_Part = tuple[Tensor, list[Any]]
"""An output, and for each of its entries what was reduced, by site; the sums of squares are `(rows, sites)`."""


def _by_rows(
    model: nn.Module,
    x: Any,
    sites: Sites,
    readout: Readout,
    chunk: int | None,
    reduce: _Reduce = None,
    look: _Look | None = None,
) -> Iterator[_Part]:
    rows = some_rows(x)
    if chunk is not None and chunk < 1:
        raise ArgumentError(f"expected chunk to be at least 1 row; found {chunk}.")
    least, most = row_limits(model)
    chunk = min(chunk or rows, rows, most or rows)
    apart = [site.name for site in sites if site.batch_axis is None or site.moved]
    if apart:  # whose entries are which example's cannot be told: one example at a time
        chunk = 1
        if least > 1:
            raise SiteError(
                f"expected a model that takes one row at a time, as the inputs of sites {apart} have no axis for the "
                f"examples, or these in another order; this program takes no fewer than {least}. Export it with a "
                "dynamic batch dimension, or use method='sample'."
            )
    done = 0
    while done < rows:
        part = x if chunk == rows else take_rows(x, slice(done, done + chunk))
        full = part if least == 1 else filled_up(part, least)
        try:
            result = _first_order(model, full, sites, readout, reduce, row_count(part), look)
        except Exception as error:
            if not out_of_memory(error) or chunk == 1:
                raise
            chunk = chunk // 2
            torch.cuda.empty_cache()
        else:
            yield result
            done += len(result[0])


def _first_order(
    model: nn.Module, x: Any, sites: Sites, readout: Readout, reduce: _Reduce, rows: int, look: _Look | None
) -> _Part:
    """Output of the first rows, and for each entry of it the squared mask gradients of every site, reduced."""
    called = [site.layer for site in sites if site.layer in RECURRENT]
    with torch.inference_mode(False), running(model, gradients=True), without_cudnn() if called else nullcontext():
        try:
            return _any_way(model, x, sites, readout, reduce, rows, look)
        except RuntimeError as error:
            if IN_PLACE in str(error):
                raise OutputError(
                    "expected a model that autograd can differentiate; it writes over a value that its backward pass "
                    "needs, as h.add_(f(h)) does. Use method='sample', or write h = h + f(h)."
                ) from error
            if "Inference tensors" in str(error):
                raise OutputError(
                    "expected gradients at every site; the model runs a part in torch.inference_mode(). Use "
                    "method='sample', or torch.no_grad() where no sites are."
                ) from error
            if out_of_memory(error) or not derives(model):
                raise
            raise OutputError(
                f"expected derivatives inside the model that a first-order variance can be taken of; it raised {error}."
                " Use method='sample'."
            ) from error


def _any_way(
    model: nn.Module, x: Any, sites: Sites, readout: Readout, reduce: _Reduce, rows: int, look: _Look | None
) -> _Part:
    """By hooks, by probes where these fail, or by masks, which can do all."""
    try:
        for hooks in (True, False):
            probes = Probes(norms=reduce is None, hooks=hooks)
            try:
                return _pass(model, copied(x), sites, readout, reduce, rows, probes, look)
            except RuntimeError as error:
                if not probes.hooks or out_of_memory(error):
                    raise
    except NeedMasksError:
        pass
    return _pass(model, copied(x), sites, readout, reduce, rows, UnitMasks(), look)


def _pass(
    model: nn.Module,
    x: Any,
    sites: Sites,
    readout: Readout,
    reduce: _Reduce,
    rows: int,
    masks: Probes | UnitMasks,
    look: _Look | None,
) -> _Part:
    beside = None if look is None else Beside(look(row_count(x)), masks)
    # Left after the backward pass, in which checkpointed parts run once more.
    with worn(model, sites, beside or masks, shared=False, differentiable=True, prepare=_wrapped) as found:
        with found.thinning.passing(x):
            output = read(call(found.twin, x), readout, row_count(x))
        if beside is not None:
            beside.looking = False
        with differentiating():
            result = _differentiated(output, sites, reduce, rows, masks)
    if not being_traced() and (silent := {name for name, _ in masks.axes} - masks.reached):
        warn_of_silent(model, [site for site in sites if site.name in silent], x, readout)
    return result


def _differentiated(output: Tensor, sites: Sites, reduce: _Reduce, rows: int, masks: Probes | UnitMasks) -> _Part:
    """What `_pass` gives, from the output with its graph."""
    own = widened(output.detach())
    check_finite(own, "without dropout")
    own = own if len(own) == rows else own[:rows]
    flat = output if output.dim() == 2 else output.reshape(len(output), -1)
    if flat.shape[1] > _MOST_OUTPUTS:
        raise ArgumentError(
            f"expected at most {_MOST_OUTPUTS} outputs per example, each costs a backward pass; found "
            f"{flat.shape[1]}. Use a readout such as a map's sum, or method='propagate' or 'sample' for maps."
        )
    if not masks.axes:  # no site's layer ran
        nothing = flat.new_zeros(rows, len(sites))
        found = nothing if reduce is None else {site.name: reduce(flat.new_zeros(rows, 1)) for site in sites}
        return own, [found for _ in range(flat.shape[1])]
    if not flat.requires_grad:
        raise OutputError(
            "expected an output that autograd can differentiate with respect to the sites; found one without a "
            "graph: the model or the readout detaches it or runs without gradients. Use method='sample'."
        )
    if masks.cut:
        raise OutputError(
            f"expected derivatives inside the model that can be differentiated once more; it takes one at "
            f"{sorted(masks.cut)} without create_graph=True. Add that to its torch.autograd.grad, or use "
            "method='sample'."
        )
    if masks.flat:
        raise OutputError(
            f"expected gradients at every site; the model runs {sorted(masks.flat)} without: in torch.no_grad(), or in "
            "a function with a backward pass of its own. Use method='sample', or leave these out with select=."
        )
    columns: list[Any] = []
    axes = dict(masks.axes)  # of the forward pass: what runs once more in a backward pass adds to them
    for start in range(0, flat.shape[1], _OUTPUTS_AT_ONCE):
        part = flat[:, start : start + _OUTPUTS_AT_ONCE] if flat.shape[1] > 1 else flat
        last = start + part.shape[1] == flat.shape[1]
        columns += [_by_site(axes, gradients, sites, reduce, rows) for gradients in masks.gradients(part, last, axes)]
    return own, columns


def _wrapped(twin: nn.Module) -> None:
    wrap_scripts(twin, _through)


def _through(script: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A part in TorchScript, which may have been made for inference alone."""
    output = script(*args, **kwargs)
    results = [tensor for tensor in tensors(output) if tensor.is_floating_point()]
    if any(t.requires_grad for t in tensors((args, kwargs))) and not all(t.requires_grad for t in results):
        raise OutputError(
            "expected gradients through the parts in TorchScript; one keeps none, as torch.jit.optimize_for_inference "
            "makes them. Use method='sample', or the part as it was before that."
        )
    return output


def _by_site(axes: dict[Key, int | None], gradients: Sequence[Tensor], sites: Sites, reduce: _Reduce, rows: int) -> Any:
    """`h · dy/dh` of every site, the first examples first, reduced; the calls of one layer are joined."""
    parts: dict[str, list[Tensor]] = {site.name: [] for site in sites}
    for ((name, _), axis), gradient in zip(axes.items(), gradients, strict=True):
        parts[name].append(_rows_first(widened(gradient.detach()), axis, rows))
    zero = gradients[0].new_zeros(rows, 1) if not all(parts.values()) else gradients[0]  # where a layer did not run
    if reduce is not None:
        whole = {name: units[0] if len(units) == 1 else torch.cat(units or [zero], 1) for name, units in parts.items()}
        return {name: reduce(units) for name, units in whole.items()}
    every = [part if part.shape[1] == 1 else _norms(part) for units in parts.values() for part in units or [zero]]
    squares = (widened(torch.cat(every, 1)) if len(every) > 1 else every[0]).square()  # few operators for all sites
    if len(every) == len(parts):
        return squares
    each = iter(squares.unbind(1))
    return torch.stack([sum((next(each) for _ in units[1:]), next(each)) for units in parts.values()], 1)


def _rows_first(gradient: Tensor, axis: int | None, rows: int) -> Tensor:
    """`(rows, units)`."""
    if axis is None:
        return gradient[None].flatten(1)
    first = gradient.movedim(axis, 0) if axis else gradient
    first = first if len(first) == rows else first[:rows]
    return first if first.dim() == 2 else first.flatten(1)


def _norms(gradients: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
    return norms

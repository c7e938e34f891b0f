"""The variance without drawing: exact to first order in the masks, for all rates at once.

Write a mask as `m = 1 + d`, with `E d = 0` and `Var d = rate / (1 - rate)`, independent for every unit. To first order
the output is `y + sum_i d_i · h_i · dy/dh_i`, so that

    Var y = sum over sites s of  rate_s / (1 - rate_s) · v_s,     v_s = sum over the units i of s of (h_i · dy/dh_i)^2.

`h_i · dy/dh_i` is the gradient of the output with respect to the mask at 1: one forward and one backward pass per
scalar output give every `v_s`. Where the output is affine in the masks (one site before the last layer) nothing is
left out; elsewhere it is the limit of small rates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from latedrop.errors import ArgumentError, OutputError, SiteError
from latedrop.masking.thinning import Thinning
from latedrop.model.arrays import place, widened
from latedrop.model.calling import Readout, call, check_finite, read
from latedrop.model.finding import find_sites
from latedrop.model.items import Collate, as_items
from latedrop.model.rows import copied, filled_up, row_count, row_limits, take_rows, tensors
from latedrop.model.running import derives, differentiating, running
from latedrop.model.scripts import wrap_scripts
from latedrop.model.sites import Rate, Site, Sites, odds_by_site
from latedrop.model.twin import release, twin_of
from latedrop.model.weight_rules import RECURRENT
from latedrop.torch_inside import held, is_wrapped
from latedrop.variance.moments import out_of_memory

__all__ = ["Linearization", "gradients_by_rows", "linearize", "unit_variances"]

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
        odds = odds_by_site(self.sites, rate).to(self.variance_by_site)
        return (self.variance_by_site @ odds).reshape(self.mean.shape)


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
        x: inputs with N rows, as for `sample`.
        sites: from `find_sites`; found by a probe pass where None.
        readout: what of the output to take. A readout that sums a map to a count costs one backward pass.
        chunk: rows that run at once; all where None, halved when memory runs out.
        collate: from a list of items to what `model` takes, where `x` is a list of objects; see `find_sites`.

    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> result = linearize(net, torch.ones(5, 2))
    >>> result.mean.shape, result.variance_by_site.shape
    (torch.Size([5, 1]), torch.Size([5, 1, 1]))
    """
    x = place(as_items(x, collate), model)
    found = Sites(find_sites(model, x) if sites is None else sites)

    def summed(gradients: Tensor) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(gradients, dim=1)
        return norms.square()

    means, variances = [], []
    for mean, columns in _by_rows(model, x, found, readout, chunk, summed):
        means.append(mean)
        variances.append(torch.stack([torch.stack([c[s.name] for s in found], -1) for c in columns], 1))
    return Linearization(torch.cat(means), torch.cat(variances), found)


def unit_variances(
    model: nn.Module, x: Any, sites: Sequence[Site], readout: Readout = None
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """The model's output on one example, and for each of its entries the variance of every unit of every site."""
    x = place(x, model)
    if row_count(x) != 1:
        raise ArgumentError(f"expected one example; found {row_count(x)}. Pass a batch of one row, such as x[:1].")
    mean, columns = next(_by_rows(model, x, Sites(sites), readout, None, lambda g: g.square().flatten()))
    return mean, columns


def gradients_by_rows(
    model: nn.Module, x: Any, sites: Sites, readout: Readout = None
) -> Iterator[tuple[Tensor, list[dict[str, Tensor]]]]:
    """Outputs of some rows after the others, and for each entry of an output the mask gradients of every site.

    These are `(rows, units)`. The inputs must have been placed.
    """
    return _by_rows(model, x, sites, readout, None, lambda gradients: gradients)


_Reduce = Callable[[Tensor], Tensor]


def _by_rows(
    model: nn.Module, x: Any, sites: Sites, readout: Readout, chunk: int | None, reduce: _Reduce
) -> Iterator[tuple[Tensor, list[dict[str, Tensor]]]]:
    rows = row_count(x)
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
        part = take_rows(x, slice(done, done + chunk))
        try:
            result = _first_order(model, filled_up(part, least), sites, readout, reduce, row_count(part))
        except Exception as error:
            if not out_of_memory(error) or chunk == 1:
                raise
            chunk = chunk // 2
            torch.cuda.empty_cache()
        else:
            yield result
            done += len(result[0])


def _first_order(
    model: nn.Module, x: Any, sites: Sites, readout: Readout, reduce: _Reduce, rows: int
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Output of the first rows, and for each entry of it the squared mask gradients of every site, reduced."""
    called = [site.layer for site in sites if site.layer in RECURRENT]
    with torch.inference_mode(False), running(model, gradients=True), _without_cudnn() if called else nullcontext():
        try:
            return _pass(model, copied(x), sites, readout, reduce, rows, _Probes())
        except _NeedMasksError:
            return _pass(model, copied(x), sites, readout, reduce, rows, _UnitMasks())
        except RuntimeError as error:
            if out_of_memory(error) or not derives(model):
                raise
            raise OutputError(
                f"expected derivatives inside the model that a first-order variance can be taken of; it raised {error}."
                " Use method='sample'."
            ) from error


def _pass(
    model: nn.Module,
    x: Any,
    sites: Sites,
    readout: Readout,
    reduce: _Reduce,
    rows: int,
    masks: _Probes | _UnitMasks,
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    twin = twin_of(model, differentiable=True)
    wrap_scripts(twin, _through)
    try:
        with Thinning(twin, sites, masks, shared=False).passing(x):
            output = read(call(twin, x), readout, row_count(x))
        with differentiating():
            return _differentiated(output, sites, reduce, rows, masks)
    finally:
        release(twin)  # checkpointed parts run once more in the backward pass


def _differentiated(
    output: Tensor, sites: Sites, reduce: _Reduce, rows: int, masks: _Probes | _UnitMasks
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """What `_pass` gives, from the output with its graph."""
    check_finite(output.detach(), "without dropout")
    flat = output.reshape(len(output), -1)
    if flat.shape[1] > _MOST_OUTPUTS:
        raise ArgumentError(
            f"expected at most {_MOST_OUTPUTS} outputs per example, each costs a backward pass; found "
            f"{flat.shape[1]}. Use a readout such as a map's sum, or method='propagate' or 'sample' for maps."
        )
    if not masks.axes:  # no site's layer ran
        nothing = reduce(flat.new_zeros(rows, 1))
        return widened(output.detach())[:rows], [{site.name: nothing for site in sites} for _ in range(flat.shape[1])]
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
    columns: list[dict[str, Tensor]] = []
    axes = dict(masks.axes)  # of the forward pass: what runs once more in a backward pass adds to them
    for start in range(0, flat.shape[1], _OUTPUTS_AT_ONCE):
        part = flat[:, start : start + _OUTPUTS_AT_ONCE]
        last = start + part.shape[1] == flat.shape[1]
        columns += [_squares(axes, gradients, sites, reduce, rows) for gradients in masks.gradients(part, last, axes)]
    return widened(output.detach())[:rows], columns


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


_Key = tuple[str, int]


class _NeedMasksError(Exception):
    """Something that only masks of ones can do: several outputs at once, packed sequences, inputs changed in place."""


class _UnitMasks:
    """Masks of ones whose gradients are asked for, one per site and call."""

    def __init__(self) -> None:
        self.axes: dict[_Key, int | None] = {}
        self.flat: set[str] = set()  # sites that run without gradients
        self.cut: set[str] = set()  # the probes, which come first, have looked for such
        self._leaves: dict[_Key, Tensor] = {}

    def thin(self, site: Site, call: int, value: Tensor, shape: tuple[int, ...], axis: int | None) -> Tensor:
        return value * self._mask(site, call, value, shape, axis)

    def thin_packed(
        self, site: Site, call: int, value: Tensor, shape: tuple[int, ...], rows: Tensor, steps: Tensor
    ) -> Tensor:
        mask = self._mask(site, call, value, shape, 0)
        return value * mask.expand(shape[0], int(steps.max()) + 1, shape[2])[rows, steps]

    def _mask(self, site: Site, call: int, like: Tensor, shape: tuple[int, ...], axis: int | None) -> Tensor:
        key = (site.name, call)
        self.flat |= set() if torch.is_grad_enabled() else {site.name}
        if key not in self._leaves:
            self._leaves[key] = torch.ones(shape, dtype=like.dtype, device=like.device, requires_grad=True)
            self.axes[key] = axis
        return self._leaves[key]

    def gradients(self, outputs: Tensor, last: bool, keys: Iterable[_Key]) -> Iterator[Sequence[Tensor]]:
        """For each of `outputs` `(n, k)`, the gradients of its rows with respect to the masks of `keys`."""
        leaves, k = [self._leaves[key] for key in keys], outputs.shape[1]
        if k > 1:
            each = torch.eye(k, dtype=outputs.dtype, device=outputs.device)[:, None].expand(k, *outputs.shape)
            try:
                found = torch.autograd.grad(
                    outputs, leaves, each, is_grads_batched=True, retain_graph=True, allow_unused=True
                )
                # None where the outputs do not depend on a mask, as where a readout leaves a branch out.
                both = list(zip(leaves, found, strict=True))
                yield from ([torch.zeros_like(leaf) if g is None else g[i] for leaf, g in both] for i in range(k))
                return
            except RuntimeError as error:  # some operator has no batching rule for its backward
                if out_of_memory(error):
                    raise
        for i in range(k):
            more = not last or i + 1 < k
            yield torch.autograd.grad(outputs[:, i].sum(), leaves, retain_graph=more, materialize_grads=True)


class _Probes:
    """The same gradients for a single output, without masks: what passes by is noted and left as it is."""

    def __init__(self) -> None:
        self.axes: dict[_Key, int | None] = {}
        self.flat: set[str] = set()  # sites that run without gradients
        self.cut: set[str] = set()  # sites at which the model differentiates, and keeps no graph of it
        self.asked = self.derived = False
        self._probes: dict[_Key, _Probe] = {}
        self._anchor: Tensor | None = None

    def thin(self, site: Site, call: int, value: Tensor, shape: tuple[int, ...], axis: int | None) -> Tensor:
        key = (site.name, call)
        self.flat |= set() if torch.is_grad_enabled() else {site.name}
        if self._anchor is None:
            self._anchor = torch.zeros((), device=value.device, requires_grad=True)
        if is_wrapped(value):  # the model uses torch.func
            raise _NeedMasksError
        if key not in self._probes:
            self._probes[key] = _Probe(shape, site.name, self)
            self.axes[key] = axis
        passed: Tensor = _Passing.apply(value, self._anchor, self._probes[key])
        return passed

    def thin_packed(self, *_: Any) -> Tensor:
        raise _NeedMasksError

    def gradients(self, outputs: Tensor, last: bool, keys: Iterable[_Key]) -> Iterator[Sequence[Tensor]]:
        """As for masks, for one output."""
        if outputs.shape[1] > 1 or self._anchor is None or self.derived:
            raise _NeedMasksError
        self.asked = True
        try:
            torch.autograd.grad(outputs.sum(), self._anchor, materialize_grads=True)
        except RuntimeError as error:
            if "modified by an inplace operation" in str(error):
                raise _NeedMasksError from error
            raise
        yield [self._probes[key].found(outputs) for key in keys]


class _Probe:
    """The gradient of one mask: `value · gradient` of all that passed, noted on the way back."""

    def __init__(self, shape: tuple[int, ...], site: str, probes: _Probes) -> None:
        self.shape, self._site, self._probes = shape, site, probes
        self.gradient: Tensor | None = None

    def note(self, gradient: Tensor) -> None:
        if not self._probes.asked:  # by the model itself, which differentiates inside
            self._probes.derived = True
            self._probes.cut |= set() if torch.is_grad_enabled() else {self._site}
            return
        gradient = gradient.sum_to_size(self.shape)
        self.gradient = gradient if self.gradient is None else self.gradient + gradient

    def found(self, like: Tensor) -> Tensor:
        return like.new_zeros(self.shape) if self.gradient is None else self.gradient


class _Passing(torch.autograd.Function):
    """The identity; its backward pass tells the probe what went through."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor, probe: _Probe) -> Tensor:
        ctx.save_for_backward(value)
        ctx.probe = probe
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, None]:
        (value,) = ctx.saved_tensors
        ctx.probe.note(value * gradients[0])
        return gradients[0] if ctx.needs_input_grad[0] else None, gradients[0].new_zeros(()), None


def _squares(
    axes: dict[_Key, int | None], gradients: Sequence[Tensor], sites: Sites, reduce: _Reduce, rows: int
) -> dict[str, Tensor]:
    """`h · dy/dh` of every site, the first examples first, squared and reduced; the calls of one layer are joined."""
    parts: dict[str, list[Tensor]] = {site.name: [] for site in sites}
    for ((name, _), axis), gradient in zip(axes.items(), gradients, strict=True):
        gradient = widened(gradient.detach())
        parts[name].append((gradient.movedim(axis, 0)[:rows] if axis is not None else gradient[None]).flatten(1))
    zero = gradients[0].new_zeros(rows, 1)  # of a site whose layer did not run
    return {name: reduce(torch.cat(units, 1) if units else zero) for name, units in parts.items()}


def _without_cudnn() -> AbstractContextManager[None]:
    """No cuDNN inside, for all threads: its recurrent functions have no backward pass in eval mode."""
    return held(lambda: torch.backends.cudnn.flags(enabled=False), "cudnn")

"""The gradients of the output with respect to masks at 1, at every site: what a first-order variance is made of.

`Probes` notes `value · gradient` on the way back, without a mask, and where only its norm is wanted holds no more;
`UnitMasks` are masks of ones whose gradients are asked for, where a probe does not do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from latedrop.masking.thinning import Thinner
from latedrop.model.sites import Site
from latedrop.torch_inside import being_traced, is_wrapped, version_of
from latedrop.variance.moments import out_of_memory

__all__ = ["IN_PLACE", "Beside", "Key", "NeedMasksError", "Probes", "UnitMasks"]

IN_PLACE = "modified by an inplace operation"
"""What autograd says of a value that was written over."""
Key = tuple[str, int]
_FEW = 2**16  # numbers of a value that may be held


class Beside:
    """Lets another look at what is thinned; in the forward pass alone, as parts may run once more in the other."""

    def __init__(self, other: Thinner, thinner: Thinner) -> None:
        self._other, self._thinner, self.looking = other, thinner, True

    def thin(self, site: Site, call: int, value: Tensor, shape: tuple[int, ...], axis: int | None) -> Tensor:
        """See `Thinner`."""
        if self.looking:
            self._other.thin(site, call, value, shape, axis)
        return self._thinner.thin(site, call, value, shape, axis)

    def thin_packed(
        self, site: Site, call: int, value: Tensor, shape: tuple[int, ...], rows: Tensor, steps: Tensor
    ) -> Tensor:
        """See `Thinner`."""
        if self.looking:
            self._other.thin_packed(site, call, value, shape, rows, steps)
        return self._thinner.thin_packed(site, call, value, shape, rows, steps)


_LARGE = 2**17
"""Units of all rows, from which on outputs are differentiated one by one on a CPU: faster then than all at once."""


class NeedMasksError(Exception):
    """Something that only masks of ones can do: several outputs at once, packed sequences, inputs changed in place."""


class UnitMasks:
    """Masks of ones whose gradients are asked for, one per site and call."""

    def __init__(self) -> None:
        self.axes: dict[Key, int | None] = {}
        self.flat: set[str] = set()  # sites that run without gradients
        self.cut: set[str] = set()  # the probes, which come first, have looked for such
        self.reached: set[str] = set()  # sites that some output has gradients of
        self._leaves: dict[Key, Tensor] = {}

    def thin(self, site: Site, call: int, value: Tensor, shape: tuple[int, ...], axis: int | None) -> Tensor:
        """See `Thinner`."""
        return value * self._mask(site, call, value, shape, axis)

    def thin_packed(
        self, site: Site, call: int, value: Tensor, shape: tuple[int, ...], rows: Tensor, steps: Tensor
    ) -> Tensor:
        """See `Thinner`."""
        mask = self._mask(site, call, value, shape, 0)
        return value * mask.expand(shape[0], int(steps.max()) + 1, shape[2])[rows, steps]

    def _mask(self, site: Site, call: int, like: Tensor, shape: tuple[int, ...], axis: int | None) -> Tensor:
        key = (site.name, call)
        self.flat |= set() if torch.is_grad_enabled() else {site.name}
        if key not in self._leaves:
            self._leaves[key] = torch.ones(shape, dtype=like.dtype, device=like.device, requires_grad=True)
            self.axes[key] = axis
        leaf = self._leaves[key]
        return leaf if leaf.shape == shape else leaf.reshape(shape)  # of channels, in a call with more axes

    def gradients(self, outputs: Tensor, last: bool, keys: Iterable[Key]) -> Iterator[Sequence[Tensor]]:
        """For each of `outputs` `(n, k)`, the gradients of its rows with respect to the masks of `keys`."""
        keys, k = list(keys), outputs.shape[1]
        leaves = [self._leaves[key] for key in keys]
        if k > 1:
            each = torch.eye(k, dtype=outputs.dtype, device=outputs.device)[:, None].expand(k, *outputs.shape)
            try:
                found = torch.autograd.grad(
                    outputs, leaves, each, is_grads_batched=True, retain_graph=True, allow_unused=True
                )
                # None where the outputs do not depend on a mask, as where a readout leaves a branch out.
                both = self._noted(keys, leaves, found)
                yield from ([torch.zeros_like(leaf) if g is None else g[i] for leaf, g in both] for i in range(k))
                return
            except RuntimeError as error:  # some operator has no batching rule for its backward
                if out_of_memory(error):
                    raise
        for i in range(k):
            more = not last or i + 1 < k
            found = torch.autograd.grad(outputs[:, i].sum(), leaves, retain_graph=more, allow_unused=True)
            yield [torch.zeros_like(leaf) if g is None else g for leaf, g in self._noted(keys, leaves, found)]

    def _noted(self, keys: Sequence[Key], leaves: Sequence[Tensor], found: Sequence[Tensor | None]) -> list[Any]:
        self.reached |= {key[0] for key, gradient in zip(keys, found, strict=True) if gradient is not None}
        return list(zip(leaves, found, strict=True))


class Probes:
    """The same gradients, output by output, without masks: what passes by is noted and left as it is.

    Args:
        norms: whether the norm of every row's gradient will do: one number for each row, in as many axes.
        hooks: whether small values may be noted by hooks of tensors: quicker, but their first gradients are held.
    """

    def __init__(self, norms: bool = False, *, hooks: bool = True) -> None:
        self.norms, self.hooks = norms, hooks
        self._leaves: list[Tensor] = []  # where gradients end, with hooks
        self.axes: dict[Key, int | None] = {}
        self.flat: set[str] = set()  # sites that run without gradients
        self.cut: set[str] = set()  # sites at which the model differentiates, and keeps no graph of it
        self.reached: set[str] = set()  # sites that some output has gradients of
        self.asked = self.derived = False
        self._probes: dict[Key, _Probe] = {}
        self._anchor: Tensor | None = None

    def thin(self, site: Site, call: int, value: Tensor, shape: tuple[int, ...], axis: int | None) -> Tensor:
        """See `Thinner`."""
        key = (site.name, call)
        self.flat |= set() if torch.is_grad_enabled() else {site.name}
        if is_wrapped(value):  # the model uses torch.func
            raise NeedMasksError
        if not self._probes:
            few = value.numel() <= _FEW and not being_traced()  # a program does the same for any number of rows
            self.hooks = self.hooks and not value.requires_grad and few
        if key not in self._probes:
            self._probes[key] = _Probe(shape, axis, site.name, self)
            self.axes[key] = axis
        elif self._probes[key].shape != shape:  # another call, with more or fewer axes
            raise NeedMasksError
        elif not self.asked:
            self._probes[key].several = True
        if self.hooks:
            return self._hooked(value, self._probes[key])
        if self._anchor is None:
            self._anchor = torch.zeros((), device=value.device, requires_grad=True)
        passed: Tensor = _Passing.apply(value, self._anchor, self._probes[key])
        return passed

    def _hooked(self, value: Tensor, probe: _Probe) -> Tensor:
        """The first on its way begins a graph; those behind it are in that graph."""
        passed = value.view_as(value) if value.requires_grad else value.detach().requires_grad_()
        if passed.is_leaf:
            self._leaves.append(passed)
        passed.register_hook(partial(probe.noted, value, version_of(value)))
        return passed

    def thin_packed(self, *_: Any) -> Tensor:
        """See `Thinner`."""
        raise NeedMasksError

    def gradients(self, outputs: Tensor, last: bool, keys: Iterable[Key]) -> Iterator[Sequence[Tensor]]:
        """As for masks, where there is one output or many units."""
        ends, k, keys = self._leaves if self._anchor is None else [self._anchor], outputs.shape[1], list(keys)
        if not self._probes or self.derived or (k > 1 and not self._one_by_one(outputs)):
            raise NeedMasksError
        self.asked = True
        try:
            for i, output in enumerate(outputs.split(1, dim=1)):
                for probe in self._probes.values():
                    probe.gradient = None
                _noted(output, ends, more=not last or i + 1 < k)
                yield [self._probes[key].found(outputs) for key in keys]
        finally:
            self._leaves = [] if last else self._leaves  # whose hooks know the probes

    def _one_by_one(self, outputs: Tensor) -> bool:
        if being_traced() or outputs.device.type != "cpu":
            return False
        return sum(prod(probe.shape) for probe in self._probes.values()) >= _LARGE


def _noted(output: Tensor, ends: Sequence[Tensor], more: bool) -> None:
    """A pass back from one output; `more` will follow."""
    try:
        torch.autograd.grad(output, ends, torch.ones_like(output), retain_graph=more, allow_unused=True)
    except RuntimeError as error:
        if IN_PLACE in str(error):
            raise NeedMasksError from error
        raise


class _Probe:
    """The gradient of one mask: `value · gradient` of all that passed, noted on the way back."""

    def __init__(self, shape: tuple[int, ...], axis: int | None, site: str, probes: Probes) -> None:
        self.shape, self._axis, self._site, self._probes = shape, axis, site, probes
        self.several = False  # values that the one mask thins: their gradients are added before a norm is taken
        self.gradient: Tensor | None = None

    def noted(self, value: Tensor, version: int, gradient: Tensor) -> None:
        """As a hook, which has to see by itself that the value was not written over."""
        if version_of(value) != version:
            raise NeedMasksError
        self.note(value, gradient)

    def note(self, value: Tensor, gradient: Tensor) -> None:
        if not self._probes.asked:  # by the model itself, which differentiates inside
            self._probes.derived = True
            self._probes.cut |= set() if torch.is_grad_enabled() else {self._site}
            return
        self._probes.reached.add(self._site)
        found = value * gradient
        if found.shape != self.shape:
            found = found.sum_to_size(self.shape)
        if self._probes.norms and not self.several:
            wide = None if found.dtype in (torch.float32, torch.float64) else torch.float32
            others = [i for i in range(found.dim()) if i != self._axis]
            found = torch.linalg.vector_norm(found, dim=others, keepdim=True, dtype=wide) if others else found
        self.gradient = found if self.gradient is None else self.gradient + found

    def found(self, like: Tensor) -> Tensor:
        return like.new_zeros(self.shape) if self.gradient is None else self.gradient


class _Passing(torch.autograd.Function):
    """The identity; its backward pass tells the probe what went through. The anchor makes it run, and gets nothing."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor, probe: _Probe) -> Tensor:
        ctx.save_for_backward(value)
        ctx.probe = probe
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        ctx.probe.note(*ctx.saved_tensors, gradients[0])
        return gradients[0] if ctx.needs_input_grad[0] else None, None, None

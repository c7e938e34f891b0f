"""What no mask reaches is computed once: outputs of modules upstream of all sites, kept from one pass to the next.

The first pass runs under `vmap`, where a tensor that depends on a draw is batched: a module whose inputs are not, and
that holds no site, gives the same output in every draw. Later passes of the same inputs, at any rate, get that output
without running the module. Of a chain of such modules only what somebody else reads is kept; the rest has its shape
and no memory. Where a kept tensor is changed in place by others, it is not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from latedrop.forward import plain_names, tensors
from latedrop.sites import Site

__all__ = ["Prefix"]


class Prefix:
    """The outputs that all draws of some inputs share.

    Args:
        model: whose modules they are.
        sites: what has a mask; None: there will be but one pass, and nothing to share.

    Attributes:
        ready: True where there is nothing to record: what is kept is given out instead of computed.
    """

    def __init__(self, model: nn.Module, sites: Sequence[Site] | None) -> None:
        self._modules = [] if sites is None else _without_sites(model, sites)
        self._kept: dict[tuple[int, int], Any] = {}
        self._calls: dict[int, int] = {}
        self._record: _Record | None = None
        self.ready = not self._modules

    @contextmanager
    def patched(self) -> Iterator[None]:
        """The modules' `forward` goes through here while the context lasts."""
        before = [(module, module.__dict__.get("forward")) for module in self._modules]
        try:
            for number, (module, _) in enumerate(before):
                module.forward = partial(self._forward, number, module.forward)
            yield
        finally:
            for module, own in before:
                module.__dict__.pop("forward", None)
                if own is not None:
                    module.forward = own
            self.forget()

    def begin(self) -> None:
        """A pass begins."""
        self._calls.clear()

    def forget(self) -> None:
        """Let go of all that was kept."""
        self._kept, self._record, self.ready = {}, None, not self._modules

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Keep, of the pass inside, what later ones can use."""
        self.forget()
        self._record = record = _Record()
        try:
            with record:
                yield
        finally:
            self._record = None
        self._kept, self.ready = record.usable(), True

    def returned(self, output: Any) -> None:
        """What the model gave back is read by others."""
        if self._record is not None:
            self._record.read(tensors(output))

    def _forward(self, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        record = self._record
        if not (self.ready or record) or (record and record.inside):
            return forward(*args, **kwargs)
        place = number, self._calls.get(number, 0)
        self._calls[number] = place[1] + 1
        if record is None:
            return self._kept[place] if place in self._kept else forward(*args, **kwargs)
        if any(map(_is_batched, tensors((args, kwargs)))):
            return forward(*args, **kwargs)
        record.inside = place
        try:
            output = forward(*args, **kwargs)
        finally:
            record.inside = None
        record.keep(place, output)
        return output


def _without_sites(model: nn.Module, sites: Sequence[Site]) -> list[nn.Module]:
    """Modules that no site lies in."""
    plain = plain_names(model)
    holds = {""}
    for site in sites:
        parts = (site.weight or site.name).split(".")
        holds.update(".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return [module for name, module in model.named_modules() if plain(name) not in holds]


_Place: TypeAlias = "tuple[int, int]"
"""A module, and its call in the pass."""


@dataclass
class _Use:
    """Who read and who changed a storage, and when: the module that was running, None outside of all."""

    reads: list[tuple[_Place | None, int]] = field(default_factory=list)
    writes: list[tuple[_Place | None, int]] = field(default_factory=list)

    def read_by(self, run: Container[_Place | None]) -> bool:
        """Whether something that runs in later passes reads it."""
        return any(who in run for who, _ in self.reads)

    def lasts(self, run: Container[_Place | None]) -> bool:
        """Whether later passes can have it as it is in the end: they change nothing, and read no earlier state."""
        last = max((when for _, when in self.writes), default=-1)
        return not any(who in run for who, _ in self.writes) and all(t > last for who, t in self.reads if who in run)


class _Record(TorchDispatchMode):
    """Watches who reads and who changes the outputs of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: _Place | None = None
        self._outputs: dict[_Place, Any] = {}
        self._uses: dict[int, _Use] = {}
        self._tick = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._tick += 1
        self.read(tensors((args, kwargs)))
        if func._schema.is_mutable:
            given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
            written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
            for use in self._of(tensors([given.get(name) for name in written])):
                use.writes.append((self.inside, self._tick))
        return func(*args, **kwargs)

    def keep(self, place: _Place, output: Any) -> None:
        """Note an output, unless it depends on a draw after all, or is no plain tensor."""
        parts = _parts(output)
        if all(type(part) is Tensor and not _is_batched(part) and _storage(part) for part in parts):
            self._outputs[place] = output
            for part in parts:
                self._uses.setdefault(_storage(part), _Use())

    def read(self, values: Iterator[Tensor]) -> None:
        """The running code looks at these."""
        for use in self._of(values):
            use.reads.append((self.inside, self._tick))

    def usable(self) -> dict[_Place, Any]:
        """The outputs that later passes can have."""
        by_place = {place: _parts(output) for place, output in self._outputs.items()}
        run: set[_Place | None] = {who for use in self._uses.values() for who, _ in (*use.reads, *use.writes)}
        run = {None, *run.difference(by_place)}
        before = 0
        while before != len(run):  # a module that has to run reads its inputs
            before = len(run)
            for place, parts in by_place.items():
                if not all(self._uses[_storage(part)].lasts(run) for part in parts):
                    run.add(place)
        found = {}
        for place, parts in by_place.items():
            if place not in run:
                kept = [part if self._uses[_storage(part)].read_by(run) else _shell(part) for part in parts]
                found[place] = tuple(kept) if isinstance(self._outputs[place], tuple) else kept[0]
        return found

    def _of(self, values: Iterator[Tensor]) -> Iterator[_Use]:
        for value in values:
            use = None if _is_batched(value) else self._uses.get(_storage(value))
            if use is not None:
                yield use


def _parts(output: Any) -> tuple[Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)


def _is_batched(value: Tensor) -> bool:
    return bool(torch._C._functorch.is_batchedtensor(value))


def _storage(value: Tensor) -> int:
    try:
        return int(value.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def _shell(value: Tensor) -> Tensor:
    """A tensor of the same kind and shape that takes no memory."""
    return value.new_empty(()).expand(value.shape)

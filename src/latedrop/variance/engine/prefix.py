"""What no mask reaches is computed once: outputs of layers upstream of all sites, kept from one pass to the next.

The first pass runs under `vmap`, where a tensor that depends on a draw is batched: a layer of torch whose input is not,
and that is no site, gives the same output in every draw. Later passes of the same inputs, at any rate, get that output
without running the layer. Only torch's own layers are skipped, as they do nothing else than compute an output; what
calls them runs every time. Of a chain of such layers only what somebody else reads is kept; the rest has its shape and
no memory, in the first pass too. Where a kept tensor is changed in place by others, it is not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from latedrop.model.forward import named_layers, rerouted, tensors
from latedrop.model.sites import Site
from latedrop.model.weight_calls import storage_of

__all__ = ["Prefix"]

_Place: TypeAlias = "tuple[int, int]"
"""A layer, and its call in the pass."""


class Prefix:
    """The outputs that all draws of some inputs share.

    Args:
        model: whose layers they are of.
        sites: what has a mask; None: there will be but one pass, and nothing to share.

    Attributes:
        ready: True where there is nothing to record: what is kept is given out instead of computed.
    """

    def __init__(self, model: nn.Module, sites: Sequence[Site] | None) -> None:
        # Weight calls are known by what is computed from parameters in the same pass: nothing of that may be kept.
        none = sites is None or any(site.weight is not None for site in sites)
        self._layers = [] if none or sites is None else _layers(model, sites)
        self._kept: dict[_Place, Tensor] = {}
        self._wanted: set[_Place] = set()
        self._calls: dict[int, int] = {}
        self._record: _Record | None = None
        self.ready = not self._layers

    @property
    def shares(self) -> bool:
        """Whether something is kept."""
        return bool(self._kept)

    @contextmanager
    def patched(self) -> Iterator[None]:
        """The layers' `forward` goes through here while the context lasts."""
        try:
            with rerouted({layer: partial(self._forward, number) for number, layer in enumerate(self._layers)}):
                yield
        finally:
            self.forget()

    def begin(self) -> None:
        """A pass begins."""
        self._calls.clear()

    def forget(self) -> None:
        """Let go of all that was kept."""
        self._kept, self._record, self.ready = {}, None, not self._layers

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Keep, of the pass inside, what later ones can use.

        A layer that has to run in every pass may read what nobody held: the next pass is recorded again, and holds it.
        """
        self.forget()
        self._record = record = _Record(self._wanted)
        try:
            with record:
                yield
        finally:
            self._record = None
        self._kept, lost = record.usable()
        self.ready = lost <= self._wanted
        self._wanted = self._wanted | lost

    def read(self, value: Any) -> None:
        """Something reads this that torch does not tell of: the user an output, a kernel of ours an input."""
        if self._record is not None:
            self._record.read(tensors(value))

    def _forward(self, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        place = number, self._calls.get(number, 0)
        self._calls[number] = place[1] + 1
        if self._record is None:
            return self._kept[place] if place in self._kept else forward(*args, **kwargs)
        inputs = list(tensors((args, kwargs)))
        if any(map(_is_batched, inputs)):
            return forward(*args, **kwargs)
        with self._record.running(place, inputs):
            output = forward(*args, **kwargs)
        self._record.keep(place, output)
        return output


def _layers(model: nn.Module, sites: Sequence[Site]) -> list[nn.Module]:
    """Layers of torch itself that are no sites."""
    masked = {site.name for site in sites}
    return [
        module
        for name, module in named_layers(model).items()
        if name not in masked
        and type(module).__module__.startswith("torch.nn.modules.")
        and not module._modules
        and "forward" not in vars(module)
    ]


@dataclass
class _Use:
    """Who read and who changed a storage, and when: the layer that was running, None outside of all.

    The storage is held from when something else than a layer reads it. Until then the model alone holds it, and once
    it lets go nobody can read it any more.
    """

    weak: StorageWeakRef
    held: torch.UntypedStorage | None = None
    reads: list[tuple[_Place | None, int]] = field(default_factory=list)
    writes: list[tuple[_Place | None, int]] = field(default_factory=list)

    def read_by(self, run: Container[_Place | None]) -> bool:
        """Whether something that runs in later passes reads it."""
        return any(who in run for who, _ in self.reads)

    def lasts(self, run: Container[_Place | None]) -> bool:
        """Whether later passes can have it as it is in the end: they change nothing, and read no earlier state."""
        last = max((when for _, when in self.writes), default=-1)
        return not any(who in run for who, _ in self.writes) and all(t > last for who, t in self.reads if who in run)

    def storage(self) -> torch.UntypedStorage | None:
        """Itself, where it is still there."""
        found: torch.UntypedStorage | None = self.held or torch.UntypedStorage._new_with_weak_ptr(self.weak.cdata)
        return found


class _Shell(Tensor):
    """Stands for a value that nobody reads by an operator; whoever reads it otherwise is told."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LOOKS:
            raise RuntimeError("the model looks at a value that is shared between draws")
        return super().__torch_function__(func, types, args, kwargs or {})


_LOOKS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.untyped_storage, Tensor.__dlpack__}
"""What gives values away without an operator."""


class _Output:
    """What a layer gave: where it lies, and how."""

    def __init__(self, value: Tensor, use: _Use) -> None:
        self.use = use
        self._kind: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
        self._layout = value.storage_offset(), value.shape, value.stride()

    def usable(self, run: Container[_Place | None]) -> bool:
        """Whether later passes can have it."""
        return self.use.lasts(run) and (not self.use.read_by(run) or self.use.storage() is not None)

    def given(self, run: Container[_Place | None]) -> Tensor:
        """What later passes get; a shell of the same kind and shape that takes no memory, where nobody reads it."""
        storage = self.use.storage() if self.use.read_by(run) else None
        if storage is None:
            return torch.zeros((), **self._kind).expand(self._layout[1]).as_subclass(_Shell)
        return torch.empty(0, **self._kind).set_(storage, *self._layout)


class _Record(TorchDispatchMode):
    """Watches who reads and who changes the outputs of layers; `wanted` are held from the start."""

    def __init__(self, wanted: Container[_Place]) -> None:
        super().__init__()
        self._wanted = wanted
        self._inside: _Place | None = None
        self._given: set[int | None] = set()
        self._foreign: set[_Place] = set()
        self._outputs: dict[_Place, _Output] = {}
        self._uses: dict[int | None, _Use] = {}
        self._tick = 0

    @contextmanager
    def running(self, place: _Place, inputs: Sequence[Tensor]) -> Iterator[None]:
        """A layer runs on inputs that no mask has reached."""
        self._inside, self._given = place, set(map(storage_of, inputs))
        try:
            yield
        finally:
            self._inside, self._given = None, set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._tick += 1
        self.read(tensors((args, kwargs)))
        if func._schema.is_mutable:
            given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
            written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
            for storage in map(storage_of, tensors([given.get(name) for name in written])):
                if storage in self._uses:
                    self._uses[storage].writes.append((self._inside, self._tick))
                elif storage in self._given and self._inside is not None:
                    self._foreign.add(self._inside)  # changes what no layer made, and must do it every time
        return func(*args, **kwargs)

    def keep(self, place: _Place, output: Any) -> None:
        """Note an output, unless it depends on a draw after all, or is more than a plain tensor."""
        if type(output) is Tensor and not _is_batched(output) and storage_of(output) and place not in self._foreign:
            use = self._uses.setdefault(storage_of(output), _Use(StorageWeakRef(output.untyped_storage())))
            self._outputs[place] = _Output(output, use)
            if place in self._wanted:
                use.held = output.untyped_storage()

    def read(self, values: Iterator[Tensor]) -> None:
        """The running code looks at these."""
        for value in values:
            use = None if _is_batched(value) else self._uses.get(storage_of(value))
            if use is not None:
                use.reads.append((self._inside, self._tick))
                if self._inside is None:
                    use.held = value.untyped_storage()

    def usable(self) -> tuple[dict[_Place, Tensor], set[_Place]]:
        """The outputs that later passes can have, and those that they could if they were still there."""
        users = {who for use in self._uses.values() for who, _ in (*use.reads, *use.writes)}
        run: set[_Place | None] = {None, *users.difference(self._outputs)}
        before = 0
        while before != len(run):  # a layer that has to run reads its inputs
            before = len(run)
            run.update(place for place, output in self._outputs.items() if not output.usable(run))
        lost = {place for place, output in self._outputs.items() if place in run and output.use.lasts(run)}
        return {place: output.given(run) for place, output in self._outputs.items() if place not in run}, lost


def _is_batched(value: Tensor) -> bool:
    return bool(torch._C._functorch.is_batchedtensor(value))

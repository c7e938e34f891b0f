"""One forward pass of a private copy: what happens at its sites, and where each unit of a mask lies.

With `h` the input of a layer and `m` an inverted dropout mask, the layer sees `h · m`. A `Thinner` holds the masks and
returns the thinned value; a `Pass` tells it which axis of the value counts the examples. The state of a pass belongs to
the caller: layers of the copy look it up in a `ContextVar`, so that threads and tasks share one copy and never see each
other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from latedrop.errors import SiteError
from latedrop.network.layers import channel_axis, layer_inputs
from latedrop.network.sites import Site, refuse_nested

__all__ = ["CURRENT", "Pass", "Thinner", "around_layer"]

CURRENT: ContextVar[Pass | None] = ContextVar("latedrop_pass", default=None)
"""The pass that the caller's thread or task is in."""


class Thinner(Protocol):
    """Gives thinned values."""

    def thin(self, site: Site, call: int, value: Tensor, shape: tuple[int, ...], axis: int | None) -> Tensor:
        """Return `value` times the mask of a site's call, which has `shape` for one draw and is broadcast.

        `axis` is that of `value` and `shape` along which examples lie; None where they lie along none.
        """
        ...

    def thin_packed(
        self, site: Site, call: int, value: Tensor, shape: tuple[int, ...], rows: Tensor, steps: Tensor
    ) -> Tensor:
        """Do the same for packed entries: example `rows[i]` and step `steps[i]` of masks `(example, step, feature)`."""
        ...


class Pass:
    """The state of one forward pass.

    Args:
        sites: those with a mask; none for a plain pass.
        thinner: gives their thinned inputs.
        rows: examples in the batch; None where they are unknown.
        copies: how many copies of the examples the draws have, one after the other.
        shared: True: a mask serves all examples of a draw; False: each has its own.

    Attributes:
        calls: follows weights without a module, where a site is one.
    """

    calls: Any = None

    def __init__(
        self,
        sites: Sequence[Site] = (),
        thinner: Thinner | None = None,
        rows: int | None = None,
        copies: int = 1,
        *,
        shared: bool = True,
    ) -> None:
        self.sites = {site.name: site for site in sites}
        self.thinner = thinner
        self._rows, self._copies, self._shared = rows, copies, shared
        self._calls = dict.fromkeys(self.sites, 0)

    def run(self, name: str, layer: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer of the copy; its input is thinned where it is a site."""
        site = self.sites.get(name)
        if site is None:
            return forward(*args, **kwargs)
        channels = (channel_axis(layer),) if site.kind == "channel" else ()
        if args and type(args[0]) is Tensor and not isinstance(layer, (nn.MultiheadAttention, nn.Bilinear)):
            time = 0 if site.kind == "channel" else self._calls[name]
            self._calls[name] += 1
            return forward(self._padded(site, time * 3, args[0], channels), *args[1:], **kwargs)
        inputs = layer_inputs(layer, args, kwargs)
        thinned = self.thinned(site, inputs.values(), channels)
        changed = {key: thinned[id(value)] for key, value in inputs.items()}
        args = tuple(changed.get(i, value) for i, value in enumerate(args))
        return forward(*args, **{key: changed.get(key, value) for key, value in kwargs.items()})

    def idle(self) -> list[str]:
        """Return the sites that should have run, and did not."""
        return [name for name, count in self._calls.items() if count == 0 and not self.sites[name].skipped]

    def thinned(self, site: Site, values: Iterable[Any], channels: tuple[int, ...]) -> dict[int, Any]:
        """Return thinned values by the identity of the given ones: query, key and value are often one tensor."""
        found: dict[int, Any] = {}
        for value in values:
            if id(value) not in found:
                time = 0 if site.kind == "channel" else self._calls[site.name]
                number = time * 3 + len(found)
                packed = isinstance(value, PackedSequence)
                found[id(value)] = (
                    self._packed(site, number, value) if packed else self._padded(site, number, value, channels)
                )
        self._calls[site.name] += 1
        return found

    def _padded(self, site: Site, number: int, value: Tensor, channels: tuple[int, ...]) -> Tensor:
        assert self.thinner is not None
        if value.is_nested:
            refuse_nested(site.name, value)
        axis, shape, rows = site.batch_axis, list(value.shape), self._rows
        size = 0 if axis is None else shape[axis]
        if site.kind == "channel":
            kept = [channel % len(shape) for channel in channels]
            shape = [size if i in kept else 1 for i, size in enumerate(shape)]
            if self._shared and self._copies == 1 and size % (rows or 1):
                axis = None  # one mask for all entries, whosever they are
        if axis is None:
            return self.thinner.thin(site, number, value, tuple(shape), None)
        rows = size if rows is None else rows
        if rows == 0:
            return value
        examples = 1 if self._shared else rows // self._copies
        inner, rest = divmod(size, rows)
        unfolded = site.kind == "element" and len(site.units) < value.dim()
        if rest or (inner != 1 and unfolded):  # with one entry for each example when the sites were found
            raise SiteError(
                f"expected the input of site {site.name!r} to have a multiple of {rows} entries along axis {axis}, as "
                "there are that many examples, and as many for each as when the sites were found; found shape "
                f"{tuple(value.shape)}. Where the number differs from example to example, find the sites on such "
                "examples, with kind='channel'; else leave it out with select=."
            )
        if inner == 1:
            shape[axis] = examples
            return self.thinner.thin(site, number, value, tuple(shape), axis)
        # Folded examples: split the axis in two, so that a mask of one example broadcasts over the other part.
        split = (inner, rows) if site.interleaved else (rows, inner)
        own = (1 if site.kind == "channel" else inner, examples)
        full = [*shape[:axis], *(own if site.interleaved else own[::-1]), *shape[axis + 1 :]]
        along = axis + 1 if site.interleaved else axis
        return self.thinner.thin(site, number, value.unflatten(axis, split), tuple(full), along).flatten(axis, axis + 1)

    def _packed(self, site: Site, number: int, value: PackedSequence) -> PackedSequence:
        """Thin packed steps as their padded `(example, step, feature)` layout would be."""
        assert self.thinner is not None
        sizes = value.batch_sizes
        steps, features = len(sizes), value.data.shape[-1]
        examples = 1 if self._shared else int(sizes[0]) // self._copies
        shape = (examples, 1 if site.kind == "channel" else steps, features)
        step = torch.arange(steps).repeat_interleave(sizes).to(value.data.device)
        row = torch.cat([torch.arange(int(size)) for size in sizes]).to(value.data.device)
        if value.sorted_indices is not None:
            row = value.sorted_indices[row]
        data = self.thinner.thin_packed(site, number, value.data, shape, row, step)
        return PackedSequence(data, sizes, value.sorted_indices, value.unsorted_indices)


def around_layer(name: str, layer: nn.Module) -> None:
    """Let every call of a layer of a private copy go through the current pass."""
    own = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        now = CURRENT.get()
        if now is None:
            raise SiteError(
                f"expected layer {name!r} to run in the thread or task that makes the prediction; it runs in another "
                "one, which the model starts by itself. Leave it out with select=, or call it from the model's forward."
            )
        return now.run(name, layer, own, args, kwargs)

    layer.forward = forward

"""Sites of a twin, rerouted: the input of each goes through a function that thins it.

With `h` the input of a layer and `m` an inverted dropout mask, the layer sees `h · m`. Who holds the mask returns the
thinned value; here is said which unit of it lies where. A weight that has no module is reached where a torch function
takes it, by a mode of the calling thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from latedrop.errors import SiteError
from latedrop.model.branches import used_elsewhere
from latedrop.model.calling import call
from latedrop.model.layers import SOURCES, channel_axis, layer_inputs
from latedrop.model.rows import row_count
from latedrop.model.sites import Site, missing_sites, refuse_nested
from latedrop.model.twin import reroute
from latedrop.model.weight_calls import WeightCall, WeightCalls
from latedrop.model.weight_rules import Place
from latedrop.model.wrappers import layer_named
from latedrop.torch_inside import eager

__all__ = ["IDLE", "Thinner", "Thinning"]


class Thinner(Protocol):
    """What gives thinned values."""

    def thin(self, site: Site, call: int, value: Tensor, shape: tuple[int, ...], axis: int | None) -> Tensor:
        """`value` times the mask of a site's call, which has `shape` for one draw and is broadcast.

        `axis` is that of `value` and `shape` along which examples lie; None where they lie along none.
        """
        ...

    def thin_packed(
        self, site: Site, call: int, value: Tensor, shape: tuple[int, ...], rows: Tensor, steps: Tensor
    ) -> Tensor:
        """The same of packed entries: of example `rows[i]` and step `steps[i]` of masks `(example, step, feature)`."""
        ...


class Thinning:
    """The sites of a twin while passes run.

    Args:
        twin: from `twin_of`; its sites are rerouted from now on.
        sites: those with a mask.
        thinner: gives the thinned inputs.
        shared: True: a mask serves all examples of a draw; False: each has its own.
    """

    def __init__(self, twin: nn.Module, sites: Sequence[Site], thinner: Thinner, *, shared: bool = True) -> None:
        layers = [(site, layer_named(twin, site.name)) for site in sites if site.weight is None]
        functional = {site.name: site for site in sites if site.weight is not None}
        if functional or any(layer is None for _, layer in layers):
            missing = missing_sites(twin, sites)
            if missing:
                raise SiteError(
                    f"expected the model to have the sites' layers; {missing} are not among its modules. "
                    "Find the sites again with find_sites(model, inputs)."
                )
        self.thinner = thinner
        self._twin, self._sites = twin, sites
        self._shared = shared
        self._fired = dict.fromkeys((site.name for site in sites), 0)
        self._rows: int | None = None
        self._copies = 1
        self._functional = functional
        for site, layer in layers:
            if layer is not None:
                several = isinstance(layer, (nn.MultiheadAttention, nn.Bilinear))
                channels = (channel_axis(layer),) if site.kind == "channel" else ()
                reroute(layer, partial(self._several if several else self._around, site, layer, channels))
        self._calls = WeightCalls(twin, self._meet) if functional else None
        if self._calls is not None:
            for module in twin.modules():
                if isinstance(module, SOURCES):
                    reroute(module, partial(_apart, self._calls))

    def passing(self, x: Any, copies: int = 1) -> AbstractContextManager[None]:
        """One forward pass over the rows of `x`, of which the draws have `copies` one after the other."""
        return self.passing_rows(row_count(x), copies, lambda twin: call(twin, x))

    def passing_rows(
        self, rows: int | None, copies: int, again: Callable[[nn.Module], Any]
    ) -> AbstractContextManager[None]:
        """The same of so many rows; `again` runs the pass on another twin. The rows may be unknown."""
        self._fired = dict.fromkeys(self._fired, 0)
        self._rows, self._copies = rows, copies
        return _Pass(self, again) if self._calls is None else self._followed(self._calls, again)

    @contextmanager
    def _followed(self, calls: WeightCalls, again: Callable[[nn.Module], Any]) -> Iterator[None]:
        """A pass in which torch functions meet weights that have no module."""
        with calls, eager():
            calls.begin()
            try:
                yield
            finally:
                self._rows = None
                calls.end()
        self.passed(again)

    def passed(self, again: Callable[[nn.Module], Any]) -> None:
        """After a pass: refuse weights that were used past their site."""
        self._rows = None
        if self.thinner is IDLE or all(self._fired.values()):
            return
        silent = [site for site in self._sites if self._fired[site.name] == 0]
        used = self._used_elsewhere(silent, again)
        if used:
            raise SiteError(
                f"expected every site to fire in the forward pass where its layer runs; {used} did not: the "
                "model used these layers' weights in another way than when the sites were found. Leave them out with "
                "select=, or find the sites again."
            )

    def _used_elsewhere(self, silent: Sequence[Site], again: Callable[[nn.Module], Any]) -> list[str]:
        thinner: Thinner = self.thinner
        self.thinner = IDLE
        try:
            return used_elsewhere(self._twin, silent, again)
        finally:
            self.thinner = thinner

    def _around(
        self, site: Site, layer: nn.Module, channels: tuple[int, ...], forward: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """A layer of one input; others that it is given, such as a recurrent layer's state, stay as they are."""
        if not args or type(args[0]) is PackedSequence:
            return self._several(site, layer, channels, forward, *args, **kwargs)
        time = 0 if site.kind == "channel" else self._fired[site.name]
        value = self._padded(site, time * 3, args[0], channels)
        self._fired[site.name] += 1
        return forward(value, *args[1:], **kwargs)

    def _several(
        self, site: Site, layer: nn.Module, channels: tuple[int, ...], forward: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Any layer."""
        inputs = layer_inputs(layer, args, kwargs)
        thinned = self._thinned(site, inputs.values(), channels)
        changed = {key: thinned[id(value)] for key, value in inputs.items()}
        args = tuple(changed.get(i, value) for i, value in enumerate(args))
        return forward(*args, **{key: changed.get(key, value) for key, value in kwargs.items()})

    def _meet(self, met: WeightCall) -> dict[Place, Any]:
        if met.name not in self._functional:
            return {}
        thinned = self._thinned(self._functional[met.name], met.inputs.values(), met.channels)
        return {place: thinned[id(value)] for place, value in met.inputs.items()}

    def _thinned(self, site: Site, values: Iterable[Any], channels: tuple[int, ...]) -> dict[int, Any]:
        """By identity: query, key and value are often one tensor and stay one."""
        found: dict[int, Any] = {}
        for value in values:
            if id(value) not in found:
                time = 0 if site.kind == "channel" else self._fired[site.name]
                packed = isinstance(value, PackedSequence)
                number = time * 3 + len(found)
                found[id(value)] = (
                    self._packed(site, number, value) if packed else self._padded(site, number, value, channels)
                )
        self._fired[site.name] += 1
        return found

    def _padded(self, site: Site, number: int, value: Tensor, channels: tuple[int, ...]) -> Tensor:
        if value.is_nested:
            refuse_nested(site.name, value)
        axis, shape = site.batch_axis, list(value.shape)
        size = 0 if axis is None else shape[axis]
        if site.kind == "channel":
            kept = [channel % len(shape) for channel in channels]
            shape = [size if i in kept else 1 for i, size in enumerate(shape)]
            if self._shared and self._copies == 1 and size % (self._rows or 1):
                axis = None  # one mask for all entries, whosever they are
        if axis is None:
            return self.thinner.thin(site, number, value, tuple(shape), None)
        rows = self._rows if self._rows is not None else size
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


class _Pass:
    """A pass of sites that are modules; quicker than a generator."""

    def __init__(self, thinning: Thinning, again: Callable[[nn.Module], Any]) -> None:
        self._thinning, self._again = thinning, again

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._thinning.passed(self._again)


class _Idle:
    """Thins nothing."""

    def thin(self, site: Site, call: int, value: Tensor, *_: Any) -> Tensor:
        return value

    thin_packed = thin


IDLE: Thinner = _Idle()


def _apart(calls: WeightCalls, forward: Any, *args: Any, **kwargs: Any) -> Any:
    with calls.apart():
        return forward(*args, **kwargs)

"""Dropout on, dropout off: forward pre-hooks that multiply the input of each site by a mask.

With `h` the input of a layer and `m` an inverted dropout mask, the layer sees `h · m`. The modules, their
parameters and their flags stay the user's; only our own hooks come and go. A weight that has no module is reached
where a torch function takes it, by a mode that is on while the context lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from latedrop.errors import ArgumentError, SiteError
from latedrop.masking.masks import masks
from latedrop.model.forward import bare, evaluating, named_layers, row_count
from latedrop.model.sites import Rate, Site, apart, channel_axis, layer_inputs, missing_sites, rates_by_site
from latedrop.model.weight_calls import Place, WeightCall, WeightCalls

__all__ = ["Injection", "MaskSource", "checked_seed", "example_axis", "hooked", "inject", "mask_for"]

MaskSource: TypeAlias = Callable[[Site, int, "tuple[int, ...]", Tensor], Any]
"""`(site, call, shape, like)` -> what a tensor with the dtype and device of `like` is multiplied by: a mask, mostly."""


class Injection:
    """What `inject` yields: which thinned network runs next.

    Attributes:
        draw: the draw of the next forward pass. It moves on by one with each pass, unless it was fixed.
    """

    def __init__(self, rates: Mapping[str, float], seed: int, draw: int | None) -> None:
        self.rates = rates
        self.seed = seed
        self.draw = draw or 0
        self._fixed = draw is not None

    def mask(self, site: Site, call: int, shape: tuple[int, ...], like: Tensor) -> Any:
        """The mask of the current draw."""
        rate, draws = self.rates[site.name], range(self.draw, self.draw + 1)
        made = partial(masks, self.seed, draws, site.name, call, shape, rate, like)
        return mask_for(made, rate, like, lambda found: found[0])

    def _finished(self, module: nn.Module, args: Any, output: Any) -> None:
        self.draw += not self._fixed


def mask_for(made: Callable[..., Tensor], rate: float, like: Tensor, pick: Callable[[Tensor], Tensor]) -> Any:
    """The factor for `like`: what `pick` takes out of the masks that `made(scaled=...)` makes.

    In half precision the scale is not rounded into the mask, where it would be off by up to 0.4 % in every draw.
    """
    if like.dtype not in (torch.float16, torch.bfloat16):
        return pick(made(scaled=True))
    return _Half(pick(made(scaled=False)), 1 / (1 - rate))


class _Half:
    """Stands where a mask would: the value is masked by 0 or 1, then scaled and rounded."""

    def __init__(self, mask: Tensor, scale: float) -> None:
        self.mask, self.scale = mask, scale

    def expand(self, *shape: int) -> _Half:
        return _Half(self.mask.expand(*shape), self.scale)

    def __getitem__(self, index: Any) -> _Half:
        return _Half(self.mask[index], self.scale)

    def __rmul__(self, value: Tensor) -> Tensor:
        return value * self.mask * self.scale


@contextmanager
def inject(
    model: nn.Module, sites: Sequence[Site], rate: Rate, seed: int = 0, *, draw: int | None = None
) -> Iterator[Injection]:
    """Run `model` as one thinned network per forward pass while the context lasts.

    Args:
        model: it stays in eval mode inside, and everything about it is restored after.
        sites: from `find_sites`.
        rate: probability that a unit is dropped; a float, or a mapping from name patterns to floats.
        seed: with the draw and the site it fixes every mask.
        draw: the one draw to use for every pass; None runs draw 0, 1, 2, ... one per pass.

    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> from latedrop.model.sites import find_sites
    >>> x = torch.ones(1, 2)
    >>> with inject(net, find_sites(net, x), rate=0.5, draw=7):
    ...     same = torch.equal(net(x), net(x))
    >>> same
    True
    """
    if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
        raise SiteError(
            f"expected a model that runs in one place; found DataParallel on {len(model.device_ids)} devices, which "
            "runs copies at the same time. Pass its module: inject(model.module, ...)."
        )
    model = bare(model)
    rates = rates_by_site(sites, rate)
    active = [site for site in sites if rates[site.name] > 0]
    injection = Injection(rates, checked_seed(seed), draw)
    with evaluating(model, layers=bool(active)), hooked(model, active, injection.mask):
        handle = model.register_forward_hook(injection._finished)
        try:
            yield injection
        finally:
            handle.remove()


def checked_seed(seed: Any) -> int:
    """The seed as an int, or `ArgumentError`."""
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise ArgumentError(f"expected an integer seed; found {seed!r}.")
    return int(seed)


@contextmanager
def hooked(model: nn.Module, sites: Sequence[Site], source: MaskSource, *, shared: bool = True) -> Iterator[None]:
    """Multiply the input of every site by what `source` gives, while the context lasts.

    With `shared` a mask has the shape of one example and serves all; without, each example has its own.
    Every site must fire in every forward pass.
    """
    modules = named_layers(model)
    missing = missing_sites(model, sites, modules=modules)
    if missing:
        raise SiteError(
            f"expected the model to have the sites' layers; {missing} are not among its modules. "
            "Find the sites again with find_sites(model, inputs)."
        )
    functional = {site.name: site for site in sites if site.weight is not None}
    fired = dict.fromkeys((site.name for site in sites), 0)
    batch: list[int] = []

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        fired.update(dict.fromkeys(fired, 0))
        batch[:] = [row_count((args, kwargs))]

    def end(_: nn.Module, args: Any, output: Any) -> None:
        silent = [name for name, count in fired.items() if count == 0]
        if silent:
            raise SiteError(
                f"expected every site to fire in the forward pass; {silent} did not: the model used these layers' "
                "weights in another way than when the sites were found, or took another branch. Leave them out with "
                "select=, or find the sites again."
            )

    def dropped(site: Site, values: Iterable[Any], channels: tuple[int, ...]) -> dict[int, Any]:
        """By identity: query, key and value are often one tensor and stay one."""
        masked: dict[int, Any] = {}
        for value in values:
            if id(value) not in masked:
                call = 0 if site.kind == "channel" else fired[site.name]
                number = call * 3 + len(masked)
                masked[id(value)] = _masked(site, channels, value, partial(source, site, number), batch, shared)
        fired[site.name] += 1
        return masked

    def before(site: Site, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = layer_inputs(module, args, kwargs)
        masked = dropped(site, inputs.values(), (channel_axis(module),))
        changed = {key: masked[id(value)] for key, value in inputs.items()}
        args = tuple(changed.get(i, value) for i, value in enumerate(args))
        return args, {key: changed.get(key, value) for key, value in kwargs.items()}

    def meet(call: WeightCall) -> dict[Place, Any]:
        if call.name not in functional:
            return {}
        masked = dropped(functional[call.name], call.inputs.values(), call.channels)
        return {place: masked[id(value)] for place, value in call.inputs.items()}

    calls = WeightCalls(model, meet) if functional else None
    handles = []
    try:
        if sites:
            handles.append(model.register_forward_pre_hook(begin, prepend=True, with_kwargs=True))
            handles.append(model.register_forward_hook(end))
        for site in sites:
            if site.weight is None:
                hook = partial(before, site)
                handles.append(modules[site.name].register_forward_pre_hook(hook, with_kwargs=True))
        if calls is not None:
            handles += apart(model, calls)
            handles.append(model.register_forward_pre_hook(lambda *_: calls.begin(), prepend=True))
            handles.append(model.register_forward_hook(lambda *_: calls.end(), always_call=True))
        with calls if calls is not None else nullcontext():
            yield
    finally:
        for handle in handles:
            handle.remove()


def example_axis(site: Site, shape: tuple[int, ...], like: Tensor) -> int | None:
    """The axis of an unshared mask that counts the examples."""
    if site.batch_axis is None:
        return None
    folded = len(shape) > like.dim()
    return site.batch_axis + (folded and site.interleaved)


_Shaped: TypeAlias = Callable[["tuple[int, ...]", Tensor], Any]


def _masked(site: Site, channels: tuple[int, ...], value: Any, mask: _Shaped, batch: list[int], shared: bool) -> Any:
    if isinstance(value, PackedSequence):
        return _masked_packed(site, value, mask, shared)
    axis = site.batch_axis
    shape = list(value.shape)
    if site.kind == "channel":
        kept = [channel % value.dim() for channel in channels]
        shape = [size if i in kept else 1 for i, size in enumerate(shape)]
    if axis is None:
        return value * mask(tuple(shape), value)
    rows = batch[0] if batch else value.shape[axis]
    inner, rest = divmod(value.shape[axis], rows)
    if rest:
        raise SiteError(
            f"expected the input of site {site.name!r} to have a multiple of {rows} entries along axis {axis}, the "
            f"number of examples; found shape {tuple(value.shape)}. Use kind='channel', or leave it out with select=."
        )
    if inner == 1:
        shape[axis] = 1 if shared else rows
        return value * mask(tuple(shape), value)
    # Folded examples: split the axis in two, so that a mask of one example broadcasts over the other part.
    split = (inner, rows) if site.interleaved else (rows, inner)
    examples = axis + 1 if site.interleaved else axis
    full = [*shape[:axis], *split, *shape[axis + 1 :]]
    if shared:
        full[examples] = 1
    if site.kind == "channel":
        full[axis if site.interleaved else axis + 1] = 1
    return (value.unflatten(axis, split) * mask(tuple(full), value)).flatten(axis, axis + 1)


def _masked_packed(site: Site, value: PackedSequence, mask: _Shaped, shared: bool) -> PackedSequence:
    """Mask packed steps as their padded `(example, step, feature)` layout would be."""
    sizes = value.batch_sizes
    steps, features = len(sizes), value.data.shape[-1]
    examples = 1 if shared else int(sizes[0])
    shape = (examples, 1 if site.kind == "channel" else steps, features)
    full = mask(shape, value.data).expand(examples, steps, features)
    step = torch.arange(steps).repeat_interleave(sizes).to(value.data.device)
    place = torch.cat([torch.arange(int(size)) for size in sizes]).to(value.data.device)
    if value.sorted_indices is not None:
        place = value.sorted_indices[place]
    data = value.data * full[torch.zeros_like(place) if shared else place, step]
    return PackedSequence(data, sizes, value.sorted_indices, value.unsorted_indices)

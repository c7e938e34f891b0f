"""Dropout on, dropout off: while a context lasts, whoever opened it sees thinned networks; nobody else does.

Calls of the model are sent to a twin of it (`model.twin`), whose sites are thinned. Which twin is looked up in the
context of the caller, its thread or its task: everybody else gets the model itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import nn

from latedrop.errors import DataError, SiteError
from latedrop.masking.draws import DrawMasks, checked_seed
from latedrop.masking.thinning import Thinning
from latedrop.model.by_model import ByModel
from latedrop.model.rows import row_count
from latedrop.model.sites import Rate, Site, rates_by_site
from latedrop.model.twin import release, reroute, twin_of
from latedrop.model.wrappers import bare, named_layers
from latedrop.torch_inside import eager, own_call, reroute_calls, restore_calls

__all__ = ["Injection", "inject"]


class Injection:
    """What `inject` yields: which thinned network runs next.

    Attributes:
        draw: the draw of the next forward pass. It moves on by one with each pass, unless it was fixed.
    """

    def __init__(self, model: nn.Module, sites: Sequence[Site], rate: Rate, seed: int, draw: int | None) -> None:
        self.rates = rates_by_site(sites, rate)
        self.seed = checked_seed(seed)
        self.draw = draw or 0
        self._fixed = draw is not None
        self._model, self._outer = model, _injected(model)
        self._sites = [site for site in sites if self.rates[site.name] > 0]

    def _twins(self) -> tuple[nn.Module, dict[nn.Module, nn.Module]]:
        """A thinned twin of the model as it is now, and each module's own; of a model that is injected already too."""
        below, own = self._outer._twins() if self._outer is not None else (self._model, None)
        twin = twin_of(below, layers=bool(self._sites) or own is not None)
        now = range(self.draw, self.draw + 1)
        thinning = Thinning(twin, self._sites, DrawMasks(self.seed, self.rates, now, now))
        reroute(twin, partial(self._pass, thinning))
        return twin, dict(zip(named_layers(self._model).values(), named_layers(twin).values(), strict=True))

    def _pass(self, thinning: Thinning, forward: Any, *args: Any, **kwargs: Any) -> Any:
        with thinning.passing_rows(_rows((args, kwargs)), 1, lambda twin: own_call(twin)(*args, **kwargs)):
            output = forward(*args, **kwargs)
        self.draw += not self._fixed
        return output


@contextmanager
def inject(
    model: nn.Module, sites: Sequence[Site], rate: Rate, seed: int = 0, *, draw: int | None = None
) -> Iterator[Injection]:
    """Run `model` as one thinned network per forward pass while the context lasts, for the calling thread or task.

    Args:
        model: it runs in eval mode inside; what it writes into itself in a pass is thrown away. Its layers' hooks see
            their inputs as they are before anything is dropped.
        sites: from `find_sites`.
        rate: probability that a unit is dropped; a float, or a mapping from name patterns to floats.
        seed: with the draw and the site it fixes every mask.
        draw: the one draw to use for every pass; None runs draw 0, 1, 2, ... one per pass.

    >>> from latedrop.model.finding import find_sites
    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
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
    injection = Injection(bare(model), sites, rate, seed, draw)
    injection._twins()  # what is wrong with the sites is said at once
    modules = [module for module in named_layers(model).values() if not isinstance(module, torch.jit.ScriptModule)]
    token = _ACTIVE.set((*_ACTIVE.get(), (frozenset(modules), injection)))
    compiled = any(type(module).__name__ == "OptimizedModule" for module in model.modules())
    try:
        with _sent_on(modules), eager() if compiled else nullcontext():
            yield injection
    finally:
        with suppress(ValueError):  # a generator that somebody else closes
            _ACTIVE.reset(token)


def _rows(given: Any) -> int | None:
    """How many rows a call has; None where that cannot be told, as of packed sequences."""
    try:
        return row_count(given)
    except DataError:
        return None


_ACTIVE: ContextVar[tuple[tuple[frozenset[nn.Module], Injection], ...]] = ContextVar("injections", default=())
_SENT_ON: ByModel[int] = ByModel()
_CHANGING = Lock()


def _injected(module: nn.Module) -> Injection | None:
    """The injection that the caller's context has for a module."""
    return next((injection for modules, injection in reversed(_ACTIVE.get()) if module in modules), None)


def _route(module: nn.Module, own: Any, *args: Any, **kwargs: Any) -> Any:
    injection = _injected(module)
    if injection is None:
        return own(*args, **kwargs)
    twin, by_module = injection._twins()
    try:
        return own_call(by_module[module])(*args, **kwargs)  # past a `__call__` of its class, which runs already
    finally:
        release(twin)


@contextmanager
def _sent_on(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Calls of these modules look for their twins; of several contexts the first begins and the last ends it."""
    sent: list[nn.Module] = []
    try:
        with _CHANGING:
            for module in modules:
                _SENT_ON[module] = _SENT_ON.get(module, 0) + 1
                sent.append(module)
                if _SENT_ON[module] == 1:
                    reroute_calls(module, partial(_route, module))
        yield
    finally:
        with _CHANGING:
            for module in sent:
                _SENT_ON[module] -= 1
                if _SENT_ON[module] == 0:
                    restore_calls(module)

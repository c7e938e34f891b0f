"""Apply dropout to a model inside a `with` block, only for the thread or task that opened it.

Inside the block, calls of the model and of its modules are routed to a private copy with dropout at its sites. The
route is looked up in a context variable, so other threads and tasks still call the model itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from threading import Lock
from typing import Any

import torch
from torch import nn

from latedrop.data.rows import row_count
from latedrop.dropout.masks import DrawMasks, checked_seed
from latedrop.errors import DataError, SiteError
from latedrop.network.network import Network, Pass
from latedrop.network.sites import Rate, Site, rates_by_site
from latedrop.torch_private import plain_call, plain_names, reroute_calls, restore_calls

__all__ = ["Injection", "inject"]


class Injection:
    """Choose the thinned network of the next forward pass; `inject` yields it.

    Attributes:
        draw: number of the draw of the next forward pass. Each pass adds 1, unless a draw was fixed.
    """

    def __init__(self, model: nn.Module, sites: Sequence[Site], rate: Rate, seed: int, draw: int | None) -> None:
        self.rates, self.seed = rates_by_site(sites, rate), checked_seed(seed)
        self.draw = draw or 0
        self.sites = [site for site in sites if self.rates[site.name] > 0]
        self._fixed = draw is not None
        self._network = Network(model, gradients=True)
        self._network.watch(self.sites)  # raises now if the sites do not fit the model
        plain, layers = plain_names(model), self._network.layers
        self.copies = {module: layers[plain(name)] for name, module in model.named_modules() if plain(name) in layers}
        self._root = layers[""]

    def call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run the copy of a module of the model; each pass of the whole model is one draw."""
        copy = self.copies[module]
        whole = copy is self._root
        draw = range(self.draw, self.draw + 1)
        masks = DrawMasks(self.seed, self.rates, draw, draw)
        rows: int | None = None
        with suppress(DataError):  # the number of rows of packed sequences is unknown
            rows = row_count((args, kwargs)) if whole else None
        now = Pass(self.sites, masks, rows)
        with self._network.passing(now):
            output = plain_call(copy)(*args, **kwargs)  # skips the `__call__` of its class, which is running already
        if whole:
            self._network.warn_of_idle(now)
            self.draw += not self._fixed
        return output


@contextmanager
def inject(
    model: nn.Module, sites: Sequence[Site], rate: Rate, seed: int = 0, *, draw: int | None = None
) -> Iterator[Injection]:
    """Run `model` as one thinned network per forward pass while the context lasts, for the calling thread or task.

    If contexts are nested, the innermost one is used.

    Args:
        model: a module. A private copy, made on entry, runs in eval mode. Hooks of its layers see their inputs before
            dropout.
        sites: sites from `find_sites`.
        rate: probability that a unit is dropped: a float, or a mapping from name patterns to floats.
        seed: seed of the masks; seed, draw and site determine a mask.
        draw: number of the draw for every pass; None: 0, 1, 2, ..., one per pass.

    >>> from latedrop import find_sites
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
    injection, rerouted = Injection(model, sites, rate, seed, draw), list[nn.Module]()
    token = _ACTIVE.set((*_ACTIVE.get(), injection))
    try:
        with _CHANGING:
            for module in injection.copies:
                if not isinstance(module, torch.jit.ScriptModule):
                    rerouted.append(module)
                    reroute_calls(module, _route)
        yield injection
    finally:
        with _CHANGING:
            for module in rerouted:
                restore_calls(module)
        with suppress(ValueError):  # the generator is closed in another context
            _ACTIVE.reset(token)


_ACTIVE: ContextVar[tuple[Injection, ...]] = ContextVar("latedrop_injections", default=())
_CHANGING = Lock()


def _route(module: nn.Module, call: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a module, or its copy in the innermost injection of the caller's context."""
    injection = next((injection for injection in reversed(_ACTIVE.get()) if module in injection.copies), None)
    return call(*args, **kwargs) if injection is None else injection.call(module, args, kwargs)

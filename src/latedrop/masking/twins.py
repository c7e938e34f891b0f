"""Twins with rerouted sites, for one pass each; those of small networks are kept, and serve the next prediction too.

A twin is kept where nothing was written into it, and taken again where the model holds the same objects as when the
twin was made (`model.contents`). While a pass runs nobody else can take it: threads have twins of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from latedrop.masking.thinning import IDLE, Thinner, Thinning
from latedrop.model.by_model import ByModel
from latedrop.model.contents import Contents, holds_little
from latedrop.model.running import may_derive, may_write
from latedrop.model.sites import Site
from latedrop.model.twin import release, twin_of
from latedrop.torch_inside import being_traced, is_torchs_own

__all__ = ["Worn", "worn"]

_MOST = 8  # kinds of twins of one model, and twins of one kind


def worn(
    model: nn.Module,
    sites: Sequence[Site],
    thinner: Thinner,
    *,
    shared: bool = True,
    differentiable: bool = False,
    prepare: Callable[[nn.Module], Any] | None = None,
    keep: bool = True,
) -> Worn:
    """A twin of `model` for one pass, as a context; inside, call its `twin` in its `thinning.passing`.

    `shared` is as for `Thinning`, `differentiable` as for `twin_of`. `prepare` is done to a new twin before its sites
    are rerouted. Without `keep` it is a new one, and nobody's afterwards.
    """
    key = (shared, differentiable, *map(id, sites))
    keep = keep and not being_traced()
    if keep:
        found = _taken(model, key)
        if found is not None:
            found.thinning.thinner = thinner
            return found
    unknown = may_derive(model)
    keep = keep and not unknown and not may_write(model)
    known = Contents(model) if keep and holds_little(model) else None  # before the copy is made
    twin = twin_of(model, differentiable=differentiable, own_gradients=unknown and not differentiable)
    if prepare is not None:
        prepare(twin)
    found = Worn(twin, Thinning(twin, sites, thinner, shared=shared), tuple(sites))
    if known is not None and all(site.weight is None for site in sites):
        kinds = _KEPT.setdefault(model, {})
        while len(kinds) >= _MOST and key not in kinds:
            kinds.pop(next(iter(kinds)), None)
        found.keep(kinds.setdefault(key, []), known, model)
    return found


class Worn:
    """A twin with its rerouted sites. Leaving the context keeps it for later, or lets go of it.

    Attributes:
        twin: to be called.
        thinning: its sites.
        sites: the same; a key is made of where these lie in memory, so they are held.
    """

    def __init__(self, twin: nn.Module, thinning: Thinning, sites: tuple[Site, ...]) -> None:
        self.twin, self.thinning, self.sites = twin, thinning, sites
        self._pool: list[Worn] | None = None
        self._model: Contents | None = None
        self._own: Contents | None = None
        self._aliases: list[tuple[nn.Parameter, nn.Parameter]] = []

    def keep(self, pool: list[Worn], contents: Contents, model: nn.Module) -> None:
        """Come back to `pool` after the pass; of use as long as the model has these contents."""
        self._pool, self._model = pool, contents
        both = zip(self.twin.parameters(), model.parameters(), strict=True)
        self._aliases = [(alias, weight) for alias, weight in both if alias is not weight]
        if not all(map(is_torchs_own, model.modules())):
            self._own = Contents(self.twin)  # the user's own code may write into it

    def fits(self, model: nn.Module) -> bool:
        """Whether the model is as it was when the twin was made; what its weights say may have changed."""
        if self._model is None or not self._model.of(model):
            return False
        return all(alias.dtype is weight.dtype and alias.is_set_to(weight) for alias, weight in self._aliases)

    def __enter__(self) -> Worn:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        whole = kind is None and self._pool is not None and (self._own is None or self._own.of(self.twin))
        if whole and self._pool is not None and len(self._pool) < _MOST:
            self.thinning.thinner = IDLE
            self._pool.append(self)
        else:
            release(self.twin)


_KEPT: ByModel[dict[Any, list[Worn]]] = ByModel()


def _taken(model: nn.Module, key: Any) -> Worn | None:
    """A twin that was kept, and still fits; those that do not are let go."""
    pool = _KEPT.get(model, {}).get(key, [])
    while pool:
        try:
            found = pool.pop()
        except IndexError:  # another thread was quicker
            return None
        if found.fits(model):
            return found
        release(found.twin)
    return None

"""Sites that have no gradients, though the output depends on them: first order counts nothing there, and says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn

from latedrop.errors import LatedropWarning
from latedrop.masking.twins import worn
from latedrop.model.by_model import ByModel
from latedrop.model.calling import Readout, call, read
from latedrop.model.rows import copied, row_count
from latedrop.model.running import rolls_dice
from latedrop.model.sites import Site

__all__ = ["warn_of_silent"]

_LOOKS = 4  # at batches, of a site on which the output was not seen to depend
_LOOKED: ByModel[Counter[str]] = ByModel()


def warn_of_silent(model: nn.Module, silent: Sequence[Site], x: Any, readout: Readout) -> None:
    """Run the model without what a site gets, for the first batches; others are what a readout leaves out.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    >>> warn_of_silent(net, [], torch.ones(1, 2), None)
    """
    looked = _LOOKED.setdefault(model, Counter())
    asked = [site for site in silent if looked[site.name] < _LOOKS]
    if not asked or rolls_dice(model):
        return
    looked.update(site.name for site in asked)

    def output(without: str | None) -> Tensor:
        with torch.no_grad(), worn(model, asked, _Without(without), shared=False) as found, found.thinning.passing(x):
            return read(call(found.twin, copied(x)), readout, row_count(x))

    try:
        whole = output(None).clone()  # a model may write every output to one place
    except Exception:  # it does not run twice on its inputs
        return
    moved = []
    for site in asked:
        try:
            same = torch.allclose(output(site.name), whole, 1e-3, 1e-6, equal_nan=True)
        except Exception:  # the model may look at what it computes
            continue
        if not same:
            moved.append(site.name)
            looked[site.name] = _LOOKS
    if moved:
        warn(
            f"the output depends on the sites {moved} in a way that has no gradient, as behind detach() or argmax: "
            "first order counts nothing there, and its variance is too small. Use method='sample', or leave these out "
            "with select=.",
            LatedropWarning,
            stacklevel=2,
        )


class _Without:
    """One site gets nothing: a `Thinner`."""

    def __init__(self, name: str | None) -> None:
        self._name = name

    def thin(self, site: Site, call: int, value: Tensor, shape: tuple[int, ...], axis: int | None) -> Tensor:
        """See `Thinner`."""
        return value * 0.0 if site.name == self._name else value

    def thin_packed(self, site: Site, call: int, value: Tensor, *_: Any) -> Tensor:
        """See `Thinner`."""
        return value * 0.0 if site.name == self._name else value

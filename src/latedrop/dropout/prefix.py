"""Run what comes before the first site once: on N rows instead of T times N.

Draws are rows: a batch holds T copies of N rows. As long as no site has touched them all copies are the same, so a pass
starts with N rows, and each site makes T copies of an input that has none yet. A mode follows all torch functions:
where one takes rows with copies and rows without, as a skip connection does, the latter are copied. What functions
before the sites gave is remembered for later chunks of draws and for other rates, as far as memory allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from latedrop.data.arrays import map_values
from latedrop.data.rows import copied, operands, repeated, row_count, tensors
from latedrop.dropout.moments import Sampling
from latedrop.network.network import Network, Pass, read
from latedrop.network.sites import Site
from latedrop.torch_private import unseen_by_modes, version_of

__all__ = ["REMEMBERED", "Copying", "Prefix", "drawn_output", "worth_it"]

_FEW = 2**13  # numbers in the inputs of all draws below which it takes longer to keep track than to compute
_FEW_FOR_EACH_SITE = 5 * 2**18  # on devices that compute while Python follows the functions between two sites
REMEMBERED = {"cpu": 2**29, "cuda": 2**31}  # bytes of what functions gave
_MARK = "latedrop_rows"


def worth_it(x: Any, draws: int, passes: int, sites: int) -> bool:
    """Return True if what comes before the first of so many sites takes longer than to follow all functions."""
    values = tensors(x)
    numbers = draws * sum(value.numel() for value in values)
    if values[0].is_cpu:
        return passes > 1 or numbers > _FEW
    return numbers > _FEW_FOR_EACH_SITE * sites


@dataclass
class Prefix:
    """Results of the functions before the sites, for one batch.

    `results` are in the order of the calls; empty before the first pass, or where there is no room for all.
    """

    rows: int
    room: int = 0  # bytes that results for another pass may take
    mark: object = field(default_factory=object)  # of tensors with these rows
    results: list[Any] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # how often each of their tensors had been written into


class Copying(Pass):
    """A pass over the N rows of `x` in which the sites make the copies, one for each draw."""

    mode: _Following

    def __init__(
        self, prefix: Prefix, x: Any, sites: Sequence[Site], thinner: Any, copies: int, *, shared: bool = True
    ) -> None:
        super().__init__(sites, thinner, prefix.rows * copies, copies, shared=shared)
        self._uncopied = Pass(sites, _Spread(thinner, copies), prefix.rows, shared=shared)
        self.mode = _Following(prefix, copies)
        _mark((value for value in tensors(x) if value.shape[:1] == (prefix.rows,)), prefix.mark)

    def remember(self) -> None:
        """Remember what was computed before the sites for another pass; raise where a draw has written into it."""
        prefix, results = self.mode.prefix, self.mode.results
        versions = [version_of(tensor) for tensor in tensors(results)]
        if prefix.results and versions != prefix.versions:
            raise ValueError("a draw writes into what comes before the first site")
        prefix.results, prefix.versions = results, versions

    def run(self, name: str, layer: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer; attention unseen by the mode, as torch takes its fast kernels only then."""
        attention = isinstance(layer, nn.MultiheadAttention)
        return super().run(name, layer, partial(self._unseen, forward) if attention else forward, args, kwargs)

    def _unseen(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function of rows that all have copies, which then need not be followed inside."""
        if any(vars(value).get(_MARK) is not self.mode.mark for value in operands(args, kwargs)):
            return forward(*args, **kwargs)
        with unseen_by_modes():
            result = forward(*args, **kwargs)
        _mark(tensors(result), self.mode.mark)
        return result

    def _thin(self, site: Site, number: int, value: Tensor, channels: tuple[int, ...]) -> Tensor:
        """Thin an input, after copying rows that have no copies yet; see `Pass`."""
        self.mode.inside = True
        try:
            thin = super()._thin if vars(value).get(_MARK) is self.mode.mark else self._uncopied._thin
            return _mark([thin(site, number, value, channels)], self.mode.mark)[0]
        finally:
            self.mode.inside = False


def drawn_output(
    network: Network, x: Any, sites: Sequence[Site], thinner: Any, copies: int, options: Sampling, prefix: Prefix | None
) -> tuple[Tensor, Pass]:
    """Return the output of one pass over `copies` of the rows of `x`, one for each draw, and the pass."""
    rows = row_count(x) * copies
    batch = copied(x) if prefix is not None else repeated(x, copies)
    if prefix is None:
        now = Pass(sites, thinner, rows, copies, shared=options.shared)
    else:
        now = Copying(prefix, batch, sites, thinner, copies, shared=options.shared)
    return read(network.output(batch, now), options.readout, rows).detach(), now


class _Spread(NamedTuple):
    """Thins rows that are the same for all draws: a `Thinner`."""

    thinner: Any
    copies: int

    def thin(self, site: Site, call: int, value: Tensor, shape: tuple[int, ...], axis: int | None) -> Tensor:
        if axis is None:
            raise ValueError("these entries are of no rows")
        several = value.unsqueeze(axis).expand(*value.shape[:axis], self.copies, *value.shape[axis:])
        thinned: Tensor = self.thinner.thin_split(site, call, several, shape, axis)
        return thinned.flatten(axis, axis + 1)


class _Following(TorchFunctionMode):
    """Copies rows without copies where they meet others, and returns what another pass has computed before the sites.

    `mark` is for tensors with all copies; `results` are of functions in this pass that no draw had touched, where there
    is room for all of them. What a site calls while it is thinned, `inside`, is not followed.
    """

    def __init__(self, prefix: Prefix, copies: int) -> None:
        super().__init__()
        self.prefix, self.results, self.inside, self.mark = prefix, list[Any](), False, object()
        self._copies, self._remembered, self._room = copies, iter(prefix.results), prefix.room

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Store results before the first site, or return stored ones; see `TorchFunctionMode`."""
        kwargs = kwargs or {}
        if self.inside:
            return func(*args, **kwargs)
        marks = {vars(value).get(_MARK) for value in operands(args, kwargs)}
        drawn, rows = self.mark in marks, self.prefix.mark in marks
        if drawn and rows:
            args, kwargs = map_values((args, kwargs), self._copied)
        if drawn:
            result = func(*args, **kwargs)
        else:
            result = next(self._remembered, self)
            result = func(*args, **kwargs) if result is self else result
            self._room -= sum(value.nbytes for value in operands((result,), {}))
            if self._room < 0:  # all or nothing: what is written in place must not be written twice
                self.results.clear()
            else:
                self.results.append(result)
        if drawn or rows:
            written = args[:1] if func is Tensor.__setitem__ else ()
            _mark(operands((result, *written), {}), self.mark if drawn else self.prefix.mark)
        return result

    def _copied(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or vars(value).get(_MARK) is not self.prefix.mark:
            return value
        return torch.cat([value] * self._copies, value.shape.index(self.prefix.rows))


def _mark(values: Iterable[Tensor], mark: Any) -> list[Tensor]:
    values = list(values)
    for value in values:
        if not isinstance(value, nn.Parameter):  # which a function such as `w.type_as(x)` may return as it is
            vars(value)[_MARK] = mark
    return values

"""Draws are rows: T thinned networks on N examples are one pass of the model over `T · N` examples.

In eval mode the examples of a batch do not affect each other, so the inputs are repeated T times, the model runs as it
is, and each site multiplies its input, seen as `(T, N, ...)`, by the masks `(T, 1, ...)` of its draws. Where rows do
affect each other, or a site's input has no rows, draws run one by one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn

from latedrop.errors import ArgumentError, LatedropWarning
from latedrop.masking.draws import DrawMasks, split
from latedrop.masking.twins import worn
from latedrop.model.arrays import widened
from latedrop.model.by_model import ByModel
from latedrop.model.calling import call, read
from latedrop.model.items import Items
from latedrop.model.rows import repeated, row_limits, some_rows, take_rows
from latedrop.model.running import derives, quietly, rolls_dice
from latedrop.model.sites import Site
from latedrop.torch_inside import being_traced, weights_of
from latedrop.variance.engine.chunks import fitting_chunk
from latedrop.variance.engine.options import Sampling
from latedrop.variance.engine.shared import SharedLayers, by_draw, worth_sharing
from latedrop.variance.moments import Moments, Stream, moments_of, out_of_memory

__all__ = ["ThinnedNetworks"]

_log = logging.getLogger(__name__)
_SOME = 8
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3}
"""How much a row may change with the rows beside it, of the largest output; more in half precision."""
_UNSHARED: ByModel[bool] = ByModel()
"""Models in which somebody reads past what stands for the rows of all draws."""
_APART: ByModel[set[Any]] = ByModel()
"""Models whose draws were seen to come out alike as rows and one by one, with the sites and kinds of inputs."""


class ThinnedNetworks:
    """Thinned networks of one model on one batch, run chunk by chunk.

    Args:
        model: the user's; a twin of it runs.
        x: the batch, placed.
        sites: those with a mask at some rate.
        options: see `Sampling`.
        passes: how often moments will be asked for.
    """

    def __init__(self, model: nn.Module, x: Any, sites: Sequence[Site], options: Sampling, passes: int = 1) -> None:
        self.model, self.x, self.options = model, x, options
        self._sites = sites
        self._count = some_rows(x)
        functional = any(site.weight is not None for site in sites)
        draws = options.draws
        whole = being_traced()  # a graph has all draws as rows
        chunk = draws if whole else options.chunk
        self._chunk = min(draws, chunk) if chunk else fitting_chunk(model, x, sites, draws)
        # A weight without a module is known by what is computed from parameters in the same pass: nothing is shared.
        alone = functional or isinstance(x, Items)
        sharing = not alone and (whole or worth_sharing(x, draws, passes * (draws // self._chunk)))
        self._masks = _RowMasks(options.seed, {}, range(0), range(draws))
        self._why = ""
        self._as_rows = options.engine != "loop" and self._may_be_rows()
        self._layers = SharedLayers(model) if sharing and self._as_rows and model not in _UNSHARED else None
        if _log.isEnabledFor(logging.DEBUG):
            way = f"{self._chunk} at once" if self._as_rows else "one by one"
            once = ", first layers once" if self._layers else ""
            _log.debug("%d draws of %d rows, %s%s", draws, self._count, way, once)

    def moments(self, rates: Mapping[str, float]) -> Moments:
        """Mean and variance over all draws, at a rate for each site."""
        self._masks.rates = rates
        stream, kept, draws = Stream(), [], self.options.draws
        for outputs in self.chunks():
            outputs = widened(outputs)
            if len(outputs) == draws:
                return Moments(*moments_of(outputs), draws, outputs.clone() if self.options.keep else None)
            stream.add(outputs)
            if self.options.keep:
                kept.append(outputs.clone())  # a model may write every output to one place
        return Moments(*stream.moments(), draws, torch.cat(kept) if kept else None)

    def close(self) -> None:
        """Let go of all that the draws shared."""
        if self._layers is not None:
            self._layers.forget()

    def chunks(self) -> Iterator[Tensor]:
        """Yield outputs `(t, N, ...)` until all draws are done."""
        done, draws = 0, self.options.draws
        while done < draws:
            size = self._chunk if self._as_rows else 1
            try:
                outputs = self._outputs(range(done, min(done + size, draws)))
                alike = not self._as_rows or self._alike(outputs)
            except Exception as error:
                if out_of_memory(error) and size > 1:
                    self._chunk = size // 2
                    _log.info("out of memory with %d draws at once; going on with %d", size, self._chunk)
                    torch.cuda.empty_cache()
                elif out_of_memory(error):
                    raise
                elif self._layers is not None:
                    self._layers = None
                    _log.debug("the first layers run with every draw, as sharing them raised %s", _first_line(error))
                elif self._as_rows and self.options.engine == "auto" and not being_traced():
                    self._as_rows, self._why = False, f"with the rows of several draws it raised {_first_line(error)}"
                else:
                    raise
                continue
            if not alike and self._layers is not None:  # somebody reads past what stands for rows
                self._layers = None
                _UNSHARED[self.model] = True
                continue
            if not alike:
                self._as_rows, self._why = False, "a row of its output changes with the rows beside it"
                continue
            if self._why:
                self._warn_of_loop()
            yield outputs
            done += len(outputs)

    def _warn_of_loop(self) -> None:
        warn(
            f"the draws of this model run one by one, {self.options.draws} passes instead of a few: {self._why}. "
            "engine='loop' does the same without trying.",
            LatedropWarning,
            stacklevel=2,
        )
        self._why = ""

    def _may_be_rows(self) -> bool:
        together = [site.name for site in self._sites if site.batch_axis is None or site.moved or site.coupled]
        if together and self.options.engine == "rows":
            raise ArgumentError(
                f"expected rows that do not affect each other with engine='rows'; at the sites {together} they do. "
                "Use engine='auto', which runs the draws of such a model one by one."
            )
        if together:
            return False
        _, most = row_limits(self.model)
        if most is not None:
            self._chunk = min(self._chunk, most // max(self._count, 1))
        return self._chunk > 0 and (most is None or self._chunk > 1)

    def _outputs(self, draws: range) -> Tensor:
        """`(t, N, ...)` of some draws."""
        count, times = self._count, len(draws)
        return split(self._pass(self.x, draws, count, self._layers), 0, times)

    def _pass(self, x: Any, draws: range, count: int, layers: SharedLayers | None) -> Tensor:
        """One pass over the `count` examples of `x` for each draw."""
        self._masks.draws = draws
        return quietly(self.model, lambda: self._run(x, draws, count, layers))

    def _run(self, x: Any, draws: range, count: int, layers: SharedLayers | None) -> Tensor:
        """The twin is this pass's own, and so is what the model writes into it."""
        model, times = self.model, len(draws)
        layers = None if layers is None or derives(model) else layers
        x = repeated(x, times) if layers is None else layers.inputs(x, times)
        attach, alone = (None, True) if layers is None else (layers.attach, False)
        twin = worn(model, self._sites, self._masks, shared=self.options.shared, prepare=attach, keep=alone)
        with twin as found, found.thinning.passing(x, times):
            output = read(call(found.twin, x), self.options.readout, count * times)
            return output.detach() if output.requires_grad else output

    def _alike(self, outputs: Tensor) -> bool:
        """Whether the last draw, run alone, is what it was among others; asked once of a model and a kind of batch.

        Where examples have masks of their own all rows run again, else some from all of the batch.
        """
        if being_traced() or (self.options.engine == "rows" and self._layers is None):
            return True
        known = _APART.setdefault(self.model, set())
        names, sharing = tuple(site.name for site in self._sites), self._layers is not None
        held = len(weights_of(self.model))  # a layer that loses its running statistics lets rows meet
        key = names, outputs.shape, _code(self.options.readout), sharing, self.options.shared, held
        if key not in known:
            rows = self._some_rows() if self.options.shared else [*range(self._count)]
            x = take_rows(self.x, rows) if len(rows) < self._count else self.x
            alone = widened(self._pass(x, self._masks.draws[-1:], len(rows), None))
            beside = widened(outputs[:, rows])
            if alone.numel() and not rolls_dice(self.model):
                if not bool(alone.isfinite().all()):
                    return True
                spread = beside.std(0).max() if len(beside) > 1 else 0.0
                off, most = (alone - beside[-1]).abs().max(), alone.abs().max()
                if not bool(off <= 0.05 * spread + self._rounding(outputs) * most):
                    return False
            known.add(key)
        return True

    def _some_rows(self) -> list[int]:
        """A few from the first to the last."""
        return sorted({i * (self._count - 1) // (_SOME - 1) for i in range(_SOME)})

    @staticmethod
    def _rounding(outputs: Tensor) -> float:
        return _ROUNDING.get(outputs.dtype, 0.05)


class _RowMasks(DrawMasks):
    """Masks that take values which all draws share as they are."""

    def by_draw(self, value: Tensor, axis: int | None) -> Tensor:
        """See `DrawMasks`."""
        return super().by_draw(value, axis) if axis is None else by_draw(value, axis, len(self.draws))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _code(readout: Any) -> Any:
    """What tells readouts apart, without holding what they hold."""
    return getattr(getattr(readout, "__func__", readout), "__code__", type(readout) if callable(readout) else readout)

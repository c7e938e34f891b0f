"""Thinned networks as one compiled program: for predictions that are made again and again on inputs of one shape.

A chunk of draws is traced once into a graph of plain operators, with the draws' keys as inputs. What does not depend on
the keys is cut off and runs once per prediction; the rest is compiled (`torch.compile`), so that a mask is hashed,
compared and multiplied inside the kernel that makes the layer's input, and never written to memory. On a CUDA device
the whole prediction, all chunks and their moments, is then captured as a CUDA graph: one launch replays it. Rates are
inputs too, so that one program serves a whole calibration.

A program is what the model did when it was traced; what it takes for granted, and when it is made anew, is in
`snapshots`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from latedrop.masking.masks import draw_keys, keys_on, threshold
from latedrop.model.sites import Site
from latedrop.torch_inside import leaves_and_structure
from latedrop.variance.engine.kept import kept
from latedrop.variance.engine.options import Sampling
from latedrop.variance.engine.replay import Compiled, Compiler, Replay
from latedrop.variance.engine.snapshots import Looks, looked_at
from latedrop.variance.engine.tracing import MaskPlace, fill_up_channels, mask_places, split, traced_chunk
from latedrop.variance.moments import merged

__all__ = ["Program", "program"]

_FEW = 8  # draws


def program(model: nn.Module, x: Any, sites: Sequence[Site], options: Sampling, fitting: Callable[[], int]) -> Program:
    """The program of a model for inputs like `x`; compiled on the first call, and kept as long as the model is.

    `fitting` gives the draws that run at once where the options do not.
    """

    def made() -> Program:
        return Program(model, x, sites, options, options.chunk or fitting())

    key = (tuple(sites), replace(options, readout=None), looked_at(options.readout))
    return kept(model, x, key, made)


class Program:
    """All draws of one model on inputs of one shape.

    Args:
        model: in any mode; it is left as it was.
        x: an example of the inputs, placed.
        sites: those with a mask.
        options: see `Sampling`.
        chunk: draws that run at once.
        compiler: from a graph to something that runs it; None: torch's.
    """

    def __init__(
        self,
        model: nn.Module,
        x: Any,
        sites: Sequence[Site],
        options: Sampling,
        chunk: int,
        compiler: Compiler | None = None,
    ) -> None:
        together = any(site.batch_axis is None or site.moved or site.coupled for site in sites)
        self.draws, self.chunk = options.draws, 1 if together else min(chunk, options.draws)
        inputs = _tensors(x)
        self._device = inputs[0].device
        self._names = [site.name for site in sites]
        self.checked = False  # whether it was seen to say what draws say
        self._wanted: list[float] = []
        places = mask_places(model, x, sites, options)
        self._chunks = self._keys(places, options.seed)
        self._used = len(self._chunks)
        self._limits = torch.zeros(len(sites), dtype=torch.int32, device=self._device)
        self._scales = torch.ones(len(sites), dtype=torch.float64, device=self._device)
        self._looks = Looks()
        with self._looks:
            graph = traced_chunk(model, x, sites, options, places, self._arguments())
        self._looks.add_unread(model, graph)
        if self._device.type == "cuda":
            fill_up_channels(graph)
        compiler = Compiled if compiler is None else compiler
        self._before, self._after = map(compiler, split(graph, len(inputs)))
        self._replay = Replay(self._run, inputs)

    def __call__(self, x: Any, rates: Mapping[str, float], draws: int | None = None) -> tuple[Tensor, Tensor, bool]:
        """Mean and variance of placed inputs, at a rate for each site, and whether all inputs and means are finite.

        Of the first `draws` alone, which `few` has given; of all by default.
        """

        def prepare() -> None:
            self._set_rates([rates[name] for name in self._names])
            self._used = -(-(draws or self.draws) // self.chunk)

        (moments,), finite = self._replay(_tensors(x), prepare)
        return moments[0], moments[1], finite

    def few(self) -> int:
        """Draws that are enough to compare a program with the steps; all where one CUDA graph has them all."""
        return self.draws if self._device.type == "cuda" else min(self.draws, -(-_FEW // self.chunk) * self.chunk)

    def holds(self) -> bool:
        """See `Kept`."""
        return self._looks.still_hold()

    def _set_rates(self, wanted: list[float]) -> None:
        if wanted != self._wanted:
            limits = np.array([threshold(rate) - 2**31 for rate in wanted], np.int32)
            self._limits.copy_(torch.from_numpy(limits))
            self._scales.copy_(torch.tensor([1 / (1 - rate) for rate in wanted], dtype=torch.float64))
            self._wanted = wanted

    def _run(self, inputs: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor]:
        """Mean and variance, one tensor `(2, N, ...)`, and a number that is finite where all inputs and means are."""
        ready = self._before(*inputs)
        (keys, weights, done), *others = self._chunks[: self._used]
        origin, mean, squares = self._after(*ready, weights, self._limits, self._scales, *keys)
        for keys, weights, count in others:
            first, part, spread = self._after(*ready, weights, self._limits, self._scales, *keys)
            mean, squares, done = merged((mean, squares, done), (part + (first - origin), spread, count))
        moments = mean.new_empty((2, *mean.shape))
        torch.add(origin, mean, out=moments[0])
        torch.div(squares, done - 1, out=moments[1])
        # A sum is NaN or inf where one of its terms is; in float64 no sum of finite numbers of less precision is.
        total = moments[0].sum(dtype=torch.float64)
        for value in inputs:
            total = total + value.sum(dtype=torch.float64) if value.is_floating_point() else total
        return (moments,), total

    def _arguments(self) -> list[Tensor]:
        keys, weights, _ = self._chunks[0]
        return [weights, self._limits, self._scales, *keys]

    def _keys(self, places: Sequence[MaskPlace], seed: int) -> list[tuple[list[Tensor], Tensor, int]]:
        """For each chunk the keys `(chunk, 2)` of every mask, which of its draws count, and how many do."""
        chunks = -(-self.draws // self.chunk)
        found = []
        for start in range(0, chunks * self.chunk, self.chunk):
            span = range(start, start + self.chunk)
            keys = [keys_on(draw_keys(seed, span, site, call), self._device) for site, call, _ in places]
            count = min(self.chunk, self.draws - start)
            weights = (torch.arange(self.chunk) < count).float()
            found.append((keys, weights.to(self._device), count))
        return found


def _tensors(x: Any) -> list[Tensor]:
    return [value for value in leaves_and_structure(x)[0] if isinstance(value, Tensor)]

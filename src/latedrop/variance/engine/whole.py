"""A whole prediction as one compiled program: passes forward and backward, features, and all that is made of them.

What Python does between the operators, which is most of the time of a small batch, was done when it was traced. Checks
of values are a part of the program (`model.doubts`): where one fails, the caller does without the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from latedrop.model.doubts import noting_doubts
from latedrop.model.sites import Site
from latedrop.torch_inside import leaves_and_structure
from latedrop.variance.engine.options import Sampling
from latedrop.variance.engine.replay import Compiled, Compiler, Replay
from latedrop.variance.engine.snapshots import Looks
from latedrop.variance.engine.tracing import apart_from_others, mask_places, settled, written_down

__all__ = ["Whole"]


class Whole:
    """What a function makes of inputs of one shape.

    Args:
        model: which the function runs; it is left as it was.
        x: an example of the inputs, placed.
        sites: of the model.
        readout: what of its output is taken.
        function: from inputs like `x` to tensors; it is not held.
        still: whether what else the function looks at is as it was.
        compiler: from a graph to something that runs it; None: torch's.
    """

    def __init__(
        self,
        model: nn.Module,
        x: Any,
        sites: Sequence[Site],
        readout: Any,
        function: Callable[[Any], Sequence[Tensor]],
        still: Callable[[], bool] = lambda: True,
        compiler: Compiler | None = None,
    ) -> None:
        mask_places(model, x, sites, Sampling(readout=readout))  # refuses what no program can do
        flat, structure = leaves_and_structure(x)
        where = [i for i, value in enumerate(flat) if isinstance(value, Tensor)]

        def run(*inputs: Tensor) -> list[Tensor]:
            leaves = list(flat)
            for i, value in zip(where, inputs, strict=True):
                leaves[i] = value
            with noting_doubts() as doubts:
                found = [value.detach() for value in function(structure.unflatten(leaves))]
            none = torch.zeros((), dtype=torch.bool, device=inputs[0].device)
            wrong = torch.stack([none, *(flag.to(none.device) for flag in doubts)]).any()
            return [*found, torch.where(wrong, torch.nan, 0.0).double()]

        self._looks, self._still = Looks(), still
        inputs = [apart_from_others(flat[i]) for i in where]
        with self._looks:
            graph = written_down(model, run, inputs)
        self._looks.add_unread(model, graph)
        settled(graph, inputs[0].device, model)
        compiled = (Compiled if compiler is None else compiler)(graph)

        def split(values: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor]:
            *found, total = compiled(*values)
            return found, total

        self._replay = Replay(split, inputs)

    def __call__(self, x: Any) -> list[Tensor] | None:
        """What the function gives; None where a check of values failed."""
        found, well = self._replay([value for value in leaves_and_structure(x)[0] if isinstance(value, Tensor)])
        return found if well else None

    def holds(self) -> bool:
        """See `Kept`."""
        return self._still() and self._looks.still_hold()

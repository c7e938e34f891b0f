"""One quiet pass: without gradients, and with the global random numbers as they were.

Torch's global generators belong to all threads. They are only put back after a model that rolls dice of its own, which
the first pass of a model tells: for all others nothing is touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from latedrop.torch_inside import Operator, watching

__all__ = ["generators", "rolls_dice", "running"]

_ROLLS: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


@contextmanager
def running(model: nn.Module, *, gradients: bool = False) -> Iterator[None]:
    """Run a twin of `model` inside."""
    rolls = _ROLLS.get(model)
    if rolls is False:
        with torch.set_grad_enabled(gradients):
            yield
        return
    parameter = next(model.parameters(), None)
    rolled = generators(torch.device("cpu") if parameter is None else parameter.device)
    before = [generator.get_state() for generator in rolled]
    dice = _Dice()
    try:
        with torch.set_grad_enabled(gradients), watching(dice.seen) if rolls is None else nullcontext():
            yield
        _ROLLS.setdefault(model, dice.rolled)
    finally:
        if rolls or dice.rolled:
            for generator, state in zip(rolled, before, strict=True):
                generator.set_state(state)


def rolls_dice(model: nn.Module) -> bool:
    """Whether a model drew random numbers of its own in its first pass."""
    return _ROLLS.get(model, False)


def generators(device: torch.device) -> list[torch.Generator]:
    """The global ones that a model on that device may draw from."""
    if device.type != "cuda":
        return [torch.default_generator]
    torch.cuda.init()
    own = device.index if device.index is not None else torch.cuda.current_device()
    return [torch.default_generator, torch.cuda.default_generators[own]]


class _Dice:
    """Whether this thread has drawn random numbers."""

    rolled = False

    def seen(self, operator: Operator | None, args: Any, kwargs: Any, result: Any) -> None:
        if operator is None or not operator.seeded or self.rolled:
            return
        given = {**(operator.defaults or {}), **dict(zip(operator.arguments, args, strict=False)), **kwargs}
        own = given.get("generator") is not None
        off = given.get("train") is False or given.get("dropout_p", given.get("dropout", 1)) == 0
        self.rolled = not own and not off  # attention and recurrent layers only draw where they drop

"""One quiet pass: without gradients, and with the global random numbers as they were.

A model that differentiates inside its own `forward` (forces, physics-informed networks) gets the gradients it needs.
Torch's global generators belong to all threads. They are only put back after a model that rolls dice of its own, which
the first pass of a model tells: for all others nothing is touched. So it is with what a model's code writes into the
buffers of torch's layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from latedrop.model.by_model import ByModel
from latedrop.torch_inside import Operator, watching

__all__ = [
    "DIFFERENTIATE",
    "Deriving",
    "derives",
    "differentiating",
    "forget",
    "generators",
    "may_derive",
    "may_write",
    "note_copy",
    "quietly",
    "rolls_dice",
    "running",
]

_Result = TypeVar("_Result")
_ROLLS: ByModel[bool] = ByModel()
_WRITES: ByModel[bool] = ByModel()
"""Whether models wrote into what their layers hold, in their first pass."""
_DERIVES: ByModel[bool] = ByModel()
"""Models that were seen to differentiate inside their `forward`."""
DIFFERENTIATE = (torch.autograd.grad, Tensor.backward, torch.autograd.backward)
"""Functions of torch by which a model differentiates inside its `forward`."""
_COPIES: ContextVar[list[tuple[Tensor, Tensor]] | None] = ContextVar("_COPIES", default=None)
_OURS: ContextVar[bool] = ContextVar("_OURS", default=False)
_NO_GRADIENT = ("does not require grad and does not have a grad_fn", "differentiated Tensors does not require grad")


def quietly(model: nn.Module, run: Callable[[], _Result]) -> _Result:
    """What `run` gives, which makes a twin of `model` and runs it; again with gradients, where the model needs them."""
    known = model in _DERIVES
    try:
        with running(model):
            return run()
    except RuntimeError as error:
        if known or not any(words in str(error) for words in _NO_GRADIENT):
            raise
        _DERIVES[model] = True
        try:
            with running(model):
                return run()
        except RuntimeError:
            _DERIVES.pop(model)
            raise


def running(model: nn.Module, *, gradients: bool = False) -> AbstractContextManager[Any]:
    """Run a twin of `model` inside."""
    derived, rolls = model in _DERIVES, _ROLLS.get(model)
    if rolls is False and not derived:
        return torch.set_grad_enabled(gradients)
    return _running(model, gradients or derived, rolls, derived and torch.is_inference_mode_enabled())


@contextmanager
def _running(model: nn.Module, gradients: bool, rolls: bool | None, inference: bool) -> Iterator[None]:
    if inference:
        with torch.inference_mode(False), _running(model, gradients, rolls, False):
            yield
        return
    if rolls is False:
        with torch.set_grad_enabled(gradients):
            yield
        return
    parameter = next(model.parameters(), None)
    rolled = generators(torch.device("cpu") if parameter is None else parameter.device)
    before = [generator.get_state() for generator in rolled]
    dice, copies = _Dice(), _COPIES.set([] if rolls is None else None)
    try:
        with torch.set_grad_enabled(gradients), _watched(model, dice) if rolls is None else nullcontext():
            yield
        if rolls is None:
            _WRITES[model] = not all(_alike(*pair) for pair in _COPIES.get() or ())
        _ROLLS.setdefault(model, dice.rolled)
    finally:
        _COPIES.reset(copies)
        if rolls or dice.rolled:
            for generator, state in zip(rolled, before, strict=True):
                generator.set_state(state)


def derives(model: nn.Module) -> bool:
    """Whether a model was seen to differentiate inside its `forward`."""
    return model in _DERIVES


def may_derive(model: nn.Module) -> bool:
    """The same, or that its first pass has still to tell."""
    return model in _DERIVES or model not in _ROLLS


def forget(model: nn.Module) -> None:
    """Let the next pass tell again what a model does."""
    _ROLLS.pop(model)
    _WRITES.pop(model)


def may_write(model: nn.Module) -> bool:
    """Whether a model writes into what its layers hold, or its first pass has still to tell."""
    return _WRITES.get(model, True)


def note_copy(value: Tensor, copy: Tensor) -> None:
    """A copy of what a layer holds: what is another after a first pass was written."""
    copies = _COPIES.get()
    if copies is not None:
        copies.append((value, copy))


def _alike(value: Tensor, copy: Tensor) -> bool:
    try:
        return torch.equal(value, copy) or bool(value.isnan().any())
    except (NotImplementedError, RuntimeError):  # in a form that cannot be compared
        return True


@contextmanager
def differentiating() -> Iterator[None]:
    """What is differentiated inside is our doing: it says nothing about the model."""
    before = _OURS.set(True)
    try:
        yield
    finally:
        _OURS.reset(before)


@contextmanager
def _watched(model: nn.Module, dice: _Dice) -> Iterator[None]:
    with watching(dice.seen), Deriving(model):
        yield


class Deriving(TorchFunctionMode):
    """Notes whether the model that runs inside differentiates."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in DIFFERENTIATE and not _OURS.get():
            _DERIVES[self._model] = True
        return func(*args, **(kwargs or {}))


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

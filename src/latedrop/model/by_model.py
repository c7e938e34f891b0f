"""What is known of a model, as long as it lives: by identity, as two models may compare as equal."""

from __future__ import annotations

from functools import partial
from typing import Generic, TypeVar, overload
from weakref import ReferenceType, ref

from torch import nn

__all__ = ["ByModel"]

_Value = TypeVar("_Value")
_Other = TypeVar("_Other")


class ByModel(Generic[_Value]):
    """A mapping from models, of which it holds none.

    >>> net, known = nn.Linear(1, 1), ByModel[str]()
    >>> known[net] = "small"
    >>> known.get(net), net in known
    ('small', True)
    >>> del net
    >>> len(known)
    0
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[ReferenceType[nn.Module], _Value]] = {}

    @overload
    def get(self, model: nn.Module) -> _Value | None: ...

    @overload
    def get(self, model: nn.Module, default: _Other) -> _Value | _Other: ...

    def get(self, model: nn.Module, default: _Other | None = None) -> _Value | _Other | None:
        """What is known, or the default."""
        found = self._held.get(id(model))
        return found[1] if found is not None and found[0]() is model else default

    def setdefault(self, model: nn.Module, value: _Value) -> _Value:
        """What is known, which is the value from now on where that is nothing."""
        held, found = self._held.setdefault(id(model), self._entry(model, value))
        if held() is model:
            return found
        self[model] = value
        return value

    def pop(self, model: nn.Module) -> None:
        """Forget what is known, if anything is."""
        self._held.pop(id(model), None)

    def clear(self) -> None:
        """Forget all."""
        self._held.clear()

    def __getitem__(self, model: nn.Module) -> _Value:
        held, found = self._held[id(model)]
        if held() is not model:
            raise KeyError(model)
        return found

    def __setitem__(self, model: nn.Module, value: _Value) -> None:
        self._held[id(model)] = self._entry(model, value)

    def __contains__(self, model: nn.Module) -> bool:
        found = self._held.get(id(model))
        return found is not None and found[0]() is model

    def __len__(self) -> int:
        return len(self._held)

    def _entry(self, model: nn.Module, value: _Value) -> tuple[ReferenceType[nn.Module], _Value]:
        return ref(model, partial(self._gone, id(model))), value

    def _gone(self, key: int, reference: ReferenceType[nn.Module]) -> None:
        found = self._held.get(key)
        if found is not None and found[0] is reference:  # another model may lie there by now
            self._held.pop(key, None)

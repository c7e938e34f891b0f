"""Attributes that are computed when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["lazy"]

Value = TypeVar("Value")


class lazy(Generic[Value]):  # noqa: N801, as it is used like a function
    """As `functools.cached_property` is from Python 3.12 on: before, all objects of a class waited for one another.

    >>> class Sum:
    ...     @lazy
    ...     def value(self):
    ...         print("adding")
    ...         return 1 + 1
    >>> found = Sum()
    >>> found.value, found.value
    adding
    (2, 2)
    """

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        self._compute, self.__doc__ = compute, compute.__doc__

    def __get__(self, instance: Any, owner: Any = None) -> Value:
        if instance is None:
            return self  # type: ignore[return-value]
        found = instance.__dict__[self._compute.__name__] = self._compute(instance)
        return found

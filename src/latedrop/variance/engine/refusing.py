"""Why there is no program of a model, in one sentence."""

from __future__ import annotations

from typing import NoReturn

from latedrop.errors import ArgumentError

__all__ = ["refuse"]


def refuse(found: str, error: Exception | None = None) -> NoReturn:
    """Say why there is no program of a model."""
    raise ArgumentError(f"expected a model that can be traced; found {found}. Use engine='auto'.") from error

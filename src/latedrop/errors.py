"""Define the errors and warnings of latedrop.

Every error says three things: what was expected, what was found, what to do.
"""

from typing import Any

__all__ = [
    "ArgumentError",
    "DataError",
    "FileError",
    "LatedropError",
    "LatedropWarning",
    "OutputError",
    "SiteError",
]


class LatedropError(Exception):
    """Base of every error that latedrop raises on purpose.

    Attributes:
        rows: `(N,)`, True for the rows of a batch that it is about; None where it is not about single rows.
    """

    rows: Any = None

    def __init__(self, message: str = "", *, rows: Any = None) -> None:
        super().__init__(message)
        self.rows = rows


class ArgumentError(LatedropError, ValueError):
    """An argument is outside what the function takes (a rate of 1.5, one draw)."""


class SiteError(LatedropError):
    """No site matched, a site did not fire, or a layer cannot take dropout."""


class DataError(LatedropError, ValueError):
    """Inputs or targets are empty, not finite, or of the wrong shape."""


class OutputError(LatedropError):
    """The model's output cannot be used: not a tensor, not finite, or it does not vary."""


class FileError(LatedropError):
    """A calibration file is missing, damaged, edited, or belongs to another model."""


class LatedropWarning(UserWarning):
    """The result is sound, but the user should know something about it."""

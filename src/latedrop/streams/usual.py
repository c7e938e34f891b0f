"""What is usual: how scores of validation rows are spread over bins, which is all that a stream needs of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from latedrop.records import Fields, mapping, numbers, or_none
from latedrop.streams.bag import SHARES, STRANGENESS, counted

__all__ = ["USUAL", "Usual", "usual_from_dict", "usual_of_rows"]


USUAL = ("strangeness", "shares")
"""What a file holds; the errors are in its calibration curve."""


@dataclass(frozen=True)
class Usual:
    """Counts of validation rows in bins; None where nothing is known.

    Attributes:
        strangeness: of `Prediction.strangeness`, in the bins between `STRANGENESS`.
        shares: of each term's share of the variance, in the bins between `SHARES`.
        errors: of `|target - mean| / std`, in the bins between `ERRORS`.
    """

    strangeness: tuple[float, ...] | None = None
    shares: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    errors: tuple[float, ...] | None = None


def usual_of_rows(
    strangeness: Sequence[float] | None,
    shares: Mapping[str, Sequence[float]],
    weights: Sequence[float] | None = None,
) -> Usual:
    """Count the validation rows, or add up their weights."""
    known = None if strangeness is None else counted(STRANGENESS, strangeness, weights)
    return Usual(known, {name: counted(SHARES, share, weights) for name, share in shares.items()})


def usual_from_dict(value: Any, name: str) -> Usual:
    """From plain data, such as `dataclasses.asdict` gives without the errors; every field is checked."""
    fields = Fields(value, name)
    found = Usual(
        fields.take("strangeness", or_none(numbers), length=len(STRANGENESS) + 1, least=0, most=1e12),
        fields.take("shares", mapping(numbers), length=len(SHARES) + 1, least=0, most=1e12),
    )
    fields.end()
    return found

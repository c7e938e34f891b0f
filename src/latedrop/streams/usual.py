"""What is usual: how scores of validation rows are spread over bins, which is all that a stream needs of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

from latedrop.records import Limits, record
from latedrop.streams.bag import SHARES, STRANGENESS, counted

__all__ = ["Usual", "usual_of_rows"]

_Counts: TypeAlias = tuple[Annotated[float, Limits(0, 1e12)], ...]
_Bins: TypeAlias = Annotated[_Counts, Limits(len(STRANGENESS) + 1, len(STRANGENESS) + 1)]
_Shares: TypeAlias = Annotated[_Counts, Limits(len(SHARES) + 1, len(SHARES) + 1)]


@record
@dataclass(frozen=True)
class Usual:
    """Counts of validation rows in bins; None where nothing is known.

    Attributes:
        strangeness: of `Prediction.strangeness`, in the bins between `STRANGENESS`.
        shares: of each term's share of the variance, in the bins between `SHARES`.
        errors: of `|target - mean| / std`, in the bins between `ERRORS`; not in files, as a calibration curve tells.
    """

    strangeness: _Bins | None = None
    shares: Mapping[str, _Shares] = field(default_factory=dict)
    errors: _Counts | None = None


def usual_of_rows(
    strangeness: Sequence[float] | None,
    shares: Mapping[str, Sequence[float]],
    weights: Sequence[float] | None = None,
) -> Usual:
    """Count the validation rows, or add up their weights."""
    known = None if strangeness is None else counted(STRANGENESS, strangeness, weights)
    return Usual(known, {name: counted(SHARES, share, weights) for name, share in shares.items()})

"""The scores of one variance on test rows, as a record."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from latedrop.calibration.verdict import share_error
from latedrop.network.sites import Rate
from latedrop.records import record

__all__ = ["Evaluation"]


@record
@dataclass(frozen=True)
class Evaluation:
    """What one measure of uncertainty is worth on test rows.

    Attributes:
        label: its name in tables and legends.
        rows: how many test rows.
        rate: the dropout rate; None where there is no dropout.
        scale: what the variance was multiplied by, one per output or one for all; None where there is no dropout.
        rmse: in the target's unit.
        nll: with its constant, in the target's unit; None for intervals that are no Gaussian's.
        ma: miscalibration area.
        level: of the interval that `coverage` and `width` are about.
        coverage: fraction of targets inside it.
        width: its mean width, in the target's unit.
        levels: of the calibration curve, `(L,)`.
        observed: the calibration curve, `(L,)`.
        correlation: rank correlation of standard deviation and size of the error, 0 for a constant; None for intervals.
            Where targets were transformed for training, it is that of the model's unit.
        mae: mean size of the error, in the target's unit.
        coverage_error: standard error of the coverage over rows.
        gain: nats per value by which the NLL is better than that of the constant; None where there is none to compare.
        gain_error: its standard error over rows.
        widths: mean width of the intervals at each level, `(L,)`, in the target's unit.
    """

    label: str
    rows: int
    rate: Rate | None
    scale: tuple[float, ...] | None
    rmse: float
    nll: float | None
    ma: float
    level: float
    coverage: float
    width: float
    levels: tuple[float, ...]
    observed: tuple[float, ...]
    correlation: float | None = None
    mae: float | None = None
    coverage_error: float | None = None
    gain: float | None = None
    gain_error: float | None = None
    widths: tuple[float, ...] = ()

    def observed_errors(self) -> tuple[float, ...]:
        """Standard errors of the calibration curve, `(L,)`: binomial, times what values of one row have in common."""
        common = 1.0
        if self.coverage_error is not None and 0 < self.coverage < 1 and self.rows > 1:
            common = self.coverage_error / math.sqrt(self.coverage * (1 - self.coverage) / (self.rows - 1))
        return tuple(common * _binomial_error(share, self.rows) for share in self.observed)

    def numbers(self) -> dict[str, Any]:
        """All but the curves, as plain data."""
        return {name: value for name, value in asdict(self).items() if name not in ("levels", "observed", "widths")}


def _binomial_error(share: float, rows: int) -> float:
    if not 0 < share < 1 or rows < 2:
        return share_error(torch.full((rows,), round(share), dtype=torch.float64))
    return math.sqrt(share * (1 - share) / (rows - 1))

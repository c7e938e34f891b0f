"""From a mean and a standard deviation to quantiles: Gaussian, isotonic, split-conformal.

Each kind is a standardised quantile function `z(q)`; the quantile of a prediction is `mean + z(q) · std`, and the
central interval at a level `a` runs from `q = (1 - a)/2` to `q = (1 + a)/2`.

- Gaussian: `z(q) = Phi^{-1}(q)`.
- Isotonic (Kuleshov, Fenner, Ermon 2018): `z(q) = Phi^{-1}(R^{-1}(q))`, where `R(p)` is the observed frequency of
  targets below the predicted p-quantile, fitted by isotonic regression.
- Split-conformal: `z((1 ± a)/2) = ± s`, where `s` is the `ceil((n + 1) a)`-th smallest of the n scores
  `|target - mean| / std` on data used for nothing else. A new exchangeable example then lies in its interval
  with probability at least `a` (Vovk, Gammerman, Shafer 2005; Lei et al. 2018).

Isotonic and conformal intervals belong to the scale and floor that they were fitted with, and keep them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from latedrop.errors import DataError, LatedropError
from latedrop.metrics.levels import checked_level, normal_quantile
from latedrop.quantiles import conformal_quantile, isotonic_quantile
from latedrop.records import Fields, each, numbers, text, wrong

__all__ = [
    "LARGEST",
    "Conformal",
    "IntervalKind",
    "Intervals",
    "Isotonic",
    "checked_level",
    "intervals_from_dict",
    "normal_quantile",
]

IntervalKind: TypeAlias = Literal["gaussian", "isotonic", "conformal"]

LARGEST = 1e300
"""Of a variance or a residual on disk: what is larger overflows when it is used."""
_KNOTS = 200


@dataclass(frozen=True)
class Isotonic:
    """Isotonic recalibration.

    Attributes:
        knots: for each output, increasing standardised residuals `z = Phi^{-1}(p)`.
        observed: for each output, the frequency `R(p)` of targets below the predicted p-quantile.
        scale: the scale of the variance that it was fitted with, one per output or one for all.
        floor: its floor.
    """

    knots: tuple[tuple[float, ...], ...]
    observed: tuple[tuple[float, ...], ...]
    scale: tuple[float, ...]
    floor: tuple[float, ...]
    kind: str = "isotonic"

    @classmethod
    def fit(cls, residuals: list[Tensor], scale: tuple[float, ...], floor: tuple[float, ...]) -> Isotonic:
        """Fit on standardised residuals `(target - mean) / std`, one flat tensor per output."""
        try:
            from sklearn.isotonic import IsotonicRegression
        except ImportError as error:
            raise LatedropError(
                "expected scikit-learn for isotonic intervals; it is not installed. "
                "Run: pip install 'latedrop[isotonic]'"
            ) from error
        all_knots, all_observed = [], []
        for residual in _finite(residuals):
            z = np.sort(residual.double().cpu().numpy())
            rank = np.arange(1, len(z) + 1) / (len(z) + 1)
            # In z and not in p, where doubles cannot tell two residuals beyond 8 standard deviations apart.
            model = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(z, rank)
            knots = np.unique(np.quantile(z, np.linspace(0, 1, _KNOTS + 2)[1:-1]))
            all_knots.append(tuple(knots.tolist()))
            all_observed.append(tuple(model.predict(knots).tolist()))
        return cls(tuple(all_knots), tuple(all_observed), scale, floor)

    def z(self, q: float) -> Tensor:
        """Standardised quantile of each output, `(K,)`."""
        pairs = zip(self.knots, self.observed, strict=True)
        return torch.tensor([isotonic_quantile(*pair, q) for pair in pairs], dtype=torch.float64)


@dataclass(frozen=True)
class Conformal:
    """Split-conformal intervals.

    Attributes:
        scores: for each output, the sorted scores `|target - mean| / std`.
        scale: the scale of the variance that they were computed with, one per output or one for all.
        floor: its floor.
    """

    scores: tuple[tuple[float, ...], ...]
    scale: tuple[float, ...]
    floor: tuple[float, ...]
    kind: str = "conformal"

    @classmethod
    def fit(cls, residuals: list[Tensor], scale: tuple[float, ...], floor: tuple[float, ...]) -> Conformal:
        """Keep the scores of standardised residuals, one flat tensor per output."""
        return cls(tuple(tuple(z.double().abs().sort().values.tolist()) for z in _finite(residuals)), scale, floor)

    def z(self, q: float) -> Tensor:
        """Standardised quantile of each output, `(K,)`."""
        return torch.tensor([conformal_quantile(scores, q) for scores in self.scores], dtype=torch.float64)


Intervals: TypeAlias = "Isotonic | Conformal | None"
"""None is Gaussian."""


def intervals_from_dict(record: Any, scales: int | None = None, name: str = "intervals") -> Intervals:
    """The inverse of `intervals_to_dict` with so many scales, if that is known; `DataError` where a field is wrong."""
    if record is None:
        return None
    fields = Fields(record, name)
    kind = fields.take("kind", text, among=("isotonic", "conformal"))
    found: Isotonic | Conformal
    scale, floor = (fields.take(part, numbers, least=0, most=LARGEST, length=scales) for part in ("scale", "floor"))
    if kind == "conformal":
        found = Conformal(fields.take("scores", each(_rising), least=0, most=LARGEST), scale, floor)
    else:
        knots = fields.take("knots", each(_rising), least=-LARGEST, most=LARGEST)
        observed = fields.take("observed", each(_rising), least=0, most=1, length=len(knots))
        if [len(row) for row in knots] != [len(row) for row in observed]:
            wrong(f"{name}.observed", "as long as the knots", [len(row) for row in observed])
        found = Isotonic(knots, observed, scale, floor)
    fields.end()
    return found


def _rising(value: Any, name: str, *, least: float, most: float) -> tuple[float, ...]:
    found = numbers(value, name, least=least, most=most)
    return found if all(a <= b for a, b in pairwise(found)) else wrong(name, "numbers that never fall", found)


def intervals_to_dict(intervals: Intervals) -> dict[str, Any] | None:
    """Plain data for JSON."""
    return None if intervals is None else asdict(intervals)


def _finite(residuals: list[Tensor]) -> list[Tensor]:
    bad = sum(int((~torch.isfinite(z)).sum()) for z in residuals)
    if bad:
        raise DataError(
            f"expected finite standardised residuals; found {bad} NaN or inf, where the predicted variance is 0. "
            "More draws or floor=True avoid it."
        )
    return residuals

"""What a calibrated model gives: a prediction with its uncertainty, and where that comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from latedrop.calibration.record import Calibration, Choice
from latedrop.calibration.scale import along_outputs
from latedrop.errors import ArgumentError, DataError, LatedropError
from latedrop.metrics.levels import checked_level, normal_quantile

if TYPE_CHECKING:
    import pandas

__all__ = ["Explanation", "Prediction"]


@dataclass(frozen=True)
class Prediction:
    """Predictions with their uncertainty.

    Attributes:
        mean: `(N, ...)`.
        raw_variance: `(N, ...)`, the variance over draws, before any scale.
        calibration: what turns it into the predicted variance.
        strangeness: `(N,)`, how far a row lies outside the validation rows: below 1 for 90 % of these; None where the
            calibration cannot tell.
    """

    mean: Tensor
    raw_variance: Tensor
    calibration: Calibration
    strangeness: Tensor | None = None

    @classmethod
    def joined(cls, parts: Sequence[Prediction]) -> Prediction:
        """The predictions of several batches as one."""
        if not parts:
            raise DataError("expected at least one row to predict; found none.")
        if len(parts) == 1:
            return parts[0]
        strange = [part.strangeness for part in parts if part.strangeness is not None]
        means, variances = ([getattr(part, name) for part in parts] for name in ("mean", "raw_variance"))
        strangeness = torch.cat(strange) if strange else None
        return replace(parts[0], mean=torch.cat(means), raw_variance=torch.cat(variances), strangeness=strangeness)

    def cpu(self) -> Prediction:
        """The same on the CPU."""
        strange = None if self.strangeness is None else self.strangeness.cpu()
        return replace(self, mean=self.mean.cpu(), raw_variance=self.raw_variance.cpu(), strangeness=strange)

    @property
    def variance(self) -> Tensor:
        """The calibrated variance, `(N, ...)`."""
        return self.calibration.variance(self.raw_variance)

    @property
    def std(self) -> Tensor:
        """The calibrated standard deviation, `(N, ...)`."""
        return self.variance.sqrt()

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Both ends, `(N, ...)` each, of the central interval that holds the target with that probability."""
        level = checked_level(level)
        return self._at((1 - level) / 2), self._at((1 + level) / 2)

    def quantile(self, q: float | Sequence[float]) -> Tensor:
        """The predicted quantile, `(N, ...)`, or `(Q, N, ...)` for a sequence of Q probabilities."""
        if getattr(q, "ndim", 0) == 0 and not isinstance(q, Sequence):
            return self._at(checked_level(q))
        values = [self._at(checked_level(item)) for item in q]  # type: ignore[union-attr]
        if not values:
            raise ArgumentError("expected at least one probability; found none.")
        return torch.stack(values)

    def scaled(self, choice: Choice) -> Prediction:
        """The same prediction with another scale; nothing is run again."""
        return replace(self, calibration=self.calibration.with_choice(choice))

    def to_dict(self, level: float = 0.9) -> dict[str, Tensor]:
        """Named results: `mean`, `std`, `low`, `high`, and `strangeness` where it is known."""
        low, high = self.interval(level)
        named = {"mean": self.mean, "std": self.std, "low": low, "high": high}
        return named if self.strangeness is None else {**named, "strangeness": self.strangeness}

    def to_pandas(self, level: float = 0.9) -> pandas.DataFrame:
        """One row per example; the columns of `to_dict`, numbered where there are several outputs."""
        try:
            import pandas
        except ImportError as error:
            raise LatedropError("expected pandas; it is not installed. Run: pip install pandas") from error
        columns = {}
        for name, value in self.to_dict(level).items():
            flat = value.reshape(len(value), -1).cpu().numpy()
            for k in range(flat.shape[1]):
                columns[name if flat.shape[1] == 1 else f"{name}_{k}"] = flat[:, k]
        return pandas.DataFrame(columns)

    def __len__(self) -> int:
        return len(self.mean)

    def __repr__(self) -> str:
        std, c = self.std, self.calibration
        kind = "gaussian" if c.intervals is None else c.intervals.kind
        return (
            f"Prediction of {len(self)} rows, mean {tuple(self.mean.shape)}, std {float(std.min()):.4g} to "
            f"{float(std.max()):.4g} (scale {c.choice}, {kind} intervals)"
        )

    def _at(self, q: float) -> Tensor:
        fitted = self.calibration.intervals
        if fitted is None:
            return self.mean + normal_quantile(q) * self.std
        std = self.calibration.scaled(self.raw_variance, fitted.scale, fitted.floor).sqrt()
        return self.mean + along_outputs(fitted.z(q), self.mean) * std


@dataclass(frozen=True)
class Explanation:
    """Where the variance of one prediction comes from.

    Attributes:
        mean: the model's own prediction.
        sites: each site's share of the variance; they sum to 1.
        units: the units with the largest shares, as (site, position in the layer's input, share).
    """

    mean: float
    sites: dict[str, float]
    units: tuple[tuple[str, tuple[int, ...], float], ...]

    def __str__(self) -> str:
        lines = [f"prediction {self.mean:.6g}; share of its variance by site"]
        lines += [f"  {share:6.1%}  {name}" for name, share in self.sites.items()]
        lines += ["and by unit"]
        lines += [f"  {share:6.1%}  {name}[{', '.join(map(str, place))}]" for name, place, share in self.units]
        return "\n".join(lines)

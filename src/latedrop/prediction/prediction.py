"""Predictions of numbers and of classes with their uncertainty, and explanations of a variance."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from latedrop.calibration.class_record import ClassCalibration
from latedrop.calibration.fit_classes import entropy
from latedrop.calibration.guard import LARGEST
from latedrop.calibration.record import Calibration, Choice
from latedrop.calibration.scale import along_outputs
from latedrop.calibration.targets import capped
from latedrop.errors import ArgumentError, DataError, LatedropError
from latedrop.metrics.levels import checked_level
from latedrop.quantiles import student_quantile
from latedrop.torch_private import being_traced

if TYPE_CHECKING:
    import pandas

__all__ = ["ClassPrediction", "Explanation", "Predicted", "Prediction"]

_ROUNDING = 1e-6  # of summed probabilities


class Predicted:
    """Has what all predictions share: they are dataclasses of tensors, of which the first has a row for each input."""

    index: Any

    @classmethod
    def joined(cls, parts: Sequence[_Same]) -> _Same:
        """Return the predictions of several batches as one."""
        if not parts:
            raise DataError("expected at least one row to predict; found none.")
        return parts[0] if len(parts) == 1 else _each(parts, torch.cat, index=None)

    def cpu(self: _Same) -> _Same:
        """Return this prediction on the CPU."""
        return self.mapped(Tensor.cpu)

    def mapped(self: _Same, change: Callable[[Tensor], Tensor]) -> _Same:
        """Return this prediction with each of its tensors changed."""
        return _each([self], lambda values: change(values[0]))

    def __len__(self) -> int:
        first: Any = self
        return len(getattr(self, fields(first)[0].name))

    def _frame(self, columns: Mapping[str, Tensor]) -> pandas.DataFrame:
        """Return a data frame of pandas with the index of the one that was predicted."""
        try:
            frame = import_module("pandas").DataFrame
        except ImportError as error:
            raise LatedropError("expected pandas; it is not installed. Run: pip install pandas") from error
        table: pandas.DataFrame = frame({k: v.cpu().numpy() for k, v in columns.items()}, index=self.index)
        return table


_Same = TypeVar("_Same", bound=Predicted)


def _each(parts: Sequence[_Same], made: Callable[[list[Tensor]], Tensor], **others: Any) -> _Same:
    """Return a prediction whose tensors are made of those of several; all else is that of the first."""
    first: Any = parts[0]
    for name in (each.name for each in fields(first)):
        values = [getattr(part, name) for part in parts]
        if isinstance(values[0], dict):
            others[name] = {key: made([value[key] for value in values]) for key in values[0]}
        elif isinstance(values[0], Tensor):
            others[name] = made(values)
    same: _Same = replace(first, **others)
    return same


@dataclass(frozen=True)
class Prediction(Predicted):
    """Predictions with their uncertainty.

    Attributes:
        output: `(N, ...)`, the mean in the unit that the model was trained in; mostly the same as `mean`.
        raw_variance: `(N, ...)`, the variance over draws, before any scale, in that unit.
        calibration: what turns it into the predicted variance.
        novelty: `(N,)`, how far a row lies outside the validation rows: below 1 for 95 % of the
            reference rows, 3.4e38 at most;
            None where the calibration cannot tell.
        index: of the pandas data frame that was predicted; None for other inputs.
        shares: `(N,)` for each term, its share of the variance before the guard; None where there are no terms, and for
            maps.

    >>> import latedrop
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
    >>> p = latedrop.calibrate(net, (x, x**2)).predict(x)
    >>> low, high = p.interval(0.9)
    >>> bool((low < p.mean).all() and (p.mean < high).all())
    True
    >>> p.quantile([0.5, 0.95]).shape
    torch.Size([2, 64, 1])
    """

    output: Tensor
    raw_variance: Tensor
    calibration: Calibration
    novelty: Tensor | None = None
    index: Any = None
    shares: dict[str, Tensor] | None = field(default=None, repr=False)

    @property
    def mean(self) -> Tensor:
        """The predicted mean, `(N, ...)`, in the original unit of the targets."""
        return self.output if self.calibration.target is None else self._moments()[0]

    def with_unknown(self, rows: Tensor, output: Tensor) -> Prediction:
        """Give some rows, `(N,)` of bool, the widest interval; their mean is the model's output, or NaN."""
        rows = rows.to(output.device)
        wide = rows.reshape(-1, *[1] * (output.dim() - 1))
        mean = torch.where(wide, output.where(output.isfinite(), torch.nan).to(self.output), self.output)
        novelty = None if self.novelty is None else self.novelty.masked_fill(rows, LARGEST)
        shares = None if self.shares is None else {k: v.masked_fill(rows, 0) for k, v in self.shares.items()}
        variance = self.raw_variance.masked_fill(wide, torch.inf)
        return replace(self, output=mean, raw_variance=variance, novelty=novelty, shares=shares)

    @property
    def variance(self) -> Tensor:
        """The calibrated variance, `(N, ...)`, in the square of that unit."""
        return self._moments()[1]

    @property
    def std(self) -> Tensor:
        """The calibrated standard deviation, `(N, ...)`."""
        variance, unit = self.calibration.variance(self.raw_variance), self.calibration.target
        if unit is None:
            return _known(variance.sqrt())
        # A square may be too large for a number that is not.
        std = unit.moments(self.output.double(), variance.double())[1].sqrt()
        return capped(std.where(variance < torch.inf, torch.inf), variance.dtype)  # infinite: nothing is known

    @property
    def spread(self) -> Tensor:
        """The unit of quantiles, `(N, ...)`, in the unit that the model was trained in.

        With Student or Gaussian intervals that is the standard deviation; others keep the scale that they were fitted
        with.
        """
        c, fitted = self.calibration, self.calibration.intervals
        scaled = (
            c.variance(self.raw_variance) if fitted is None else c.scaled(self.raw_variance, fitted.scale, fitted.floor)
        )
        return _known(scaled.sqrt())

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

    def in_model_unit(self) -> Prediction:
        """Return this prediction in the unit that the model was trained in, where it is Gaussian."""
        return replace(self, calibration=replace(self.calibration, target=None))

    def scaled(self, choice: Choice) -> Prediction:
        """Return this prediction with another scale; nothing is run again."""
        if type(self) is not Prediction:
            raise ArgumentError(
                f"expected a Prediction for another scale; found {type(self).__name__}, fitted with one. Call "
                "uq.scaled(...) first, and make its predictor again."
            )
        return replace(self, calibration=self.calibration.with_choice(choice))

    def to_dict(self, level: float = 0.9) -> dict[str, Tensor]:
        """Named results: `mean`, `std`, `low`, `high`, and `novelty` where it is known."""
        low, high = self.interval(level)
        named = {"mean": self.mean, "std": self.std, "low": low, "high": high}
        return named if self.novelty is None else {**named, "novelty": self.novelty}

    def columns(self, level: float = 0.9) -> dict[str, Tensor]:
        """Return the results of `to_dict`, `(N,)` each: of several outputs each has its own.

        It is named for its target column where the calibration knows it, else for its number: `mean_height`, `mean_0`.
        """
        columns: dict[str, Tensor] = {}
        names = self.calibration.output_names
        for name, value in self.to_dict(level).items():
            flat = value.reshape(len(value), -1).unbind(1)
            ends = names if names is not None and len(names) == len(flat) else range(len(flat))
            columns |= {name if len(flat) == 1 else f"{name}_{end}": each for end, each in zip(ends, flat, strict=True)}
        return columns

    def to_pandas(self, level: float = 0.9) -> pandas.DataFrame:
        """Return `columns` as a data frame with a row per example, and the index of the one that was predicted."""
        return self._frame(self.columns(level))

    def __repr__(self) -> str:
        std, c = self.std, self.calibration
        return (
            f"{type(self).__name__} of {len(self)} rows, mean {tuple(self.mean.shape)}, std {float(std.min()):.4g} to "
            f"{float(std.max()):.4g} (scale {c.choice}, {c.kind} intervals)"
        )

    def _moments(self) -> tuple[Tensor, Tensor]:
        variance, unit = self.calibration.variance(self.raw_variance), self.calibration.target
        if unit is None:
            return self.output, _known(variance)
        mean, original = unit.moments(self.output, variance)
        return mean, original.where(variance < torch.inf, LARGEST)  # infinite where nothing is known of a row

    def _at(self, q: float) -> Tensor:
        fitted, unit = self.calibration.intervals, self.calibration.target
        degrees = self.calibration.degrees
        z: float | Tensor = student_quantile(q, degrees)
        if fitted is not None:
            z = along_outputs(torch.tensor(fitted.quantiles(q), dtype=torch.float64), self.output)
        ends = _known(self.output + z * self.spread, 2 * q - 1)
        return ends if unit is None else unit.inverse(ends)


def _known(values: Tensor, sign: float = 1) -> Tensor:
    """At most the largest number, which also stands for NaN, with a sign; NaN stays at a sign of 0."""
    if being_traced():  # a file's numbers are looked at where it is run
        return values
    most = torch.finfo(values.dtype).max
    return values.nan_to_num(nan=math.copysign(most, sign) if sign else math.nan)


@dataclass(frozen=True)
class ClassPrediction(Predicted):
    """Predictions of N rows among K classes; of maps `(N, K, H, W)` and `(N, H, W)` stand for `(N, K)` and `(N,)`.

    Attributes:
        log_probabilities: `(N, K)`, calibrated.
        logits: `(N, K)`, the model's own.
        calibration: what turned them into probabilities.
        novelty: `(N,)`, also of maps: how far a row lies outside the reference rows. Below 1 for 95 % of these; None
            where the calibration cannot tell.
        mutual_information: `(N,)` in nats, how much thinned networks disagree (BALD); None where no dropout was run,
            see `ClassPredictor.predict`.
        index: of the pandas data frame that was predicted; None for other inputs.
    """

    log_probabilities: Tensor
    logits: Tensor
    calibration: ClassCalibration
    novelty: Tensor | None = None
    mutual_information: Tensor | None = None
    index: Any = None

    @property
    def probabilities(self) -> Tensor:
        """`(N, K)`."""
        return self.log_probabilities.exp()

    @property
    def label(self) -> Tensor:
        """`(N,)`, the likeliest class."""
        return self.log_probabilities.argmax(1)

    @property
    def names(self) -> list[str]:
        """The likeliest class of each row by its name."""
        known = self.calibration.known_names
        return [known[k] for k in self.label.tolist()]

    @property
    def confidence(self) -> Tensor:
        """`(N,)`, the probability of the likeliest class."""
        return self.probabilities.amax(1)

    @property
    def entropy(self) -> Tensor:
        """`(N,)` in nats."""
        return entropy(self.log_probabilities.movedim(1, -1))

    @property
    def energy(self) -> Tensor:
        """`(N,)`, minus the log of the sum of exponentials of the logits (Liu et al. 2020): large for strange rows."""
        return -self.logits.logsumexp(1)

    @property
    def image_scores(self) -> dict[str, Tensor]:
        """Scores of each image of maps, `(N,)`: `expected_error`, the share of pixels that should be wrong, and others.

        Those are the means of `entropy` and, where it is known, `mutual_information`; and `novelty`.
        """
        maps = {"expected_error": 1 - self.confidence, "entropy": self.entropy}
        maps |= {} if self.mutual_information is None else {"mutual_information": self.mutual_information}
        scores = {name: values.reshape(len(self), -1).mean(1) for name, values in maps.items()}
        return scores if self.novelty is None else {**scores, "novelty": self.novelty}

    def prediction_set(self, level: float = 0.9) -> Tensor:
        """`(N, K)`, True for the classes of a set that holds the label with that probability.

        Conformal rows tell nothing of rows that lie outside the reference rows (novelty above 1): to their sets the
        likeliest classes are added until the probabilities sum to `level`.
        """
        if self.calibration.sets is None:
            raise ArgumentError(
                "expected a predictor with prediction sets, from rows used for nothing else; found one without. "
                "Call uq = uq.conformal((x, labels)) first."
            )
        members = self.calibration.sets.members(self.probabilities, level)
        if self.novelty is None:
            return members
        p, order = self.probabilities.cpu().sort(dim=1, descending=True, stable=True)
        likeliest = (p.cumsum(1) - p < level - _ROUNDING).gather(1, order.argsort(1))
        return members | (likeliest & (self.novelty.cpu() > 1)[:, None])

    def kept(self) -> Tensor:
        """`(N,)`, True for rows that the calibration's rule keeps; see `ClassPredictor.reject`.

        A row of which nothing is known, whose novelty is the largest number, is not kept.
        """
        rule = self.calibration.rule
        if rule is None:
            raise ArgumentError(
                "expected a predictor with a rule, from rows used for nothing else; found one without. Call "
                "uq = uq.reject((x, labels), risk=0.01) first."
            )
        sure = self.confidence >= rule.threshold
        return sure if self.novelty is None else sure & (self.novelty < LARGEST)

    def to_dict(self, level: float | None = None) -> dict[str, Tensor]:
        """Named results: `label`, `confidence`, `entropy`, what else is known of each row, and `probabilities`.

        With a level, where the calibration makes prediction sets, also `set`; where it has a rule, `kept`.
        """
        named = {"label": self.label, "confidence": self.confidence, "entropy": self.entropy}
        extra = {"novelty": self.novelty, "mutual_information": self.mutual_information}
        named |= {name: value for name, value in extra.items() if value is not None}
        if level is not None and self.calibration.sets is not None:
            named["set"] = self.prediction_set(level)
        if self.calibration.rule is not None:
            named["kept"] = self.kept()
        return {**named, "probabilities": self.probabilities}

    def to_pandas(self) -> pandas.DataFrame:
        """One row per example: its class by name, the columns of `to_dict`, and the probability of every class.

        Of maps one row per image, with its scores.
        """
        if self.calibration.maps:
            return self._frame(self.image_scores)
        named = self.to_dict()
        probabilities = named.pop("probabilities")
        classes = zip(self.calibration.known_names, probabilities.unbind(1), strict=True)
        frame = self._frame({**named, **{f"p_{name}": values for name, values in classes}})
        return frame.assign(label=self.names) if self.calibration.names else frame

    def with_unknown(self, rows: Tensor, output: Tensor) -> ClassPrediction:
        """Make all classes of some rows, `(N,)` of bool, as likely as each other; `output` has the logits."""
        rows = rows.to(output.device)
        output = output[:, None] if output.dim() == 1 else output
        wide = rows.reshape(-1, *[1] * (output.dim() - 1))
        logs = self.log_probabilities.masked_fill(wide, -math.log(self.log_probabilities.shape[1]))
        logits = torch.where(wide, output.where(output.isfinite(), -LARGEST).to(self.logits), self.logits)
        novelty = None if self.novelty is None else self.novelty.masked_fill(rows, LARGEST)
        doubt = self.mutual_information
        doubt = None if doubt is None else doubt.masked_fill(wide[:, 0] if doubt.dim() > 1 else rows, 0)
        return replace(self, log_probabilities=logs, logits=logits, novelty=novelty, mutual_information=doubt)

    def __repr__(self) -> str:
        sure, shape = self.confidence, tuple(self.log_probabilities.shape)
        return (
            f"ClassPrediction of {len(self)} rows, probabilities {shape}, confidence {float(sure.min()):.3f} to "
            f"{float(sure.max()):.3f} ({self.calibration.choice})"
        )


@dataclass(frozen=True)
class Explanation:
    """Where the variance of one prediction comes from.

    Attributes:
        mean: the model's own prediction, in the original unit of the targets.
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

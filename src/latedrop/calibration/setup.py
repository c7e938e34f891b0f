"""The options of `calibrate`, checked: how the variance is measured, and how it is fitted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal, get_args

from torch import Tensor

from latedrop.calibration.fit import Loss
from latedrop.calibration.fitted_terms import checked_terms
from latedrop.calibration.intervals import IntervalKind
from latedrop.calibration.measuring import Method
from latedrop.calibration.names import Names
from latedrop.calibration.record import Choice, checked_choice
from latedrop.calibration.transforms import Transform, checked_transform
from latedrop.calibration.verdict import Folds
from latedrop.data.datasets import Unpack
from latedrop.data.items import Collate
from latedrop.dropout.masks import checked_seed
from latedrop.dropout.moments import ENGINES, Engine, Sampling, checked_draws
from latedrop.errors import ArgumentError, DataError
from latedrop.metrics.entries import checked_weights
from latedrop.network.calling import Readout
from latedrop.network.find_sites import Select
from latedrop.network.sites import Kind, Rate, Site

__all__ = ["PAPER_RATES", "Setup"]

DEFAULT_TERMS = ("dropout", "leverage")
PAPER_RATES = (0.001, 0.002, 0.005, 0.008, 0.01, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5)


@dataclass(frozen=True)
class Setup:
    """The options of one calibration; `calibrate` says what each is.

    Those of which None says "by default" are filled in by `checked`.
    """

    rates: Sequence[Rate]
    draws: int
    criterion: Literal["scaled", "unscaled"]
    method: Method
    terms: Any
    reference: Any
    guard: bool
    features: Sequence[str] | None
    folds: Folds
    mean: Literal["draws", "model"] | None
    floor: bool
    per_site: bool
    loss: Loss
    per_output: bool | None
    scale: Choice
    intervals: IntervalKind | None
    conformal_data: Any
    target: Transform | None
    row_weights: Any
    sites: Sequence[Site] | None
    select: Select
    kind: Kind
    readout: Readout
    seed: int
    shared: bool
    batch_size: int
    chunk: int | None
    engine: Engine
    unpack: Unpack | None
    collate: Collate
    progress: bool
    terms_given: bool = False
    columns: Names | None = None

    def checked(self) -> Setup:
        """The same with defaults filled in, or `ArgumentError`."""
        method = self._method()
        _one_of("method", method, get_args(Method))
        _one_of("criterion", self.criterion, ("scaled", "unscaled", None))
        _one_of("mean", self.mean, ("draws", "model", None))
        _one_of("loss", self.loss, get_args(Loss))
        _one_of("engine", self.engine, ENGINES)
        _one_of("folds", self.folds, get_args(Folds))
        if self.sites is not None and self.select is not None:
            raise ArgumentError("expected sites= or select=, found both. Select when you call find_sites.")
        self._check_belonging(method)
        if (method != "linear" and self.per_site) or (method not in ("linear", "terms") and self.loss != "nll"):
            raise ArgumentError(
                f"expected method='linear' with per_site=True, or with loss='crps'; found method={method!r}. "
                "Rates that differ by site can be tried with rates=[{pattern: rate, ...}, ...]."
            )
        own = method in ("linear", "terms")
        if own and self.mean == "draws":
            raise ArgumentError(
                f"expected mean='model' with method={method!r}, which keeps the model's own prediction; found "
                "mean='draws'. Leave it out, or pass method='sample'."
            )
        return replace(
            self,
            method=method,
            rates=_checked_rates(PAPER_RATES if self.rates is None else self.rates),
            draws=checked_draws(100 if self.draws is None else self.draws),
            criterion=self.criterion or "scaled",
            mean=self.mean or ("model" if own else "draws"),
            terms=checked_terms(DEFAULT_TERMS if self.terms is None else self.terms),
            terms_given=self.terms is not None,
            guard=self.guard is None or bool(self.guard),
            scale=checked_choice(self.scale),
            target=checked_transform(self.target),
            intervals=self._checked_intervals(),
            seed=checked_seed(self.seed),
            shared=bool(self.shared),
        )

    def _method(self) -> Method:
        """As given; else the one that the other options belong to, which is the paper's where draws are spoken of."""
        if self.method is not None:
            return self.method
        drawn = (self.rates, self.draws, self.criterion)
        return "sample" if any(value is not None for value in drawn) or self.mean == "draws" else "terms"

    def _check_belonging(self, method: Method) -> None:
        """Options of one method are refused with another, where they would be left unheard."""
        theirs: dict[str, bool] = {"terms": self.terms is not None, "reference": self.reference is not None}
        theirs |= {"guard": self.guard is not None, "features": self.features is not None}
        theirs["folds"] = self.folds != "shuffled"
        if method == "terms":
            theirs = {name: getattr(self, name) is not None for name in ("rates", "draws", "criterion")}
            theirs |= {"floor": self.floor, "per_site": self.per_site, "shared": not self.shared}
        wrong = [name for name, given in theirs.items() if given]
        if wrong:
            other = "'sample', 'linear' or 'propagate'" if method == "terms" else "'terms', the default"
            raise ArgumentError(
                f"expected options that belong to method={method!r}; found {', '.join(wrong)}, which belong to "
                f"method={other}."
            )

    @property
    def sampling(self) -> Sampling:
        """How draws are run."""
        return Sampling(self.draws, self.seed, self.readout, self.chunk, self.shared, engine=self.engine)

    def weights(self, rows: int) -> Tensor | None:
        """What each of so many validation rows counts, with mean 1; None where all count the same."""
        if self.row_weights is None:
            return None
        found = checked_weights(self.row_weights, rows)
        if int((found > 0).sum()) < 2:
            raise DataError(f"expected a weight above 0 for at least 2 validation rows; found one among {rows}.")
        return found

    def has_outputs(self, target: Tensor) -> bool:
        """Whether each index of axis 1 of outputs like `target` has its own scale."""
        wanted = target.dim() != 3 if self.per_output is None else self.per_output
        return wanted and target.dim() > 1 and target.shape[1] > 1

    def _checked_intervals(self) -> IntervalKind:
        held = self.conformal_data is not None
        default: IntervalKind = "conformal" if held else "gaussian"
        intervals = default if self.intervals is None else self.intervals
        if intervals not in get_args(IntervalKind):
            raise ArgumentError(f"expected intervals 'gaussian', 'isotonic' or 'conformal'; found {intervals!r}.")
        if intervals == "isotonic" and self.row_weights is not None:
            raise ArgumentError(
                "expected other intervals than 'isotonic' with row_weights=, as its ranks count every row alike; found "
                "both. Leave one out, or use conformal_data."
            )
        if (intervals == "conformal") != held:
            raise ArgumentError(
                "expected conformal_data with intervals='conformal', and only then: coverage is guaranteed by data "
                f"used for nothing else; found intervals={intervals!r} and conformal_data "
                f"{'given' if held else 'missing'}."
            )
        return intervals


def _checked_rates(rates: Any) -> list[Rate]:
    if isinstance(rates, (Real, Mapping)):
        rates = [rates]
    if isinstance(rates, str) or not isinstance(rates, Iterable):
        raise ArgumentError(f"expected a sequence of rates; found {rates!r}.")
    found: list[Rate] = []
    for rate in rates:
        values = list(rate.values()) if isinstance(rate, Mapping) else [rate]
        if not all(_is_rate(value) for value in values) or not any(value > 0 for value in values):
            raise ArgumentError(f"expected rates inside (0, 1); found {rate!r}.")
        found.append({name: float(v) for name, v in rate.items()} if isinstance(rate, Mapping) else float(rate))
    if not found:
        raise ArgumentError("expected at least one rate; found none.")
    return found


def _is_rate(value: Any) -> bool:
    try:
        return not isinstance(value, (bool, str)) and 0 <= float(value) < 1
    except (TypeError, ValueError, OverflowError):
        return False


def _one_of(name: str, value: Any, allowed: tuple[str | None, ...]) -> None:
    if value not in allowed:
        raise ArgumentError(f"expected {name} to be one of {allowed}; found {value!r}.")

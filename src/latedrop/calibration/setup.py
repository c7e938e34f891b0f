"""The options of `calibrate`, checked: how the variance is measured, and how it is fitted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal, get_args

from torch import Tensor

from latedrop.calibration.batches import Unpack
from latedrop.calibration.fit import Loss
from latedrop.calibration.intervals import IntervalKind
from latedrop.calibration.measuring import Method
from latedrop.calibration.record import Choice, checked_choice
from latedrop.errors import ArgumentError
from latedrop.masking.draws import checked_seed
from latedrop.model.calling import Readout
from latedrop.model.finding import Select
from latedrop.model.items import Collate
from latedrop.model.sites import Kind, Rate, Site
from latedrop.variance.engine.options import ENGINES, Engine, Sampling, checked_draws

__all__ = ["PAPER_RATES", "Setup"]

PAPER_RATES = (0.001, 0.002, 0.005, 0.008, 0.01, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5)


@dataclass(frozen=True)
class Setup:
    """The options of one calibration; `calibrate` says what each is."""

    rates: Sequence[Rate]
    draws: int
    criterion: Literal["scaled", "unscaled"]
    method: Method
    mean: Literal["draws", "model"] | None
    floor: bool
    per_site: bool
    loss: Loss
    per_output: bool | None
    scale: Choice
    intervals: IntervalKind | None
    conformal_data: Any
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

    def checked(self) -> Setup:
        """The same with defaults filled in, or `ArgumentError`."""
        _one_of("method", self.method, get_args(Method))
        _one_of("criterion", self.criterion, ("scaled", "unscaled"))
        _one_of("mean", self.mean, ("draws", "model", None))
        _one_of("loss", self.loss, get_args(Loss))
        _one_of("engine", self.engine, ENGINES)
        if self.sites is not None and self.select is not None:
            raise ArgumentError("expected sites= or select=, found both. Select when you call find_sites.")
        if self.method != "linear" and (self.per_site or self.loss != "nll"):
            raise ArgumentError(
                f"expected method='linear' with per_site=True or loss='crps'; found method={self.method!r}. "
                "Rates that differ by site can be tried with rates=[{pattern: rate, ...}, ...]."
            )
        if self.method == "linear" and self.mean == "draws":
            raise ArgumentError(
                "expected mean='model' with method='linear', which draws nothing; found mean='draws'. Leave it out."
            )
        return replace(
            self,
            rates=_checked_rates(self.rates),
            draws=checked_draws(self.draws),
            mean=self.mean or ("model" if self.method == "linear" else "draws"),
            scale=checked_choice(self.scale),
            intervals=self._checked_intervals(),
            seed=checked_seed(self.seed),
            shared=bool(self.shared),
        )

    @property
    def sampling(self) -> Sampling:
        """How draws are run."""
        return Sampling(self.draws, self.seed, self.readout, self.chunk, self.shared, engine=self.engine)

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
        if (intervals == "conformal") != held:
            raise ArgumentError(
                "expected conformal_data with intervals='conformal', and only then: coverage is guaranteed by data "
                f"that served for nothing else; found intervals={intervals!r} and conformal_data "
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
    except (TypeError, ValueError):
        return False


def _one_of(name: str, value: Any, allowed: tuple[str | None, ...]) -> None:
    if value not in allowed:
        raise ArgumentError(f"expected {name} to be one of {allowed}; found {value!r}.")

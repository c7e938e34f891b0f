"""Options of a calibration: a method, a task, and how batches are read. Each option is checked here, once.

`calibrate(model, data, method=Sampling(rates=[0.1], draws=50), task=Classification(names=["cat", "dog"]))`
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Real
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from torch import Tensor

from latedrop.calibration.fitted_terms import checked_terms
from latedrop.calibration.record import Choice, checked_choice
from latedrop.calibration.targets import Transform, checked_transform
from latedrop.data.batches import Batches, Names
from latedrop.dropout.moments import Engine, checked_draws
from latedrop.errors import ArgumentError, DataError
from latedrop.metrics.entries import checked_weights
from latedrop.network.find_sites import Select
from latedrop.network.network import Readout
from latedrop.network.sites import Rate, Site, Sites
from latedrop.options import AtLeast, check_options, shown
from latedrop.terms import Term

__all__ = [
    *("PAPER_RATES", "Classification", "FirstOrder", "Method", "Plan", "Propagation", "Sampling", "Task", "Terms"),
    *("checked_method",),
]

PAPER_RATES = (0.001, 0.002, 0.005, 0.008, 0.01, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5)
DEFAULT_TERMS = ("dropout", "leverage", "gradients", "forest")

_Mean: TypeAlias = Literal["draws", "model"]
_Criterion: TypeAlias = Literal["scaled", "unscaled"]


@dataclass(frozen=True)
class Terms:
    """The default: `variance = guard(x) · (floor + sum_j theta_j t_j(x))`, compared with simpler fits.

    Attributes:
        terms: names (`"dropout"`, `"leverage"`, `"gradients"`, `"forest"`, `"size"`, `"neighbours"`) or
            objects of `latedrop.terms`; a candidate adds one after the other, in this order. None: the first four,
            or those of them that a model can have: mask gradients up to 4 outputs, a forest from 60 rows on.
        guard: False keeps the variance from growing for rows unlike the validation rows.
        features: names of the sites whose inputs are a row's features, which leverage, neighbours and the guard look
            at; all that can be used where None.
        folds: `"blocks"` where the rows stand in their order in time and neighbours are alike, as the frames of a
            video: folds are then runs of rows, and standard errors come from these.
        mean: `"corrected"` adds to the prediction what the validation rows tell about its error: a step of the
            linearised network and boosted trees, where they lower the squared error of rows left out. From 60 rows on.
    """

    terms: Sequence[str | Term] | None = None
    guard: bool = True
    features: Sequence[str] | None = None
    folds: Literal["shuffled", "blocks"] = "shuffled"
    mean: Literal["model", "corrected"] = "model"
    chosen: bool = field(init=False, repr=False)
    """Whether the terms were named, and must not be left out silently."""
    name: ClassVar[Literal["terms"]] = "terms"
    scale: ClassVar[Choice] = "optimal"
    seed: ClassVar[int] = 0

    def __post_init__(self) -> None:
        _set(self, chosen=self.terms is not None)
        check_options(self)
        _set(self, terms=checked_terms(DEFAULT_TERMS if self.terms is None else self.terms))

    @property
    def objects(self) -> tuple[Term, ...]:
        """The terms as objects."""
        return tuple(self.terms or ())  # type: ignore[arg-type]


@dataclass(frozen=True)
class Sampling:
    """The paper's procedure: draw thinned networks at several rates and scale the variance of the best one.

    Attributes:
        rates: the rates to try; each a float or a mapping from name patterns to floats. None: those of the paper, or
            five for classes.
        draws: thinned networks per rate.
        criterion: `"scaled"` picks the rate by the NLL of the scaled variance, `"unscaled"` of the raw one.
        mean: `"draws"`: predict the mean over draws; `"model"`: keep the model's own prediction, and take only the
            variance from the draws.
        floor: also fit a constant, `scale · variance + floor`.
        scale: which scale predictions use: `"optimal"`, `"relaxed"` or a number. `uq.scaled()` changes it later.
        shared: False gives every example its own masks.
        seed: fixes all masks.
        chunk: draws that run at once; chosen to fit memory where None.
    """

    rates: Sequence[Rate] | None = None
    draws: int = 100
    criterion: _Criterion = "scaled"
    mean: _Mean = "draws"
    floor: bool = False
    scale: Choice = "optimal"
    shared: bool = True
    seed: int = 0
    chunk: Annotated[int, AtLeast(1)] | None = None
    name: ClassVar[Literal["sample"]] = "sample"

    def __post_init__(self) -> None:
        _set(self, rates=_checked_rates(self.rates), draws=checked_draws(self.draws), scale=checked_choice(self.scale))
        check_options(self)


@dataclass(frozen=True)
class FirstOrder:
    """The variance to first order in the masks, for all rates at once and without draws.

    Attributes:
        floor, scale: see `Sampling`.
    """

    floor: bool = False
    scale: Choice = "optimal"
    name: ClassVar[Literal["linear"]] = "linear"
    criterion: ClassVar[_Criterion] = "scaled"
    mean: ClassVar[_Mean] = "model"
    seed: ClassVar[int] = 0

    def __post_init__(self) -> None:
        _set(self, scale=checked_choice(self.scale))
        check_options(self)


@dataclass(frozen=True)
class Propagation:
    """Mean and variance carried through the layers in one pass, for dense outputs.

    Attributes:
        rates, criterion, floor, scale: see `Sampling`.
        mean: `"draws"`: the mean that is carried through the layers, which stands for that over draws; `"model"`: the
            model's own prediction.
    """

    rates: Sequence[Rate] | None = None
    criterion: _Criterion = "scaled"
    mean: _Mean = "draws"
    floor: bool = False
    scale: Choice = "optimal"
    name: ClassVar[Literal["propagate"]] = "propagate"
    seed: ClassVar[int] = 0

    def __post_init__(self) -> None:
        _set(self, rates=_checked_rates(self.rates), scale=checked_choice(self.scale))
        check_options(self)


Method: TypeAlias = Terms | Sampling | FirstOrder | Propagation
_METHODS: dict[str, type[Any]] = {kind.name: kind for kind in (Terms, Sampling, FirstOrder, Propagation)}


def checked_method(method: Any) -> Method:
    """Return the method that a name stands for, or that was passed; else `ArgumentError`."""
    method = _METHODS[method]() if isinstance(method, str) and method in _METHODS else method
    if isinstance(method, (Terms, Sampling, FirstOrder, Propagation)):
        return method
    raise ArgumentError(
        f"expected method to be one of {tuple(_METHODS)}, or Terms(...), Sampling(...), FirstOrder(...) or "
        f"Propagation(...); found {method!r}."
    )


@dataclass(frozen=True)
class Classification:
    """The task of a classifier: `calibrate` then fits probabilities, and returns a `ClassPredictor`.

    Attributes:
        names: of the classes, in the order of the logits.
        ignore_index: of maps, the label of pixels that have no class.
    """

    names: Sequence[str] = ()
    ignore_index: int | None = None

    def __post_init__(self) -> None:
        _set(self, names=() if self.names is None else self.names)
        check_options(self)
        _set(self, names=tuple(self.names))
        if len(set(self.names)) < len(self.names):
            raise ArgumentError(f"expected different names of classes; found {shown(self.names)}. Rename some.")


Task: TypeAlias = "Literal['auto', 'regression', 'classification'] | Classification"


@dataclass(frozen=True)
class Plan:
    """All that one calibration was asked for; `calibrate` says what each is."""

    method: Method
    task: Literal["auto", "regression", "classification"] | Classification = "regression"
    reference: Any = None
    readout: Readout = None
    sites: Sites | Select = None
    target: Transform | None = None
    intervals: Literal["student", "gaussian", "isotonic"] | None = None
    per_output: bool | None = None
    row_weights: Any = None
    batches: Batches = field(default_factory=Batches)
    engine: Engine = "auto"
    progress: bool = True
    columns: Names | None = None  # of the data, where it has any

    def __post_init__(self) -> None:
        _set(self, method=checked_method(self.method), target=checked_transform(self.target))
        task = Classification() if isinstance(self.task, str) and self.task == "classification" else self.task
        _set(self, task=task)
        if not isinstance(task, Classification) and not (isinstance(task, str) and task in ("auto", "regression")):
            raise ArgumentError(
                "expected task to be 'auto', 'regression', 'classification' or Classification(names, ...); found "
                f"{shown(task)}. Leave it out to let the targets tell."
            )
        check_options(self, "latedrop.calibrate")
        terms = isinstance(self.method, Terms)
        if self.intervals is None and not isinstance(self.task, Classification):
            _set(self, intervals="student" if terms else "gaussian")
        if self.intervals == "student" and not terms:
            raise ArgumentError(
                f"expected intervals='student' with method=Terms(...), the default; found "
                f"{type(self.method).__name__}. Pass intervals='isotonic', or call conformal() with other rows."
            )
        if not isinstance(self.batches, Batches):
            raise ArgumentError(f"expected batches=Batches(size, unpack, collate); found {self.batches!r}.")
        if isinstance(self.sites, (list, tuple)) and any(isinstance(site, Site) for site in self.sites):
            _set(self, sites=Sites(self.sites))
        if self.intervals == "isotonic" and self.row_weights is not None:
            raise ArgumentError(
                "expected other intervals than 'isotonic' with row_weights=, as its ranks count every row alike; found "
                "both. Leave one out, or call conformal() with other rows."
            )

    def for_numbers(self) -> Plan:
        """Return the plan of a regression; `ArgumentError` where the method would not look at the reference rows."""
        if self.reference is not None and not isinstance(self.method, Terms):
            raise ArgumentError(
                f"expected reference= with method=Terms(...), the default; found it with {type(self.method).__name__}, "
                "which does not look at it."
            )
        return self

    def for_classes(self, task: Classification) -> Plan:
        """Return the plan for classes; `ArgumentError` where an option has no meaning for them."""
        kind, advice = type(self.method), "Numbers that are no classes are task='regression'."
        wrong = [name for name in ("target", "row_weights", "per_output") if getattr(self, name) is not None]
        wrong += ["intervals"] if self.intervals == "isotonic" else []
        if wrong:
            raise ArgumentError(
                f"expected options that classes have; found {', '.join(f'{name}=' for name in wrong)}. {advice}"
            )
        unused = {Sampling: ("criterion", "mean", "floor", "scale", "shared"), Terms: ("mean",)}
        wrong = [f"{name}=" for name in unused.get(kind, ()) if getattr(self.method, name) != getattr(kind, name)]
        if wrong or kind not in unused:
            raise ArgumentError(
                "expected method=Terms(...), the default, or Sampling(rates, draws) for classes; found "
                f"{kind.__name__}({', '.join(wrong)}). {advice}"
            )
        return replace(self, task=task)

    @property
    def has_floor(self) -> bool:
        """Return True if a constant is fitted beside a scaled variance."""
        return not isinstance(self.method, Terms) and self.method.floor

    @cached_property
    def counted(self) -> Tensor | None:
        """Return the weight of every row, those of weight 0 among them; None where all count the same."""
        if self.row_weights is None:
            return None
        weights = checked_weights(self.row_weights, len(self.row_weights))
        return None if bool((weights == weights[0]).all()) else weights

    def check_weights(self, rows: int) -> None:
        """Raise `DataError` unless there is a weight for each of the rows that were read, and two of them count."""
        if self.row_weights is not None:
            weights = checked_weights(self.row_weights, rows)
            if int((weights > 0).sum()) < 2:
                raise DataError(f"expected a weight above 0 for at least 2 validation rows; found one among {rows}.")

    @cached_property
    def weights(self) -> Tensor | None:
        """Return the weights of rows whose weight is above 0, with mean 1; None where all count the same."""
        if self.counted is None:
            return None
        counting = self.counted[self.counted > 0]
        return None if bool((counting == counting[0]).all()) else counting / counting.mean()

    def has_outputs(self, shape: Sequence[int]) -> bool:
        """Return True if each index of axis 1 of outputs `(N, ...)` of this shape has its own scale."""
        wanted = len(shape) != 3 if self.per_output is None else self.per_output
        return wanted and len(shape) > 1 and shape[1] > 1


def _set(options: Any, **values: Any) -> None:
    """Fill in fields of a frozen object while it is made."""
    for name, value in values.items():
        object.__setattr__(options, name, value)


def _checked_rates(rates: Any) -> tuple[Rate, ...] | None:
    """Return rates as a tuple; `ArgumentError` unless each is inside (0, 1), or maps names to such numbers."""
    if rates is None:
        return None
    if isinstance(rates, (Real, Mapping)):
        rates = [rates]
    if isinstance(rates, str) or not isinstance(rates, Iterable):
        raise ArgumentError(f"expected a sequence of rates; found {shown(rates)}.")
    checked: list[Rate] = []
    for rate in rates:
        named = rate if isinstance(rate, Mapping) else {"": rate}
        try:
            values = {name: math.nan if isinstance(v, (bool, str)) else float(v) for name, v in named.items()}
        except (TypeError, ValueError, OverflowError):
            values = {}
        usable = all(isinstance(name, str) and 0 <= value < 1 for name, value in values.items())
        if not usable or not any(values.values()):
            raise ArgumentError(f"expected rates inside (0, 1), or mappings of names to them; found {shown(rate)}.")
        checked.append(values if isinstance(rate, Mapping) else values[""])
    if not checked:
        raise ArgumentError("expected at least one rate; found none.")
    return tuple(checked)

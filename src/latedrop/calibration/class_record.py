"""A calibrated classifier: its record, its score on left-out rows (the verdict), its sets and its rule of rejection.

Sets come from rows used for nothing else: each gives the score of its true class, how little it was expected. A set at
level `a` holds the classes whose scores are at most the `ceil((n + 1) a)`-th smallest; with exchangeable rows it holds
the label with probability `a` at least (Vovk et al. 2005). Scores of a class with probability p, and P the sum over the
classes that are likelier:

    LAC   1 - p                                         (Sadinle, Lei, Wasserman 2019): the smallest sets
    APS   P + u p,  u uniform                           (Romano, Sesia, Candes 2020): even coverage of hard rows
    RAPS  APS + penalty · max(0, rank - free)           (Angelopoulos et al. 2021): no long tails
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from latedrop.calibration.cross_validation import Candidate
from latedrop.calibration.fit_classes import ALONE, ClassFit
from latedrop.calibration.fitted_terms import compared
from latedrop.calibration.guard import Guard
from latedrop.calibration.record import Columns
from latedrop.calibration.seen import Sketch
from latedrop.calibration.verdict import said_of_rows
from latedrop.errors import ArgumentError, DataError
from latedrop.metrics.levels import checked_level
from latedrop.network.sites import StoredSites
from latedrop.quantiles import conformal_score
from latedrop.records import Format, Infinite, Limits, Tagged, match, record
from latedrop.stored_tensors import inline
from latedrop.terms import BatchContext, GradientLeverage, Leverage
from latedrop.terms.features import Features

__all__ = [
    *("CLASSES", "ClassCalibration", "ClassSets", "ClassVerdict", "Rejection", "Score", "rejection", "scores_of"),
]

_BINS = 15  # of the calibration error
Score = Literal["lac", "aps", "raps"]
Probability: TypeAlias = Annotated[float, Limits(0, 1)]
_PENALTY, _FREE = 0.01, 5
_THRESHOLDS = tuple(1 - 10 ** (-step / 40) for step in range(240, -1, -1))
"""Thresholds of the confidence, from 1 - 1e-6 to 0; fixed, as tests of thresholds chosen by the rows would not hold."""
_FIRST = 5
_Kind: TypeAlias = Annotated[Leverage | GradientLeverage, Tagged("name")]


@record
@dataclass(frozen=True)
class ClassVerdict:
    """Score class probabilities on rows that they were not fitted to.

    Attributes:
        rows: number of rows, or of pixels.
        fitted: how rows of the fit and rows of the score were separated: `"cross-validation"` or `"other rows"`.
        gain: NLL of one temperature for all rows minus `nll`, in nats per row; above 0 is better.
        gain_error: standard error of `gain`.
        nll: mean negative log-likelihood of the labels, in nats per row.
        accuracy: share of rows whose label is the most likely class.
        ece: expected calibration error with 15 bins of equal mass.
        unit: the unit of `rows`, `"rows"` or `"pixels"`.
    """

    rows: Annotated[int, Limits(1)]
    fitted: str
    gain: float
    gain_error: Annotated[float, Limits(0)]
    nll: float
    accuracy: Annotated[float, Limits(0, 1)]
    ece: Annotated[float, Limits(0, 1)]
    unit: str = "rows"

    @property
    def better(self) -> bool | None:
        """Return True if better than one temperature, False if worse, None if within two standard errors of it."""
        return None if abs(self.gain) <= 2 * self.gain_error else self.gain > 0

    @property
    def ece_by_chance(self) -> float:
        """Return the calibration error that exact probabilities stay below in 19 of 20 samples of so many rows.

        In a bin of n rows the share of right ones is off by `sqrt(2 a (1 - a) / (pi n))` on average at most, with `a`
        the accuracy; the mean over bins has a standard deviation of 0.76 of that, divided by the root of their number.
        """
        mean = math.sqrt(2 / math.pi * self.accuracy * (1 - self.accuracy) * _BINS / self.rows)
        return mean * (1 + 1.645 * 0.76 / math.sqrt(_BINS))

    def __str__(self) -> str:
        if self.better is None:
            worth = f"no better than one temperature ({self.gain:+.4f} ± {self.gain_error:.4f} nats)"
        else:
            way = "better" if self.better else "worse"
            worth = f"{way} than one temperature by {abs(self.gain):.4f} nats (± {self.gain_error:.4f})"
        error = f"calibration error {self.ece:.1%} (by chance up to {self.ece_by_chance:.1%})"
        rows = f"{self.rows} {self.unit} {said_of_rows(self.fitted)}"
        return f"{worth}; NLL {self.nll:.4f}, accuracy {self.accuracy:.1%}, {error} on {rows}"


@record
@dataclass(frozen=True)
class ClassSets:
    """Makes sets from the sorted scores of the true classes of rows used for nothing else.

    Attributes:
        score: which one.
        scores: one list, or one for each class.
    """

    score: Score
    scores: tuple[tuple[Annotated[float, Limits(-10, 1e6)], ...], ...]

    def checked(self) -> ClassSets:
        """Check the order of the scores after reading."""
        for i, part in enumerate(self.scores):
            match(list(part) == sorted(part), f"scores[{i}]", "scores in rising order", part)
        return self

    @classmethod
    def fit(cls, probabilities: Tensor, labels: Tensor, score: Score, *, per_class: bool) -> ClassSets:
        """Store the scores of the true classes, from probabilities `(N, K)` and labels."""
        if score not in get_args(Score):
            raise ArgumentError(f"expected a score of {', '.join(get_args(Score))}; found {score!r}.")
        true_scores = scores_of(probabilities, score).gather(1, labels[:, None])[:, 0]
        parts = [true_scores[labels == k] for k in range(probabilities.shape[1])] if per_class else [true_scores]
        absent = [str(k) for k, part in enumerate(parts) if per_class and not len(part)]
        if absent:
            raise DataError(
                f"expected rows of every class for sets per class; found none of class {', '.join(absent)}. Pass more "
                "rows to conformal(), or ask for sets of all classes together."
            )
        return cls(score, tuple(tuple(part.sort().values.tolist()) for part in parts))

    def members(self, probabilities: Tensor, level: float) -> Tensor:
        """Return `(N, K)`, True for the classes of each set."""
        level = checked_level(level)
        remedy = "Pass more rows to conformal(), or ask for a lower level."
        words = ", of each class where sets are per class, for sets", remedy
        limits = [conformal_score(scores, level, -math.inf, *words) for scores in self.scores]
        return scores_of(probabilities, self.score).cpu() <= torch.tensor(limits, dtype=torch.float64)


@record
@dataclass(frozen=True)
class Rejection:
    """A rule: keep a row where its confidence is at least the threshold.

    Attributes:
        threshold: of the confidence; infinite where no row may be kept.
        risk: what the error rate of kept rows stays below.
        confidence: the probability, over the rows that the rule was made from, that it does.
        kept: the share of these rows that it keeps.
        errors: the error rate of those.
        rows: how many rows it was made from.
    """

    threshold: Annotated[float, Limits(0, 1), Infinite()]
    risk: Probability
    confidence: Probability
    kept: Probability
    errors: Probability
    rows: Annotated[int, Limits(1)]

    def __str__(self) -> str:
        if self.kept == 0:
            return f"no row can be kept: no threshold has errors below {self.risk:.1%} on {self.rows} rows"
        return (
            f"keep rows of confidence {self.threshold:.4f} and more: {self.kept:.1%} of {self.rows} rows, "
            f"{self.errors:.2%} of them wrong; with probability {self.confidence:.0%} it is less than {self.risk:.1%} "
            "of all rows like these"
        )


@record
@dataclass(frozen=True)
class ClassCalibration:
    """Hold everything that a calibrated classifier needs besides the model; frozen, and stored as JSON.

    Attributes:
        classes: number of classes.
        names: class names in the order of the logits; empty if the classes have none.
        binary: whether the model has one logit for two classes.
        fit: the fitted temperature, which turns logits into probabilities.
        alone: the temperature of the baseline, one for all rows.
        rate: dropout rate of the draws whose softmax is averaged; None: no draws are run.
        draws, seed: number and seed of these draws.
        sites: where dropout is applied.
        features: sites whose activations the leverage reads; None: no leverage is used.
        terms: leverage terms that detect novel rows, already fitted to the reference rows.
        guard: limits of these terms; beyond them probabilities get flatter. None: novel rows cannot be detected.
        reference_rows: number of reference rows; 0 if the validation rows were used instead.
        rows: number of validation rows, or of images.
        choice: name of the candidate in use.
        candidates: all candidates that were compared.
        verdict: score on left-out rows.
        readout: name or index of the part of the raw output that holds the logits; None for all of it or a function.
        custom_readout: name of the readout function, which a file cannot hold.
        fingerprint: hash of the weights.
        sets: thresholds of the prediction sets; None before `conformal`.
        rule: which rows are answered and which rejected; None before `reject`.
        columns: names of the input and label columns of tables; None for arrays.
        maps: True for segmentation, where each pixel has a class.
        ignore_index: label of pixels without a class; None if all have one.
        seen: hashes of the validation rows, see `calibration.seen`; empty for maps and in files of earlier versions.
    """

    classes: Annotated[int, Limits(2)]
    names: tuple[str, ...]
    binary: bool
    fit: ClassFit
    alone: Annotated[float, Limits(1e-30, 1e30)]
    rate: Annotated[float, Limits(1e-12, 1 - 1e-12)] | None
    draws: Annotated[int, Limits(0)]
    seed: int
    sites: StoredSites
    features: Features | None
    terms: tuple[_Kind, ...]
    guard: Guard | None
    reference_rows: Annotated[int, Limits(0)]
    rows: Annotated[int, Limits(2)]
    choice: str
    candidates: Annotated[tuple[Candidate, ...], Limits(1)]
    verdict: ClassVerdict
    readout: str | int | None
    custom_readout: str | None
    fingerprint: str
    sets: ClassSets | None = None
    rule: Rejection | None = None
    columns: Columns | None = None
    maps: bool = False
    ignore_index: int | None = None
    seen: Sketch = ""

    def checked(self) -> ClassCalibration:
        """Check names and lengths against each other after reading."""
        sites, classes = [site.name for site in self.sites], self.classes
        match(len(self.names) in (0, classes), "names", f"{classes} names, or none", self.names)
        looked = () if self.features is None else self.features.sites
        match(set(looked) <= set(sites), "features.sites", f"some of the sites {sites}", looked)
        match(bool(looked) or self.guard is None, "features", "the sites that the leverage looks at", None)
        names, guard = tuple(term.name for term in self.terms), () if self.guard is None else self.guard.terms
        match(names == guard, "guard.terms", f"the names of terms {names}", guard)
        for term in self.terms:
            match(term.root is not None, "terms", f"all that {term.name} has learned", None)
        match(self.rate is None or self.draws >= 2, "draws", "how many draws are averaged, 2 or more", self.draws)
        match(self.choice in [c.name for c in self.candidates], "choice", "the name of a candidate", self.choice)
        if self.sets is not None:
            lists = len(self.sets.scores)
            match(lists in (1, classes), "sets.scores", f"one list, or {classes}", f"{lists} lists")
        return self

    @property
    def known_names(self) -> tuple[str, ...]:
        """Return the class names, or the class numbers as text if there are no names."""
        return self.names or tuple(map(str, range(self.classes)))

    def novelty(self, rows: BatchContext) -> Tensor | None:
        """Return the novelty of rows, `(N,)`; None without a guard."""
        return None if self.guard is None else self.guard.novelty(rows, {term.name: term for term in self.terms})

    def to_json(self, tensor: Callable[[Tensor], Any] = inline) -> str:
        """Return readable JSON with a checksum over its content; see `Calibration.to_json`."""
        return CLASSES.to_json(self, tensor)

    @classmethod
    def from_json(cls, content: str) -> ClassCalibration:
        """Read the JSON of `to_json`; raise `DataError` if it is damaged, edited or in another format."""
        return CLASSES.from_json(content)

    def __repr__(self) -> str:
        return f"ClassCalibration of {self.classes} classes by {self.choice}, {self.rows} validation rows"

    def __str__(self) -> str:
        fit = self.fit
        follows = "" if fit.slope is None else f", growing with leverage (exponent {fit.slope:.2f} inside, 1 beyond)"
        lines = [str(self.verdict), f"{self.choice}: temperature {fit.temperature:.3f}{follows}"]
        return "\n".join([*lines, *compared(self.candidates, self.choice, ALONE)])


CLASSES = Format(
    ClassCalibration, "latedrop-classes", "a calibration of a classifier", "Calibrate again.", "calibration"
)


def scores_of(probabilities: Tensor, score: Score) -> Tensor:
    """Return the score of every class, `(N, K)`; the random numbers of APS come from a row's rounded probabilities."""
    p = probabilities.double()
    if score == "lac":
        return 1 - p
    order = p.argsort(dim=1, descending=True, stable=True)
    rank = order.argsort(1)
    sums = p.gather(1, order).cumsum(1).gather(1, rank)  # up to the class itself, and with it
    # The same in every batch, up to rounding: three digits of the probabilities give the number.
    digits = (p * 1000).round()
    mixed = (digits * torch.arange(1, p.shape[1] + 1, dtype=p.dtype, device=p.device)).sum(1)
    uniform = (mixed.sin() * 43758.5453).frac().abs()
    scores = sums - p + uniform[:, None] * p
    return scores if score == "aps" else scores + _PENALTY * (rank + 1 - _FREE).clamp_min(0)


def rejection(confidence: Tensor, correct: Tensor, risk: float, probability: float) -> Rejection:
    """Return the most lenient threshold whose error rate is below `risk` with a given probability.

    Thresholds are tested one after the other, from the strictest on, each by the exact binomial test that Clopper and
    Pearson's bound is made of; the first that fails ends it, so that the chance of any wrong one among those that
    passed is at most `1 - probability` (fixed sequence testing, as in Angelopoulos et al. 2021, "Learn then Test").
    """
    if not all(isinstance(share, (int, float)) and 0 < share < 1 for share in (risk, probability)):
        raise ArgumentError(f"expected a risk and a confidence inside (0, 1); found {risk!r} and {probability!r}.")
    n = len(confidence)
    if n == 0:
        raise DataError("expected rows to find a threshold on; found none.")
    sure, wrong = confidence.double(), ~correct
    # With m rows and no error (1 - risk)^m must be small enough. The first test gets more rows, as one chance error
    # among few would end it all.
    least = max(math.ceil(math.log(1 - probability) / math.log(1 - risk)), min(math.ceil(_FIRST / risk), n // 4))
    rule = Rejection(math.inf, risk, probability, 0.0, 0.0, n)
    for threshold in _THRESHOLDS:
        keep = sure >= threshold
        rows, errors = int(keep.sum()), int(wrong[keep].sum())
        if rows < least:
            continue
        if at_most(errors, rows, risk) > 1 - probability:  # so few errors would be no surprise at this risk
            break
        rule = Rejection(threshold, risk, probability, rows / n, errors / rows, n)
    return rule


def at_most(errors: int, rows: int, rate: float) -> float:
    """Return the probability of at most so many errors among so many rows."""
    from scipy.stats import binom

    return float(binom.cdf(errors, rows, rate))

"""What the paper claims of the UCI sets, and what we do, decided from the numbers; and what is true by algebra.

An effect is one number for each split, paired. Where it needs a best rate, the validation rows of the split choose it:
the least of 15 noisy test numbers would be too low by itself.

The last questions are why embedded dropout trades off by itself, which the paper leaves open. A network trained with
dropout paid, row by row, for the variance of its masks: the expected training loss is `e^2 + variance`. Its errors
may then follow that variance: the rank correlation of squared error and variance, and the share of the fitted variance
that is a floor, tell. Or the network may only keep the variance small, the more so the larger the rate is: the scale
that validation rows ask for, `mean(e^2 / variance)`, tells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from studies.claims import Claim, Effect, Record, Theorem, Values, claims_section, decide, theorem_table
from studies.pages import Results, counted

Measure: TypeAlias = Callable[[Record], Effect | None]

LARGE = 0.25
"""From this rate on a rate is large."""


def overlap(record: Mapping[str, Any]) -> float:
    """Return test rows for each training row: how much splits share, for `split_error`."""
    return float(record["rows"]["test"] / record["rows"]["train"])


def curves(record: Record, kind: str, measure: str, part: str = "test") -> Values:
    """A measure of every rate and split, `(rates, splits)`."""
    return np.array(record[kind][part][measure])


def deeper(record: Record) -> Record | None:
    """The record of the networks with three hidden layers, in the form of that of one; None where it has no curves."""
    return {**record, **record["deep"]} if {"injected", "embedded"} <= set(record["deep"]) else None


def best_rates(record: Record, kind: str, measure: str) -> Values:
    """The place of the rate of the least measure on the validation rows, split by split; the first of equal ones."""
    found: Values = curves(record, kind, measure, "validation").argmin(0)
    return found


def at_rates(values: Values, places: Values) -> Values:
    """One rate for each split, `(splits,)`."""
    found: Values = values[places, np.arange(values.shape[1])]
    return found


def of_splits(record: Record, values: Values) -> Effect:
    """The mean of splits that share rows."""
    return Effect.mean(values, overlap(record))


def growth(record: Record, kind: str = "embedded") -> Effect:
    """RMSE at the largest rate over that at the smallest, minus 1."""
    rmse = curves(record, kind, "rmse")
    return of_splits(record, rmse[-1] / rmse[0] - 1)


def concordance(record: Record) -> Effect:
    """Of all pairs of rates, the share whose larger one has the larger embedded RMSE."""
    rmse = curves(record, "embedded", "rmse")
    first, second = np.triu_indices(len(rmse), 1)
    return of_splits(record, (rmse[second] > rmse[first]).mean(0))


def worse_than_best(place: int) -> Measure:
    """Embedded RMSE at the rate at a place over that at the rate of the least RMSE, minus 1."""

    def effect(record: Record) -> Effect:
        rmse = curves(record, "embedded", "rmse")
        return of_splits(record, rmse[place] / at_rates(rmse, best_rates(record, "embedded", "rmse")) - 1)

    return effect


def large_rates(record: Record) -> Effect:
    """Injected over embedded RMSE, minus 1, mean over the large rates."""
    injected, embedded = (curves(record, kind, "rmse")[_large(record)] for kind in ("injected", "embedded"))
    return of_splits(record, (injected / embedded - 1).mean(0))


def ruin(kind: str, measure: str) -> Measure:
    """How much larger an NLL is at the smallest rate than at the rate where it is least."""

    def effect(record: Record) -> Effect:
        nll = curves(record, kind, measure)
        return of_splits(record, nll[0] - at_rates(nll, best_rates(record, kind, measure)))

    return effect


def swing(kind: str, measure: str) -> Measure:
    """Largest minus smallest over the rates, in each split."""
    return lambda record: of_splits(record, np.ptp(curves(record, kind, measure), axis=0))


def mean_difference(first: tuple[str, str], second: tuple[str, str]) -> Measure:
    """Difference of two (kind, measure), mean over all rates."""
    return lambda record: of_splits(record, (curves(record, *first) - curves(record, *second)).mean(0))


def scaling_apart(record: Record) -> Effect:
    """What scaling takes off the injected NLL minus what it takes off the embedded one, mean over all rates."""
    gains = [curves(record, kind, "nll_unscaled") - curves(record, kind, "nll_scaled") for kind in _KINDS]
    return of_splits(record, (gains[0] - gains[1]).mean(0))


def gain_apart(record: Record) -> Effect | None:
    """The same, each of the four at the rate that its own validation NLL chooses."""
    methods = record["methods"]
    gains = [_method(methods, f"{kind}, raw", "nll") - _method(methods, f"{kind}, scaled", "nll") for kind in _KINDS]
    return of_splits(record, gains[0] - gains[1])


def difference(first: str, second: str, measure: str = "nll", *, deep: bool = False) -> Measure:
    """Of two methods; None where one of them is not in the results."""

    def effect(record: Record) -> Effect | None:
        methods = record["deep"]["methods"] if deep else record["methods"]
        if not {first, second} <= set(methods):
            return None
        return of_splits(record, _method(methods, first, measure) - _method(methods, second, measure))

    return effect


_KINDS = ("injected", "embedded")


def _large(record: Record) -> list[int]:
    """The places of the large rates; of the largest where none is."""
    found = [place for place, rate in enumerate(record["rates"]) if rate >= LARGE]
    return found or [len(record["rates"]) - 1]


def _method(methods: Record, method: str, measure: str) -> Values:
    return np.array(methods[method][measure])


DEEP = "Three hidden layers: "
"""How claims about the deeper networks begin."""

_NOT_WORSE = 0.02
"""Nats that count as not worse."""
_AT = 0.01
"""Miscalibration area that counts as equal."""


def _flat(*measures: str) -> Callable[[Record], float | None]:
    """The largest change over the rates of injected measures of the test rows, in units of the largest value."""

    def deviation(record: Record) -> float | None:
        if record["settings"]["draws"] is not None:
            return None
        values = [curves(record, "injected", measure) for measure in measures]
        return max(float((np.ptp(value, axis=0) / np.abs(value).max()).max()) for value in values if value.any())

    return deviation


def _ordered(*measures: str) -> Callable[[Record], float]:
    """By how much a measure of the validation rows is above the next one, where it should not be."""

    def deviation(record: Record) -> float:
        found = [
            curves(record, kind, lower, "validation") - curves(record, kind, upper, "validation")
            for kind in ("injected", "embedded")
            for lower, upper in pairwise(measures)
        ]
        return max(0.0, *(float(off.max()) for off in found))

    return deviation


THEOREMS = (
    Theorem(
        "Injected, one hidden layer: mean, RMSE and ideal NLL do not depend on the rate",
        "the output is linear in the masked units, and a mask over 1 - rate has mean 1",
        _flat("rmse", "nll_ideal"),
    ),
    Theorem(
        "Injected, one hidden layer: scaled NLL, MA, CRPS, coverage and width do not depend on the rate",
        "Var = r v with r = rate / (1 - rate), so scale · Var = mean(e² / (r v)) · r v = mean(e² / v) · v",
        _flat(*(f"{name}_scaled" for name in ("nll", "ma", "crps", "coverage", "width"))),
    ),
    Theorem(
        "Injected, one hidden layer: the same holds with a floor",
        "the fit of a · r v + b over a and b reaches the same variances whatever r > 0 is",
        _flat(*(f"{name}_floor" for name in ("nll", "ma", "crps", "coverage", "width"))),
    ),
    Theorem(
        "On the validation rows the scaled NLL is at most the unscaled one",
        "scale 1 is one of the scales among which the least NLL was taken",
        _ordered("nll_scaled", "nll_unscaled"),
    ),
    Theorem(
        "On the validation rows the NLL with a floor is at most the scaled one",
        "a floor of 0 is one of the floors among which the least NLL was taken",
        _ordered("nll_floor", "nll_scaled"),
    ),
    Theorem(
        "The ideal NLL is at most that of any variance",
        "e² / v + log v is least at v = e², row by row",
        _ordered("nll_ideal", "nll_floor"),
    ),
)

_PAPER = (
    Claim(
        "Embedded: the RMSE grows with the rate",
        "RMSE at the largest rate over that at the smallest, minus 1", growth, above=0.0,
    ),
    Claim(
        "Embedded: the RMSE grows with the rate over the whole range",
        "of all pairs of rates, the share whose larger one has the larger RMSE", concordance, above=0.9,
    ),
    Claim(
        "Embedded: the RMSE does not fall before it rises",
        "RMSE at the smallest rate over that at the rate of least RMSE, minus 1", worse_than_best(0), below=0.01,
    ),
    Claim(
        "Embedded: after its minimum the RMSE rises",
        "RMSE at the largest rate over that at the rate of least RMSE, minus 1", worse_than_best(-1), above=0.0,
    ),
    Claim(
        "At large rates the injected RMSE is below the embedded one",
        f"injected over embedded RMSE, minus 1, mean over the rates from {LARGE:g} on", large_rates, below=0.0,
    ),
    Claim(
        "Injected: at the smallest rate the unscaled NLL is ruined",
        "unscaled NLL at the smallest rate minus that at the best rate", ruin("injected", "nll_unscaled"), above=1.0,
    ),
    Claim(
        "Embedded: at the smallest rate the unscaled NLL is ruined",
        "unscaled NLL at the smallest rate minus that at the best rate", ruin("embedded", "nll_unscaled"), above=1.0,
    ),
    Claim(
        "Embedded: at the smallest rate the RMSE is fine",
        "RMSE at the smallest rate over that at the rate of least RMSE, minus 1", worse_than_best(0), below=0.05,
    ),
    Claim(
        "Embedded: at the smallest rate the scaled NLL is not ruined",
        "scaled NLL at the smallest rate minus that at the best rate", ruin("embedded", "nll_scaled"), below=0.1,
    ),
    Claim(
        "Injected: the unscaled MA swings with the rate",
        "largest minus smallest unscaled MA over the rates", swing("injected", "ma_unscaled"), above=0.1,
    ),
    Claim(
        "Embedded: the unscaled MA swings with the rate",
        "largest minus smallest unscaled MA over the rates", swing("embedded", "ma_unscaled"), above=0.1,
    ),
    Claim(
        "Embedded: the scaled MA does not swing",
        "largest minus smallest scaled MA over the rates", swing("embedded", "ma_scaled"), below=0.1,
    ),
    Claim(
        "Embedded: the unscaled MA is at or below the scaled one",
        "unscaled minus scaled MA, mean over all rates",
        mean_difference(("embedded", "ma_unscaled"), ("embedded", "ma_scaled")), below=_AT,
    ),
    Claim(
        "Embedded: the unscaled MA is at or below the scaled one, each at the rate that validation chooses",
        "unscaled minus scaled MA", difference("embedded, raw", "embedded, scaled", "ma"), below=_AT,
    ),
    Claim(
        "The ideal NLL of injection is below that of embedded dropout",
        "ideal NLL injected minus embedded, mean over all rates",
        mean_difference(("injected", "nll_ideal"), ("embedded", "nll_ideal")), below=0.0,
    ),
    Claim(
        "Scaling helps injected dropout more than embedded dropout, over all rates",
        "NLL unscaled minus scaled, injected minus embedded, mean over all rates", scaling_apart, above=0.0,
    ),
    Claim(
        "Scaling helps injected dropout more than embedded dropout, at the rates that validation chooses",
        "NLL unscaled minus scaled, injected minus embedded, each at its own rate", gain_apart, above=0.0,
    ),
    Claim(
        "Injection, scaled, is not worse than embedded dropout, scaled, at the rate that validation chooses",
        "NLL injected minus embedded", difference("injected, scaled", "embedded, scaled"), below=_NOT_WORSE,
    ),
    Claim(
        "The relaxed scale lowers the MA of injected dropout",
        "MA relaxed minus scaled", difference("injected, relaxed", "injected, scaled", "ma"), below=0.0,
        source="paper, on crowds",
    ),
    Claim(
        "The relaxed scale costs little NLL",
        "NLL relaxed minus scaled", difference("injected, relaxed", "injected, scaled"), below=0.1,
        source="paper, on crowds",
    ),
)  # fmt: skip


def _beats(text: str, first: str, second: str, *, deep: bool, below: float = 0.0) -> Claim:
    """A claim of ours: the NLL of one method is below that of another."""
    text = f"{DEEP}{text}" if deep else f"{text[0].upper()}{text[1:]}"
    measure = difference(first, second, deep=deep)
    return Claim(text, f"NLL of `{first}` minus `{second}`", measure, below=below, source="us")


def _ours(*, deep: bool) -> tuple[Claim, ...]:
    """The same questions of both depths."""
    rivals = {
        "embedded dropout": "embedded",
        "concrete dropout": "concrete",
        "last-layer Laplace": "laplace",
        "the variance of five networks on the mean of one": "ensemble variance",
        "SWAG": "swag",
    }
    better = {
        "an ensemble of five": "ensemble",
        "a Gaussian head": "gaussian",
        "an ensemble of five Gaussian heads": "gaussian ensemble",
    }
    claims = [
        _beats("scaling lowers the NLL of injected dropout", "injected, scaled", "injected, raw", deep=deep),
        _beats("scaling lowers the NLL of embedded dropout", "embedded, scaled", "embedded, raw", deep=deep),
        _beats("injection, scaled, beats a constant variance", "injected, scaled", "constant", deep=deep),
        _beats("a floor improves on scaled injection", "injected, floor", "injected, scaled", deep=deep),
        _beats("a floor improves on scaled embedded dropout", "embedded, floor", "embedded, scaled", deep=deep),
        _beats("injection with floor beats a constant variance", "injected, floor", "constant", deep=deep),
        *(
            _beats(
                f"injection with floor is not worse than {words} with floor", "injected, floor", f"{name}, floor",
                deep=deep, below=_NOT_WORSE,
            )
            for words, name in rivals.items()
        ),
        *(
            _beats(f"{words} with floor beats injection with floor", f"{name}, floor", "injected, floor", deep=deep)
            for words, name in better.items()
        ),
        _beats("Rate-In, scaled, beats injection, scaled", "rate-in, scaled", "injected, scaled", deep=deep),
        _beats("Rate-In with floor beats injection with floor", "rate-in, floor", "injected, floor", deep=deep),
        _beats("the default of `calibrate` beats a constant variance", "default", "constant", deep=deep),
        _beats("the default of `calibrate` beats injection with floor", "default", "injected, floor", deep=deep),
        _beats(
            "with training inputs as reference the default beats injection with floor",
            "default + reference", "injected, floor", deep=deep,
        ),
    ]  # fmt: skip
    if deep:
        own = "injected per site, floor"
        claims += [
            _beats("rates per site with floor beat a constant variance", own, "constant", deep=True),
            _beats("rates per site with floor beat one rate with floor", own, "injected, floor", deep=True),
            _beats(
                "rates per site with floor are not worse than embedded dropout with floor",
                own, "embedded, floor", deep=True, below=_NOT_WORSE,
            ),
        ]  # fmt: skip
    return tuple(claims)


def _deeper(claim: Claim) -> Claim:
    """The same of the networks with three hidden layers, where injection is not flat by algebra."""

    def measure(record: Record) -> Effect | None:
        deep = deeper(record)
        return None if deep is None else claim.measure(deep)

    text = f"{DEEP}{claim.text[0].lower()}{claim.text[1:]}"
    return replace(claim, text=text, measure=measure, source=f"{claim.source}, deeper")


def _flatness() -> tuple[Claim, ...]:
    """What is a theorem with one hidden layer and a question with three."""
    return (
        Claim(
            f"{DEEP}the injected RMSE does not grow with the rate",
            "injected RMSE at the largest rate over that at the smallest, minus 1",
            lambda record: None if (deep := deeper(record)) is None else growth(deep, "injected"),
            below=0.01,
            source="paper, deeper",
        ),
        Claim(
            f"{DEEP}the scaled NLL of injection does not depend on the rate",
            "largest minus smallest scaled NLL over the rates, injected",
            lambda record: None if (deep := deeper(record)) is None else swing("injected", "nll_scaled")(deep),
            below=0.1,
            source="paper, deeper",
        ),
    )


def _apart(measure: str) -> Callable[[Record], Effect]:
    """Embedded minus injected, each at the rate of its least unscaled validation NLL."""

    def effect(record: Record) -> Effect:
        return of_splits(record, at_best(record, "embedded", measure) - at_best(record, "injected", measure))

    return effect


def _with_rate(measure: str) -> Callable[[Record], Effect]:
    """Embedded at the largest rate minus at the smallest."""

    def effect(record: Record) -> Effect:
        values = curves(record, "embedded", measure)
        return of_splits(record, values[-1] - values[0])

    return effect


def _price(kind: str) -> Callable[[Record], Effect]:
    """What is lost without a scale: unscaled NLL at its best rate minus scaled NLL at its own."""

    def effect(record: Record) -> Effect:
        nll = [
            at_rates(curves(record, kind, f"nll_{how}"), best_rates(record, kind, f"nll_{how}"))
            for how in ("unscaled", "scaled")
        ]
        return of_splits(record, nll[0] - nll[1])

    return effect


def _shrunk(record: Record) -> Effect:
    """How much larger the scale is that embedded dropout asks for, at the largest rate, as a logarithm."""
    scales = [np.log(curves(record, kind, "scale")[-1]) for kind in ("embedded", "injected")]
    return of_splits(record, scales[0] - scales[1])


def _span(record: Record) -> Effect:
    """How far the scale moves over the rates, largest over smallest, embedded over injected, as a logarithm."""
    spans = [np.ptp(np.log(curves(record, kind, "scale")), axis=0) for kind in ("embedded", "injected")]
    return of_splits(record, spans[0] - spans[1])


def at_best(record: Record, kind: str, measure: str) -> Values:
    """A measure at the rate of the least unscaled validation NLL, `(splits,)`."""
    return at_rates(curves(record, kind, measure), best_rates(record, kind, "nll_unscaled"))


_BEST = "each at the rate of its least unscaled validation NLL"
QUESTIONS = (
    Claim(
        "Embedded dropout needs no scale at its best rate",
        "unscaled minus scaled NLL, each at its best rate, embedded", _price("embedded"), below=0.05,
    ),
    Claim(
        "Injected dropout needs no scale at its best rate",
        "unscaled minus scaled NLL, each at its best rate, injected", _price("injected"), below=0.05,
    ),
    Claim(
        "Errors follow the variance better after training with dropout",
        f"rank correlation of squared error and variance, embedded minus injected, {_BEST}", _apart("ranking"),
        above=0.0, source="us",
    ),
    Claim(
        "The larger the rate in training, the better errors follow the variance",
        "rank correlation, embedded at the largest rate minus at the smallest", _with_rate("ranking"), above=0.0,
        source="us",
    ),
    Claim(
        "Less of the variance is a floor after training with dropout",
        f"floor's share of the fitted variance, embedded minus injected, {_BEST}", _apart("floor_share"), below=0.0,
        source="us",
    ),
    Claim(
        "The larger the rate in training, the less of the variance is a floor",
        "floor's share, embedded at the largest rate minus at the smallest", _with_rate("floor_share"), below=0.0,
        source="us",
    ),
    Claim(
        "Training with dropout shrinks the variance of the masks against the error",
        "logarithm of the scale asked for at the largest rate, embedded minus injected", _shrunk, above=0.0,
        source="us",
    ),
    Claim(
        "The scale asked for depends less on the rate",
        "logarithm of the largest over the smallest scale of all rates, embedded minus injected", _span, below=0.0,
        source="us",
    ),
)  # fmt: skip


CLAIMS = {
    "The paper's claims": _PAPER,
    "The paper's claims, asked of three hidden layers": (*_flatness(), *map(_deeper, _PAPER)),
    "Ours, one hidden layer": _ours(deep=False),
    "Ours, three hidden layers": _ours(deep=True),
    "Why embedded dropout trades off by itself": QUESTIONS,
    "Why embedded dropout trades off by itself, three hidden layers": tuple(map(_deeper, QUESTIONS)),
}


def claims_page(results: Results) -> list[str]:
    """Markdown: theorems, every claim with its verdict, and the effect on every set."""
    splits = sorted({len(record["methods"]["constant"]["nll"]) for record in results.values()})
    lines = [
        "# The UCI study: what is claimed, and what we found",
        "",
        f"Generated from the JSON files beside this page: {counted(results)}, {' or '.join(map(str, splits))} splits "
        "each. NLLs are without log(2 pi)/2. All measures are of the test rows; rates, scales and floors were chosen "
        "on the validation rows, and so were the best rates of the effects below. Methods are compared like with like: "
        "as they are, scaled, or with scale and floor, on both sides. [Tables and figures](tables.md).",
        "",
        "**How a claim is decided.** An effect is a mean over splits. Splits share rows, so its standard error is that "
        "of Nadeau and Bengio (2003), with variance times 1 / splits + test rows / training rows. It is tested against "
        "the threshold with Student's t, to both sides, and the p values of all sets of a claim are corrected after "
        "Holm, so that with 95 % none of its verdicts is wrong by chance. Where p is then above 0.05, the claim is not "
        "decided on that set. Intervals are of 95 %, of one set alone. The paper's networks have one hidden layer; with "
        "three, what is algebra for injection there becomes a question. That the variance shrinks was asked of embedded "
        "dropout after the numbers were seen, all else before.",
        "",
    ]
    shares = sorted({record["settings"]["epochs"] for record in results.values()})
    if shares != [1.0]:
        lines += [
            f"**Networks were trained for {shares[0]:g} of the paper's epochs: these numbers decide nothing.**",
            "",
        ]
    lines += [
        "## True by algebra",
        "",
        "No evidence is needed for these; numbers only show that the program does what it should. Deviations are the "
        "largest over sets, splits and rates; the first three in units of the measure's largest value, the others in "
        "nats. Results are stored with six digits.",
        "",
        *theorem_table(THEOREMS, results),
        "",
    ]
    groups = {heading: [decide(claim, results) for claim in claims] for heading, claims in CLAIMS.items()}
    return [*lines, *claims_section(groups)]

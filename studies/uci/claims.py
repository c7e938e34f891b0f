"""Claims of the paper and of ours about the UCI sets, decided from the numbers; and theorems.

An effect is one number for each split, paired. Where it needs a best rate, the validation rows of the split choose it:
the least of 15 noisy test numbers would be too low by itself.

The last questions are why embedded dropout trades off by itself, which the paper leaves open. A network trained with
dropout paid, row by row, for the variance of its masks: the expected training loss is `e^2 + variance`. Its errors
may then follow that variance: the rank correlation of squared error and variance, and the share of the fitted variance
that is a floor, tell. Or the network may only keep the variance small, the more so the larger the rate is: the scale
that validation rows ask for, `mean(e^2 / variance)`, tells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from studies.claims import Claim, Effect, Record, Theorem, Values, claims_section, decide, theorem_table
from studies.pages import Results, counted, words

LARGE = 0.25
"""From this rate on a rate is large."""
DEEP = "Three hidden layers: "
"""How claims about the deeper networks begin."""
_KINDS = ("injected", "embedded")
_NOT_WORSE = 0.02  # nats
_AT = 0.01  # miscalibration areas that far apart count as equal


def overlap(record: Record) -> float:
    """Return test rows for each training row: how much splits share, for `split_error`."""
    return float(record["rows"]["test"] / record["rows"]["train"])


def curves(record: Record, kind: str, measure: str, part: str = "test") -> Values:
    """A measure of every rate and split, `(rates, splits)`."""
    return np.array(record[kind][part][measure])


def deeper(record: Record) -> Record:
    """The record of the networks with three hidden layers, in the form of that of one."""
    return {**record, **record["deep"]}


def best_rates(record: Record, kind: str, measure: str) -> Values:
    """The place of the rate of the least measure on the validation rows, split by split; the first of equal ones."""
    places: Values = curves(record, kind, measure, "validation").argmin(0)
    return places


def at_best(record: Record, kind: str, measure: str, least: str = "nll_unscaled") -> Values:
    """A measure at the rate of the least validation value of another, `(splits,)`."""
    values = curves(record, kind, measure)
    chosen: Values = values[best_rates(record, kind, least), np.arange(values.shape[1])]
    return chosen


def growth(kind: str, record: Record) -> Values:
    """RMSE at the largest rate over that at the smallest, minus 1."""
    rmse = curves(record, kind, "rmse")
    return np.asarray(rmse[-1] / rmse[0] - 1)


def concordance(record: Record) -> Values:
    """Of all pairs of rates, the share whose larger one has the larger embedded RMSE."""
    rmse = curves(record, "embedded", "rmse")
    first, second = np.triu_indices(len(rmse), 1)
    share: Values = (rmse[second] > rmse[first]).mean(0)
    return share


def worse_than_best(place: int, record: Record) -> Values:
    """Embedded RMSE at the rate at a place over that at the rate of the least RMSE, minus 1."""
    return np.asarray(curves(record, "embedded", "rmse")[place] / at_best(record, "embedded", "rmse", "rmse") - 1)


def large_rates(record: Record) -> Values:
    """Injected over embedded RMSE, minus 1, mean over the large rates; over the largest where none is large."""
    places = [place for place, rate in enumerate(record["rates"]) if rate >= LARGE] or [len(record["rates"]) - 1]
    injected, embedded = (curves(record, kind, "rmse")[places] for kind in _KINDS)
    return np.asarray((injected / embedded - 1).mean(0))


def ruin(kind: str, measure: str, record: Record) -> Values:
    """How much larger an NLL is at the smallest rate than at the rate where it is least."""
    return np.asarray(curves(record, kind, measure)[0] - at_best(record, kind, measure, measure))


def swing(kind: str, measure: str, record: Record) -> Values:
    """Largest minus smallest over the rates, in each split."""
    return np.asarray(np.ptp(curves(record, kind, measure), axis=0))


def mean_difference(first: tuple[str, str], second: tuple[str, str], record: Record) -> Values:
    """Difference of two (kind, measure), mean over all rates."""
    return np.asarray((curves(record, *first) - curves(record, *second)).mean(0))


def scaling_apart(record: Record) -> Values:
    """Return the gain in NLL by scaling, injected minus embedded, mean over all rates."""
    gains = [mean_difference((kind, "nll_unscaled"), (kind, "nll_scaled"), record) for kind in _KINDS]
    return gains[0] - gains[1]


def gain_apart(record: Record) -> Values:
    """Return this gain with each of the four NLLs at the rate that its own validation NLL chooses."""
    nll = {name: np.array(each["nll"]) for name, each in record["methods"].items() if name.startswith(_KINDS)}
    gains = [nll[f"{kind}, raw"] - nll[f"{kind}, scaled"] for kind in _KINDS]
    return np.asarray(gains[0] - gains[1])


def difference(first: str, second: str, measure: str, record: Record) -> Values | None:
    """Of two methods; None where one of them is not in the results."""
    methods = record["methods"]
    if not {first, second} <= set(methods):
        return None
    return np.asarray(np.array(methods[first][measure]) - np.array(methods[second][measure]))


def apart(measure: str, record: Record) -> Values:
    """Embedded minus injected, each at the rate of its least unscaled validation NLL."""
    return at_best(record, "embedded", measure) - at_best(record, "injected", measure)


def with_rate(measure: str, record: Record) -> Values:
    """Embedded at the largest rate minus at the smallest."""
    values = curves(record, "embedded", measure)
    return np.asarray(values[-1] - values[0])


def price(kind: str, record: Record) -> Values:
    """Return the loss without a scale: unscaled NLL at its best rate minus scaled NLL at its own."""
    unscaled, scaled = (at_best(record, kind, name, name) for name in ("nll_unscaled", "nll_scaled"))
    return unscaled - scaled


def shrunk(record: Record) -> Values:
    """How much larger the scale is that embedded dropout asks for, at the largest rate, as a logarithm."""
    injected, embedded = (np.log(curves(record, kind, "scale")[-1]) for kind in _KINDS)
    return np.asarray(embedded - injected)


def span(record: Record) -> Values:
    """How far the scale moves over the rates, largest over smallest, embedded over injected, as a logarithm."""
    injected, embedded = (np.ptp(np.log(curves(record, kind, "scale")), axis=0) for kind in _KINDS)
    return np.asarray(embedded - injected)


def _claim(text: str, effect: str, measure: Callable[[Record], Values | None], **options: Any) -> Claim:
    """A claim whose effect is a mean over splits that share rows."""

    def mean(record: Record) -> Effect | None:
        values = measure(record)
        return None if values is None else Effect.mean(values, overlap(record))

    return Claim(text, effect, mean, **options)


def _deep(claims: Sequence[Claim], source: str = "{}, deeper") -> tuple[Claim, ...]:
    """Return these claims about networks with three hidden layers, where injection is not flat by algebra."""

    def measured(claim: Claim, record: Record) -> Effect | None:
        return claim.measure(deeper(record))

    def text(claim: Claim) -> str:
        words = claim.text if claim.text.startswith("Rate-In") else claim.text[0].lower() + claim.text[1:]
        return f"{DEEP}{words}"

    return tuple(
        replace(claim, text=text(claim), measure=partial(measured, claim), source=source.format(claim.source))
        for claim in claims
    )


def _flat(measures: Sequence[str], record: Record) -> float | None:
    """The largest change over the rates of injected measures of the test rows, in units of the largest value."""
    if record["settings"]["draws"] is not None:
        return None
    values = [curves(record, "injected", measure) for measure in measures]
    return max(float((np.ptp(value, axis=0) / np.abs(value).max()).max()) for value in values if value.any())


def _ordered(lower: str, upper: str, record: Record) -> float:
    """By how much a measure of the validation rows is above another, where it should not be."""
    off = [curves(record, kind, lower, "validation") - curves(record, kind, upper, "validation") for kind in _KINDS]
    return max(0.0, *(float(values.max()) for values in off))


_JUDGED = ("nll", "ma", "crps", "coverage", "width")
THEOREMS = (
    Theorem("Injected, one hidden layer: mean, RMSE and ideal NLL do not depend on the rate",
            "the output is linear in the masked units, and a mask over 1 - rate has mean 1",
            partial(_flat, ("rmse", "nll_ideal"))),
    Theorem("Injected, one hidden layer: scaled NLL, MA, CRPS, coverage and width do not depend on the rate",
            "Var = r v with r = rate / (1 - rate), so scale · Var = mean(e² / (r v)) · r v = mean(e² / v) · v",
            partial(_flat, [f"{name}_scaled" for name in _JUDGED])),
    Theorem("Injected, one hidden layer: the same holds with a floor",
            "the fit of a · r v + b over a and b reaches the same variances whatever r > 0 is",
            partial(_flat, [f"{name}_floor" for name in _JUDGED])),
    Theorem("On the validation rows the scaled NLL is at most the unscaled one",
            "scale 1 is one of the scales among which the least NLL was taken",
            partial(_ordered, "nll_scaled", "nll_unscaled")),
    Theorem("On the validation rows the NLL with a floor is at most the scaled one",
            "a floor of 0 is one of the floors among which the least NLL was taken",
            partial(_ordered, "nll_floor", "nll_scaled")),
    Theorem("The ideal NLL is at most that of any variance", "e² / v + log v is least at v = e², row by row",
            partial(_ordered, "nll_ideal", "nll_floor")),
)  # fmt: skip
_RUIN = "{} NLL at the smallest rate minus that at the best rate"
_SWING = "largest minus smallest {} over the rates"
_AGAINST_LEAST = "RMSE at the {} rate over that at the rate of least RMSE, minus 1"
_CROWDS = "paper, on crowds"
_PAPER = (
    _claim("Embedded: the RMSE grows with the rate", "RMSE at the largest rate over that at the smallest, minus 1",
           partial(growth, "embedded"), above=0.0),
    _claim("Embedded: the RMSE grows with the rate over the whole range",
           "of all pairs of rates, the share whose larger one has the larger RMSE", concordance, above=0.9),
    _claim("Embedded: the RMSE does not fall before it rises", _AGAINST_LEAST.format("smallest"),
           partial(worse_than_best, 0), below=0.01),
    _claim("Embedded: after its minimum the RMSE rises", _AGAINST_LEAST.format("largest"),
           partial(worse_than_best, -1), above=0.0),
    _claim("At large rates the injected RMSE is below the embedded one",
           f"injected over embedded RMSE, minus 1, mean over the rates from {LARGE:g} on", large_rates, below=0.0),
    _claim("Injected: at the smallest rate the unscaled NLL is ruined", _RUIN.format("unscaled"),
           partial(ruin, "injected", "nll_unscaled"), above=1.0),
    _claim("Embedded: at the smallest rate the unscaled NLL is ruined", _RUIN.format("unscaled"),
           partial(ruin, "embedded", "nll_unscaled"), above=1.0),
    _claim("Embedded: at the smallest rate the RMSE is fine", _AGAINST_LEAST.format("smallest"),
           partial(worse_than_best, 0), below=0.05),
    _claim("Embedded: at the smallest rate the scaled NLL is not ruined", _RUIN.format("scaled"),
           partial(ruin, "embedded", "nll_scaled"), below=0.1),
    _claim("Injected: the unscaled MA swings with the rate", _SWING.format("unscaled MA"),
           partial(swing, "injected", "ma_unscaled"), above=0.1),
    _claim("Embedded: the unscaled MA swings with the rate", _SWING.format("unscaled MA"),
           partial(swing, "embedded", "ma_unscaled"), above=0.1),
    _claim("Embedded: the scaled MA does not swing", _SWING.format("scaled MA"),
           partial(swing, "embedded", "ma_scaled"), below=0.1),
    _claim("Embedded: the unscaled MA is at or below the scaled one", "unscaled minus scaled MA, mean over all rates",
           partial(mean_difference, ("embedded", "ma_unscaled"), ("embedded", "ma_scaled")), below=_AT),
    _claim("Embedded: the unscaled MA is at or below the scaled one, each at the rate that validation chooses",
           "unscaled minus scaled MA", partial(difference, "embedded, raw", "embedded, scaled", "ma"), below=_AT),
    _claim("The ideal NLL of injection is below that of embedded dropout",
           "ideal NLL injected minus embedded, mean over all rates",
           partial(mean_difference, ("injected", "nll_ideal"), ("embedded", "nll_ideal")), below=0.0),
    _claim("Scaling helps injected dropout more than embedded dropout, over all rates",
           "NLL unscaled minus scaled, injected minus embedded, mean over all rates", scaling_apart, above=0.0),
    _claim("Scaling helps injected dropout more than embedded dropout, at the rates that validation chooses",
           "NLL unscaled minus scaled, injected minus embedded, each at its own rate", gain_apart, above=0.0),
    _claim("Injection, scaled, is not worse than embedded dropout, scaled, at the rate that validation chooses",
           "NLL injected minus embedded", partial(difference, "injected, scaled", "embedded, scaled", "nll"),
           below=_NOT_WORSE),
    _claim("The relaxed scale lowers the MA of injected dropout", "MA relaxed minus scaled",
           partial(difference, "injected, relaxed", "injected, scaled", "ma"), below=0.0, source=_CROWDS),
    _claim("The relaxed scale costs little NLL", "NLL relaxed minus scaled",
           partial(difference, "injected, relaxed", "injected, scaled", "nll"), below=0.1, source=_CROWDS),
)  # fmt: skip
_FLATNESS = (
    _claim("The injected RMSE does not grow with the rate",
           "injected RMSE at the largest rate over that at the smallest, minus 1", partial(growth, "injected"),
           below=0.01),
    _claim("The scaled NLL of injection does not depend on the rate", f"{_SWING.format('scaled NLL')}, injected",
           partial(swing, "injected", "nll_scaled"), below=0.1),
)  # fmt: skip


def _beats(text: str, first: str, second: str, below: float = 0.0) -> Claim:
    """A claim of ours: the NLL of one method is below that of another."""
    measure = partial(difference, first, second, "nll")
    return _claim(text, f"NLL of `{first}` minus `{second}`", measure, below=below, source="us")


_FLOOR, _SITES = "injected, floor", "injected per site, floor"
_RIVALS = {
    "embedded dropout": "embedded",
    "concrete dropout": "concrete",
    "last-layer Laplace": "laplace",
    "the variance of five networks on the mean of one": "ensemble variance",
    "SWAG": "swag",
}
_BETTER = {
    "An ensemble of five": "ensemble",
    "A Gaussian head": "gaussian",
    "An ensemble of five Gaussian heads": "gaussian ensemble",
}
_OURS = (
    _beats("Scaling lowers the NLL of injected dropout", "injected, scaled", "injected, raw"),
    _beats("Scaling lowers the NLL of embedded dropout", "embedded, scaled", "embedded, raw"),
    _beats("Injection, scaled, beats a constant variance", "injected, scaled", "constant"),
    _beats("A floor improves on scaled injection", _FLOOR, "injected, scaled"),
    _beats("A floor improves on scaled embedded dropout", "embedded, floor", "embedded, scaled"),
    _beats("Injection with floor beats a constant variance", _FLOOR, "constant"),
    *(_beats(f"Injection with floor is not worse than {words} with floor", _FLOOR, f"{name}, floor", _NOT_WORSE)
      for words, name in _RIVALS.items()),
    *(_beats(f"{words} with floor beats injection with floor", f"{name}, floor", _FLOOR)
      for words, name in _BETTER.items()),
    _beats("Rate-In, scaled, beats injection, scaled", "rate-in, scaled", "injected, scaled"),
    _beats("Rate-In with floor beats injection with floor", "rate-in, floor", _FLOOR),
    _beats("The default of `calibrate` beats a constant variance", "default", "constant"),
    _beats("The default of `calibrate` beats injection with floor", "default", _FLOOR),
    _beats("With training inputs as reference the default beats injection with floor", "default + reference", _FLOOR),
)  # fmt: skip
_PER_SITE = (
    _beats("Rates per site with floor beat a constant variance", _SITES, "constant"),
    _beats("Rates per site with floor beat one rate with floor", _SITES, _FLOOR),
    _beats("Rates per site with floor are not worse than embedded dropout with floor", _SITES, "embedded, floor",
           _NOT_WORSE),
)  # fmt: skip
_BEST = "each at the rate of its least unscaled validation NLL"
QUESTIONS = (
    *(_claim(f"{kind.capitalize()} dropout needs no scale at its best rate",
             f"unscaled minus scaled NLL, each at its best rate, {kind}", partial(price, kind), below=0.05)
      for kind in ("embedded", "injected")),
    _claim("Errors follow the variance better after training with dropout",
           f"rank correlation of squared error and variance, embedded minus injected, {_BEST}",
           partial(apart, "ranking"), above=0.0, source="us"),
    _claim("The larger the rate in training, the better errors follow the variance",
           "rank correlation, embedded at the largest rate minus at the smallest", partial(with_rate, "ranking"),
           above=0.0, source="us"),
    _claim("Less of the variance is a floor after training with dropout",
           f"floor's share of the fitted variance, embedded minus injected, {_BEST}", partial(apart, "floor_share"),
           below=0.0, source="us"),
    _claim("The larger the rate in training, the less of the variance is a floor",
           "floor's share, embedded at the largest rate minus at the smallest", partial(with_rate, "floor_share"),
           below=0.0, source="us"),
    _claim("Training with dropout shrinks the variance of the masks against the error",
           "logarithm of the scale asked for at the largest rate, embedded minus injected", shrunk, above=0.0,
           source="us"),
    _claim("The scale asked for depends less on the rate",
           "logarithm of the largest over the smallest scale of all rates, embedded minus injected", span, below=0.0,
           source="us"),
)  # fmt: skip
CLAIMS = {
    "The paper's claims": _PAPER,
    "The paper's claims, asked of three hidden layers": _deep((*_FLATNESS, *_PAPER)),
    "Ours, one hidden layer": _OURS,
    "Ours, three hidden layers": _deep((*_OURS, *_PER_SITE), "{}"),
    "Why embedded dropout trades off by itself": QUESTIONS,
    "Why embedded dropout trades off by itself, three hidden layers": _deep(QUESTIONS),
}


def claims_page(results: Results) -> list[str]:
    """Markdown: theorems, every claim with its verdict, and the effect on every set."""
    said, splits = words("uci"), sorted({len(record["methods"]["constant"]["nll"]) for record in results.values()})
    how = said["claims"].format(sets=counted(results), splits=" or ".join(map(str, splits)))
    lines = ["# The UCI study: what is claimed, and what we found", "", how, ""]
    shares = sorted({record["settings"]["epochs"] for record in results.values()})
    if shares != [1.0]:
        lines += [
            f"**Networks were trained for {shares[0]:g} of the paper's epochs: these numbers decide nothing.**",
            "",
        ]
    lines += ["## True by algebra", "", said["theorems"], "", *theorem_table(THEOREMS, results), ""]
    groups = {heading: [decide(claim, results) for claim in claims] for heading, claims in CLAIMS.items()}
    return [*lines, *claims_section(groups)]

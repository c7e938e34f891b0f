"""Claims of the paper and of ours about the UCI sets, decided from the numbers; and theorems.

An effect is one number for each split, paired. Where it needs a best rate, the validation rows of the split choose it:
the least of 15 noisy test numbers would be too low by itself.

The last questions are why embedded dropout trades off by itself, which the paper leaves open. A network trained with
dropout paid, row by row, for the variance of its masks: the expected training loss is `e^2 + variance`. Its errors
may then follow that variance: the rank correlation of squared error and variance, and the share of the fitted variance
that is a floor, tell. Or the network may only keep the variance small, the more so the larger the rate is: the scale
that validation rows ask for, `mean(e^2 / variance)`, tells.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from studies.claims import Claim, Effect, Record, Theorem, Values, claims_section, decide, read_claims, theorem_table
from studies.pages import Results, counted, words

LARGE = 0.25
"""From this rate on a rate is large."""
DEEP = "Three hidden layers: "
"""How claims about the deeper networks begin."""
_KINDS = ("injected", "embedded")


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
    return np.asarray(curves(record, kind, measure, "validation").argmin(0))


def at_best(record: Record, kind: str, measure: str, least: str = "nll_unscaled") -> Values:
    """A measure at the rate of the least validation value of another, `(splits,)`."""
    values = curves(record, kind, measure)
    return np.asarray(values[best_rates(record, kind, least), np.arange(values.shape[1])])


def growth(record: Record, kind: str) -> Values:
    """RMSE at the largest rate over that at the smallest, minus 1."""
    rmse = curves(record, kind, "rmse")
    return np.asarray(rmse[-1] / rmse[0] - 1)


def concordance(record: Record) -> Values:
    """Of all pairs of rates, the share whose larger one has the larger embedded RMSE."""
    rmse = curves(record, "embedded", "rmse")
    first, second = np.triu_indices(len(rmse), 1)
    return np.asarray((rmse[second] > rmse[first]).mean(0))


def worse_than_best(record: Record, place: str) -> Values:
    """Embedded RMSE at the rate at a place over that at the rate of the least RMSE, minus 1."""
    rmse = curves(record, "embedded", "rmse")[int(place)]
    return np.asarray(rmse / at_best(record, "embedded", "rmse", "rmse") - 1)


def large_rates(record: Record) -> Values:
    """Injected over embedded RMSE, minus 1, mean over the large rates; over the largest where none is large."""
    places = [place for place, rate in enumerate(record["rates"]) if rate >= LARGE] or [len(record["rates"]) - 1]
    injected, embedded = (curves(record, kind, "rmse")[places] for kind in _KINDS)
    return np.asarray((injected / embedded - 1).mean(0))


def ruin(record: Record, kind: str, measure: str) -> Values:
    """How much larger an NLL is at the smallest rate than at the rate where it is least."""
    return np.asarray(curves(record, kind, measure)[0] - at_best(record, kind, measure, measure))


def swing(record: Record, kind: str, measure: str) -> Values:
    """Largest minus smallest over the rates, in each split."""
    return np.asarray(np.ptp(curves(record, kind, measure), axis=0))


def mean_difference(record: Record, first: str, second: str) -> Values:
    """Difference of two measures, each the word for a kind and its name, mean over all rates."""
    return np.asarray((curves(record, *first.split()) - curves(record, *second.split())).mean(0))


def scaling_apart(record: Record) -> Values:
    """Return the gain in NLL by scaling, injected minus embedded, mean over all rates."""
    gains = [mean_difference(record, f"{kind} nll_unscaled", f"{kind} nll_scaled") for kind in _KINDS]
    return gains[0] - gains[1]


def gain_apart(record: Record) -> Values:
    """Return this gain with each of the four NLLs at the rate that its own validation NLL chooses."""
    nll = {name: np.array(each["nll"]) for name, each in record["methods"].items() if name.startswith(_KINDS)}
    gains = [nll[f"{kind}, raw"] - nll[f"{kind}, scaled"] for kind in _KINDS]
    return np.asarray(gains[0] - gains[1])


def difference(record: Record, first: str, second: str, measure: str) -> Values | None:
    """Of two methods; None where one of them is not in the results."""
    methods = record["methods"]
    if not {first, second} <= set(methods):
        return None
    return np.asarray(np.array(methods[first][measure]) - np.array(methods[second][measure]))


def apart(record: Record, measure: str) -> Values:
    """Embedded minus injected, each at the rate of its least unscaled validation NLL."""
    return at_best(record, "embedded", measure) - at_best(record, "injected", measure)


def with_rate(record: Record, measure: str) -> Values:
    """Embedded at the largest rate minus at the smallest."""
    values = curves(record, "embedded", measure)
    return np.asarray(values[-1] - values[0])


def price(record: Record, kind: str) -> Values:
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
_READ = read_claims(
    "uci",
    (growth, concordance, worse_than_best, large_rates, ruin, swing, mean_difference, scaling_apart, gain_apart,
     difference, apart, with_rate, price, shrunk, span),
    overlap,
)  # fmt: skip
_PAPER, _OURS = _READ["The paper's claims"], _READ["Ours"]
QUESTIONS = _READ["Why embedded dropout trades off by itself"]
CLAIMS = {
    "The paper's claims": _PAPER,
    "The paper's claims, asked of three hidden layers": _deep((*_READ["Flatness"], *_PAPER)),
    "Ours, one hidden layer": _OURS,
    "Ours, three hidden layers": _deep((*_OURS, *_READ["Rates per site"]), "{}"),
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
        lines.append(
            f"**Networks were trained for {shares[0]:g} of the paper's epochs: these numbers decide nothing.**\n"
        )
    lines += ["## True by algebra", "", said["theorems"], "", *theorem_table(THEOREMS, results), ""]
    groups = {heading: [decide(claim, results) for claim in claims] for heading, claims in CLAIMS.items()}
    return [*lines, *claims_section(groups)]

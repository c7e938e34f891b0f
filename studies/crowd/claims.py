"""Decide claims of the paper about crowd counting from the results, for each set, for pixels and for counts.

The standard error of a mean over frames comes from blocks of consecutive test frames, which share no frames, or from
the stored interval. Areas, RMSEs, chosen rates and rank correlations were stored without a standard error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from studies.claims import Claim, Effect, Record, Values, bound, claims_section, decide
from studies.crowd.measures import KINDS, SIZE
from studies.pages import Results, words

NAMES = {"mall": "Mall", "ucsd": "UCSD", "pets": "PETS2009", "own": "own frames", "scenes": "scenes"}
PAPER = 0.01
"""Largest rate in the paper."""
_FREE = {"pixel": "propagated", "count": "linear"}


def methods(record: Record, target: str) -> dict[str, dict[str, Any]]:
    """Return the measures of each method on the test frames, by name: `rmse`, `nll`, `rate`, `blocks`, ..."""
    reached: dict[str, dict[str, Any]] = {}
    for name, columns, chosen in (
        ("injected", record["injected"][target], record["chosen"][target]),
        (_FREE[target], record["sampling_free"][target], record["sampling_free_chosen"][target]),
    ):
        for kind in KINDS:
            index = chosen["scaled" if kind == "relaxed" else kind]
            reached[f"{name}, {kind}"] = _picked(columns, kind, index) | {"rate": record["rates"][index]}
    if target == "count":
        reached["linear per site, floor"] = dict(record["per_site"]["test"])
    reached["constant"] = dict(record["constant"][target]["test"])
    if target == "count":
        reached[SIZE] = dict(record["size_control"]["test"])
    for stage in record["embedded"].values():
        for kind in KINDS:
            reached[f"embedded {stage['rate']:g}, {kind}"] = _own(stage[target]["test"], kind) | {"rate": stage["rate"]}
    return reached


def paper_rates(record: Record) -> list[int]:
    """Return the indices of the paper's rates, or all indices if none of them was measured."""
    indices = range(len(record["rates"]))
    return [index for index in indices if record["rates"][index] <= PAPER] or list(indices)


def number(value: float) -> str:
    """Format a number with four digits; from 1e4 on as an integer, from 1e7 on with an exponent."""
    if abs(value) >= 1e7:
        return f"{value:.1e}"
    return f"{value:.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def _picked(columns: Record, kind: str, index: int) -> dict[str, Any]:
    """Return the measures of one kind at one rate, from lists over the rates."""
    test = columns["test"]
    flat = {name: values[index] for name, values in test.items() if isinstance(values, list)}
    for name in ("coverage", "width"):
        if name in test:
            flat[name] = {kind: values[index] for kind, values in test[name].items()}
    flat["blocks"] = {name: values[index] for name, values in columns["blocks"].items()}
    return _own(flat, kind)


def _own(test: Record, kind: str) -> dict[str, Any]:
    """Return the measures of one kind."""
    measures = {"rmse": test["rmse"], "mae": test["mae"], "nll": test[f"nll_{kind}"], "ma": test[f"ma_{kind}"]}
    measures |= {name: test[name][kind] for name in ("coverage", "width") if name in test}
    return measures | {"blocks": {"mae": test["blocks"]["mae"], "nll": test["blocks"][f"nll_{kind}"]}}


def _paper(record: Record, target: str, measure: str) -> Values:
    """Return a measure of the test frames at the paper's rates, `(rates,)`."""
    values: Values = np.array(record["injected"][target]["test"][measure])[paper_rates(record)]
    return values


def _blocks(record: Record, target: str, measure: str) -> Values:
    """Return a measure of blocks of test frames at the paper's rates, `(rates, blocks)`."""
    values: Values = np.array(record["injected"][target]["blocks"][measure])[paper_rates(record)]
    return values


def _gap(record: Record, target: str, first: str, second: str) -> Effect:
    """Return the NLL of `first` minus that of `second`, averaged over the paper's rates."""
    a, b = (_blocks(record, target, f"nll_{kind}") for kind in (first, second))
    return Effect.mean((a - b).mean(0))


def _range(record: Record, target: str, measure: str) -> Effect:
    """Return a measure at its worst rate minus that at its best, among the paper's rates."""
    values = _blocks(record, target, measure)
    means = values.mean(1)
    return Effect.mean(values[means.argmax()] - values[means.argmin()])


def _mean(record: Record, target: str, measure: str) -> Effect:
    return Effect(float(_paper(record, target, measure).mean()))


def _rmse(record: Record, target: str) -> Effect:
    """Return the mean RMSE over the paper's rates, relative to the plain network, minus 1."""
    return Effect(float(_paper(record, target, "rmse").mean() / record["constant"][target]["test"]["rmse"] - 1))


def _mae(record: Record, target: str) -> Effect:
    """Return the mean MAE over the paper's rates minus that of the plain network, relative to the latter."""
    plain = np.array(record["constant"][target]["test"]["blocks"]["mae"])
    return Effect.mean((_blocks(record, target, "mae").mean(0) - plain) / plain.mean())


def _rates_apart(record: Record, target: str) -> Effect:
    """Return the absolute log10 ratio of the rates chosen without and with a scale."""
    unscaled, scaled = (record["rates"][record["chosen"][target][kind]] for kind in ("unscaled", "scaled"))
    return Effect(abs(math.log10(unscaled / scaled)))


def _wrong_rate(record: Record, target: str) -> Effect:
    """Return the scaled NLL at the rate chosen without a scale, minus that at the rate chosen with it."""
    nll = np.array(record["injected"][target]["blocks"]["nll_scaled"])
    chosen = record["chosen"][target]
    return Effect.mean(nll[chosen["unscaled"]] - nll[chosen["scaled"]])


def _growth(record: Record, which: Callable[[Record], int]) -> Effect:
    """Return the count MAE at a rate relative to the plain network, minus 1."""
    plain = record["constant"]["count"]["test"]["mae"]
    return Effect.mean(np.array(record["injected"]["count"]["blocks"]["mae"][which(record)]) / plain - 1)


def _largest(record: Record) -> int:
    return len(record["rates"]) - 1


def _paper_largest(record: Record) -> int:
    return paper_rates(record)[-1]


def _methods(record: Record, target: str, first: str, second: str, measure: str = "nll") -> Effect:
    reached = methods(record, target)
    a, b = (np.array(reached[name]["blocks"][measure]) for name in (first, second))
    return Effect.mean(a - b)


def _embedded(record: Record, target: str, measure: str) -> Effect | None:
    """Compare injected dropout with the embedded network that has the lowest scaled NLL on the validation frames."""
    if not record["embedded"]:
        return None
    best = min(record["embedded"].values(), key=lambda stage: float(stage[target]["validation"]["nll_scaled"]))
    return _methods(record, target, "injected, scaled", f"embedded {best['rate']:g}, scaled", measure)


def _correlation(record: Record, target: str) -> Effect:
    index = record["chosen"][target]["scaled"]
    return Effect(record["sampling_free"][target]["agreement"]["rank_correlation"][index])


def _miss(record: Record, method: str, level: float = 0.9) -> Effect:
    """Return the absolute difference between coverage and level of a count interval."""
    inside = methods(record, "count")[method]["coverage"][record["coverages"].index(level)]
    return Effect(abs(inside - level))


def _rejection(record: Record, difference: str) -> Effect:
    gap = record["rejection"]["differences"][difference]
    return Effect.measured(gap["mae"], gap["low"], gap["high"])


def _false_regions(record: Record) -> Effect | None:
    rejection = record["rejection"]
    before = rejection["before"]["false_kept"]
    return Effect((before - rejection["after"]["false_kept"]) / before) if before else None


def _against_random(record: Record) -> Effect:
    rejection = record["rejection"]
    random = rejection["controls"]["random"]["mae"]
    value = rejection["after"]["mae"] - random["mean"]
    return Effect(value, random["std"] or None, rejection["controls"]["random"]["repeats"] - 1)


_SUBJECTS = {"pixel": "Pixels", "count": "Counts"}


def _of(target: str) -> tuple[Claim, ...]:
    """Return the claims about scales and rates, for pixels or for counts."""
    subject = _SUBJECTS[target]
    return (
        Claim(f"{subject}: the scaled NLL is far better than the unscaled one",
              "unscaled minus scaled NLL, mean over the paper's rates", bound(_gap, target, "unscaled", "scaled"),
              above=1.0),
        Claim(f"{subject}: the unscaled NLL depends on the rate",
              "largest minus smallest unscaled NLL over the paper's rates", bound(_range, target, "nll_unscaled"),
              above=1.0),
        Claim(f"{subject}: the scaled NLL is stable in the rate",
              "largest minus smallest scaled NLL over the paper's rates", bound(_range, target, "nll_scaled"),
              below=0.1),
        Claim(f"{subject}: the scaled MA stays poor", "scaled MA, mean over the paper's rates",
              bound(_mean, target, "ma_scaled"), above=0.3),
        Claim(f"{subject}: the relaxed scale brings the curve near the bisector",
              "relaxed MA, mean over the paper's rates", bound(_mean, target, "ma_relaxed"), below=0.05),
        Claim(f"{subject}: the relaxed scale costs little NLL",
              "relaxed minus scaled NLL, mean over the paper's rates", bound(_gap, target, "relaxed", "scaled"),
              below=0.1),
        Claim(f"{subject}: the RMSE falls at small rates",
              "RMSE, mean over the paper's rates, over that of the plain network, minus 1", bound(_rmse, target),
              below=0.0),
        Claim(f"{subject}: so does the MAE, which has a spread over blocks",
              "MAE, mean over the paper's rates, over that of the plain network, minus 1", bound(_mae, target),
              below=0.0, source="us"),
        Claim(f"{subject}: the best rate is another one with a scale than without",
              "power of ten between the rate of least unscaled and the rate of least scaled NLL",
              bound(_rates_apart, target), above=0.0),
        Claim(f"{subject}: the rate of least unscaled NLL is the wrong one to scale",
              "scaled NLL at that rate minus at the rate of least scaled NLL", bound(_wrong_rate, target), above=0.0,
              source="us"),
    )  # fmt: skip


def _against(target: str) -> tuple[Claim, ...]:
    """Return the claims that compare with other variances, for pixels or for counts."""
    free, subject = {"pixel": "propagated", "count": "linear"}[target], _SUBJECTS[target]
    return (
        Claim(f"{subject}: scaled injection beats a constant variance",
              "NLL at the chosen rate minus that of the constant",
              bound(_methods, target, "injected, scaled", "constant"), below=0.0, source="us"),
        Claim(f"{subject}: injection with scale and floor beats a constant variance",
              "NLL at the chosen rate minus that of the constant",
              bound(_methods, target, "injected, floor", "constant"), below=0.0, source="us"),
        Claim(f"{subject}: without draws ({free}) it is not worse than with them",
              f"scaled NLL, {free} minus drawn, each at its chosen rate",
              bound(_methods, target, f"{free}, scaled", "injected, scaled"), below=0.05, source="us"),
        Claim(f"{subject}: the variance without draws ({free}) ranks as the drawn one does",
              "rank correlation of the two at the chosen rate", bound(_correlation, target), above=0.9, source="us"),
        Claim(f"{subject}: scaled injection is not worse than scaled embedded dropout",
              "NLL injected minus embedded (the network that validation prefers)", bound(_embedded, target, "nll"),
              below=0.02, source="us"),
    )  # fmt: skip


CLAIMS = (
    *_of("pixel"),
    *_against("pixel"),
    *_of("count"),
    *_against("count"),
    Claim("Up to the paper's largest rate the counts stay good",
          "count MAE at that rate over that of the plain network, minus 1", bound(_growth, _paper_largest),
          below=0.1),
    Claim("Larger rates ruin the counts", "count MAE at the largest rate over that of the plain network, minus 1",
          bound(_growth, _largest), above=1.0),
    Claim("Injection counts as well as embedded dropout",
          "count MAE injected minus embedded (the network that validation prefers), people",
          bound(_embedded, "count", "mae"), below=0.1, source="us"),
    *(
        Claim(f"The 90 % count interval, {kind}, covers what it says", "distance of its coverage from 0.9",
              bound(_miss, f"injected, {kind}"), below=0.05, source="us")
        for kind in ("unscaled", "scaled", "relaxed", "floor")
    ),
    Claim("Rejecting uncertain regions lowers the error of the count", "count MAE after minus before, people",
          bound(_rejection, "after_minus_before"), below=0.0),
    Claim("Rejection removes a good part of the false regions", "share of the false regions that goes",
          _false_regions, above=0.1),
    Claim("It is the uncertainty that helps: rejection by density alone does worse",
          "count MAE with uncertainty minus density alone, people", bound(_rejection, "after_minus_low_density"),
          below=0.0, source="us"),
    Claim("Rejection does better than as many regions at random",
          "count MAE after minus the mean of random choices, people; the spread is that of one random choice",
          _against_random, below=0.0, source="us"),
    Claim("Rejection does better than subtracting the mean validation error from every count",
          "count MAE after minus that, people", bound(_rejection, "after_minus_shift"), below=0.0, source="us"),
    Claim("Counts: injection with scale and floor beats a variance of a · count + b",
          "NLL at the chosen rate minus that of the control", bound(_methods, "count", "injected, floor", SIZE),
          below=0.0, source="us"),
)  # fmt: skip


def claims_page(results: Results) -> list[str]:
    """Markdown: every claim, its verdict on every set, and the effects."""
    draws = sorted({record["settings"]["draws"] for record in results.values()})
    named = {"sets": ", ".join(NAMES[name] for name in results), "draws": " or ".join(map(str, draws))}
    how = words("crowd")["claims"].format(**named)
    lines = ["# The crowd counting study: what is claimed, and what we found", "", how, ""]
    if any(record["settings"]["frames"] or record["settings"]["every"] > 1 for record in results.values()):
        lines += ["**Only some of the frames were measured: these numbers decide little.**", ""]
    decisions = [decide(claim, results) for claim in CLAIMS]
    return [*lines, *claims_section({"Claims": decisions}, by_set=True, names=NAMES, write=number)]

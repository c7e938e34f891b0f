"""Decide claims of the paper about crowd counting from the results, for each set, for pixels and for counts.

The standard error of a mean over frames comes from blocks of consecutive test frames, which share no frames, or from
the stored interval. Areas, RMSEs, chosen rates and rank correlations were stored without a standard error.
"""

import math
from typing import Any

import numpy as np

from studies.claims import Effect, Record, Values, claims_section, decide, read_claims
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
    return np.asarray(np.array(record["injected"][target]["test"][measure])[paper_rates(record)])


def _blocks(record: Record, target: str, measure: str) -> Values:
    """Return a measure of blocks of test frames at the paper's rates, `(rates, blocks)`."""
    return np.asarray(np.array(record["injected"][target]["blocks"][measure])[paper_rates(record)])


def gap(record: Record, target: str, first: str, second: str) -> Values:
    """Return the NLL of `first` minus that of `second`, averaged over the paper's rates, by block."""
    a, b = (_blocks(record, target, f"nll_{kind}") for kind in (first, second))
    return np.asarray((a - b).mean(0))


def spread(record: Record, target: str, measure: str) -> Values:
    """Return a measure at its worst rate minus that at its best, among the paper's rates."""
    values = _blocks(record, target, measure)
    means = values.mean(1)
    return np.asarray(values[means.argmax()] - values[means.argmin()])


def mean(record: Record, target: str, measure: str) -> float:
    """Return the mean of a measure over the paper's rates."""
    return float(_paper(record, target, measure).mean())


def rmse(record: Record, target: str) -> float:
    """Return the mean RMSE over the paper's rates, relative to the plain network, minus 1."""
    return float(_paper(record, target, "rmse").mean() / record["constant"][target]["test"]["rmse"] - 1)


def mae(record: Record, target: str) -> Values:
    """Return the mean MAE over the paper's rates minus that of the plain network, relative to the latter."""
    plain = np.array(record["constant"][target]["test"]["blocks"]["mae"])
    return np.asarray((_blocks(record, target, "mae").mean(0) - plain) / plain.mean())


def rates_apart(record: Record, target: str) -> float:
    """Return the absolute log10 ratio of the rates chosen without and with a scale."""
    unscaled, scaled = (record["rates"][record["chosen"][target][kind]] for kind in ("unscaled", "scaled"))
    return abs(math.log10(unscaled / scaled))


def wrong_rate(record: Record, target: str) -> Values:
    """Return the scaled NLL at the rate chosen without a scale, minus that at the rate chosen with it."""
    nll, chosen = np.array(record["injected"][target]["blocks"]["nll_scaled"]), record["chosen"][target]
    return np.asarray(nll[chosen["unscaled"]] - nll[chosen["scaled"]])


def growth(record: Record, which: str) -> Values:
    """Return the count MAE at the largest rate, of all or of the paper's, relative to the plain network, minus 1."""
    index = paper_rates(record)[-1] if which == "paper_largest" else -1
    plain = record["constant"]["count"]["test"]["mae"]
    return np.asarray(np.array(record["injected"]["count"]["blocks"]["mae"][index]) / plain - 1)


def apart(record: Record, target: str, first: str, second: str, measure: str = "nll") -> Values:
    """Return a measure of one method minus that of another, by block."""
    reached = methods(record, target)
    a, b = (np.array(reached[name]["blocks"][measure]) for name in (first, second))
    return np.asarray(a - b)


def embedded(record: Record, target: str, measure: str) -> Values | None:
    """Compare injected dropout with the embedded network that has the lowest scaled NLL on the validation frames."""
    if not record["embedded"]:
        return None
    best = min(record["embedded"].values(), key=lambda stage: float(stage[target]["validation"]["nll_scaled"]))
    return apart(record, target, "injected, scaled", f"embedded {best['rate']:g}, scaled", measure)


def correlation(record: Record, target: str) -> float:
    """Return the rank correlation of the variances with and without draws, at the chosen rate."""
    agreement = record["sampling_free"][target]["agreement"]["rank_correlation"]
    return float(agreement[record["chosen"][target]["scaled"]])


def miss(record: Record, method: str, level: float = 0.9) -> float:
    """Return the absolute difference between coverage and level of a count interval."""
    inside = methods(record, "count")[method]["coverage"][record["coverages"].index(level)]
    return abs(float(inside) - level)


def rejection(record: Record, difference: str) -> Effect:
    """Return a difference of the count MAE, with its interval."""
    measured = record["rejection"]["differences"][difference]
    return Effect.measured(measured["mae"], measured["low"], measured["high"])


def false_regions(record: Record) -> float | None:
    """Return the share of the false regions that goes."""
    before, after = (record["rejection"][when]["false_kept"] for when in ("before", "after"))
    return (before - after) / before if before else None


def against_random(record: Record) -> Effect:
    """Return the count MAE minus the mean of random choices, with the spread of one random choice."""
    random = record["rejection"]["controls"]["random"]
    value = record["rejection"]["after"]["mae"] - random["mae"]["mean"]
    return Effect(value, random["mae"]["std"] or None, random["repeats"] - 1)


CLAIMS = read_claims(
    "crowd",
    (gap, spread, mean, rmse, mae, rates_apart, wrong_rate, growth, apart, embedded, correlation, miss, rejection,
     false_regions, against_random),
)["Claims"]  # fmt: skip


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

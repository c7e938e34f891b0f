"""Why embedded dropout trades off by itself: what training with dropout does to the variance of the masks.

The paper leaves it open. A network that was trained with dropout paid, row by row, for the variance of its masks: the
expected training loss is `e^2 + variance`. Its errors may then follow that variance, row by row: the rank correlation
of squared error and variance, and the share of the fitted variance that is a floor, tell. Or the network may only keep
the variance small, the more so the larger the rate is: the scale that validation rows ask for, `mean(e^2 / variance)`,
tells. The words of the page follow from the verdicts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from studies.claims import Claim, Effect, Record
from studies.significance import split_error
from studies.uci.claims_page import Decision, decide_all, effect_table
from studies.uci.effects import at_rates, best_rates, curves, deeper, of_splits
from studies.uci.tables import SHORT, Results, overlap

__all__ = ["QUESTIONS", "embedded_page"]


def _apart(measure: str) -> Callable[[Record], Effect]:
    """Embedded minus injected, each at the rate of its least unscaled validation NLL."""

    def effect(record: Record) -> Effect:
        return of_splits(record, _chosen(record, "embedded", measure) - _chosen(record, "injected", measure))

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


def _chosen(record: Record, kind: str, measure: str) -> Any:
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


def embedded_page(results: Results) -> str:
    """Markdown: the question, the answer of the numbers, a table of all sets, and the tests, for both depths."""
    lines = [
        "# Why does embedded dropout trade off by itself?",
        "",
        "In the paper embedded dropout balances error, likelihood and calibration by itself, without a scale; why is "
        "left open. A network trained with dropout is charged `e² + variance` for every row. That may do two things. "
        "*Errors follow the variance*: then it ranks the errors better, and less of the fitted variance "
        "`scale · v + floor` is a floor, than for a network that never saw dropout. *The variance shrinks*: the "
        "network keeps small what it is charged for, the more so the larger the rate is; then the scale that "
        "validation rows ask for, `mean(e² / v)`, is larger than that of injection, and depends less on the rate. The "
        "first was asked before the numbers were seen, the second after. Measured on the test rows; scales and rates "
        "are fitted on the validation rows. Generated from the JSON files beside this page.",
    ]
    for title, part in _depths(results).items():
        found = [decide_all(claim, part) for claim in QUESTIONS]
        lines += ["", f"## {title}", "", *(f"- {_sentence(one)}" for one in found), "", _answer(*found[2:8:2]), ""]
        if part is results:
            lines += [
                "![Rank correlation of squared error and variance, the floor's share of the fitted variance, and the "
                "scale asked for, against the rate, injected and embedded, set by set.](embedded.png)",
                "",
            ]
        lines += [
            f"Injected and embedded are {_BEST}; ± is the standard error over splits that share rows.",
            "",
            *_table(part),
        ]
        lines += ["", *_scales(part)]
        for one in found:
            lines += ["", f"### {one.claim.text}", "", one.claim.threshold, "", *effect_table(one)]
    return "\n".join(lines) + "\n"


def _depths(results: Results) -> dict[str, Results]:
    """The records of one hidden layer, and those of three in the same form."""
    deep = {name: found for name, record in results.items() if (found := deeper(record)) is not None}
    return {"One hidden layer": results} | ({"Three hidden layers": deep} if deep else {})


def _sentence(found: Decision) -> str:
    values = found.effects
    whose = "median over sets " if len(values) > 1 else ""
    return f"{found.claim.text}: {found.verdict}; {whose}{np.median(values):+.3f} ({found.claim.effect})."


def _answer(ranking: Decision, floor: Decision, shrunk: Decision) -> str:
    """One sentence, by majority of the sets that decide."""
    words = {"holds": "yes", "fails": "no", "not decided": "not decided"}
    asked = {
        "errors follow the variance better": ranking,
        "the floor's share is smaller": floor,
        "the variance has shrunk": shrunk,
    }
    said = []
    for what, one in asked.items():
        counts = {word: len(one.sets(verdict)) for verdict, word in words.items()}
        most = max(counts, key=counts.__getitem__)
        clear = counts[most] > len(one.effects) / 2
        said.append(f"{what}: **{most if clear else 'it depends on the set'}** ({_counted(counts)})")
    return f"So, after training with dropout, {'; '.join(said)}."


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{word} on {count}" for word, count in counts.items())


def _table(results: Results) -> list[str]:
    lines = [
        "| set | rank correlation, injected | embedded | floor's share, injected | embedded |",
        "| --- |" + " ---: |" * 4,
    ]
    for name, record in results.items():
        cells = []
        for measure in ("ranking", "floor_share"):
            for kind in ("injected", "embedded"):
                values = _chosen(record, kind, measure)
                cells.append(f"{values.mean():.3f} ± {split_error(values, overlap(record)):.3f}")
        lines.append(f"| {SHORT.get(name, name)} | {' | '.join(cells)} |")
    return lines


def _scales(results: Results) -> list[str]:
    """The scale asked for at some rates, and at the rate of the least unscaled NLL."""
    rates = next(iter(results.values()))["rates"]
    shown = sorted({0, len(rates) // 2, len(rates) - 1})
    lines = [
        "The scale that the validation rows ask for, median over splits; 1 is a variance that needs none. The last "
        "column is the rate of the least unscaled validation NLL, and the scale there.",
        "",
        "| set | network |" + "".join(f" rate {rates[place]:g} |" for place in shown) + " best unscaled |",
        "| --- | --- |" + " ---: |" * (len(shown) + 1),
    ]
    for name, record in results.items():
        for kind in ("injected", "embedded"):
            scale = np.median(curves(record, kind, "scale"), 1)
            best = np.median(np.array(record["rates"])[best_rates(record, kind, "nll_unscaled")])
            cells = [f"{scale[place]:.3g}" for place in shown]
            cells.append(f"{np.median(_chosen(record, kind, 'scale')):.3g} at {best:g}")
            lines.append(f"| {SHORT.get(name, name)} | {kind} | {' | '.join(cells)} |")
    return lines

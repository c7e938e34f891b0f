"""Why embedded dropout trades off by itself: whether training with dropout makes the errors follow the variance.

The paper leaves it open. A network that was trained with dropout paid, row by row, for the variance of its masks: the
expected training loss is `e^2 + variance`. Two numbers say whether its errors then go with that variance better than
those of a network trained without: the rank correlation of squared error and variance, and the share of the fitted
variance that is a floor. The words of the page follow from the verdicts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from latedrop.studies.claims import Claim, Effect, Record
from latedrop.studies.significance import split_error
from latedrop.studies.uci.claims_page import Decision, decide_all, effect_table
from latedrop.studies.uci.effects import at_rates, best_rates, curves, of_splits
from latedrop.studies.uci.tables import SHORT, Results, overlap

__all__ = ["QUESTIONS", "embedded_page"]


def _apart(measure: str) -> Callable[[Record], Effect]:
    """Embedded minus injected, embedded at the rate of its least unscaled validation NLL."""

    def effect(record: Record) -> Effect:
        return of_splits(record, _embedded(record, measure) - curves(record, "injected", measure)[0])

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


def _embedded(record: Record, measure: str) -> Any:
    return at_rates(curves(record, "embedded", measure), best_rates(record, "embedded", "nll_unscaled"))


_BEST = "at the rate of its least unscaled validation NLL"
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
        f"rank correlation of squared error and variance, embedded {_BEST} minus injected", _apart("ranking"),
        above=0.0, source="us",
    ),
    Claim(
        "The larger the rate in training, the better errors follow the variance",
        "rank correlation, embedded at the largest rate minus at the smallest", _with_rate("ranking"), above=0.0,
        source="us",
    ),
    Claim(
        "Less of the variance is a floor after training with dropout",
        f"floor's share of the fitted variance, embedded {_BEST} minus injected", _apart("floor_share"), below=0.0,
        source="us",
    ),
    Claim(
        "The larger the rate in training, the less of the variance is a floor",
        "floor's share, embedded at the largest rate minus at the smallest", _with_rate("floor_share"), below=0.0,
        source="us",
    ),
)  # fmt: skip


def embedded_page(results: Results) -> str:
    """Markdown: the question, the answer of the numbers, a table of all sets, and the tests."""
    found = [decide_all(claim, results) for claim in QUESTIONS]
    lines = [
        "# Why does embedded dropout trade off by itself?",
        "",
        "In the paper embedded dropout balances error, likelihood and calibration by itself, without a scale; why is "
        "left open. A network trained with dropout is charged `e² + variance` for every row, so that training could "
        "make its errors follow the variance of its masks. Then the variance would rank the errors better, and less of "
        "the fitted variance `scale · v + floor` would be a floor, than for a network that never saw dropout. Both are "
        "measured on the test rows. Generated from the JSON files beside this page.",
        "",
        "## What the numbers say",
        "",
        *(f"- {_sentence(one)}" for one in found),
        "",
        _answer(found[2], found[4]),
        "",
        "![Rank correlation of squared error and variance, and the floor's share of the fitted variance, against the "
        "rate, injected and embedded, set by set.](embedded.png)",
        "",
        f"Embedded is {_BEST}; ± is the standard error over splits that share rows.",
        "",
        *_table(results),
    ]
    for one in found:
        lines += ["", f"### {one.claim.text}", "", one.claim.threshold, "", *effect_table(one)]
    return "\n".join(lines) + "\n"


def _sentence(found: Decision) -> str:
    values = found.effects
    return f"{found.claim.text}: {found.verdict}; median over sets {np.median(values):+.3f} ({found.claim.effect})."


def _answer(ranking: Decision, floor: Decision) -> str:
    """One sentence, by majority of the sets that decide."""
    words = {"holds": "yes", "fails": "no", "not decided": "not decided"}
    said = []
    for one, what in ((ranking, "errors follow the variance better"), (floor, "the floor's share is smaller")):
        counts = {word: len(one.sets(verdict)) for verdict, word in words.items()}
        most = max(counts, key=counts.__getitem__)
        clear = counts[most] > len(one.effects) / 2
        said.append(f"{what}: **{most if clear else 'it depends on the set'}** ({_counted(counts)})")
    return f"So, after training with dropout, {'; '.join(said)}."


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{word} on {count}" for word, count in counts.items())


def _table(results: Results) -> list[str]:
    lines = [
        "| set | rank correlation, injected | embedded | floor's share, injected | embedded | scale, embedded | rate |",
        "| --- |" + " ---: |" * 6,
    ]
    for name, record in results.items():
        cells = []
        for measure in ("ranking", "floor_share"):
            for values in (curves(record, "injected", measure)[0], _embedded(record, measure)):
                cells.append(f"{values.mean():.3f} ± {split_error(values, overlap(record)):.3f}")
        rates = np.array(record["rates"])[best_rates(record, "embedded", "nll_unscaled")]
        cells += [f"{np.median(_embedded(record, 'scale')):.3g}", f"{np.median(rates):g}"]
        lines.append(f"| {SHORT.get(name, name)} | {' | '.join(cells)} |")
    return [*lines, "", "Scale and rate are medians over splits."]

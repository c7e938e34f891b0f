"""The methods side by side: the mean over repeats of every measure, and how sure it is.

Repeats share no rows (those of the digits do, and have a larger error for it). A half width is that of a 95 % interval
by Student's t.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from studies.claims import Effect
from studies.classification.data import SOURCES
from studies.classification.shifts import SHIFTS

__all__ = ["Record", "Results", "cell", "method_names", "score_names", "score_tables", "set_tables", "told", "values"]

Record: TypeAlias = Mapping[str, Any]
Results: TypeAlias = Mapping[str, Record]
Values: TypeAlias = npt.NDArray[np.float64]

_TABLES = {
    "Test rows": ("test", {
        "nll": ("NLL in nats", 4), "brier": ("Brier score", 4), "ece": ("Calibration error (15 bins of equal mass)", 4),
        "accuracy": ("Accuracy", 4), "aurc": ("Area under the risk-coverage curve", 4),
    }),
    "Shifted rows, mean over rotation, noise and blur at five strengths": ("shift", {
        "nll": ("NLL in nats", 3), "brier": ("Brier score", 3), "ece": ("Calibration error", 3),
        "accuracy": ("Accuracy", 3), "aurc": ("Area under the risk-coverage curve", 3),
    }),
}  # fmt: skip


def values(record: Record, method: str, measure: str, where: str = "test") -> Values | None:
    """A measure of every repeat, `(J,)`, on `"test"`, a part such as `"blur-3"`, a shift, or all: `"shift"`.

    Over several parts it is their mean; None where the set does not have the method.
    """
    rows = []
    for unit in record["units"]:
        parts = unit["labelled"]
        chosen = [i for i, part in enumerate(parts) if _is(part, where)]
        if method not in unit["methods"] or not chosen:
            return None
        rows.append(np.mean([unit["methods"][method][measure][i] for i in chosen]))
    return np.array(rows)


def told(record: Record, score: str, measure: str = "auroc", where: str = "others") -> Values | None:
    """How well a score tells strange rows, `(J,)`: those of one other set, of `"others"`, or of a shift."""
    rows = []
    for unit in record["units"]:
        chosen = [i for i, part in enumerate(unit["others"]) if _is(part, where)]
        if score not in unit["scores"] or not chosen:
            return None
        rows.append(np.mean([unit["scores"][score][measure][i] for i in chosen]))
    return np.array(rows)


def _is(part: str, where: str) -> bool:
    if where == "shift":
        return part.rsplit("-", 1)[0] in SHIFTS
    if where == "others":
        return part in SOURCES
    return part == where or (where in SHIFTS and part.startswith(f"{where}-"))


def method_names(results: Results) -> list[str]:
    """All methods, in the order in which the records have them."""
    return list(dict.fromkeys(name for record in results.values() for name in record["units"][0]["methods"]))


def score_names(results: Results) -> list[str]:
    """All scores, likewise."""
    return list(dict.fromkeys(name for record in results.values() for name in record["units"][0]["scores"]))


def cell(found: Values | None, record: Record, digits: int) -> str:
    """Mean and half width of its interval; the mean alone of one repeat."""
    if found is None:
        return "-"
    effect = Effect.mean(found, record["overlap"])
    half = effect.interval[1] - effect.value
    return f"{effect.value:.{digits}f}" + (f" ± {half:.{digits}f}" if np.isfinite(half) else "")


def set_tables(results: Results) -> list[str]:
    """Markdown: for every measure a table of methods by sets, the best mean of each set in bold."""
    lines: list[str] = []
    for title, (where, measures) in _TABLES.items():
        lines += [f"### {title}", ""]
        for measure, (name, digits) in measures.items():
            found = {
                method: {key: values(record, method, measure, where) for key, record in results.items()}
                for method in method_names(results)
            }
            lines += [f"**{name}**", "", *_table(results, found, digits, largest=measure == "accuracy"), ""]
    return lines


def score_tables(results: Results) -> list[str]:
    """Markdown: AUROC and FPR at 95 % by sets; then set by set, against every kind of strange rows."""
    lines: list[str] = []
    titles = {
        "AUROC, rows of other sets": ("auroc", "others"),
        "Share of test rows above what 95 % of the rows of other sets are above": ("fpr95", "others"),
        "AUROC, shifted rows (mean over all shifts and strengths)": ("auroc", "shift"),
    }
    for title, (measure, where) in titles.items():
        found = {
            score: {key: told(record, score, measure, where) for key, record in results.items()}
            for score in score_names(results)
        }
        lines += [f"**{title}**", "", *_table(results, found, 3, largest=measure == "auroc"), ""]
    for key, record in results.items():
        others = [part for part in record["units"][0]["others"] if not _is(part, "shift")]
        lines += [f"**{key}: AUROC against each**", "", f"| score | {' | '.join(others)} |"]
        lines += ["| --- |" + " ---: |" * len(others)]
        for score in score_names(results):
            cells = [cell(told(record, score, where=other), record, 3) for other in others]
            lines.append(f"| {score} | {' | '.join(cells)} |")
        lines.append("")
    return lines


def _table(
    results: Results, found: Mapping[str, Mapping[str, Values | None]], digits: int, *, largest: bool
) -> list[str]:
    lines = ["| | " + " | ".join(results) + " |", "| --- |" + " ---: |" * len(results)]
    means = {
        key: [row[key].mean() for row in found.values() if row[key] is not None]  # type: ignore[union-attr]
        for key in results
    }
    best = {key: (max if largest else min)(each) if each else None for key, each in means.items()}
    for name, row in found.items():
        cells = []
        for key, record in results.items():
            said, got = cell(row[key], record, digits), row[key]
            cells.append(f"**{said}**" if got is not None and got.mean() == best[key] else said)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines

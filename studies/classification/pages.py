"""Tables of the classification study, from its JSON alone: means over repeats, and how sure they are.

Repeats share no rows (those of the digits do, and have a larger error for it). A half width is that of a 95 % interval
by Student's t.
"""

from collections.abc import Mapping

import numpy as np

from studies.claims import Effect, Record, Values
from studies.classification.claims import claims_page, is_part, told, values
from studies.pages import Results, page, run_where, table, written

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


def names_of(results: Results, what: str) -> list[str]:
    """All methods, or all scores, in the order in which the records have them."""
    return list(dict.fromkeys(name for record in results.values() for name in record["units"][0][what]))


def cell(repeats: Values | None, record: Record, digits: int) -> str:
    """Mean and half width of its interval; the mean alone of one repeat."""
    if repeats is None:
        return "-"
    effect = Effect.mean(repeats, record["overlap"])
    half = effect.interval[1] - effect.value
    return f"{effect.value:.{digits}f}" + (f" ± {half:.{digits}f}" if np.isfinite(half) else "")


def set_tables(results: Results) -> list[str]:
    """Markdown: for every measure a table of methods by sets, the best mean of each set in bold."""
    lines: list[str] = []
    for title, (where, measures) in _TABLES.items():
        lines += [f"### {title}", ""]
        for measure, (name, digits) in measures.items():
            methods = {
                method: {key: values(record, method, measure, where) for key, record in results.items()}
                for method in names_of(results, "methods")
            }
            lines += [f"**{name}**", "", *_table(results, methods, digits, largest=measure == "accuracy"), ""]
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
        scores = {
            score: {key: told(record, score, measure, where) for key, record in results.items()}
            for score in names_of(results, "scores")
        }
        lines += [f"**{title}**", "", *_table(results, scores, 3, largest=measure == "auroc"), ""]
    for key, record in results.items():
        others = [part for part in record["units"][0]["others"] if not is_part(part, "shift")]
        rows = [
            [score, *(cell(told(record, score, where=other), record, 3) for other in others)]
            for score in names_of(results, "scores")
        ]
        lines += [f"**{key}: AUROC against each**", "", *table(["score", *others], rows), ""]
    return lines


def _table(
    results: Results, entries: Mapping[str, Mapping[str, Values | None]], digits: int, *, largest: bool
) -> list[str]:
    means = {
        key: [row[key].mean() for row in entries.values() if row[key] is not None]  # type: ignore[union-attr]
        for key in results
    }
    best = {key: (max if largest else min)(each) if each else None for key, each in means.items()}
    rows = []
    for name, row in entries.items():
        cells = []
        for key, record in results.items():
            said, got = cell(row[key], record, digits), row[key]
            cells.append(f"**{said}**" if got is not None and got.mean() == best[key] else said)
        rows.append([name, *cells])
    return table(["", *results], rows)


def tables(results: Results) -> str:
    """Fill the page: how it was run, and the tables."""
    units = [unit for record in results.values() for unit in record["units"]]
    rows = []
    for name, record in results.items():
        unit, chosen = record["units"][0], [each["notes"]["choice"] for each in record["units"]]
        said = ", ".join(f"{word} ({chosen.count(word)})" for word in dict.fromkeys(chosen))
        sizes = [unit["rows"][part] for part in ("train", "validation", "test")]
        accuracy = cell(values(record, "softmax", "accuracy"), record, 3)
        rows.append([name, len(record["units"]), *sizes, unit["epochs"], accuracy, said])
    head = ("set", "repeats", "train", "validation", "test", "epochs", "accuracy", "the default is")
    return page(
        "classification",
        sets=str(len(results)),
        repeats=str(len(units)),
        where=run_where(units),
        set_table=table(head, rows),
        methods=set_tables(results),
        scores=score_tables(results),
    )


pages = written(tables, claims_page)

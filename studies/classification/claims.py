"""Claims about classifiers, decided from the numbers, set by set: differences paired by repeat."""

import numpy as np

from studies.claims import Record, Values, claims_section, decide, read_claims
from studies.classification.data import SHIFTS, SOURCES
from studies.pages import Results, words

_LESS = ("nll", "ece", "aurc", "brier")


def values(record: Record, method: str, measure: str, where: str = "test") -> Values | None:
    """A measure of every repeat, `(J,)`, on `"test"`, a part such as `"blur-3"`, a shift, or all: `"shift"`.

    Over several parts it is their mean; None where the set does not have the method.
    """
    rows = []
    for unit in record["units"]:
        parts = unit["labelled"]
        chosen = [i for i, part in enumerate(parts) if is_part(part, where)]
        if method not in unit["methods"] or not chosen:
            return None
        rows.append(np.mean([unit["methods"][method][measure][i] for i in chosen]))
    return np.array(rows)


def told(record: Record, score: str, measure: str = "auroc", where: str = "others") -> Values | None:
    """How well a score tells strange rows, `(J,)`: those of one other set, of `"others"`, or of a shift."""
    rows = []
    for unit in record["units"]:
        chosen = [i for i, part in enumerate(unit["others"]) if is_part(part, where)]
        if score not in unit["scores"] or not chosen:
            return None
        rows.append(np.mean([unit["scores"][score][measure][i] for i in chosen]))
    return np.array(rows)


def is_part(part: str, where: str) -> bool:
    """Return whether a part is the one asked for, a strength of that shift, any shift, or rows of another set."""
    if where == "shift":
        return part.rsplit("-", 1)[0] in SHIFTS
    if where == "others":
        return part in SOURCES
    return part == where or (where in SHIFTS and part.startswith(f"{where}-"))


def gain(record: Record, first: str, second: str, measure: str = "nll", where: str = "test") -> Values | None:
    """By how much the first is better, repeat by repeat."""
    a, b = (values(record, method, measure, where) for method in (first, second))
    if a is None or b is None:
        return None
    return b - a if measure in _LESS else a - b


def tells(record: Record, first: str, second: str, where: str = "others") -> Values | None:
    """AUROC of the first minus that of the second."""
    a, b = (told(record, score, "auroc", where) for score in (first, second))
    return None if a is None or b is None else a - b


CLAIMS = read_claims("classification", (gain, tells), lambda record: float(record["overlap"]))["Claims"]


def claims_page(results: Results) -> list[str]:
    """Markdown: every claim with its verdict, set by set, and every effect."""
    lines = [
        "# The classification study: what is claimed, and what we found",
        "",
        words("classification")["claims"],
        "",
    ]
    if any(unit["settings"]["epochs"] != 1.0 for record in results.values() for unit in record["units"]):
        lines += ["**Networks were trained for a part of the epochs: these numbers decide nothing.**", ""]
    return [*lines, *claims_section({"Claims": [decide(claim, results) for claim in CLAIMS]}, by_set=True)]

"""Decide claims about a variance under shift from the results.

The cuts of a set overlap, so each set is one observation: its effect is the mean over its cuts. NLL and CRPS have
outliers of several hundred, so methods are compared by the share of cuts in which one has the lower value.
"""

import numpy as np

from studies.claims import Record, Values, claims_section, decide_pooled, read_claims
from studies.pages import Results, counted, words


def values(record: Record, method: str, measure: str) -> Values | None:
    """Return a measure on every cut of a set; None if the set does not have the method."""
    measures = record["methods"].get(method)
    return None if measures is None else np.array(measures[measure])


def slope(record: Record, method: str) -> float | None:
    """Regress variance growth on error growth over the cuts; return the slope, None with fewer than 3 cuts.

    >>> growth = {"error_growth": [0.0, 1.0, 2.0], "variance_growth": [1.0, 1.5, 2.0]}
    >>> slope({"methods": {"a": growth}}, "a")
    0.5
    """
    error, variance = (values(record, method, f"{name}_growth") for name in ("error", "variance"))
    if error is None or variance is None or len(error) < 3:
        return None
    off = error - error.mean()
    return float(off @ variance / (off @ off))


def level(record: Record, method: str, measure: str = "coverage") -> float | None:
    """Return the mean over cuts."""
    shares = values(record, method, measure)
    return None if shares is None else float(shares.mean())


def more(record: Record, first: str, second: str, measure: str = "coverage") -> float | None:
    """Return the mean over cuts of first minus second."""
    a, b = values(record, first, measure), values(record, second, measure)
    return None if a is None or b is None else float((a - b).mean())


def wins(record: Record, first: str, second: str, measure: str = "nll") -> float | None:
    """Return the share of cuts in which `first` has the lower measure; ties count half."""
    a, b = values(record, first, measure), values(record, second, measure)
    return None if a is None or b is None else float(((a < b).mean() + (a <= b).mean()) / 2)


def lag(record: Record, method: str) -> float | None:
    """Return the log growth of the squared error minus that of the variance, averaged over cuts."""
    error, variance = (values(record, method, f"{name}_growth") for name in ("error", "variance"))
    return None if error is None or variance is None else float((error - variance).mean())


CLAIMS = read_claims("shift", (slope, level, more, wins, lag))["Claims"]


def claims_page(results: Results) -> list[str]:
    """Write the Markdown page with every claim, its verdict, and the effect on every set."""
    cuts = sum(len(record["cuts"]) for record in results.values())
    how = f"Generated from the JSON files beside this page: {counted(results)}, {cuts} cuts. {words('shift')['claims']}"
    lines = ["# The shift study: what is claimed, and what we found", "", how, ""]
    if sorted({record["settings"]["epochs"] for record in results.values()}) != [1.0]:
        lines += ["**Networks were trained for a part of the epochs: these numbers decide nothing.**", ""]
    if len(results) == 1:
        lines += ["One set alone decides nothing; the effects below say where it lies.", ""]
    decisions = decide_pooled(CLAIMS, results)
    return [*lines, *claims_section({"Claims": decisions}, write=lambda value: f"{value:.3f}")]

"""The methods of the shift study side by side: one number for each set, then the median over the sets.

The cuts of a set share rows and networks' training rows, so they are no independent samples: a set counts as one. Its
number is the mean over its cuts of what is bounded or a logarithm (coverage, AUROC, ranking, growth), and the median
over its cuts of what a single cut can drive anywhere (NLL, CRPS, width, RMSE). The interval of the median over sets is
between two order statistics, as of the sign test: it assumes nothing but independent sets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from studies.uci.tables import SHORT, group

__all__ = [
    "Results",
    "by_set",
    "method_names",
    "method_tables",
    "order_interval",
    "overshoot_table",
    "set_tables",
    "slope",
    "values",
]

Results: TypeAlias = Mapping[str, Mapping[str, Any]]
Values: TypeAlias = npt.NDArray[np.float64]

_KINDS = ("floor", "scaled", "raw", "intervals")
_MEDIANS = ("nll", "crps", "width", "rmse")
_LEAST_LEVEL = 0.9

_TABLES: dict[str, tuple[tuple[str, str], ...]] = {
    "Do the intervals hold?": (
        ("coverage", "coverage, shifted"),
        ("inside_coverage", "coverage, inside"),
        ("width", "width, shifted"),
        ("inside_width", "width, inside"),
    ),
    "How good is the whole distribution?": (
        ("nll", "NLL, shifted"),
        ("inside_nll", "NLL, inside"),
        ("crps", "CRPS, shifted"),
        ("rmse", "RMSE, shifted"),
    ),
    "Does the variance notice?": (
        ("auroc", "AUROC"),
        ("ranking", "ranking, shifted"),
        ("variance_growth", "variance growth"),
        ("error_growth", "error growth"),
        ("slope", "slope"),
    ),
}
_BY_SET = {
    "coverage": "Share of shifted rows inside 90 % intervals (mean over cuts)",
    "nll": "NLL of shifted rows (median over cuts)",
    "auroc": "AUROC, shifted against inside rows (mean over cuts)",
}


def values(record: Mapping[str, Any], method: str, measure: str) -> Values | None:
    """A measure on every cut of a set; None where the set does not have the method."""
    found = record["methods"].get(method)
    return None if found is None else np.array(found[measure])


def by_set(record: Mapping[str, Any], method: str, measure: str) -> float | None:
    """The one number of a set."""
    if measure == "slope":
        return slope(record, method)
    found = values(record, method, measure)
    if found is None:
        return None
    return float(np.median(found) if measure.removeprefix("inside_") in _MEDIANS else found.mean())


def slope(record: Mapping[str, Any], method: str) -> float | None:
    """By least squares over the cuts: variance growth for each unit of error growth; None with fewer than 3 cuts.

    >>> growth = {"error_growth": [0.0, 1.0, 2.0], "variance_growth": [1.0, 1.5, 2.0]}
    >>> slope({"methods": {"a": growth}}, "a")
    0.5
    """
    error, variance = (values(record, method, f"{name}_growth") for name in ("error", "variance"))
    if error is None or variance is None or len(error) < 3:
        return None
    off = error - error.mean()
    return float(off @ variance / (off @ off))


def order_interval(found: Sequence[float]) -> tuple[float, float] | None:
    """The narrowest interval between order statistics that holds the median with at least 90 %; None for fewer than 5.

    >>> order_interval([3.0, 1.0, 2.0, 8.0, 5.0, 6.0, 7.0, 4.0])
    (2.0, 7.0)
    """
    count, ordered, kept = len(found), sorted(found), None
    for k in range(1, count // 2 + 1):
        outside = 2 * sum(math.comb(count, i) for i in range(k)) / 2**count
        if 1 - outside >= _LEAST_LEVEL:
            kept = ordered[k - 1], ordered[-k]
    return kept


def method_names(results: Results) -> list[str]:
    """All methods: those with a floor or a fit of their own, then scaled ones, then raw ones."""
    found = dict.fromkeys(name for record in results.values() for name in record["methods"])
    return sorted(found, key=lambda name: _KINDS.index(group(name)))


def method_tables(results: Results) -> list[str]:
    """Markdown: for each question a table of methods by measures, medians over sets with their interval."""
    lines: list[str] = []
    for title, measures in _TABLES.items():
        lines += [f"**{title}**", "", "| method | " + " | ".join(name for _, name in measures) + " |"]
        lines += ["| --- |" + " ---: |" * len(measures)]
        for method in method_names(results):
            cells = [_median_cell(results, method, measure) for measure, _ in measures]
            lines.append(f"| {method} | {' | '.join(cells)} |")
        lines.append("")
    return lines


def set_tables(results: Results) -> list[str]:
    """Markdown: for the main measures a table of methods by sets."""
    lines: list[str] = []
    for measure, title in _BY_SET.items():
        lines += [f"**{title}**", "", "| method | " + " | ".join(SHORT.get(name, name) for name in results) + " |"]
        lines += ["| --- |" + " ---: |" * len(results)]
        for method in method_names(results):
            numbers = [by_set(record, method, measure) for record in results.values()]
            lines.append(f"| {method} | {' | '.join(_number(number) for number in numbers)} |")
        lines.append("")
    return lines


def overshoot_table(results: Results, method: str = "default + reference", factor: float = 100.0) -> list[str]:
    """Markdown: the cuts where a method's variance grows by more than `factor` times what the squared error does.

    Beside it how much the variances of others grow, as factors, and what share of the shifted rows its intervals hold.
    """
    others = ("default", "leverage, scaled", "injected, scaled")
    lines = [f"| set | input | squared error | {method} | {' | '.join(others)} | coverage | width |"]
    lines += ["| --- | --- |" + " ---: |" * (len(others) + 4)]
    for name, record in results.items():
        grown = {other: values(record, other, "variance_growth") for other in (method, *others)}
        error, held, width = (values(record, method, measure) for measure in ("error_growth", "coverage", "width"))
        if error is None or held is None or width is None:
            continue
        for place, cut in enumerate(record["cuts"]):
            growths = [error[place], *(np.nan if one is None else one[place] for one in grown.values())]
            if growths[1] - growths[0] > math.log(factor):
                cells = [
                    *(f"{math.exp(growth):.2g}" for growth in growths),
                    f"{held[place]:.2f}",
                    f"{width[place]:.3g}",
                ]
                lines.append(f"| {SHORT.get(name, name)} | {cut['input']} {cut['direction']} | {' | '.join(cells)} |")
    return lines if len(lines) > 2 else ["None."]


def _median_cell(results: Results, method: str, measure: str) -> str:
    found = [number for record in results.values() if (number := by_set(record, method, measure)) is not None]
    if not found:
        return "-"
    interval = order_interval(found)
    return _number(float(np.median(found))) + (
        "" if interval is None else f" ({_number(interval[0])} to {_number(interval[1])})"
    )


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if abs(value) < 100:
        return f"{round(value, 2) + 0.0:.2f}"  # no -0.00
    return f"{value:.0f}" if abs(value) < 1e5 else f"{value:.0e}"

"""Tables of the shift study, from its JSON alone: one number for each set, then the median over the sets.

The cuts of a set share rows and networks' training rows, so they are no independent samples: a set counts as one. Its
number is the mean over its cuts of what is bounded or a logarithm (coverage, AUROC, ranking, growth), and the median
over its cuts of what a single cut can drive anywhere (NLL, CRPS, width, RMSE). The interval of the median over sets is
between two order statistics, as of the sign test: it assumes nothing but independent sets.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from studies.pages import SHORT, Results, counted, order_interval, page, run_where, table, written
from studies.shift.claims import claims_page, slope, values
from studies.uci.pages import group

_KINDS = ("floor", "scaled", "raw", "intervals")
_MEDIANS = ("nll", "crps", "width", "rmse")

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


def by_set(record: Mapping[str, Any], method: str, measure: str) -> float | None:
    """The one number of a set."""
    if measure == "slope":
        return slope(record, method)
    by_cut = values(record, method, measure)
    if by_cut is None:
        return None
    return float(np.median(by_cut) if measure.removeprefix("inside_") in _MEDIANS else by_cut.mean())


def method_names(results: Results) -> list[str]:
    """All methods: those with a floor or a fit of their own, then scaled ones, then raw ones."""
    names = dict.fromkeys(name for record in results.values() for name in record["methods"])
    return sorted(names, key=lambda name: _KINDS.index(group(name)))


def method_tables(results: Results) -> list[str]:
    """Markdown: for each question a table of methods by measures, medians over sets with their interval."""
    lines: list[str] = []
    for title, measures in _TABLES.items():
        rows = [
            [method, *(_median_cell(results, method, measure) for measure, _ in measures)]
            for method in method_names(results)
        ]
        lines += [f"**{title}**", "", *table(["method", *(name for _, name in measures)], rows), ""]
    return lines


def set_tables(results: Results) -> list[str]:
    """Markdown: for the main measures a table of methods by sets."""
    lines: list[str] = []
    for measure, title in _BY_SET.items():
        rows = [
            [method, *(_number(by_set(record, method, measure)) for record in results.values())]
            for method in method_names(results)
        ]
        lines += [f"**{title}**", "", *table(["method", *(SHORT.get(name, name) for name in results)], rows), ""]
    return lines


def overshoot_table(results: Results, method: str = "default + reference", factor: float = 100.0) -> list[str]:
    """Markdown: the cuts where a method's variance grows by more than `factor` times what the squared error does.

    Beside it how much the variances of others grow, as factors, and what share of the shifted rows its intervals hold.
    """
    others = ("default", "leverage, scaled", "injected, scaled")
    rows = []
    for name, record in results.items():
        grown = [values(record, other, "variance_growth") for other in (method, *others)]
        error, coverage, width = (values(record, method, measure) for measure in ("error_growth", "coverage", "width"))
        if error is None or coverage is None or width is None:
            continue
        for place, cut in enumerate(record["cuts"]):
            growths = [error[place], *(np.nan if one is None else one[place] for one in grown)]
            if growths[1] - growths[0] > math.log(factor):
                factors = (f"{math.exp(growth):.2g}" for growth in growths)
                ends = f"{coverage[place]:.2f}", f"{width[place]:.3g}"
                rows.append([SHORT.get(name, name), f"{cut['input']} {cut['direction']}", *factors, *ends])
    head = ("set", "input", "squared error", method, *others, "coverage", "width")
    return table(head, rows, 2) if rows else ["None."]


def _median_cell(results: Results, method: str, measure: str) -> str:
    numbers = [number for record in results.values() if (number := by_set(record, method, measure)) is not None]
    if not numbers:
        return "-"
    interval = order_interval(numbers)
    return _number(float(np.median(numbers))) + (
        "" if interval is None else f" ({_number(interval[0])} to {_number(interval[1])})"
    )


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if abs(value) < 100:
        return f"{round(value, 2) + 0.0:.2f}"  # no -0.00
    return f"{value:.0f}" if abs(value) < 1e5 else f"{value:.0e}"


def tables(results: Results) -> str:
    """Fill the page: how it was run, and the tables."""
    rows, left_out = [], []
    for name, record in results.items():
        shifted = sorted(cut["shifted"] for cut in record["cuts"])
        reach = str(shifted[0]) if shifted[0] == shifted[-1] else f"{shifted[0]} to {shifted[-1]}"
        sizes = [record["rows"][part] for part in ("train", "validation", "inside")]
        counts = [len(record["cuts"]), len(record["left_out"]), *sizes, reach, round(record["seconds"]["total"])]
        rows.append([SHORT.get(name, name), *counts])
        for one in record["left_out"]:
            place = f"input {one['input']} {one['direction']}"
            left_out.append(f"- {SHORT.get(name, name)}, {place}: {one['reason']}.")
    return page(
        "shift",
        sets=counted(results),
        cuts=str(sum(len(record["cuts"]) for record in results.values())),
        where=run_where(list(results.values())),
        set_table=table(("set", "cuts", "left out", "train", "validation", "inside", "shifted", "seconds"), rows),
        methods=method_tables(results),
        overshoot=overshoot_table(results),
        by_set=set_tables(results),
        left_out=left_out or "Nothing.",
    )


pages = written(tables, claims_page)

"""The methods of the UCI study side by side: means and standard errors over splits, ranks over sets.

The splits of a set share rows, so their standard errors are too small for a test of significance; they tell how much a
mean would move with other splits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from latedrop.crowd.blocks import standard_error

__all__ = ["MEASURES", "SHORT", "Results", "mean_ranks", "method_tables", "verdicts", "winners"]

Results: TypeAlias = Mapping[str, Mapping[str, Any]]
Cells: TypeAlias = dict[str, dict[str, list[float]]]

MEASURES = {"nll": "NLL, without log(2 pi)/2", "ma": "Miscalibration area", "crps": "CRPS, in the target's unit"}
SHORT = {"protein-tertiary-structure": "protein", "boston-housing": "boston", "wine-quality-red": "wine"}


def method_tables(results: Results, *, deep: bool) -> list[str]:
    """Markdown: for each measure a table of methods by sets with their mean rank, the best of a set in bold."""
    lines: list[str] = []
    for measure, title in MEASURES.items():
        cells = _cells(results, measure, deep=deep)
        ranks = mean_ranks(cells)
        best = winners(cells)
        lines += [f"**{title}** (mean ± standard error over splits; lower is better)", ""]
        lines += ["| method | " + " | ".join(SHORT.get(name, name) for name in results) + " | mean rank |"]
        lines += ["| --- |" + " ---: |" * (len(results) + 1)]
        for method in sorted(cells, key=lambda method: ranks[method]):
            row = [_cell(cells[method].get(name, []), best.get(name) == method) for name in results]
            lines.append(f"| {method} | {' | '.join(row)} | {ranks[method]:.2f} |")
        lines.append("")
    return lines


def mean_ranks(cells: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """The rank of each method's mean, 1 for the lowest, averaged over the sets.

    >>> mean_ranks({"a": {"x": [1.0], "y": [3.0]}, "b": {"x": [2.0], "y": [1.0]}, "c": {"x": [5.0], "y": [4.0]}})
    {'a': 1.5, 'b': 1.5, 'c': 3.0}
    """
    ranks: dict[str, list[int]] = {method: [] for method in cells}
    for name in next(iter(cells.values())):
        for rank, method in enumerate(sorted(cells, key=lambda method: np.mean(cells[method][name])), 1):
            ranks[method].append(rank)
    return {method: float(np.mean(values)) for method, values in ranks.items()}


def winners(cells: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, str]:
    """The method of the lowest mean, by set."""
    names = next(iter(cells.values()))
    return {name: min(cells, key=lambda method: np.mean(cells[method][name])) for name in names}


def verdicts(results: Results) -> list[str]:
    """Markdown: who wins, and where what this library does loses."""
    lines = []
    for deep, network, ours in (
        (False, "One hidden layer", ("injected, scaled", "injected, floor")),
        (True, "Three hidden layers", ("injected, scaled", "injected per site, floor")),
    ):
        cells = _cells(results, "nll", deep=deep)
        ranks = mean_ranks(cells)
        order = sorted(ranks, key=lambda method: ranks[method])
        lines.append(f"- {network}: by mean rank of the NLL, {_quoted(order[:3])} come first, `{order[-1]}` last.")
        best = [f"{SHORT.get(name, name)}: `{method}`" for name, method in winners(cells).items()]
        lines.append(f"  Lowest NLL by set: {'; '.join(best)}.")
        for method in ours:
            for rival in (other for other in order if other not in ours):
                lost = [name for name in results if np.mean(cells[method][name]) > np.mean(cells[rival][name])]
                if lost and rival in ("constant", "laplace, scaled", "embedded, scaled", "concrete, scaled"):
                    where = ", ".join(SHORT.get(name, name) for name in lost)
                    lines.append(
                        f"  `{method}` has a higher NLL than `{rival}` on {len(lost)} of {len(results)}: {where}."
                    )
    return lines


def _cells(results: Results, measure: str, *, deep: bool) -> Cells:
    """Splits' values by method and set, of the methods that have this measure."""
    cells: Cells = {}
    for name, record in results.items():
        methods = record["deep"]["methods"] if deep else record["methods"]
        for method, measures in methods.items():
            if measure in measures:
                cells.setdefault(method, {})[name] = measures[measure]
    return cells


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _cell(values: Sequence[float], best: bool) -> str:
    text = f"{np.mean(values):.3f} ± {standard_error(np.array(values)):.3f}"
    return f"**{text}**" if best else text

"""The methods of the UCI study side by side: means and standard errors over splits, ranks over sets, like with like.

A variance may be taken as it is, times a scale, or with scale and floor. Methods are ranked and compared only with
those that had the same done to them. Standard errors account for the rows that splits share (Nadeau and Bengio 2003).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from studies.significance import split_error

__all__ = [
    "KINDS",
    "QUALITIES",
    "SHORT",
    "Quality",
    "Results",
    "columns",
    "counted",
    "duel_table",
    "group",
    "mean_ranks",
    "method_table",
    "overlap",
    "rank_table",
    "verdicts",
]

Results: TypeAlias = Mapping[str, Mapping[str, Any]]
Cells: TypeAlias = dict[str, dict[str, list[float]]]

SHORT = {"protein-tertiary-structure": "protein", "boston-housing": "boston", "wine-quality-red": "wine"}
KINDS = {
    "raw": "As it is",
    "scaled": "Scaled",
    "floor": "Scale and floor",
    "intervals": "Relaxed scale, or conformal intervals",
}
_WITH_FLOOR = ("constant", "default", "default + reference")
_POST_HOC = ("injected", "injected per site", "rate-in", "laplace", *_WITH_FLOOR)
"""What takes one trained network as it is."""
_LIKE = ("raw", "scaled", "floor")
_LEVEL = 0.9


@dataclass(frozen=True)
class Quality:
    """A measure of quality.

    Attributes:
        name: in the results.
        title: in words.
        better: in words.
        loss: of a mean, lower is better; None where neither side is.
        kinds: what may differ between kinds is shown for each.
    """

    name: str
    title: str
    better: str
    loss: Callable[[float], float] | None
    kinds: tuple[str, ...] = tuple(KINDS)


QUALITIES = (
    Quality("nll", "NLL, without log(2 pi)/2", "lower is better", float),
    Quality("crps", "CRPS, in the target's unit", "lower is better", float),
    Quality("ma", "Miscalibration area", "lower is better", float),
    Quality("coverage", "Share held by 90 % intervals", "nearer to 0.9 is better", lambda mean: abs(mean - _LEVEL)),
    Quality("width", "Mean width of 90 % intervals, in the target's unit", "no side is better by itself", None),
    Quality(
        "ranking",
        "Rank correlation of squared error and variance",
        "higher is better; a scale or a floor moves it only through the rate",
        lambda mean: -mean,
        ("floor",),
    ),
    Quality("rmse", "RMSE, in the target's unit", "lower is better; kinds differ only in the rate", float, ("floor",)),
)


def group(method: str) -> str:
    """The kind that a method is compared within.

    >>> group("laplace, scaled"), group("constant"), group("injected, relaxed")
    ('scaled', 'floor', 'intervals')
    """
    if method in _WITH_FLOOR:
        return "floor"
    kind = method.rpartition(", ")[2]
    return kind if kind in KINDS else "intervals"


def counted(results: Results) -> str:
    """How many sets, in words.

    >>> counted({"yacht": {}})
    '1 set'
    """
    return f"{len(results)} set{'s' if len(results) != 1 else ''}"


def overlap(record: Mapping[str, Any]) -> float:
    """Test rows for each training row: how much splits share, for `split_error`."""
    return float(record["rows"]["test"] / record["rows"]["train"])


def columns(results: Results, quality: str, *, deep: bool, kind: str) -> Cells:
    """Splits' values by method and set, of the methods of a kind that every set has."""
    cells: Cells = {}
    for name, record in results.items():
        for method, measures in (record["deep"] if deep else record)["methods"].items():
            if group(method) == kind and quality in measures:
                cells.setdefault(method, {})[name] = measures[quality]
    return {method: found for method, found in cells.items() if len(found) == len(results)}


def mean_ranks(cells: Mapping[str, Mapping[str, Sequence[float]]], loss: Callable[[float], float]) -> dict[str, float]:
    """The rank of each method's mean, 1 for the least loss, averaged over the sets; equal ones share theirs.

    >>> mean_ranks({"a": {"x": [1.0], "y": [3.0]}, "b": {"x": [2.0], "y": [1.0]}, "c": {"x": [5.0], "y": [3.0]}}, float)
    {'a': 1.75, 'b': 1.5, 'c': 2.75}
    """
    names = list(next(iter(cells.values()), {}))
    losses = np.array([[loss(float(np.mean(found[name]))) for name in names] for found in cells.values()])
    less, equal = losses[:, None] > losses[None], losses[:, None] == losses[None]
    ranks = (less.sum(1) + (equal.sum(1) + 1) / 2).mean(-1) if len(cells) else []
    return {method: float(rank) for method, rank in zip(cells, ranks, strict=True)}


def method_table(results: Results, quality: Quality, *, deep: bool, kind: str) -> list[str]:
    """Markdown: methods of a kind by sets, the best of a set in bold, with ranks among all and among post hoc ones."""
    cells = columns(results, quality.name, deep=deep, kind=kind)
    ranks, few = _both_ranks(cells, quality)
    head = ["method", *(SHORT.get(name, name) for name in results), *(["rank", "post hoc"] if quality.loss else [])]
    lines = [f"| {' | '.join(head)} |", "| --- |" + " ---: |" * (len(head) - 1)]
    best = _best(cells, quality)
    for method in sorted(cells, key=lambda method: ranks.get(method, 0.0)):
        row = [_cell(cells[method][name], overlap(results[name]), best.get(name) == method) for name in results]
        if quality.loss:
            row += [f"{ranks[method]:.2f}", f"{few[method]:.2f}" if method in few else ""]
        lines.append(f"| {method} | {' | '.join(row)} |")
    return lines


def rank_table(results: Results, *, deep: bool, kind: str) -> list[str]:
    """Markdown: the mean rank of every method of a kind by every quality that has a better side."""
    ranked = [quality for quality in QUALITIES if quality.loss]
    found = {
        quality.name: _both_ranks(columns(results, quality.name, deep=deep, kind=kind), quality)[0]
        for quality in ranked
    }
    heads = [quality.name.upper() if len(quality.name) < 5 else quality.name for quality in ranked]
    lines = [f"| method | {' | '.join(heads)} |"]
    lines += ["| --- |" + " ---: |" * len(ranked)]
    for method in sorted(found["nll"], key=found["nll"].__getitem__):
        lines.append(f"| {method} | {' | '.join(f'{found[quality.name][method]:.2f}' for quality in ranked)} |")
    return lines


def verdicts(results: Results, *, deep: bool) -> list[str]:
    """Markdown: by NLL who comes first in every kind."""
    lines = []
    for kind in _LIKE:
        ranks, few = _both_ranks(columns(results, "nll", deep=deep, kind=kind), QUALITIES[0])
        order, post = (sorted(found, key=found.__getitem__) for found in (ranks, few))
        if len(order) > 1:
            lines.append(
                f"- {KINDS[kind]}: by mean rank of the NLL {_quoted(order[:3])} come first, `{order[-1]}` last; among "
                f"what takes one trained network as it is, {_quoted(post[:1])}."
            )
    return lines


def duel_table(results: Results, *, deep: bool) -> list[str]:
    """Markdown: on how many sets each method has a lower mean NLL than injection of the same kind, and by how much."""
    kinds = {kind: columns(results, "nll", deep=deep, kind=kind) for kind in _LIKE}
    cells: dict[str, dict[str, str]] = {}
    for kind, found in kinds.items():
        own = f"injected, {kind}"
        for rival in (other for other in found if other != own and own in found):
            off = [float(np.mean(found[rival][name]) - np.mean(found[own][name])) for name in results]
            name = rival.removesuffix(f", {kind}")
            cells.setdefault(name, {})[kind] = f"{sum(gap < 0 for gap in off)} of {len(off)}, {np.median(off):+.3f}"
    lines = [f"| method | {' | '.join(KINDS[kind].lower() for kind in kinds)} |", "| --- |" + " ---: |" * len(kinds)]
    lines += [f"| {name} | {' | '.join(row.get(kind, '') for kind in kinds)} |" for name, row in cells.items()]
    return lines


def _both_ranks(cells: Cells, quality: Quality) -> tuple[dict[str, float], dict[str, float]]:
    """Among all methods, and among those that take one trained network as it is."""
    if quality.loss is None:
        return {}, {}
    post = {name: found for name, found in cells.items() if name in _POST_HOC or name.rpartition(", ")[0] in _POST_HOC}
    return mean_ranks(cells, quality.loss), mean_ranks(post, quality.loss)


def _best(cells: Cells, quality: Quality) -> dict[str, str]:
    """The method of the least loss, by set."""
    loss = quality.loss
    if loss is None:
        return {}
    names = next(iter(cells.values()), {})
    return {name: min(cells, key=lambda method: loss(float(np.mean(cells[method][name])))) for name in names}


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _cell(values: Sequence[float], shared: float, best: bool) -> str:
    mean = round(float(np.mean(values)), 3) + 0.0  # no -0.000
    text = f"{mean:.3f} ± {split_error(values, shared):.3f}"
    return f"**{text}**" if best else text

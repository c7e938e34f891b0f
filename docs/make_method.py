"""Draw docs/images/method.png, the method in one picture: `python docs/make_method.py`, from the repository's root.

The third step shows real draws: 24 hidden units with random weights, 400 masks at rate 0.2, and the scale that makes
their variance fit errors that are 2.2 times as large.
"""

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from latedrop import plots
from latedrop.files import write_aside
from latedrop.plots import png
from latedrop.plots.canvas import COLOURS, GREY

if TYPE_CHECKING:
    from matplotlib.axes import Axes

IMAGE = Path(__file__).parent / "images" / "method.png"
UNITS, RATE, DRAWS = (3, 6, 1), 0.2, 400
BLUE, ORANGE = COLOURS[:2]


def units(left: float, low: float, width: float, height: float) -> list[list[tuple[float, float]]]:
    """Where the units of each layer are, in a box."""
    return [
        [(left + width * layer / (len(UNITS) - 1), low + height * (place + 1) / (count + 1)) for place in range(count)]
        for layer, count in enumerate(UNITS)
    ]


def network(ax: "Axes", box: tuple[float, float, float, float], size: float, off: frozenset[int] = frozenset()) -> None:
    """A network in a box; hidden units that are `off` are crossed out, with their connections."""
    layers = units(*box)
    for layer, (first, second) in enumerate(pairwise(layers)):
        for i, (x0, y0) in enumerate(first):
            for j, (x1, y1) in enumerate(second):
                if not ((layer == 0 and j in off) or (layer == 1 and i in off)):
                    ax.plot([x0, x1], [y0, y1], color="0.7", linewidth=0.8, zorder=1)
    for layer, places in enumerate(layers):
        for i, (x, y) in enumerate(places):
            dead = layer == 1 and i in off
            ax.scatter(x, y, s=size, facecolor="white" if dead else BLUE, edgecolor=GREY if dead else BLUE, zorder=2)
            if dead:
                ax.scatter(x, y, s=size * 0.5, marker="x", color=GREY, linewidths=1.2, zorder=3)


def arrow(ax: "Axes", x0: float, x1: float, y: float) -> None:
    """From one step to the next."""
    ax.annotate("", (x1, y), (x0, y), arrowprops={"arrowstyle": "-|>", "color": "0.25", "linewidth": 1.8})


def words(ax: "Axes", x: float, title: str, text: str) -> None:
    """The heading of a step and what happens in it."""
    ax.text(x, 4.55, title, ha="center", va="bottom", size=15, weight="bold")
    ax.text(x, 0.72, text, ha="center", va="top", size=11.5, linespacing=1.45)


def draws() -> tuple[np.ndarray, float]:
    """Outputs of thinned networks for one input, and the scale that fits errors 2.2 times as large as their scatter."""
    rng = np.random.default_rng(4)
    h = np.abs(rng.normal(size=24))
    w = rng.normal(size=24) * 0.4
    kept = rng.random((DRAWS, 24)) >= RATE
    outputs = (kept / (1 - RATE)) @ (h * w)
    error = rng.normal(size=200) * outputs.std() * 2.2
    return outputs, float((error**2 / outputs.var()).mean())


def bells(ax: "Axes", x: float, outputs: np.ndarray, scale: float) -> None:
    """The outputs of all draws as ticks and bars, the normal curve of their variance, and the scaled one."""
    z = (outputs - outputs.mean()) / outputs.std()
    unit = 0.36

    def curve(spread: float, height: float, color: str, style: str) -> None:
        at = np.linspace(-3 * spread, 3 * spread, 200)
        ax.plot(
            x + unit * at, 1.15 + height * np.exp(-((at / spread) ** 2) / 2), color=color, ls=style, lw=2.4, zorder=3
        )

    counts, edges = np.histogram(z, bins=13, range=(-3, 3))
    bars = unit * (edges[1] - edges[0])
    ax.bar(
        x + unit * (edges[:-1] + edges[1:]) / 2, 2.1 * counts / counts.max(), bars * 0.9, 1.15, color=BLUE, alpha=0.3
    )
    curve(1.0, 2.1, BLUE, "-")
    wide = float(np.sqrt(scale))
    curve(wide, 2.1 / wide, ORANGE, "--")
    ax.plot([x - 3.2 * wide * unit, x + 3.2 * wide * unit], [1.15, 1.15], color="0.25", linewidth=1)
    ax.plot([x, x], [1.15, 3.35], color="0.25", linewidth=1, linestyle=":")
    ax.text(x, 3.42, r"$\hat y$", ha="center", va="bottom", size=14)
    ax.text(x + unit * 1.3, 2.75, r"raw: $\sigma^2$", color=BLUE, size=12.5, ha="left")
    ax.text(x + unit * wide * 1.2, 1.85, r"scaled: $s\,\sigma^2$", color=ORANGE, size=12.5, ha="left")


def main() -> None:
    """Draw and write."""
    figure = plots.new_figure(13, 4.3)
    ax = figure.add_subplot()
    ax.set(xlim=(0, 15.8), ylim=(-0.15, 5.0))
    ax.axis("off")
    network(ax, (0.6, 0.9, 1.9, 3.4), 110)
    words(ax, 1.55, "1. Your network", "trained without dropout;\nits weights stay as they are")
    arrow(ax, 2.9, 3.7, 2.6)
    for place, (low, off) in enumerate(((3.2, {1, 4}), (2.05, {0}), (0.9, {2, 3, 5}))):
        network(ax, (4.1, low, 1.7, 1.2), 34, frozenset(off))
        ax.text(6.02, low + 0.6, f"$y_{{{('1', '2', 'T')[place]}}}$", va="center", size=14)
    ax.text(6.1, 1.98, "⋮", ha="center", va="center", size=15)
    words(ax, 4.95, "2. Inject dropout", "T draws: each thins the network,\nunits go off at rate φ")
    arrow(ax, 6.6, 7.4, 2.6)
    bells(ax, 9.2, *draws())
    words(
        ax, 9.2, "3. Scatter, then scale", "over draws: mean ŷ and variance σ²;\non validation rows: s = mean(e² / σ²)"
    )
    arrow(ax, 11.4, 12.2, 2.6)
    for place, half in enumerate((0.5, 1.0, 0.35, 0.75)):
        x = 12.8 + 0.62 * place
        y = 2.5 + (0.35, -0.3, 0.1, 0.55)[place]
        ax.errorbar(x, y, half, fmt="o", color=ORANGE, capsize=5, linewidth=2.2, markersize=7)
        ax.scatter(x, y + half * (0.6, -0.75, 0.3, -0.5)[place], marker="D", s=38, color="black", zorder=4)
    words(ax, 13.75, "4. Predict", "mean and interval that hold the target\n(black) as often as they say")
    write_aside(IMAGE, png(figure))
    print(IMAGE)


if __name__ == "__main__":
    main()

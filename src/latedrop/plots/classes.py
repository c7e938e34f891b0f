"""Pictures of classifiers: does the confidence hold, and what does rejecting rows gain."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from latedrop.plots.arrays import Array, not_empty, same_length
from latedrop.plots.canvas import GREY, axes_or_new, style_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["reliability_diagram"]


def reliability_diagram(curves: Mapping[str, tuple[Array, Array]], ax: "Axes | None" = None) -> "Axes":
    """Share of rows that are right against their mean confidence, a curve for each label.

    Below the diagonal the probabilities are too sure. `latedrop.metrics.classes.reliability` gives both columns.
    """
    ax = axes_or_new(ax, 5.2)
    ax.plot([0, 1], [0, 1], color=GREY, linewidth=1, label="exact")
    for index, (label, pair) in enumerate(not_empty(curves, "curve").items()):
        confidence, right = same_length({"confidence": pair[0], "right": pair[1]})
        ax.plot(confidence, right, label=label, **style_of(index))
    ax.set(xlabel="confidence", ylabel="share of rows that are right", xlim=(0, 1.02), ylim=(0, 1.02))
    ax.set_aspect("equal")
    ax.legend(loc="upper left")
    return ax

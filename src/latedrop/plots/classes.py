"""Pictures of classifiers and detectors: does the confidence hold, what does rejecting gain, which rows are odd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from latedrop.errors import ArgumentError, DataError
from latedrop.plots.canvas import GREY, Array, Floats, as_array, axes_or_new, not_empty, same_length, style_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["confusion", "doubtful_images", "reliability_diagram", "risk_coverage"]

_MOST_NAMES = 30


def reliability_diagram(curves: Mapping[str, tuple[Array, Array]], ax: Axes | None = None) -> Axes:
    """Share of rows that are right against their mean confidence, a curve for each label.

    Below the diagonal the probabilities are too sure. `latedrop.metrics.classes.reliability` gives both columns.

    >>> reliability_diagram({"softmax": ([0.5, 0.7, 0.9], [0.4, 0.6, 0.7])}).get_xlabel()
    'confidence'
    """
    pairs = _pairs(curves, "confidence", "right")
    ax = axes_or_new(ax, 5.2)
    ax.plot([0, 1], [0, 1], color=GREY, linewidth=1, label="exact")
    for index, (label, pair) in enumerate(pairs.items()):
        ax.plot(*pair, label=label, **style_of(index))
    ax.set(xlabel="confidence", ylabel="share of rows that are right", xlim=(0, 1.02), ylim=(0, 1.02))
    ax.set_aspect("equal")
    ax.legend(loc="upper left")
    return ax


def risk_coverage(curves: Mapping[str, tuple[Array, Array]], ax: Axes | None = None) -> Axes:
    """Error rate of the rows that are kept against their share, the surest first, a curve for each label.

    `latedrop.metrics.classes.risk_coverage` gives both columns.

    >>> risk_coverage({"confidence": ([0.5, 1.0], [0.01, 0.08])}).get_xlabel()
    'share of rows kept'
    """
    pairs = _pairs(curves, "kept", "risk")
    ax = axes_or_new(ax)
    for index, (label, pair) in enumerate(pairs.items()):
        ax.plot(*pair, label=label, **(style_of(index) | {"marker": ""}))
    ax.set(xlabel="share of rows kept", ylabel="error rate of these", xlim=(0, 1))
    ax.set_ylim(bottom=0)
    ax.legend(loc="upper left")
    return ax


def _pairs(curves: Mapping[str, tuple[Array, Array]], x: str, y: str) -> dict[str, list[Floats]]:
    return {label: same_length({x: pair[0], y: pair[1]}) for label, pair in not_empty(curves, "curve").items()}


def confusion(counts: Array, names: Sequence[str] = (), ax: Axes | None = None) -> Axes:
    """Which class rows have, which was predicted, and which were set aside.

    Args:
        counts: `(K, K)`, or `(K, K + 1)` with the rejected rows last: `latedrop.metrics.classes.confusion` gives them.
        names: of the classes; their numbers by default.
        ax: where to draw.

    >>> [text.get_text() for text in confusion([[8, 1], [0, 9]], ["cat", "dog"]).get_yticklabels()]
    ['cat', 'dog']
    """
    table = as_array(counts)
    if table.ndim != 2 or table.shape[1] - table.shape[0] not in (0, 1):
        raise DataError(f"expected counts (K, K), or (K, K + 1) with rejected rows; found shape {table.shape}.")
    shown = list(names) or [str(k) for k in range(len(table))]
    if len(shown) != len(table):
        raise ArgumentError(f"expected {len(table)} names of classes; found {len(shown)}.")
    ax = axes_or_new(ax, 5.6)
    share = table / np.maximum(table.sum(1, keepdims=True), 1)
    ax.imshow(share, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    if len(table) <= _MOST_NAMES:
        for (row, column), count in np.ndenumerate(table):
            if count:
                colour = "white" if share[row, column] > 0.5 else "black"
                ax.text(column, row, f"{count:.0f}", ha="center", va="center", color=colour, fontsize=8)
        columns = [*shown, "rejected"][: table.shape[1]]
        long = max(map(len, columns)) > 4
        ax.set_xticks(range(len(columns)), columns, rotation=45 if long else 0, ha="right" if long else "center")
        ax.set_yticks(range(len(shown)), shown)
    if table.shape[1] > table.shape[0]:
        ax.axvline(len(table) - 0.5, color=GREY, linewidth=1.5)
    ax.set(xlabel="predicted", ylabel="class")
    return ax


def doubtful_images(
    images: Array,
    doubt: Array,
    captions: Sequence[str] = (),
    ax: Axes | None = None,
    *,
    most: int = 18,
    columns: int = 6,
) -> Axes:
    """The images of the largest doubt side by side, the most doubtful first.

    Args:
        images: `(N, H, W)`, or `(N, C, H, W)` with 1 or 3 channels; each is shown from its darkest to its lightest.
        doubt: `(N,)`, such as `1 - p.confidence`, `p.entropy` or `p.novelty`.
        captions: a line for each of the N images; by default its row and doubt.
        ax: where to draw.
        most: how many.
        columns: how many side by side.

    >>> len(doubtful_images(np.zeros((5, 8, 8)), [0.1, 0.9, 0.3, 0.2, 0.8], most=3).texts)
    3
    """
    pictures, score = as_array(images), as_array(doubt).ravel()
    if pictures.ndim == 3:
        pictures = pictures[:, None]
    if pictures.ndim != 4 or pictures.shape[1] not in (1, 3) or len(pictures) != len(score) or not len(score):
        raise DataError(
            f"expected images (N, H, W) or (N, C, H, W) of 1 or 3 channels, and one doubt for each; found "
            f"{pictures.shape} and {score.shape}."
        )
    if captions and len(captions) != len(score):
        raise ArgumentError(f"expected {len(score)} captions, one for each image; found {len(captions)}.")
    chosen = np.argsort(-score, kind="stable")[:most]
    height, width = pictures.shape[2:]
    lines = -(-len(chosen) // columns)
    gap, head = max(1, width // 10), max(2, round(height * 0.45))
    canvas = np.ones((lines * (height + head), columns * (width + gap) - gap, 3))
    ax = axes_or_new(ax, 1.3 * lines + 0.3)
    for place, row in enumerate(chosen):
        top, left = (place // columns) * (height + head) + head, (place % columns) * (width + gap)
        one = pictures[row].transpose(1, 2, 0)
        span = one.max() - one.min()
        canvas[top : top + height, left : left + width] = (one - one.min()) / (span if span > 0 else 1)
        caption = captions[row] if captions else f"{row}: {score[row]:.2g}"
        ax.text(left + width / 2, top - head * 0.15, caption, ha="center", va="bottom", fontsize=7)
    ax.imshow(canvas, interpolation="nearest")
    ax.set(xticks=[], yticks=[], xlabel="from the most doubtful on", ylabel="images")
    ax.spines[:].set_visible(False)
    return ax

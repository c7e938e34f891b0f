"""Parts of the pages of all studies: Markdown tables, figures as PNG with one legend, short numbers."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from latedrop.plots import png
from latedrop.plots.canvas import GREY, band, style_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Results: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The records of a study by set."""

SHORT = {"protein-tertiary-structure": "protein", "boston-housing": "boston", "wine-quality-red": "wine"}
"""Names of sets in tables, where they differ from those of the files."""


def words(study: str) -> dict[str, str]:
    """Read the paragraphs of a study's pages, by the name of their section in its `words.md`."""
    _, *sections = (Path(__file__).parent / study / "words.md").read_text(encoding="utf-8").split("\n## ")
    return {name.strip(): text.strip() for name, _, text in (section.partition("\n") for section in sections)}


def table(head: Sequence[str], rows: Iterable[Sequence[object]], words: int = 1) -> list[str]:
    """Markdown; the first `words` columns are text, the others numbers, which end on the right.

    >>> table(["method", "NLL"], [["constant", 0.5]])
    ['| method | NLL |', '| --- | ---: |', '| constant | 0.5 |']
    """
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * words + " ---: |" * (len(head) - words)]
    return lines + [f"| {' | '.join(map(str, row))} |" for row in rows]


def captioned(study: str, *left_out: str) -> list[str]:
    """Markdown: the figures of a study with their captions, sections `figure NAME` of its `words.md`."""
    lines = ["## Figures", ""]
    captions = {name[7:]: text for name, text in words(study).items() if name.startswith("figure ")}
    shown = [(name, caption) for name, caption in captions.items() if name not in left_out]
    for place, (name, caption) in enumerate(shown, 1):
        lines += [f"![{caption}]({name}.png)", "", f"*Figure {place}. {caption}*", ""]
    return lines


def page(study: str, **parts: str | Sequence[str]) -> str:
    """Fill the template of a study's tables, `tables.md` in its folder; parts may be lines."""
    template = (Path(__file__).parent / study / "tables.md").read_text(encoding="utf-8")
    return template.format(**{name: part if isinstance(part, str) else "\n".join(part) for name, part in parts.items()})


def counted(results: Results) -> str:
    """Say how many sets there are.

    >>> counted({"yacht": {}})
    '1 set'
    """
    return f"{len(results)} set{'s' if len(results) != 1 else ''}"


def order_interval(numbers: Sequence[float]) -> tuple[float, float] | None:
    """The narrowest interval between order statistics that holds the median with at least 90 %; None for fewer than 5.

    >>> order_interval([3.0, 1.0, 2.0, 8.0, 5.0, 6.0, 7.0, 4.0])
    (2.0, 7.0)
    """
    count, ordered, ends = len(numbers), sorted(numbers), None
    for k in range(1, count // 2 + 1):
        outside = 2 * sum(math.comb(count, i) for i in range(k)) / 2**count
        if 1 - outside >= 0.9:
            ends = ordered[k - 1], ordered[-k]
    return ends


def run_where(records: Sequence[Mapping[str, Any]]) -> str:
    """Say how long the work of some records took, on which machines, and with which torch."""
    seconds = sum(record["seconds"]["total"] for record in records)
    machines = sorted({record["machine"]["device"] for record in records})
    return f"{seconds / 60:.1f} minutes in all on {' and '.join(machines)} (torch {records[0]['versions']['torch']})"


def written(
    tables: Callable[[Results], str],
    claims: Callable[[Results], list[str]],
    figures: Callable[[Results], Mapping[str, Figure]] | None = None,
) -> Callable[[Results, Path], dict[str, bytes]]:
    """Return what makes all pages of a study, and its figures where matplotlib is installed, by file name."""

    def pages(results: Results, folder: Path) -> dict[str, bytes]:
        texts = {"tables.md": tables(results), "claims.md": "\n".join(claims(results))}
        files = {name: as_file(text) for name, text in texts.items()}
        return files if figures is None else drawn(lambda: figures(results)) | files

    return pages


def as_file(text: str) -> bytes:
    """Encode a page; nothing stands between its paragraphs but one empty line."""
    return (re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n").encode()


def drawn(figures: Callable[[], Mapping[str, Figure]]) -> dict[str, bytes]:
    """Return the figures as PNG by file name; none, and say so, where matplotlib is missing."""
    if find_spec("matplotlib") is None:
        print('figures: skipped, no matplotlib; pip install "latedrop[plots]", then --figures', file=sys.stderr)
        return {}
    return {f"{name}.png": png(figure) for name, figure in figures().items()}


def one_legend(figure: Figure, *panels: Axes, columns: int | None = None) -> None:
    """Draw one legend for all panels, above them, of what some of these show."""
    shown: dict[str, Any] = {}
    for ax in panels:
        lines, labels = ax.get_legend_handles_labels()
        shown |= dict(zip(labels, lines, strict=True))
    for ax in figure.axes:
        legend = ax.get_legend()
        if legend is not None:
            legend.remove()
    figure.legend(list(shown.values()), list(shown), loc="outside upper center", ncols=columns or len(shown))


def metric_by_rate(rates: Any, values: Mapping[str, Any], ax: Axes) -> None:
    """Draw a metric `(R, S)` for each label against the rates `(R,)`: mean and standard deviation of S repeats."""
    for index, (label, repeats) in enumerate(values.items()):
        mean, std, style = repeats.mean(1), repeats.std(1), style_of(index)
        ax.plot(rates, mean, label=label, **style)
        band(ax, np.asarray(rates), mean - std, mean + std, color=style["color"], alpha=0.2)
    ax.set(xlabel="dropout rate")
    ax.legend()


def tradeoff(nll: Any, ma: Any, rmse: Any, ax: Axes, rmse_label: str = "RMSE") -> None:
    """Draw paths `(R, P)` from the scale that is best for the NLL to the relaxed scale; RMSE `(R,)` by colour."""
    ax.plot(nll.T, ma.T, color=GREY, linewidth=1, zorder=1)
    look: dict[str, Any] = {"cmap": "cividis", "vmin": rmse.min(), "vmax": rmse.max()}
    look |= {"edgecolors": GREY, "linewidths": 0.5, "zorder": 2}
    for place, marker, size, label in (
        (slice(1, -1), "o", 16, None),
        (slice(0, 1), "o", 50, "scale"),
        (slice(-1, None), "s", 50, "relaxed scale"),
    ):
        x, y = nll[:, place], ma[:, place]
        points = ax.scatter(x, y, c=np.broadcast_to(rmse[:, None], x.shape), s=size, marker=marker, label=label, **look)
    ax.figure.colorbar(points, ax=ax, label=rmse_label)
    ax.legend()
    ax.set(xlabel="NLL [nats]", ylabel="miscalibration area")
    ax.margins(x=0.1, y=0.2)

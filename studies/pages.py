"""Pages and figures on disk, and the one legend that all panels of a figure share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latedrop.files import write_aside
from latedrop.report import png

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["drawn", "one_legend", "written"]


def drawn(figures: Callable[[], Mapping[str, Figure]]) -> dict[str, bytes]:
    """The figures as PNG by the name of their file; none, and a line that says so, where matplotlib is missing."""
    if find_spec("matplotlib") is None:
        print('figures: skipped, no matplotlib; pip install "latedrop[plots]", then --figures', file=sys.stderr)
        return {}
    return {f"{name}.png": png(figure) for name, figure in figures().items()}


def written(folder: Path, files: Mapping[str, bytes]) -> list[Path]:
    """Write files by their name; their paths."""
    for name, content in files.items():
        write_aside(folder / name, content)
    return [folder / name for name in files]


def one_legend(figure: Figure, *panels: Axes, **names: str) -> None:
    """One for all panels, above them, of what some of these show; some of it under other names."""
    found: dict[str, Any] = {}
    for ax in panels:
        lines, labels = ax.get_legend_handles_labels()
        found |= {names.get(label, label): line for label, line in zip(labels, lines, strict=True)}
    for ax in figure.axes:
        legend = ax.get_legend()
        if legend is not None:
            legend.remove()
    figure.legend(list(found.values()), list(found), loc="outside upper center", ncols=len(found))

"""The README's few numbers, from the committed pages of the studies and the committed speeds.

Medians over the eight UCI sets, of networks with three hidden layers, and over the networks of `benchmarks.speed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median

from benchmarks.speed_pages import rows_for_readme
from benchmarks.study_tables import PAGES, deep_nll, shift

__all__ = ["headline"]

_OURS, _CONSTANT, _FIVE = "default + reference", "constant", "ensemble, floor"


def headline(pages: Path = PAGES, speeds: str | None = None) -> str:
    """One row for each thing to compare with."""
    nll = _table(deep_nll(pages / "uci" / "index.md"))
    held = _table(shift(pages / "shift" / "index.md"))
    times = _table(rows_for_readme() if speeds is None else speeds, key=3)
    gain, lost = (_median_gain(nll, _OURS, other) for other in (_CONSTANT, _FIVE))
    coverage = {name: f"{100 * float(held[name]['coverage']):.0f} %" for name in (_OURS, _CONSTANT, _FIVE)}
    cpu, gpu = (_ratio(times, where) for where in ("CPU", "GPU"))
    rows = [
        ("one constant variance", f"NLL {_worded(gain)}; 90 % intervals beyond the training rows hold "
         f"{coverage[_OURS]} instead of {coverage[_CONSTANT]}", "latedrop study uci; latedrop study shift"),
        ("an ensemble of five networks, calibrated too", f"NLL {_worded(lost)}; beyond the training rows "
         f"{coverage[_OURS]} instead of {coverage[_FIVE]}; one network instead of five",
         "latedrop study uci; latedrop study shift"),
        ("the fastest other library, 50 draws", f"{cpu:.2f} of its time on a CPU, {gpu:.2f} on a GPU", "make bench"),
    ]  # fmt: skip
    lines = ["| against | the default of `calibrate` | measured by |", "| --- | --- | --- |"]
    return "\n".join([*lines, *(f"| {who} | {what} | `{how.replace('; ', '`, `')}` |" for who, what, how in rows)])


def _table(text: str, key: int = 1) -> dict[str, dict[str, str]]:
    """A Markdown table's rows by their first cells, each by the heads."""
    lines = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return {" ".join(cells[:key]): dict(zip(lines[0], cells, strict=True)) for cells in lines[2:]}


def _median_gain(nll: Mapping[str, Mapping[str, str]], ours: str, other: str) -> float:
    """By how many nats ours is lower."""
    sets = [name for name in nll[ours] if name not in ("method", "rank", "post hoc")]
    return median(float(nll[other][name].split()[0]) - float(nll[ours][name].split()[0]) for name in sets)


def _ratio(times: Mapping[str, Mapping[str, str]], where: str) -> float:
    """Time of ours, compiled where it is, over that of the best peer."""
    found = [row for row in times.values() if row["on"] == where]
    own = [row["compiled"] if row["compiled"] != "-" else row["latedrop"] for row in found]
    return median(
        float(mine.split()[0]) / float(row["best peer"].replace(",", " ").split()[0])
        for mine, row in zip(own, found, strict=True)
    )


def _worded(gain: float) -> str:
    return f"{'better' if gain >= 0 else 'worse'} by {abs(gain):.3f} nats"

"""The README's few numbers, from the committed results of the studies and the committed speeds.

Medians over the eight UCI sets, of networks with three hidden layers, and over the networks of `benchmarks.speed`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, median

from benchmarks.speed_pages import rows_for_readme
from studies.shift.pages import by_set
from studies.shift.study import STUDY as SHIFT
from studies.uci.study import STUDY as UCI

RESULTS = Path(__file__).parents[1] / "studies" / "results"
_OURS, _CONSTANT, _FIVE = "default + reference", "constant", "ensemble, floor"


def headline(results: Path = RESULTS, speeds: str | None = None) -> str:
    """One row for each thing to compare with."""
    uci, shift = (study.read(results / study.name, Namespace(csv=None)) for study in (UCI, SHIFT))
    gain, lost = (
        median(_nll(record, other) - _nll(record, _OURS) for record in uci.values()) for other in (_CONSTANT, _FIVE)
    )
    held = {
        name: f"{100 * median(by_set(record, name, 'coverage') or 0.0 for record in shift.values()):.0f} %"
        for name in (_OURS, _CONSTANT, _FIVE)
    }
    times = _table(rows_for_readme() if speeds is None else speeds)
    cpu, gpu = (_ratio(times, where) for where in ("CPU", "GPU"))
    studies = "[`python -m studies`](docs/studies.md)"
    rows = [
        ("one constant variance", f"NLL {_worded(gain)}; 90 % intervals beyond the training rows hold "
         f"{held[_OURS]} instead of {held[_CONSTANT]}", studies),
        ("an ensemble of five networks, calibrated too", f"NLL {_worded(lost)}; beyond the training rows "
         f"{held[_OURS]} instead of {held[_FIVE]}; one network instead of five", studies),
        ("the fastest other library, 50 draws", f"{cpu:.2f} of its time on a CPU, {gpu:.2f} on a GPU", "`make bench`"),
    ]  # fmt: skip
    lines = ["| against | the default of `calibrate` | measured by |", "| --- | --- | --- |"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _nll(record: Mapping[str, Mapping[str, Mapping[str, Mapping[str, list[float]]]]], method: str) -> float:
    return mean(record["deep"]["methods"][method]["nll"])


def _table(text: str) -> list[dict[str, str]]:
    """A Markdown table's rows, each by the heads."""
    lines = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return [dict(zip(lines[0], cells, strict=True)) for cells in lines[2:]]


def _ratio(times: list[dict[str, str]], where: str) -> float:
    """Time of ours, compiled where it is, over that of the best peer."""
    found = [row for row in times if row["on"] == where]
    own = [row["compiled"] if row["compiled"] != "-" else row["latedrop"] for row in found]
    return median(
        float(mine.split()[0]) / float(row["best peer"].replace(",", " ").split()[0])
        for mine, row in zip(own, found, strict=True)
    )


def _worded(gain: float) -> str:
    return f"{'better' if gain >= 0 else 'worse'} by {abs(gain):.3f} nats"

"""Fill the tables of README.md and of pages in docs from the committed results: `python -m benchmarks.pages`.

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`; what is between them is replaced.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import (
    acquire,
    boxes,
    console,
    crowd_regions,
    graphs,
    hops,
    instead,
    labels,
    language,
    linear,
    long_tables,
    novelty,
    onnx_export,
    population,
    potentials,
    regions,
    serve,
    soak,
    speed,
    steps,
    stream,
    trained,
)
from benchmarks.headline import headline
from benchmarks.instead_sets import SIZES
from benchmarks.timing import stored

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"(<!-- table: (headline|benchmarks\.\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
_ALL = (ROOT / "README.md", *sorted((ROOT / "benchmarks").rglob("*.md")), *sorted((ROOT / "docs").glob("*.md")))
PAGES = tuple(path for path in _ALL if _BLOCK.search(path.read_text(encoding="utf-8")))


def main() -> None:
    for path in PAGES:
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(path.relative_to(ROOT))


def filled(text: str) -> str:
    """Return the page with every table as the results have it."""
    return _BLOCK.sub(lambda match: f"{match[1]}{_table(match[2])}\n{match[3]}", text)


def _table(name: str) -> str:
    if name == "headline":
        return headline()
    if name == "benchmarks.speed":
        return speed.markdown()
    result, table = TABLES[name.removeprefix("benchmarks.")]
    return table(stored(result))


TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "acquire": ("acquire", acquire.table),
    "boxes.scores": ("boxes", boxes.score_table),
    "boxes.std": ("boxes", boxes.std_table),
    "console.alarms": ("console", console.alarm_table),
    "console.processes": ("console", console.process_table),
    "console.recalibration": ("console", console.recalibration_table),
    "console.zones": ("console", console.zone_table),
    "crowd_regions": ("crowd_regions", crowd_regions.region_table),
    "graphs": ("graphs", graphs.markdown),
    "hops": ("hops", hops.table),
    **{
        f"instead.{half}.{size}": ("instead", partial(instead.table, half=half, size=size))
        for half in instead.HALVES
        for size in ("shift", "all", *map(str, SIZES))
    },
    "labels": ("labels", labels.table),
    "language": ("language", language.table),
    "linear.ranks": ("linear", linear.markdown),
    "long_tables.calibrate": ("long_tables_calibrate", long_tables.calibrate_table),
    "long_tables.predict": ("long_tables_predict", long_tables.predict_table),
    "long_tables.ray": ("long_tables_ray", long_tables.ray_table),
    "novelty.choice": ("novelty", partial(novelty.table, names=novelty.CHOICE)),
    "novelty.cost": ("novelty", novelty.cost_table),
    "novelty.other": ("novelty", partial(novelty.table, names=novelty.OTHER)),
    "onnx": ("onnx_cpu", onnx_export.markdown),
    "population": ("population", population.table),
    "potentials": ("potentials", potentials.markdown),
    "regions": ("regions", regions.table),
    "serve": ("serve", serve.markdown),
    "soak": ("soak", soak.markdown),
    "steps": ("steps", steps.step_table),
    "stream.crowd": ("stream", stream.crowd_table),
    "stream.uci": ("stream", stream.uci_table),
    "stream.uci_alarms": ("stream", stream.uci_alarm_table),
    "trained.home": ("trained", trained.home_table),
    "trained.sets": ("trained", trained.set_table),
}
"""By name, where the numbers are, and what writes the table."""


if __name__ == "__main__":
    main()

"""Fill the tables of README.md and of pages in docs from the committed results: `python -m benchmarks.pages`.

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`; what is between them is replaced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import (
    asked,
    boxes,
    console,
    crowd_regions,
    gpu_round,
    graphs,
    hops,
    instead,
    linear,
    long_tables,
    novelty,
    onnx_export,
    potentials,
    serve,
    soak,
    speed,
    stream,
    trained,
)
from benchmarks.headline import headline
from benchmarks.timing import RESULTS

ROOT = Path(__file__).parents[1]
_NAMES = ("performance", "variance", "evidence", "stream", "console", "trained")
_NAMES += (
    "serving",
    "command_line",
    "cluster",
    "onnx",
    "crowd",
    "classification",
    "potentials",
    "several_outputs",
    "another_population",
    "several_labels",
    "boxes",
    "active_learning",
    "language_models",
)
PAGES = (ROOT / "README.md", ROOT / "benchmarks" / "NOTES.md", *(ROOT / "docs" / f"{name}.md" for name in _NAMES))
_BLOCK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def main() -> None:
    for path in PAGES:
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(path.relative_to(ROOT))


def filled(text: str) -> str:
    """Return the page with every table as the results have it."""
    return _BLOCK.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}\n{match[3]}", text)


def _of(name: str, table: Callable[[dict[str, Any]], str]) -> str:
    return table(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")))


TABLES: dict[str, Callable[[], str]] = {
    **{
        f"benchmarks.instead.{name}": partial(
            _of, "instead", partial(instead.table, names=instead.HALVES[half], shifted=shifted, size=size)
        )
        for name, half, shifted, size in (
            ("in", "apart", False, "all"),
            ("20", "apart", False, "20"),
            ("shift", "apart", True, "all"),
            ("others", "others", False, "all"),
            ("others.shift", "others", True, "all"),
        )
    },
    "headline": headline,
    "benchmarks.speed": speed.markdown,
    "benchmarks.potentials": partial(_of, "potentials", potentials.markdown),
    "benchmarks.novelty.choice": partial(_of, "novelty", lambda record: novelty.table(record, novelty.CHOICE)),
    "benchmarks.novelty.other": partial(_of, "novelty", lambda record: novelty.table(record, novelty.OTHER)),
    **{
        f"benchmarks.{name}": partial(_of, result, table)
        for name, result, table in (
            ("linear.ranks", "linear", linear.markdown),
            ("console.alarms", "console", console.alarm_table),
            ("console.zones", "console", console.zone_table),
            ("console.recalibration", "console", console.recalibration_table),
            ("console.processes", "console", console.process_table),
            ("crowd_regions", "crowd_regions", crowd_regions.region_table),
            ("novelty.cost", "novelty", novelty.cost_table),
            ("onnx", "onnx_cpu", onnx_export.markdown),
            ("stream.crowd", "stream", stream.crowd_table),
            ("stream.uci_alarms", "stream", stream.uci_alarm_table),
            ("stream.uci", "stream", stream.uci_table),
            ("trained.home", "trained", trained.home_table),
            ("trained.sets", "trained", trained.set_table),
            ("soak", "soak", soak.markdown),
            ("serve", "serve", serve.markdown),
            ("long_tables.calibrate", "long_tables_calibrate", long_tables.calibrate_table),
            ("long_tables.predict", "long_tables_predict", long_tables.predict_table),
            ("long_tables.ray", "long_tables_ray", long_tables.ray_table),
            ("gpu_round", "gpu_round", gpu_round.step_table),
            ("graphs", "graphs", graphs.markdown),
            ("hops", "hops", hops.table),
            ("boxes.std", "boxes", boxes.std_table),
            ("boxes.scores", "boxes", boxes.score_table),
            ("asked.regions", "asked_regions", asked.regions_table),
            ("asked.shift", "asked_shift", asked.shift_table),
            ("asked.labels", "asked_labels", asked.labels_table),
            ("asked.acquire", "asked_acquire", asked.acquire_table),
            ("asked.language", "asked_language", asked.language_table),
        )
    },
}


if __name__ == "__main__":
    main()

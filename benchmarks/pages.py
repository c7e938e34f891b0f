"""Fills the tables of README.md and of pages in docs from the committed results: `python -m benchmarks.pages`.

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`; what is between them is replaced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import (
    cluster,
    console,
    core_speed,
    crowd_regions,
    default_cost,
    default_figure,
    default_summary,
    hops,
    large_file,
    linear,
    long_table,
    novelty,
    onnx_export,
    potentials,
    serve,
    soak,
    softmax,
    stream_figure,
    stream_pages,
)
from benchmarks.headline import headline
from benchmarks.speed_pages import IMAGES, memory_table, rows_for_readme
from benchmarks.timing import RESULTS

ROOT = Path(__file__).parents[1]
_NAMES = ("performance", "linear", "worth", "stream", "console")
_NAMES += ("serving", "command_line", "cluster", "onnx", "crowd", "classification", "potentials")
PAGES = (ROOT / "README.md", ROOT / "benchmarks" / "NOTES.md", *(ROOT / "docs" / f"{name}.md" for name in _NAMES))
_BLOCK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def main() -> None:
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        path.write_text(filled(text), encoding="utf-8")
        print(path.relative_to(ROOT))
    print(default_figure.figure(_read(RESULTS / "default.json"), IMAGES / "worth.png").relative_to(ROOT))
    for path in stream_figure.figures(_read(RESULTS / "stream.json")):
        print(path.relative_to(ROOT))


def filled(text: str) -> str:
    """The page with every table as the results have it."""
    return _BLOCK.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", text)


def _read(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


TABLES: dict[str, Callable[[], str]] = {
    "benchmarks.speed": rows_for_readme,
    "benchmarks.memory": memory_table,
    "benchmarks.linear.cost": lambda: linear.markdown().split("\n\n")[0],
    "benchmarks.linear.ranks": lambda: linear.markdown().split("\n\n")[1],
    "benchmarks.console.gpu": lambda: console.gpu_table(_read(RESULTS / "console.json")),
    "benchmarks.long_table": lambda: long_table.markdown(_read(RESULTS / "long_table.json")),
    "benchmarks.default.in": lambda: default_summary.table(_read(RESULTS / "default.json"), "in", "gain"),
    "benchmarks.default.ten": lambda: default_summary.medians(_read(RESULTS / "default.json"), "ten"),
    "benchmarks.default.medians": lambda: default_summary.medians(_read(RESULTS / "default.json"), "in"),
    "benchmarks.default.shift": lambda: default_summary.medians(_read(RESULTS / "default.json"), "shift"),
    "benchmarks.default.aims": lambda: default_summary.aim_table(_read(RESULTS / "default.json")),
    "benchmarks.default.cost": lambda: default_cost.markdown(_read(RESULTS / "default_cost_cpu.json")),
    "benchmarks.novelty.choice": lambda: novelty.table(_read(RESULTS / "novelty.json"), novelty.CHOICE),
    "benchmarks.novelty.other": lambda: novelty.table(_read(RESULTS / "novelty.json"), novelty.OTHER),
    "benchmarks.novelty.cost": lambda: novelty.cost_table(_read(RESULTS / "novelty.json")),
    "benchmarks.softmax.error": lambda: softmax.error_table(_read(RESULTS / "softmax_cpu.json")),
    "benchmarks.softmax.cost": lambda: softmax.cost_table(_read(RESULTS / "softmax_cpu.json")),
    "benchmarks.onnx": lambda: onnx_export.markdown(_read(RESULTS / "onnx_cpu.json")),
    "benchmarks.stream.methods": lambda: stream_pages.methods(_read(RESULTS / "stream.json")),
    "benchmarks.stream.crowd": lambda: stream_pages.counts(_read(RESULTS / "stream.json")),
    "benchmarks.stream.delays": lambda: stream_pages.delays(_read(RESULTS / "stream.json")),
    "benchmarks.stream.shift": lambda: stream_pages.shifts(_read(RESULTS / "stream.json")),
    "benchmarks.stream.alarms": lambda: stream_pages.alarms_of_counts(_read(RESULTS / "stream.json")),
    "benchmarks.stream.uci": lambda: stream_pages.alarms_of_uci(_read(RESULTS / "stream.json")),
    "benchmarks.console.alarms": lambda: console.alarm_table(_read(RESULTS / "console.json")),
    "benchmarks.console.zones": lambda: console.zone_table(_read(RESULTS / "console.json")),
    "benchmarks.console.labels": lambda: console.label_table(_read(RESULTS / "console.json")),
    "benchmarks.console.recalibration": lambda: console.recalibration_table(_read(RESULTS / "console.json")),
    "benchmarks.crowd_regions": lambda: crowd_regions.region_table(_read(RESULTS / "crowd_regions.json")),
    "benchmarks.console.speed": lambda: console.speed_table(_read(RESULTS / "console.json")),
    "benchmarks.soak": lambda: soak.markdown(_read(RESULTS / "soak.json")),
    "benchmarks.serve": lambda: serve.markdown(_read(RESULTS / "serve.json")),
    "benchmarks.serve.accidents": lambda: serve.accidents(_read(RESULTS / "serve.json")),
    "benchmarks.cluster": lambda: cluster.markdown(_read(RESULTS / "cluster.json")),
    "benchmarks.large_file": lambda: large_file.markdown(_read(RESULTS / "large_file.json")),
    "headline": headline,
    "benchmarks.core_speed": lambda: core_speed.markdown(_read(RESULTS / "core_speed_cpu.json")),
    "benchmarks.potentials": potentials.markdown,
    "benchmarks.hops": lambda: hops.markdown(_read(RESULTS / "hops.json")),
}


if __name__ == "__main__":
    main()

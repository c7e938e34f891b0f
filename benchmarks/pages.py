"""Fills the tables of README.md and docs/performance.md from the committed results: `python -m benchmarks.pages`.

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`; what is between them is replaced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import costs, growth, video
from benchmarks.speed_pages import IMAGES, figure, rows_for_readme
from benchmarks.timing import RESULTS

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "performance.md")
_BLOCK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def main() -> None:
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        path.write_text(filled(text), encoding="utf-8")
        print(path.relative_to(ROOT))
    for path in sorted(RESULTS.glob("speed_*.json")):
        print(figure(_read(path), IMAGES / f"{path.stem}.png").relative_to(ROOT))
    for path in sorted(RESULTS.glob("growth_*.json")):
        print(growth.figure(_read(path), IMAGES / f"{path.stem}.png").relative_to(ROOT))
    if (RESULTS / "video_gpu.json").exists():
        print(video.figure(_read(RESULTS / "video_gpu.json")).relative_to(ROOT))


def filled(text: str) -> str:
    """The page with every table as the results have it."""
    return _BLOCK.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", text)


def _one(module: Any, stem: str) -> Callable[[], str]:
    return lambda: str(module.markdown(_read(RESULTS / f"{stem}.json")))


def _read(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


TABLES: dict[str, Callable[[], str]] = {
    "benchmarks.speed": rows_for_readme,
    "benchmarks.video": _one(video, "video_gpu"),
    "benchmarks.costs": _one(costs, "costs_cpu"),
    "benchmarks.growth": _one(growth, "growth_cpu"),
}


if __name__ == "__main__":
    main()

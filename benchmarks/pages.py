"""Fill the tables of README.md and of pages in docs from the committed results: `python -m benchmarks.pages`.

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`; what is between them is replaced. NAME is
`benchmarks.MODULE.KIND`: the module's `KIND_table`, or its `table`, of `results/MODULE.json`. Numbers of the README are
medians over the sets that served no choice, and over the networks of `benchmarks.speed`.
"""

import re
from importlib import import_module
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import speed
from benchmarks.instead import APART, figures
from benchmarks.timing import markdown_table, stored

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"(<!-- table: (benchmarks\.\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
_ALL = (ROOT / "README.md", *sorted((ROOT / "benchmarks").rglob("*.md")), *sorted((ROOT / "docs").glob("*.md")))
PAGES = tuple(path for path in _ALL if _BLOCK.search(path.read_text(encoding="utf-8")))


def filled(text: str) -> str:
    """Return the page with every table as the results have it."""
    return _BLOCK.sub(lambda match: f"{match[1]}{_table(match[2])}\n{match[3]}", text)


def _table(name: str) -> str:
    _, module, *words = name.split(".")
    source, record = import_module(f"benchmarks.{module}"), stored(module)
    if special := getattr(source, "_".join([*words, "table"]), None):
        return str(special(record))
    return str(source.table(record, *words))


LIBRARIES = {
    "MAPIE": ("MAPIE, one width", "MAPIE, normalised"),
    "crepes": ("crepes",),
    "NGBoost": ("NGBoost",),
    "laplace-torch": ("Laplace, last layer", "Laplace, last layer, tuned", "Laplace, all weights, tuned"),
}  # the best of the methods of each library is named


def headline_table(_: object = None) -> str:
    """Return one row for each thing to compare with."""
    record = stored("instead")

    def measured(method: str, shifted: bool) -> Any:
        return figures(record, APART, shifted, "all", method)

    def score(library: str, shifted: bool) -> float:
        return min(measured(method, shifted).score for method in LIBRARIES[library])

    usual, beyond = measured("latedrop", False), measured("latedrop", True)
    constant, tailed = measured("constant", True), measured("constant + t", False)
    five, five_beyond = (measured("ensemble + forest + t", shifted) for shifted in (False, True))
    best = {library: score(library, False) for library in LIBRARIES}
    listed = ", ".join(f"{library} {best[library]:.2f}" for library in sorted(best, key=best.__getitem__))
    leading, leader = min((score(library, True), library) for library in LIBRARIES)
    cover, constant_cover, five_cover = (f"{100 * part.coverage[2]:.0f} %" for part in (beyond, constant, five_beyond))
    gain = f"{'better' if usual.gain >= 0 else 'worse'} by {abs(usual.gain):.3f} nats"
    source = "[`python -m benchmarks.instead`](benchmarks/results/instead.md)"
    rows = [
        ("one constant variance", f"NLL {gain} (a constant Student t gains {tailed.gain:.3f}); beyond the training "
         f"rows 90 % intervals hold {cover} instead of {constant_cover}", source),
        ("other libraries, same network", f"interval score {usual.score:.2f}; {listed}; beyond the training rows "
         f"{beyond.score:.2f}, {leader} {leading:.2f}", source),
        ("five networks, same forest and t", f"interval score {usual.score:.2f} instead of {five.score:.2f}; beyond "
         f"the training rows {beyond.score:.2f} instead of {five_beyond.score:.2f}, where 90 % intervals hold {cover} "
         f"instead of {five_cover}", source),
        ("the fastest other library, 50 draws", f"{_times('CPU'):.2f} of its time on a CPU, {_times('GPU'):.2f} on a "
         "GPU, by the faster of two engines", "`make bench`"),
    ]  # fmt: skip
    return markdown_table(["against", "the default of `calibrate`", "measured by"], rows, 3)


def _times(where: str) -> float:
    """Return the time of latedrop, compiled where that is faster, over that of the best peer."""
    ratios = []
    for _, machine, _, entries, best in speed.measured():
        if machine == where and best is not None:
            both = (entries.get(key, {}).get("ratio", inf) for key in ("latedrop", "latedrop_compiled"))
            ratios.append(min(both) / entries[best]["ratio"])
    return median(ratios)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(path.relative_to(ROOT))

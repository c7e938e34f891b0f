"""The README's few numbers, from the committed results of `benchmarks.instead` and the committed speeds.

Medians over the sets that served no choice, and over the networks of `benchmarks.speed`.
"""

from math import inf
from statistics import median
from typing import Any

from benchmarks import speed
from benchmarks.instead import APART, figures
from benchmarks.timing import markdown_table, stored

LIBRARIES = {
    "MAPIE": ("MAPIE, one width", "MAPIE, normalised"),
    "crepes": ("crepes",),
    "NGBoost": ("NGBoost",),
    "laplace-torch": ("Laplace, last layer", "Laplace, last layer, tuned", "Laplace, all weights, tuned"),
}
"""The best of the methods of each library is named."""


def table(_: object = None) -> str:
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

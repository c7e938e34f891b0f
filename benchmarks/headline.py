"""The README's few numbers, from the committed results of `benchmarks.instead` and the committed speeds.

Medians over the sets that served no choice, and over the networks of `benchmarks.speed`.
"""

from __future__ import annotations

from statistics import median

from benchmarks import speed
from benchmarks.instead import APART, Figures, figures
from benchmarks.timing import markdown_table, stored

LIBRARIES = {
    "MAPIE": ("MAPIE, one width", "MAPIE, normalised"),
    "crepes": ("crepes",),
    "NGBoost": ("NGBoost",),
    "laplace-torch": ("Laplace, last layer", "Laplace, last layer, tuned", "Laplace, all weights, tuned"),
}
"""The best of the methods of each library is named."""


def headline() -> str:
    """Return one row for each thing to compare with."""
    record = stored("instead")

    def measured(method: str) -> tuple[Figures, Figures]:
        """Return the figures in distribution and under shift."""
        within, beyond = (figures(record, APART, shifted, "all", method) for shifted in (False, True))
        assert within is not None
        assert beyond is not None
        return within, beyond

    own, own_beyond = measured("latedrop")
    _, constant = measured("constant")
    tailed, _ = measured("constant + t")
    five, five_beyond = measured("ensemble + forest + t")
    others = {library: [measured(method) for method in methods] for library, methods in LIBRARIES.items()}
    best = {library: min(within.score for within, _ in each) for library, each in others.items()}
    beyond = {library: min(beyond.score for _, beyond in each) for library, each in others.items()}
    leader = min(beyond, key=lambda library: beyond[library])
    listed = ", ".join(f"{library} {best[library]:.2f}" for library in sorted(best, key=lambda library: best[library]))
    cpu, gpu = _times("CPU"), _times("GPU")
    source = "[`python -m benchmarks.instead`](benchmarks/results/instead.md)"
    rows = [
        ("one constant variance", f"NLL {_worded(own.gain)} (a constant Student t gains {tailed.gain:.3f}); beyond "
         f"the training rows 90 % intervals hold {_held(own_beyond)} instead of {_held(constant)}", source),
        ("other libraries, same network", f"interval score {own.score:.2f}; {listed}; beyond the training rows "
         f"{own_beyond.score:.2f}, {leader} {beyond[leader]:.2f}", source),
        ("five networks, same forest and t", f"interval score {own.score:.2f} instead of {five.score:.2f}; beyond the "
         f"training rows {own_beyond.score:.2f} instead of {five_beyond.score:.2f}, where 90 % intervals hold "
         f"{_held(own_beyond)} instead of {_held(five_beyond)}", source),
        ("the fastest other library, 50 draws", f"{cpu:.2f} of its time on a CPU, {gpu:.2f} on a GPU (with the core of "
         "version 0.2)", "`make bench`"),
    ]  # fmt: skip
    return markdown_table(["against", "the default of `calibrate`", "measured by"], rows, 3)


def _held(part: Figures) -> str:
    """Return the share inside 90 % intervals."""
    return f"{100 * part.coverage[2]:.0f} %"


def _times(where: str) -> float:
    """Return the time of latedrop, compiled where it is, over that of the best peer."""
    ratios = []
    for _, machine, _, entries, best in speed.measured():
        if machine == where and best is not None:
            own = entries.get("latedrop_compiled", {})
            ratios.append((own if "ratio" in own else entries["latedrop"])["ratio"] / entries[best]["ratio"])
    return median(ratios)


def _worded(gain: float) -> str:
    return f"{'better' if gain >= 0 else 'worse'} by {abs(gain):.3f} nats"

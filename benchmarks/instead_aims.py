"""The aims of the default, each beside what `benchmarks.instead` measured on the tables that served no choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from benchmarks.instead import Figures, figures
from benchmarks.instead_sets import APART

__all__ = ["AIMS", "aim_table"]

Measure: TypeAlias = Callable[[dict[str, Any]], float]
DEFAULT, CORRECTED, FIVE = "latedrop", "latedrop, corrected mean", "ensemble"


@dataclass(frozen=True)
class Aim:
    """What is wanted, how it is measured, and the limit: the least where `least`, else the most."""

    text: str
    measure: Measure
    limit: float
    least: bool = True


def _of(record: dict[str, Any], method: str, *, shifted: bool = False, size: str = "all") -> Figures:
    found = figures(record, APART, shifted, size, method)
    assert found is not None
    return found


def _score(method: str, shifted: bool, than: str | None = None) -> Measure:
    def measure(record: dict[str, Any]) -> float:
        other = 0.0 if than is None else _of(record, than, shifted=shifted).score
        return _of(record, method, shifted=shifted).score - other

    return measure


AIMS = (
    Aim("gain, median over sets", lambda record: _of(record, DEFAULT).gain, 0.08),
    Aim("gain, worst set", lambda record: _of(record, DEFAULT).worst, -0.02),
    Aim("interval score", _score(DEFAULT, shifted=False), 0.95, least=False),
    Aim("interval score under shift", _score(DEFAULT, shifted=True), 0.87, least=False),
    Aim(
        "share that 90 % intervals hold under shift",
        lambda record: _of(record, DEFAULT, shifted=True).coverage[2],
        0.86,
    ),
    Aim(
        "interval score under shift less that of five networks",
        _score(DEFAULT, shifted=True, than=FIVE),
        0.05,
        least=False,
    ),
    Aim("corrected mean: interval score", _score(CORRECTED, shifted=False), 0.915, least=False),
    Aim("the same less that of five networks", _score(CORRECTED, shifted=False, than=FIVE), 0.02, least=False),
    Aim("corrected mean: interval score under shift", _score(CORRECTED, shifted=True), 0.84, least=False),
    Aim("the same less that of five networks", _score(CORRECTED, shifted=True, than=FIVE), 0.04, least=False),
    *(
        aim
        for size in ("20", "60")
        for aim in (
            Aim(f"{size} validation rows: gain", lambda record, size=size: _of(record, DEFAULT, size=size).gain, 0.035),
            Aim(
                f"{size} validation rows: gain, worst set",
                lambda record, size=size: _of(record, DEFAULT, size=size).worst,
                -0.03,
            ),
        )
    ),
)


def aim_table(record: dict[str, Any]) -> str:
    """Return a row for each aim."""
    lines = ["| aim | | wanted | measured | |", "| --- | --- | ---: | ---: | --- |"]
    for aim in AIMS:
        value = aim.measure(record)
        holds = value >= aim.limit if aim.least else value <= aim.limit
        cells = [aim.text, "at least" if aim.least else "at most", f"{aim.limit:g}", f"{value:.3f}"]
        lines.append(f"| {' | '.join(cells)} | {'holds' if holds else '**missed**'} |")
    return "\n".join(lines)

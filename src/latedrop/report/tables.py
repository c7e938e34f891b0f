"""Tables as text, header first, for pages and terminals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from latedrop.calibration.evaluation import Evaluation
from latedrop.calibration.fitted_terms import FittedTerms
from latedrop.calibration.record import Calibration, rate_text
from latedrop.model.sites import Site

__all__ = ["KINDS", "candidate_table", "number", "rate_table", "site_table", "table", "with_unit"]

KINDS = {"raw": "unscaled", "scaled": "scaled", "relaxed": "relaxed"}
"""What a variance is called in tables and legends, and in the fields of `RateRow`."""


def table(evaluations: Sequence[Evaluation], unit: str = "") -> list[list[str]]:
    """The headline table as text, header first; metrics to three decimals, shares to a tenth of a percent."""
    levels = {row.level for row in evaluations}
    level = f"{100 * levels.pop():.4g} %" if len(levels) == 1 else "its level"
    head = ["", "rate", "scale", "RMSE", "NLL", "MA", f"coverage at {level}", f"width at {level}", "rank correlation"]
    head = [f"{name} [{unit}]" if unit and name.startswith(("RMSE", "width")) else name for name in head]
    return [head] + [
        [
            row.label,
            rate_text(row.rate),
            number(row.scale),
            f"{row.rmse:.3f}",
            "-" if row.nll is None else f"{row.nll:.3f}",
            f"{row.ma:.3f}",
            f"{100 * row.coverage:.1f} %",
            f"{row.width:.2f}",
            "-" if row.correlation is None else f"{row.correlation:.2f}",
        ]
        for row in evaluations
    ]


def rate_table(c: Calibration, unit: str = "") -> list[list[str]]:
    """What every rate gave on the validation rows, header first."""
    metric_names = [f"nll_{kind}" for kind in (*KINDS.values(), "ideal")] + [f"ma_{kind}" for kind in KINDS.values()]
    heads = [f"NLL {name}" for name in (*KINDS, "ideal")] + [f"MA {name}" for name in KINDS]
    floor = any(any(row.floor) for row in c.table)
    lines = [["rate", with_unit("RMSE", unit), *heads, "scale", "relaxed scale", *["floor"] * floor]]
    for row in c.table:
        chosen = " (chosen)" if row.rate == c.rate and len(c.table) > 1 else ""
        values = [f"{getattr(row, name):.3f}" for name in metric_names]
        fitted = [number(row.scale), number(row.relaxed_scale), *[number(row.floor)] * floor]
        lines.append([number(row.rate) + chosen, number(row.rmse), *values, *fitted])
    return lines


def candidate_table(terms: FittedTerms) -> list[list[str]]:
    """The nested models that were compared, header first."""
    cells = []
    for found in terms.candidates:
        chosen = " (chosen)" if found.name == terms.choice else ""
        cells.append([found.name + chosen, f"{found.gain:+.4f}", f"{found.gain_error:.4f}"])
    return [["candidate", "gain over a constant [nats]", "standard error"], *cells]


def site_table(sites: Sequence[Site]) -> list[list[str]]:
    """Where dropout goes, header first."""
    cells = [[s.name, s.layer, s.kind, " x ".join(map(str, s.units)), str(s.calls)] for s in sites]
    return [["site", "layer", "masks", "units", "calls"], *cells]


def number(value: Any) -> str:
    """A number, several, or one for each name; a dash for none."""
    if value is None or value == {}:
        return "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {number(item)}" for key, item in value.items())
    if isinstance(value, tuple):
        return ", ".join(number(item) for item in value)
    return f"{value:.4g}"


def with_unit(name: str, unit: str) -> str:
    """The name of a quantity with its unit, if it has one."""
    return f"{name} [{unit}]" if unit else name

"""Tables as text, header first, for pages and terminals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from latedrop.calibration.class_record import ClassCalibration
from latedrop.calibration.fitted_terms import FittedTerms
from latedrop.calibration.record import Calibration, rate_text
from latedrop.evaluation.evaluation import Evaluation
from latedrop.evaluation.judgement import ClassScores, JudgedOutput
from latedrop.metrics.groups import Group
from latedrop.network.sites import Site
from latedrop.numerals import column, nats, percent, plain

__all__ = [
    *("candidate_table", "class_candidates", "class_table", "group_table", "number"),
    *("output_table", "rate_table", "site_table", "table", "with_unit", "worst_table"),
]

_KINDS = ("unscaled", "scaled", "relaxed")
_INPUTS = 8


def table(evaluations: Sequence[Evaluation], unit: str = "") -> list[list[str]]:
    """Return the headline table as text, header first; columns in which no row has anything are left out."""
    levels = {row.level for row in evaluations}
    level = f"{100 * levels.pop():.4g} %" if len(levels) == 1 else "its level"
    columns = {
        "": [row.label for row in evaluations],
        "rate": [rate_text(row.rate) for row in evaluations],
        "scale": [number(row.scale) for row in evaluations],
        with_unit("RMSE", unit): column(row.rmse for row in evaluations),
        "NLL": ["-" if row.nll is None else nats(row.nll) for row in evaluations],
        "gain [nats]": ["-" if row.label == "constant" else _gain(row.gain, row.gain_error) for row in evaluations],
        "MA": [f"{row.ma:.3f}" for row in evaluations],
        f"coverage at {level}": [_share(row.coverage, row.coverage_error) for row in evaluations],
        with_unit(f"width at {level}", unit): column(row.width for row in evaluations),
        "rank correlation": ["-" if row.correlation is None else f"{row.correlation:.2f}" for row in evaluations],
    }
    used = any(row.rate for row in evaluations)  # without a rate the scale says nothing either
    left = {"rate", "scale"} if not used else set()
    shown = {name: cells for name, cells in columns.items() if name not in left and set(cells) != {"-"}}
    return [list(shown), *map(list, zip(*shown.values(), strict=True))]


def _gain(gain: float | None, error: float | None) -> str:
    if gain is None or error is None:
        return "-"
    return f"{'-' if gain <= -0.0005 else '+'}{nats(abs(gain))} ± {nats(error)}"


def _share(share: float, error: float | None) -> str:
    return percent(share) if error is None else f"{percent(share)} ± {100 * error:.1f}"


def output_table(outputs: Sequence[JudgedOutput]) -> list[list[str]]:
    """Return the verdict on each of several outputs, header first."""
    lines = [["output", "coverage", "", "coverage, constant", "gain over constant [nats]", "", "rank correlation", ""]]
    for output in outputs:
        v = output.verdict
        grades = {finding.about: finding.grade for finding in v.findings}
        coverage = "bad" if "bad" in (grades["coverage"], grades.get("ranges")) else grades["coverage"]
        share, gain = _share(v.coverage, v.coverage_error), _gain(v.gain, v.gain_error)
        order = f"{v.correlation:.2f} ± {v.correlation_error:.2f}"
        constant = next((row.coverage for row in output.evaluations if row.label == "constant"), None)
        ranking = grades["ranking"]
        lines.append([output.name, share, coverage, percent(constant), gain, grades["worth"], order, ranking])
    return lines


def group_table(groups: Sequence[Group], by: str, unit: str = "") -> list[list[str]]:
    """Return groups of rows: what they are, what their intervals hold, and what those of a constant hold."""
    ends = column([end for group in groups for end in (group.low, group.high)])
    lines = [[by, "rows", with_unit("RMSE", unit), "inside", "inside, constant", "by chance", "beyond chance"]]
    for k, (group, rmse) in enumerate(zip(groups, column(group.rmse for group in groups), strict=True)):
        shares = [percent(group.coverage), percent(group.constant), f"± {100 * group.coverage_error:.1f}"]
        off = f"holds {group.off}" if group.off else ""
        lines.append([f"{ends[2 * k]} to {ends[2 * k + 1]}", f"{group.rows:,}", rmse, *shares, off])
    return lines


def worst_table(output: JudgedOutput, place: str = "row") -> list[list[str]]:
    """Return the rows furthest from their prediction; inputs up to the eighth."""
    rows = output.worst
    if not rows:
        return []
    names = list(rows[0]["inputs"])[:_INPUTS]
    parts = {part: column(row[part] for row in rows) for part in ("target", "mean", "low", "high")}
    columns: dict[str, list[str]] = {
        place: [str(row["row"]) for row in rows],
        with_unit(output.name, output.unit): parts["target"],
        "prediction": parts["mean"],
        f"{100 * output.used.level:.4g} % interval": [
            f"{low} to {high}" for low, high in zip(parts["low"], parts["high"], strict=True)
        ],
        "deviations off": [f"{row['deviations']:,.1f}" for row in rows],
    }
    if "constant_deviations" in rows[0]:
        columns["of the constant"] = [f"{row['constant_deviations']:,.1f}" for row in rows]
    if "novelty" in rows[0]:
        columns["novelty"] = column(row["novelty"] for row in rows)
    taken = {name: column(row["inputs"][name] for row in rows) for name in names}
    lines = zip(*columns.values(), *taken.values(), strict=True)
    return [[*columns, *names], *map(list, lines)]


def rate_table(c: Calibration) -> list[list[str]]:
    """Return what every rate gave on the validation rows, header first; the one in use has a star."""
    scores = [(f"{metric}\n{kind}", f"{metric.lower()}_{kind}") for metric in ("NLL", "MA") for kind in _KINDS]
    lines = [["rate", "RMSE", *(head.replace("unscaled", "raw") for head, _ in scores), "scale"]]
    for row in c.table:
        rate = rate_text(row.rate) + (" *" if row.rate == c.rate else "")
        rmse = ", ".join(f"{value:.4g}" for value in row.rmses)
        scale = " to ".join(f"{value:.4g}" for value in sorted({min(row.scale), max(row.scale)}))
        lines.append([rate, rmse, *(f"{getattr(row, name):.3f}" for _, name in scores), scale])
    return lines


def candidate_table(terms: FittedTerms) -> list[list[str]]:
    """Return the nested models that were compared, header first."""
    cells = []
    for one in terms.candidates:
        chosen = " (chosen)" if one.name == terms.choice else ""
        cells.append([one.name + chosen, f"{one.gain:+.4f}", f"{one.gain_error:.4f}"])
    return [["candidate", "gain over a constant [nats]", "standard error"], *cells, ["constant", "0", "-"]]


def class_candidates(c: ClassCalibration) -> list[list[str]]:
    """Return the ways to probabilities that were compared on validation rows, header first."""
    cells = [[one.name, f"{one.gain:+.4f} ± {one.gain_error:.4f}"] for one in c.candidates]
    return [["candidate", "gain over one temperature [nats]"], *cells]


def class_table(scores: Sequence[ClassScores]) -> list[list[str]]:
    """Return the scores of several ways to probabilities on test rows, header first."""
    lines = [["", "accuracy", "NLL", "Brier", "ECE", "risk over coverage"]]
    for row in scores:
        shares = [f"{row.accuracy:.1%}", f"{row.nll:.4f}", f"{row.brier:.4f}", f"{row.ece:.1%}"]
        lines.append([row.label, *shares, f"{row.selective_risk:.2%}"])
    return lines


def site_table(sites: Sequence[Site]) -> list[list[str]]:
    """Return where dropout goes, header first."""
    cells = [[s.name, s.layer, s.kind, " x ".join(map(str, s.units)), str(s.calls)] for s in sites]
    return [["site", "layer", "masks", "units", "calls"], *cells]


def number(value: Any) -> str:
    """Return the text of a number, several, or one for each name; a dash for none."""
    if value is None or value == {}:
        return "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {number(item)}" for key, item in value.items())
    if isinstance(value, tuple):
        return ", ".join(number(item) for item in value)
    return plain(value)


def with_unit(name: str, unit: str) -> str:
    """Return the name of a quantity with its unit, if it has one."""
    return f"{name} [{unit}]" if unit else name

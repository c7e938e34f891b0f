"""What commands print: tables for people, or JSON."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latedrop.terminal import print_table

if TYPE_CHECKING:
    from latedrop.calibration.evaluation import Evaluation
    from latedrop.calibration.record import Calibration
    from latedrop.calibration.verdict import Verdict
    from latedrop.model.sites import Sites

__all__ = ["draw_curves", "print_calibration", "print_demo", "print_evaluations", "print_sites"]


def draw_curves(path: str, rows: "Sequence[Evaluation]") -> None:
    """The calibration curves as a PNG file."""
    from latedrop import plots
    from latedrop.files import write_aside
    from latedrop.report import png

    figure = plots.new_figure(6.4, 4.5)
    plots.calibration_curves({row.label: (row.levels, row.observed) for row in rows}, figure.subplots())
    write_aside(path, png(figure))


def print_demo(
    result: Any,
    files: Sequence[Path],
    as_json: bool,
    *,
    unit: str,
    notes: Mapping[str, str],
    more: Callable[[], None] = lambda: None,
) -> None:
    """The result of a demo, which has `headline()`, `evaluations` and `summary()`; `more` prints what only it has."""
    from latedrop.report import table

    if as_json:
        print(json.dumps({**result.summary(), "files": [str(path) for path in files]}, indent=1))
        return
    print(result.headline())
    print_table(table(result.evaluations, unit))
    for label, note in notes.items():
        print(f"{label}: {note}")
    more()
    print(f"\nwritten: {', '.join(str(path) for path in files)}")


def print_sites(found: "Sites", as_json: bool) -> None:
    """Where dropout would go."""
    if as_json:
        print(json.dumps({"sites": found.to_list()}, indent=1))
        return
    from latedrop.report import site_table

    print_table(site_table(found), texts=3)
    print(f"{len(found)} site{'s' if len(found) > 1 else ''}: dropout goes on the input of these layers.")


def print_calibration(c: "Calibration", dropped: int, files: Sequence[str], as_json: bool) -> None:
    """Every rate with its metrics, the chosen one marked, and which files were written."""
    from latedrop.calibration.intervals import Conformal

    if as_json:
        keys = (
            "rate",
            "scale",
            "relaxed_scale",
            "floor",
            "choice",
            "method",
            "draws",
            "rows",
            "shares",
            "columns",
            "ratio_to_draws",
        )
        record: dict[str, Any] = {key: getattr(c, key) for key in keys}
        intervals = "gaussian" if c.intervals is None else c.intervals.kind
        table = [asdict(row) for row in c.table]
        record |= {"intervals": intervals, "dropped": dropped, "table": table, "files": list(files)}
        record |= {"verdict": None if c.verdict is None else {**asdict(c.verdict), "text": str(c.verdict)}}
        if c.terms is not None:
            kept = ("choice", "columns", "coefficients", "floors", "shares", "reference_rows")
            record["terms"] = {name: getattr(c.terms, name) for name in kept}
            record["terms"]["candidates"] = [asdict(candidate) for candidate in c.terms.candidates]
        print(json.dumps(record, indent=1))
        return
    marked = "the rate in use is marked *"
    if c.terms is None:
        print_table(_rate_table(c), marked=[row.rate for row in c.table].index(c.rate))
    else:
        from latedrop.report.tables import candidate_table

        names = [candidate.name for candidate in c.terms.candidates]
        print_table(candidate_table(c.terms), marked=names.index(c.terms.choice))
        print_table(c.terms.table())
        marked = "each was left out of the fit that it was scored with"
    left = f", {dropped} left out" if dropped else ""
    if isinstance(c.intervals, Conformal):
        left += f", {len(c.intervals.scores[0])} more for the conformal intervals"
    if c.ratio_to_draws is not None:
        print(f"The raw variance of {c.method} is {c.ratio_to_draws:.2g} times that of a few draws.")
    print(f"{c.rows} validation rows{left}; {marked}.")
    if c.verdict is not None:
        print(c.verdict.sentence)
    print(f"written: {', '.join(files)}")


def _rate_table(c: "Calibration") -> list[list[str]]:
    from latedrop.calibration.record import rate_text

    names = ["nll_unscaled", "nll_scaled", "nll_relaxed", "ma_unscaled", "ma_scaled", "ma_relaxed"]
    heads = ["NLL\nraw", "NLL\nscaled", "NLL\nrelaxed", "MA\nraw", "MA\nscaled", "MA\nrelaxed"]
    lines = [["rate", "RMSE", *heads, "scale"]]
    for row in c.table:
        ends = sorted({min(row.scale), max(row.scale)})
        values = [f"{getattr(row, name):.3f}" for name in names]
        lines.append(
            [
                rate_text(row.rate) + (" *" if row.rate == c.rate else ""),
                ", ".join(f"{value:.4g}" for value in row.rmses),
                *values,
                " to ".join(f"{value:.4g}" for value in ends),
            ]
        )
    return lines


def print_evaluations(
    found: "dict[str, tuple[Evaluation, ...]]",
    dropped: int,
    files: Sequence[str],
    as_json: bool,
    verdict: "Verdict | None" = None,
) -> None:
    """The metrics on test rows, of all outputs together and of each of several."""
    from latedrop.report import table

    rows = found[""][0].rows
    if as_json:
        outputs = {name: [asdict(row) for row in part] for name, part in found.items()}
        together = outputs.pop("")
        record = {"rows": rows, "dropped": dropped, "evaluations": together, "outputs": outputs, "files": list(files)}
        record["verdict"] = None if verdict is None else {**asdict(verdict), "text": str(verdict)}
        print(json.dumps(record, indent=1))
        return
    left = f", {dropped} left out" if dropped else ""
    print(f"{rows} test rows{left}")
    if verdict is not None:
        print(verdict.sentence)
    for name, part in found.items():
        if len(found) > 1:
            print(name or "all outputs together")
        print_table(table(part))
    if files:
        print(f"written: {', '.join(files)}")

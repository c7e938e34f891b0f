"""What commands print: tables for people, or JSON."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latedrop.terminal import listed, print_table, say

if TYPE_CHECKING:
    from latedrop.calibration.class_record import ClassCalibration
    from latedrop.calibration.record import Calibration
    from latedrop.calibration.verdict import Finding
    from latedrop.evaluation.class_judgement import ClassJudgement
    from latedrop.evaluation.judgement import Judgement
    from latedrop.evaluation.requirements import Requirement
    from latedrop.network.sites import Sites

__all__ = [
    "broken",
    "print_calibration",
    "print_demo",
    "print_judgement",
    "print_sites",
]

_SHOWN = 10  # names of classes in one line


def print_demo(
    result: Any,
    files: Sequence[Path],
    as_json: bool,
    *,
    unit: str,
    notes: Mapping[str, str],
) -> None:
    """The result of a demo, which has `headline()`, `evaluations` and `summary()`."""
    from latedrop.report import table

    if as_json:
        print(json.dumps({**result.summary(), "files": [str(path) for path in files]}, indent=1))
        return
    print(result.headline())
    print_table(table(result.evaluations, unit))
    for label, note in notes.items():
        print(f"{label}: {note}")
    print(f"\nwritten: {', '.join(str(path) for path in files)}")


def print_sites(found: "Sites", as_json: bool) -> None:
    """Where dropout would go."""
    if as_json:
        from latedrop.records import plain

        print(json.dumps({"sites": plain(found)}, indent=1))
        return
    from latedrop.report import site_table

    print_table(site_table(found), texts=3)
    print(f"{len(found)} site{'s' if len(found) > 1 else ''}: dropout goes on the input of these layers.")


def print_calibration(c: "Calibration | ClassCalibration", dropped: int, files: Sequence[str], as_json: bool) -> None:
    """Every rate with its metrics, the chosen one marked, and which files were written."""
    from latedrop.calibration.class_record import ClassCalibration
    from latedrop.calibration.intervals import Conformal

    if isinstance(c, ClassCalibration):
        _print_class_calibration(c, dropped, files, as_json)
        return
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
        )
        record: dict[str, Any] = {key: getattr(c, key) for key in keys}
        intervals = c.kind
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
    print(f"{c.rows} validation rows{left}; {marked}.")
    if c.verdict is not None:
        print(f"{c.verdict.sentence} {c.verdict_of_other}".rstrip())
        if c.next_step:
            print(f"Next: {c.next_step}")
    print(f"written: {', '.join(files)}")


def _print_class_calibration(c: "ClassCalibration", dropped: int, files: Sequence[str], as_json: bool) -> None:
    """Every candidate with what it gains over one temperature, the chosen one marked, and the files written."""
    held = 0 if c.sets is None else sum(map(len, c.sets.scores))
    if as_json:
        kept = ("classes", "names", "choice", "rate", "draws", "rows", "reference_rows", "columns")
        record: dict[str, Any] = {"task": "classification", **{name: getattr(c, name) for name in kept}}
        record |= {"fit": asdict(c.fit), "alone": c.alone, "dropped": dropped, "files": list(files)}
        record |= {"sets": None if c.sets is None else {"score": c.sets.score, "rows": held}}
        rule = None if c.rule is None else {**asdict(c.rule), "threshold": c.rule.threshold if c.rule.kept else None}
        record |= {"rule": rule}
        record |= {"candidates": [asdict(found) for found in c.candidates]}
        record |= {"verdict": {**asdict(c.verdict), "text": str(c.verdict)}}
        print(json.dumps(record, indent=1))
        return
    from latedrop.report.tables import class_candidates

    print_table(class_candidates(c), marked=[found.name for found in c.candidates].index(c.choice))
    left = f", {dropped} left out" if dropped else ""
    left += f", {held} more for the prediction sets" if held else ""
    print(f"{c.rows} validation rows{left}; each was left out of the fit that it was scored with.")
    print(f"{c.classes} classes in the order of the outputs: {listed(c.known_names, _SHOWN, quote=True)}")
    print(f"In use: {c.choice}. {str(c.verdict)[0].upper()}{str(c.verdict)[1:]}.")
    if c.rule is not None:
        print(f"Rule: {c.rule}.")
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


def print_judgement(
    found: "Judgement | ClassJudgement",
    held: "Sequence[Requirement]",
    files: Sequence[str],
    as_json: bool,
    facts: Mapping[str, Any],
) -> None:
    """The verdict on test rows, and the metrics of every output."""
    from latedrop.evaluation.class_judgement import ClassJudgement
    from latedrop.report import table
    from latedrop.report.tables import output_table

    if as_json:
        required = [{**asdict(item), "met": item.met} for item in held]
        record = {**found.to_dict(), **facts, "requirements": required, "files": list(files)}
        print(json.dumps(_plain(record), indent=1))
        return
    left = f", {facts['dropped']} left out" if facts["dropped"] else ""
    if isinstance(found, ClassJudgement):
        _print_class_judgement(found, left, files)
        return
    print(f"{found.rows:,} test row{'s' * (found.rows > 1)}{left}")
    if found.together.verdict is not None:
        _print_findings(found.together.verdict.findings)
    if len(found.outputs) > 1:
        print_table(output_table(found.outputs))
    for output in found.outputs:
        if len(found.outputs) > 1:
            print(output.name)
        print_table(table(output.evaluations, output.unit))
    if files:
        print(f"written: {', '.join(files)}")


def _print_class_judgement(found: "ClassJudgement", left: str, files: Sequence[str]) -> None:
    """The verdict on test rows, and the scores beside those of one temperature and of the model's own softmax."""
    from latedrop.report.tables import class_table

    rows = found.verdict.rows
    print(f"{rows:,} test row{'s' * (rows > 1)}{left}")
    _print_findings(found.findings)
    print_table(class_table(found.scores), marked=0)
    if found.strange is not None:
        print(f"{found.strange:.0%} of the rows lie beyond 90 % of the validation rows.")
    if files:
        print(f"written: {', '.join(files)}")


def _print_findings(findings: "Sequence[Finding]") -> None:
    """A line for each thing that a verdict looks at, with its grade; in colours on a terminal."""
    from rich.console import Console
    from rich.text import Text

    colours = {"good": "bold green", "weak": "bold yellow", "bad": "bold red"}
    width = max(len(found.about) for found in findings) + 2
    for found in findings:
        line = Text.assemble(f"{found.about:<{width}}", (f"{found.grade:<6}", colours[found.grade]), found.text)
        Console(highlight=False).print(line, soft_wrap=True)


def broken(held: "Sequence[Requirement]") -> None:
    """A line on stderr for each requirement that does not hold, and exit code 3."""
    failed = [item for item in held if not item.met]
    for item in failed:
        say(f"{item}.")
    if failed:
        raise SystemExit(3)


def _plain(value: Any) -> Any:
    """What JSON can hold: null for what is not finite."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

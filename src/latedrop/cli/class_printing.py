"""What commands print about classes, and the lines of a verdict."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from latedrop.terminal import listed, print_table

if TYPE_CHECKING:
    from latedrop.calibration.class_record import ClassCalibration
    from latedrop.calibration.verdict import Finding
    from latedrop.evaluation.class_judgement import ClassJudgement

__all__ = ["print_class_calibration", "print_class_judgement", "print_findings"]

_SHOWN = 10


def print_class_calibration(c: "ClassCalibration", dropped: int, files: Sequence[str], as_json: bool) -> None:
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
    lines = [["candidate", "gain over one temperature [nats]"]]
    lines += [[found.name, f"{found.gain:+.4f} ± {found.gain_error:.4f}"] for found in c.candidates]
    print_table(lines, marked=[found.name for found in c.candidates].index(c.choice))
    left = f", {dropped} left out" if dropped else ""
    left += f", {held} more for the prediction sets" if held else ""
    print(f"{c.rows} validation rows{left}; each was left out of the fit that it was scored with.")
    print(f"{c.classes} classes in the order of the outputs: {listed(c.known_names, _SHOWN, quote=True)}")
    print(f"In use: {c.choice}. {str(c.verdict)[0].upper()}{str(c.verdict)[1:]}.")
    if c.rule is not None:
        print(f"Rule: {c.rule}.")
    print(f"written: {', '.join(files)}")


def print_class_judgement(found: "ClassJudgement", left: str, files: Sequence[str]) -> None:
    """The verdict on test rows, and the scores beside those of one temperature and of the model's own softmax."""
    rows = found.verdict.rows
    print(f"{rows:,} test row{'s' * (rows > 1)}{left}")
    print_findings(found.findings)
    lines = [["", "accuracy", "NLL", "Brier", "ECE", "class-wise ECE", "risk over coverage"]]
    for row in found.scores:
        shares = [f"{row.accuracy:.1%}", f"{row.nll:.4f}", f"{row.brier:.4f}", f"{row.ece:.1%}"]
        lines.append([row.label, *shares, f"{row.classwise_ece:.1%}", f"{row.selective_risk:.2%}"])
    print_table(lines, marked=0)
    if found.strange is not None:
        print(f"{found.strange:.0%} of the rows lie beyond 90 % of the validation rows.")
    if files:
        print(f"written: {', '.join(files)}")


def print_findings(findings: "Sequence[Finding]") -> None:
    """A line for each thing that a verdict looks at, with its grade; in colours on a terminal."""
    from rich.console import Console
    from rich.text import Text

    colours = {"good": "bold green", "weak": "bold yellow", "bad": "bold red"}
    width = max(len(found.about) for found in findings) + 2
    for found in findings:
        line = Text.assemble(f"{found.about:<{width}}", (f"{found.grade:<6}", colours[found.grade]), found.text)
        Console(highlight=False).print(line, soft_wrap=True)

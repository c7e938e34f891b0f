"""Print the results of commands, as tables for people or as JSON."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any

from latedrop.terminal import listed, print_table, say

if TYPE_CHECKING:
    from latedrop.calibration.class_record import ClassCalibration
    from latedrop.calibration.record import Calibration
    from latedrop.calibration.verdict import Finding
    from latedrop.evaluation.judgement import ClassJudgement, Judgement, Requirement
    from latedrop.network.sites import Sites

__all__ = ["broken", "print_calibration", "print_json", "print_judgement", "print_sites"]

_SHOWN = 10  # names of classes in one line


def print_json(record: Any) -> None:
    """Print a record as JSON, with dataclasses as objects; NaN and infinities are written as null."""

    def plain(value: Any) -> Any:
        if is_dataclass(value) and not isinstance(value, type):
            value = asdict(value)
        if isinstance(value, Mapping):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    print(json.dumps(plain(record), indent=1))


def print_sites(sites: "Sites", as_json: bool) -> None:
    """Print the sites, or write them as JSON."""
    if as_json:
        from latedrop.records import plain

        print_json({"sites": plain(sites)})
        return
    from latedrop.report import site_table

    print_table(site_table(sites), texts=3)
    print(f"{len(sites)} site{'s' if len(sites) > 1 else ''}: dropout goes on the input of these layers.")


def print_calibration(c: "Calibration | ClassCalibration", dropped: int, files: Sequence[str], as_json: bool) -> None:
    """Print the candidates with the choice marked, the verdict, and the written files."""
    if as_json:
        verdict = None if c.verdict is None else {**asdict(c.verdict), "text": str(c.verdict)}
        print_json({**_facts(c), "verdict": verdict, "dropped": dropped, "files": files})
        return
    left = f", {dropped} left out" if dropped else ""
    (_print_classes if hasattr(c, "classes") else _print_numbers)(c, left)  # type: ignore[arg-type]
    print(f"written: {', '.join(files)}")


def _facts(c: Any) -> dict[str, Any]:
    if hasattr(c, "classes"):
        names = ["classes", "names", "choice", "rate", "draws", "rows", "reference_rows", "columns", "alone", "fit"]
        names += ["rule", "candidates"]
        sets = None if c.sets is None else {"score": c.sets.score, "rows": sum(map(len, c.sets.scores))}
        more: dict[str, Any] = {"task": "classification", "sets": sets}
    else:
        names = ["rate", "scale", "relaxed_scale", "floor", "choice", "method", "draws", "rows", "shares", "columns"]
        names += ["table"]
        more = {"intervals": c.kind}
        if c.terms is not None:
            kinds = ("choice", "columns", "coefficients", "floors", "shares", "reference_rows", "candidates")
            more["terms"] = {name: getattr(c.terms, name) for name in kinds}
    return {name: getattr(c, name) for name in names} | more


def _print_numbers(c: "Calibration", left: str) -> None:
    from latedrop.quantiles import ConformalScores
    from latedrop.report.tables import candidate_table, rate_table

    if c.terms is None:
        print_table(rate_table(c), marked=[row.rate for row in c.table].index(c.rate))
        marked = "the rate in use is marked *"
    else:
        names = [candidate.name for candidate in c.terms.candidates]
        print_table(candidate_table(c.terms), marked=names.index(c.terms.choice))
        print_table(c.terms.table())
        marked = "each was left out of the fit that it was scored with"
    if isinstance(c.intervals, ConformalScores):
        left += f", {len(c.intervals.scores[0])} more for the conformal intervals"
    print(f"{c.rows} validation rows{left}; {marked}.")
    if c.verdict is not None:
        print(f"{c.verdict.sentence} {c.verdict_of_other}".rstrip())
        if c.next_step:
            print(f"Next: {c.next_step}")


def _print_classes(c: "ClassCalibration", left: str) -> None:
    from latedrop.report.tables import class_candidates

    print_table(class_candidates(c), marked=[candidate.name for candidate in c.candidates].index(c.choice))
    left += f", {sum(map(len, c.sets.scores))} more for the prediction sets" if c.sets is not None else ""
    print(f"{c.rows} validation rows{left}; each was left out of the fit that it was scored with.")
    print(f"{c.classes} classes in the order of the outputs: {listed(c.known_names, _SHOWN, quote=True)}")
    print(f"In use: {c.choice}. {str(c.verdict)[0].upper()}{str(c.verdict)[1:]}.")
    if c.rule is not None:
        print(f"Rule: {c.rule}.")


def print_judgement(
    judgement: "Judgement | ClassJudgement",
    requirements: "Sequence[Requirement]",
    files: Sequence[str],
    as_json: bool,
    facts: Mapping[str, Any],
) -> None:
    """Print the verdict on test rows, and the metrics of every output, or of the ways to probabilities."""
    from latedrop.evaluation.judgement import ClassJudgement
    from latedrop.report import table
    from latedrop.report.tables import class_table, output_table

    if as_json:
        required = [{**asdict(item), "met": item.met} for item in requirements]
        print_json({**judgement.to_dict(), **facts, "requirements": required, "files": files})
        return
    classes = isinstance(judgement, ClassJudgement)
    rows = judgement.verdict.rows if classes else judgement.rows  # type: ignore[union-attr]
    left = f", {facts['dropped']} left out" if facts["dropped"] else ""
    print(f"{rows:,} test row{'s' * (rows > 1)}{left}")
    if isinstance(judgement, ClassJudgement):
        _print_findings(judgement.findings)
        print_table(class_table(judgement.scores), marked=0)
        if judgement.strange is not None:
            print(f"{judgement.strange:.0%} of the rows lie beyond 95 % of the reference rows.")
    else:
        _print_findings(judgement.together.verdict.findings)
        if len(judgement.outputs) > 1:
            print_table(output_table(judgement.outputs))
        for output in judgement.outputs:
            if len(judgement.outputs) > 1:
                print(output.name)
            print_table(table(output.evaluations, output.unit))
    if files:
        print(f"written: {', '.join(files)}")


def _print_findings(findings: "Sequence[Finding]") -> None:
    """Print one line per finding of a verdict with its grade, in colours on a terminal."""
    from rich.console import Console
    from rich.text import Text

    colours = {"good": "bold green", "weak": "bold yellow", "bad": "bold red"}
    width = max(len(finding.about) for finding in findings) + 2
    for finding in findings:
        grade = f"{finding.grade:<6}", colours[finding.grade]
        line = Text.assemble(f"{finding.about:<{width}}", grade, finding.text)
        Console(highlight=False).print(line, soft_wrap=True)


def broken(requirements: "Sequence[Requirement]") -> None:
    """Print a line on stderr for each requirement that does not hold; then exit with code 3."""
    failed = [item for item in requirements if not item.met]
    for item in failed:
        say(f"{item}.")
    if failed:
        raise SystemExit(3)

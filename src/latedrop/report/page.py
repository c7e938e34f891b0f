"""Everything about a calibration in one HTML file: `write_report` of numbers, `write_class_report` of classes.

A page says in plain words what the uncertainty is worth, on rows that it was not fitted to and beside one
constant variance, and shows on what grounds. The page needs nothing beside itself: no network, no other file. Notes
beside the pointer need a script; where it is not allowed, browsers show them as titles.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from latedrop.calibration.class_record import ClassCalibration
from latedrop.calibration.fit_classes import ALONE
from latedrop.calibration.record import Calibration
from latedrop.errors import ArgumentError
from latedrop.evaluation.judgement import ClassJudgement, Judgement, findings_of, judge, judge_classes
from latedrop.files import write_aside
from latedrop.metrics.classes import reliability, risk_coverage
from latedrop.numerals import percent
from latedrop.prediction.prediction import ClassPrediction, Prediction
from latedrop.report.html import Figure, figures, heading, opening, paragraph, table
from latedrop.report.numbers import fitting, made_of, on_test_rows, test_rows
from latedrop.report.svg import SHARES, Axis, Plot
from latedrop.report.tables import class_candidates, class_table

__all__ = ["page_of", "write_class_report", "write_report"]

_WORST, _GROUPS = 8, 5
_NO_CONSTANT = "The calibration does not know its constant variance: calibrate again for a verdict."
_NATS = (
    "Nats measure how likely the true values were: a gain of 0.1 nats means 10 % more likely per row than under one "
    "constant variance."
)
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
<script>{script}</script>
</body>
</html>
"""


def write_report(
    path: str | os.PathLike[str],
    *,
    title: str,
    calibration: Calibration,
    prediction: Prediction | None = None,
    target: Tensor | None = None,
    unit: str | Sequence[str] = "",
    names: Sequence[str] = (),
    inputs: Any = None,
    about: str = "",
    reproduce: Mapping[str, str] | None = None,
    level: float = 0.9,
    judgement: Judgement | None = None,
    place: str = "row",
) -> None:
    """Write one self-contained HTML page about a calibration.

    Args:
        path: the file; it appears complete or not at all.
        title: heading of the page.
        calibration: what `calibrate` chose and measured.
        prediction: of test rows used for nothing else; with `target`, adds all about them.
        target: their true values.
        unit: of the target, or one for each output.
        names: of the outputs; those of the calibration's target columns where there are none.
        inputs: of the test rows, to see along which of them the intervals hold less: a mapping from names to columns,
            a DataFrame, or an array `(N, columns)`.
        about: a paragraph of your own, on the model and the data.
        reproduce: names and values for the last section, such as the command.
        level: of the intervals that are drawn.
        judgement: what `judge` made of the same rows already; in the place of prediction and target.
        place: what rows are counted in, such as the lines of a file.
    """
    units = [unit] if isinstance(unit, str) else list(unit)
    if (prediction is None) != (target is None):
        raise ArgumentError(
            "expected prediction and target together, or neither; found only one. Pass uq.predict(x_test) and y_test."
        )
    if judgement is None and prediction is not None and target is not None:
        judgement = judge(prediction, target, level=level, names=names, units=units, inputs=inputs)
    verdict = calibration.verdict if judgement is None else judgement.together.verdict
    body = [
        heading(title, 1),
        paragraph(_NO_CONSTANT) if verdict is None else opening(verdict.grade, verdict.findings, _NATS, about),
        "" if judgement is None else on_test_rows(judgement, calibration, place),
        made_of(calibration),
        fitting(calibration),
        _reproduction(calibration, reproduce or {}),
    ]
    write_aside(path, page_of(title, body))


def page_of(title: str, body: Sequence[str]) -> str:
    """Return a whole page from its parts, which are HTML already, with the style and the script of all pages."""
    here = Path(__file__)
    style, script = (here.with_name(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    mark = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{mark}'"
    return _PAGE.format(
        title=escape(title), policy=policy, style=style, script=script, body="\n".join(filter(None, body))
    )


def _reproduction(c: Calibration | ClassCalibration, extra: Mapping[str, str]) -> str:
    from latedrop import __version__

    facts = {**extra, "latedrop": __version__}
    if isinstance(c, Calibration):
        facts |= {**c.versions, "method": c.method}
        facts |= {"draws": str(c.draws), "seed of the masks": str(c.seed)} if c.method == "sample" else {}
    else:
        facts |= {"torch": torch.__version__, "validation rows": f"{c.rows:,}"}
        facts["reference rows"] = f"{c.reference_rows:,}"
    facts["fingerprint of the weights"] = c.fingerprint
    same = "With the same files (compare their SHA-256) and versions, the command gives the same numbers."
    return (
        heading("How to reproduce this page")
        + paragraph(same if "command" in facts else "")
        + table([[name, value] for name, value in facts.items()], head=False, texts=True)
    )


def write_class_report(
    path: str | os.PathLike[str],
    *,
    title: str,
    prediction: ClassPrediction | None = None,
    labels: Any = None,
    calibration: ClassCalibration | None = None,
    judgement: ClassJudgement | None = None,
    about: str = "",
    reproduce: Mapping[str, str] | None = None,
    places: Sequence[int | str] = (),
    place: str = "row",
) -> None:
    """Write one self-contained HTML page about a calibrated classifier.

    Args:
        path: the file; it appears complete or not at all.
        title: heading of the page.
        prediction: of test rows used for nothing else.
        labels: their classes, whole numbers from 0.
        calibration: alone, for a page about what the validation rows say.
        judgement: of the predictions, where it was made already.
        about: a paragraph of your own, on the model and the data.
        reproduce: names and values for the last section, such as the command.
        places: where each test row is in its file.
        place: what these count.
    """
    if prediction is not None:
        judgement, c = judgement or judge_classes(prediction, labels), prediction.calibration
        grade, findings = judgement.grade, judgement.findings
    elif calibration is not None:
        c, findings = calibration, findings_of(calibration.verdict)
        grade = findings[0].grade
    else:
        raise ArgumentError("expected a prediction with labels, or a calibration, to write about; found neither.")
    body = [
        heading(title, 1),
        opening(grade, findings, about),
        *([] if prediction is None or judgement is None else _tested(judgement, prediction, places, place)),
        heading("What was compared on the validation rows"),
        table(class_candidates(c), marked=c.choice),
        _reproduction(c, reproduce or {}),
    ]
    write_aside(path, page_of(title, body).encode())


def _tested(judged: ClassJudgement, prediction: ClassPrediction, places: Sequence[int | str], place: str) -> list[str]:
    """Write the sections about test rows."""
    said = f"{test_rows(judged.verdict.rows, judged.verdict)}; the one in use is marked."
    if judged.strange is not None:
        said += f" {percent(judged.strange, 0)} of them lie beyond 95 % of the reference rows."
    said += " ECE: the calibration error, by how much probabilities are off on average."
    return [
        heading("On test rows"),
        table(class_table(judged.scores), said, marked=judged.scores[0].label),
        figures(list(_figures(judged))),
        *_strange(judged, prediction),
        heading("Every class"),
        table(_classes(judged, prediction.calibration)),
        heading("The surest mistakes"),
        table(_worst(judged, prediction, places, place)),
    ]


def _figures(judged: ClassJudgement) -> Iterator[Figure]:
    used, *others = judged.probabilities
    names = {"used": used, **{"constant" if name == ALONE else "raw": name for name in others}}
    plot = Plot(Axis(0, 1, "confidence", ticks=SHARES), Axis(0, 1, "share of rows that are right", ticks=SHARES))
    plot.line([0, 1], [0, 1], "ideal", "exact: as many right as the confidence says")
    for look, name in reversed(names.items()):
        sure, right, count = reliability(judged.probabilities[name], judged.labels, bins=10, mass=True)
        plot.line(sure.tolist(), right.tolist(), look, name)
        for x, y, n in zip(sure.tolist(), right.tolist(), count.tolist(), strict=True):
            plot.dot(x, y, look, f"{name}: {percent(y, 1)} of {n:.0f} rows right at confidence {percent(x, 1)}", 2)
    said = "Below the diagonal the probabilities are too sure. Ten groups of as many rows each."
    yield Figure("Does the confidence hold?", said, plot.svg(f"Accuracy against confidence. {said}"), names)
    risks = {name: risk_coverage(-p.amax(1), p.argmax(1) != judged.labels) for name, p in judged.probabilities.items()}
    highest = max(float(risk.max()) for _, risk in risks.values())
    plot = Plot(
        Axis(0, 1, "share of rows kept", ticks=SHARES),
        Axis.around([0.0, highest or 0.01], "error rate of these", zero=True),
    )
    for look, name in reversed(names.items()):
        shares, risk = risks[name]
        some = torch.linspace(0, len(shares) - 1, min(len(shares), 200)).round().long()
        plot.line(shares[some].tolist(), risk[some].tolist(), look, name)
    said = "The surest rows are kept first: the line should rise from the left to the right."
    yield Figure("What rejecting rows gains", said, plot.svg(f"Error rate against share kept. {said}"), names)


def _strange(judged: ClassJudgement, prediction: ClassPrediction) -> list[str]:
    """Compare confidence with the share that is right in groups of rows by novelty, beside one temperature."""
    if prediction.novelty is None or len(prediction) < _GROUPS:
        return []
    lines = [["novelty", "rows", "right", *judged.probabilities]]
    order = prediction.novelty.argsort()
    for rows in order.tensor_split(_GROUPS):
        low, high = (float(prediction.novelty[row]) for row in (rows[0], rows[-1]))
        right = float((prediction.label[rows] == judged.labels[rows]).double().mean())
        sure = [percent(float(p[rows].amax(1).mean()), 1) for p in judged.probabilities.values()]
        lines.append([f"{low:.2f} to {high:.2f}", f"{len(rows):,}", percent(right, 1), *sure])
    said = "Five groups of rows, and the mean confidence in each. Larger than the share that is right: too sure."
    return [heading("Rows unlike the others"), table(lines, said)]


def _classes(judged: ClassJudgement, c: ClassCalibration) -> list[list[str]]:
    """Return what becomes of the rows of each class, header first."""
    p = next(iter(judged.probabilities.values()))
    label = p.argmax(1)

    def average(values: Tensor) -> str:
        return percent(float(values.double().mean()), 0) if len(values) else "-"

    lines = [["class", "rows", "found", "right where predicted", "mean probability of its rows"]]
    for k, name in enumerate(c.known_names):
        true, said = judged.labels == k, label == k
        lines.append([name, f"{int(true.sum()):,}", average(said[true]), average(true[said]), average(p[true, k])])
    return lines if len(lines) <= 41 else [*lines[:41], ["...", "", "", "", ""]]


def _worst(
    judged: ClassJudgement, prediction: ClassPrediction, places: Sequence[int | str], place: str
) -> list[list[str]]:
    names, p = prediction.calibration.known_names, prediction.probabilities
    wrong = (prediction.label != judged.labels).nonzero()[:, 0]
    order = wrong[prediction.confidence[wrong].argsort(descending=True)][:_WORST]
    lines = [[place, "predicted", "with confidence", "is", "which had", "novelty"]]
    for row in order.tolist():
        strange = "-" if prediction.novelty is None else f"{float(prediction.novelty[row]):.2f}"
        said, true = int(prediction.label[row]), int(judged.labels[row])
        shares = percent(float(p[row, said]), 1), percent(float(p[row, true]), 1)
        lines.append([str(places[row] if places else row), names[said], shares[0], names[true], shares[1], strange])
    return lines

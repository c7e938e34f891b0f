"""A page about a calibrated classifier: verdict, scores beside one temperature, reliability, rows to look at."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

import torch

from latedrop.calibration.class_record import ClassCalibration
from latedrop.calibration.fit_classes import ALONE
from latedrop.calibration.verdict import Finding, Grade
from latedrop.errors import ArgumentError
from latedrop.evaluation.judgement import ClassJudgement, findings_of, judge_classes
from latedrop.files import write_aside
from latedrop.metrics.classes import reliability, risk_coverage
from latedrop.numerals import percent
from latedrop.prediction.prediction import ClassPrediction
from latedrop.report.html import Figure, figures, heading, light, lights, paragraph, table
from latedrop.report.page import page_of
from latedrop.report.sections import test_rows
from latedrop.report.svg import Axis, Plot
from latedrop.report.tables import class_candidates, class_table

__all__ = ["write_class_report"]

_WORST, _GROUPS = 8, 5
_SHARES = tuple((k / 4, f"{25 * k} %") for k in range(5))


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
        found, c = judgement or judge_classes(prediction, labels), prediction.calibration
        top = _opening(title, about, found.grade, found.findings) + _tested(found, prediction, places, place)
    elif calibration is not None:
        c, findings = calibration, findings_of(calibration.verdict)
        top = _opening(title, about, findings[0].grade, findings)
    else:
        raise ArgumentError("expected a prediction with labels, or a calibration, to write about; found neither.")
    body = [
        *top,
        heading("What was compared on the validation rows"),
        table(class_candidates(c), marked=c.choice),
        heading("To get this again"),
        table([[k, v] for k, v in _facts(c, reproduce or {}).items()], head=False, texts=True),
    ]
    write_aside(path, page_of(title, body).encode())


def _opening(title: str, about: str, grade: Grade, findings: Sequence[Finding]) -> list[str]:
    sentence = "; ".join(finding.text for finding in findings)
    verdict = f'<p class="verdict">{light(grade)} · {escape(sentence[0].upper() + sentence[1:])}.</p>'
    return [heading(title, 1), verdict, lights(findings), paragraph(about, "soft")]


def _tested(found: ClassJudgement, prediction: ClassPrediction, places: Sequence[int | str], place: str) -> list[str]:
    return [
        heading("On test rows"),
        _scores(found),
        figures(list(_figures(found))),
        *_strange(found, prediction),
        heading("Every class"),
        table(_classes(found, prediction.calibration)),
        heading("The surest mistakes"),
        table(_worst(found, prediction, places, place)),
    ]


def _scores(found: ClassJudgement) -> str:
    strange = (
        "" if found.strange is None else f" {percent(found.strange, 0)} of them lie beyond 95 % of the reference rows."
    )
    said = f"{test_rows(found.verdict.rows, found.verdict)}; what is in use is marked.{strange}"
    said += (
        " ECE: the calibration error, by how much probabilities are off on average; class-wise: that of every class."
    )
    return table(class_table(found.scores), said, marked=found.scores[0].label)


def _figures(found: ClassJudgement) -> Iterator[Figure]:
    used, *others = found.probabilities
    names = {"used": used, **{"constant" if name == ALONE else "raw": name for name in others}}
    plot = Plot(Axis(0, 1, "confidence", ticks=_SHARES), Axis(0, 1, "share of rows that are right", ticks=_SHARES))
    plot.line([0, 1], [0, 1], "ideal", "exact: as many right as the confidence says")
    for look, name in reversed(names.items()):
        sure, right, count = reliability(found.probabilities[name], found.labels, bins=10, mass=True)
        plot.line(sure.tolist(), right.tolist(), look, name)
        for x, y, n in zip(sure.tolist(), right.tolist(), count.tolist(), strict=True):
            plot.dot(x, y, look, f"{name}: {percent(y, 1)} of {n:.0f} rows right at confidence {percent(x, 1)}", 2)
    said = "Below the diagonal the probabilities are too sure. Ten groups of as many rows each."
    yield Figure("Does the confidence hold?", said, plot.svg(f"Accuracy against confidence. {said}"), names)
    risks = {name: risk_coverage(-p.amax(1), p.argmax(1) != found.labels) for name, p in found.probabilities.items()}
    highest = max(float(risk.max()) for _, risk in risks.values())
    plot = Plot(
        Axis(0, 1, "share of rows kept", ticks=_SHARES),
        Axis.around([0.0, highest or 0.01], "error rate of these", zero=True),
    )
    for look, name in reversed(names.items()):
        kept, risk = risks[name]
        some = torch.linspace(0, len(kept) - 1, min(len(kept), 200)).round().long()
        plot.line(kept[some].tolist(), risk[some].tolist(), look, name)
    said = "The surest rows are kept first: the line should rise from the left to the right."
    yield Figure("What rejecting rows gains", said, plot.svg(f"Error rate against share kept. {said}"), names)


def _strange(found: ClassJudgement, prediction: ClassPrediction) -> list[str]:
    """Whether the probabilities hold for rows unlike the others, too, beside those of one temperature."""
    if prediction.novelty is None or len(prediction) < _GROUPS:
        return []
    lines = [["novelty", "rows", "right", *found.probabilities]]
    order = prediction.novelty.argsort()
    for rows in order.tensor_split(_GROUPS):
        low, high = (float(prediction.novelty[row]) for row in (rows[0], rows[-1]))
        right = float((prediction.label[rows] == found.labels[rows]).double().mean())
        sure = [percent(float(p[rows].amax(1).mean()), 1) for p in found.probabilities.values()]
        lines.append([f"{low:.2f} to {high:.2f}", f"{len(rows):,}", percent(right, 1), *sure])
    said = "Five groups of rows, and the mean confidence in each. Larger than the share that is right: too sure."
    return [heading("Rows unlike the others"), table(lines, said)]


def _classes(found: ClassJudgement, c: ClassCalibration) -> list[list[str]]:
    p = next(iter(found.probabilities.values()))
    label = p.argmax(1)
    lines = [["class", "rows", "found", "right where predicted", "mean probability of its rows"]]
    for k, name in enumerate(c.known_names):
        own, said = found.labels == k, label == k
        shares = [
            percent(float((label[own] == k).double().mean()), 0) if bool(own.any()) else "-",
            percent(float(own[said].double().mean()), 0) if bool(said.any()) else "-",
            percent(float(p[own, k].mean()), 0) if bool(own.any()) else "-",
        ]
        lines.append([name, f"{int(own.sum()):,}", *shares])
    return lines if len(lines) <= 41 else [*lines[:41], ["...", "", "", "", ""]]


def _worst(
    found: ClassJudgement, prediction: ClassPrediction, places: Sequence[int | str], place: str
) -> list[list[str]]:
    names, p = prediction.calibration.known_names, prediction.probabilities
    wrong = (prediction.label != found.labels).nonzero()[:, 0]
    order = wrong[prediction.confidence[wrong].argsort(descending=True)][:_WORST]
    lines = [[place, "predicted", "with confidence", "is", "which had", "novelty"]]
    for row in order.tolist():
        strange = "-" if prediction.novelty is None else f"{float(prediction.novelty[row]):.2f}"
        said, true = int(prediction.label[row]), int(found.labels[row])
        shares = percent(float(p[row, said]), 1), percent(float(p[row, true]), 1)
        lines.append([str(places[row] if places else row), names[said], shares[0], names[true], shares[1], strange])
    return lines


def _facts(c: ClassCalibration, extra: Mapping[str, str]) -> dict[str, str]:
    from latedrop import __version__

    facts = {**extra, "latedrop": __version__, "torch": torch.__version__, "validation rows": f"{c.rows:,}"}
    return {**facts, "reference rows": f"{c.reference_rows:,}", "fingerprint of the weights": c.fingerprint}

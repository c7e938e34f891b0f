"""Everything about a calibration in one HTML file.

`write_report` says in plain words what the uncertainty is worth, on rows that it was not fitted to and beside one
constant variance, and shows on what grounds. The page needs nothing beside itself: no network, no other file. A slider
and notes need scripts; where these are not allowed, the same facts stand in tables.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from torch import Tensor

from latedrop.calibration.record import Calibration
from latedrop.errors import ArgumentError
from latedrop.evaluation.evaluation import Evaluation
from latedrop.evaluation.judgement import JudgedOutput, Judgement, judge
from latedrop.files import write_aside
from latedrop.prediction.prediction import Prediction
from latedrop.report.html import heading, paragraph, table
from latedrop.report.pictures import Picture
from latedrop.report.sections import made_of, on_rows, opening, overview_of_outputs, strange_rows
from latedrop.report.validation import fitting

__all__ = ["page_of", "write_report"]

_SHOWN = 6
_GRADES = {"bad": 0, "weak": 1, "good": 2}
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
    evaluations: Sequence[Evaluation] | None = None,
    pictures: Sequence[Picture] = (),
    unit: str | Sequence[str] = "",
    names: Sequence[str] = (),
    inputs: Any = None,
    about: str = "",
    notes: Mapping[str, str] | None = None,
    reproduce: Mapping[str, str] | None = None,
    level: float = 0.9,
    in_use: str | None = None,
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
        evaluations: rows of the headline table; those of `compare` where None.
        pictures: figures of your own, shown after the others.
        unit: of the target, or one for each output.
        names: of the outputs; those of the calibration's target columns where there are none.
        inputs: of the test rows, to see along which of them the intervals hold less: a mapping from names to columns,
            a DataFrame, or an array `(N, columns)`.
        about: a paragraph of your own, on the model and the data.
        notes: by label, what a row of the table is; adds to what is said of the usual ones.
        reproduce: names and values for the last section, such as the command.
        level: of the intervals that are drawn.
        in_use: the label of the evaluation that the page is about, where `evaluations` are your own.
        judgement: what `judge` made of the same rows already; in the place of prediction and target.
        place: what rows are counted in, such as the lines of a file.
    """
    units = [unit] if isinstance(unit, str) else list(unit)
    options: dict[str, Any] = {"level": level, "names": names, "units": units, "inputs": inputs, "label": in_use}
    judgement = judgement or _judged(prediction, target, evaluations=evaluations, **options)
    found = calibration.verdict if judgement is None else judgement.together.verdict
    body = [
        heading(title, 1),
        opening(found, about),
        *([] if judgement is None else _tests(judgement, calibration, place, notes or {})),
        _pictures(pictures),
        made_of(calibration, judgement),
        fitting(calibration, units[0] if len(units) == 1 else ""),
        _reproduction(calibration, reproduce or {}),
    ]
    write_aside(path, page_of(title, body))


def page_of(title: str, body: Sequence[str]) -> str:
    """A whole page from its parts, which are HTML already, with the style and the script of all pages."""
    here = Path(__file__)
    style, script = (here.with_name(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    mark = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{mark}'"
    return _PAGE.format(
        title=escape(title), policy=policy, style=style, script=script, body="\n".join(filter(None, body))
    )


def _judged(prediction: Prediction | None, target: Tensor | None, **options: Any) -> Judgement | None:
    if (prediction is None) != (target is None):
        raise ArgumentError(
            "expected prediction and target together, or neither; found only one. Pass uq.predict(x_test) and y_test."
        )
    return None if prediction is None or target is None else judge(prediction, target, **options)


def _tests(judgement: Judgement, c: Calibration, place: str, notes: Mapping[str, str]) -> list[str]:
    """The sections about test rows."""
    several = len(judgement.outputs) > 1
    if not several:
        return [on_rows(judgement.together, place, notes), strange_rows(judgement, c)]
    shown = sorted(sorted(judgement.outputs, key=_order)[:_SHOWN], key=judgement.outputs.index)
    parts = [overview_of_outputs(judgement, shown)]
    parts += [on_rows(output, place, notes, number=judgement.outputs.index(output)) for output in shown]
    return [*parts, strange_rows(judgement, c)]


def _order(output: JudgedOutput) -> tuple[int, float]:
    """The worst verdicts first."""
    if output.verdict is None:
        return 0, 0.0
    return _GRADES[output.verdict.grade], output.verdict.gain


def _pictures(pictures: Sequence[Picture]) -> str:
    html = []
    for picture in pictures:
        data = base64.b64encode(picture.png).decode("ascii")
        html.append(
            f"<figure><h3>{escape(picture.title)}</h3>"
            f'<img src="data:image/png;base64,{data}" alt="{escape(picture.alt)}">'
            f"<figcaption>{escape(picture.caption)}</figcaption></figure>"
        )
    return f'{heading("Pictures")}<div class="figures">{"".join(html)}</div>' if html else ""


def _reproduction(c: Calibration, extra: Mapping[str, str]) -> str:
    from latedrop import __version__

    facts = {**extra, "latedrop": __version__, **c.versions, "method": c.method}
    if c.method == "sample":
        facts |= {"draws": str(c.draws), "seed of the masks": str(c.seed)}
    facts["fingerprint of the weights"] = c.fingerprint
    lines = [[name, value] for name, value in facts.items()]
    same = "With the same files (compare their SHA-256) and versions, the command gives the same numbers."
    return (
        heading("To get this again")
        + paragraph(same if "command" in facts else "")
        + table(lines, head=False, texts=True)
    )

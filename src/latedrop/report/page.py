"""Everything about a calibration in one HTML file.

`write_report` puts the evaluations of test rows, the search over rates, the trade-off between NLL and
miscalibration area, and pictures of the test rows on a page that needs nothing beside itself: no script, no
network, no other file. matplotlib draws the figures (`pip install "latedrop[plots]"`).
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from html import escape

from torch import Tensor

from latedrop import metrics
from latedrop.calibration.evaluation import Evaluation, compare, verdict
from latedrop.calibration.prediction import Prediction
from latedrop.calibration.record import Calibration
from latedrop.errors import ArgumentError
from latedrop.files import write_aside
from latedrop.report.pictures import Picture, pictures_of_tests, pictures_of_validation
from latedrop.report.style import PAGE, STYLE
from latedrop.report.tables import candidate_table, number, rate_table, site_table, table

__all__ = ["write_report"]

_NOTES = {
    "terms": "the variance of the fitted terms, the default of calibrate.",
    "constant": "one variance for all rows, the mean squared error of the validation rows: what has to be beaten.",
    "raw": "the variance under dropout as it is, at the chosen rate.",
    "scaled": "the same, times the scale of least NLL on the validation rows.",
    "relaxed": "the same, times the scale that balances the calibration curve of the validation rows.",
    "isotonic": "intervals bent to the observed frequencies of the validation rows.",
    "conformal": "intervals from the ranked errors of rows that served for nothing else.",
}


def write_report(
    path: str | os.PathLike[str],
    *,
    title: str,
    calibration: Calibration,
    prediction: Prediction | None = None,
    target: Tensor | None = None,
    evaluations: Sequence[Evaluation] | None = None,
    pictures: Sequence[Picture] = (),
    unit: str = "",
    about: str = "",
    notes: Mapping[str, str] | None = None,
    reproduce: Mapping[str, str] | None = None,
    level: float = 0.9,
) -> None:
    """Write one self-contained HTML page about a calibration.

    Args:
        path: the file; it appears complete or not at all.
        title: heading of the page.
        calibration: what `calibrate` chose and measured.
        prediction: of test rows that served for nothing else; with `target`, adds the table and figures about them.
        target: their true values.
        evaluations: rows of the headline table; those of `compare` where None.
        pictures: figures of your own, shown after the others.
        unit: of the target.
        about: a paragraph of your own, on the model and the data.
        notes: by label, what a row of the table is; adds to what is said of the usual ones.
        reproduce: names and values for the last section, such as the command.
        level: of the intervals that are drawn.
    """
    if (prediction is None) != (target is None):
        raise ArgumentError(
            "expected prediction and target together, or neither; found only one. Pass uq.predict(x_test) and y_test."
        )
    tests: list[Picture] = []
    if prediction is not None and target is not None:
        target = metrics.align_target(prediction.mean, target).to(prediction.mean.dtype)
        evaluations = compare(prediction, target, level=level) if evaluations is None else evaluations
        tests = list(pictures_of_tests(prediction, target, evaluations, unit, level))
    body = [
        f"<h1>{escape(title)}</h1>",
        _verdict(calibration, prediction, target),
        f"<p>{escape(_summary(calibration))}</p>",
        f"<p>{escape(about)}</p>" if about else "",
        _headline(evaluations, unit, {**_NOTES, **(notes or {})}) if evaluations else "",
        _figures("", tests),
        _figures("", pictures),
        _figures("On validation rows", list(pictures_of_validation(calibration, unit))),
        _fits(calibration, unit),
        "<h2>Where dropout goes</h2>"
        + _table(site_table(calibration.sites), "Dropout goes on the input of these layers."),
        _reproduction(calibration, reproduce or {}),
    ]
    page = PAGE.format(title=escape(title), style=STYLE, body="\n".join(filter(None, body)))
    write_aside(path, page.encode())


def _verdict(c: Calibration, prediction: Prediction | None, target: Tensor | None) -> str:
    """One sentence on what it is worth: on test rows where there are some, else by cross-validation."""
    found = c.verdict
    if prediction is not None and target is not None and prediction.calibration.constant is not None:
        found = verdict(prediction, target)
    return "" if found is None else f"<p><strong>{escape(found.sentence)}</strong></p>"


def _fits(c: Calibration, unit: str) -> str:
    """What was tried on the validation rows."""
    rows = f"{c.rows} validation rows"
    if c.terms is None:
        return "<h2>Every rate</h2>" + _table(rate_table(c, unit), f"{rows}.")
    compared = _table(candidate_table(c.terms), f"{rows}, each left out of the fit that it was scored with.")
    return f"<h2>Terms</h2>{compared}{_table(c.terms.table(), 'Shares are averages over the validation rows.')}"


def _listed(names: list[str]) -> str:
    return " and ".join([*([", ".join(names[:-1])] if len(names) > 1 else []), *names[-1:]]) or "no terms"


def _summary(c: Calibration) -> str:
    sites = f"{len(c.sites)} site{'s' if len(c.sites) != 1 else ''} of a trained network"
    if c.terms is not None:
        guard = c.terms.guard
        grows = " The variance grows for rows unlike these." if guard is not None and guard.grows else ""
        terms = [f"dropout at {sites}" if term.name == "dropout" else term.name for term in c.terms.terms]
        usual = f"{c.terms.reference_rows} reference" if c.terms.reference_rows else "the validation"
        return (
            f"The variance was fitted to {c.rows} validation rows as a floor plus {_listed(terms)}; the candidate in "
            f"use is: {c.terms.choice}. What is usual was learned from {usual} rows.{grows}"
        )
    rates = f"each of {len(c.table)} rates" if len(c.table) > 1 else "one rate"
    done = {
        "sample": f"Dropout was injected at {sites}, and {c.draws} thinned networks were run at {rates}",
        "linear": f"The variance that dropout at {sites} would give was worked out to first order, without draws,",
        "propagate": f"Mean and variance under dropout at {sites} were carried through its layers at {rates}",
    }[c.method]
    kept = "The fitted rate is" if c.method == "linear" else f"The rate of least {c.criterion} NLL is"
    floor = f" plus {number(c.floors)}" if any(c.floors) else ""
    return (
        f"{done} on {c.rows} validation rows. {kept} {number(c.rate)}; the predicted variance is the raw one times "
        f"{number(c.scales)}{floor} (relaxed: times {number(c.relaxed_scales)})."
    )


def _headline(evaluations: Sequence[Evaluation], unit: str, notes: Mapping[str, str]) -> str:
    rows = {row.rows for row in evaluations}
    noise = max((row.level * (1 - row.level) / row.rows) ** 0.5 for row in evaluations)
    known = "".join(
        f"<dt>{escape(row.label)}</dt><dd>{escape(notes[row.label])}</dd>" for row in evaluations if row.label in notes
    )
    said = (
        "RMSE: root mean squared error. NLL: Gaussian negative log-likelihood, lower is better. MA: miscalibration "
        f"area, 0 is calibrated. Chance alone moves a coverage by about {100 * noise:.1f} points (one standard error)."
    )
    caption = f"{' or '.join(map(str, sorted(rows)))} test rows, used for nothing else."
    return (
        "<h2>On test rows</h2>"
        + _table(table(evaluations, unit), caption)
        + f"<p>{escape(said)}</p>"
        + (f"<dl>{known}</dl>" if known else "")
    )


def _reproduction(c: Calibration, extra: Mapping[str, str]) -> str:
    from latedrop import __version__

    facts = {**extra, "latedrop": __version__, **c.versions, "method": c.method}
    if c.method == "sample":
        facts |= {"draws": str(c.draws), "seed of the masks": str(c.seed)}
    if c.ratio_to_draws is not None:
        facts["raw variance, times that of a few draws"] = number(c.ratio_to_draws)
    facts["fingerprint of the weights"] = c.fingerprint[:16]
    return "<h2>To get this again</h2>" + _table([[name, value] for name, value in facts.items()], "", head=False)


def _table(lines: Sequence[Sequence[str]], caption: str, *, head: bool = True) -> str:
    """An HTML table in a box of its own that scrolls sideways on narrow screens; all cells are escaped."""
    html = []
    for index, line in enumerate(lines):
        if head and index == 0:
            cells = [f'<th scope="col">{escape(cell)}</th>' if cell else "<td></td>" for cell in line]
        else:
            cells = [f'<th scope="row">{escape(line[0])}</th>', *(f"<td>{escape(cell)}</td>" for cell in line[1:])]
        html.append(f"<tr>{''.join(cells)}</tr>")
    top = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f'<div class="wide" tabindex="0"><table>{top}{"".join(html)}</table></div>'


def _figures(title: str, pictures: Sequence[Picture]) -> str:
    html = [f"<h2>{escape(title)}</h2>"] if title else []
    html.append('<div class="figures">')
    for picture in pictures:
        data = base64.b64encode(picture.png).decode("ascii")
        html.append(
            f"<figure><h3>{escape(picture.title)}</h3>"
            f'<img src="data:image/png;base64,{data}" alt="{escape(picture.alt)}">'
            f"<figcaption>{escape(picture.caption)}</figcaption></figure>"
        )
    return "".join([*html, "</div>"]) if pictures else ""

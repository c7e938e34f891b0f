"""The sections of a page about numbers: each a function of what was judged, or of the calibration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from latedrop.calibration.class_record import ClassVerdict
from latedrop.calibration.record import Calibration
from latedrop.calibration.verdict import GAIN_GOOD, Verdict
from latedrop.evaluation.evaluation import Evaluation
from latedrop.evaluation.judgement import JudgedOutput, Judgement
from latedrop.numerals import column, percent
from latedrop.report import charts
from latedrop.report.html import Figure, figures, heading, light, lights, paragraph, table
from latedrop.report.svg import SHARES, Axis, Plot
from latedrop.report.tables import (
    candidate_table,
    group_table,
    number,
    output_table,
    rate_table,
    site_table,
    with_unit,
    worst_table,
)
from latedrop.report.tables import table as evaluation_table

__all__ = ["fitting", "made_of", "on_rows", "opening", "overview_of_outputs", "strange_rows", "summary", "test_rows"]

_LOOKS = {"raw": "raw", "scaled": "used", "relaxed": "relaxed", "ideal": "ideal", "constant": "constant"}
_FEW = 4  # curves that can be told apart
_LEVELS = (0.5, 0.68, 0.8, 0.9, 0.95, 0.99)
_NOTES = {
    "terms": "the variance of the fitted terms, the default of calibrate.",
    "constant": "one variance for all rows, the mean squared error of the validation rows: what has to be beaten.",
    "raw": "the variance under dropout as it is, at the chosen rate.",
    "scaled": "the same, times the scale of least NLL on the validation rows.",
    "relaxed": "the variance times the scale that balances the calibration curve of the validation rows.",
    "isotonic": "intervals as wide as the errors of the validation rows were at each level.",
    "conformal": "intervals from the ranked errors of rows used for nothing else.",
}
_WORDS = (
    "RMSE: root mean squared error. NLL: Gaussian negative log-likelihood, lower is better. Gain: how far the NLL is "
    f"below that of the constant; {GAIN_GOOD:g} nats and more are worth having. MA: miscalibration area, between the "
    "calibration curve and the diagonal; 0 is calibrated. Rank correlation: of predicted deviation and size of the "
    "error, 0 where it does not tell. After ± stands one standard error."
)

_FLOOR = "Floor: the part of the variance that is the same for all rows."
_RELAXED = "Relaxed: the scale balances the calibration curve."
_NATS = (
    "Nats measure how likely the true values were: a gain of 0.1 nats means 10 % more likely per row than under one "
    "constant variance."
)


def test_rows(rows: int, verdict: Verdict | ClassVerdict | None) -> str:
    """Say how many test rows there are, and whether the calibration was fitted to them."""
    used = "that the calibration was fitted to" if verdict and verdict.fitted == "own rows" else "used for nothing else"
    return f"{rows:,} test rows, {used}"


def opening(verdict: Verdict | None, about: str = "") -> str:
    """Write the verdict in words, and a light for each of its parts."""
    if verdict is None:
        return paragraph("The calibration does not know its constant variance: calibrate again for a verdict.")
    top = f'<p class="verdict">{light(verdict.grade)} · {escape(verdict.sentence)}</p>'
    return f"{top}{lights(verdict.findings)}{paragraph(_NATS, 'soft')}{paragraph(about, 'soft')}"


def overview_of_outputs(judgement: Judgement, shown: Sequence[JudgedOutput]) -> str:
    """The verdict on each of several outputs, and where they stand on the page."""
    names = {id(output): k for k, output in enumerate(judgement.outputs)}
    links = "".join(f'<li><a href="#output-{names[id(o)]}">{escape(o.name)}</a></li>' for o in shown)
    more = len(judgement.outputs) - len(shown)
    note = f"{more} outputs are in this table alone; those of the worst verdict have sections." if more else ""
    parts = [heading("Every output"), table(output_table(judgement.outputs)), paragraph(note, "soft")]
    return "".join([*parts, f"<nav><ul>{links}</ul></nav>"])


def on_rows(output: JudgedOutput, place: str, notes: Mapping[str, str], *, number: int | None = None) -> str:
    """All about one output; with a number, under its name and with a verdict of its own."""
    parts = []
    if number is not None:
        name = with_unit(output.name, output.unit)
        parts.append(f'<h2 class="output" id="output-{number}">{escape(name)}</h2>')
        parts.append("" if output.verdict is None else lights(output.verdict.findings))
    level = 2 if number is None else 3
    known = {**_NOTES, **notes}
    explained = [[row.label, known[row.label]] for row in output.evaluations if row.label in known]
    rows = output.used.rows
    caption = f"{test_rows(rows, output.verdict)}; the one in use is marked."
    relaxed = f" {_RELAXED}" if any(row.label == "relaxed" for row in output.evaluations) else ""
    unweighted = "From here on every row counts once: row weights are for the scores above."
    first = not number  # what the rows are is said once
    parts += [
        heading("On test rows", level),
        table(evaluation_table(output.evaluations, output.unit), caption, marked=output.used.label),
        paragraph(f"{_WORDS}{relaxed}", "soft") if first else "",
        _details("What each row is", table(explained, head=False, texts=True)) if first else "",
        _by_level(output, level),
        heading("Row by row", level),
        paragraph(unweighted if output.values.weighted else ""),
        figures(list(charts.of_rows(output))),
        _groups(output, level),
        _worst(output, level, place),
    ]
    return "".join(parts)


def _details(title: str, html: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{html}</details>"


def _by_level(output: JudgedOutput, level: int) -> str:
    """Coverage and width at some levels for all, and at any level for those who can move the slider."""
    rows = [row for row in output.evaluations if row.widths]
    cells = {str(k): {"inside": _inside(row), "width": column(row.widths)} for k, row in enumerate(rows)}
    grid = max((row.levels for row in rows), key=len, default=())
    start = min(range(len(grid)), key=lambda i: abs(grid[i] - output.used.level), default=0)
    data = json.dumps({"levels": [percent(a, 0) for a in grid], "shares": grid, "rows": cells}).replace("<", "\\u003c")
    moving = "".join(
        f'<tr{" class=marked" if row.label == output.used.label else ""}><th scope="row">{escape(row.label)}</th>'
        f'<td data-of="{k}" data-what="inside"></td><td data-of="{k}" data-what="width"></td></tr>'
        for k, row in enumerate(rows)
    )
    slider = (
        f'<div class="slider" hidden><label>Level of the interval: <output></output><input type="range" min="0" '
        f'max="{len(grid) - 1}" value="{start}" aria-label="Level of the interval"></label>'
        '<div class="wide"><table><tr><td></td>'
        f'<th scope="col">inside</th><th scope="col">{escape(with_unit("mean width", output.unit))}</th></tr>{moving}'
        "</table></div></div>"
    )
    every = few = output.evaluations
    if len(every) > _FEW:
        few = tuple(row for row in every if row.label in (output.used.label, "scaled", "constant"))
    shown = figures(list(charts.by_level(output, few))) + _level_table(few, output.unit)
    if few != every:
        drawn = figures(list(charts.by_level(output, every, ", all")))
        shown += _details(f"Show all {len(every)} methods", drawn + _level_table(every, output.unit))
    return (
        f'<section class="levels">{heading("At every level", level)}{slider}'
        f'<script type="application/json">{data}</script>{shown}</section>'
    )


def _level_table(evaluations: Sequence[Evaluation], unit: str) -> str:
    """What the intervals hold at some levels, and how wide they are."""
    rows = [row for row in evaluations if row.widths]
    heads = [f"{row.label}{what}" for row in rows for what in (", inside", f", {with_unit('width', unit)}")]
    cells = [(row.levels, _inside(row), column(row.widths)) for row in rows]
    lines = [["level", *heads]]
    for wanted in _LEVELS:
        line = [percent(wanted, 0)]
        for levels, inside, width in cells:
            at = next((i for i, a in enumerate(levels) if abs(a - wanted) < 1e-9), None)
            line += ["-", "-"] if at is None else [inside[at], width[at]]
        lines.append(line)
    return table(lines, "Share of rows inside, and mean width of the intervals.")


def _inside(row: Evaluation) -> list[str]:
    """The share of rows inside at each level, with its standard error."""
    pairs = zip(row.observed, row.observed_errors(), strict=True)
    return [f"{percent(share)} ± {100 * error:.1f}" for share, error in pairs]


def _groups(output: JudgedOutput, level: int) -> str:
    """Where the intervals hold less: by deviation, and along the inputs."""
    parts = [heading("Where it holds less", level)]
    if output.deciles:
        name = with_unit("predicted deviation", output.unit)
        shown, all_values = len(output.values.mean), output.values.of
        some = f" An even choice of {shown:,} of {all_values:,} values." if shown < all_values else ""
        parts.append(table(group_table(output.deciles, name, output.unit), f"Rows by predicted deviation.{some}"))
    elif output.used.rows < 20:
        parts.append(paragraph("The rows are too few to be split."))
    else:
        parts.append(paragraph("The predicted deviation is the same for all rows: there is nothing to split them by."))
    if output.inputs:
        said = "Coverage along the inputs with which it differs most, the largest difference first. Inside the grey "
        said += "band it differs from the level by no more than chance (two standard errors)."
        parts += [
            heading("By prediction and input", level + 1),
            paragraph(said),
            figures(list(charts.by_input(output)), small=True),
        ]
        off = [group for groups in output.inputs for group in groups if group.off]
        if off:
            lines = [["input", *group_table(off, "range", output.unit)[0]]]
            for group in off:
                lines.append([group.name, *group_table([group], "range", output.unit)[1]])
            parts.append(table(lines, "Ranges in which the intervals hold more or less than chance explains."))
    return "".join(parts)


def _worst(output: JudgedOutput, level: int, place: str) -> str:
    lines = worst_table(output, place)
    if not lines:
        return ""
    said = "The rows furthest from their prediction, in predicted deviations, and in deviations of the constant. "
    count = len(output.worst[0]["inputs"])
    said += f"The first 8 of {count} inputs are shown." if count > 8 else ""
    return heading("The worst rows", level) + paragraph(said) + table(lines)


def strange_rows(judgement: Judgement, c: Calibration) -> str:
    """How many rows are unlike the validation rows, and what their intervals hold."""
    output = judgement.together
    if judgement.novelty is None or not output.strange:
        return ""
    grows = c.terms is not None and c.terms.guard is not None and c.terms.guard.grows
    said = (
        f"{percent(judgement.novelty)} of the test rows have a novelty above 1, as 5 % of the reference rows have. "
        f"Their intervals {'are wider' if grows else 'stay as they are'}."
    )
    lines = group_table(output.strange, "novelty", output.unit)
    if len(judgement.outputs) > 1:  # of several units an RMSE says nothing
        lines = [[cell for k, cell in enumerate(line) if k != 2] for line in lines]
    return heading("Rows unlike the others") + paragraph(said) + table(lines)


def made_of(c: Calibration, judgement: Judgement | None) -> str:
    """The shares of the terms or sites, and where dropout goes."""
    parts = []
    shares = c.shares if c.terms is None else c.terms.shares
    if shares:
        ordered = dict(sorted(shares.items(), key=lambda item: -item[1]))
        parts.append(figures([charts.share_bars(ordered, _constant_share(judgement))]))
    if c.terms is not None:
        lines = c.terms.table()
        constant = ", ".join(f"{value:.4g}" for value in c.constant or ())
        lines = [*lines, ["constant, to compare", constant, "100.0%"]] if constant else lines
        parts.append(table(lines, f"Shares are averages over the validation rows. {_FLOOR}"))
    parts.append(table(site_table(c.sites), "Dropout goes on the input of these layers."))
    return heading("What the variance is made of") + "".join(parts)


def _constant_share(judgement: Judgement | None) -> float | None:
    """The constant variance in units of the mean predicted one, of the test rows of one output."""
    values = None if judgement is None or len(judgement.outputs) > 1 else judgement.together.values
    if values is None or values.constant is None:
        return None
    return float(np.square(values.constant).mean() / np.square(values.std).mean())


def summary(c: Calibration) -> str:
    """How the variance was fitted, in a few sentences."""
    sites = f"{len(c.sites)} site{'s' if len(c.sites) != 1 else ''} of a trained network"
    if c.terms is not None:
        guard = c.terms.guard
        grows = " The variance grows for rows unlike these." if guard is not None and guard.grows else ""
        terms = [f"dropout at {sites}" if term.name == "dropout" else term.name for term in c.terms.terms]
        usual = f"{c.terms.reference_rows:,} reference" if c.terms.reference_rows else "the validation"
        return (
            f"The variance was fitted to {c.rows:,} validation rows as a floor plus {_listed(terms)}; the candidate in "
            f"use is: {c.terms.choice}. What is usual was learned from {usual} rows.{grows}"
        )
    rates = f"each of {len(c.table)} rates" if len(c.table) > 1 else "one rate"
    done = {
        "sample": f"Dropout was injected at {sites}, and {c.draws} thinned networks were run at {rates}",
        "linear": f"The variance that dropout at {sites} would give was worked out to first order, without draws,",
        "propagate": f"Mean and variance under dropout at {sites} were carried through its layers at {rates}",
    }[c.method]
    chosen = "The fitted rate is" if c.method == "linear" else f"The rate of least {c.criterion} NLL is"
    floor = f" plus {number(c.floors)}" if any(c.floors) else ""
    mean = "the mean over draws" if c.mean == "draws" else "the model's own output"
    return (
        f"{done} on {c.rows:,} validation rows. {chosen} {number(c.rate)}; the predicted mean is {mean}, the predicted "
        f"variance is the raw one times {number(c.scales)}{floor} (relaxed: times {number(c.row.relaxed_scale)})."
    )


def fitting(c: Calibration, unit: str) -> str:
    """The section about the validation rows."""
    rows = f"{c.rows:,} validation rows"
    parts = [heading("How it was fitted"), paragraph(summary(c))]
    parts.append(figures([_curves(c)]))
    if c.terms is None:
        words = f"{_RELAXED} {_FLOOR}" if any(any(row.floor) for row in c.table) else _RELAXED
        parts += [heading("Every rate", 3), table(rate_table(c, unit), f"{rows}; the fit has seen them. {words}")]
    else:
        said = f"{rows}, each left out of the fit that it was scored with. 0.1 nats: 10 % more likely per row."
        parts += [heading("Candidates", 3), table(candidate_table(c.terms), said)]
    return "".join(parts)


def _listed(names: Sequence[str]) -> str:
    return " and ".join([*([", ".join(names[:-1])] if len(names) > 1 else []), *names[-1:]]) or "no terms"


def _curves(c: Calibration) -> Figure:
    plot = Plot(Axis(0, 1, "level of the interval", ticks=SHARES), Axis(0, 1, "share of rows inside", ticks=SHARES))
    plot.line([0, 1], [0, 1], "ideal")
    kinds = {"raw": "unscaled", "scaled": "scaled", "relaxed": "relaxed", "constant": "constant"}
    if c.terms is not None:
        del kinds["raw"]
    named = {"scaled": "terms"} if c.terms is not None else {}
    shown = {name: kind for name, kind in kinds.items() if kind in c.curves}
    for name, kind in shown.items():
        plot.line(c.curves["levels"], c.curves[kind], _LOOKS[name], named.get(name, name))
    said = "Validation rows, which the fit has seen: test rows tell more."
    return Figure(
        "Calibration curves of validation rows",
        said,
        plot.svg(f"Share of rows inside against level. {said}"),
        {_LOOKS[name]: named.get(name, name) for name in shown},
    )

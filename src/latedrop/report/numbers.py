"""Write the sections of a page about numbers, with their figures: what test rows say, and how the model was fitted."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

import numpy as np

from latedrop.calibration.class_record import ClassVerdict
from latedrop.calibration.record import Calibration
from latedrop.calibration.verdict import GAIN_GOOD, Verdict
from latedrop.evaluation.judgement import JudgedOutput, Judgement
from latedrop.metrics.groups import Floats
from latedrop.metrics.levels import central_quantile
from latedrop.numerals import percent, plain
from latedrop.report.html import Figure, figures, heading, lights, paragraph, table
from latedrop.report.svg import SHARES, Axis, Plot, robust_limit
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

__all__ = ["fitting", "made_of", "on_test_rows", "test_rows"]

_SHOWN = 6  # outputs that have sections
_BARS = 40
_GRADES = {"bad": 0, "weak": 1, "good": 2}
_LEVELS = (0.5, 0.68, 0.8, 0.9, 0.95, 0.99)
_USED, _CONSTANT = "used", "constant"
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
_RELAXED = "Relaxed: the scale balances the calibration curve."


def test_rows(rows: int, verdict: Verdict | ClassVerdict | None) -> str:
    """Say how many test rows there are, and whether the calibration was fitted to them."""
    used = "that the calibration was fitted to" if verdict and verdict.fitted == "own rows" else "used for nothing else"
    return f"{rows:,} test rows, {used}"


def on_test_rows(judgement: Judgement, c: Calibration, place: str) -> str:
    """Write all about test rows: of several outputs an overview, and sections of those with the worst verdicts."""
    outputs = judgement.outputs
    if len(outputs) == 1:
        return _of_output(judgement.together, place, 2) + _strange_rows(judgement, c)
    worst = sorted(range(len(outputs)), key=lambda k: _order(outputs[k]))[:_SHOWN]
    links = "".join(f'<li><a href="#output-{k}">{escape(outputs[k].name)}</a></li>' for k in sorted(worst))
    more = len(outputs) - len(worst)
    note = f"{more} outputs are in this table alone; those of the worst verdict have sections." if more else ""
    html = [heading("Every output"), table(output_table(outputs)), paragraph(note, "soft")]
    html.append(f"<nav><ul>{links}</ul></nav>")
    for k in sorted(worst):
        name, verdict = with_unit(outputs[k].name, outputs[k].unit), outputs[k].verdict
        html.append(f'<h2 class="output" id="output-{k}">{escape(name)}</h2>')
        html.append(lights(verdict.findings))
        html.append(_of_output(outputs[k], place, 3, words=not k))
    return "".join([*html, _strange_rows(judgement, c)])


def _order(output: JudgedOutput) -> tuple[int, float]:
    """Return what sorts the worst verdicts first."""
    return _GRADES[output.verdict.grade], output.verdict.gain


def _of_output(output: JudgedOutput, place: str, level: int, *, words: bool = True) -> str:
    """Write all about one output; with `words` also what the columns and rows of its table are."""
    rows = output.evaluations
    explained = [[row.label, _NOTES[row.label]] for row in rows if row.label in _NOTES]
    relaxed = f" {_RELAXED}" if any(row.label == "relaxed" for row in rows) else ""
    details = f"<details><summary>What each row is</summary>{table(explained, head=False, texts=True)}</details>"
    caption = f"{test_rows(output.used.rows, output.verdict)}; the one in use is marked."
    html = [
        heading("On test rows", level),
        table(evaluation_table(rows, output.unit), caption, marked=output.used.label),
        paragraph(f"{_WORDS}{relaxed}", "soft") + details if words else "",
        _level_table(output),
        heading("In figures", level),
        figures([_curves(output), _intervals(output), _kept(output)]),
        heading("Where it holds less", level),
        *_groups(output),
    ]
    lines = worst_table(output, place)
    if lines:
        said = "The rows furthest from their prediction, in predicted deviations, and in deviations of the constant. "
        count = len(output.worst[0]["inputs"])
        said += f"The first 8 of {count} inputs are shown." if count > 8 else ""
        html += [heading("The worst rows", level), paragraph(said), table(lines)]
    return "".join(html)


def _level_table(output: JudgedOutput) -> str:
    """Write what the intervals hold at some levels, and how wide they are."""
    lines = [["", *(percent(level, 0) for level in _LEVELS)]]
    for row in output.evaluations:
        at_levels = zip(row.levels, row.observed, row.widths, strict=True)
        cells = {round(level, 6): f"{percent(share)} · {plain(width, 3)}" for level, share, width in at_levels}
        lines.append([row.label, *(cells.get(level, "-") for level in _LEVELS)])
    said = f"Share of rows inside · {with_unit('mean width', output.unit)} of the intervals, by their level."
    return table(lines, said, marked=output.used.label)


def _curves(output: JudgedOutput) -> Figure:
    """Draw what the intervals hold at every level: those in use, those of the fitted scale, and of the constant."""
    looks = {"scaled": "relaxed", "constant": _CONSTANT, output.used.label: _USED}
    rows = [row for row in output.evaluations if row.label in looks]
    plot = Plot(Axis(0, 1, "level of the interval", ticks=SHARES), Axis(0, 1, "share of rows inside", ticks=SHARES))
    plot.line([0, 1], [0, 1], "ideal", "exact: as many inside as the level says")
    for row in reversed(rows):
        plot.line(row.levels, row.observed, looks[row.label], f"{row.label}: area {row.ma:.3f} beside the diagonal")
    areas = ", ".join(f"{row.label} {row.ma:.3f}" for row in rows)
    words = f"Share of rows inside against level of the interval. Area between curve and diagonal: {areas}."
    said = "On the diagonal the intervals hold what they say; below it they are too narrow, above too wide."
    return Figure("What the intervals hold", said, plot.svg(words), {looks[row.label]: row.label for row in rows})


def _intervals(output: JudgedOutput) -> Figure:
    """Draw some rows with their intervals and targets."""
    values, level = output.values, output.used.level
    count = len(values.mean)
    some = np.argsort(values.mean, kind="stable")[np.linspace(0, count - 1, min(count, _BARS)).round().astype(int)]
    reach = central_quantile(level) * float(values.constant[0])
    ends = np.concatenate([values.low[some], values.high[some]])
    low, high = _limits(
        np.concatenate([values.target[some], values.mean[some] - reach, values.mean[some] + reach]), ends
    )
    plot = Plot(
        Axis(-1, len(some), f"{len(some)} of {values.of:,} rows, in order of their prediction", ticks=((-9, ""),)),
        Axis.around([low, high], with_unit(output.name, output.unit)),
    )
    for k, i in enumerate(some.tolist()):
        mean, target = float(values.mean[i]), float(values.target[i])
        inside = values.low[i] <= target <= values.high[i]
        words = f"row {values.rows[i]}: target {plain(target)}, prediction {plain(mean)}, "
        words += f"interval {plain(float(values.low[i]))} to {plain(float(values.high[i]))}"
        plot.segment((k, float(values.low[i])), (k, float(values.high[i])), "bar", words)
        plot.segment((k, mean - reach), (k, mean + reach), "bar constant", words)
        (plot.dot if inside else plot.cross)(k, target, "target", words)
    shown = np.concatenate([ends, values.target[some]])
    beyond = int(((shown < low) | (shown > high)).sum())
    cut = f" {beyond} ends and targets lie beyond the figure." if beyond else ""
    missed = int(((values.target < values.low) | (values.target > values.high))[some].sum())
    said = f"{percent(level, 0)} intervals with the true values; {missed} of these {len(some)} are missed.{cut}"
    legend = {"bar": f"{output.used.label}, {percent(level, 0)}", "bar constant": "constant"}
    legend |= {"dot target": "target", **({"cross": "missed target"} if missed else {})}
    return Figure("Intervals of some rows", said, plot.svg(said), legend)


def _kept(output: JudgedOutput) -> Figure:
    """Draw the RMSE of the most certain rows."""
    all_rows, label = output.kept_rmse[0], with_unit("RMSE of these", output.unit)
    ticks = tuple((k / 5, f"{20 * k} %") for k in range(1, 6))
    plot = Plot(
        Axis(1.0, 0.0999, "share of rows kept, the most certain ones", ticks=ticks),
        Axis.around([0.0, *output.kept_rmse], label, zero=True),
    )
    plot.line(output.kept, output.ideal_rmse, "ideal", "if the errors were known")
    plot.across(all_rows, _CONSTANT, f"constant: it cannot choose, {plain(all_rows)}")
    plot.line(output.kept, output.kept_rmse, _USED)
    for share, rmse in zip(output.kept, output.kept_rmse, strict=True):
        plot.dot(share, rmse, _USED, f"{percent(share, 0)} kept: RMSE {plain(rmse)}", 2)
    half = output.kept_rmse[int(np.argmin(np.abs(np.asarray(output.kept) - 0.5)))]
    change = 1 - half / all_rows if all_rows else 0.0
    said = f"Without the less certain half of the rows the RMSE is {plain(half)} instead of {plain(all_rows)} "
    said += f"({percent(abs(change), 0)} {'less' if change >= 0 else 'more'})."
    if len(set(output.kept_rmse)) == 1:
        said = "The deviation is the same for all rows: there is nothing to choose by."
    legend = {_USED: output.used.label, _CONSTANT: "constant", "ideal": "if the errors were known"}
    return Figure("What can be set aside", said, plot.svg(said), legend)


def _limits(usual: Floats, ends: Floats) -> tuple[float, float]:
    """Return the ends of an axis: of targets and the constant, unless they are far off, and of intervals nearby."""
    middle = float(np.median(usual))
    near = usual[np.abs(usual - middle) <= robust_limit(np.abs(usual - middle).tolist())]
    low, high = float(near.min()), float(near.max())
    room = 0.5 * (high - low)
    return min(low, max(float(ends.min()), low - room)), max(high, min(float(ends.max()), high + room))


def _groups(output: JudgedOutput) -> Iterator[str]:
    """Write where the intervals hold less: by deviation, and along the inputs."""
    every = [groups for groups in (output.deciles, *output.inputs) if groups]
    if not output.deciles:
        few = output.used.rows < 20
        yield paragraph(
            "The rows are too few to be split."
            if few
            else "The predicted deviation is the same for all rows: there is nothing to split them by."
        )
    if not every:
        return
    lines = []
    for groups in every:
        name = "predicted deviation" if groups[0].name == "std" else groups[0].name
        head, *rows = group_table(groups, "range", output.unit)
        lines += [[name, *row] for row in rows]
    head = ["input", *head]
    off = [line for line in lines if line[-1]]
    if off:
        yield table([head, *off], "Ranges in which the intervals hold more or less than chance explains.")
    else:
        yield paragraph("No range differs from the level by more than chance explains among so many.")
    shown, all_values = len(output.values.mean), output.values.of
    some = f" An even choice of {shown:,} of {all_values:,} values." if shown < all_values else ""
    said = f"Predicted deviation, prediction and inputs, the largest difference first; ± is one standard error.{some}"
    yield f"<details><summary>All ranges</summary>{table([head, *lines], said)}</details>"


def _strange_rows(judgement: Judgement, c: Calibration) -> str:
    """Write how many rows are unlike the validation rows, and what their intervals hold."""
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


def made_of(c: Calibration) -> str:
    """Write the shares of the terms or sites, and where dropout goes."""
    html = [heading("What the variance is made of")]
    if c.terms is not None:
        html.append(table(c.terms.table(), "Averages over the validation rows. Floor: the same for all rows."))
    elif c.shares:
        shares = sorted(c.shares.items(), key=lambda item: -item[1])
        lines = [[name, percent(share)] for name, share in shares]
        html.append(table([["site", "share of the variance"], *lines], "Averages over the validation rows."))
    return "".join([*html, table(site_table(c.sites), "Dropout goes on the input of these layers.")])


def fitting(c: Calibration) -> str:
    """Write the section about the validation rows."""
    rows = f"{c.rows:,} validation rows"
    if c.terms is None:
        said = f"{rows}; the fit has seen them, and uses the rate with a star. {_RELAXED}"
        name, lines = "Every rate", rate_table(c)
    else:
        said = f"{rows}, each left out of the fit that it was scored with. 0.1 nats: 10 % more likely per row."
        name, lines = "Candidates", candidate_table(c.terms)
    return heading("How it was fitted") + paragraph(_summary(c)) + heading(name, 3) + table(lines, said)


def _summary(c: Calibration) -> str:
    """Say how the variance was fitted, in a few sentences."""
    if c.terms is not None:
        guard = c.terms.guard
        grows = " The variance grows for rows unlike these." if guard is not None and guard.grows else ""
        usual = f"{c.terms.reference_rows:,} reference" if c.terms.reference_rows else "the validation"
        return f"The candidate in use is: {c.terms.choice}. What is usual was learned from {usual} rows.{grows}"
    method = {
        "sample": f"{c.draws} thinned networks",
        "linear": "first order, without draws",
        "propagate": "mean and variance carried through its layers",
    }[c.method]
    floor = f" plus {number(c.floors)}" if any(c.floors) else ""
    mean = "the mean over draws" if c.mean == "draws" else "the model's own output"
    return (
        f"The variance is that of dropout ({method}), at the rate {number(c.rate)}, times "
        f"{number(c.scales)}{floor}, fitted to {c.rows:,} validation rows (relaxed: times "
        f"{number(c.row.relaxed_scale)}). The prediction is {mean}."
    )

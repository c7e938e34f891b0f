"""What a page says of the validation rows: every rate, the way between the scales, the terms, the sites."""

from __future__ import annotations

from collections.abc import Sequence

from latedrop.calibration.record import Calibration
from latedrop.report.html import Figure, figures, heading, paragraph, table
from latedrop.report.svg import Axis, Plot
from latedrop.report.tables import candidate_table, constant_area, constant_nll, number, rate_table

__all__ = ["fitting", "summary"]

_LOOKS = {"raw": "raw", "scaled": "used", "relaxed": "relaxed", "ideal": "ideal", "constant": "constant"}


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
    kept = "The fitted rate is" if c.method == "linear" else f"The rate of least {c.criterion} NLL is"
    floor = f" plus {number(c.floors)}" if any(c.floors) else ""
    mean = "the mean over draws" if c.mean == "draws" else "the model's own output"
    return (
        f"{done} on {c.rows:,} validation rows. {kept} {number(c.rate)}; the predicted mean is {mean}, the predicted "
        f"variance is the raw one times {number(c.scales)}{floor} (relaxed: times {number(c.row.relaxed_scale)})."
    )


def fitting(c: Calibration, unit: str) -> str:
    """The section about the validation rows."""
    rows = f"{c.rows:,} validation rows"
    parts = [heading("How it was fitted"), paragraph(summary(c))]
    parts.append(figures([_curves(c), _tradeoff(c)]))
    if c.terms is None:
        parts += [heading("Every rate", 3), table(rate_table(c, unit), f"{rows}; the fit has seen them.")]
    else:
        said = f"{rows}, each left out of the fit that it was scored with."
        parts += [heading("Candidates", 3), table(candidate_table(c.terms), said)]
    return "".join(parts)


def _listed(names: Sequence[str]) -> str:
    return " and ".join([*([", ".join(names[:-1])] if len(names) > 1 else []), *names[-1:]]) or "no terms"


def _curves(c: Calibration) -> Figure:
    ticks = tuple((k / 4, f"{25 * k} %") for k in range(5))
    plot = Plot(Axis(0, 1, "level of the interval", ticks=ticks), Axis(0, 1, "share of rows inside", ticks=ticks))
    plot.line([0, 1], [0, 1], "ideal")
    kinds = {"raw": "unscaled", "scaled": "scaled", "relaxed": "relaxed", "constant": "constant"}
    if c.terms is not None:
        del kinds["raw"]
    named = {"scaled": "terms"} if c.terms is not None else {}
    found = {name: kind for name, kind in kinds.items() if kind in c.curves}
    for name, kind in found.items():
        plot.line(c.curves["levels"], c.curves[kind], _LOOKS[name], named.get(name, name))
    said = "Validation rows, which the fit has seen: test rows tell more."
    return Figure(
        "Calibration curves of validation rows",
        said,
        plot.svg(f"Share of rows inside against level. {said}"),
        {_LOOKS[name]: named.get(name, name) for name in found},
    )


def _tradeoff(c: Calibration) -> Figure:
    points = [(point.nll, point.ma) for point in c.path]
    other = constant_nll(c), constant_area(c)
    first, last = c.path[0], c.path[-1]
    near = [nll for nll, _ in points]
    room = max(max(near) - min(near), 0.02)
    shown = other[0] is not None and other[1] is not None and other[0] <= max(near) + 4 * room
    xs = [*near, *([other[0]] if shown and other[0] is not None else [])]
    ys = [0.0, *(ma for _, ma in points), *([other[1]] if shown and other[1] is not None else [])]
    plot = Plot(Axis.around(xs, "NLL, lower is better"), Axis.around(ys, "miscalibration area", zero=True))
    plot.line(near, [ma for _, ma in points], "used", "from the scale of least NLL to the relaxed one")
    for index, point in enumerate(c.path):
        words = f"scale {number(point.scale)}: NLL {point.nll:.3f}, area {point.ma:.3f}"
        plot.dot(point.nll, point.ma, "used", words, 4 if index in (0, len(c.path) - 1) else 2)
    note = ""
    if shown and other[0] is not None and other[1] is not None:
        plot.dot(other[0], other[1], "constant", f"constant: NLL {other[0]:.3f}, area {other[1]:.3f}", 5)
    elif other[0] is not None:
        note = f" The constant lies beyond the figure: NLL {other[0]:.3f}."
    said = (
        f"NLL {first.nll:.3f} and area {first.ma:.3f} at the scale of least NLL, {last.nll:.3f} and {last.ma:.3f} at "
        f"the relaxed one; uq.scaled(number) takes any in between.{note}"
    )
    legend = {"used": "between the scales", **({"constant": "constant"} if shown else {})}
    return Figure("Likelihood against calibration", said, plot.svg(said), legend)

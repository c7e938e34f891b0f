"""Everything about a calibration in one HTML file.

`write_report` puts the evaluations of test rows, the search over rates, the trade-off between NLL and
miscalibration area, and pictures of the test rows on a page that needs nothing beside itself: no script, no
network, no other file. matplotlib draws the figures (`pip install "latedrop[plots]"`).
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from latedrop import metrics, plots
from latedrop.calibration.evaluation import Evaluation, compare, inside, unscaled
from latedrop.calibration.predictor import Prediction
from latedrop.calibration.record import Calibration
from latedrop.errors import ArgumentError
from latedrop.files import write_aside

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "Picture",
    "overview",
    "png",
    "table",
    "write_report",
]

_BARS, _POINTS = 40, 2000
_RAW, _SCALED = "#0072B2", "#D55E00"
_KINDS = {"raw": "unscaled", "scaled": "scaled", "relaxed": "relaxed"}
_NOTES = {
    "raw": "the variance under dropout as it is, at the chosen rate.",
    "scaled": "the same, times the scale of least NLL on the validation rows.",
    "relaxed": "the same, times the scale that balances the calibration curve of the validation rows.",
    "isotonic": "intervals bent to the observed frequencies of the validation rows.",
    "conformal": "intervals from the ranked errors of rows that served for nothing else.",
}


@dataclass(frozen=True)
class Picture:
    """A figure of the report: heading, what to see in it, the same for those who cannot see it, and the PNG."""

    title: str
    caption: str
    alt: str
    png: bytes


def table(evaluations: Sequence[Evaluation], unit: str = "") -> list[list[str]]:
    """The headline table as text, header first; metrics to three decimals, shares to a tenth of a percent."""
    levels = {row.level for row in evaluations}
    level = f"{100 * levels.pop():.4g} %" if len(levels) == 1 else "its level"
    head = ["", "rate", "scale", "RMSE", "NLL", "MA", f"coverage at {level}", f"width at {level}"]
    head = [f"{name} [{unit}]" if unit and name.startswith(("RMSE", "width")) else name for name in head]
    return [head] + [
        [
            row.label,
            "per site" if isinstance(row.rate, Mapping) else _number(row.rate),
            _number(row.scale),
            f"{row.rmse:.3f}",
            "-" if row.nll is None else f"{row.nll:.3f}",
            f"{row.ma:.3f}",
            f"{100 * row.coverage:.1f} %",
            f"{row.width:.2f}",
        ]
        for row in evaluations
    ]


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
        tests = list(_test_pictures(prediction, target, evaluations, unit, level))
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(_summary(calibration))}</p>",
        f"<p>{escape(about)}</p>" if about else "",
        _headline(evaluations, unit, {**_NOTES, **(notes or {})}) if evaluations else "",
        _figures("", tests),
        _figures("", pictures),
        _figures("On validation rows", list(_validation_pictures(calibration, unit))),
        _rate_table(calibration, unit),
        _site_table(calibration),
        _reproduction(calibration, reproduce or {}),
    ]
    page = _PAGE.format(title=escape(title), style=_STYLE, body="\n".join(filter(None, body)))
    write_aside(path, page.encode())


def overview(
    prediction: Prediction, target: Tensor, evaluations: Sequence[Evaluation], *, unit: str = "", level: float = 0.9
) -> Figure:
    """Two panels: the calibration curves, and some test rows with their raw and their calibrated intervals."""
    figure = plots.new_figure(11, 4.5)
    curves, bars = figure.subplots(1, 2, width_ratios=[1.2, 1])
    _draw_curves(curves, evaluations)
    _draw_bars(bars, prediction, metrics.align_target(prediction.mean, target), unit, level)
    return figure


def png(figure: Figure) -> bytes:
    """The figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def _test_pictures(
    prediction: Prediction, target: Tensor, evaluations: Sequence[Evaluation], unit: str, level: float
) -> Iterator[Picture]:
    percent = f"{100 * level:.4g} %"
    mean, low, high, std, truth = (
        _flat(value) for value in (prediction.mean, *prediction.interval(level), prediction.std, target)
    )
    coverage = inside(*prediction.interval(level), target)
    covered = f"{100 * coverage:.1f} % of the targets lie in their {percent} interval"
    areas = "; ".join(f"{row.label} {row.ma:.3f}" for row in evaluations)
    yield _picture(
        "Calibration curves",
        "Of all intervals at a level, how many hold their target; a calibrated measure lies on the straight line.",
        f"Observed frequency against interval level. Areas between curve and bisector: {areas}.",
        lambda ax: _draw_curves(ax, evaluations),
    )
    yield _picture(
        "Raw and calibrated intervals",
        f"{percent} intervals of {min(len(mean), _BARS)} test rows, evenly spaced among all by their prediction.",
        f"Raw and calibrated {percent} intervals of some test rows with their targets.",
        lambda ax: _draw_bars(ax, prediction, target, unit, level),
    )

    def all_rows(ax: Axes) -> None:
        some = np.argsort(mean, kind="stable")[_spread(len(mean), _POINTS)]
        bands = {level: (low[some], high[some])}
        names = {"xlabel": "test rows, in order of their prediction", "ylabel": _with_unit("target", unit)}
        plots.intervals(np.arange(len(some)), mean[some], bands, ax=ax, target=truth[some], **names)

    yield _picture(
        "All test rows",
        f"{covered}. The band is wide where dropout moves the prediction most.",
        f"Predictions in rising order with their intervals and targets. {covered}.",
        all_rows,
    )
    error = np.abs(truth - mean)
    below = [f"{(error <= k * std).mean():.0%}" for k in (1, 2)]
    said = (
        f"{below[0]} of the errors are below one predicted standard deviation and {below[1]} below two (of a Gaussian: "
        f"68% and 95%). Their rank correlation is {_rank_correlation(error, std):.2f}"
    )
    some = _spread(len(std), _POINTS)
    yield _picture(
        "Are the uncertain rows the wrong ones?",
        f"{said}: at 0 the measure could not tell which rows to trust.",
        f"Size of each error against its predicted standard deviation. {said}.",
        lambda ax: plots.error_against_std(std[some], error[some], ax, unit=unit or None),
    )


def _validation_pictures(c: Calibration, unit: str) -> Iterator[Picture]:
    if len(c.table) > 1:
        yield from _rate_pictures(c, unit)
    first, last = c.path[0], c.path[-1]
    ends = [f"NLL {point.nll:.3f} and area {point.ma:.3f}" for point in (first, last)]
    said = f"{ends[0]} at the scale of least NLL, {ends[1]} at the relaxed one."
    nll, ma = [point.nll for point in c.path], [point.ma for point in c.path]
    scale = [point.scale[0] for point in c.path] if len(first.scale) == 1 else None
    yield _picture(
        "Likelihood against calibration",
        said + (" uq.scaled(number) takes any scale in between; nothing is run again." if scale else ""),
        f"Path from the optimal to the relaxed scale in the plane of NLL and miscalibration area. {said}",
        lambda ax: plots.tradeoff(nll, ma, ax, scale=scale),
    )
    if c.shares is not None:
        names, shares = list(c.shares), list(c.shares.values())
        said = ", ".join(f"{name} {100 * share:.1f} %" for name, share in c.shares.items())
        yield _picture(
            "Where the variance comes from",
            "Share of each site, on average over the validation rows.",
            f"Share of the variance by site: {said}.",
            lambda ax: plots.site_shares(names, shares, ax),
        )


def _rate_pictures(c: Calibration, unit: str) -> Iterator[Picture]:
    numbers = [row.rate for row in c.table if isinstance(row.rate, float)]
    plain = len(numbers) == len(c.table)
    rates = numbers if plain else [float(k) for k in range(1, len(c.table) + 1)]
    chosen = rates[[row.rate for row in c.table].index(c.rate)]

    def by_rate(ax: Axes, lines: Mapping[str, Sequence[float]], ylabel: str) -> None:
        xlabel = "dropout rate" if plain else "line of the table of rates"
        plots.metric_by_rate(rates, lines, ax, ylabel=ylabel, xlabel=xlabel, log=plain)
        ax.axvline(chosen, color="0.6", linewidth=1, linestyle=":", zorder=0)

    def column(name: str) -> list[float]:
        return [getattr(row, name) for row in c.table]

    at = f"Dotted line: the chosen rate, {_number(c.rate)}."
    rmse = column("rmse")
    whose = "mean over draws" if c.mean == "draws" else "model's own output"
    yield _picture(
        "Error by rate",
        f"RMSE of the {whose}. {at}",
        f"RMSE against dropout rate, from {min(rmse):.4g} to {max(rmse):.4g}.",
        lambda ax: by_rate(ax, {whose: rmse}, _with_unit("RMSE", unit)),
    )
    raw, scaled, ideal = (column(f"nll_{kind}") for kind in ("unscaled", "scaled", "ideal"))
    said = f"Raw, it goes up to {max(raw):.4g}; scaled, it stays between {min(scaled):.4g} and {max(scaled):.4g}."

    def likelihood(ax: Axes) -> None:
        low, high = min(*scaled, *ideal), max(*scaled, *ideal)
        top = high + max(high - low, 0.5)
        clipped = max(raw) > top
        # A raw line that runs away would press the others flat: it leaves through the top, and says how far it goes.
        name = f"raw (up to {max(raw):.3g})" if clipped else "raw"
        by_rate(ax, {name: raw, "scaled": scaled, "ideal": ideal}, "NLL")
        if clipped:
            ax.set_ylim(top=top)

    yield _picture(
        "Likelihood by rate",
        f"{said} No variance gets below the ideal line. {at}",
        f"NLL against dropout rate. {said}",
        likelihood,
    )
    areas = {name: column(f"ma_{kind}") for name, kind in _KINDS.items()}
    ranges = "; ".join(f"{name} from {min(values):.3f} to {max(values):.3f}" for name, values in areas.items())
    yield _picture(
        "Calibration by rate",
        f"Area between calibration curve and bisector, 0 is calibrated: {ranges}.",
        f"Miscalibration area against dropout rate: {ranges}.",
        lambda ax: by_rate(ax, areas, "miscalibration area"),
    )


def _picture(title: str, caption: str, alt: str, draw: Callable[[Axes], object]) -> Picture:
    figure = plots.new_figure(5.2, 4)
    draw(figure.subplots())
    return Picture(title, caption, alt, png(figure))


def _draw_curves(ax: Axes, evaluations: Sequence[Evaluation]) -> None:
    # Other measures share the page, but not this figure: it is about dropout variances and their scale.
    chosen = [row for row in evaluations if row.nll is not None and row.rate is not None] or evaluations
    plots.calibration_curves({row.label: (row.levels, row.observed) for row in chosen}, ax)


def _draw_bars(ax: Axes, prediction: Prediction, target: Tensor, unit: str, level: float) -> None:
    """Raw intervals over the calibrated ones, for a few test rows evenly spaced by prediction."""
    raw = replace(prediction, calibration=unscaled(prediction.calibration))
    some = np.argsort(_flat(prediction.mean), kind="stable")[_spread(prediction.mean.numel(), _BARS)]
    ends = (*raw.interval(level), *prediction.interval(level))
    raw_low, raw_high, low, high, truth = (_flat(value)[some] for value in (*ends, target))
    x = np.arange(len(some))
    missed = (truth < low) | (truth > high)
    percent = f"{100 * level:.4g} %"
    name = _in_use(prediction.calibration)
    ax.vlines(x, low, high, color=_SCALED, linewidth=5, alpha=0.4, label=f"{name}, {percent}")
    ax.vlines(x, raw_low, raw_high, color=_RAW, linewidth=2.5, label=f"raw, {percent}")
    ax.scatter(x[~missed], truth[~missed], s=12, color="black", zorder=3, label="target")
    ax.scatter(x[missed], truth[missed], s=32, color="black", marker="x", zorder=3, label=f"target, missed by {name}")
    ax.set(xlabel="test rows, in order of their prediction", ylabel=_with_unit("target", unit), xticks=[])
    bottom, top = ax.get_ylim()
    ax.set_ylim(top=top + 0.16 * (top - bottom))
    ax.legend(loc="upper left", fontsize="small", ncols=2)


def _in_use(calibration: Calibration) -> str:
    if calibration.intervals is not None:
        return calibration.intervals.kind
    return {"optimal": "scaled", "relaxed": "relaxed"}.get(str(calibration.choice), f"scale {calibration.choice}")


def _summary(c: Calibration) -> str:
    sites = f"{len(c.sites)} site{'s' if len(c.sites) != 1 else ''} of a trained network"
    rates = f"each of {len(c.table)} rates" if len(c.table) > 1 else "one rate"
    done = {
        "sample": f"Dropout was injected at {sites}, and {c.draws} thinned networks were run at {rates}",
        "linear": f"The variance that dropout at {sites} would give was worked out to first order, without draws,",
        "propagate": f"Mean and variance under dropout at {sites} were carried through its layers at {rates}",
    }[c.method]
    kept = "The fitted rate is" if c.method == "linear" else f"The rate of least {c.criterion} NLL is"
    floor = f" plus {_number(c.floors)}" if any(c.floors) else ""
    return (
        f"{done} on {c.rows} validation rows. {kept} {_number(c.rate)}; the predicted variance is the raw one times "
        f"{_number(c.scales)}{floor} (relaxed: times {_number(c.relaxed_scales)})."
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


def _rate_table(c: Calibration, unit: str) -> str:
    metric_names = [f"nll_{kind}" for kind in (*_KINDS.values(), "ideal")] + [f"ma_{kind}" for kind in _KINDS.values()]
    heads = [f"NLL {name}" for name in (*_KINDS, "ideal")] + [f"MA {name}" for name in _KINDS]
    floor = any(any(row.floor) for row in c.table)
    lines = [["rate", _with_unit("RMSE", unit), *heads, "scale", "relaxed scale", *["floor"] * floor]]
    for row in c.table:
        chosen = " (chosen)" if row.rate == c.rate and len(c.table) > 1 else ""
        values = [f"{getattr(row, name):.3f}" for name in metric_names]
        fitted = [_number(row.scale), _number(row.relaxed_scale), *[_number(row.floor)] * floor]
        lines.append([_number(row.rate) + chosen, f"{row.rmse:.4g}", *values, *fitted])
    return "<h2>Every rate</h2>" + _table(lines, f"{c.rows} validation rows.")


def _site_table(c: Calibration) -> str:
    cells = [[s.name, s.layer, s.kind, " x ".join(map(str, s.units)), str(s.calls)] for s in c.sites]
    head = ["site", "layer", "masks", "units", "calls"]
    return "<h2>Where dropout goes</h2>" + _table([head, *cells], "Dropout goes on the input of these layers.")


def _reproduction(c: Calibration, extra: Mapping[str, str]) -> str:
    from latedrop import __version__

    facts = {**extra, "latedrop": __version__, **c.versions, "method": c.method}
    if c.method == "sample":
        facts |= {"draws": str(c.draws), "seed of the masks": str(c.seed)}
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


def _number(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_number(item)}" for key, item in value.items())
    if isinstance(value, tuple):
        return ", ".join(_number(item) for item in value)
    return f"{value:.4g}"


def _with_unit(name: str, unit: str) -> str:
    return f"{name} [{unit}]" if unit else name


def _flat(values: Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
    return values.detach().cpu().double().flatten().numpy()


def _spread(count: int, most: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    """At most `most` indices, evenly spaced from the first to the last of `count`."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.intp))


def _rank_correlation(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    """Spearman's, 0 where one of them is constant; ties count as equal steps."""
    ranks = [np.unique(values, return_inverse=True)[1] for values in (a, b)]
    centred = [rank - rank.mean() for rank in ranks]
    norm = float(np.prod([np.linalg.norm(rank) for rank in centred]))
    return float(centred[0] @ centred[1]) / norm if norm else 0.0


_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 60rem; margin: 0 auto;
  padding: 1rem; }
h1 { font-size: 1.6rem; line-height: 1.2; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
h3 { font-size: 1rem; margin: 0 0 .3rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1.5rem;
  margin-top: 1.5rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
caption { text-align: left; color: #555; padding-bottom: .3rem; }
th, td { padding: .25rem .5rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { font-weight: 600; }
th[scope=col] { white-space: normal; vertical-align: bottom; }
figure { margin: 0; } img { width: 100%; height: auto; } figcaption { color: #333; font-size: .95rem; }
dt { font-weight: 600; float: left; clear: left; margin-right: .6rem; } dd { margin: 0 0 .2rem; }
@media (max-width: 32rem) { table { font-size: .75rem; } th, td { padding: .2rem .3rem; } }
@media print { body { max-width: none; font-size: 11px; padding: 0; } table { font-size: 9px; }
  .figures { grid-template-columns: 1fr 1fr; } figure, .wide { break-inside: avoid; }
  h2 { break-after: avoid; } .wide { overflow: visible; } }
"""
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""

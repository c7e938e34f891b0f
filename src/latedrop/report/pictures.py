"""The figures of a report, each with its caption and the same in words for those who cannot see it."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from latedrop import metrics, plots
from latedrop.calibration.evaluation import Evaluation, constant_of, inside, unscaled
from latedrop.calibration.prediction import Prediction
from latedrop.calibration.record import Calibration
from latedrop.report.tables import KINDS, number, with_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Picture", "overview", "pictures_of_tests", "pictures_of_validation", "png"]

_BARS, _POINTS = 40, 2000
_RAW, _SCALED = "#0072B2", "#D55E00"


@dataclass(frozen=True)
class Picture:
    """A figure of the report: heading, what to see in it, the same for those who cannot see it, and the PNG."""

    title: str
    caption: str
    alt: str
    png: bytes


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


def pictures_of_tests(
    prediction: Prediction, target: Tensor, evaluations: Sequence[Evaluation], unit: str, level: float
) -> Iterator[Picture]:
    """What intervals and deviations are worth on test rows."""
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
        names = {"xlabel": "test rows, in order of their prediction", "ylabel": with_unit("target", unit)}
        plots.intervals(np.arange(len(some)), mean[some], bands, ax=ax, target=truth[some], **names)

    yield _picture(
        "All test rows",
        f"{covered}. The band is wide where dropout moves the prediction most.",
        f"Predictions in rising order with their intervals and targets. {covered}.",
        all_rows,
    )
    error = np.abs(truth - mean)
    correlation = float(metrics.rank_correlation(mean, std**2, truth))
    below = [f"{(error <= k * std).mean():.0%}" for k in (1, 2)]
    said = (
        f"{below[0]} of the errors are below one predicted standard deviation and {below[1]} below two (of a Gaussian: "
        f"68% and 95%). Their rank correlation is {correlation:.2f}"
    )
    some = _spread(len(std), _POINTS)
    yield _picture(
        "Are the uncertain rows the wrong ones?",
        f"{said}: at 0 the measure could not tell which rows to trust.",
        f"Size of each error against its predicted standard deviation. {said}.",
        lambda ax: plots.error_against_std(std[some], error[some], ax, unit=unit or None),
    )


def pictures_of_validation(c: Calibration, unit: str) -> Iterator[Picture]:
    """The search over rates, the path between the scales, and the shares of the sites."""
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
    shared = c.shares if c.terms is None else c.terms.shares
    if shared is not None:
        names, shares = list(shared), list(shared.values())
        said = ", ".join(f"{name} {100 * share:.1f} %" for name, share in shared.items())
        whose = "site" if c.terms is None else "term"
        yield _picture(
            "Where the variance comes from",
            f"Share of each {whose}, on average over the validation rows.",
            f"Share of the variance by {whose}: {said}.",
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

    at = f"Dotted line: the chosen rate, {number(c.rate)}."
    rmse = column("rmse")
    whose = "mean over draws" if c.mean == "draws" else "model's own output"
    yield _picture(
        "Error by rate",
        f"RMSE of the {whose}. {at}",
        f"RMSE against dropout rate, from {min(rmse):.4g} to {max(rmse):.4g}.",
        lambda ax: by_rate(ax, {whose: rmse}, with_unit("RMSE", unit)),
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
    areas = {name: column(f"ma_{kind}") for name, kind in KINDS.items()}
    ranges = "; ".join(f"{name} from {min(values):.3f} to {max(values):.3f}" for name, values in areas.items())
    yield _picture(
        "Calibration by rate",
        f"Area between calibration curve and bisector, 0 is calibrated: {ranges}.",
        f"Miscalibration area against dropout rate: {ranges}.",
        lambda ax: by_rate(ax, areas, "miscalibration area"),
    )


def _picture(title: str, caption: str, alt: str, draw: Callable[[Axes], object]) -> Picture:
    return Picture(title, caption, alt, png(drawn(draw)))


def drawn(draw: Callable[[Axes], object]) -> Figure:
    """A figure with one panel, as wide as what stands beside it asks for: a square with a legend is not cut."""
    figure = plots.new_figure(5.2, 4)
    ax = figure.subplots()
    draw(ax)
    figure.draw_without_rendering()
    needed = figure.get_tightbbox().width + 0.1
    if needed > figure.get_figwidth():
        figure.set_figwidth(needed)
    return figure


def _draw_curves(ax: Axes, evaluations: Sequence[Evaluation]) -> None:
    # Other measures share the page, but not this figure: it is about this variance, its scale, and the constant.
    own = ("terms", "relaxed", "constant")
    chosen = [row for row in evaluations if row.nll is not None and (row.rate is not None or row.label in own)]
    chosen = chosen or list(evaluations)
    plots.calibration_curves({row.label: (row.levels, row.observed) for row in chosen}, ax)


def _draw_bars(ax: Axes, prediction: Prediction, target: Tensor, unit: str, level: float) -> None:
    """Raw intervals over the calibrated ones, for a few test rows evenly spaced by prediction."""
    raw, first = replace(prediction, calibration=unscaled(prediction.calibration)), "raw"
    if prediction.calibration.terms is not None:
        raw, first = _with_constant(prediction), "constant"
    some = np.argsort(_flat(prediction.mean), kind="stable")[_spread(prediction.mean.numel(), _BARS)]
    ends = (*raw.interval(level), *prediction.interval(level))
    raw_low, raw_high, low, high, truth = (_flat(value)[some] for value in (*ends, target))
    x = np.arange(len(some))
    missed = (truth < low) | (truth > high)
    percent = f"{100 * level:.4g} %"
    name = _in_use(prediction.calibration)
    ax.vlines(x, low, high, color=_SCALED, linewidth=5, alpha=0.4, label=f"{name}, {percent}")
    ax.vlines(x, raw_low, raw_high, color=_RAW, linewidth=2.5, label=f"{first}, {percent}")
    ax.scatter(x[~missed], truth[~missed], s=12, color="black", zorder=3, label="target")
    ax.scatter(x[missed], truth[missed], s=32, color="black", marker="x", zorder=3, label=f"target, missed by {name}")
    ax.set(xlabel="test rows, in order of their prediction", ylabel=with_unit("target", unit), xticks=[])
    bottom, top = ax.get_ylim()
    ax.set_ylim(top=top + 0.16 * (top - bottom))
    ax.legend(loc="upper left", fontsize="small", ncols=2)


def _with_constant(prediction: Prediction) -> Prediction:
    """The same means with the constant variance."""
    return replace(prediction, raw_variance=constant_of(prediction), calibration=unscaled(prediction.calibration))


def _in_use(calibration: Calibration) -> str:
    if calibration.intervals is not None:
        return calibration.intervals.kind
    optimal = "scaled" if calibration.terms is None else "terms"
    return {"optimal": optimal, "relaxed": "relaxed"}.get(str(calibration.choice), f"scale {calibration.choice}")


def _flat(values: Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
    return values.detach().cpu().double().flatten().numpy()


def _spread(count: int, most: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    """At most `most` indices, evenly spaced from the first to the last of `count`."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.intp))

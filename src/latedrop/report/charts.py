"""The figures of a page: what was judged on test rows, drawn beside one constant variance."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from latedrop.evaluation.evaluation import Evaluation
from latedrop.evaluation.judgement import JudgedOutput
from latedrop.metrics.groups import Floats, Group
from latedrop.metrics.levels import central_quantile
from latedrop.numerals import percent, plain
from latedrop.report.html import Figure
from latedrop.report.svg import SHARES, SIZE, SMALL, Axis, Plot, robust_limit, spread
from latedrop.report.tables import with_unit

__all__ = ["by_input", "by_level", "of_rows", "series_of", "share_bars"]

_BARS, _DOTS = 40, 500
_USED, _CONSTANT = "used", "constant"


def series_of(labels: Sequence[str], used: str) -> dict[str, str]:
    """The look of each label: the one in use, the constant, and others."""
    others = iter(["other0", "other1", "other2", "other3"] * len(labels))
    looks = {"constant": _CONSTANT, "relaxed": "relaxed", "raw": "raw", used: _USED}
    return {label: looks.get(label) or next(others) for label in labels}


def by_level(output: JudgedOutput, rows: Sequence[Evaluation], which: str = "") -> Iterator[Figure]:
    """Draw what the intervals of some evaluations hold, and how wide they are, at every level."""
    looks = series_of([row.label for row in output.evaluations], output.used.label)
    legend = {looks[row.label]: row.label for row in rows}
    plot = Plot(Axis(0, 1, "level of the interval", ticks=SHARES), Axis(0, 1, "share of rows inside", ticks=SHARES))
    plot.line([0, 1], [0, 1], "ideal", "exact: as many inside as the level says")
    for row in reversed(rows):
        plot.line(row.levels, row.observed, looks[row.label], f"{row.label}: area {row.ma:.3f} beside the diagonal")
    areas = ", ".join(f"{row.label} {row.ma:.3f}" for row in rows)
    said = "How many rows the intervals hold at each level. On the diagonal they hold what they say; below it they are "
    words = f"Share of rows inside against level of the interval. Area between curve and diagonal: {areas}."
    title = f"What the intervals hold{which}"
    yield Figure(title, f"{said}too narrow, above too wide.", plot.svg(words, moving=True), legend)
    yield _widths(output, [row for row in rows if row.widths], looks, which)


def _widths(output: JudgedOutput, rows: Sequence[Evaluation], looks: dict[str, str], which: str) -> Figure:
    own = max(output.used.widths, default=1.0)
    known = [width for row in rows for width in row.widths]
    top = next((row.widths[-1] for row in rows if row.label == "constant"), own)
    high = min(max(known, default=1.0), 2 * max(own, top))
    y = Axis(0, 1.05 * high, with_unit("mean width", output.unit))
    if min(own, top) > 0 and max(own, top) > 10 * min(own, top):  # side by side on a logarithmic axis alone
        y = Axis.around([min(own, top) / 10, high], y.label, log=True)
    plot = Plot(Axis(0, 1, "level of the interval", ticks=SHARES), y)
    for row in reversed(rows):
        plot.line(
            row.levels, row.widths, looks[row.label], f"{row.label}: {plain(row.width)} at {percent(row.level, 0)}"
        )
    cut = [row.label for row in rows if max(row.widths) > 1.05 * high]
    note = f" {' and '.join(cut)} would go on beyond the top." if cut else ""
    widths = ", ".join(f"{row.label} {plain(row.width)}" for row in rows)
    return Figure(
        f"How wide they are{which}",
        f"Narrower is better among those that hold what they say.{note}",
        plot.svg(f"Mean width against level. At {percent(output.used.level, 0)}: {widths}.", moving=True),
        {looks[row.label]: row.label for row in rows},
    )


def of_rows(output: JudgedOutput) -> Iterator[Figure]:
    """Rows with their intervals, errors beside deviations, what the ranking is worth, and coverage by deviation."""
    yield _intervals(output)
    yield _errors(output)
    yield _kept(output)
    if output.deciles:
        yield _deciles(output)


def _intervals(output: JudgedOutput) -> Figure:
    values, level = output.values, output.used.level
    some = np.argsort(values.mean, kind="stable")[spread(len(values.mean), _BARS)]
    constant = _constant(output)
    reach = 0.0 if constant is None else central_quantile(level) * constant
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
        if constant is not None:
            plot.segment((k, mean - reach), (k, mean + reach), "bar constant", words)
        (plot.dot if inside else plot.cross)(k, target, "target", words)
    shown = np.concatenate([ends, values.target[some]])
    beyond = int(((shown < low) | (shown > high)).sum())
    cut = f" {beyond} ends and targets lie beyond the figure." if beyond else ""
    missed = int(((values.target < values.low) | (values.target > values.high))[some].sum())
    said = f"{percent(level, 0)} intervals with the true values; {missed} of these {len(some)} are missed.{cut}"
    legend = {"bar": f"{output.used.label}, {percent(level, 0)}"}
    legend |= {} if constant is None else {"bar constant": "constant"}
    legend |= {"dot target": "target", **({"cross": "missed target"} if missed else {})}
    return Figure("Intervals of some rows", said, plot.svg(said), legend)


def _errors(output: JudgedOutput) -> Figure:
    values, level = output.values, output.used.level
    error = np.abs(values.target - values.mean)
    some = spread(len(error), _DOTS)
    std, size = values.std[some], error[some]
    log = 1000 >= float(std.max()) / float(std.min()) > 10
    constant = _constant(output)
    wide = [float(std.min()), float(std.max()), *([] if constant is None else [constant])]
    cut_x = None if log else robust_limit([*std.tolist(), *wide[2:]])
    cut = robust_limit(size.tolist())
    x = Axis.around(wide if cut_x is None else [wide[0], cut_x], with_unit("predicted deviation", output.unit), log=log)
    y = Axis.around(
        [0.0, float(size.max()) if cut is None else cut], with_unit("size of the error", output.unit), zero=True
    )
    plot = Plot(x, y)
    z = central_quantile(level)
    across = np.geomspace(x.low, x.high, 40) if log else np.linspace(max(x.low, 0.0), x.high, 2)
    for a, e, i in zip(std.tolist(), size.tolist(), some.tolist(), strict=True):
        words = f"row {values.rows[i]}: error {plain(e)}, deviation {plain(a)}"
        plot.dot(a, e, "faint", words, 2.2)
    plot.line(across.tolist(), (z * across).tolist(), _USED, f"end of the {percent(level, 0)} interval")
    legend = {_USED: f"end of the {percent(level, 0)} interval"}
    if constant is not None:
        plot.upright(constant, _CONSTANT, f"constant: {plain(constant)} for every row")
        legend[_CONSTANT] = "deviation of the constant"
    ranking = output.used.correlation if output.verdict is None else output.verdict.correlation
    beyond = int((size > y.high).sum() + (std > x.high).sum())
    shown = f"{len(some)} of {values.of:,} values, evenly chosen. " if len(some) < values.of else ""
    note = f" {beyond} lie beyond the figure." if beyond else ""
    said = (
        f"{shown}Dots above the line are outside their interval.{note} Rank correlation {ranking or 0:.2f}: at 0 the "
    )
    said += "deviation does not tell which rows to trust."
    return Figure("Are the uncertain rows the wrong ones?", said, plot.svg(said), legend)


def _kept(output: JudgedOutput) -> Figure:
    all_rows, label = output.kept_rmse[0], with_unit("RMSE of these", output.unit)
    far = max(output.kept_rmse) > 10 * min(output.kept_rmse) > 0
    plot = Plot(
        Axis(
            1.0,
            0.0999,
            "share of rows kept, the most certain ones",
            ticks=tuple((k / 5, f"{20 * k} %") for k in range(1, 6)),
        ),
        Axis.around([*([] if far else [0.0]), *output.kept_rmse], label, zero=not far, log=far),
    )
    plot.line(output.kept, output.ideal_rmse, "ideal", "if the errors were known")
    plot.across(all_rows, _CONSTANT, f"constant: it cannot choose, {plain(all_rows)}")
    plot.line(output.kept, output.kept_rmse, _USED)
    for share, rmse in zip(output.kept, output.kept_rmse, strict=True):
        plot.dot(share, rmse, _USED, f"{percent(share, 0)} kept: RMSE {plain(rmse)}", 2)
    half = output.kept_rmse[int(np.argmin(np.abs(np.asarray(output.kept) - 0.5)))]
    change = 1 - half / all_rows if all_rows else 0.0
    rmse_name = "unweighted RMSE" if output.values.weighted else "RMSE"
    said = f"Without the less certain half of the rows the {rmse_name} is {plain(half)} instead of {plain(all_rows)} "
    said += f"({percent(abs(change), 0)} {'less' if change >= 0 else 'more'})."
    if len(set(output.kept_rmse)) == 1:
        said = "The deviation is the same for all rows: there is nothing to choose by."
    legend = {_USED: output.used.label, _CONSTANT: "constant", "ideal": "if the errors were known"}
    return Figure("What can be set aside", said, plot.svg(said), legend)


def _deciles(output: JudgedOutput) -> Figure:
    groups, level = output.deciles, output.used.level
    ticks = tuple((float(k), str(k)) for k in range(1, len(groups) + 1))
    plot = _coverage_plot(
        groups, level, Axis(0.5, len(groups) + 0.5, f"rows by predicted deviation, {len(groups)} parts", ticks=ticks)
    )
    _coverage_lines(plot, groups, list(range(1, len(groups) + 1)), output.unit)
    said = f"Share of rows inside their {percent(level, 0)} interval, from the most certain to the least certain rows. "
    parts = {way: [str(k) for k, group in enumerate(groups, 1) if group.off == way] for way in ("less", "more")}
    off = [f"{way} in part{'s' * (len(of) > 1)} {', '.join(of)}" for way, of in parts.items() if of]
    said += (
        f"They hold {' and '.join(off)}, beyond chance."
        if off
        else f"No part is off by more than chance explains among {len(groups)}."
    )
    return Figure("Coverage by predicted deviation", said, plot.svg(said), _legend(output, groups))


def by_input(output: JudgedOutput) -> Iterator[Figure]:
    """Coverage along the inputs that tell most."""
    for groups in output.inputs:
        name = groups[0].name
        ticks = tuple((float(k), plain((group.low + group.high) / 2, 3)) for k, group in enumerate(groups, 1))
        axis = Axis(0.5, len(groups) + 0.5, "middle of each part", ticks=ticks)
        plot = _coverage_plot(groups, output.used.level, axis, SMALL)
        _coverage_lines(plot, groups, list(range(1, len(groups) + 1)), "")
        off = [f"{way} from {plain(low)} to {plain(high)}" for way, low, high in _stretches(groups)]
        ends = [percent(end([group.coverage for group in groups]), 0) for end in (min, max)]
        said = (
            f"Holds {' and '.join(off)}."
            if off
            else f"{ends[0]} to {ends[1]}: no more than chance explains among so many parts."
        )
        yield Figure(name, said, plot.svg(f"Coverage along {name}. {said}"), _legend(output, groups))


def _stretches(groups: Sequence[Group]) -> list[tuple[str, float, float]]:
    """Where groups beside one another hold less, or more: from where to where."""
    stretches: list[tuple[str, float, float]] = []
    before = ""
    for group in groups:
        if group.off and group.off == before:
            stretches[-1] = group.off, stretches[-1][1], group.high
        elif group.off:
            stretches.append((group.off, group.low, group.high))
        before = group.off
    return stretches


def _coverage_plot(groups: Sequence[Group], level: float, x: Axis, size: tuple[float, float] = SIZE) -> Plot:
    known = [group.coverage for group in groups] + [group.constant for group in groups if group.constant is not None]
    bands = [level + sign * 2 * groups[0].coverage_error for sign in (-1, 1)]
    low = max(0.0, math.floor(10 * (min([*known, *bands]) - 0.02)) / 10)
    step = 0.1 if low >= 0.5 else 0.2 if low >= 0.2 else 0.25
    ticks = [1 - k * step for k in range(round((1 - low) / step) + 1) if 1 - k * step >= low - 1e-9]
    y = Axis(low, 1.02, "share inside", ticks=tuple((tick, percent(tick, 0)) for tick in sorted(ticks)))
    plot = Plot(x, y, size)
    plot.band(bands[0], min(bands[1], 1.02), "two standard errors to either side of the level")
    plot.across(level, "ideal", f"level {percent(level, 0)}")
    return plot


def _coverage_lines(plot: Plot, groups: Sequence[Group], xs: Sequence[int], unit: str) -> None:
    def words(group: Group, share: float) -> str:
        span = f"{plain(group.low)} to {plain(group.high)}{f' {unit}' if unit else ''}"
        return f"{span}: {percent(share)} of {group.rows:,} rows, ± {percent(group.coverage_error)}"

    if all(group.constant is not None for group in groups):
        known = [group.constant or 0.0 for group in groups]
        plot.line(xs, known, _CONSTANT)
        for x, group, share in zip(xs, groups, known, strict=True):
            plot.dot(x, share, _CONSTANT, f"constant, {words(group, share)}", 2.5)
    plot.line(xs, [group.coverage for group in groups], _USED)
    for x, group in zip(xs, groups, strict=True):
        plot.dot(x, group.coverage, _USED, words(group, group.coverage), 3.5)


def _legend(output: JudgedOutput, groups: Sequence[Group]) -> dict[str, str]:
    known = all(group.constant is not None for group in groups)
    return {_USED: output.used.label, **({_CONSTANT: "constant"} if known else {}), "ideal": "level"}


def share_bars(shares: dict[str, float], constant: float | None) -> Figure:
    """Draw what the variance is made of; the constant beside it, in the same unit."""
    bars: dict[str, tuple[float, str]] = {name: (share, "share") for name, share in shares.items()}
    if constant is not None:
        bars["constant, in all"] = (constant, "share constant")
    names = list(bars)
    names = names if len(names) <= 12 else [*names[:11], names[-1]]
    top = max(1.0, *(bars[name][0] for name in names))
    ticks = tuple((float(-k), _cut(name)) for k, name in enumerate(names))
    wide = tuple((k / 4, percent(k / 4, 0)) for k in range(0, math.floor(4 * top) + 1, max(1, round(top))))
    plot = Plot(Axis(0, 1.02 * top, "share of the mean variance", ticks=wide), Axis(0.6 - len(names), 0.6, ticks=ticks))
    for k, name in enumerate(names):
        value, look = bars[name]
        plot.segment((0.0, -k), (value, -k), look, f"{name}: {percent(value)}")
    said = ", ".join(f"{name} {percent(bars[name][0])}" for name in names)
    note = f" The {len(bars) - len(names)} smallest are left out." if len(bars) > len(names) else ""
    return Figure("Shares", f"Share of each part, on average.{note}", plot.svg(said), {})


def _cut(name: str) -> str:
    return name if len(name) <= 18 else f"{name[:8]}…{name[-9:]}"


def _limits(usual: Floats, ends: Floats) -> tuple[float, float]:
    """Return the ends of an axis: of targets and the constant, unless they are far off, and of intervals nearby."""
    middle = float(np.median(usual))
    far = robust_limit(np.abs(usual - middle).tolist())
    near = usual if far is None else usual[np.abs(usual - middle) <= far]
    low, high = float(near.min()), float(near.max())
    room = 0.5 * (high - low)
    return min(low, max(float(ends.min()), low - room)), max(high, min(float(ends.max()), high + room))


def _constant(output: JudgedOutput) -> float | None:
    """The standard deviation of the constant."""
    known = output.values.constant
    return None if known is None else float(known[0])

"""Pictures of what the metrics say: arrays in, a matplotlib `Axes` out.

Nothing is scored here: the calibration curve `pi(a)`, the metrics and the shares come in ready made, from
`metrics`, `scale` and `linear`. Every function draws on `ax`, or on a new figure if it is None, and returns
the `Axes` for the caller to change, save or show. Series differ in marker and line as well as in colour.

matplotlib is an extra (`pip install latedrop[plots]`), imported only when a new figure is needed.

References: Ledda et al., "Dropout Injection at Test Time for Post Hoc Uncertainty Quantification in Neural
Networks", for the calibration and trade-off plots. Okabe & Ito, "Color Universal Design" (2008), for the
colours.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from latedrop.errors import ArgumentError, DataError, LatedropError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "calibration_curves",
    "error_against_std",
    "intervals",
    "metric_by_rate",
    "new_figure",
    "site_shares",
    "tradeoff",
]

Array = Tensor | npt.ArrayLike
Floats = npt.NDArray[np.float64]

# Okabe and Ito's, without the yellow, which white paper swallows.
_COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
_SKY = np.array([0x56, 0xB4, 0xE9]) / 255
_MARKERS = ["o", "s", "^", "D", "v", "P", "X"]
_LINES = ["-", "--", "-.", ":"]
_GREY = "0.45"
# Of a trade-off path: which points, their marker, its size, what they are called.
_PATH: list[tuple[slice, str, int, str | None]] = [
    (slice(1, -1), "o", 16, None),
    (slice(0, 1), "o", 50, "scale"),
    (slice(-1, None), "s", 50, "relaxed scale"),
]


def calibration_curves(curves: Mapping[str, tuple[Array, Array]], ax: "Axes | None" = None) -> "Axes":
    """Observed frequency against interval level, with the bisector on which a calibrated measure lies.

    Args:
        curves: For each label the levels `(L,)` and the observed frequencies `(L,)`, as from
            `metrics.calibration_curve`.
        ax: Where to draw.

    Returns:
        The axes drawn on.

    Example:
        >>> ax = calibration_curves({"raw": ([0.1, 0.5, 0.9], [0.0, 0.2, 0.6])})
        >>> ax.get_xlabel()
        'interval level'
    """
    series = {
        label: _same_length({f"the levels of {label!r}": levels, "its frequencies": observed})
        for label, (levels, observed) in _not_empty(curves, "curve").items()
    }
    ax = _axes(ax)
    ax.plot([0, 1], [0, 1], color=_GREY, linewidth=1, label="calibrated", zorder=1)
    for index, (label, (levels, observed)) in enumerate(series.items()):
        ax.plot(levels, observed, label=label, markevery=max(1, len(levels) // 10), **_style(index))
    region: dict[str, Any] = {
        "color": _GREY,
        "style": "italic",
        "size": "small",
        "transform": ax.transAxes,
        "bbox": {"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1},
    }
    ax.text(0.03, 0.97, "underconfident", ha="left", va="top", **region)
    ax.text(0.97, 0.03, "overconfident", ha="right", va="bottom", **region)
    ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xlabel="interval level", ylabel="observed frequency")
    # The square leaves room beside it, and curves may run anywhere inside it.
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize="small", handlelength=1.8)
    return ax


def metric_by_rate(
    rates: Array,
    values: Mapping[str, Array],
    ax: "Axes | None" = None,
    *,
    ylabel: str,
    xlabel: str = "dropout rate",
    log: bool = False,
) -> "Axes":
    """A metric against the dropout rate, one line for each label.

    Args:
        rates: Dropout rates `(R,)`.
        values: For each label the metric `(R,)`, or `(R, S)` for S repeats: then the line is their mean and
            the band one standard deviation to either side.
        ax: Where to draw.
        ylabel: Name of the metric, and its unit if it has one.
        xlabel: Name of the rate.
        log: Logarithmic axis of rates.

    Returns:
        The axes drawn on.

    Example:
        >>> ax = metric_by_rate([0.01, 0.1, 0.5], {"scaled": [1.2, 1.1, 1.4]}, ylabel="NLL", log=True)
        >>> ax.get_xscale()
        'log'
    """
    at = _array(rates)
    series = {label: _array(value) for label, value in _not_empty(values, "line").items()}
    for label, value in series.items():
        if at.ndim != 1 or value.ndim not in (1, 2) or len(value) != len(at):
            raise DataError(
                f"expected {label!r} of shape ({at.size},) or ({at.size}, S), a row for each rate, "
                f"found {value.shape}; transpose it if the repeats come first"
            )
    ax = _axes(ax)
    order = np.argsort(at, kind="stable")
    for index, (label, value) in enumerate(series.items()):
        rows = value[order].reshape(len(at), -1)
        mean, std = rows.mean(axis=1), rows.std(axis=1)
        style = _style(index)
        ax.plot(at[order], mean, label=label, **style)
        if value.ndim == 2:
            _band(ax, at[order], mean - std, mean + std, color=style["color"], alpha=0.2)
    ax.set(xlabel=xlabel, ylabel=ylabel, xscale="log" if log else "linear")
    ax.legend()
    return ax


def tradeoff(
    nll: Array,
    ma: Array,
    ax: "Axes | None" = None,
    *,
    scale: Array | None = None,
    rmse: Array | None = None,
    xlabel: str = "NLL",
    ylabel: str = "miscalibration area",
) -> "Axes":
    """The path from the scale that is best for the NLL to the relaxed scale, in the plane of NLL and MA.

    Args:
        nll: NLL at each point of the path, `(P,)`; or `(R, P)` for R paths, one for each rate say.
        ma: Miscalibration area, shaped as `nll`.
        ax: Where to draw.
        scale: The scale at each point, shaped as `nll`; written beside the ends of a single path.
        rmse: RMSE at each point, shaped as `nll` or `(R, 1)`; shown by colour.
        xlabel: Name of the first metric.
        ylabel: Name of the second metric.

    Returns:
        The axes drawn on.

    Example:
        >>> ax = tradeoff([1.0, 1.1, 1.3], [0.3, 0.1, 0.02], scale=[2.0, 3.0, 4.5])
        >>> [text.get_text() for text in ax.texts]
        ['scale 2', 'relaxed scale 4.5']
    """
    x = np.atleast_2d(_array(nll))
    if x.ndim != 2 or not x.size:
        raise DataError(f"expected nll of shape (P,) or (R, P), found {x.shape}; pass the points of a path")
    y = _like("ma", ma, x)
    shade = None if rmse is None else _like("rmse", rmse, x)
    ends = None if scale is None else _like("scale", scale, x)[0]
    ax = _axes(ax)
    ax.plot(x.T, y.T, color=_GREY, linewidth=1, zorder=1)
    for place, marker, size, label in _PATH:
        look: dict[str, Any] = {"c": _COLOURS[0]}
        if shade is not None:
            look = {"c": shade[:, place], "cmap": "cividis", "vmin": shade.min(), "vmax": shade.max()}
        look |= {"edgecolors": _GREY, "linewidths": 0.5, "zorder": 2}
        points = ax.scatter(x[:, place], y[:, place], s=size, marker=marker, label=label, **look)
    if shade is not None:
        ax.figure.colorbar(points, ax=ax, label="RMSE")
    if len(x) > 1:
        ax.legend()
    else:
        _label_ends(ax, x[0], y[0], ends)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.margins(x=0.1, y=0.2)
    return ax


def intervals(
    x: Array,
    mean: Array,
    low: Array | Mapping[float, tuple[Array, Array]],
    high: Array | None = None,
    ax: "Axes | None" = None,
    *,
    target: Array | None = None,
    xlabel: str = "x",
    ylabel: str = "prediction",
) -> "Axes":
    """Predictions of one variable with their intervals, along the one input they depend on.

    Args:
        x: Inputs `(N,)`, in any order; `(N, 1)` will do, here and below.
        mean: Predictions `(N,)`.
        low: Lower ends `(N,)`; or, for several bands, the lower and the upper ends by level.
        high: Upper ends `(N,)`; None if `low` has them.
        ax: Where to draw.
        target: True values `(N,)`, drawn as points.
        xlabel: Name of the input, and its unit if it has one.
        ylabel: Name of what is predicted, and its unit if it has one.

    Returns:
        The axes drawn on.

    Example:
        >>> ax = intervals([0, 1], [2, 3], {0.5: ([1.5, 2.5], [2.5, 3.5]), 0.9: ([1, 2], [3, 4])})
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['90 % interval', '50 % interval', 'mean']
    """
    if isinstance(low, Mapping) != (high is None):
        raise ArgumentError(
            "expected low and high as two arrays, or low as a mapping from level to (low, high) and no high; "
            f"found low as {type(low).__name__} and high as {type(high).__name__}"
        )
    if isinstance(low, Mapping):
        # Wide bands first, so that narrow ones are drawn over them.
        levels = sorted(_not_empty(low, "band"), reverse=True)
        bands = {f"{100 * level:.4g} % interval": low[level] for level in levels}
    else:
        bands = {"interval": (low, high)}  # type: ignore[dict-item]
    columns = {"x": x, "mean": mean} | ({} if target is None else {"target": target})
    for label, (below, above) in bands.items():
        columns |= {f"low end of the {label}": below, f"high end of the {label}": above}
    arrays = dict(zip(columns, _same_length(columns), strict=True))
    order = np.argsort(arrays["x"], kind="stable")
    arrays = {name: array[order] for name, array in arrays.items()}

    ax = _axes(ax)
    for index, label in enumerate(bands):
        ends = arrays[f"low end of the {label}"], arrays[f"high end of the {label}"]
        # Opaque tints, not layers of alpha: those would add up to darker colours than the legend shows.
        tint = 1 - np.linspace(0.35, 0.85, len(bands))[index] * (1 - _SKY)
        _band(ax, arrays["x"], *ends, color=tuple(tint), label=label)
    ax.plot(arrays["x"], arrays["mean"], color=_COLOURS[0], label="mean")
    if target is not None:
        ax.scatter(arrays["x"], arrays["target"], s=10, c="black", linewidths=0, label="target", zorder=3)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.legend()
    return ax


def error_against_std(
    std: Array, error: Array, ax: "Axes | None" = None, *, unit: str | None = None, log: bool = False
) -> "Axes":
    """Size of each error against its predicted standard deviation, with lines at one and two of these.

    Of a Gaussian, calibrated uncertainty 68 % of the points lie below the first line, 95 % below the second.

    Args:
        std: Predicted standard deviations `(N,)`.
        error: Errors `(N,)`, with or without sign.
        ax: Where to draw.
        unit: Unit of both.
        log: Logarithmic axes; points with an error or a deviation of 0 are not shown.

    Returns:
        The axes drawn on.

    Example:
        >>> ax = error_against_std([0.5, 1.0, 2.0], [0.1, -1.5, 1.0], unit="kW")
        >>> ax.get_ylabel()
        '|error| [kW]'
    """
    spread, size = _same_length({"std": std, "error": error})
    size = np.abs(size)
    ax = _axes(ax)
    ax.scatter(spread, size, s=12, color=_COLOURS[0], alpha=0.4, linewidths=0, label="example", zorder=2)
    start = spread[spread > 0].min(initial=spread.max()) if log else 0.0
    for times, line in [(1, "--"), (2, ":")]:
        ends = np.array([start, spread.max()])
        ax.plot(ends, times * ends, color=_COLOURS[1], linestyle=line, label=f"{times} std", zorder=3)
    if log:
        ax.set(xscale="log", yscale="log")
    else:
        ax.set(xlim=(0, None), ylim=(0, None))
    tail = f" [{unit}]" if unit else ""
    ax.set(xlabel=f"predicted standard deviation{tail}", ylabel=f"|error|{tail}")
    # Looking for the best place goes over every point, which takes long when they are many.
    ax.legend(loc="best" if len(size) <= 10_000 else "upper left")
    return ax


def site_shares(names: Sequence[str], shares: Array, ax: "Axes | None" = None) -> "Axes":
    """How much of the variance each site brings in, as horizontal bars, the first site on top.

    Args:
        names: Names of the sites, S of them.
        shares: Their fractions of the variance `(S,)`, drawn as given.
        ax: Where to draw.

    Returns:
        The axes drawn on.

    Example:
        >>> ax = site_shares(["encoder.2", "head"], [0.75, 0.25])
        >>> [text.get_text() for text in ax.texts]
        ['75.0 %', '25.0 %']
    """
    (fractions,) = _same_length({"shares": shares})
    if len(names) != len(fractions):
        raise DataError(f"expected {len(names)} shares, one per name, found {len(fractions)}; pass them all")
    ax = _axes(ax, height=1.2 + 0.4 * len(names))
    bars = ax.barh(range(len(names)), 100 * fractions, color=_COLOURS[0])
    ax.bar_label(bars, fmt="%.1f %%", padding=3)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.margins(x=0.25)
    ax.set(xlabel="share of variance [%]", ylabel="site")
    return ax


def new_figure(width: float, height: float) -> "Figure":
    """A figure of this size in inches that pyplot does not know of: no window opens, and there is nothing to close."""
    figure: Figure = _matplotlib("figure").Figure(figsize=(width, height), layout="constrained")
    return figure


def _matplotlib(part: str) -> Any:
    try:
        return import_module(f"matplotlib.{part}")
    except ImportError as reason:
        raise LatedropError(
            f"expected matplotlib, found none ({reason}); install it with: pip install 'latedrop[plots]'"
        ) from None


def _axes(ax: "Axes | None", height: float = 4.8) -> "Axes":
    """The axes given, or those of a new figure of this height in inches."""
    if ax is not None:
        return ax
    axes: Axes = _matplotlib("pyplot").figure(figsize=(6.4, height), layout="constrained").add_subplot()
    return axes


def _band(ax: "Axes", x: Floats, low: Floats, high: Floats, **look: Any) -> None:
    """Fill between two lines, and draw them: legends make room for lines, not for what is filled."""
    ax.fill_between(x, low, high, linewidth=0, zorder=1, **look)
    ax.plot(x, low, x, high, linewidth=0.5, zorder=1, **(look | {"label": None}))


def _style(index: int) -> dict[str, Any]:
    """Look of the series at `index`: colour and marker come back after 7, the line after 4, all after 28."""
    return {
        "color": _COLOURS[index % len(_COLOURS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "linestyle": _LINES[index % len(_LINES)],
        "markersize": 5,
    }


def _label_ends(ax: "Axes", x: Floats, y: Floats, scale: Floats | None) -> None:
    """Name the ends of a path that starts at its smallest x and falls: beside its top, below its foot."""
    first, last = ("", "") if scale is None else (f" {scale[0]:.3g}", f" {scale[-1]:.3g}")
    near: dict[str, Any] = {"textcoords": "offset points"}
    ax.annotate(f"scale{first}", (x[0], y[0]), (8, 0), ha="left", va="center", **near)
    ax.annotate(f"relaxed scale{last}", (x[-1], y[-1]), (0, -8), ha="right", va="top", **near)


def _not_empty(series: Mapping[Any, Any], noun: str) -> Mapping[Any, Any]:
    if not series:
        raise ArgumentError(f"expected at least one {noun}, found none; pass a mapping from label to values")
    return series


def _array(values: Array) -> Floats:
    if isinstance(values, Tensor):
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)


def _like(name: str, values: Array, path: Floats) -> Floats:
    """The values, one for each point of the `(R, P)` path or paths."""
    array = _array(values)
    try:
        return np.broadcast_to(array, path.shape)
    except ValueError:
        raise DataError(
            f"expected {name} for each point of the path, shape {path.shape}, found {array.shape}; "
            "pass one value per point"
        ) from None


def _same_length(columns: Mapping[str, Array]) -> list[Floats]:
    """The columns as arrays, all `(N,)`; what a network with one output gives, `(N, 1)`, is flattened."""
    arrays = {name: _array(values) for name, values in columns.items()}
    arrays = {name: a[:, 0] if a.ndim == 2 and a.shape[1] == 1 else a for name, a in arrays.items()}
    first = next(iter(arrays))
    for name, array in arrays.items():
        if array.ndim != 1 or not len(array) or len(array) != len(arrays[first]):
            raise DataError(
                f"expected one axis of one length, not empty, for {', '.join(arrays)}; "
                f"found {name} of shape {array.shape}, {first} of shape {arrays[first].shape}; trim it"
            )
    return list(arrays.values())

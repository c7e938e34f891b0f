"""The surface of the NLL over rate and scale as a page to slide along: one HTML file, no library, no request.

The bands are exact: at a height above the valley the two scales of a rate are known (`surface.reach`). Python draws
every set; the script only shows one of them, moves the marks, and draws the slice. Without scripts it is a picture.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from studies.claims import Values
from studies.uci.surface import Valley, reach, rise, valley
from studies.uci.surface_style import PAGE
from studies.uci.tables import SHORT, Results

__all__ = ["surface_page"]

_KINDS = ("injected", "embedded")
_POINTS = 49
_HEIGHTS = (0.05, 0.15, 0.3, 0.5, 0.8, 1.2, 2.0, 3.0)
# Cividis, from the deepest part of the valley to beyond the last height.
_SHADES = ("#fee838", "#e1cc55", "#c3b369", "#a69d75", "#8a8779", "#707173", "#575d6d", "#35456c", "#00224e")
_LEFT, _PANEL, _WIDE = (80, 560), (50, 350), 400
_SLICE = (440, 600)
_TOP = 3.5
"""Nats above the least NLL at which a slice ends."""


@dataclass(frozen=True)
class _Axes:
    """Where numbers go in the picture: the logarithms of rates and scales, and the NLL of the slice."""

    rates: tuple[float, float]
    scales: tuple[float, float]
    nll: tuple[float, float]

    def x(self, rate: Any, left: float) -> Any:
        low, high = map(math.log10, self.rates)
        return left + _WIDE * (np.log10(rate) - low) / (high - low)

    def y(self, scale: Any) -> Any:
        low, high = map(math.log10, self.scales)
        return _PANEL[1] - (_PANEL[1] - _PANEL[0]) * (np.log10(scale) - low) / (high - low)

    def across(self, scale: Any, left: float) -> Any:
        low, high = map(math.log10, self.scales)
        return left + _WIDE * (np.log10(scale) - low) / (high - low)

    def down(self, nll: Any) -> Any:
        low, high = self.nll
        return _SLICE[1] - (_SLICE[1] - _SLICE[0]) * (nll - low) / (high - low)


def surface_page(results: Results) -> str:
    """The page for all sets; the first is shown until another is chosen."""
    drawings, data = [], {}
    for place, (name, record) in enumerate(results.items()):
        found = {kind: valley(record, kind, points=_POINTS) for kind in _KINDS}
        axes = _axes(found)
        hidden = ' style="display:none"' if place else ""
        drawings.append(f'<g class="set" data-set="{html.escape(name)}"{hidden}>{_drawing(found, axes)}</g>')
        data[name] = {
            "scales": axes.scales,
            "nll": axes.nll,
            "rates": _digits(next(iter(found.values())).rates),
            **{kind: {"scale": _digits(one.scales), "nll": _digits(one.nll)} for kind, one in found.items()},
        }
    options = "".join(
        f'<option value="{html.escape(name)}">{html.escape(SHORT.get(name, name))}</option>' for name in results
    )
    first = next(iter(results))
    return (
        PAGE.replace("{{drawings}}", "\n".join(drawings))
        .replace("{{options}}", options)
        .replace("{{first}}", html.escape(SHORT.get(first, first)))
        .replace("{{last}}", str(_POINTS - 1))
        .replace("{{start}}", str(_start(valley(results[first], "injected", points=_POINTS))))
        .replace("{{legend}}", _legend())
        .replace("{{clip}}", f'<rect x="0" y="{_SLICE[0]}" width="1000" height="{_SLICE[1] - _SLICE[0]}"/>')
        .replace("{{geometry}}", json.dumps({"left": _LEFT, "wide": _WIDE, "panel": _PANEL, "slice": _SLICE}))
        .replace("{{data}}", json.dumps(data, separators=(",", ":")).replace("</", "<\\/"))
    )


def _start(one: Valley) -> int:
    """The place of the rate nearest to 0.05."""
    return int(np.abs(np.log(one.rates / 0.05)).argmin())


def _axes(found: Mapping[str, Valley]) -> _Axes:
    scales = np.concatenate([one.scales for one in found.values()])
    least = min(float(one.nll.min()) for one in found.values())
    one = next(iter(found.values()))
    low, high = math.floor(math.log10(scales.min()) - 0.7), math.ceil(math.log10(scales.max()) + 1.2)
    return _Axes(
        (float(one.rates[0]), float(one.rates[-1])),
        (10.0 ** min(low, -1), 10.0 ** max(high, 1)),
        (least - 0.2, least + _TOP),
    )


def _drawing(found: Mapping[str, Valley], axes: _Axes) -> str:
    """Both panels of a set, with the slices below."""
    least = min(float(one.nll.min()) for one in found.values())
    parts = []
    for left, (kind, one) in zip(_LEFT, found.items(), strict=True):
        parts += [f'<text class="title" x="{left + _WIDE / 2}" y="32">{kind}</text>']
        parts += [
            f'<rect x="{left}" y="{_PANEL[0]}" width="{_WIDE}" height="{_PANEL[1] - _PANEL[0]}" fill="{_SHADES[-1]}"/>'
        ]
        for height, shade in zip(reversed(_HEIGHTS), reversed(_SHADES[:-1]), strict=True):
            parts += _band(one, axes, left, least + height, shade)
        line = _points(axes.x(one.rates, left), axes.y(one.scales))
        parts.append(f'<polyline class="valley" points="{line}"/>')
        parts.append(_level(axes.y(1.0), left))
        parts += _frame(axes, left)
        parts += _slice(one, axes, left, kind)
    return "".join(parts)


def _band(one: Valley, axes: _Axes, left: float, level: float, shade: str) -> list[str]:
    """Where the NLL is below a level: one shape for each run of rates whose valley is."""
    inside = np.flatnonzero(one.nll < level)
    shapes = []
    for run in np.split(inside, np.flatnonzero(np.diff(inside) > 1) + 1):
        if not len(run):
            continue
        ends = np.array([reach(level - one.nll[place]) for place in run]) * one.scales[run, None]
        ends = np.clip(ends, *axes.scales)
        x = axes.x(one.rates[run], left)
        outline = _points(np.append(x, x[::-1]), np.append(axes.y(ends[:, 0]), axes.y(ends[::-1, 1])))
        shapes.append(f'<polygon fill="{shade}" points="{outline}"/>')
    return shapes


def _slice(one: Valley, axes: _Axes, left: float, kind: str) -> list[str]:
    """The NLL over the scale at the first rate that is shown; the script draws the others."""
    place = _start(one)
    scales = np.geomspace(*axes.scales, 81)
    nll = one.nll[place] + rise(one.scales[place] / scales)
    nll = np.minimum(nll, 2 * axes.nll[1] - axes.nll[0])  # what is above the frame is clipped
    x, top = axes.x(one.rates[place], left), axes.y(one.scales[place])
    best = axes.across(one.scales[place], left), axes.down(one.nll[place])
    return [
        f'<line class="cut" data-kind="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{_PANEL[0]}" y2="{_PANEL[1]}"/>',
        f'<circle class="at" data-kind="{kind}" r="6" cx="{x:.1f}" cy="{top:.1f}"/>',
        f'<polyline class="slice" clip-path="url(#slices)" data-kind="{kind}" '
        f'points="{_points(axes.across(scales, left), axes.down(nll))}"/>',
        f'<circle class="best" data-kind="{kind}" r="6" cx="{best[0]:.1f}" cy="{best[1]:.1f}"/>',
    ]


def _level(y: float, left: float) -> str:
    """Dotted black on white, to be seen on every colour."""
    place = f'x1="{left}" x2="{left + _WIDE}" y1="{y:.1f}" y2="{y:.1f}"'
    return f'<line class="under" {place}/><line class="one" {place}/>'


def _frame(axes: _Axes, left: float) -> list[str]:
    """Ticks and names of the four axes of a column, and where scale 1 is in the slice."""
    parts = [
        f'<rect class="frame" x="{left}" y="{y[0]}" width="{_WIDE}" height="{y[1] - y[0]}"/>' for y in (_PANEL, _SLICE)
    ]
    for rate in (0.001, 0.01, 0.1, 0.5):
        if axes.rates[0] * 0.999 <= rate <= axes.rates[1] * 1.001:
            parts.append(_text("tick", axes.x(rate, left), _PANEL[1] + 18, f"{rate:g}"))
    powers = range(round(math.log10(axes.scales[0])), round(math.log10(axes.scales[1])) + 1)
    for power in powers[:: max(1, len(powers) // 6)]:
        label = f"{10.0**power:g}" if -3 < power < 5 else f"1e{power}"
        parts.append(_text("tick end", left - 6, axes.y(10.0**power) + 4, label))
        parts.append(_text("tick", axes.across(10.0**power, left), _SLICE[1] + 18, label))
    span = axes.nll[1] - axes.nll[0]
    for nll in (math.ceil(axes.nll[0]) + step for step in range(math.floor(span) + 1)):
        if nll <= axes.nll[1]:
            parts.append(_text("tick end", left - 6, axes.down(nll) + 4, f"{nll:g}"))
    x = axes.across(1.0, left)
    parts.append(f'<line class="one" x1="{x:.1f}" x2="{x:.1f}" y1="{_SLICE[0]}" y2="{_SLICE[1]}"/>')
    parts += [_text("name", left + _WIDE / 2, _PANEL[1] + 38, "dropout rate")]
    parts += [_text("name", left + _WIDE / 2, _SLICE[1] + 38, "scale")]
    for label, y in (("scale", sum(_PANEL) / 2), ("NLL", sum(_SLICE) / 2)):
        parts.append(f'<text class="name" transform="translate({left - 52} {y}) rotate(-90)">{label}</text>')
    return parts


def _legend() -> str:
    """The colours and what they stand for."""
    names = [*(f"to {height:g}" for height in _HEIGHTS), "more"]
    width, parts = 880 / len(names), []
    for place, (shade, name) in enumerate(zip(_SHADES, names, strict=True)):
        x = 80 + place * width
        parts.append(f'<rect x="{x:.0f}" y="668" width="{width:.0f}" height="14" fill="{shade}"/>')
        parts.append(_text("tick", x + width / 2, 698, name))
    return "".join(parts) + _text("name", 520, 660, "nats above the least NLL of both")


def _text(kind: str, x: float, y: float, words: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{words}</text>'


def _points(x: Values, y: Values) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))


def _digits(values: Values) -> list[float]:
    return [float(f"{value:.5g}") for value in values.tolist()]

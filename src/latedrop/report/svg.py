"""Draw figures as SVG text: axes with round ticks, lines, dots and bars, in the colours of the page's style.

A figure is drawn in a box of 360 x 240; the page scales it to the width that there is. Dots that can be pointed at have
a `<title>`, which browsers show without a script.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np

from latedrop.numerals import plain

__all__ = ["SHARES", "Axis", "Plot", "robust_limit"]

_WIDTH, _HEIGHT = 360, 240
SHARES = tuple((k / 4, f"{25 * k} %") for k in range(5))
"""Ticks of an axis of shares."""
_TOP, _RIGHT, _BOTTOM, _LETTER = 8.0, 18.0, 38.0, 5.6
_FAR = 4.0  # a largest value of more than this many times the rest is cut off


@dataclass(frozen=True)
class Axis:
    """The range of an axis; `ticks` are pairs (value, text), chosen automatically if there are none."""

    low: float
    high: float
    label: str = ""
    ticks: tuple[tuple[float, str], ...] = ()

    @classmethod
    def around(cls, values: Iterable[float], label: str = "", *, zero: bool = False) -> Axis:
        """Return an axis a little wider than all finite values; with `zero`, it begins at 0."""
        known = [value for value in values if math.isfinite(value)]
        low, high = (min(known), max(known)) if known else (0.0, 1.0)
        low = min(low, 0.0) if zero else low
        room = 0.05 * (high - low)
        if high - low <= 1e-4 * max(abs(low), abs(high)):  # what differs by rounding is the same
            room = 0.05 * max(abs(low), abs(high)) or 1.0
        return cls(low if zero and low == 0 else low - room, high + room, label)

    def at(self, value: float) -> float:
        """Return the position of a value on the axis, from 0 to 1."""
        return (value - self.low) / (self.high - self.low)

    def marks(self) -> tuple[tuple[float, str], ...]:
        """Return the tick values with their texts."""
        if self.ticks:
            return self.ticks
        steps, size = _steps(self.low, self.high)
        return tuple((value, _tick(value, size, max(abs(self.low), abs(self.high)))) for value in steps)


@dataclass
class Plot:
    """A figure to which lines, dots and bands are added."""

    x: Axis
    y: Axis
    parts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        widest = max((len(text) for _, text in self.y.marks()), default=1)
        self.left = 24 + _LETTER * widest

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Return the position of a point in the box; the frame clips points beyond the axes."""
        right, bottom = _WIDTH - _RIGHT - self.left, _HEIGHT - _TOP - _BOTTOM
        # Far outside, browsers lose precision; a box to either side is enough.
        across, up = (min(max(value, -1.0), 2.0) for value in (self.x.at(x), self.y.at(y)))
        return round(self.left + across * right, 1), round(_TOP + (1 - up) * bottom, 1)

    def line(self, xs: Sequence[float], ys: Sequence[float], series: str, name: str = "") -> None:
        """Draw a line through points, without those that are not finite."""
        points = [self.place(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(x) and math.isfinite(y)]
        text = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polyline class="line {series}" points="{text}">{_title(name)}</polyline>')

    def segment(self, start: tuple[float, float], end: tuple[float, float], series: str, name: str = "") -> None:
        """Draw one straight line between two points."""
        (x1, y1), (x2, y2) = self.place(*start), self.place(*end)
        inner = _title(name)
        self.parts.append(f'<line class="{series}" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}">{inner}</line>')

    def dot(self, x: float, y: float, series: str, name: str = "", size: float = 3) -> None:
        """Draw a dot with a title for the pointer."""
        cx, cy = self.place(x, y)
        self.parts.append(f'<circle class="dot {series}" cx="{cx:g}" cy="{cy:g}" r="{size:g}">{_title(name)}</circle>')

    def cross(self, x: float, y: float, series: str, name: str = "") -> None:
        """Draw a cross, for a missed target."""
        cx, cy = self.place(x, y)
        path = f"M{cx - 3.5:g} {cy - 3.5:g}l7 7m0 -7l-7 7"
        self.parts.append(f'<path class="cross {series}" d="{path}">{_title(name)}</path>')

    def across(self, y: float, series: str, name: str = "") -> None:
        """Draw a line from left to right."""
        self.segment((self.x.low, y), (self.x.high, y), f"line {series}", name)

    def svg(self, words: str) -> str:
        """Return the SVG; `words` describe it for screen readers."""
        bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
        clip = f"{self.left:g} {_TOP:g} {right - self.left:g} {bottom - _TOP:g}"
        html = [f'<svg class="figure" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(words)}">']
        for value, text in self.y.marks():
            y = self.place(self.x.low, value)[1]
            html.append(f'<line class="grid" x1="{self.left:g}" x2="{right:g}" y1="{y:g}" y2="{y:g}"/>')
            html.append(f'<text class="tick end" x="{self.left - 5:g}" y="{y + 3.5:g}">{escape(text)}</text>')
        written = -math.inf  # up to where there are texts of ticks; one that would touch the last is left out
        for value, text in sorted(self.x.marks(), key=lambda mark: self.x.at(mark[0])):
            x, half = self.place(value, self.y.low)[0], _LETTER * (len(text) + 1.5) / 2
            text = "" if x - half < written else text
            written = x + half if text else written
            html.append(f'<line class="grid" x1="{x:g}" x2="{x:g}" y1="{bottom:g}" y2="{bottom + 4:g}"/>')
            html.append(f'<text class="tick middle" x="{x:g}" y="{bottom + 15:g}">{escape(text)}</text>')
        middle = (self.left + right) / 2
        across, up = _shortened(self.x.label, right - self.left), _shortened(self.y.label, bottom - _TOP)
        html.append(f'<text class="axis middle" x="{middle:g}" y="{_HEIGHT - 5}">{escape(across)}</text>')
        html.append(
            f'<text class="axis middle" transform="translate(11 {(_TOP + bottom) / 2:g}) rotate(-90)">'
            f"{escape(up)}</text>"
        )
        places = zip(("x", "y", "width", "height"), clip.split(), strict=True)
        html.append(f'<svg {" ".join(f"{name}={chr(34)}{value}{chr(34)}" for name, value in places)} viewBox="{clip}">')
        return "".join([*html, *self.parts, "</svg></svg>"])


def robust_limit(values: Sequence[float]) -> float:
    """Return where an axis of non-negative values ends: at the largest, unless that is far beyond the others."""
    ordered = np.sort([value for value in values if math.isfinite(value)])
    usual = float(ordered[min(len(ordered) - 2, int(0.9 * len(ordered)))]) if len(ordered) > 2 else 0.0
    return 2 * usual if usual > 0 and ordered[-1] > _FAR * usual else float(ordered.max(initial=0.0))


def _title(name: str) -> str:
    return f"<title>{escape(name)}</title>" if name else ""


def _tick(value: float, step: float, largest: float) -> str:
    """Format a value on an axis with as many digits as its step needs."""
    if step >= 1e-4 and largest < 1e9:
        places = next(k for k in range(9) if abs(step * 10**k - round(step * 10**k)) < 1e-6 * step * 10**k)
        return f"{value:,.{places}f}"
    return plain(value, math.floor(math.log10(largest)) - math.floor(math.log10(step)) + 2)


def _steps(low: float, high: float, count: int = 5) -> tuple[list[float], float]:
    """Return multiples of a step, and the step: 1, 2, 2.5 or 5 times a power of ten."""
    rough = (high - low) / count
    power = 10 ** math.floor(math.log10(rough))
    step = next(size * power for size in (1, 2, 2.5, 5, 10) if size * power >= 0.99 * rough)
    first = math.ceil(low / step - 1e-9)
    return [0.0 if k == 0 else k * step for k in range(first, math.floor(high / step + 1e-9) + 1)], step


def _shortened(text: str, room: float) -> str:
    """Shorten a label that is longer than its axis by cutting its middle."""
    most = int(room / _LETTER)
    return text if len(text) <= most else f"{text[: (most - 1) // 2]}…{text[-(most // 2) :]}"

"""Pieces of a page: tables, figures with their legends, traffic lights. All text from outside is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from latedrop.calibration.verdict import Finding

__all__ = ["Figure", "figures", "heading", "light", "lights", "opening", "paragraph", "table"]

_ABOUT = {
    "coverage": "Do the intervals hold?",
    "ranges": "Do they hold everywhere?",
    "worth": "Better than a constant?",
    "ranking": "Does it rank errors?",
}


@dataclass(frozen=True)
class Figure:
    """A figure with its heading, what to see in it, and what its lines are: names by series."""

    title: str
    caption: str
    svg: str
    legend: Mapping[str, str]


def light(grade: str) -> str:
    """Write a coloured dot, with its word beside it."""
    return f'<span class="light {grade}">{escape(grade)}</span>'


def opening(grade: str, findings: Sequence[Finding], *soft: str) -> str:
    """Write a verdict as a sentence, and a card for each of its findings; then paragraphs."""
    sentence = "; ".join(finding.text for finding in findings)
    top = f'<p class="verdict">{light(grade)} · {escape(sentence[0].upper() + sentence[1:])}.</p>'
    return "".join([top, lights(findings), *(paragraph(text, "soft") for text in soft)])


def lights(findings: Sequence[Finding]) -> str:
    """Write a card for each finding."""
    cards = [
        f'<li class="card {part.grade}"><h3>{escape(_ABOUT.get(part.about, part.about))}</h3>'
        f'<p>{light(part.grade)} <span class="value">{escape(part.value)}</span></p>'
        f"<p>{escape(part.advice)}</p></li>"
        for part in findings
    ]
    return f'<ul class="cards">{"".join(cards)}</ul>'


def heading(text: str, level: int = 2) -> str:
    """Write a heading."""
    return f"<h{level}>{escape(text)}</h{level}>"


def paragraph(text: str, kind: str = "") -> str:
    """Write text of one's own; nothing where it is empty."""
    return f"<p{f' class={chr(34)}{kind}{chr(34)}' if kind else ''}>{escape(text)}</p>" if text else ""


def table(
    lines: Sequence[Sequence[str]], caption: str = "", *, head: bool = True, marked: str = "", texts: bool = False
) -> str:
    """Write a table in a box of its own that scrolls sideways on narrow screens.

    The row of the name `marked` stands out; with `texts` all cells are text.
    """
    html = []
    for index, line in enumerate(lines):
        if head and index == 0:
            heads = [cell.replace(" [", "\n[").replace(" at ", "\nat\xa0").replace(" %", "\xa0%") for cell in line]
            cells = [f'<th scope="col">{escape(cell)}</th>' if cell else "<td></td>" for cell in heads]
        else:
            cells = [f'<th scope="row">{escape(line[0])}</th>', *(f"<td>{_cell(cell)}</td>" for cell in line[1:])]
        kind = ' class="marked"' if marked and line[0] == marked else ""
        html.append(f"<tr{kind}>{''.join(cells)}</tr>")
    top = f"<caption>{escape(caption)}</caption>" if caption else ""
    kind = ' class="texts"' if texts else ""
    return f'<div class="wide" tabindex="0" role="region"><table{kind}>{top}{"".join(html)}</table></div>'


def _cell(text: str) -> str:
    return light(text) if text in ("good", "weak", "bad") else escape(text)


def figures(shown: Sequence[Figure]) -> str:
    """Write figures side by side where there is room."""
    html = []
    for figure in shown:
        keys = "".join(f"<li>{_key(series)}{escape(name)}</li>" for series, name in figure.legend.items())
        legend = f'<ul class="legend">{keys}</ul>' if keys else ""
        html.append(
            f"<figure><h3>{escape(figure.title)}</h3>{figure.svg}{legend}"
            f"<figcaption>{escape(figure.caption)}</figcaption></figure>"
        )
    return f'<div class="figures">{"".join(html)}</div>'


def _key(series: str) -> str:
    """Return what stands before a name in a legend: a piece of the line, a dot or a cross."""
    line = f'<line class="line {series}" x1="1" x2="25" y1="5" y2="5"/>'
    if series == "dot target":
        line = '<circle class="dot target" cx="13" cy="5" r="4"/>'
    elif series == "cross":
        line = '<path class="cross" d="M9 1l8 8m0 -8l-8 8"/>'
    return f'<svg viewBox="0 0 26 10" aria-hidden="true">{line}</svg>'

"""The pages of the UCI study, from its JSON alone.

`index.md` has the summary, ranks and figures, `tables.md` every table, `claims.md` the verdicts, `embedded.md` why
embedded dropout trades off by itself, `surface.html` the NLL over rate and scale to slide along.
"""

from __future__ import annotations

from pathlib import Path

from studies.pages import drawn, written
from studies.uci import claims_page
from studies.uci.embedded_page import embedded_page
from studies.uci.figures import CAPTIONS, figures
from studies.uci.surface_page import surface_page
from studies.uci.tables import (
    KINDS,
    QUALITIES,
    SHORT,
    Results,
    columns,
    counted,
    duel_table,
    method_table,
    rank_table,
    verdicts,
)

__all__ = ["index", "tables", "write"]

_DEPTHS = {False: "One hidden layer", True: "Three hidden layers of 50"}
_METHODS = (
    (
        "injected",
        "dropout at one rate in the trained network; per site: a rate for each site, to first order",
        "nothing",
    ),
    (
        "rate-in",
        "dropout at a rate for each layer and row, chosen without labels (Rate-In, Zeevi et al. 2025)",
        "nothing",
    ),
    (
        "default",
        "`latedrop.calibrate` as it comes: sites, leverage, floor, guard",
        "nothing; reference: training inputs",
    ),
    ("constant", "the validation rows' mean squared error for all rows", "nothing"),
    ("laplace", "Gaussian posterior of the last layer, tuned by its evidence", "the training rows"),
    (
        "swag",
        "Gaussian fitted to the weights of the last quarter of training (Maddox et al. 2019)",
        "the training itself",
    ),
    ("embedded", "dropout in training too, at the rate that validation chooses", "a network for each rate"),
    ("concrete", "dropout in training, rate and noise learned (Gal, Hron, Kendall 2017)", "another training"),
    ("ensemble", "mean and variance over five networks (Lakshminarayanan et al. 2017)", "five networks"),
    ("ensemble variance", "the variance of the five around the mean of the first", "five networks"),
    ("gaussian", "a network with a second output, its log variance", "another training"),
    ("gaussian ensemble", "five of these as a mixture's mean and variance", "five networks"),
    ("conformal", "split conformal intervals: one width, or in proportion to the injected std; no density", "nothing"),
)


def write(results: Results, folder: Path) -> list[Path]:
    """Write the pages, and the figures where matplotlib is installed; their paths."""
    pages = {
        "index.md": index(results),
        "tables.md": tables(results),
        "claims.md": claims_page.page(results),
        "embedded.md": embedded_page(results),
        "surface.html": surface_page(results),
    }
    return written(folder, drawn(lambda: figures(results)) | {name: page.encode() for name, page in pages.items()})


def index(results: Results) -> str:
    """Markdown: how it was run, who wins, ranks, and the figures."""
    lines = ["# The UCI study", "", *_how(results), "", *_sets(results), "", "## Methods", "", *_methods()]
    for deep, title in _DEPTHS.items():
        lines += ["", f"## {title}", "", *verdicts(results, deep=deep), ""]
        lines += [
            "On how many sets a method has a lower mean NLL than injection with the same done to it, and the median "
            "difference over sets (negative: better than injection):",
            "",
            *duel_table(results, deep=deep),
        ]
        for kind in ("scaled", "floor"):
            lines += ["", f"**NLL, {KINDS[kind].lower()}** (mean ± standard error over splits)", ""]
            lines += method_table(results, QUALITIES[0], deep=deep, kind=kind)
        lines += ["", "**Mean ranks with scale and floor**, by every measure that has a better side", ""]
        lines += rank_table(results, deep=deep, kind="floor")
    lines += ["", "## Figures", "", "[The surface to slide along](surface.html) has every set.", ""]
    for place, (name, caption) in enumerate(CAPTIONS.items(), 1):
        lines += [f"![{caption}]({name}.png)", "", f"*Figure {place}. {caption}*", ""]
    return "\n".join(lines).rstrip() + "\n"


def tables(results: Results) -> str:
    """Markdown: a table for every measure, kind and depth."""
    lines = [
        "# The UCI study: every table",
        "",
        "Mean ± standard error over splits of the test rows; the standard error accounts for the rows that splits "
        "share (Nadeau and Bengio 2003). Bold: the best mean of a set, which may be best by chance; "
        "[claims](claims.md) have tests. rank: mean over sets among the methods of the table; post hoc: among those "
        "that take one trained network as it is.",
    ]
    for deep, title in _DEPTHS.items():
        lines += ["", f"## {title}"]
        for quality in QUALITIES:
            lines += ["", f"### {quality.title}", "", f"{quality.better[0].upper()}{quality.better[1:]}."]
            for kind in quality.kinds:
                if columns(results, quality.name, deep=deep, kind=kind):
                    lines += ["", f"**{KINDS[kind]}**", ""]
                    lines += method_table(results, quality, deep=deep, kind=kind)
    return "\n".join(lines) + "\n"


def _how(results: Results) -> list[str]:
    first = next(iter(results.values()))
    variance = f"{draws} draws" if (draws := first["settings"]["draws"]) else "exact, without draws"
    seconds = sum(record["seconds"]["total"] for record in results.values())
    machines = sorted({record["machine"]["device"] for record in results.values()})
    return [
        f"{counted(results)}, networks without dropout and with dropout embedded at {len(first['rates'])} rates, "
        f"trained and measured in {seconds / 60:.1f} minutes in all on {' and '.join(machines)} "
        f"(torch {first['versions']['torch']}). The variance of one hidden layer is {variance}; that of three is "
        f"sampled with {first['settings']['deep_draws']} draws. Every number is of the test rows, in the target's own "
        "unit. Each variance is taken as it is (raw), times a scale, and with scale and floor, all fitted on the "
        "validation rows: methods are ranked only with those that had the same done to them.",
        "",
        "[Every table](tables.md) · [what the paper claims, and what we found](claims.md) · "
        "[why embedded dropout trades off by itself](embedded.md) · [the surface of the NLL](surface.html)",
    ]


def _sets(results: Results) -> list[str]:
    lines = ["| set | train | validation | test | splits | seconds |", "| --- | ---: | ---: | ---: | ---: | ---: |"]
    for name, record in results.items():
        rows, splits = record["rows"], len(record["methods"]["constant"]["nll"])
        counts = [rows["train"], rows["validation"], rows["test"], splits, f"{record['seconds']['total']:.0f}"]
        lines.append(f"| {SHORT.get(name, name)} | {' | '.join(map(str, counts))} |")
    return lines


def _methods() -> list[str]:
    lines = ["| method | variance | needs, besides the trained network |", "| --- | --- | --- |"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in _METHODS)]

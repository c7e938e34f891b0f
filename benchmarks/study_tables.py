"""Rows of the studies' committed pages for README.md and docs: the claims worth a line there, and a few methods.

Verdicts and numbers are those of `docs/results/*/claims.md` and `index.md`, which the studies write.
"""

from __future__ import annotations

from pathlib import Path

PAGES = Path(__file__).parents[1] / "docs" / "results"
UCI = (
    "Embedded: the RMSE grows with the rate",
    "Embedded: the RMSE does not fall before it rises",
    "At large rates the injected RMSE is below the embedded one",
    "Injected: at the smallest rate the unscaled NLL is ruined",
    "Embedded: at the smallest rate the scaled NLL is not ruined",
    "Embedded: the unscaled MA is at or below the scaled one",
    "The ideal NLL of injection is below that of embedded dropout",
    "Scaling helps injected dropout more than embedded dropout, over all rates",
    "Scaling helps injected dropout more than embedded dropout, at the rates that validation chooses",
    "Injection, scaled, is not worse than embedded dropout, scaled, at the rate that validation chooses",
    "Injection, scaled, beats a constant variance",
    "Injection with floor beats a constant variance",
    "Injection with floor is not worse than embedded dropout with floor",
    "The default of `calibrate` beats a constant variance",
    "Three hidden layers: injection with floor beats a constant variance",
    "Three hidden layers: injection with floor is not worse than embedded dropout with floor",
    "Three hidden layers: injection with floor is not worse than last-layer Laplace with floor",
    "Three hidden layers: an ensemble of five with floor beats injection with floor",
    "Three hidden layers: a Gaussian head with floor beats injection with floor",
    "Three hidden layers: an ensemble of five Gaussian heads with floor beats injection with floor",
    "Three hidden layers: the default of `calibrate` beats a constant variance",
    "Three hidden layers: with training inputs as reference the default beats injection with floor",
    "Three hidden layers: the injected RMSE does not grow with the rate",
    "Three hidden layers: at large rates the injected RMSE is below the embedded one",
    "Three hidden layers: scaling helps injected dropout more than embedded dropout, at the rates that validation "
    "chooses",
)
CROWD = (
    "Pixels: the scaled NLL is far better than the unscaled one",
    "Pixels: the scaled MA stays poor",
    "Pixels: the relaxed scale brings the curve near the bisector",
    "Pixels: the relaxed scale costs little NLL",
    "Pixels: scaled injection beats a constant variance",
    "Counts: the scaled NLL is far better than the unscaled one",
    "Counts: the scaled MA stays poor",
    "Counts: the relaxed scale costs little NLL",
    "Counts: the RMSE falls at small rates",
    "Counts: the best rate is another one with a scale than without",
    "Counts: scaled injection beats a constant variance",
    "Larger rates ruin the counts",
    "Injection counts as well as embedded dropout",
    "The 90 % count interval, scaled, covers what it says",
    "Rejecting uncertain regions lowers the error of the count",
    "Rejection removes a good part of the false regions",
    "It is the uncertainty that helps: rejection by density alone does worse",
)

SHIFT = (
    "default + reference",
    "default",
    "ensemble, floor",
    "gaussian ensemble, floor",
    "embedded, floor",
    "injected, floor",
    "laplace, floor",
    "constant",
)
_SHIFT_COLUMNS = {
    "coverage, shifted": "coverage",
    "width, shifted": "width",
    "NLL, shifted": "NLL",
    "CRPS, shifted": "CRPS",
    "AUROC": "AUROC",
}


def claims(page: Path, texts: tuple[str, ...]) -> str:
    """The rows of a page of claims with these texts, under its header."""
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    head = next(place for place, line in enumerate(lines) if line.startswith("| | claim |"))
    rows = [line for line in lines if any(f"| {text} |" in line for text in texts)]
    return "\n".join([*lines[head : head + 2], *rows])


def deep_nll(page: Path) -> str:
    """The last table of NLLs of three hidden layers."""
    section = page.read_text(encoding="utf-8").split("\n## Three hidden layers")[1].split("\n## ")[0]
    after = section.rpartition("\n**NLL")[2].splitlines()
    start = next(place for place, line in enumerate(after) if line.startswith("| method |"))
    end = next((place for place, line in enumerate(after) if place > start and not line.startswith("|")), len(after))
    return "\n".join(after[start:end])


def shift(page: Path) -> str:
    """What methods with a floor or a fit of their own do beyond a cut: medians over the sets, without intervals."""
    heads: list[str] = []
    found: dict[str, dict[str, str]] = {}
    for line in page.read_text(encoding="utf-8").split("\n## Figures")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == "method":
            heads = cells
        elif cells[0] in SHIFT:
            found.setdefault(cells[0], {}).update(zip(heads, cells, strict=True))
    lines = [f"| method | {' | '.join(_SHIFT_COLUMNS.values())} |", "| --- |" + " ---: |" * len(_SHIFT_COLUMNS)]
    for method in SHIFT:
        lines.append(f"| {method} | {' | '.join(found[method][head].partition(' (')[0] for head in _SHIFT_COLUMNS)} |")
    return "\n".join(lines)


def shift_claims(page: Path) -> str:
    """The table of verdicts."""
    lines = page.read_text(encoding="utf-8").split("\n## ")[0].splitlines()
    return "\n".join(line for line in lines if line.startswith("|"))

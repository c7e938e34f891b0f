"""Rows of the studies' committed pages for README.md: the claims worth a line there, and one table of NLLs.

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
    "Embedded: the unscaled MA is at or below the scaled one",
    "The ideal NLL of injection is below that of embedded dropout",
    "Scaling helps injected dropout more than embedded dropout, over all rates",
    "Scaling helps injected dropout more than embedded dropout, at the rates that validation chooses",
    "Injection, scaled, is not worse than embedded dropout, scaled, at the rate that validation chooses",
    "Scaling lowers the NLL of injected dropout",
    "Scaling lowers the NLL of embedded dropout",
    "Injection, scaled, beats a constant variance",
    "Injection with floor beats a constant variance",
    "Injection with floor is not worse than embedded dropout with floor",
    "Injection with floor is not worse than last-layer Laplace with floor",
    "Three hidden layers: rates per site with floor beat a constant variance",
    "Three hidden layers: the default of `calibrate` beats a constant variance",
    "Three hidden layers: an ensemble of five with floor beats injection with floor",
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

"""The words of the glossary that a reader meets first on our pages are linked there, once on each page."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
# Words that other libraries do not use, or use in another sense. Links of others, as rate or scale, would be clutter.
TERMS = {
    "conformal": r"conformal",
    "exchangeable": r"exchangeable",
    "first-order": r"first[- ]order",
    "floor": r"floor",
    "guard": r"guard",
    "leverage": r"leverage",
    "miscalibration-area": r"miscalibration area",
    "nats": r"nats",
    "novelty": r"novelty",
    "readout": r"readouts?",
    "reference-rows": r"reference rows?",
    "relaxed-scale": r"relaxed scale",
    "site": r"sites?",
    "thinned-network": r"thinned networks?",
    "verdict": r"verdict",
}
LISTS = {"README.md", "glossary.md"}
PAGES = sorted(page for page in DOCS.glob("*.md") if page.name not in LISTS)
# What is no running text: generated parts, code, headings, tables, comments, formulas, pictures.
NO_TEXT = re.compile(
    r"<!-- table: .*?<!-- end of table -->|<!-- trained: .*?<!-- end -->|<!--.*?-->"
    r"|^```.*?^```$|^#.*?$|^\|.*?$|\$\$.*?\$\$|\$[^$\n]+\$|!\[[^\]]*\]\([^)]*\)|`[^`\n]+`",
    re.MULTILINE | re.DOTALL,
)
LINK = re.compile(r"\[[^\]]*\]\([^)]*\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_terms_are_linked_where_they_are_used_first(page: Path) -> None:
    missing = unlinked(page.read_text(encoding="utf-8"))
    assert missing == {}, "link these where they are used first, as in [leverage](glossary.md#leverage)"


def test_terms_are_in_the_glossary() -> None:
    headings = re.findall(r"^## (.+)$", (DOCS / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {heading.lower().replace(" ", "-") for heading in headings} >= set(TERMS)
    assert headings == sorted(headings, key=str.lower)


def test_what_counts_as_a_link() -> None:
    assert unlinked("`leverage`, then [leverage](glossary.md#leverage), then leverage.") == {}
    assert unlinked("## Leverage\n\n| leverage |\n\nThe *leverage* of a row.") == {"leverage": 5}
    assert unlinked("A [table of leverage](terms.md) and a\nguard.") == {"guard": 2}


def unlinked(text: str) -> dict[str, int]:
    """Return the terms whose first use in running text is in no link, with the line of that use."""
    blank = NO_TEXT.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    links = [match.span() for match in LINK.finditer(blank)]
    missing = {}
    for term, words in TERMS.items():
        first = re.search(rf"(?<![\w-])(?:{words})(?![\w-])", blank, re.IGNORECASE)
        if first and not any(start <= first.start() < end for start, end in links):
            missing[term] = blank[: first.start()].count("\n") + 1
    return missing

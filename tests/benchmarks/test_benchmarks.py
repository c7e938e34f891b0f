"""Pages repeat the committed results of the benchmarks."""

from pathlib import Path

import pytest

from benchmarks import pages


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda path: path.name)
def test_tables_of_pages_follow_the_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "<!-- table: " in text
    assert pages.filled(text) == text, "run: python -m benchmarks.pages"

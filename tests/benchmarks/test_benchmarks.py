"""What the pages say of the benchmarks is what the committed results hold."""

from pathlib import Path

import pytest

from benchmarks import pages
from benchmarks.nets import nets
from latedrop_crowd import MCNN


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda path: path.name)
def test_tables_of_pages_follow_the_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "<!-- table: " in text
    assert pages.filled(text) == text, "run: python -m benchmarks.pages"


def test_the_people_counter_is_the_package_s() -> None:
    for size in ("small", "cpu", "gpu"):
        net = next(net for net in nets(size) if net.name == "mcnn_count")
        assert type(net.build()) is MCNN

"""What the pages say of the benchmarks is what the committed results hold."""

from pathlib import Path

from benchmarks.linear import markdown

ROOT = Path(__file__).parents[1]


def test_table_of_the_first_order_variance() -> None:
    page = (ROOT / "docs" / "linear.md").read_text(encoding="utf-8")
    for table in markdown().split("\n\n"):
        assert table in page


def test_aims_of_the_first_order_variance() -> None:
    costs, ranks = (table.splitlines()[2:] for table in markdown().split("\n\n"))
    for row in costs:
        *_, linear, _, _, _, ratio, _ = row.split("|")
        assert float(linear) <= 4
        assert float(ratio) >= 15
    for row in ranks:
        assert float(row.split("|")[2]) >= 0.95

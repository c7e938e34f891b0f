"""The rows that README.md has of the studies are claims that the studies make, and lines of their pages."""

from pathlib import Path

from benchmarks.study_tables import CROWD, UCI, claims, deep_nll
from latedrop.studies.crowd import claims as crowd
from latedrop.studies.uci import claims as uci


def test_chosen_claims_are_made() -> None:
    assert set(UCI) <= {claim.text for claim in uci.CLAIMS}
    assert set(CROWD) <= {claim.text for claim in crowd.CLAIMS}


def test_rows_of_claims(tmp_path: Path) -> None:
    page = tmp_path / "claims.md"
    head = "| | claim | by | verdict |\n| --- | --- | --- | --- |"
    page.write_text(
        f"# A\n\n{head}\n| 1 | x | us | holds |\n| 2 | y | us | fails |\n\n{head}\n| 3 | z | us | holds |\n"
    )
    assert claims(page, ("z", "x")) == f"{head}\n| 1 | x | us | holds |\n| 3 | z | us | holds |"


def test_the_last_table_of_nlls(tmp_path: Path) -> None:
    page = tmp_path / "index.md"
    page.write_text(
        "## One hidden layer\n\n**NLL, scaled**\n\n| method | a |\n\n## Three hidden layers\n\n**NLL, scaled**\n\n"
        "| method | b |\n| --- | --- |\n\n**NLL, scale and floor**\n\n| method | c |\n| --- | --- |\n| x | 1 |\n\n"
        "**Mean ranks**\n\n| method | d |\n\n## Figures\n"
    )
    assert deep_nll(page) == "| method | c |\n| --- | --- |\n| x | 1 |"

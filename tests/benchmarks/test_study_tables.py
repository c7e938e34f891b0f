"""The rows that README.md has of the studies are claims that the studies make, and lines of their pages."""

from pathlib import Path

from benchmarks.study_tables import CROWD, SHIFT, UCI, claims, deep_nll, shift, shift_claims
from studies.crowd import claims as crowd
from studies.uci import claims as uci


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


def test_rows_of_the_shift_study(tmp_path: Path) -> None:
    page = tmp_path / "index.md"
    held, whole, noticed = (
        "\n".join([head, "| --- |", *(f"| {name} | {row}" for name in (*SHIFT, "other"))])
        for head, row in (
            (
                "| method | coverage, shifted | coverage, inside | width, shifted |",
                "0.9 (0.8 to 1) | 0.5 | 2 (1 to 3) |",
            ),
            ("| method | NLL, shifted | NLL, inside | CRPS, shifted |", "-0.1 (-1 to 1) | 7 | 0.3 (0.2 to 0.4) |"),
            ("| method | AUROC | slope |", "0.7 (0.6 to 0.8) | 1 |"),
        )
    )
    page.write_text(f"# Shift\n\n{held}\n\n{whole}\n\n{noticed}\n\n## Figures\n\n| method | a |\n| constant | 5 |\n")
    rows = shift(page).splitlines()
    assert rows[0] == "| method | coverage | width | NLL | CRPS | AUROC |"
    assert rows[2:] == [f"| {name} | 0.9 | 2 | -0.1 | 0.3 | 0.7 |" for name in SHIFT]


def test_the_verdicts_of_the_shift_study(tmp_path: Path) -> None:
    page = tmp_path / "claims.md"
    page.write_text("# Claims\n\nWords.\n\n| | claim |\n| --- | --- |\n| 1 | x |\n\n## 1. x\n\n| yacht |\n")
    assert shift_claims(page) == "| | claim |\n| --- | --- |\n| 1 | x |"

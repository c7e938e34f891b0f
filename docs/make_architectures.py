"""Write the table of supported_models.md: `python docs/make_architectures.py`, with every library of it installed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

DOCS = Path(__file__).parent
START, END = "<!-- table: make_architectures.py -->\n", "<!-- end of table -->\n"
HEAD = (
    "| architecture | library | inject | sample, vectorised | linear | propagate |\n"
    "| --- | --- | --- | --- | --- | --- |\n"
)


def replaced(page: str, rows: list[str]) -> str:
    """The page with these rows as its table."""
    before, rest = page.split(START)
    return before + START + HEAD + "".join(f"{row}\n" for row in rows) + END + rest.split(END)[1]


def rows_of(page: str) -> list[str]:
    """The rows of the page's table."""
    table = page.split(START)[1].split(END)[0]
    return table.removeprefix(HEAD).splitlines()


def main(say: Callable[[str], object] = print) -> None:
    """Try every architecture, and write what happened."""
    sys.path.insert(0, str(DOCS.parent / "tests"))
    from architectures import ARCHITECTURES, missing, tried

    absent = missing(*{architecture.library for architecture in ARCHITECTURES})
    if absent:
        raise SystemExit(f"expected every library of the table; {absent} cannot be imported. Install them first.")
    torch.set_num_threads(1)
    page = DOCS / "supported_models.md"
    rows = []
    for architecture in ARCHITECTURES:
        rows.append(str(tried(architecture, *architecture.make())))
        say(rows[-1])
    page.write_text(replaced(page.read_text(encoding="utf-8"), rows), encoding="utf-8")


if __name__ == "__main__":
    main()

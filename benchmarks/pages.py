"""Fill the tables of README.md and of pages in docs from the committed results: `python -m benchmarks.pages`.

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`; what is between them is replaced. NAME is
`benchmarks.MODULE.KIND`: the module's `KIND_table`, or its `table`, of `results/MODULE.json`.
"""

import re
from importlib import import_module
from pathlib import Path

from benchmarks.timing import stored

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"(<!-- table: (benchmarks\.\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
_ALL = (ROOT / "README.md", *sorted((ROOT / "benchmarks").rglob("*.md")), *sorted((ROOT / "docs").glob("*.md")))
PAGES = tuple(path for path in _ALL if _BLOCK.search(path.read_text(encoding="utf-8")))


def filled(text: str) -> str:
    """Return the page with every table as the results have it."""
    return _BLOCK.sub(lambda match: f"{match[1]}{_table(match[2])}\n{match[3]}", text)


def _table(name: str) -> str:
    _, module, *words = name.split(".")
    source, record = import_module(f"benchmarks.{module}"), stored(module)
    if special := getattr(source, "_".join([*words, "table"]), None):
        return str(special(record))
    return str(source.table(record, *words))


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(path.relative_to(ROOT))

"""Docstrings in the notation that Sphinx reads: they have one backtick around names and `$$` around formulas."""

import re
from typing import Any

from sphinx.application import Sphinx

FORMULA = re.compile(r"^( *)\$\$\n(.*?)\n *\$\$$", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


def setup(app: Sphinx) -> dict[str, Any]:
    """Run before napoleon reads the sections."""
    app.connect("autodoc-process-docstring", _translate, priority=100)
    return {"parallel_read_safe": True}


def _translate(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    text = FORMULA.sub(_directive, "\n".join(lines))
    lines[:] = NAME.sub(r"``\1``\\ ", text).split("\n")  # an escaped space ends the name, also before a letter


def _directive(found: re.Match[str]) -> str:
    indent, formula = found.groups()
    body = "\n".join(f"{indent}   {line.strip()}" for line in formula.split("\n"))
    return f"{indent}.. math::\n\n{body}\n"

"""Count habits of style to get rid of: `python .ci/tics.py [FOLDER ...]`, from the repository's root.

It prints numbers and fails nothing. A docstring begins with a verb, not with "What" or "Those", and the name of a local
says what it holds. With `--list` each place is printed too.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("src", "crowd/src", "studies", "benchmarks", "tests")
OPENING = re.compile(r"(What|Those|The same|Whether it|See)\b")
LOCALS = {"found", "told", "kept", "held", "theirs"}
SHORT = 5


def main() -> None:
    """Print the counts of each folder, and of all of them."""
    listed = "--list" in sys.argv
    folders = [name for name in sys.argv[1:] if name != "--list"] or [name for name in FOLDERS if Path(name).is_dir()]
    counts = {folder: Counter[str]() for folder in folders}
    for folder in folders:
        for path in sorted(Path(folder).rglob("*.py")):
            for line, tic in tics(path):
                counts[folder][tic] += 1
                if listed and tic != "docstrings":
                    print(f"{path}:{line}: {tic}")
    names = ["docstrings", *sorted({name for count in counts.values() for name in count} - {"docstrings"})]
    width = max(map(len, names), default=0)
    print(" " * width, *(f"{folder:>12}" for folder in (*folders, "all")))
    for name in names:
        numbers = [count[name] for count in counts.values()]
        print(f"{name:{width}}", *(f"{number:12,}" for number in (*numbers, sum(numbers))))


def tics(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and name of each habit in a file, and of each docstring."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            line = getattr(node, "lineno", 1)
            if text:
                yield line, "docstrings"
                if opening := OPENING.match(text):
                    yield line, f'docstring "{opening[1]} ..."'
                if len(text.split()) <= SHORT and not isinstance(node, ast.Module):
                    yield line, f"docstring of at most {SHORT} words"
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for name, line in _locals(node).items():
                if name in LOCALS:
                    yield line, f"local {name}"


def _locals(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, int]:
    """Return the names that a function assigns or takes, each with its first line, without those of inner functions."""
    names = {each.arg: each.lineno for each in ast.walk(function.args) if isinstance(each, ast.arg)}
    pending: list[ast.AST] = list(function.body)
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.setdefault(node.id, node.lineno)
        pending.extend(ast.iter_child_nodes(node))
    return names


if __name__ == "__main__":
    main()

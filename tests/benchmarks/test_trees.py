"""A source tree in a process of its own: latedrop comes from there, and a folder without it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.trees import answer_of, environment


def test_a_folder_without_the_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="expected a folder with the package latedrop"):
        environment(tmp_path)


def test_a_tree_is_where_latedrop_comes_from(tmp_path: Path) -> None:
    package = tmp_path / "latedrop"
    package.mkdir()
    (package / "__init__.py").write_text('__version__ = "of another tree"\n')
    (package / "tell.py").write_text("import json, latedrop\nprint(json.dumps(latedrop.__version__))\n")
    assert answer_of("latedrop.tell", [], tmp_path) == "of another tree"

"""A source tree of latedrop in a process of its own, so that two versions can be measured by the same benchmark.

A tree is the folder that holds the package: `src` of a clone. A process that is started with `environment(tree)`
imports latedrop from there and the benchmarks from here.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1]


def environment(tree: Path | None) -> dict[str, str]:
    """The variables of a process that takes latedrop from `tree`; from where this one does, where None."""
    if tree is None:
        import latedrop

        tree = Path(latedrop.__file__).parents[1]
    if not (tree / "latedrop" / "__init__.py").is_file():
        raise SystemExit(f"expected a folder with the package latedrop in it, as src of a clone; found {tree}.")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(tree.resolve()), str(HERE)])}


def answer_of(module: str, arguments: Sequence[str], tree: Path | None) -> Any:
    """What `python -m module ...` prints as its last line, read as JSON, with latedrop from `tree`."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, env=environment(tree), cwd=HERE, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    return json.loads(done.stdout.splitlines()[-1])


def digest() -> str:
    """Tells one version of the imported source from another: a digest of its files, and no path."""
    import latedrop

    folder = Path(latedrop.__file__).parent
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(f"{path.relative_to(folder).as_posix()}\0".encode() + path.read_bytes())
    return found.hexdigest()[:12]

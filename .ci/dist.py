"""Build the wheel and the sdist, install each into an empty environment, and try it far from the repository.

`python .ci/dist.py`, from a clone, leaves both files in dist/. Only the standard library and pip are needed; versions
are those of `constraints.txt`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
LARGEST = 8_000_000
"""Bytes, most of them trained counters; what is larger holds something that does not belong there."""


def main() -> None:
    """Build, install, try."""
    out = ROOT / "dist"
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="latedrop-dist-") as folder:
        where = Path(folder)
        with timed("build"):
            python = environment(where / "build")
            install(python, "build")
            run(python, "-m", "build", "--outdir", out, ROOT)
        made = sorted(out.iterdir())
        assert [path.suffix for path in made] == [".whl", ".gz"], made
        for path in made:
            size = path.stat().st_size
            print(f"{path.name}: {size / 1e6:.1f} MB", flush=True)
            assert size < LARGEST, f"{path.name} is larger than {LARGEST} bytes"
            check_whole(path)
            tried(path, where / path.suffix[1:])


def check_whole(path: Path) -> None:
    """Every file of the package is in it: code, pages, weights."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            names = set(wheel.namelist())
    else:
        with tarfile.open(path) as archive:
            names = {name.partition("/src/")[2] for name in archive.getnames()}
    source = ROOT / "src"
    wanted = {part.relative_to(source).as_posix() for part in source.rglob("*") if part.is_file()}
    missing = sorted(name for name in wanted - names if "__pycache__" not in name)
    assert not missing, f"{path.name} lacks {', '.join(missing)}"


def tried(path: Path, where: Path) -> None:
    """Install a file alone and then with extras, with a smoke test after each; check the types of the wheel."""
    python = environment(where / "env")
    script = Path(shutil.copy(ROOT / ".ci" / "smoke.py", where))
    with timed(f"{path.suffix} alone"):
        install(python, "torch")  # first and alone: any other version may bring gigabytes of CUDA libraries
        install(python, path)
        run(python, script, cwd=where)
    with timed(f"{path.suffix} with extras"):
        install(python, f"latedrop[console] @ {path.as_uri()}")
        run(python, script, "commands", cwd=where)
    if path.suffix == ".whl":
        with timed("types, from outside"):
            install(python, "mypy")
            run(python, "-m", "mypy", "--strict", script, cwd=where)


def environment(where: Path) -> Path:
    """An empty one; gives its interpreter."""
    venv.create(where, with_pip=True, clear=True)
    return where / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def install(python: Path, what: str | Path) -> None:
    """With the pinned versions."""
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", CONSTRAINTS, what)


def run(*words: str | Path, cwd: Path = ROOT) -> None:
    """Run a command; nothing of the repository is on its path, and pip's build environments have the pins too."""
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    environ = own | {"PIP_CONSTRAINT": str(CONSTRAINTS), "PYTHONUTF8": "1"}
    done = subprocess.run([str(word) for word in words], cwd=cwd, env=environ, check=False)
    if done.returncode:
        sys.exit(f"failed: {' '.join(map(str, words))}")


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Say how long it took."""
    begun = time.monotonic()
    yield
    print(f"{what}: {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()

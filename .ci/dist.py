"""Build wheel and sdist of both packages, install them into empty environments, and try them far from the repository.

`python .ci/dist.py`, from a clone, leaves the four files in dist/. Only the standard library and pip are needed;
versions are those of `constraints.txt`.
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
LARGEST = {"latedrop": 2_000_000, "latedrop_crowd": 5_000_000}
"""Bytes; most of latedrop-crowd are trained counters. What is larger holds something that does not belong there."""
SOURCES = {"latedrop": ROOT / "src", "latedrop_crowd": ROOT / "crowd" / "src"}


def main() -> None:
    """Build, install, try."""
    out = ROOT / "dist"
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="latedrop-dist-") as folder:
        where = Path(folder)
        with timed("build"):
            python = environment(where / "build")
            install(python, "build")
            for project in (ROOT, ROOT / "crowd"):
                run(python, "-m", "build", "--outdir", out, project)
        for path in sorted(out.iterdir()):
            size = path.stat().st_size
            print(f"{path.name}: {size / 1e6:.1f} MB", flush=True)
            assert size < LARGEST[package_of(path)], f"{path.name} is larger than {LARGEST[package_of(path)]} bytes"
            check_whole(path, SOURCES[package_of(path)])
        for suffix in (".whl", ".gz"):
            made = {package_of(path): path for path in out.iterdir() if path.suffix == suffix}
            assert set(made) == set(SOURCES), f"expected both packages as {suffix}; found {sorted(made)}"
            tried(made["latedrop"], made["latedrop_crowd"], where / suffix[1:])


def package_of(path: Path) -> str:
    """The package that a file was built from."""
    return path.name.partition("-")[0]


def check_whole(path: Path, source: Path) -> None:
    """Every file of the package is in it, code, pages and weights, and no other package."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            names = set(wheel.namelist())
    else:
        with tarfile.open(path) as archive:
            names = {name.partition("/src/")[2] for name in archive.getnames()} - {""}
    wanted = {part.relative_to(source).as_posix() for part in source.rglob("*") if part.is_file()}
    missing = sorted(name for name in wanted - names if "__pycache__" not in name)
    assert not missing, f"{path.name} lacks {', '.join(missing)}"
    packages = {name.partition("/")[0] for name in names if ".dist-info" not in name}
    more = packages - {part.partition("/")[0] for part in wanted}
    assert not more, f"{path.name} also has {', '.join(sorted(more))}"


def tried(library: Path, crowd: Path, where: Path) -> None:
    """Install latedrop alone, then with its commands, then latedrop-crowd, with a smoke test after each; and types."""
    python = environment(where / "env")
    script = Path(shutil.copy(ROOT / ".ci" / "smoke.py", where))
    with timed(f"{library.name} alone"):
        install(python, "torch")  # first and alone: any other version may bring gigabytes of CUDA libraries
        install(python, library)
        run(python, script, cwd=where)
    with timed(f"{library.name} with commands"):
        install(python, f"latedrop[cli] @ {library.as_uri()}")
        run(python, script, "commands", cwd=where)
    with timed(crowd.name):
        install(python, f"latedrop-crowd[console] @ {crowd.as_uri()}")
        run(python, script, "crowd", cwd=where)
    if library.suffix == ".whl":
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

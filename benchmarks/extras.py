"""What each extra brings and weighs: packages, and megabytes on disk.

    python -m benchmarks.extras           # where all extras are installed, as `make test` leaves them
    python -m benchmarks.pages            # then writes the table of docs/install.md

Read from the metadata of what is installed, with everything that each requirement needs itself; nothing is downloaded.
An extra's packages are those that it adds to latedrop alone, so packages of several extras count in each.
"""

from __future__ import annotations

import platform
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.timing import write

FOR = {
    "none": "`calibrate`, `predict`, all of the Python core",
    "cli": "the [command line](command_line.md)",
    "plots": "[plots](plots.md), HTML reports",
    "pandas": "`Prediction.to_pandas`; tables are taken without it, too",
    "parquet": "parquet and feather files on the command line, and [large csv files](command_line.md#large-files)",
    "images": "`--images` on the command line",
    "safetensors": "weights, and large calibrations",
    "isotonic": "isotonic [intervals](intervals.md)",
    "neighbours": "the [terms](terms.md) `neighbours` and `local_errors`",
    "demo": "`latedrop demo`",
    "crowd": "[people counting](crowd.md)",
    "serve": "[`latedrop serve`](serving.md), [`latedrop explore`](explore.md)",
    "ray": "[a cluster](cluster.md); not in `all`",
    "onnx": "[ONNX files](onnx.md): to write them, and to run them",
    "video": "videos in `latedrop crowd count`",
    "console": "the operator's [console](console.md), `latedrop crowd watch`",
    "all": "all of these but `ray`",
    "docs": "the documentation site of this repository",
    "dev": "the tests and checks of this repository",
}


def main() -> None:
    record = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    print(write("extras", record | {"extras": measured()}))


def measured() -> dict[str, dict[str, Any]]:
    """For each extra: what it names, how many packages it adds, their bytes; "none" is latedrop without one."""
    alone = needed(Requirement("latedrop")) - {"latedrop"}
    found = {"none": _entry("latedrop", alone)}
    for extra in distribution("latedrop").metadata.get_all("Provides-Extra") or ():
        found[extra] = _entry(f"latedrop[{extra}]", needed(Requirement(f"latedrop[{extra}]")) - alone - {"latedrop"})
    return found


def needed(requirement: Requirement, seen: set[tuple[str, str]] | None = None) -> set[str]:
    """Names of the packages that a requirement installs, itself among them."""
    seen = set() if seen is None else seen
    name = canonicalize_name(requirement.name)
    for extra in ("", *sorted(requirement.extras)):
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        for inner in map(Requirement, distribution(name).requires or ()):
            if inner.marker is None or inner.marker.evaluate({"extra": extra}):
                needed(inner, seen)
    return {package for package, _ in seen}


def markdown(record: dict[str, Any]) -> str:
    lines = ["| extra | for | brings | packages | on disk |", "| --- | --- | --- | ---: | ---: |"]
    for extra in (name for name in FOR if name in record["extras"]):
        purpose, entry = FOR[extra], record["extras"][extra]
        name = extra if extra == "none" else f"`{extra}`"
        brings = "" if extra == "all" else ", ".join(entry["names"])
        lines.append(f"| {name} | {purpose} | {brings} | {entry['packages']} | {_size(entry['bytes'])} |")
    return "\n".join(lines)


def _entry(what: str, packages: set[str]) -> dict[str, Any]:
    return {"names": _named(what), "packages": len(packages), "bytes": sum(map(_bytes, packages))}


def _named(what: str) -> list[str]:
    """The packages that an extra lists, those of extras inside it too."""
    extra = next(iter(Requirement(what).extras), "")
    names = []
    for inner in map(Requirement, distribution("latedrop").requires or ()):
        if (inner.marker is None) != (extra == "") or (inner.marker and not inner.marker.evaluate({"extra": extra})):
            continue
        names.append(inner.name)
    return names


def _bytes(package: str) -> int:
    """On disk, of the files that its installation wrote."""
    files = [Path(str(file.locate())) for file in distribution(package).files or ()]
    return sum(path.stat().st_size for path in files if path.is_file())


def _size(count: int) -> str:
    """Two digits: more would change with every release of a package.

    >>> _size(18_400_000), _size(2_345_678_901), _size(123)
    ('18 MB', '2.3 GB', '0.0 MB')
    """
    if count >= 1e9:
        return f"{count / 1e9:.1f} GB"
    if count >= 1e8:
        return f"{round(count / 1e6, -1):.0f} MB"
    return f"{count / 1e6:.0f} MB" if count >= 1e7 else f"{count / 1e6:.1f} MB"


if __name__ == "__main__":
    main()

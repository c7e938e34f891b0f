"""Look for known vulnerabilities of the pinned versions: `make audit`; with `AUDIT_ARGS=--strict` they fail it.

It installs pip-audit into build/audit and asks PyPI for advisories. Without a network, or where an index knows no
advisories, it says so. What is found is printed; a new advisory breaks no build unless `--strict` asks for that.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOME = ROOT / "build" / "audit"
PYTHON = HOME / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def main() -> int:
    """Print what is known; the exit status."""
    parser = argparse.ArgumentParser(description="Known vulnerabilities of the versions in constraints.txt.")
    parser.add_argument(
        "--strict", action="store_true", help="fail where one is found, or where nothing could be asked"
    )
    strict = parser.parse_args().strict
    try:
        audited, found = audit()
    except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error) or repr(error)).strip().splitlines()
        print(f"make audit: not done: {''.join(said[-1:])[:200]}")
        return int(strict)
    for line in found:
        print(line)
    print(f"make audit: {audited} of the pinned versions are known to the index; {len(found)} advisories.")
    return int(strict and (bool(found) or not audited))


def audit() -> tuple[int, list[str]]:
    """How many versions could be looked up, and a line for each advisory."""
    if not PYTHON.exists():
        _run(sys.executable, "-m", "venv", HOME).check_returncode()
    _run(PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "-q", "pip-audit").check_returncode()
    options = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "-f", "json"]
    done = _run(PYTHON, "-m", "pip_audit", "-r", ROOT / "constraints.txt", *options)  # 1 where something is found
    if not done.stdout.strip():
        raise ValueError(done.stderr)
    packages = [package for package in json.loads(done.stdout)["dependencies"] if "vulns" in package]
    return len(packages), [
        f"{package['name']} {package['version']}: {one['id']}; fixed in: {', '.join(one['fix_versions'])}"
        for package in packages
        for one in package["vulns"]
    ]


def _run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)


if __name__ == "__main__":
    sys.exit(main())

"""Say which tests were skipped, by reason, and fail where `.ci/skips.txt` does not list the reason.

`python .ci/skips.py build` reads the JUnit files that `make test` and `make slow` leave in build/.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]


def main(folder: Path) -> None:
    """Print the table, then what is not listed."""
    files = sorted(folder.glob("*.xml"))
    if not files:
        sys.exit(f"expected the results of `make test` in {folder}; there are none.")
    found = sum(map(reasons, files), Counter())
    wrong = unlisted(found, (ROOT / ".ci" / "skips.txt").read_text(encoding="utf-8"))
    print(f"{found.total()} skipped in {', '.join(path.name for path in files)}")
    for reason, count in found.most_common():
        print(f"{count:6}  {'NOT LISTED: ' if reason in wrong else ''}{reason}")
    if wrong:
        sys.exit("expected only skips that .ci/skips.txt lists. Install what is missing, or list the reason.")


def reasons(path: Path) -> Counter[str]:
    """How many tests of a JUnit file were skipped for each reason; a file that was skipped whole is one."""
    found: Counter[str] = Counter()
    for skipped in ElementTree.parse(path).iter("skipped"):
        reason = skipped.get("message") or "no reason"
        if reason == "collection skipped":
            reason = ast.literal_eval(skipped.text or "")[2]  # (path, line, reason)
        found[reason.removeprefix("Skipped: ")] += 1
    return found


def unlisted(found: Counter[str], listed: str, data: Path = ROOT.parent / "shared" / "data") -> set[str]:
    """The reasons without a pattern; where there is a folder of data, its sets have to be there."""
    patterns = [line for line in listed.splitlines() if line and not line.startswith("#")]
    if data.is_dir():
        patterns = [line for line in patterns if "../shared/data" not in line]
    return {reason for reason in found if not any(fnmatchcase(reason, pattern) for pattern in patterns)}


if __name__ == "__main__":
    main(Path(sys.argv[1]))

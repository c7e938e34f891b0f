"""Run the tutorials again: `python docs/make_tutorials.py [PAGE ...]`, from the repository's root.

The code blocks of a page, such as `start` or `tutorial_text`, run in order, in a folder of their own. What a block
prints goes into the `text` block that follows it, with long lines wrapped; a picture that the page saves goes to
docs/images.
"""

import contextlib
import io
import os
import re
import shutil
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import matplotlib

DOCS = Path(__file__).parent.resolve()
PAGES = ("start", "classification", *sorted(path.stem for path in DOCS.glob("tutorial_*.md")))
WIDEST = 88
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n^```text\n(?P<printed>.*?)^```\n)?", re.MULTILINE | re.DOTALL)


def main() -> None:
    """Write the page and the picture of each."""
    matplotlib.rc_file(DOCS / "matplotlibrc")
    matplotlib.use("Agg")
    for name in sys.argv[1:] or PAGES:
        page = DOCS / f"{name}.md"
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            page.write_text(rerun(page.read_text(encoding="utf-8")), encoding="utf-8")
            if Path(f"{name}.png").exists():
                shutil.copy(f"{name}.png", DOCS / "images")
            os.chdir(DOCS.parent)
        print(f"{name}: done", flush=True)


def rerun(page: str) -> str:
    """Return the page with what its blocks print now."""
    names: dict[str, Any] = {}

    def again(block: re.Match[str]) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(block["code"], "tutorial", "exec"), names)
        if block["printed"] is None:
            return block[0]
        lines = [part for line in out.getvalue().splitlines() for part in textwrap.wrap(line, WIDEST) or [""]]
        return f"```python\n{block['code']}```\n\n```text\n" + "".join(f"{line}\n" for line in lines) + "```\n"

    return BLOCK.sub(again, page)


if __name__ == "__main__":
    main()

"""Make docs/images/report.png again: the beginning of the demo's report, as a browser shows it.

`python docs/make_report_image.py`, from the repository's root. The demo runs for that. It needs playwright (`pip install ".[demo,dev]"`) and Chromium.
"""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import sync_playwright

from latedrop.cli.demo import write

DOCS = Path(__file__).parent
WIDTH, HEIGHT = 1080, 1960


def main() -> None:
    """Write the page into a folder that goes away, and draw it."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with TemporaryDirectory() as folder, sync_playwright() as play:
        write(Path(folder), 0, as_json=False)
        page = play.chromium.launch(executable_path=browser, args=["--no-sandbox"]).new_page(
            viewport={"width": WIDTH, "height": HEIGHT}
        )
        page.goto((Path(folder) / "report.html").as_uri())
        page.screenshot(path=DOCS / "images" / "report.png")


if __name__ == "__main__":
    main()

"""Make docs/images/report.png again: the beginning of a report, as a browser shows it.

`make demo`, then `python docs/make_report_image.py`, from the repository's root. It needs playwright
(`pip install ".[dev]"`) and Chromium.
"""

import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

DOCS = Path(__file__).parent
WIDTH, HEIGHT = 1080, 1960


def main() -> None:
    """Draw the page that `make demo` wrote."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as play:
        page = play.chromium.launch(executable_path=browser, args=["--no-sandbox"]).new_page(
            viewport={"width": WIDTH, "height": HEIGHT}
        )
        page.goto(Path("latedrop-demo", "report.html").absolute().as_uri())
        page.screenshot(path=DOCS / "images" / "report.png")


if __name__ == "__main__":
    main()

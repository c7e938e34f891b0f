"""`latedrop explore` in a browser: the level moves coverage, a clicked row is explained, slices are there.

With LATEDROP_SCREENSHOTS=FOLDER the picture of the documentation is written there.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import worn
from chromium import launch, needs_chromium

playwright = pytest.importorskip("playwright.sync_api", reason="playwright opens the page")
pytest.importorskip("fastapi", reason="the page is an extra")
pytest.importorskip("uvicorn", reason="the page is an extra")
pytestmark = [needs_chromium, pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")]

PATIENCE = 60_000  # milliseconds
SHOTS = os.environ.get("LATEDROP_SCREENSHOTS")
CODE = "import sys; from latedrop.cli import main; main(sys.argv[1:])"


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    worn.write(tmp_path, outputs=2)
    words = [*worn.words(tmp_path, outputs=2), "--unit", "mm,dB", "--port", "0"]
    running = subprocess.Popen([sys.executable, "-c", CODE, *words], stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert running.stderr is not None
    lines = []
    for line in running.stderr:
        lines.append(line)
        found = re.search(r"http://127\.0\.0\.1:\d+/", line)
        if found:
            yield found[0]
            break
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=60)
    assert running.returncode in (0, 130), lines


def sees(page: Any, where: str, pattern: str) -> None:
    playwright.expect(page.locator(where).first).to_have_text(re.compile(pattern), timeout=PATIENCE)


def test_rows_are_explored(address: str) -> None:
    with playwright.sync_playwright() as play:
        browser = launch(play)
        page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
        page.set_default_timeout(PATIENCE)
        wrong: list[str] = []
        asked: list[str] = []
        page.on("console", lambda said: wrong.append(said.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(address)
        sees(page, "#coverage", r"\d+\.\d %")
        sees(page, "#level-said", "90 %")
        before = page.locator("#coverage").inner_text(), page.locator("#width").inner_text()
        page.locator("#level").fill("0.5")
        sees(page, "#level-said", "50 %")
        playwright.expect(page.locator("#coverage")).not_to_have_text(before[0])
        playwright.expect(page.locator("#width")).not_to_have_text(before[1])
        page.locator("#level").fill("0.9")
        sees(page, "#coverage", re.escape(before[0]))

        page.locator("#worst button").first.click()
        sees(page, "#row-name", r"Line \d+")
        sees(page, "#row-badge", "outside")
        sees(page, "#shares div", r"\d %")
        width = "nodes => nodes.map(node => node.getBoundingClientRect().width)"
        assert sum(page.locator("#shares u").evaluate_all(width)) == pytest.approx(
            64, abs=2
        )  # as wide as one whole bar
        sees(page, "#verdict", "90 % intervals hold")
        first = page.locator("#row-name").inner_text()
        page.locator("#chart").focus()
        page.keyboard.press("ArrowRight")
        playwright.expect(page.locator("#row-name")).not_to_have_text(first)

        page.select_option("#slice", "speed")
        assert page.locator("#groups > div").count() == 5
        page.select_option("#across", "of heat")
        sees(page, "#chart .u-label, #shown", ".*")
        second = page.locator("#row-name").inner_text()
        box = page.locator("#chart .u-over").bounding_box()
        for y in (0.5, 0.45, 0.55, 0.4, 0.6):  # some point is near
            page.mouse.click(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * y)
        playwright.expect(page.locator("#row-name")).not_to_have_text(second)

        page.select_option("#output", "1")
        sees(page, "#width-said", "dB")
        if SHOTS:
            _shot(page)
        page.set_viewport_size({"width": 360, "height": 740})
        for _ in range(100):  # the chart follows the window a moment later
            too_wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            if too_wide == 0:
                break
            page.wait_for_timeout(50)
        assert too_wide == 0
        assert wrong == []
        assert all(url.startswith(address) for url in asked)
        browser.close()


def _shot(page: Any) -> None:
    page.set_viewport_size({"width": 1280, "height": 1080})
    page.select_option("#output", "0")
    page.select_option("#across", "own prediction")
    page.wait_for_timeout(1500)
    page.locator("#worst button").nth(1).click()
    page.wait_for_timeout(800)
    page.screenshot(path=Path(SHOTS or "") / "explore.jpg", type="jpeg", quality=84)

"""The console in a browser: numbers move, a zone is drawn, an alarm comes and is acknowledged, a kill loses nothing.

With LATEDROP_SCREENSHOTS=FOLDER the pictures of the documentation are written there.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

from chromium import launch, needs_chromium
from counters import shipped_counter
from latedrop_crowd.console.counter import LiveCounter
from latedrop_crowd.console.zones import Rule

playwright = pytest.importorskip("playwright.sync_api", reason="playwright opens the console")
pytest.importorskip("fastapi", reason="the console is an extra")
uvicorn = pytest.importorskip("uvicorn", reason="the console is an extra")
pytestmark = [needs_chromium, pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")]

PATIENCE = 90_000  # milliseconds; a busy machine needs long to begin
SHOTS = os.environ.get("LATEDROP_SCREENSHOTS")
TILES = "[...document.querySelectorAll('.tile')]"
CODE = "import sys; from latedrop.cli import main; main(sys.argv[1:])"


class Demo:
    """`latedrop crowd watch --demo` as a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, 0
        self.start()

    def start(self) -> None:
        words = ["crowd", "watch", "--demo", "--port", str(self.port), "--hold", "0.3", "--propose", "5"]
        words += ["--memory", str(self.folder / "console.sqlite")]
        self.process = subprocess.Popen([sys.executable, "-c", CODE, *words], stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            actual = re.search(r"http://127\.0\.0\.1:(\d+)/", line)
            if actual:
                self.port = int(actual[1])
                return
        raise AssertionError("the console did not start")

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def end(self, how: signal.Signals) -> int:
        self.process.send_signal(how)
        self.process.communicate(timeout=60)
        return self.process.returncode


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    running = Demo(tmp_path)
    yield running
    if running.process.poll() is None:
        running.end(signal.SIGKILL)


class Opened:
    """A page, with what it said to the console and what it asked for."""

    def __init__(self, browser: Any, address: str, *, wait: bool = True, **settings: Any) -> None:
        self.page = browser.new_context(**{"viewport": {"width": 1440, "height": 900}, **settings}).new_page()
        self.page.set_default_timeout(PATIENCE)
        self.wrong: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda said: self.wrong.append(said.text))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("dialog", lambda dialog: dialog.accept())
        self.page.goto(address)
        if wait:
            self.sees("#count", r"\d+")

    def sees(self, where: str, pattern: str) -> None:
        playwright.expect(self.page.locator(where).first).to_have_text(re.compile(pattern), timeout=PATIENCE)

    def draw(self, corners: list[tuple[float, float]], name: str, limit: int) -> None:
        self.page.click("#draw")
        box = self.page.locator("#frame").bounding_box()
        for x, y in corners:
            self.page.mouse.click(box["x"] + x * box["width"], box["y"] + y * box["height"])
        self.page.keyboard.press("Enter")
        self.page.fill("#zone-name", name)
        self.page.fill("#zone-limit", str(limit))
        self.page.click("#zone-dialog button.main")
        self.sees(f"#zones li:has-text('{name}') .number", r"\d+")

    def shot(self, name: str, wait: float = 0.0) -> None:
        if SHOTS:
            self.page.wait_for_timeout(1000 * wait)
            self.page.screenshot(path=Path(SHOTS) / f"console_{name}.jpg", type="jpeg", quality=84)

    def beyond(self) -> int:
        """Pixels that the page is wider than the window, once charts have followed a new size."""
        width = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        for _ in range(50):
            actual: int = self.page.evaluate(width)
            if actual == 0:
                break
            self.page.wait_for_timeout(100)
        return actual


@pytest.mark.slow
def test_a_shift_at_the_console(demo: Demo) -> None:
    with playwright.sync_playwright() as play:
        browser = launch(play)
        opened = Opened(browser, demo.address)
        page = opened.page
        counted = {page.locator("#interval").inner_text()}
        end = time.monotonic() + 60
        while len(counted) < 3 and time.monotonic() < end:
            counted.add(page.locator("#interval").inner_text())
            page.wait_for_timeout(200)
        assert len(counted) >= 3  # numbers move

        opened.draw([(0.07, 0.36), (0.52, 0.32), (0.57, 0.93), (0.09, 0.95)], "Stairs", 0)
        opened.sees("#alarms", "Stairs: more than 0 people")
        opened.sees("#zones li:has-text('Stairs') .said", "above the limit.*% likely")
        page.click("#alarms button")
        playwright.expect(page.locator("#alarms > div")).to_have_count(0, timeout=PATIENCE)
        opened.sees("#events", "acknowledged at")

        page.click("[data-layer=doubt]")
        page.click("#label")
        page.locator("#heads").click(position={"x": 200, "y": 100})
        page.locator("#heads").click(position={"x": 300, "y": 150})
        assert page.input_value("#label-people") == "2"
        page.locator("#heads").click(position={"x": 300, "y": 150})
        assert page.input_value("#label-people") == "1"
        page.fill("#label-people", "14")
        page.click("#label-dialog button.main")
        opened.sees("#toast", "With 4 more labels the counts are fitted to this scene")
        opened.sees("#label-count", "1 frame labelled")
        playwright.expect(page.locator("#chart canvas")).to_be_visible()

        page.goto("about:blank")
        demo.end(signal.SIGKILL)
        demo.start()
        page.goto(demo.address)
        opened.sees("#count", r"\d+")
        opened.sees("#zones li:has-text('Stairs') .number", r"\d+")
        opened.sees("#label-count", "1 frame labelled")
        opened.sees("#events", "Stairs: more than 0 people")
        page.set_viewport_size({"width": 360, "height": 740})
        assert opened.beyond() == 0
        assert opened.wrong == []
        assert {url.partition("/api/")[0].partition("/page/")[0].rstrip("/") for url in opened.asked} <= {
            demo.address.rstrip("/"), "about:blank",
        }  # fmt: skip
        browser.close()
    assert demo.end(signal.SIGINT) in (0, 130)


@contextmanager
def served(folder: Path, sources: dict[str, Any], limits: dict[str, float], **settings: Any) -> Iterator[str]:
    """A console in this process for sources of frames; its address."""
    from latedrop.web import listening
    from latedrop_crowd.console.notices import Notices
    from latedrop_crowd.console.server import make_app
    from latedrop_crowd.console.sources import Source
    from latedrop_crowd.console.store import Store
    from latedrop_crowd.console.watch import Settings, Watch

    store = Store(folder / "a.sqlite")
    for name, limit in limits.items():
        store.change_zone(store.zones(name)[0].id, "Whole picture", limit)
    opened = [Source(name, True, frames) for name, frames in sources.items()]
    app = make_app(Watch(opened, *shipped_counter(), store, Settings(wait=0.2, **settings), Notices([])))
    wire, address = listening("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    thread = Thread(target=server.run, args=([wire],), daemon=True)
    thread.start()
    yield address
    app.state.hub.end()
    server.should_exit = True
    thread.join(20)


def scene() -> Any:
    from latedrop_crowd.scenes import make_scenes

    return make_scenes(0, 6, 0).frames[0].pixels


def standing() -> Iterator[Any]:
    """A camera whose picture does not change."""
    pixels = scene()
    while True:
        yield pixels
        time.sleep(0.1)


def test_a_source_that_breaks_has_no_number_and_no_colour(tmp_path: Path) -> None:
    pixels, broken = scene(), Event()

    def frames() -> Iterator[Any]:
        while not broken.wait(0.1):
            yield pixels
        raise OSError

    with (
        served(tmp_path, {"Door": frames, "Gate": frames}, {"Gate": 1e5}) as address,
        playwright.sync_playwright() as play,
    ):
        opened = Opened(launch(play), f"{address}#1")
        opened.sees("#zones .said", "below the limit")
        broken.set()
        opened.sees("#zones .said", "^no picture$")
        opened.sees("#count", r"^\D*$")
        opened.sees("#sources button:has-text('Door')", "no picture")  # not the one that is looked at
        assert opened.page.locator("#sources .green, #zones .green").count() == 0
        broken.clear()
        opened.sees("#zones .said", "below the limit")
        opened.sees("#sources button:has-text('Door') b", r"\d+")
        assert opened.wrong == []


def test_the_console_says_what_it_does_not_know(tmp_path: Path) -> None:
    """A dark picture has no number; a change that must last is said at once; a picture that stands still has an age."""
    pixels, dark, still = scene(), Event(), Event()

    def frames() -> Iterator[Any]:
        while True:
            if not still.is_set():
                yield 0 * pixels if dark.is_set() else pixels
            time.sleep(0.1)

    with (
        served(tmp_path, {"Door": frames}, {"Door": 1e5}, rule=Rule(hold=1e3)) as address,
        playwright.sync_playwright() as play,
    ):
        opened = Opened(launch(play), address)
        opened.sees("#zones .said", "^below the limit")
        opened.sees("#rate", r"frames per second counted|a frame every \d+ s counted")
        opened.sees("#age", r"^\d+\.\d s old$")
        opened.sees("#width", "^Its width follows the count only: neither dropout nor leverage tells more")
        opened.page.click("[data-layer=faint]")
        opened.sees("#faint-said", r"Of \d+ such regions on frames with known people \d+ had nobody in them")
        dark.set()
        opened.sees("#badge", "^Cannot count$")
        opened.sees("#reasons", "^too dark: brightness 0.00")
        opened.sees("#count", r"^\D$")
        opened.sees("#zones .word", "^below the limit; now: cannot tell$")
        still.set()
        opened.sees("#age", r"^picture is \d+ s old$")
        opened.page.click("#wall-button")
        opened.sees(".tile .range", "^cannot count$")
        opened.sees(".tile .word", "^too dark")
        opened.sees(".tile.frozen .age", r"\d s old$")
        assert opened.wrong == []


def test_the_wall_can_be_read_from_afar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = LiveCounter.count

    def many(*arguments: Any) -> Any:  # three digits are the widest that fit
        actual = plain(*arguments)
        return replace(actual, amounts=[replace(a, mean=12 * a.mean, variance=40 * a.variance) for a in actual.amounts])

    monkeypatch.setattr(LiveCounter, "count", many)
    cameras = dict.fromkeys(("Calm", "Crowded", "Free"), standing)
    with (
        served(tmp_path, cameras, {"Calm": 1e5, "Crowded": 0.0}) as address,
        playwright.sync_playwright() as play,
    ):
        opened = Opened(launch(play), f"{address}?wall", viewport={"width": 1920, "height": 1080})
        opened.sees(".tile.red .name", "^Crowded$")
        page = opened.page
        for name, word in {"Crowded": "above the limit", "Calm": "below the limit", "Free": "no limit set"}.items():
            opened.sees(f".tile:has-text('{name}') .word", f"^{word}$")
            opened.sees(f".tile:has-text('{name}') .age", r"s old$")
        ranked = sorted(
            page.evaluate(f"{TILES}.map(t => [Number(t.style.order), t.querySelector('.name').textContent])")
        )
        assert [name for _, name in ranked] == ["Crowded", "Calm", "Free"]
        for part, least in (("output", 90), (".range", 90), (".word", 40)):
            sizes = page.evaluate(f"{TILES}.map(t => parseFloat(getComputedStyle(t.querySelector('{part}')).fontSize))")
            assert min(sizes) >= least
        area = "n => n.getBoundingClientRect().width * n.getBoundingClientRect().height"
        *tiles, wall = page.evaluate(f"[...{TILES}, document.getElementById('wall')].map({area})")
        assert sum(tiles) > 0.9 * wall  # three cameras leave no cell empty
        # No part of a tile is cut off, and nothing needs scrolling.
        beyond = "n => Math.max(n.scrollWidth - n.clientWidth, n.scrollHeight - n.clientHeight)"
        assert max(page.evaluate(f"[document.getElementById('wall'), ...{TILES}].map({beyond})")) <= 1
        page.set_viewport_size({"width": 1280, "height": 720})  # a small screen scrolls; numbers are not cut off
        assert max(page.evaluate(f"{TILES}.map({beyond})")) <= 1
        page.click(".tile:has-text('Calm')")
        opened.sees("#where", "^Calm$")
        assert opened.wrong == []


TONES = """
window.tones = 0;
const tone = { frequency: {}, connect() {}, start() { window.tones += 1; }, stop() {} };
window.AudioContext = class { createOscillator() { return tone; } };
"""


def test_sound_and_heat_map(tmp_path: Path) -> None:
    """A tone for each new alarm once sound is on, none before; the heat map of what the timeline shows."""
    with (
        served(tmp_path, {"Door": standing}, {}, rule=Rule(hold=0.1)) as address,
        playwright.sync_playwright() as play,
    ):
        opened = Opened(launch(play), "about:blank", wait=False)
        page = opened.page
        page.add_init_script(TONES)
        page.goto(address)
        opened.sees("#count", r"\d+")
        opened.draw([(0.1, 0.1), (0.9, 0.1), (0.9, 0.9)], "Quiet", 0)
        opened.sees("#alarms", "Quiet: more than 0 people")
        assert page.evaluate("window.tones") == 0  # off by default
        page.click("#sound")
        opened.sees("#sound", "^Sound on$")
        opened.draw([(0.04, 0.04), (0.96, 0.04), (0.96, 0.96), (0.04, 0.96)], "Loud", 0)
        opened.sees("#alarms", "and 1 more")
        assert page.evaluate("window.tones") == 1
        page.click("#alarms button.all")  # acknowledged: no tone
        playwright.expect(page.locator("#alarms > div")).to_have_count(0, timeout=PATIENCE)
        assert page.evaluate("window.tones") == 1

        with page.expect_response(lambda answer: "/heat?" in answer.url and answer.status == 200):
            page.click("[data-layer=heat]")
        opened.sees("#heat-said", r"^Heat map: where people were from .* to .*, the mean of \d+ frames\.$")
        assert opened.wrong == []


def test_zones_are_edited_and_labels_deleted_on_the_page(tmp_path: Path) -> None:
    with served(tmp_path, {"Door": standing}, {}) as address, playwright.sync_playwright() as play:
        opened = Opened(launch(play), address)
        page = opened.page
        opened.draw([(0.1, 0.1), (0.5, 0.1), (0.5, 0.9)], "Stairs", 3)
        before = page.locator("#overlay polygon").first.get_attribute("points")
        page.click("button[title='Edit Stairs']")
        page.fill("#zone-name", "Steps")
        page.click("#zone-dialog button.main")
        opened.sees("#zones li:has-text('Steps') .number", r"\d+")
        assert page.locator("#overlay polygon").first.get_attribute("points") == before
        page.click("button[title='Edit Steps']")
        page.click("#zone-shape")
        box = page.locator("#frame").bounding_box()
        for x, y in ((0.5, 0.2), (0.9, 0.2), (0.9, 0.8), (0.5, 0.8)):
            page.mouse.click(box["x"] + x * box["width"], box["y"] + y * box["height"])
        page.keyboard.press("Enter")
        assert page.input_value("#zone-name") == "Steps"
        page.click("#zone-dialog button.main")
        playwright.expect(page.locator("#overlay polygon").first).not_to_have_attribute(
            "points", before, timeout=PATIENCE
        )
        assert page.locator("#zones > li").count() == 2
        page.click("#label")
        page.fill("#label-people", "7")
        page.click("#label-dialog button.main")
        opened.sees("#label-count", "1 frame labelled")
        page.click("#labelled summary")
        page.click("#labelled button")
        opened.sees("#toast", "With 5 more labels")
        opened.sees("#label-count", "none yet")
        assert opened.wrong == []


@pytest.mark.slow
def test_pictures_of_the_documentation(demo: Demo) -> None:
    with playwright.sync_playwright() as play:
        browser = launch(play)
        opened = Opened(browser, demo.address, color_scheme="dark", viewport={"width": 1440, "height": 960})
        opened.draw([(0.07, 0.36), (0.52, 0.32), (0.57, 0.93), (0.09, 0.95)], "Stairs", 9)
        opened.draw([(0.62, 0.2), (0.97, 0.22), (0.98, 0.62), (0.64, 0.6)], "Platform", 4)
        opened.page.fill("#zones li:first-child input", "30")
        opened.page.press("#zones li:first-child input", "Tab")
        opened.sees("#alarms", r"more than \d+ people")
        opened.shot("dark", 5.0)
        for button in ("density", "doubt", "faint"):
            opened.page.click(f"[data-layer={button}]")
        opened.page.click("#theme")
        with opened.page.expect_response(lambda answer: "/layers/doubt" in answer.url and answer.status == 200):
            pass
        opened.shot("doubt", 2.0)
        opened.page.click("#label")
        opened.page.locator("#label-picture").wait_for()
        for x, y in ((0.2, 0.3), (0.5, 0.4), (0.7, 0.25)):
            box = opened.page.locator("#heads").bounding_box()
            opened.page.mouse.click(box["x"] + x * box["width"], box["y"] + y * box["height"])
        opened.shot("label", 1.0)
        opened.page.keyboard.press("Escape")
        for button in ("density", "doubt", "faint"):
            opened.page.click(f"[data-layer={button}]")
        if opened.page.locator("#alarms button").count():
            opened.page.locator("#alarms button").last.click()
        opened.shot("light", 12.0)
        with opened.page.expect_response(lambda answer: "/heat?" in answer.url and answer.status == 200):
            opened.page.click("[data-layer=heat]")
        opened.sees("#heat-said", "the mean of")
        opened.shot("heat", 2.0)
        opened.page.click("[data-layer=heat]")
        opened.page.click("#wall-button")
        opened.sees(".tile .age", "s old$")
        opened.shot("wall", 3.0)
        small = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 3}
        phone = Opened(browser, demo.address, **small, color_scheme="dark")
        phone.shot("phone", 4.0)
        browser.close()


@pytest.mark.slow
def test_animation_of_the_documentation(demo: Demo, tmp_path: Path) -> None:
    """Screenshots, one after the other, as an animated GIF."""
    from PIL import Image

    frames: list[Any] = []
    lasts: list[int] = []

    def film(count: int = 1, milliseconds: int = 350, every: int = 350) -> None:
        for _ in range(count):
            image = Image.open(BytesIO(page.screenshot())).convert("RGB")
            frames.append(image.resize((800, round(image.height * 800 / image.width))))
            lasts.append(milliseconds)
            page.wait_for_timeout(every)

    with playwright.sync_playwright() as play:
        browser = launch(play)
        opened = Opened(browser, demo.address, color_scheme="dark", viewport={"width": 1440, "height": 880})
        page = opened.page
        page.fill("#zones li:first-child input", "40")
        page.press("#zones li:first-child input", "Tab")
        page.wait_for_timeout(8000)  # the timeline fills
        film(6)
        page.click("#draw")
        page.locator("#hint").wait_for()
        page.wait_for_timeout(500)  # the picture has moved
        for x, y in ((0.07, 0.36), (0.52, 0.32), (0.57, 0.93), (0.09, 0.95)):
            box = page.locator("#frame").bounding_box()
            page.mouse.click(box["x"] + x * box["width"], box["y"] + y * box["height"])
            film(1, 300, 100)
        page.keyboard.press("Enter")
        page.fill("#zone-name", "Stairs")
        page.fill("#zone-limit", "4")
        film(1, 1100, 0)
        page.click("#zone-dialog button.main")
        opened.sees("#zones li:has-text('Stairs') .number", r"\d+")
        film(3)
        opened.sees("#alarms", "Stairs: more than 4 people")
        film(3, 500)
        page.click("#alarms button")
        for button in ("density", "doubt", "faint"):
            page.click(f"[data-layer={button}]")
        with page.expect_response(lambda answer: "/layers/doubt" in answer.url and answer.status == 200):
            pass
        page.wait_for_timeout(1000)
        film(5)
        browser.close()
    whole = Image.fromarray(np.concatenate([np.asarray(frame) for frame in frames[::4]]))
    shared = whole.quantize(200, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)  # red and amber are rare
    made = [frame.quantize(palette=shared, dither=Image.Dither.NONE) for frame in frames]
    path = Path(SHOTS or tmp_path) / "console.gif"
    made[0].save(path, save_all=True, append_images=made[1:], duration=lasts, loop=0, optimize=True)

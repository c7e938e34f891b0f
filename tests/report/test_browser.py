"""The report in a browser: nothing fails, nothing is fetched, marks tell their numbers, it fits screens and paper."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import latedrop
from chromium import launch, needs_chromium
from latedrop.report import write_report
from networks import Net

playwright = pytest.importorskip("playwright.sync_api", reason="playwright opens the report")
pytestmark = needs_chromium

WIDE, PHONE = {"width": 1100, "height": 900}, {"width": 360, "height": 740}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page about a model with two outputs, of long names and very different units."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 30), nn.Tanh(), nn.Linear(30, 2))
    factor = torch.tensor([1e6, 1e-6])
    x = torch.randn(500, 3)
    with torch.no_grad():
        y = (net(x) + (0.1 + 0.2 * x[:, :1].abs()) * torch.randn(500, 2)) * factor
    model = Net(lambda model, x: model.net(x) * model.factor, net=net, factor=factor)
    uq = latedrop.calibrate(model, (x[:250], y[:250]), progress=False)
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_report(
        path,
        title="A model whose name is rather long, to see whether it fits",
        calibration=uq.calibration,
        prediction=uq.predict(x[250:]),
        target=y[250:],
        names=["price of a house with a garden", "thickness"],
        unit=["thousands of EUR per year", "m"],
        inputs=x[250:],
        reproduce={"command": "latedrop evaluate " + 20 * "a_very_long_word_without_any_break", "sha": 64 * "0"},
    )
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as play:
        opened = launch(play)
        yield opened
        opened.close()


class Opened:
    """A page, with what it said to the console and what it asked for."""

    def __init__(self, browser: Any, report: Path, **settings: Any) -> None:
        self.context = browser.new_context(**{"viewport": WIDE, **settings})
        self.page = self.context.new_page()
        self.wrong: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda said: self.wrong.append(said.text))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(report.as_uri())

    def __enter__(self) -> "Opened":
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def beyond(self) -> int:
        """By how many pixels the page is wider than the screen."""
        root = "document.documentElement"
        return self.page.evaluate(f"{root}.scrollWidth - {root}.clientWidth")


def test_nothing_fails_and_nothing_is_fetched(browser: Any, report: Path) -> None:
    with Opened(browser, report) as opened:
        assert opened.wrong == []
        assert opened.asked == [report.as_uri()]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("screen", [WIDE, PHONE], ids=["wide", "phone"])
def test_it_fits_the_screen(browser: Any, report: Path, screen: dict[str, int], scheme: str) -> None:
    with Opened(browser, report, viewport=screen, color_scheme=scheme) as opened:
        assert opened.beyond() == 0
        verdict = opened.page.locator(".verdict").bounding_box()
        assert verdict["y"] + verdict["height"] < screen["height"]
        paper, ink = (opened.page.evaluate(f"getComputedStyle(document.body).{css}") for css in ("background", "color"))
        dark, light = (sum(map(int, re.findall(r"\d+", text)[:3])) for text in (paper, ink))
        assert (dark < light) == (scheme == "dark")


def test_pointing_at_a_mark_says_its_numbers(browser: Any, report: Path) -> None:
    with Opened(browser, report) as opened:
        opened.page.locator("circle.dot.used").nth(5).hover(force=True)  # the first lie on the edge
        assert re.search(r"\d", opened.page.locator(".tip").inner_text())
        assert opened.beyond() == 0


def test_without_scripts_the_facts_are_there(browser: Any, report: Path) -> None:
    with Opened(browser, report, java_script_enabled=False) as opened:
        assert opened.page.locator(".verdict").is_visible()
        assert opened.page.locator("circle title").count() > 100


def test_it_can_be_printed(browser: Any, report: Path) -> None:
    with Opened(browser, report, color_scheme="dark") as opened:
        opened.page.emulate_media(media="print")
        assert not opened.page.locator("nav").is_visible()
        assert opened.page.locator(".verdict").is_visible()
        assert opened.page.evaluate("getComputedStyle(document.querySelector('h1')).color") == "rgb(0, 0, 0)"
        assert opened.page.pdf(format="A4").startswith(b"%PDF")

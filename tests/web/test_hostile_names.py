"""Names that are markup or formulas stay text, on every page that is written or served and in every csv file.

A class, file, column, unit, zone or camera may be called anything. On a page its name must add no element and run no
script; in a csv file a spreadsheet must not take it for a formula.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date, datetime, time
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import uvicorn
from fastapi import testclient
from torch import nn

import latedrop
import small_files
from chromium import launch, needs_chromium
from counters import console
from latedrop.files import write_aside
from latedrop.report import write_class_report, write_report
from latedrop.web import listening
from latedrop_crowd.console.daily import day_page, hours_table
from latedrop_crowd.console.server import make_app
from latedrop_crowd.console.store import Store
from latedrop_crowd.scenes import make_scenes

EVIL = "'\"><img class=evil src=x onerror=window.pwned=1>"
LONG = f"</title></script>{EVIL}<script class=evil>window.pwned=1</script><b class=evil>{{{{7*7}}}}${{pwned=1}} & &lt;"
# What a spreadsheet would run, and what it would not.
RUN = (
    "=1+1",
    "+49 170",
    "-",
    "@cmd",
    "\tx",
    "=cmd|' /C calc'!A0",
    "\uff1d1",
    "=1,2",
    "a\r=1",
    "\r=1",
)  # by a spreadsheet
KEPT = ("-1.5", "+2", "a=b", "'=x", "-1e3", "")


@dataclass(frozen=True)
class Page:
    """An address, or a file, and text of ours that is there once the page is complete."""

    address: str
    ready: str


def report(folder: Path, outputs: int = 2) -> Page:
    net = nn.Sequential(nn.Linear(3, 30), nn.Tanh(), nn.Linear(30, outputs))
    x = torch.randn(180, 3, generator=torch.Generator().manual_seed(0))
    y = x[:, :outputs].sin()
    uq = latedrop.calibrate(net, (x[:120], y[:120]), progress=False)
    prediction, target = uq.predict(x[120:]), y[120:]
    write_report(
        folder / "report.html",
        prediction=prediction,
        target=target,
        calibration=prediction.calibration,
        title=LONG,
        unit=LONG,
        names=[LONG, EVIL][:outputs],
        inputs={LONG: torch.arange(60.0)},
        about=LONG,
        reproduce={LONG: LONG},
    )
    return Page(str(folder / "report.html"), LONG)


def class_report(folder: Path) -> Page:
    net = nn.Sequential(nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 3)).eval()
    dice = torch.Generator().manual_seed(0)
    x = torch.randn(600, 4, generator=dice)
    y = torch.multinomial(torch.softmax(8 * net(x).detach(), 1), 1, generator=dice)[:, 0]
    names = [LONG, EVIL, "bird"]
    task = latedrop.Classification(names=names)
    uq = latedrop.calibrate(net, (x[:400], y[:400]), method=latedrop.Terms(["leverage"]), task=task, progress=False)
    path = folder / "classes.html"
    write_class_report(path, title=LONG, prediction=uq.predict(x[400:]), labels=y[400:], reproduce={LONG: LONG})
    return Page(str(path), LONG)


def day(folder: Path) -> Page:
    """The console's report of today, whose camera, zone and events have such names, and its csv beside it."""
    store, today = Store(folder / "day.sqlite"), date.today()
    zone = store.zones(LONG)[0].id
    store.change_zone(zone, EVIL, 3.0)
    store.add_zone(LONG, "=1+1", [[0, 0], [1, 0], [1, 1]], None)
    noon = datetime.combine(today, time(12)).timestamp()
    store.add_counts((name.id, noon, 4.0, 2.0, 6.0, 0.1) for name in store.zones(LONG))
    store.add_event(LONG, EVIL, LONG, zone)
    write_aside(folder / "day.html", day_page(store, LONG, store.zones(LONG), today, 0.9))
    write_aside(folder / "day.csv", hours_table(store, store.zones(LONG), today))
    store.close()
    return Page(str(folder / "day.html"), LONG)


WRITTEN: dict[str, Callable[[Path], Page]] = {
    "report": report,
    "one output": partial(report, outputs=1),
    "classes": class_report,
    "day": day,
}


class Evil(HTMLParser):
    """Elements that came from a name."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.texts = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if "evil" in str(named.get("class")) or any(name.startswith("on") or name == "srcdoc" for name in named):
            self.found.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts += data


@pytest.mark.parametrize("kind", WRITTEN)
def test_pages_that_are_written_have_names_as_text(kind: str, tmp_path: Path) -> None:
    page = WRITTEN[kind](tmp_path)
    parsed = Evil(Path(page.address).read_text(encoding="utf-8"))
    assert parsed.found == []
    assert page.ready in parsed.texts


@contextmanager
def serving(app: Any) -> Iterator[str]:
    wire, address = listening("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    thread = Thread(target=server.run, args=([wire],), daemon=True)
    thread.start()
    try:
        yield address
    finally:
        if hasattr(app.state, "hub"):
            app.state.hub.end()
        server.should_exit = True
        thread.join(30)


@contextmanager
def watched(folder: Path) -> Iterator[Page]:
    """The console, whose camera, zone and events have such names."""
    store = Store(folder / "a.sqlite")
    zone = store.zones(LONG)[0].id
    store.change_zone(zone, EVIL, 0.0)
    store.add_event(LONG, "alarm", LONG, zone)
    watch = console(store, LONG, EVIL, frames=[make_scenes(0, 6, 0).frames[0].pixels])
    with serving(make_app(watch)) as address:
        yield Page(address, EVIL)


@needs_chromium
def test_no_page_runs_a_name(tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright opens the pages")
    with playwright.sync_playwright() as play, watched(tmp_path) as console:
        browser = launch(play)
        pages = [replace(made, address=Path(made.address).as_uri()) for made in (m(tmp_path) for m in WRITTEN.values())]
        for made in (*pages, console):
            page = browser.new_page()
            page.set_default_timeout(60_000)
            wrong: list[str] = []
            page.on("dialog", lambda dialog, wrong=wrong: (wrong.append(dialog.message), dialog.dismiss()))
            page.on("console", lambda said, wrong=wrong: wrong.append(said.text))
            page.goto(made.address)
            page.wait_for_function("text => document.documentElement.textContent.includes(text)", arg=made.ready)
            for button in page.locator("button:visible, summary:visible").all()[:12]:
                button.click(timeout=2000, force=True, no_wait_after=True)
            page.wait_for_timeout(300)
            actual = page.evaluate("[typeof window.pwned, document.querySelectorAll('.evil').length]")
            assert actual == ["undefined", 0], made.address
            assert not [text for text in wrong if "Content Security Policy" in text], wrong
            page.close()


def safe(text: str) -> str:
    return ("'" if text[0] != "a" else "") + text


def test_csv_files_of_predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any]) -> None:
    texts = (*RUN, *KEPT)
    small_files.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    with open("texts.csv", "w", newline="") as file:
        csv.writer(file).writerows([[*small_files.NAMES, "=note"], *([0.1, 0.2, 0.3, 0.4, text] for text in texts)])
    words = (*small_files.words(tmp_path, "predict"), "--data", "texts.csv", "--keep", "=note", "-o", "out.csv")
    assert call(*words)[0] == 0
    with open("out.csv", newline="") as file:
        head, *rows = csv.reader(file)
    assert head[0] == "'=note"
    cells = [safe(text) if text in RUN else text for text in texts]
    assert [row[0] for row in rows] == [cell.replace("\r", "\n") for cell in cells]  # as read from texts.csv


def test_csv_files_of_the_console(tmp_path: Path) -> None:
    store = Store(tmp_path / "a.sqlite")
    zone = store.zones("=door")[0].id
    store.change_zone(zone, "@zone", None)
    store.add_counts([(zone, 2e9, 1.0, -0.5, 2.0, 0.5)])
    for text in RUN:
        store.add_event("=door", "label", text)
    watch = console(store, "=door")
    page = testclient.TestClient(make_app(watch), "http://127.0.0.1:1", client=("127.0.0.1", 5))
    _, *events = csv.reader(io.StringIO(page.get("/api/events.csv").text, newline=""))
    assert {row[1] for row in events} == {"'=door"}
    assert [row[3] for row in events] == [safe(text) for text in reversed(RUN)]
    (counts,) = list(csv.reader(page.get("/api/sources/0/counts.csv").text.splitlines()))[1:]
    assert (counts[1], counts[3]) == ("'@zone", "-0.5")
    store.close()


def test_csv_files_of_a_day(tmp_path: Path) -> None:
    day(tmp_path)
    with open(tmp_path / "day.csv", newline="") as file:
        assert [row["zone"] for row in csv.DictReader(file)] == [EVIL, "'=1+1"]


@pytest.mark.parametrize(("name", "cell"), [(b"=1+1.png", "'=1+1.png"), (b"a\xff.png", r"a\udcff.png")])
def test_csv_files_of_counts(name: bytes, cell: str, tmp_path: Path, call: Callable[..., Any]) -> None:
    from PIL import Image

    from latedrop_crowd.console.sources import open_sources

    frames = tmp_path / "frames"
    frames.mkdir()
    with made(frames / os.fsdecode(name)) as path:
        Image.fromarray(make_scenes(0, 6, 0).frames[0].pixels).save(path)
    assert call("crowd", "count", frames, "--weights", "scenes", "--out", tmp_path)[0] == 0
    with open(tmp_path / "counts.csv", newline="") as file:
        assert [row["frame"] for row in csv.DictReader(file)] == [cell]
    frames.rename(tmp_path / os.fsdecode(name.removesuffix(b".png")))
    (source,) = open_sources([str(tmp_path / os.fsdecode(name.removesuffix(b".png")))])
    source.name.encode()  # as the console's memory and its answers need it


def test_a_file_may_have_a_name_that_is_no_text(tmp_path: Path, monkeypatch: Any, call: Callable[..., Any]) -> None:
    small_files.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    with made(tmp_path / os.fsdecode(b"d\xff.csv")) as data:
        (tmp_path / "test.csv").rename(data)
    command = small_files.words(tmp_path, "evaluate")
    assert call(*command, "--data", data.name, "--target", "wear", "--report", "page.html")[0] == 0
    assert r"d\udcff.csv" in (tmp_path / "page.html").read_text(encoding="utf-8")


@contextmanager
def made(path: Path) -> Iterator[Path]:
    """Skip the test where this system has no such names."""
    try:
        yield path
    except (OSError, UnicodeError):
        pytest.skip("names of any bytes, of POSIX")

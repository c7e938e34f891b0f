"""The system's Chromium, or a browser made from it, for the tests of pages."""

import shutil
from typing import Any

import pytest

PLACES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    r"C:\Program Files\Google\Chrome\Application\chrome.exe",
)
CHROMIUM = next(filter(None, map(shutil.which, PLACES)), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")


def launch(play: Any) -> Any:
    return play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])  # root has no sandbox

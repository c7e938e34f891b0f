"""Commands of other packages: found by their entry points; what is absent or broken is one line, and takes no other."""

from collections.abc import Callable
from importlib.metadata import EntryPoint

import pytest
import typer

from latedrop.cli import app as cli

Call = Callable[..., tuple[int, str, str]]


def weather() -> typer.Typer:
    app = typer.Typer(help="Ask about the weather.")
    app.command("today")(lambda: print("rain"))
    app.command("tomorrow")(lambda: print("sun"))
    return app


def broken() -> typer.Typer:
    raise ImportError("no module named cloud")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let these functions of this file be the entry points of packages."""

    def install(**points: Callable[[], typer.Typer]) -> None:
        monkeypatch.setattr(EntryPoint, "load", lambda self: points[self.name])
        actual = [EntryPoint(name, "unused", cli.GROUP) for name in points]
        monkeypatch.setattr(cli, "entry_points", lambda group: actual if group == "latedrop.commands" else [])

    return install


def test_a_package_adds_its_commands(call: Call, installed: Callable[..., None]) -> None:
    installed(weather=weather)
    assert call("weather", "tomorrow") == (0, "sun\n", "")
    code, out, _ = call("--help")
    assert (code, "Ask about the weather." in out, "calibrate" in out) == (0, True, True)


def test_a_package_that_is_not_installed(call: Call, installed: Callable[..., None]) -> None:
    installed()
    for words in (["crowd"], ["crowd", "count", "a.png", "--weights", "mall"]):
        assert call(*words) == (
            1,
            "",
            "latedrop: expected the package latedrop-crowd for `latedrop crowd`; it is not installed. Run: pip install "
            "latedrop-crowd\n",
        )


def test_a_broken_package_takes_no_other_command_away(call: Call, installed: Callable[..., None]) -> None:
    installed(cloud=broken, weather=weather)
    code, _, err = call("cloud", "today")
    assert code == 1
    assert "importing it says: ImportError('no module named cloud')" in err
    assert call("weather", "today")[1] == "rain\n"
    assert call("--version")[0] == 0

"""The commands, handed to typer: ours, and those of other packages.

Commands are plain functions, and what they need is imported inside them, so that `latedrop --help` stays quick. An
error of ours, or of the system, is one line on stderr: exit code 2 for a wrong argument, 1 for the rest; 3 is for a
requirement of `evaluate` that does not hold.
"""

import shlex
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from io import TextIOWrapper
from typing import Annotated, Any

import typer

from latedrop import __version__
from latedrop.cli.command import bundled, typed
from latedrop.cli.model_commands import calibrate, evaluate, export, predict, sites
from latedrop.cli.serving import serve
from latedrop.errors import LatedropError
from latedrop.terminal import one_line, option

__all__ = ["GROUP", "main", "make_app"]

GROUP = "latedrop.commands"
"""The group of entry points by which other packages add commands."""
_NO_CROWD = (
    "expected the package latedrop-crowd for `latedrop crowd`; it is not installed. Run: pip install latedrop-crowd"
)
_ANY_WORDS: dict[str, Any] = {
    "add_help_option": False,
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
}
_EXAMPLES = {
    "sites": (
        "latedrop sites my_model:net --input-shape 8",
        "latedrop sites my_model:net --data val.csv --target price",
    ),
    "calibrate": (
        "latedrop calibrate my_model:net --data val.csv --target price --reference train.csv -o cal.json",
        "latedrop calibrate my_model:classifier --data val.csv --target species --sets lac -o cal.json",
    ),
    "predict": (
        "latedrop predict my_model:net cal.json --data new.csv -o out.csv",
        "latedrop predict model.pt2 cal.json --data new.parquet -o out.parquet --level 0.95 --keep id,city",
    ),
    "evaluate": (
        "latedrop evaluate my_model:net cal.json --data test.csv --report page.html",
        'latedrop evaluate my_model:net cal.json --data test.csv --require "coverage90>=0.85,gain>=0"',
    ),
    "export": (
        "latedrop export my_model:net cal.json -o model.onnx",
        "latedrop export my_model:net cal.json -o model.onnx --input-shape 3,224,224 --level 0.95",
    ),
    "serve": ("latedrop serve my_model:net cal.json", "latedrop serve model.onnx --port 8080 --level 0.95"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line on `arguments`, by default those of the process, and exit."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a console of Windows may know neither ± nor a user's names
    typed.set(shlex.join(["latedrop", *(sys.argv[1:] if arguments is None else arguments)]))
    make_app()(arguments, prog_name="latedrop")


def make_app() -> typer.Typer:
    """Make the command line: our commands, then those of other packages."""
    app = typer.Typer(
        help="Calibrated uncertainty for any trained PyTorch network, by dropout injected at test time.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.callback()(_common)
    for command in (sites, calibrate, predict, evaluate, export, serve):
        epilog = "\n\n".join(["Examples:", *_EXAMPLES[command.__name__]])
        app.command(command.__name__, epilog=epilog)(bundled(command))
    _add_packages(app)
    return app


def _add_packages(app: typer.Typer) -> None:
    """Add the commands of other packages: an entry point of the group gives a name and a function that returns a Typer.

    A package of ours that is not installed is named with what to install. A broken one fails by itself alone.
    """
    points = {point.name: point for point in entry_points(group=GROUP)}
    if "crowd" not in points:
        app.command("crowd", hidden=True, **_ANY_WORDS)(_failing(_NO_CROWD))
    for name, point in sorted(points.items()):
        try:
            app.add_typer(point.load()(), name=name)
        except Exception as error:
            broken = f"expected a package with the commands of `latedrop {name}`; importing it says: {error!r}. "
            app.command(name, hidden=True, **_ANY_WORDS)(_failing(f"{broken}Install it again."))


def _failing(message: str) -> Callable[[], None]:
    def fail() -> None:
        with one_line(False):
            raise LatedropError(message)

    return fail


def _print_version(asked: bool) -> None:
    if asked:
        print(f"latedrop {__version__}")
        raise typer.Exit


def _common(
    version: Annotated[bool, option("Print the version.", "--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    """Options that come before the command."""

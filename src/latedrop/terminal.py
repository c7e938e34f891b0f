"""Parts that every command shares: options, one-line errors, exit codes, folders made before the work, tables.

typer and rich are extras (`pip install "latedrop[cli]"`), imported where they are used.
"""

import logging
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from latedrop.errors import ArgumentError, DataError, FileError, LatedropError
from latedrop.files import parsed, read_text

__all__ = [
    "argument",
    "folder",
    "listed",
    "logged",
    "need",
    "number_list",
    "one_line",
    "option",
    "print_table",
    "read_json",
    "say",
]

_PIP = {"PIL": "pillow", "sklearn": "scikit-learn"}


def option(text: str, *names: str, **settings: Any) -> Any:
    """Make an option of typer with its help."""
    import typer

    return typer.Option(*names, help=text, **settings)


def argument(text: str, **settings: Any) -> Any:
    """Make an argument of typer with its help."""
    import typer

    return typer.Argument(help=text, **settings)


def need(extra: str, *packages: str, of: str = "latedrop") -> None:
    """Raise unless the packages of an extra are installed; `of` is the distribution that has the extra."""
    absent = [_PIP.get(package, package.replace("_", "-")) for package in packages if find_spec(package) is None]
    if absent:
        raise LatedropError(f'expected {" and ".join(absent)}; not installed. Run: pip install "{of}[{extra}]"')


def folder(path: Path) -> Path:
    """Make a folder if need be: before the work, so that no work is lost to a wrong name."""
    if path.exists() and not path.is_dir():
        raise FileError(f"expected a folder at {path}; found a file. Pass another --out.")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"expected to make the folder {path}; the system says: {error}. Pass another --out.") from error
    return path


def number_list(option: str, text: str) -> list[float]:
    """Read the numbers of an option such as `--rates 0.1,0.2`."""
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ArgumentError(f"expected {option} as numbers separated by commas; found {text!r}.") from None


def read_json(path: Path, what: str, schema: int, remedy: str, *, finite: bool = True) -> dict[str, Any]:
    """Read what a command wrote before: a JSON object of a schema that it names; with `finite`, without NaN.

    Raises:
        FileError: there is no file, it is damaged, or something else; `what` was expected, `remedy` says what to do.
    """
    try:
        record: dict[str, Any] = parsed(read_text(path, what), what, remedy, finite=finite)
    except DataError as error:
        raise FileError(f"{path}: {error}") from error
    if not isinstance(record, dict) or record.get("schema") != schema:
        raise FileError(f"expected {what}, schema {schema}, in {path}; found another. {remedy}")
    return record


def say(text: str) -> None:
    """Print a line for people, on stderr."""
    print(f"latedrop: {' '.join(text.split())}", file=sys.stderr)


def listed(names: Iterable[str], most: int, *, quote: bool = False) -> str:
    """Join the first names for a message, and say how many there are; with `quote`, those with a comma are quoted.

    >>> listed(["a", "b", "c", "d"], 2)
    'a, b, ... (4 in all)'
    >>> listed(["Barolo, red", "Soave"], 2, quote=True)
    '"Barolo, red", Soave'
    """
    names = [f'"{name}"' if quote and "," in name else name for name in names]
    more = f", ... ({len(names)} in all)" if len(names) > most else ""
    return ", ".join(names[:most]) + more or "none"


@contextmanager
def logged(verbose: int) -> Iterator[None]:
    """Show what latedrop's loggers say, on stderr: nothing more with 0, what is done with 1, how with 2."""
    logger = logging.getLogger("latedrop")
    if not verbose:
        yield
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("latedrop: %(message)s" if verbose == 1 else "%(name)s: %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if verbose == 1 else logging.DEBUG)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextmanager
def one_line(debug: bool, stopped: str = "latedrop: stopped.") -> Iterator[None]:
    """Print warnings, and errors of ours or of the system, as a line on stderr; `debug` keeps an error's traceback.

    Exit code 2 is for a wrong argument, 130 for Ctrl-C, 1 for the rest.
    """
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: say(f"warning: {message}")
        try:
            yield
        except (LatedropError, OSError) as error:
            if debug:
                raise
            say(str(error))
            raise SystemExit(2 if isinstance(error, ArgumentError) else 1) from None
        except KeyboardInterrupt:
            print(stopped, file=sys.stderr)
            raise SystemExit(130) from None


def print_table(lines: Sequence[Sequence[str]], *, texts: int = 1, marked: int | None = None) -> None:
    """Print a table with its header first, in at most 80 columns where that can be.

    The first `texts` columns hold text, the others numbers; the row `marked`, counted without the header, stands out.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for index, name in enumerate(lines[0]):
        # Broken up, so that 80 columns are enough. As Text: of a plain string rich takes [dB] for a style.
        head = Text(name.replace(" at ", "\nat ").replace(" [", "\n[").replace("rank correlation", "rank\ncorrelation"))
        grid.add_column(head, justify="left" if index < texts else "right", no_wrap=True)
    for index, line in enumerate(lines[1:]):
        grid.add_row(*(Text(cell) for cell in line), style="bold green" if index == marked else None)
    console = Console()
    # A pipe has no width: there nothing is cut.
    (console if console.is_terminal else Console(width=1000)).print(grid)

"""Print to a terminal: options, one-line errors, exit codes, tables, and how far work is.

    latedrop: calibrating: 1,200 of 3,000 rows, 240 rows/s, 8 s left

typer and rich are extras (`pip install "latedrop[cli]"`), imported where they are used.
"""

import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

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
    "progress",
    "read_json",
    "say",
    "shown_on",
]

_T = TypeVar("_T")
_PIP = {"PIL": "pillow", "sklearn": "scikit-learn"}
_DELAY, _EVERY = 2.0, 5.0  # seconds
_log = logging.getLogger(__name__)
_now = time.monotonic


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


@contextmanager
def progress(
    what: str, total: float | None = None, unit: str = "rows", *, show: bool = True
) -> Iterator[Callable[[float], Any]]:
    """Give a function to call with the number of units that were done since: a bar on a terminal, else lines.

    A bar appears after two seconds of work, a line every five. `total` may be more than there are, where some are left
    out. With `show=False` nothing is seen of it.
    """
    begin = last = _now()
    done = 0.0
    with ExitStack() as stack:
        bar: Any = None
        if show and sys.stderr is not None and sys.stderr.isatty():
            from tqdm import tqdm

            scaled: dict[str, Any] = {"unit": f" {unit}", "unit_scale": True}  # as parts of a row may be done
            bar = stack.enter_context(tqdm(desc=what, total=total, delay=_DELAY, leave=False, **scaled))

        def tick(more: float) -> None:
            nonlocal done, last
            done += more
            if bar is not None:
                bar.update(more)
            elif show and _now() - last >= _EVERY:
                last = _now()
                line = _line(done, total, unit, last - begin)
                print(f"latedrop: {what}: {line}", file=sys.stderr, flush=True)

        yield tick
    _log.debug("%s: %.0f %s in %.1f s", what, done, unit, _now() - begin)


def shown_on(
    items: Iterable[_T], what: str, total: float | None = None, unit: str = "rows", *, show: bool
) -> Iterator[_T]:
    """Yield the items, with progress over them."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    with progress(what, total, unit, show=show) as tick:
        for item in items:
            yield item
            tick(1)


def _line(done: float, total: float | None, unit: str, seconds: float) -> str:
    speed = done / seconds
    rate = f"{speed:,.0f}" if speed >= 10 else f"{speed:.2g}"
    if total is None:
        return f"{done:,.0f} {unit}, {rate} {unit}/s"
    left = max(total - done, 0.0) / speed if speed > 0 else 0.0
    spoken = f"{left:.0f} s" if left < 90 else f"{left / 60:.0f} min" if left < 5400 else f"{left / 3600:.1f} h"
    return f"{done:,.0f} of {total:,.0f} {unit}, {rate} {unit}/s, {spoken} left"

"""What the commands of all studies share: their options, their result files, and how they end."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from latedrop.errors import ArgumentError, FileError
from latedrop.terminal import command_parser, exit_code, read_json

__all__ = [
    "bar",
    "check_at_least",
    "check_same",
    "chosen_names",
    "dumped",
    "read_result",
    "run_command",
    "study_parser",
]


def study_parser(program: str, text: str, *, out: str, data: str, quick: str, example: str) -> argparse.ArgumentParser:
    """A parser with the options that every study has.

    Args:
        program: how it is called.
        text: what it does.
        out: default of `--out`.
        data: what the folder of `--data` holds.
        quick: what `--quick` leaves.
        example: words after the program.
    """
    parser = command_parser(program, text, example=example)
    add = parser.add_argument
    add("--out", type=Path, default=Path(out), help="folder of the results; finished work in it is kept")
    add("--data", type=Path, help=data)
    add("--sets", help="names separated by commas; all by default")
    add("--seed", type=int, default=0, help="seed of all random numbers")
    add("--quick", action="store_true", help=quick)
    add("--fresh", action="store_true", help="compute finished work again")
    add("--figures", action="store_true", help="only draw, from the JSON files in --out")
    return parser


def run_command(
    parser: argparse.ArgumentParser,
    words: Sequence[str] | None,
    study: Callable[[Mapping[str, Any], bool], Sequence[Path]],
    stopped: str,
) -> int:
    """Parse, run a study with its options and whether only figures are wanted, say what was written; the exit code."""
    options = vars(parser.parse_args(words))
    figures, debug = options.pop("figures"), options.pop("debug")
    return exit_code(lambda: f"written: {', '.join(map(str, study(options, figures)))}", stopped, debug=debug)


def check_at_least(request: object, **least: int) -> None:
    """Raise where an option that is given is below what makes sense."""
    for name, limit in least.items():
        value = getattr(request, name)
        if value is not None and value < limit:
            raise ArgumentError(f"expected --{name} of at least {limit}; found {value}.")


def chosen_names(names: str | None, known: Collection[str]) -> list[str]:
    """The names of a comma-separated list, each once; all that are known where None.

    >>> chosen_names("yacht, energy,yacht", ["energy", "yacht", "wine"])
    ['yacht', 'energy']
    """
    if names is None:
        return list(known)
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        raise ArgumentError(f"expected --sets of {', '.join(known)}; found {', '.join(unknown) or 'none'}.")
    return list(dict.fromkeys(wanted))


def bar(label: str, total: float, progress: bool) -> Any:
    """A bar that says how much time is left."""
    form = "{desc} {percentage:3.0f}% |{bar}| {elapsed}, {remaining} left"
    return tqdm(total=total, desc=label, disable=not progress, bar_format=form)


def read_result(path: Path, schema: int) -> dict[str, Any]:
    """The JSON of a result, or of a stage of one."""
    return read_json(path, "a result of this study", schema, "Delete it, or compute it again with --fresh.")


def dumped(record: Mapping[str, Any]) -> bytes:
    """Compact JSON; NaN and inf are refused."""
    return (json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n").encode()


def check_same(path: Path, what: str, expected: object, found: object) -> None:
    """Raise unless a finished result was made with the same."""
    if expected != found:
        raise FileError(
            f"expected results with {what} {expected} in {path}; found {found}. "
            "Pass another --out, or --fresh to compute them again."
        )

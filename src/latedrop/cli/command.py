"""Run a command on the user's own model: whatever goes wrong is one line, in the words of the command line."""

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, TextIO, get_type_hints

import typer

from latedrop.cli.options import Verbose
from latedrop.errors import LatedropError
from latedrop.terminal import logged, one_line, say

__all__ = ["again", "bundled", "command", "read_files", "typed"]

typed: ContextVar[str] = ContextVar("typed", default="")
"""The command line that runs, as it was typed."""


def bundled(function: Callable[..., None]) -> Callable[..., None]:
    """Make a command for typer: a parameter that is annotated with a tuple of options stands for them; -v is added.

    A default of that parameter holds other defaults of the options than the tuple's own.
    """
    bundles: dict[str, Any] = {}
    options: list[Parameter] = []
    for parameter in signature(function).parameters.values():
        kind = parameter.annotation
        if hasattr(kind, "_fields"):
            bundles[parameter.name] = kind
            hints = get_type_hints(kind, include_extras=True)
            defaults = kind() if parameter.default is Parameter.empty else parameter.default
            pairs = zip(hints.items(), defaults, strict=True)
            options += [Parameter(n, Parameter.KEYWORD_ONLY, default=value, annotation=a) for (n, a), value in pairs]
        else:
            options.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))
    options.append(Parameter("verbose", Parameter.KEYWORD_ONLY, default=0, annotation=Verbose))

    @wraps(function)
    def run(verbose: int = 0, **words: Any) -> None:
        made = {name: kind(*map(words.pop, kind._fields)) for name, kind in bundles.items()}
        with logged(verbose):
            function(**words, **made)

    run.__signature__ = signature(function).replace(parameters=options)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run


@contextmanager
def command(debug: bool) -> Iterator[TextIO]:
    """Print one line for whatever goes wrong, in the words of the command line; gives stdout.

    What the user's model prints by itself goes to stderr, so that stdout holds nothing but what was asked for.
    """
    out = sys.stdout
    with one_line(debug), redirect_stdout(sys.stderr):
        # `one_line` puts this back.
        warnings.showwarning = lambda message, *_: say(f"warning: {_in_options(str(message))}")
        try:
            yield out
        except BrokenPipeError:  # whoever reads has seen enough, as head does
            os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
            raise typer.Exit(141) from None
        except LatedropError as error:
            raise type(error)(_in_options(str(error))) from error
        except (OSError, typer.Exit):
            raise
        except Exception as error:
            if debug:
                raise
            raise LatedropError(
                f"{type(error).__name__}: {error}. This was not foreseen: pass --debug to see where it comes from."
            ) from error


def again(read: Mapping[str, Any]) -> dict[str, str]:
    """Return the command that was typed and the files that it read, for the end of a page."""
    facts = {"command": typed.get()} if typed.get() else {}
    for name, file in read.items():
        facts[name] = file["path"]
        if file["sha256"]:
            facts[f"{name}, SHA-256"] = file["sha256"]
    return facts


def read_files(files: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the files that a command read: their path, and their SHA-256 where they can be read again."""
    from latedrop.files import digest_of

    facts: dict[str, Any] = {}
    for option, path in files.items():
        if path is not None:
            is_file = path != "-" and Path(path).exists()
            name = option.strip("-").replace("-", " ").lower()
            facts[name] = {"path": path, "sha256": digest_of(path) if is_file else None}
    return facts


_NAMES = "method|floor|draws|rates|select|readout|intervals|batch_size|scale|task"
_WORDS = {
    "Pass the same function when loading": "Name it: --readout package.module:function",
    "readout=lambda p: p.clamp_min(1e-12).log()": "--readout package.module:function, for their logarithm",
    "readout=lambda p: p.clamp(1e-7, 1 - 1e-7).logit()": "--readout package.module:function, for log(p / (1 - p))",
    "Of one-hot labels pass labels.argmax(1)": "Name one column with a label for each row: --target",
    "Pass labels.argmax(1)": "Name one column with a label for each row: --target",
    "Pass more rows to conformal()": "Pass more rows: --conformal-data",
    "Call uq = uq.conformal((x, labels)) first": "Calibrate with --sets lac",
    "; to use another scale, load the original and call predictor.scaled(...)": "",
    " as reference=": ": --reference",
    "target=Standardized(mean, std) or Log()": "--target-mean and --target-std, or --target-log",
    "target=Log()": "--target-log",
    "target=.": "--target-mean, --target-std or --target-log.",
    "expected names of": "expected --class-names of",
    "readout=lambda output: output[:, 0], or the column": "--readout package.module:function, for the column",
}
"""What messages say in Python, and what they say on the command line."""
_UNITS = re.compile(r"target=Standardized\(mean=\[?([^])]*)\]?, std=\[?([^])]*)\]?\)")


def _in_options(text: str) -> str:
    """Spell the arguments of Python that a message speaks of as options: `floor=True` is --floor."""
    for words, options in _WORDS.items():
        text = text.replace(words, options)
    text = _UNITS.sub(lambda match: f"--target-mean {match[1]} --target-std {match[2]}".replace(", ", ","), text)

    def spoken(match: re.Match[str]) -> str:
        value = match["value"].replace("True", "").strip("[]'")
        return f"--{match['name'].replace('_', '-')}{' ' if value else ''}{value}"

    return re.sub(rf"\b(?P<name>{_NAMES})=(?P<value>True|'\w+'|\['[^]]+'\]|(?![\[{{\w]))", spoken, text)

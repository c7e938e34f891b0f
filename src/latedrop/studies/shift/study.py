"""The shift study: `latedrop study shift`, or, without the command-line extra, `python -m latedrop.studies.shift`.

Settings in, one JSON for each set out, written as soon as the set is done: a run that was stopped goes on where it
was. Pages and figures are made from the JSON files alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from latedrop.files import check_apart
from latedrop.json_text import understood
from latedrop.studies.command import bar, run_command, study_parser
from latedrop.studies.shift.measured_set import Settings, measure, work
from latedrop.studies.uci import data
from latedrop.studies.uci.data import Table, UciSet
from latedrop.studies.uci.runs import STOPPED, SetRequest, own_table_options, read_sets, run_sets

__all__ = ["SCHEMA", "Request", "main", "read", "run", "study"]

SCHEMA = 1
_QUICK = Settings(inputs=3, epochs=0.05, draws=20)


@dataclass(frozen=True)
class Request(SetRequest):
    """What to run. With `quick`: three inputs of each set, few epochs."""

    def settings(self) -> Settings:
        """What the results depend on."""
        return replace(_QUICK if self.quick else Settings(), seed=self.seed)


def run(request: Request) -> list[Path]:
    """Run the study; the JSON files that are then in `out`, finished before or now.

    Raises:
        LatedropError: nothing to run, a wrong argument, a damaged file, a full disk. What was finished stays.
    """
    settings = request.settings()

    def measured(item: UciSet, table: Table, device: torch.device, label: str) -> dict[str, Any]:
        with bar(label, work(item, table, settings), request.bars) as shown:
            return measure(item, table, settings, device, shown.update)

    return run_sets(request, settings, SCHEMA, measured, _said)


def read(results: Path, names: Iterable[str] = tuple(data.SETS)) -> dict[str, dict[str, Any]]:
    """The results in a folder by set, in the order of the names."""
    return read_sets(results, SCHEMA, names)


def main(arguments: Sequence[str] | None = None, program: str = "python -m latedrop.studies.shift") -> int:
    """The command line without extras; the exit code."""
    parser = study_parser(
        program,
        "What variances are worth beyond the training rows: every input of eight UCI sets is cut at a quantile.",
        out="shift-study",
        data="folder of the eight text files; without it, installed packages",
        quick="two small sets, three inputs of each, few epochs",
        example="--data DIR --out shift-study",
    )
    own_table_options(parser)
    return run_command(parser, arguments, lambda options, only: study(Request(**options), figures_only=only), STOPPED)


def study(request: Request, *, figures_only: bool = False) -> list[Path]:
    """Run, unless only figures are wanted, and then write pages and figures; all files."""
    from latedrop.studies.shift import pages

    check_apart({"--out": request.out}, request.read_only)
    finished = [] if figures_only else run(request)
    results = read(request.out, request.names)
    with understood(request.out, "results of this study", "Delete those that are damaged, and run it again."):
        return [*finished, *pages.write(results, request.out)]


def _said(record: dict[str, Any]) -> str:
    left_out = f" ({len(record['left_out'])} left out)" if record["left_out"] else ""
    return f"{len(record['cuts'])} cuts{left_out}, "


if __name__ == "__main__":
    sys.exit(main())

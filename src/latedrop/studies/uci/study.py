"""The UCI study: `latedrop study uci`, or, without the command-line extra, `python -m latedrop.studies.uci`.

Settings in, one JSON for each set out, written as soon as the set is done: a run that was stopped goes on where it
was. Pages and figures are made from the JSON files alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from latedrop.files import check_apart
from latedrop.json_text import understood
from latedrop.studies.command import bar, check_at_least, run_command, study_parser
from latedrop.studies.uci import data
from latedrop.studies.uci.data import Table, UciSet
from latedrop.studies.uci.measured_set import Settings, measure, work
from latedrop.studies.uci.runs import STOPPED, SetRequest, own_table_options, read_sets, run_sets

__all__ = ["SCHEMA", "Request", "main", "read", "run", "study"]

SCHEMA = 2
_QUICK = Settings(splits=3, deep_draws=20, epochs=0.1)


@dataclass(frozen=True)
class Request(SetRequest):
    """What to run.

    Attributes:
        splits: maximum number of splits per data set.
        draws: masks for the paper's sampled variance; None: exact.
    """

    splits: int | None = None
    draws: int | None = None

    def settings(self) -> Settings:
        """What the results depend on."""
        check_at_least(self, splits=1, draws=2)
        quick = _QUICK if self.quick else Settings()
        splits = quick.splits if self.splits is None else self.splits
        return Settings(splits, self.draws, quick.deep_draws, quick.epochs, self.seed)


def run(request: Request) -> list[Path]:
    """Run the study; the JSON files that are then in `out`, finished before or now.

    Raises:
        LatedropError: nothing to run, a wrong argument, a damaged file, a full disk. What was finished stays.
    """
    settings = request.settings()

    def measured(item: UciSet, table: Table, device: torch.device, label: str) -> dict[str, Any]:
        with bar(label, work(item, settings), request.bars) as shown:
            result = measure(item, table, settings, device, shown.update)
        published = data.split_digest(data.permutations(item)) == item.digest
        used = data.split_digest(data.permutations(item, settings.splits))
        return {"splits_sha256": used, "published_splits": published, **result}

    return run_sets(request, settings, SCHEMA, measured)


def read(results: Path, names: Iterable[str] = tuple(data.SETS)) -> dict[str, dict[str, Any]]:
    """The results in a folder by set, in the order of the names."""
    return read_sets(results, SCHEMA, names)


def main(arguments: Sequence[str] | None = None, program: str = "python -m latedrop.studies.uci") -> int:
    """The command line without extras; the exit code."""
    parser = study_parser(
        program,
        "Injected against embedded dropout on eight UCI sets, and other methods on the same networks.",
        out="uci-study",
        data="folder of the eight text files; without it, installed packages",
        quick="two small sets, three splits, few epochs",
        example="--data DIR --out uci-study",
    )
    own_table_options(parser)
    parser.add_argument("--splits", type=int, help="maximum number of splits per data set")
    parser.add_argument("--draws", type=int, help="number of masks to sample the variance with; exact by default")
    return run_command(parser, arguments, lambda options, only: study(Request(**options), figures_only=only), STOPPED)


def study(request: Request, *, figures_only: bool = False) -> list[Path]:
    """Run, unless only figures are wanted, and then write pages and figures; all files."""
    from latedrop.studies.uci import pages

    check_apart({"--out": request.out}, request.read_only)
    finished = [] if figures_only else run(request)
    results = read(request.out, request.names)
    with understood(request.out, "results of this study", "Delete those that are damaged, and run it again."):
        return [*finished, *pages.write(results, request.out)]


if __name__ == "__main__":
    sys.exit(main())

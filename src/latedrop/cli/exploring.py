"""`latedrop explore`: a local page of test rows, with their intervals and where their variance comes from.

A plain function that parses, calls and prints; `cli` hands it to typer. What it needs is imported inside it.
"""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from latedrop.cli import options as opt
from latedrop.cli.command import command
from latedrop.cli.options import readout_of, split
from latedrop.errors import ArgumentError
from latedrop.terminal import need, option, say

if TYPE_CHECKING:
    from latedrop.cli.feed import Labelled
    from latedrop.cli.tables import Rows
    from latedrop.explore.rows import Explored
    from latedrop.prediction.predictor import Predictor

__all__ = ["explore", "explore_line"]

_MOST_BYTES = 2 << 30
_OTHERS = {"--report": 2, "--plot": 2, "--require": 2, "--json": 1}
"""What `evaluate` takes and `explore` does not, and how many words that is."""


def explore(
    model: opt.Model,
    calibration: opt.Record,
    data: opt.Test,
    target: opt.Target = None,
    inputs: opt.Inputs = None,
    ignore: opt.Ignore = None,
    row_weights: opt.RowWeights = None,
    images: opt.Pictured = opt.NO_IMAGES,
    drop_nan: opt.DropNan = False,
    level: opt.Level = None,
    unit: opt.Unit = None,
    port: Annotated[int, option("Port to listen on; 0 takes a free one.")] = 8766,
    batch_size: opt.BatchSize = 256,
    weights: opt.Weights = None,
    trust: opt.Trust = False,
    untrained: opt.Untrained = False,
    device: opt.Device = "auto",
    readout: opt.ReadOut = None,
    debug: opt.Debug = False,
) -> None:
    """Look at test rows on a local page: errors with intervals at any level, slices, the worst rows, shares of terms.

    It is for regressions. Only this machine can open the page.
    """
    with command(debug):
        need("serve", "fastapi", "uvicorn")
        from latedrop.cli.feed import Labelled, Source
        from latedrop.cli.judging import units_of
        from latedrop.explore.server import serve
        from latedrop.metrics.levels import checked_level
        from latedrop.named import load_calibrated, load_model
        from latedrop.prediction.predictor import Predictor

        _ = level is None or checked_level(level)
        network = load_model(model, weights, trust=trust, device=device, untrained=untrained)
        uq = load_calibrated(calibration, network, readout_of(readout), batch_size)
        if not isinstance(uq, Predictor):
            raise ArgumentError(
                "expected the calibration of a regression; found one of classes. See `latedrop evaluate --report`, "
                "which lists the classes' worst rows."
            )
        known: dict[str, Any] = {"images": images.of(uq.calibration), "record": uq.calibration}
        columns = split(inputs), split(target), (), split(ignore), row_weights
        source = Source.of(data, *columns, labelled=True, **known)
        rows, units = Labelled(source, network, batch_size, drop_nan), units_of(unit, source)
        serve(_explored(uq, rows, level, units, f"{model} on {Path(data).name}"), port, say)


def explore_line(typed: str, data: str) -> str:
    """The command that explores the rows which a typed `evaluate` judged; empty where they cannot be read again."""
    words = shlex.split(typed)
    if "evaluate" not in words or data == "-":
        return ""
    found, number = [], 0
    while number < len(words):
        name, equals, _ = words[number].partition("=")
        if name not in _OTHERS:
            found.append(words[number])
        number += 1 if equals else _OTHERS.get(name, 1)
    found[found.index("evaluate")] = "explore"
    return shlex.join(found)


def _explored(uq: "Predictor", rows: "Labelled", level: float | None, units: list[str], title: str) -> "Explored":
    from latedrop.cli.judging import Noticed, judged_numbers
    from latedrop.explore.rows import Explored, check_shape
    from latedrop.progress import progress

    source, kept = rows.source, _Kept()
    noticed = Noticed(source.columns.inputs)

    def notice(some: "Rows") -> None:
        noticed.add(some)
        kept.add(some)

    rows.notice = notice
    with source.explained(), progress("predicting", source.table.count) as tick:
        prediction, truth = uq.predict_labelled(rows, tick=tick)
    check_shape(prediction)
    found = judged_numbers(prediction, truth, rows, noticed, level, units, None)
    place = source.table.unit
    return Explored(
        title, uq, prediction, truth, found, noticed.places, place, noticed.inputs(), lambda row: kept.at(row, uq.model)
    )


class _Kept:
    """The inputs of all rows, to explain a row again."""

    def __init__(self) -> None:
        self._parts: list[Rows] = []
        self._bytes = 0

    def add(self, rows: "Rows") -> None:
        """Some more rows."""
        arrays = rows.inputs.values() if isinstance(rows.inputs, dict) else [rows.inputs]
        self._bytes += sum(array.nbytes for array in arrays)
        if self._bytes > _MOST_BYTES:
            raise ArgumentError(
                f"expected inputs of at most {_MOST_BYTES >> 30} GiB, which are held in memory; found more. "
                "Pass a part of the rows."
            )
        self._parts.append(rows)

    def at(self, row: int, model: Any) -> Any:
        """The inputs of one row as the model takes them."""
        import numpy as np

        from latedrop.cli.feed import arguments

        for part in self._parts:
            if row < len(part):
                return arguments(model, part.where(np.arange(len(part)) == row))
            row -= len(part)
        raise IndexError(row)

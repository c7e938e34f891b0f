"""The commands on the user's own model and files: `latedrop sites`, `calibrate`, `predict`, `evaluate`.

Plain functions that parse, call and print; `cli` hands them to typer. What a command needs is imported inside it. Rows
are read, predicted and written a batch at a time.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict, replace
from inspect import getdoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from latedrop.errors import ArgumentError, DataError, LatedropError
from latedrop.terminal import argument, need, one_line, option, print_table, say

try:
    import typer
except ImportError:
    typer = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from torch import nn

    from latedrop.calibration.evaluation import Evaluation
    from latedrop.calibration.predictor import Predictor
    from latedrop.calibration.record import Calibration
    from latedrop.model.calling import Readout
    from latedrop.model.sites import Sites

__all__ = ["calibrate", "evaluate", "predict", "sites", "with_examples"]

_MODEL, _DATA, _OUTPUT = ({"rich_help_panel": name} for name in ("Model", "Data", "Output"))
_METHODS = ["sample", "linear", "propagate"]

Model = Annotated[str, argument("package.module:callable, or a .pt2 file of torch.export.", metavar="MODEL")]
Record = Annotated[str, argument("What `latedrop calibrate` wrote.", metavar="CALIBRATION")]
Weights = Annotated[
    str | None, option("Weights for the callable's module: .safetensors, or .pt of a state_dict.", **_MODEL)
]
Trust = Annotated[
    bool, option("Unpickle model files that hold more than weights, which can run any code.", "--trust", **_MODEL)
]
Device = Annotated[str, option("auto, cpu or cuda.", autocompletion=lambda: ["auto", "cpu", "cuda"], **_MODEL)]
ReadOut = Annotated[
    str | None,
    option("Which part of the output: a name, an index, or package.module:function.", "--readout", **_MODEL),
]
Select = Annotated[list[str] | None, option("Only sites of this name pattern; may be repeated.", **_MODEL)]
Kind = Annotated[
    str, option("Masks per element or per channel.", autocompletion=lambda: ["element", "channel"], **_MODEL)
]
Inputs = Annotated[
    str | None,
    option("Input columns, commas between; by default all others, or the array x.", "--inputs", "--input", **_DATA),
]
Ignore = Annotated[str | None, option("Columns that are no inputs, commas between.", **_DATA)]
Target = Annotated[str | None, option("Target columns, commas between; of arrays, y by default.", **_DATA)]
DropNan = Annotated[bool, option("Leave out rows with NaN or missing values.", "--drop-nan", **_DATA)]
BatchSize = Annotated[int, option("Rows that are read and run at once.", **_DATA)]
Level = Annotated[float, option("Probability that the interval holds the target.", **_OUTPUT)]
Scale = Annotated[
    str, option("optimal: least NLL; relaxed: balanced curve.", autocompletion=lambda: ["optimal", "relaxed"])
]
Json = Annotated[bool, option("Print JSON, and nothing else, to stdout.", "--json", **_OUTPUT)]
Debug = Annotated[bool, option("Show the traceback of an error.", "--debug", **_OUTPUT)]

_EXAMPLES = {
    "sites": (
        "latedrop sites my_model:net --input-shape 8",
        "latedrop sites my_model:net --data val.csv --target price",
        'latedrop sites model.pt2 --select "decoder.*" --json',
    ),
    "calibrate": (
        "latedrop calibrate my_model:net --data val.csv --target price -o cal.json",
        "latedrop calibrate my_model:Net --weights net.safetensors \\\n"
        "    --data val.parquet --target height,width -o cal.json --report cal.html",
        "latedrop calibrate model.pt2 --data val.npz -o cal.json --method linear",
    ),
    "predict": (
        "latedrop predict my_model:net cal.json --data new.csv -o out.csv",
        "latedrop predict model.pt2 cal.json --data new.parquet -o out.parquet \\\n    --level 0.95 --keep id,city",
        "zcat new.csv.gz | latedrop predict my_model:net cal.json --data - | head",
    ),
    "evaluate": (
        "latedrop evaluate my_model:net cal.json --data test.csv --target price",
        "latedrop evaluate model.pt2 cal.json --data test.npz --plot curve.png",
    ),
}


def with_examples(command: Callable[..., None]) -> str:
    """The help of a command: what it does, and lines to start from."""
    lines = "\n".join(_EXAMPLES[command.__name__]).replace("\n", "\n  ")
    return f"{getdoc(command)}\n\n\b\nExamples:\n  {lines}"


def sites(
    model: Model,
    data: Annotated[str | None, option("Example rows: csv, parquet, npz or pt.", **_DATA)] = None,
    input_shape: Annotated[
        list[str] | None, option("Or random rows of this shape, such as 3,224,224; one for each input.", **_DATA)
    ] = None,
    inputs: Inputs = None,
    ignore: Ignore = None,
    target: Target = None,
    select: Select = None,
    kind: Kind = "element",
    weights: Weights = None,
    trust: Trust = False,
    device: Device = "auto",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List where dropout would go.

    It needs rows to run the model on: --data, --input-shape, or those that a .pt2 file was exported with.
    """
    with _command(debug) as out:
        from latedrop.cli.feed import Source
        from latedrop.cli.models import load_model
        from latedrop.model.finding import find_sites

        if data is not None and input_shape:
            raise ArgumentError("expected --data or --input-shape; found both. Leave one out.")
        network = load_model(model, weights, trust=trust, device=device, untrained=True)
        source = None if data is None else Source.of(data, _split(inputs), _split(target), ignored=_split(ignore))
        with nullcontext() if source is None else source.explained():
            x = _example(network, input_shape) if source is None else source.example(network)
            found = find_sites(network, x, select=select or None, kind=kind)  # type: ignore[arg-type]
        with redirect_stdout(out):
            _print_sites(found, as_json)


def calibrate(
    model: Model,
    data: Annotated[str, option("Validation rows: csv, parquet, npz or pt; - is csv from stdin.", **_DATA)],
    output: Annotated[str, option("The calibration to write, JSON.", "--output", "-o", **_OUTPUT)],
    target: Target = None,
    inputs: Inputs = None,
    ignore: Ignore = None,
    drop_nan: DropNan = False,
    batch_size: BatchSize = 256,
    weights: Weights = None,
    trust: Trust = False,
    device: Device = "auto",
    readout: ReadOut = None,
    select: Select = None,
    kind: Kind = "element",
    method: Annotated[
        str,
        option("sample: draws; linear: first order; propagate: maps.", autocompletion=lambda: _METHODS),
    ] = "sample",
    rates: Annotated[str | None, option("Rates to try, commas between; those of the paper by default.")] = None,
    draws: Annotated[int, option("Thinned networks per rate.")] = 100,
    floor: Annotated[bool, option("Also fit a constant, added to the scaled variance.", "--floor")] = False,
    per_site: Annotated[bool, option("A rate for every site; with --method linear.", "--per-site")] = False,
    scale: Scale = "optimal",
    intervals: Annotated[
        str | None,
        option("gaussian, isotonic or conformal.", autocompletion=lambda: ["gaussian", "isotonic", "conformal"]),
    ] = None,
    conformal_data: Annotated[
        str | None, option("Rows for conformal intervals; by default half of --data, at random.", **_DATA)
    ] = None,
    seed: Annotated[int, option("Fixes all masks, and which rows are held out.")] = 0,
    report: Annotated[str | None, option("Also write a page about it, HTML.", **_OUTPUT)] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Choose rate and scale on validation rows, which the model has not seen."""
    with _command(debug) as out:
        import latedrop
        from latedrop.calibration.search import PAPER_RATES
        from latedrop.cli.feed import Labelled, Source
        from latedrop.cli.models import load_model
        from latedrop.cli.writing import check_output

        check_output(output)
        if report is not None:
            need("plots", "matplotlib")
            check_output(report, ".html", ".htm")
        network = load_model(model, weights, trust=trust, device=device)
        source = Source.of(data, _split(inputs), _split(target), ignored=_split(ignore), labelled=True)
        used = Labelled(source, network, batch_size, drop_nan, seed=seed)
        held = None
        if conformal_data is not None:
            other = Source.of(conformal_data, source.columns.inputs, source.columns.targets, labelled=True)
            held = Labelled(other, network, batch_size, drop_nan)
        elif intervals == "conformal":
            used, held = (Labelled(source, network, batch_size, drop_nan, part, seed) for part in ("fit", "held"))
        with source.explained():
            uq = latedrop.calibrate(
                network,
                used,
                PAPER_RATES if rates is None else _numbers("--rates", rates),
                draws,
                method=method,  # type: ignore[arg-type]
                floor=floor,
                per_site=per_site,
                scale=_scale(scale),  # type: ignore[arg-type]
                intervals=intervals,  # type: ignore[arg-type]
                conformal_data=held,
                select=select or None,
                kind=kind,  # type: ignore[arg-type]
                readout=_readout(readout),
                seed=seed,
                batch_size=batch_size,
                progress=sys.stderr.isatty(),
            )
        uq.calibration = replace(uq.calibration, columns=source.names())
        uq.save(output)
        files = [output]
        if report is not None:
            from latedrop.report import write_report

            write_report(
                report,
                title=f"Calibration of {model}",
                calibration=uq.calibration,
                reproduce={"model": model, "data": data},
            )
            files.append(report)
        dropped = used.dropped + (0 if held is None else held.dropped)
        with redirect_stdout(out):
            _print_calibration(uq.calibration, dropped, files, as_json)


def predict(
    model: Model,
    calibration: Record,
    data: Annotated[str, option("Rows: csv, parquet, npz or pt; - is csv from stdin.", **_DATA)],
    output: Annotated[
        str, option("File for csv, parquet or npz; - is csv to stdout.", "--output", "-o", **_OUTPUT)
    ] = "-",
    level: Level = 0.9,
    keep: Annotated[
        list[str] | None, option("Columns to carry along, commas between; may be repeated.", **_DATA)
    ] = None,
    inputs: Inputs = None,
    ignore: Ignore = None,
    batch_size: BatchSize = 256,
    scale: Annotated[
        str | None,
        option(
            "optimal, relaxed or a number; as calibrated by default.", autocompletion=lambda: ["optimal", "relaxed"]
        ),
    ] = None,
    weights: Weights = None,
    trust: Trust = False,
    device: Device = "auto",
    readout: ReadOut = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write mean, std, low and high of every row.

    Rows keep their order, and the file may be larger than memory. A row with missing values stays in its place, with
    nothing in these columns, and is warned of.
    """
    with _command(debug) as out:
        from latedrop.calibration.intervals import checked_level
        from latedrop.cli.feed import Places, Source, output_names, predicted
        from latedrop.cli.models import load_model
        from latedrop.cli.tables import STANDARD, read_batches
        from latedrop.cli.writing import ROW_FILES, check_output, write_rows

        checked_level(level)
        if output != STANDARD:
            check_output(output, *ROW_FILES)
        elif as_json:
            raise ArgumentError("expected --json or the rows on stdout; found both. Name a file with -o.")
        network = load_model(model, weights, trust=trust, device=device)
        uq = _calibrated(calibration, network, readout, batch_size, scale)
        source = Source.of(
            data, _split(inputs), kept=_split(*keep or ()), ignored=_split(ignore), record=uq.calibration
        )
        flat = not output.lower().endswith(".npz")
        names = [name for numbered in output_names(uq.calibration, flat=flat).values() for name in numbered]
        _check_kept(source.columns.kept, names)
        count, empty = 0, Places(source.table.unit)
        with source.explained(), write_rows(output, out) as append, _bar(source.table.count) as tick:
            for rows in read_batches(source.table, source.columns, batch_size):
                append({**rows.kept, **predicted(uq, rows, level, flat=flat)})
                empty.add(rows)
                count += len(rows)
                tick(len(rows))
            if not count:
                raise DataError(f"expected at least one row in {data}; found none.")
        if empty.count:
            say(
                f"warning: NaN or missing values in {empty.count} of {count} rows, at {empty} of {data}; their "
                "predictions are left empty."
            )
        if as_json:
            summary = {"rows": count, "empty": empty.count, "level": level, "columns": names, "file": output}
            print(json.dumps(summary, indent=1), file=out)
        elif output != STANDARD:
            print(f"{count} rows predicted, with intervals at level {level:g}\nwritten: {output}", file=out)


def evaluate(
    model: Model,
    calibration: Record,
    data: Annotated[str, option("Test rows: csv, parquet, npz or pt; - is csv from stdin.", **_DATA)],
    target: Target = None,
    inputs: Inputs = None,
    ignore: Ignore = None,
    drop_nan: DropNan = False,
    level: Level = 0.9,
    plot: Annotated[str | None, option("Draw the calibration curves to this PNG file.", **_OUTPUT)] = None,
    report: Annotated[str | None, option("Write a page about it, HTML.", **_OUTPUT)] = None,
    batch_size: BatchSize = 256,
    weights: Weights = None,
    trust: Trust = False,
    device: Device = "auto",
    readout: ReadOut = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Score the uncertainty on test rows: raw, scaled and relaxed side by side."""
    with _command(debug) as out:
        from latedrop.calibration.evaluation import compare
        from latedrop.calibration.intervals import checked_level
        from latedrop.cli.feed import Labelled, Source, measure
        from latedrop.cli.models import load_model
        from latedrop.cli.writing import check_output

        checked_level(level)
        for path, suffix in ((plot, ".png"), (report, ".html")):
            if path is not None:
                need("plots", "matplotlib")
                check_output(path, suffix)
        network = load_model(model, weights, trust=trust, device=device)
        uq = _calibrated(calibration, network, readout, batch_size, None)
        source = Source.of(
            data, _split(inputs), _split(target), ignored=_split(ignore), labelled=True, record=uq.calibration
        )
        rows = Labelled(source, network, batch_size, drop_nan)
        with source.explained(), _bar(source.table.count) as tick:
            prediction, truth = measure(uq, rows, tick)
        found = {"": compare(prediction, truth, level=level)}
        if prediction.mean.dim() == 2 and prediction.mean.shape[1] > 1:
            names = source.columns.targets
            names = names if len(names) > 1 else tuple(f"output {k}" for k in range(prediction.mean.shape[1]))
            found |= {name: compare(prediction, truth, level=level, output=k) for k, name in enumerate(names)}
        files = []
        if plot is not None:
            _draw_curves(plot, found[""])
            files.append(plot)
        if report is not None:
            from latedrop.report import write_report

            write_report(
                report,
                title=f"{model} on {Path(data).name}",
                calibration=uq.calibration,
                prediction=prediction,
                target=truth,
                level=level,
                reproduce={"model": model, "calibration": calibration, "data": data},
            )
            files.append(report)
        with redirect_stdout(out):
            _print_evaluations(found, rows.dropped, files, as_json)


@contextmanager
def _command(debug: bool) -> Iterator[TextIO]:
    """One line for whatever goes wrong, in the words of the command line; gives stdout.

    What the user's model prints by itself goes to stderr, so that stdout holds nothing but what was asked for.
    """
    out = sys.stdout
    with one_line(debug), redirect_stdout(sys.stderr):
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


def _in_options(text: str) -> str:
    """The arguments of Python that a message speaks of, as options: `floor=True` is --floor."""
    names = "method|floor|per_site|draws|rates|select|kind|readout|intervals|conformal_data|batch_size|scale|trust"

    def spoken(match: re.Match[str]) -> str:
        value = match["value"].replace("True", "").strip("[]'")
        return f"--{match['name'].replace('_', '-')}{' ' if value else ''}{value}"

    text = re.sub(rf"\b(?P<name>{names})=(?P<value>True|'\w+'|\['[^]]+'\]|(?![\[{{\w]))", spoken, text)
    text = text.replace(" conformal_data", " --conformal-data")
    return text.replace("Pass the same function to load()", "Name it: --readout package.module:function")


def _split(*texts: str | None) -> list[str]:
    return [name.strip() for text in texts if text for name in text.split(",") if name.strip()]


def _numbers(name: str, text: str) -> list[float]:
    try:
        return [float(part) for part in _split(text)]
    except ValueError:
        raise ArgumentError(f"expected numbers with commas between for {name}; found {text!r}.") from None


def _scale(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


def _readout(text: str | None) -> "Readout":
    if text is None:
        return None
    if ":" in text:
        from latedrop.cli.models import load_function

        return load_function(text)
    return int(text) if text.isdecimal() else text


def _calibrated(path: str, network: "nn.Module", readout: str | None, size: int, scale: str | None) -> "Predictor":
    from latedrop.calibration.predictor import load

    uq = load(path, network, _readout(readout))
    uq.batch_size = size
    return uq if scale is None else uq.scaled(_scale(scale))  # type: ignore[arg-type]


def _example(network: "nn.Module", shapes: Sequence[str] | None) -> Any:
    """Random rows, of the shapes on the command line or those of an exported program."""
    import torch

    from latedrop.cli.models import example_inputs
    from latedrop.model.arrays import place

    if not shapes:
        found = example_inputs(network)
        if found is None:
            raise ArgumentError("expected --data or --input-shape, rows to run the model on; found none.")
        return place(found, network)
    dice = torch.Generator().manual_seed(0)
    made = []
    for text in shapes:
        try:
            sizes = [int(part) for part in _split(text)]
        except ValueError:
            sizes = []
        if not sizes or min(sizes) < 1:
            raise ArgumentError(f"expected --input-shape as the sizes of one row, such as 3,224,224; found {text!r}.")
        made.append(torch.randn(3, *sizes, generator=dice).numpy())
    return place(tuple(made) if len(made) > 1 else made[0], network)


def _check_kept(kept: Sequence[str], names: Sequence[str]) -> None:
    both = [name for name in kept if name in names]
    if both:
        raise ArgumentError(
            f"expected to keep columns beside {', '.join(names[:4])}; found {', '.join(both)}, names of the output. "
            "Rename them in the data."
        )


@contextmanager
def _bar(total: int | None) -> Iterator[Callable[[int], Any]]:
    from tqdm import tqdm

    with tqdm(total=total, unit=" rows", delay=2, disable=not sys.stderr.isatty(), leave=False) as bar:
        yield bar.update


def _draw_curves(path: str, rows: "Sequence[Evaluation]") -> None:
    from latedrop import plots
    from latedrop.files import write_aside
    from latedrop.report import png

    figure = plots.new_figure(6.4, 4.5)
    plots.calibration_curves({row.label: (row.levels, row.observed) for row in rows}, figure.subplots())
    write_aside(path, png(figure))


def _print_sites(found: "Sites", as_json: bool) -> None:
    if as_json:
        print(json.dumps({"sites": found.to_list()}, indent=1))
        return
    lines = [["site", "layer", "masks", "units", "calls"]]
    lines += [[s.name, s.layer, s.kind, " x ".join(map(str, s.units)), str(s.calls)] for s in found]
    print_table(lines, texts=3)
    print(f"{len(found)} site{'s' if len(found) > 1 else ''}: dropout goes on the input of these layers.")


def _print_calibration(c: "Calibration", dropped: int, files: Sequence[str], as_json: bool) -> None:
    from latedrop.calibration.intervals import Conformal

    if as_json:
        keys = ("rate", "scale", "relaxed_scale", "floor", "choice", "method", "draws", "rows", "shares", "columns")
        record: dict[str, Any] = {key: getattr(c, key) for key in keys}
        intervals = "gaussian" if c.intervals is None else c.intervals.kind
        table = [asdict(row) for row in c.table]
        record |= {"intervals": intervals, "dropped": dropped, "table": table, "files": list(files)}
        print(json.dumps(record, indent=1))
        return
    print_table(_rate_table(c), marked=[row.rate for row in c.table].index(c.rate))
    left = f", {dropped} left out" if dropped else ""
    if isinstance(c.intervals, Conformal):
        left += f", {len(c.intervals.scores[0])} more for the conformal intervals"
    print(f"{c.rows} validation rows{left}; the rate in use is marked *.\nwritten: {', '.join(files)}")


def _rate_table(c: "Calibration") -> list[list[str]]:
    names = ["nll_unscaled", "nll_scaled", "nll_relaxed", "ma_unscaled", "ma_scaled", "ma_relaxed"]
    heads = ["NLL\nraw", "NLL\nscaled", "NLL\nrelaxed", "MA\nraw", "MA\nscaled", "MA\nrelaxed"]
    lines = [["rate", "RMSE", *heads, "scale"]]
    for row in c.table:
        rate = "per site" if isinstance(row.rate, dict) else f"{row.rate:.4g}"
        ends = sorted({min(row.scale), max(row.scale)})
        values = [f"{getattr(row, name):.3f}" for name in names]
        lines.append(
            [
                rate + (" *" if row.rate == c.rate else ""),
                f"{row.rmse:.4g}",
                *values,
                " to ".join(f"{value:.4g}" for value in ends),
            ]
        )
    return lines


def _print_evaluations(
    found: "dict[str, tuple[Evaluation, ...]]", dropped: int, files: Sequence[str], as_json: bool
) -> None:
    from latedrop.report import table

    rows = found[""][0].rows
    if as_json:
        outputs = {name: [asdict(row) for row in part] for name, part in found.items()}
        together = outputs.pop("")
        record = {"rows": rows, "dropped": dropped, "evaluations": together, "outputs": outputs, "files": list(files)}
        print(json.dumps(record, indent=1))
        return
    left = f", {dropped} left out" if dropped else ""
    print(f"{rows} test rows{left}")
    for name, part in found.items():
        if len(found) > 1:
            print(name or "all outputs together")
        print_table(table(part))
    if files:
        print(f"written: {', '.join(files)}")

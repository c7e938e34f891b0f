"""The commands on the user's own model and files: `latedrop sites`, `calibrate`, `predict`, `evaluate`.

Plain functions that parse, call and print; `cli` hands them to typer. What a command needs is imported inside it. Rows
are read, predicted and written a batch at a time.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from inspect import getdoc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latedrop.cli import options as opt
from latedrop.cli.command import command, typed
from latedrop.cli.options import example_rows, numbers, readout_of, scale_of, split
from latedrop.cli.printing import broken, draw_curves, print_calibration, print_judgement, print_sites
from latedrop.errors import ArgumentError, DataError
from latedrop.progress import progress
from latedrop.terminal import need, say

if TYPE_CHECKING:
    from torch import nn

    from latedrop.calibration.judgement import Judgement
    from latedrop.calibration.predictor import Predictor
    from latedrop.cli.feed import Places, Source

__all__ = ["calibrate", "evaluate", "predict", "sites", "with_examples"]

_READ = ("--data", "--conformal-data", "--reference", "MODEL", "--weights")
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
        "latedrop predict my_model:net cal.json --data new.csv.gz | head",
    ),
    "evaluate": (
        "latedrop evaluate my_model:net cal.json --data test.csv --target price",
        "latedrop evaluate model.pt2 cal.json --data test.npz --report page.html",
        'latedrop evaluate my_model:net cal.json --data test.csv \\\n    --require "coverage90>=0.85,gain>=0"',
    ),
    "export": (
        "latedrop export my_model:net cal.json -o model.onnx",
        "latedrop export my_model:net cal.json -o model.onnx --input-shape 3,224,224 --level 0.95",
    ),
}


def with_examples(command: Callable[..., None]) -> str:
    """The help of a command: what it does, and lines to start from."""
    lines = "\n".join(_EXAMPLES[command.__name__]).replace("\n", "\n  ")
    return f"{getdoc(command)}\n\n\b\nExamples:\n  {lines}"


def sites(
    model: opt.Model,
    data: opt.Example = None,
    input_shape: opt.InputShape = None,
    inputs: opt.Inputs = None,
    ignore: opt.Ignore = None,
    target: opt.Target = None,
    images: opt.Pictured = opt.NO_IMAGES,
    select: opt.Select = None,
    kind: opt.Kind = "element",
    weights: opt.Weights = None,
    trust: opt.Trust = False,
    device: opt.Device = "auto",
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """List where dropout would go.

    It needs rows to run the model on: --data, --input-shape, or those that a .pt2 file was exported with.
    """
    with command(debug) as out:
        from latedrop.cli.feed import Source
        from latedrop.cli.models import load_model
        from latedrop.model.finding import find_sites

        if data is not None and input_shape:
            raise ArgumentError("expected --data or --input-shape; found both. Leave one out.")
        network = load_model(model, weights, trust=trust, device=device, untrained=True)
        columns: dict[str, Any] = {"targets": split(target), "ignored": split(ignore), "images": images.of()}
        source = None if data is None else Source.of(data, split(inputs), **columns)
        with nullcontext() if source is None else source.explained():
            x = example_rows(network, input_shape) if source is None else source.example(network)
            found = find_sites(network, x, select=select or None, kind=kind)  # type: ignore[arg-type]
        with redirect_stdout(out):
            print_sites(found, as_json)


def calibrate(
    model: opt.Model,
    data: opt.Validation,
    output: opt.Written,
    target: opt.Target = None,
    learned: opt.TargetUnit = opt.AS_THEY_ARE,
    inputs: opt.Inputs = None,
    ignore: opt.Ignore = None,
    row_weights: opt.RowWeights = None,
    images: opt.Pictured = opt.NO_IMAGES,
    drop_nan: opt.DropNan = False,
    batch_size: opt.BatchSize = 256,
    weights: opt.Weights = None,
    trust: opt.Trust = False,
    untrained: opt.Untrained = False,
    device: opt.Device = "auto",
    readout: opt.ReadOut = None,
    select: opt.Select = None,
    kind: opt.Kind = "element",
    reference: opt.Reference = None,
    terms: opt.Terms = None,
    no_guard: opt.NoGuard = False,
    method: opt.Method = None,
    rates: opt.Rates = None,
    draws: opt.Draws = None,
    floor: opt.Floor = False,
    per_site: opt.PerSite = False,
    scale: opt.Scale = "optimal",
    intervals: opt.Intervals = None,
    conformal_data: opt.Held = None,
    seed: opt.Seed = 0,
    unit: opt.Unit = None,
    report: opt.AlsoReport = None,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Fit the variance to validation rows, which the model has not seen, and say what it is worth."""
    with command(debug) as out:
        import latedrop
        from latedrop.cli.feed import Labelled, Source, conformal_rows, usual_rows
        from latedrop.cli.models import load_model

        read = dict(zip(_READ, (data, conformal_data, reference, model, weights), strict=True))
        _check_written(output, report, {**read, "--readout": readout})
        network = load_model(model, weights, trust=trust, device=device, untrained=untrained)
        columns = split(inputs), split(target), (), split(ignore), row_weights
        source = Source.of(data, *columns, labelled=True, images=images.of())
        rows, units = Labelled(source, network, batch_size, drop_nan, seed=seed), _units(unit, source)
        used, held = conformal_rows(rows, conformal_data, halve=intervals == "conformal")
        options: dict[str, Any] = {"method": method, "draws": draws, "floor": floor, "per_site": per_site, "kind": kind}
        options |= {"guard": False if no_guard else None, "reference": usual_rows(source, reference, rows)}
        options |= {"intervals": intervals, "conformal_data": held, "seed": seed, "batch_size": batch_size}
        options |= {"target": learned.of(), "row_weights": used.weights_to_come(), "task": "regression"}
        options |= _read_options(rates, terms, scale, readout, select)
        with source.explained():
            uq = latedrop.calibrate(network, used, **options)
        uq.calibration = replace(uq.calibration, columns=source.names())
        files = [*map(str, uq.save(output)), *_calibration_report(report, uq, units, read)]
        with redirect_stdout(out):
            print_calibration(uq.calibration, used.dropped + (held.dropped if held else 0), files, as_json)


def predict(
    model: opt.Model,
    calibration: opt.Record,
    data: opt.New,
    output: opt.Predictions = "-",
    level: opt.Level = 0.9,
    keep: opt.Keep = None,
    inputs: opt.Inputs = None,
    ignore: opt.Ignore = None,
    images: opt.Pictured = opt.NO_IMAGES,
    batch_size: opt.BatchSize = 256,
    scale: opt.OtherScale = None,
    weights: opt.Weights = None,
    trust: opt.Trust = False,
    untrained: opt.Untrained = False,
    device: opt.Device = "auto",
    readout: opt.ReadOut = None,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Write mean, std, low and high of every row.

    Rows keep their order, and the file may be larger than memory. A row with missing values stays in its place, with
    nothing in these columns, and is warned of.
    """
    with command(debug) as out:
        from latedrop.cli.feed import Source, output_names
        from latedrop.cli.models import load_model
        from latedrop.cli.tables import STANDARD
        from latedrop.cli.writing import ROW_FILES, check_apart, check_output
        from latedrop.metrics.levels import checked_level

        checked_level(level)
        if output != STANDARD:
            check_output(output, *ROW_FILES)
        elif as_json:
            raise ArgumentError("expected --json or the rows on stdout; found both. Name a file with -o.")
        sources = {"MODEL": model, "CALIBRATION": calibration, "--weights": weights, "--data": data}
        check_apart({"--output": output}, {**sources, "--readout": readout})
        network = load_model(model, weights, trust=trust, device=device, untrained=untrained)
        uq = _calibrated(calibration, network, readout, batch_size, scale)
        columns: dict[str, Any] = {
            "kept": split(*keep or ()),
            "ignored": split(ignore),
            "images": images.of(uq.calibration),
        }
        source = Source.of(data, split(inputs), **columns, record=uq.calibration)
        flat = not output.lower().endswith(".npz")
        names = [name for numbered in output_names(uq.calibration, flat=flat).values() for name in numbered]
        _check_kept(source.columns.kept, names)
        count, empty = _write_predictions(uq, source, output, out, level, flat=flat)
        if as_json:
            summary = {"rows": count, "empty": empty.count, "level": level, "columns": names, "file": output}
            print(json.dumps(summary, indent=1), file=out)
        elif output != STANDARD:
            print(f"{count} rows predicted, with intervals at level {level:g}\nwritten: {output}", file=out)


def evaluate(
    model: opt.Model,
    calibration: opt.Record,
    data: opt.Test,
    target: opt.Target = None,
    inputs: opt.Inputs = None,
    ignore: opt.Ignore = None,
    row_weights: opt.RowWeights = None,
    images: opt.Pictured = opt.NO_IMAGES,
    drop_nan: opt.DropNan = False,
    level: opt.Level = 0.9,
    unit: opt.Unit = None,
    require: opt.Require = None,
    plot: opt.Plot = None,
    report: opt.Report = None,
    batch_size: opt.BatchSize = 256,
    weights: opt.Weights = None,
    trust: opt.Trust = False,
    untrained: opt.Untrained = False,
    device: opt.Device = "auto",
    readout: opt.ReadOut = None,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Say what the uncertainty is worth on test rows, beside one constant variance."""
    with command(debug) as out:
        from latedrop.calibration.requirements import parsed_requirements
        from latedrop.cli.feed import Labelled, Source
        from latedrop.cli.judging import again, judged, read_files
        from latedrop.cli.models import load_model
        from latedrop.cli.writing import check_apart
        from latedrop.metrics.levels import checked_level

        checked_level(level)
        parsed_requirements(require) if require is not None else ()
        _check_drawn(plot, ".png")
        _check_page(report)
        sources = {"--data": data, "CALIBRATION": calibration, "MODEL": model, "--weights": weights}
        check_apart({"--plot": plot, "--report": report}, {**sources, "--readout": readout})
        network = load_model(model, weights, trust=trust, device=device, untrained=untrained)
        uq = _calibrated(calibration, network, readout, batch_size, None)
        known: dict[str, Any] = {"images": images.of(uq.calibration), "record": uq.calibration}
        columns = split(inputs), split(target), (), split(ignore), row_weights
        source = Source.of(data, *columns, labelled=True, **known)
        rows = Labelled(source, network, batch_size, drop_nan)
        units = _units(unit, source)
        found = judged(uq, rows, level, units)
        held = found.require(require) if require is not None else ()
        read = read_files(sources)
        page: dict[str, Any] = {"title": f"{model} on {Path(data).name}", "calibration": uq.calibration}
        page |= {"judgement": found, "place": source.table.unit, "unit": units, "reproduce": again(typed.get(), read)}
        files = [*_curves(plot, found), *_report(report, **page)]
        with redirect_stdout(out):
            facts = {"command": typed.get(), "read": read, "dropped": rows.dropped}
            print_judgement(found, held, files, as_json, facts)
        broken(held)


def _calibrated(path: str, network: "nn.Module", readout: str | None, size: int, scale: str | None) -> "Predictor":
    from latedrop.calibration.loading import load

    uq: Predictor = load(path, network, readout_of(readout))
    uq.batch_size = size
    return uq if scale is None else uq.scaled(scale_of(scale))


def _read_options(
    rates: str | None, terms: str | None, scale: str, readout: str | None, select: list[str] | None
) -> dict[str, Any]:
    """Options of `latedrop.calibrate` that are a text on the command line."""
    named = {"rates": rates and numbers("--rates", rates), "terms": terms and split(terms)}
    return {**named, "scale": scale_of(scale), "readout": readout_of(readout), "select": select or None}


def _check_written(output: str, report: str | None, read: dict[str, str | None]) -> None:
    """Before the work: a calibration and a page can be written, and are none of the files that are read."""
    from latedrop.cli.writing import check_apart, check_output

    check_output(output)
    _check_page(report)
    check_apart({"--output": output, "--report": report}, read)


def _check_drawn(path: str | None, *suffixes: str) -> None:
    """Before the work: a figure can be drawn and written."""
    from latedrop.cli.writing import check_output

    if path is not None:
        need("plots", "matplotlib")
        check_output(path, *suffixes)


def _check_page(path: str | None) -> None:
    """Before the work: a page can be written."""
    from latedrop.cli.writing import check_output

    if path is not None:
        check_output(path, ".html", ".htm")


def _report(path: str | None, **facts: Any) -> list[str]:
    """Write the page where one is asked for; its path as the files that were written."""
    if path is None:
        return []
    from latedrop.report import write_report

    write_report(path, **facts)
    return [path]


def _units(text: str | None, source: "Source") -> list[str]:
    """None, one, or one for each target; how many outputs an array holds is not known yet."""
    from latedrop.calibration.judgement import output_units

    found = split(text)
    if source.table.word == "column":
        output_units(len(source.columns.targets), found)
    return found


def _calibration_report(
    path: str | None, uq: "Predictor", units: Sequence[str], read: dict[str, str | None]
) -> list[str]:
    if path is None:
        return []
    from latedrop.cli.judging import again, read_files

    facts: dict[str, Any] = {"title": f"Calibration of {read['MODEL']}", "calibration": uq.calibration}
    return _report(path, **facts, unit=units, reproduce=again(typed.get(), read_files(read)))


def _check_kept(kept: Sequence[str], names: Sequence[str]) -> None:
    both = [name for name in kept if name in names]
    if both:
        raise ArgumentError(
            f"expected to keep columns beside {', '.join(names[:4])}; found {', '.join(both)}, names of the output. "
            "Rename them in the data."
        )


def _write_predictions(
    uq: "Predictor", source: "Source", output: str, out: Any, level: float, *, flat: bool
) -> "tuple[int, Places]":
    """Batch by batch from the source to the output; how many rows, and which of them are empty."""
    from latedrop.cli.feed import Places, predicted
    from latedrop.cli.writing import write_rows

    path, count, empty = source.table.path, 0, Places(source.table.unit)
    with source.explained(), write_rows(output, out) as append, progress("predicting", source.table.count) as tick:
        for rows in source.read(uq.model, uq.batch_size):
            append({**rows.kept, **predicted(uq, rows, level, flat=flat)})
            empty.add(rows)
            count += len(rows)
            tick(len(rows))
        if not count:
            raise DataError(f"expected at least one row in {path}; found none.")
    if empty.count:
        say(
            f"warning: NaN or missing values in {empty.count} of {count} rows, at {empty} of {path}; their "
            "predictions are left empty."
        )
    return count, empty


def _curves(path: str | None, found: "Judgement") -> list[str]:
    if path is None:
        return []
    draw_curves(path, found.together.evaluations)
    return [path]

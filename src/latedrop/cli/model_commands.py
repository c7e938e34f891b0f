"""The commands on the user's own model and files: `latedrop sites`, `calibrate`, `predict`, `evaluate`, `export`.

Plain functions that parse, call and print; `app` hands them to typer. What a command needs is imported inside it. Rows
are read, predicted and written a batch at a time.
"""

import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any, Literal

from latedrop.cli import options as opt
from latedrop.cli.command import again, command, read_files, typed
from latedrop.cli.options import split
from latedrop.cli.printing import broken, print_calibration, print_judgement, print_sites
from latedrop.errors import ArgumentError
from latedrop.terminal import need, option

__all__ = ["calibrate", "evaluate", "export", "predict", "sites"]

_STANDARD = "-"  # as in `tables`, which is imported late
_SOME, _MANY, _NUMBERS = 256, 8192, 1 << 20  # rows at once; the most rows of a table, and the most of its numbers
_ON_CPU = opt.Loading(device="cpu")


def sites(
    *,
    model: opt.Model,
    data: opt.Example = None,
    input_shape: opt.InputShape = None,
    target: opt.Target = None,
    table: opt.Tabled,
    select: opt.Select = None,
    weights: opt.Weights = None,
    device: opt.Device = "auto",
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """List the layers whose inputs take dropout; the weights need not be those of the trained model."""
    with command(debug) as out:
        from latedrop.cli.feed import example
        from latedrop.named import load_model
        from latedrop.network.find_sites import find_sites

        network = load_model(model, weights, device=device, untrained=True)
        rows = example(table, network, data, input_shape, target=target)
        with redirect_stdout(out):
            print_sites(find_sites(network, rows, select=select or None), as_json)


def calibrate(
    *,
    model: opt.Model,
    data: Annotated[str, option(f"Validation rows: {opt.FILES}.")],
    output: Annotated[str, option("The calibration to write, JSON.", "--output", "-o")],
    target: opt.Target = None,
    table: opt.Tabled,
    reference: Annotated[
        str | None, opt.in_data("Training rows, whose inputs tell what is usual. Recommended.")
    ] = None,
    classes: opt.Classes,
    unit: opt.TargetUnit,
    drop_nan: opt.DropNan = False,
    batch_size: opt.BatchSize = _SOME,
    fitting: opt.Fitting,
    intervals: Annotated[
        Literal["student", "gaussian", "isotonic", "conformal"] | None,
        option("How the intervals are shaped; by default as suits the method."),
    ] = None,
    conformal_data: Annotated[
        str | None, opt.in_data("Rows for conformal intervals or sets; by default half of --data.")
    ] = None,
    seed: Annotated[int, option("Fixes all masks, and which rows are held out.", min=0)] = 0,
    loading: opt.Loading,
    select: opt.Select = None,
    report: opt.Report = None,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Fit the variance, or the probabilities of classes, to rows not used for training; say what it is worth."""
    with command(debug) as out:
        import latedrop
        from latedrop.cli.feed import Source, TableBatches, conformal_rows, remembering, task_of
        from latedrop.cli.predicting import write_page
        from latedrop.cli.writing import check_outputs
        from latedrop.named import readout_of

        read = loading.files(model, data=data, conformal_data=conformal_data, reference=reference)
        check_outputs({"--output": output, "--report": report}, read)
        if conformal_data is not None and intervals not in (None, "conformal"):
            raise ArgumentError(f"expected --conformal-data with --intervals conformal; found {intervals}.")
        network, readout = loading.load(model), readout_of(loading.readout)
        source = Source.of(data, table, split(target), labelled=True).with_labels(classes)
        rows = TableBatches(source, network, batch_size, drop_nan, seed=seed)
        used, held_out = conformal_rows(rows, conformal_data, halve=intervals == "conformal" or classes.holds_out)
        usual = None
        if reference is not None:
            usual = TableBatches(source.another(reference, labelled=False), network, batch_size, drop_nan)
        with source.explained():
            uq: Any = latedrop.calibrate(
                network,
                used,
                readout=readout,
                sites=select or None,
                method=fitting.method_of(seed),
                target=unit.transform(),
                intervals=intervals if held_out is None else None,  # type: ignore[arg-type]
                reference=usual,
                batches=latedrop.Batches(batch_size),
                task=task_of(classes.task, source),
            )
            uq = fitting.scaled(uq)
            uq = uq if held_out is None or classes.holds_out else uq.conformal(held_out)
            uq = remembering(uq, source, classes, held_out)
        uq.save(output)
        if report is not None:
            reproduce = again(read_files(read))
            write_page(report, title=f"Calibration of {model}", calibration=uq.calibration, reproduce=reproduce)
        dropped = used.dropped + (held_out.dropped if held_out else 0)
        with redirect_stdout(out):
            print_calibration(uq.calibration, dropped, [output, *([report] if report else [])], as_json)


def predict(
    *,
    model: opt.Model,
    calibration: opt.Record,
    data: Annotated[str, option(f"Rows: {opt.FILES}; - is csv from stdin.")],
    output: Annotated[
        str, opt.in_output("File: csv, parquet or npz; - is csv to stdout.", "--output", "-o")
    ] = _STANDARD,
    level: opt.Level = None,
    table: opt.Tabled,
    keep: Annotated[list[str] | None, opt.in_data("Columns to carry along, separated by commas.")] = None,
    drop_nan: opt.DropNan = False,
    batch_size: Annotated[
        int | None, opt.in_data("Rows at once; 8192 of tables, 256 of arrays and images.", min=1)
    ] = None,
    loading: opt.Loading,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Write mean, std, low and high of every row; of classes the label, its confidence and every probability.

    Rows keep their order, and the file may be larger than memory. A row with missing values stays in its place, with
    nothing in these columns, and is warned of; --drop-nan leaves it out.
    """
    with command(debug) as out:
        from latedrop.cli.feed import Source
        from latedrop.cli.predicting import checked_sets, write_predictions
        from latedrop.cli.writing import ROW_FILES, check_outputs
        from latedrop.metrics.levels import checked_level

        _ = level is None or checked_level(level)
        read = loading.files(model, calibration, data=data)
        if output == _STANDARD and as_json:
            raise ArgumentError("expected --json or the rows on stdout; found both. Name a file with -o.")
        check_outputs({"--output": output}, read, ROW_FILES)
        uq = loading.load_calibrated(model, calibration, batch_size or _SOME)
        source = Source.of(data, table, record=uq.calibration, carried=split(*keep or ()))
        if batch_size is None and not source.table.arrays:
            uq.batch_size = max(_SOME, min(_MANY, _NUMBERS // len(source.columns.inputs)))
        level = checked_sets(uq.calibration, level)
        count, empty, names = write_predictions(uq, source, output, out, level, drop=drop_nan)
        if as_json:
            summary: dict[str, Any] = {"rows": count, "empty": 0 if drop_nan else empty.count}
            summary |= {"dropped": empty.count if drop_nan else 0, "level": level, "columns": names, "file": output}
            print(json.dumps(summary, indent=1), file=out)
        elif output != _STANDARD:
            kind = "sets" if "set" in names else "intervals"
            print(f"{count} rows predicted{'' if level is None else f', with {kind} at level {level:g}'}", file=out)
            print(f"written: {output}", file=out)


def evaluate(
    *,
    model: opt.Model,
    calibration: opt.Record,
    data: Annotated[str, option(f"Test rows: {opt.FILES}; - is csv from stdin.")],
    target: opt.Target = None,
    table: opt.Tabled,
    drop_nan: opt.DropNan = False,
    batch_size: opt.BatchSize = _SOME,
    loading: opt.Loading,
    level: opt.Level = None,
    unit: Annotated[str | None, opt.in_output("Unit of the target, or one for each, separated by commas.")] = None,
    require: Annotated[
        str | None, opt.in_output('Bounds, such as "coverage90>=0.85,gain>=0"; exit code 3 where one does not hold.')
    ] = None,
    report: opt.Report = None,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Say what the uncertainty is worth on test rows, beside one constant variance, or one temperature for classes."""
    with command(debug) as out:
        from latedrop.cli.feed import Source, TableBatches
        from latedrop.cli.predicting import checked_sets, judged, write_page
        from latedrop.cli.writing import check_outputs
        from latedrop.evaluation.judgement import parsed_requirements
        from latedrop.metrics.levels import checked_level

        _ = level is None or checked_level(level)
        _ = require is None or parsed_requirements(require)
        read = loading.files(model, calibration, data=data)
        check_outputs({"--report": report}, read)
        uq: Any = loading.load_calibrated(model, calibration, batch_size)
        if unit is not None and hasattr(uq.calibration, "classes"):
            raise ArgumentError("expected options that classes have; found --unit. Leave it out.")
        level = checked_sets(uq.calibration, level)
        source = Source.of(data, table, split(target), record=uq.calibration, labelled=True)
        rows = TableBatches(source, uq.model, batch_size, drop_nan)
        judgement, page = judged(uq, rows, level, split(unit))
        requirements = () if require is None else judgement.require(require)
        facts: dict[str, Any] = {"command": typed.get(), "read": read_files(read), "dropped": rows.dropped}
        if report is not None:
            page |= {"title": f"{model} on {Path(data).name}", "reproduce": again(facts["read"])}
            write_page(report, judgement=judgement, **page)
        with redirect_stdout(out):
            print_judgement(judgement, requirements, [report] if report else [], as_json, facts)
        broken(requirements)


def export(
    *,
    model: opt.Model,
    calibration: opt.Record,
    output: Annotated[str, option("The ONNX file to write.", "--output", "-o")],
    data: opt.Example = None,
    input_shape: opt.InputShape = None,
    table: opt.Tabled,
    loading: opt.Loading = _ON_CPU,
    level: opt.Level = opt.LEVEL,
    debug: opt.Debug = False,
) -> None:
    """Write one ONNX file that gives mean, std, low and high; it runs without torch.

    Sizes other than the number of rows are those of an example: --data, --input-shape, or the columns that the
    calibration knows.
    """
    with command(debug) as out:
        need("onnx", "onnx", "onnxruntime")
        from latedrop.cli.feed import example
        from latedrop.cli.writing import check_outputs
        from latedrop.quantiles import checked_level

        checked_level(level)
        check_outputs({"--output": output}, loading.files(model, calibration, data=data), (".onnx",))
        uq: Any = loading.load_calibrated(model, calibration)
        columns = (uq.calibration.columns or {}).get("inputs")
        shapes = input_shape or ([str(len(columns))] if columns and data is None else None)
        rows = example(table, uq.model, data, shapes, record=uq.calibration)
        path = uq.to_onnx(output, rows, **({} if hasattr(uq.calibration, "classes") else {"level": level}))
        print(f"compared with torch on 1, 4 and 7 rows\nwritten: {path}, {path.stat().st_size / 1024:.0f} KB", file=out)

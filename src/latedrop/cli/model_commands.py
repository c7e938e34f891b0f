"""The commands on the user's own model and files: `latedrop sites`, `calibrate`, `predict`, `evaluate`, `export`.

Plain functions that parse, call and print; `app` hands them to typer. What a command needs is imported inside it. Rows
are read, predicted and written a batch at a time.
"""

import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from latedrop.cli import options as opt
from latedrop.cli.command import again, command, read_files, typed
from latedrop.cli.options import readout_of, split
from latedrop.cli.printing import broken, print_calibration, print_judgement, print_sites
from latedrop.errors import ArgumentError
from latedrop.terminal import need

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
    kind: opt.Kind = "element",
    weights: opt.Weights = None,
    trust: opt.Trust = False,
    device: opt.Device = "auto",
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """List the layers whose inputs take dropout; the weights need not be those of the trained model."""
    with command(debug) as out:
        from latedrop.named import load_model
        from latedrop.network.find_sites import find_sites

        _either(data, input_shape)
        network = load_model(model, weights, trust=trust, device=device, untrained=True)
        with table.example(network, data, input_shape, target=target) as rows:
            found = find_sites(network, rows, select=select or None, kind=kind)
        with redirect_stdout(out):
            print_sites(found, as_json)


def calibrate(
    *,
    model: opt.Model,
    data: opt.Validation,
    output: opt.Written,
    target: opt.Target = None,
    table: opt.Tabled,
    reference: opt.Reference = None,
    classes: opt.Classes,
    unit: opt.TargetUnit,
    row_weights: opt.RowWeights = None,
    drop_nan: opt.DropNan = False,
    batch_size: opt.BatchSize = _SOME,
    fitting: opt.Fitting,
    intervals: opt.Intervals = None,
    conformal_data: opt.Held = None,
    seed: opt.Seed = 0,
    loading: opt.Loading,
    select: opt.Select = None,
    kind: opt.Kind = "element",
    report: opt.Report = None,
    detector: opt.MadeDetector = None,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Fit the variance, or the probabilities of classes, to rows not used for training; say what it is worth."""
    with command(debug) as out:
        import latedrop
        from latedrop.cli.feed import Source, TableBatches, conformal_rows
        from latedrop.cli.judging import write_page
        from latedrop.cli.tasks import remembering, task_of, with_labels
        from latedrop.cli.writing import check_outputs

        read = {"--data": data, "--conformal-data": conformal_data, "--reference": reference}
        read |= {"MODEL": model, "--weights": loading.weights, "--readout": loading.readout}
        check_outputs({"--output": output, "--report": report, "--detector": detector}, read)
        if conformal_data is not None and intervals not in (None, "conformal"):
            raise ArgumentError(f"expected --conformal-data with --intervals conformal; found {intervals}.")
        network, readout = loading.load(model), readout_of(loading.readout)
        source = table.source(data, split(target), weight=row_weights, labelled=True)
        source, task = with_labels(source, network, classes, readout)
        rows = TableBatches(source, network, batch_size, drop_nan, seed=seed)
        used, held = conformal_rows(rows, conformal_data, halve=intervals == "conformal" or classes.holds_out)
        usual = None
        if reference is not None:
            training = Source.of(reference, source.columns.inputs, images=source.images)
            usual = TableBatches(training, network, batch_size, drop_nan)
        with source.explained():
            chosen = select or None
            if kind != "element":
                chosen = latedrop.find_sites(network, source.example(network), select=chosen, kind=kind)  # type: ignore
            uq: Any = latedrop.calibrate(
                network,
                used,
                readout=readout,
                sites=chosen,
                method=fitting.method_of(seed),
                target=unit.transform(),
                intervals=intervals if held is None else None,  # type: ignore[arg-type]
                reference=usual,
                batches=latedrop.Batches(batch_size),
                row_weights=used.weights_to_come(),
                task=task_of(task, source),
            )
            uq = fitting.scaled(uq)
            uq = uq if held is None or classes.holds_out else uq.conformal(held)
            uq = remembering(uq, source, classes, held)
            written = [output]
            if detector is not None:
                uq.detector(x for x, _ in held or used).save(detector)
                written.append(detector)
        uq.save(output)
        if report is not None:
            reproduce = again(typed.get(), read_files(read))
            write_page(report, title=f"Calibration of {model}", calibration=uq.calibration, reproduce=reproduce)
            written.insert(1, report)
        with redirect_stdout(out):
            print_calibration(uq.calibration, used.dropped + (held.dropped if held else 0), written, as_json)


def predict(
    *,
    model: opt.Model,
    calibration: opt.Record,
    data: opt.New,
    output: opt.Predictions = _STANDARD,
    level: opt.Level = None,
    table: opt.Tabled,
    keep: opt.Keep = None,
    drop_nan: opt.DropNan = False,
    batch_size: opt.RowsAtOnce = None,
    detector: opt.UsedDetector = None,
    loading: opt.Loading,
    ray: opt.OnRay = None,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Write mean, std, low and high of every row; of classes the label, its confidence and every probability.

    Rows keep their order, and the file may be larger than memory. A row with missing values stays in its place, with
    nothing in these columns, and is warned of; --drop-nan leaves it out.
    """
    with command(debug) as out:
        from latedrop.cli.feed import Places, check_kept
        from latedrop.cli.predicting import check_ray, on_ray, output_names, write_predictions
        from latedrop.cli.writing import ROW_FILES, check_outputs
        from latedrop.detection.detector import Detector
        from latedrop.metrics.levels import checked_level

        _ = level is None or checked_level(level)
        read = {"MODEL": model, "CALIBRATION": calibration, "--weights": loading.weights, "--data": data}
        read |= {"--readout": loading.readout, "--detector": detector}
        if ray is not None:
            check_ray(output, images=table.images is not None, detector=detector is not None, drop=drop_nan)
        elif output == _STANDARD and as_json:
            raise ArgumentError("expected --json or the rows on stdout; found both. Name a file with -o.")
        check_outputs({"--output": output}, read, None if ray is not None else ROW_FILES)
        uq = loading.load_calibrated(model, calibration, batch_size or _SOME)
        source = table.source(data, record=uq.calibration, kept=split(*keep or ()))
        if batch_size is None and not source.table.arrays:
            uq.batch_size = max(_SOME, min(_MANY, _NUMBERS // len(source.columns.inputs)))
        flat = not output.lower().endswith(".npz")
        judge = None if detector is None else Detector.load(detector, uq)
        columns = output_names(uq.calibration, level, flat=flat)
        names = [*(name for names in columns.values() for name in names), *([] if judge is None else ["p_value"])]
        check_kept(source.columns.kept, names)
        if ray is not None:
            given = {**loading._asdict(), "model": model, "calibration": calibration}
            count, empty = on_ray(ray, uq, source, output, level, batch_size, **given), Places("index")
        else:
            count, empty = write_predictions(uq, source, output, out, level, judge, flat=flat, drop=drop_nan)
        level = opt.LEVEL if level is None and "label" not in names else level
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
    data: opt.Test,
    target: opt.Target = None,
    table: opt.Tabled,
    row_weights: opt.RowWeights = None,
    drop_nan: opt.DropNan = False,
    batch_size: opt.BatchSize = _SOME,
    loading: opt.Loading,
    level: opt.Level = None,
    unit: opt.Unit = None,
    require: opt.Require = None,
    report: opt.Report = None,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Say what the uncertainty is worth on test rows, beside one constant variance, or one temperature for classes."""
    with command(debug) as out:
        from latedrop.cli.feed import TableBatches
        from latedrop.cli.judging import check_options, judged, units_of, write_page
        from latedrop.cli.writing import check_outputs
        from latedrop.evaluation.judgement import parsed_requirements
        from latedrop.metrics.levels import checked_level

        _ = level is None or checked_level(level)
        _ = require is None or parsed_requirements(require)
        read: dict[str, str | None] = {"--data": data, "CALIBRATION": calibration, "MODEL": model}
        read |= {"--weights": loading.weights, "--readout": loading.readout}
        check_outputs({"--report": report}, read)
        uq = loading.load_calibrated(model, calibration, batch_size)
        check_options(uq, level=level, row_weights=row_weights, unit=unit)
        source = table.source(data, split(target), record=uq.calibration, weight=row_weights, labelled=True)
        rows, units = TableBatches(source, uq.model, batch_size, drop_nan), units_of(unit, source)
        judgement, page = judged(uq, rows, level, units)
        requirements = () if require is None else judgement.require(require)
        facts: dict[str, Any] = {"command": typed.get(), "read": read_files(read), "dropped": rows.dropped}
        if report is not None:
            reproduce = again(typed.get(), facts["read"])
            write_page(report, title=f"{model} on {Path(data).name}", judgement=judgement, reproduce=reproduce, **page)
        with redirect_stdout(out):
            print_judgement(judgement, requirements, [report] if report else [], as_json, facts)
        broken(requirements)


def export(
    *,
    model: opt.Model,
    calibration: opt.Record,
    output: opt.Exported,
    data: opt.Example = None,
    input_shape: opt.InputShape = None,
    table: opt.Tabled,
    loading: opt.Loading = _ON_CPU,
    level: opt.Level = opt.LEVEL,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Write one ONNX file that gives mean, std, low and high; it runs without torch.

    Sizes other than the number of rows are those of an example: --data, --input-shape, the columns that the calibration
    knows, or what a .pt2 file was exported with.
    """
    with command(debug) as out:
        need("onnx", "onnx", "onnxruntime")
        from latedrop.cli.writing import check_outputs
        from latedrop.quantiles import checked_level

        checked_level(level)
        read = {"MODEL": model, "CALIBRATION": calibration, "--weights": loading.weights, "--data": data}
        check_outputs({"--output": output}, {**read, "--readout": loading.readout}, (".onnx",))
        _either(data, input_shape)
        uq: Any = loading.load_calibrated(model, calibration)
        columns = (uq.calibration.columns or {}).get("inputs")
        shapes = input_shape or ([str(len(columns))] if columns else None)
        with table.example(uq.model, data, shapes, record=uq.calibration) as rows:
            path = uq.to_onnx(output, rows, **({} if hasattr(uq.calibration, "classes") else {"level": level}))
        size = path.stat().st_size
        if as_json:
            print(json.dumps({"file": str(path), "bytes": size}, indent=1), file=out)
        else:
            print(f"compared with torch on 1, 4 and 7 rows\nwritten: {path}, {size / 1024:.0f} KB", file=out)


def _either(data: str | None, input_shape: list[str] | None) -> None:
    if data is not None and input_shape:
        raise ArgumentError("expected --data or --input-shape; found both. Leave one out.")

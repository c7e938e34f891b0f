"""The commands on the user's own model and files: `latedrop sites`, `calibrate`, `predict`, `evaluate`, `export`.

Plain functions that parse, call and print; `cli` hands them to typer. What a command needs is imported inside it. Rows
are read, predicted and written a batch at a time.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latedrop.cli import options as opt
from latedrop.cli.command import again, command, read_files, typed
from latedrop.cli.options import example_rows, readout_of, split
from latedrop.cli.printing import broken, print_calibration, print_judgement, print_sites
from latedrop.errors import ArgumentError
from latedrop.terminal import need

if TYPE_CHECKING:
    from latedrop.detection.detector import Detector

__all__ = ["calibrate", "evaluate", "examples_of", "export", "predict", "sites"]

_STANDARD = "-"  # as in `tables`, which is imported late
_SOME, _MANY, _NUMBERS = 256, 8192, 1 << 20  # rows at once; the most rows of a table, and the most of its numbers
_READ = ("--data", "--conformal-data", "--reference", "MODEL", "--weights")
_EXAMPLES = {
    "demo": ("latedrop demo", "latedrop demo --out airfoil --seed 1"),
    "sites": (
        "latedrop sites my_model:net --input-shape 8",
        "latedrop sites my_model:net --data val.csv --target price",
        'latedrop sites model.pt2 --select "decoder.*" --json',
    ),
    "calibrate": (
        "latedrop calibrate my_model:net --data val.csv --target price -o cal.json",
        "latedrop calibrate my_model:Net --weights net.safetensors "
        "--data val.parquet --target height,width -o cal.json --report cal.html",
        "latedrop calibrate model.pt2 --data val.npz -o cal.json --method linear",
        "latedrop calibrate my_model:classifier --data val.csv --target species -o cal.json --sets lac",
    ),
    "predict": (
        "latedrop predict my_model:net cal.json --data new.csv -o out.csv",
        "latedrop predict model.pt2 cal.json --data new.parquet -o out.parquet --level 0.95 --keep id,city",
        "latedrop predict my_model:net cal.json --data new.csv.gz | head",
    ),
    "evaluate": (
        "latedrop evaluate my_model:net cal.json --data test.csv --target price",
        "latedrop evaluate model.pt2 cal.json --data test.npz --report page.html",
        'latedrop evaluate my_model:net cal.json --data test.csv --require "coverage90>=0.85,gain>=0"',
        'latedrop evaluate my_model:classifier cal.json --data test.csv --require "accuracy>=0.9,ece<=0.05"',
    ),
    "export": (
        "latedrop export my_model:net cal.json -o model.onnx",
        "latedrop export my_model:net cal.json -o model.onnx --input-shape 3,224,224 --level 0.95",
    ),
    "serve": ("latedrop serve my_model:net cal.json", "latedrop serve model.onnx --port 8080 --level 0.95"),
}


def examples_of(command: Callable[..., None]) -> str:
    """Lines to start from, for the end of a command's help."""
    return "\n\n".join(["Examples:", *_EXAMPLES[command.__name__]])


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
        from latedrop.named import load_model
        from latedrop.network.find_sites import find_sites

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
    classes: opt.Classes = opt.ANY_TASK,
    learned: opt.TargetUnit = opt.AS_THEY_ARE,
    inputs: opt.Inputs = None,
    ignore: opt.Ignore = None,
    row_weights: opt.RowWeights = None,
    images: opt.Pictured = opt.NO_IMAGES,
    drop_nan: opt.DropNan = False,
    batch_size: opt.BatchSize = 256,
    loading: opt.Loading = opt.AUTO_DEVICE,
    select: opt.Select = None,
    kind: opt.Kind = "element",
    reference: opt.Reference = None,
    fitting: opt.Fitting = opt.BY_DEFAULT,
    intervals: opt.Intervals = None,
    conformal_data: opt.Held = None,
    seed: opt.Seed = 0,
    unit: opt.Unit = None,
    report: opt.AlsoReport = None,
    detector: opt.MadeDetector = None,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Fit the variance, or the probabilities of classes, to rows not used for training; say what it is worth."""
    with command(debug) as out:
        import latedrop
        from latedrop.cli.feed import Labelled, Source, conformal_rows, usual_rows
        from latedrop.cli.judging import calibration_report, units_of
        from latedrop.cli.tasks import remembering, with_labels

        read = dict(zip(_READ, (data, conformal_data, reference, model, loading.weights), strict=True))
        _check_written(output, report, detector, {**read, "--readout": loading.readout})
        network, readout = loading.load(model), readout_of(loading.readout)
        columns = split(inputs), split(target), (), split(ignore), row_weights
        source = Source.of(data, *columns, labelled=True, images=images.of())
        source, task = with_labels(source, network, classes, readout)
        rows, units = Labelled(source, network, batch_size, drop_nan, seed=seed), units_of(unit, source)
        used, held = conformal_rows(rows, conformal_data, halve=intervals == "conformal" or classes.holds_out)
        if conformal_data is not None and intervals not in (None, "conformal"):
            raise ArgumentError(f"expected --conformal-data with --intervals conformal; found {intervals}.")
        kept_as = intervals if held is None else None
        options: dict[str, Any] = {"method": fitting.method_of(seed), "target": learned.of(), "intervals": kept_as}
        options |= {"reference": usual_rows(source, reference, rows), "batches": latedrop.Batches(batch_size)}
        options |= {"row_weights": used.weights_to_come(), "task": classes.task_of(task, source.class_names())}
        with source.explained():
            found = select or None
            if kind != "element":
                found = latedrop.find_sites(network, source.example(network), select=found, kind=kind)  # type: ignore
            made = latedrop.calibrate(network, used, readout=readout, sites=found, **options)
            made = fitting.scaled(made)
            made = made if held is None or classes.holds_out else made.conformal(held)
            uq = remembering(made, source, classes, held, units)
            told = None if detector is None else uq.detector(x for x, _ in held or used)
        uq.save(output)
        files = [str(output), *calibration_report(report, uq, units, read), *_saved(told, detector)]
        with redirect_stdout(out):
            print_calibration(uq.calibration, used.dropped + (held.dropped if held else 0), files, as_json)


def predict(
    model: opt.Model,
    calibration: opt.Record,
    data: opt.New,
    output: opt.Predictions = "-",
    level: opt.Level = None,
    keep: opt.Keep = None,
    inputs: opt.Inputs = None,
    ignore: opt.Ignore = None,
    images: opt.Pictured = opt.NO_IMAGES,
    drop_nan: opt.DropNan = False,
    batch_size: opt.RowsAtOnce = None,
    scale: opt.OtherScale = None,
    detector: opt.UsedDetector = None,
    loading: opt.Loading = opt.AUTO_DEVICE,
    ray: opt.OnRay = None,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Write mean, std, low and high of every row; of classes the label, its confidence and every probability.

    Rows keep their order, and the file may be larger than memory. A row with missing values stays in its place, with
    nothing in these columns, and is warned of; --drop-nan leaves it out.
    """
    with command(debug) as out:
        from latedrop.cli.feed import Places, Source, check_kept
        from latedrop.cli.predicting import on_ray, output_names, write_predictions
        from latedrop.cli.writing import check_apart
        from latedrop.detection.detector import Detector
        from latedrop.metrics.levels import checked_level

        _ = level is None or checked_level(level)
        alone = {"--detector": detector is not None, "--drop-nan": drop_nan}
        _check_rows_out(output, as_json, ray, images, [name for name, there in alone.items() if there])
        sources = {"MODEL": model, "CALIBRATION": calibration, "--weights": loading.weights, "--data": data}
        check_apart({"--output": output}, {**sources, "--readout": loading.readout, "--detector": detector})
        rows = _SOME if batch_size is None else batch_size
        uq = loading.load_calibrated(model, calibration, rows, scale)
        known: dict[str, Any] = {"images": images.of(uq.calibration), "record": uq.calibration}
        source = Source.of(data, split(inputs), kept=split(*keep or ()), ignored=split(ignore), **known)
        if batch_size is None and not source.table.arrays:
            uq.batch_size = max(_SOME, min(_MANY, _NUMBERS // len(source.columns.inputs)))
        flat = not output.lower().endswith(".npz")
        told = None if detector is None else Detector.load(detector, uq)  # type: ignore[arg-type]
        names = [*output_names(uq.calibration, level, flat=flat), *([] if told is None else ["p_value"])]
        check_kept(source.columns.kept, names)
        if ray is not None:
            given = {**loading._asdict(), "model": model, "calibration": calibration}
            count, empty = on_ray(ray, uq, source, output, level, batch_size, scale, **given), Places("index")
        else:
            count, empty = write_predictions(uq, source, output, out, level, told, flat=flat, drop=drop_nan)
        gone = {"empty": 0 if drop_nan else empty.count, "dropped": empty.count if drop_nan else 0}
        _print_predicted(count, gone, level, names, output, out, as_json)


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
    level: opt.Level = None,
    unit: opt.Unit = None,
    require: opt.Require = None,
    plot: opt.Plot = None,
    report: opt.Report = None,
    batch_size: opt.BatchSize = 256,
    loading: opt.Loading = opt.AUTO_DEVICE,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Say what the uncertainty is worth on test rows, beside one constant variance, or one temperature for classes."""
    with command(debug) as out:
        from latedrop.cli.feed import Labelled, Source
        from latedrop.cli.judging import check_options, curves, judged, report_on, units_of
        from latedrop.cli.writing import check_apart, check_drawn, check_page
        from latedrop.evaluation.requirements import parsed_requirements
        from latedrop.metrics.levels import checked_level

        _ = level is None or checked_level(level)
        _ = require is None or parsed_requirements(require)
        check_drawn(plot)
        check_page(report)
        sources = {"--data": data, "CALIBRATION": calibration, "MODEL": model, "--weights": loading.weights}
        check_apart({"--plot": plot, "--report": report}, {**sources, "--readout": loading.readout})
        uq = loading.load_calibrated(model, calibration, batch_size)
        check_options(uq, level=level, row_weights=row_weights, unit=unit)
        known: dict[str, Any] = {"images": images.of(uq.calibration), "record": uq.calibration}
        columns = split(inputs), split(target), (), split(ignore), row_weights
        source = Source.of(data, *columns, labelled=True, **known)
        rows, units = Labelled(source, uq.model, batch_size, drop_nan), units_of(unit, source)
        found, page = judged(uq, rows, level, units)
        held = () if require is None else found.require(require)
        read = read_files(sources)
        page |= {"title": f"{model} on {Path(data).name}", "reproduce": again(typed.get(), read)}
        files = [*curves(plot, found), *report_on(report, found, **page)]
        with redirect_stdout(out):
            facts = {"command": typed.get(), "read": read, "dropped": rows.dropped}
            print_judgement(found, held, files, as_json, facts)
        broken(held)


def export(
    model: opt.Model,
    calibration: opt.Record,
    output: opt.Exported,
    data: opt.Example = None,
    input_shape: opt.InputShape = None,
    inputs: opt.Inputs = None,
    ignore: opt.Ignore = None,
    images: opt.Pictured = opt.NO_IMAGES,
    level: opt.Level = opt.LEVEL,
    loading: opt.Loading = opt.ON_CPU,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Write one ONNX file that gives mean, std, low and high; it runs without torch.

    Sizes other than the number of rows are those of an example: --data, --input-shape, the columns that the calibration
    knows, or what a .pt2 file was exported with.
    """
    with command(debug) as out:
        need("onnx", "onnx", "onnxruntime")
        from latedrop.cli.feed import Source
        from latedrop.cli.writing import check_apart, check_output
        from latedrop.quantiles import checked_level

        checked_level(level)
        check_output(output, ".onnx")
        sources = {"MODEL": model, "CALIBRATION": calibration, "--weights": loading.weights, "--data": data}
        check_apart({"--output": output}, {**sources, "--readout": loading.readout})
        if data is not None and input_shape:
            raise ArgumentError("expected --data or --input-shape; found both. Leave one out.")
        uq: Any = loading.load_calibrated(model, calibration)
        columns: dict[str, Any] = {"ignored": split(ignore), "record": uq.calibration}
        pictures = images.of(uq.calibration) if data is not None else None
        source = None if data is None else Source.of(data, split(inputs), **columns, images=pictures)
        with nullcontext() if source is None else source.explained():
            known = (uq.calibration.columns or {}).get("inputs")
            shapes = input_shape or ([str(len(known))] if known else None)
            x = example_rows(uq.model, shapes) if source is None else source.example(uq.model)
            chosen = {} if hasattr(uq.calibration, "classes") else {"level": level}
            path = uq.to_onnx(output, x, **chosen)
        _print_file(path, out, as_json)


def _saved(detector: "Detector | None", path: str | None) -> list[str]:
    """Write a detector where there is one; the files that were written."""
    if detector is None or path is None:
        return []
    detector.save(path)
    return [path]


def _check_written(output: str, report: str | None, detector: str | None, read: dict[str, str | None]) -> None:
    """Before the work: all that is asked for can be written, and is none of the files that are read."""
    from latedrop.cli.writing import check_apart, check_output, check_page

    check_output(output)
    check_page(report)
    if detector is not None:
        check_output(detector, ".json")
    check_apart({"--output": output, "--report": report, "--detector": detector}, read)


def _print_predicted(
    count: int, gone: dict[str, int], level: float | None, names: Sequence[str], output: str, out: Any, as_json: bool
) -> None:
    level = opt.LEVEL if level is None and "label" not in names else level
    if as_json:
        summary = {"rows": count, **gone, "level": level, "columns": names, "file": output}
        print(json.dumps(summary, indent=1), file=out)
    elif output != _STANDARD:
        what = "" if level is None else f", with {'sets' if 'set' in names else 'intervals'} at level {level:g}"
        print(f"{count} rows predicted{what}\nwritten: {output}", file=out)


def _check_rows_out(output: str, as_json: bool, ray: str | None, images: opt.Pictured, alone: list[str]) -> None:
    """Before the work: rows can be written; options that are `alone` do not go with Ray."""
    from latedrop.cli.predicting import check_folder
    from latedrop.cli.writing import ROW_FILES, check_output

    if ray is not None:
        if alone:
            raise ArgumentError(f"expected {alone[0]} without --ray; found both. Predict these on one machine.")
        check_folder(output, images)
    elif output != _STANDARD:
        check_output(output, *ROW_FILES)
    elif as_json:
        raise ArgumentError("expected --json or the rows on stdout; found both. Name a file with -o.")


def _print_file(path: Path, out: Any, as_json: bool) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    shapes = {kind: getattr(session, f"get_{kind}")() for kind in ("inputs", "outputs")}
    named = {kind: {value.name: value.shape for value in values} for kind, values in shapes.items()}
    if as_json:
        print(json.dumps({"file": str(path), "bytes": path.stat().st_size, **named}, indent=1), file=out)
        return
    for kind, values in named.items():
        print(f"{kind}: " + ", ".join(f"{name} {shape}" for name, shape in values.items()), file=out)
    print(f"compared with torch on 1, 4 and 7 rows\nwritten: {path}, {path.stat().st_size / 1024:.0f} KB", file=out)

"""`latedrop evaluate`: what a calibration is worth on test rows.

A plain function that parses, calls and prints; `cli` hands it to typer. What it needs is imported inside it.
"""

from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latedrop.cli import options as opt
from latedrop.cli.command import again, command, read_files, typed
from latedrop.cli.options import readout_of, split
from latedrop.cli.printing import broken, draw_curves, draw_reliability, print_judgement
from latedrop.errors import ArgumentError

if TYPE_CHECKING:
    from latedrop.evaluation.class_judgement import ClassJudgement
    from latedrop.evaluation.judgement import Judgement
    from latedrop.prediction.class_predictor import ClassPredictor
    from latedrop.prediction.predictor import Predictor

__all__ = ["check_options", "curves", "evaluate"]


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
    weights: opt.Weights = None,
    trust: opt.Trust = False,
    untrained: opt.Untrained = False,
    device: opt.Device = "auto",
    readout: opt.ReadOut = None,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Say what the uncertainty is worth on test rows, beside one constant variance, or one temperature for classes."""
    with command(debug) as out:
        from latedrop.cli.feed import Labelled, Source
        from latedrop.cli.judging import judged, report_on, units_of
        from latedrop.cli.writing import check_apart, check_drawn, check_page
        from latedrop.evaluation.requirements import parsed_requirements
        from latedrop.metrics.levels import checked_level
        from latedrop.named import load_calibrated, load_model

        _ = level is None or checked_level(level)
        _ = require is None or parsed_requirements(require)
        check_drawn(plot)
        check_page(report)
        sources = {"--data": data, "CALIBRATION": calibration, "MODEL": model, "--weights": weights}
        check_apart({"--plot": plot, "--report": report}, {**sources, "--readout": readout})
        network = load_model(model, weights, trust=trust, device=device, untrained=untrained)
        uq = load_calibrated(calibration, network, readout_of(readout), batch_size)
        check_options(uq, level=level, row_weights=row_weights, unit=unit)
        known: dict[str, Any] = {"images": images.of(uq.calibration), "record": uq.calibration}
        columns = split(inputs), split(target), (), split(ignore), row_weights
        source = Source.of(data, *columns, labelled=True, **known)
        rows, units = Labelled(source, network, batch_size, drop_nan), units_of(unit, source)
        found, page = judged(uq, rows, level, units)
        held = () if require is None else found.require(require)
        read = read_files(sources)
        page |= {"title": f"{model} on {Path(data).name}", "reproduce": again(typed.get(), read)}
        files = [*curves(plot, found), *report_on(report, found, **page)]
        with redirect_stdout(out):
            facts = {"command": typed.get(), "read": read, "dropped": rows.dropped}
            print_judgement(found, held, files, as_json, facts)
        broken(held)


def check_options(uq: "Predictor | ClassPredictor", *, level: float | None, **regression: str | None) -> None:
    """`ArgumentError` where options of a regression were given for classes, or a level without sets."""
    from latedrop.cli.columns import check_sets
    from latedrop.prediction.class_predictor import ClassPredictor

    if not isinstance(uq, ClassPredictor):
        return
    wrong = [f"--{name.replace('_', '-')}" for name, value in regression.items() if value is not None]
    if wrong:
        raise ArgumentError(f"expected options that classes have; found {', '.join(wrong)}. Leave them out.")
    check_sets(uq.calibration, level)


def curves(path: str | None, found: "Judgement | ClassJudgement") -> list[str]:
    """Draw what the probabilities or intervals are worth, where that is asked for; the files that were written."""
    from latedrop.evaluation.class_judgement import ClassJudgement

    if path is None:
        return []
    if isinstance(found, ClassJudgement):
        draw_reliability(path, found)
    else:
        draw_curves(path, found.together.evaluations)
    return [path]

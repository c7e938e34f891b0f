"""The commands of people counting: `latedrop crowd count`, `calibrate`, `recalibrate`, `train` and `demo`.

Plain functions that parse, call and print. The command line of latedrop finds them by the entry point
`latedrop.commands`, which names `make_app`. What a command needs is imported inside it.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from latedrop import LatedropError
from latedrop.cli.command import bundled
from latedrop.errors import ArgumentError
from latedrop.terminal import HANDED_ON, argument, folder, hand_on, number_list, one_line, option, print_table, say
from latedrop_crowd.cli.counters import (
    CALIBRATION,
    NO_OPTIONS,
    WEIGHTS,
    CounterOptions,
    calibrated,
    fold_networks,
    load_counter,
    weights_path,
)
from latedrop_crowd.cli.following import Following
from latedrop_crowd.cli.watch import crowd_watch

if TYPE_CHECKING:
    from latedrop_crowd.calibration import CrowdCalibration
    from latedrop_crowd.counting import CountedFrame
    from latedrop_crowd.demo import CrowdDemo
    from latedrop_crowd.layouts import CrowdSet
    from latedrop_crowd.mcnn import Trained

__all__ = ["make_app"]

_DEVICE = "auto, cpu or cuda."
_SHOWN = 3  # warnings of strange frames
_DEBUG = "Show the traceback of an error."
_DATA = "Folder of the set, as it was released, or of your own frames; scenes need none."
_SET = "mall, ucsd, pets, shanghaitech-a, shanghaitech-b, own (frames of your own) or scenes."


def make_app() -> typer.Typer:
    """The commands below `latedrop crowd`."""
    app = typer.Typer(help="Count people, with intervals: train, calibrate, count.", no_args_is_help=True)
    app.command("count")(bundled(crowd_count))
    app.command("calibrate")(bundled(crowd_calibrate))
    app.command("recalibrate")(bundled(crowd_recalibrate))
    app.command("train", **HANDED_ON)(crowd_train)
    app.command("demo")(bundled(crowd_demo))
    app.command("watch")(bundled(crowd_watch))
    return app


def crowd_count(
    sources: Annotated[list[Path], argument("Images, folders of images, and videos.", metavar="SOURCE")],
    weights: WEIGHTS,
    calibration: CALIBRATION = None,
    level: Annotated[float, option("Probability that the interval holds the true count.")] = 0.9,
    out: Annotated[Path, option("Folder for counts and panels.")] = Path("crowd-counts"),
    panels: Annotated[
        bool, option("Draw each frame, its density, uncertainty and faint regions; much slower.")
    ] = False,
    csv: Annotated[Path | None, option("File of the counts; by default counts.csv in --out.")] = None,
    jsonl: Annotated[bool, option("Write the counts as JSON lines, not as CSV.", "--jsonl")] = False,
    every: Annotated[int, option("Take each k-th frame of a folder or video.")] = 1,
    scale: Annotated[str | None, option("optimal or relaxed; by default as calibrated.")] = None,
    device: Annotated[str, option(_DEVICE)] = "auto",
    resume: Annotated[bool, option("Go on: frames that the file has are passed over.", "--resume")] = False,
    labels: Annotated[Path | None, option("CSV of true counts, frame,count; intervals follow them.")] = None,
    stream: Annotated[Path | None, option("File of what was learned from --labels; it goes on from there.")] = None,
    skip_bad: Annotated[bool, option("Warn of frames that cannot be counted, and go on.", "--skip-bad")] = False,
    counter: CounterOptions = NO_OPTIONS,
    as_json: Annotated[bool, option("Print JSON, one line a frame, and nothing else.", "--json")] = False,
    debug: Annotated[bool, option(_DEBUG, "--debug")] = False,
) -> None:
    """Count people with intervals, frame by frame; if it is interrupted, finished frames are kept.

    Example: latedrop crowd count camera.mp4 --every 25 --weights mall --out monday
    """
    with one_line(debug):
        from latedrop.devices import chosen_device
        from latedrop.metrics.levels import checked_level
        from latedrop_crowd.counting import CountFile, count_people
        from latedrop_crowd.frames import open_frames
        from latedrop_crowd.mcnn import faster

        checked_level(level)
        path = _count_path(csv, jsonl, out, panels, sources, weights, calibration)
        trained, used = calibrated(weights, calibration, chosen_device(device), counter)
        used = used if scale is None else used.with_choice(_one_of("--scale", scale, "optimal", "relaxed"))
        bad = _LeftOut() if skip_bad else None
        images = open_frames(sources, trained.channels, every=every, on_bad=bad)
        where = folder(out)
        following = Following(labels, stream, path)
        done = following.done(used, level) if resume else {}
        if not used.has_dropout:
            say(f"note: the width of intervals {used.width}.")
        rows = count_people(faster(trained), used, images, level, deviations=panels, skip=done, on_bad=bad)
        rows = following.of(rows, used, level, done)
        with _kept(path) as tally, CountFile(path, resume=resume) as file:
            for frame in _warned(_bar(rows, images.total, "counting")):
                file.add(frame)
                tally.append(frame.count)
                _panel(where if panels else None, frame, trained)
                print(json.dumps(frame.row()) if as_json else f"{frame.name}: {frame}", flush=True)
        if not tally and not done:
            raise LatedropError(f"expected frames that can be counted; all {bad.number if bad else 0} were left out.")
        print("" if as_json else f"written: {path}{f', panels in {where}' if panels and tally else ''}\n", end="")


def crowd_calibrate(
    set_name: Annotated[str, option(_SET, "--set")],
    weights: WEIGHTS,
    data: Annotated[Path | None, option(_DATA)] = None,
    output: Annotated[
        Path | None, option("File to write; by default beside the weights, or NAME.calibration.json.", "--output", "-o")
    ] = None,
    method: Annotated[
        str, option("sampling-free suits a CPU; sample runs --draws thinned networks.")
    ] = "sampling-free",
    rates: Annotated[str | None, option("Rates to choose from, separated by commas; for --method sample.")] = None,
    draws: Annotated[int, option("Thinned networks per rate; for --method sample.")] = 50,
    scale: Annotated[str, option("optimal: least NLL; relaxed: balanced curve.")] = "optimal",
    every: Annotated[int, option("Use each k-th validation frame.")] = 1,
    view: Annotated[int, option("Camera of PETS2009.")] = 1,
    seed: Annotated[int, option("Fixes all masks.")] = 0,
    report: Annotated[Path | None, option("Also write a page about the count's uncertainty, HTML.")] = None,
    counter: CounterOptions = NO_OPTIONS,
    device: Annotated[str, option(_DEVICE)] = "auto",
    debug: Annotated[bool, option(_DEBUG, "--debug")] = False,
) -> None:
    """Calibrate a counter on validation frames: intervals, uncertainty maps, and which regions to reject.

    Example: latedrop crowd calibrate --set mall --data mall_dataset --weights mall.safetensors
    """
    with one_line(debug):
        from latedrop.devices import chosen_device
        from latedrop.files import check_apart
        from latedrop_crowd.calibration import calibrate_counter

        path, shipped_name = weights_path(weights)
        target = output or (Path.cwd() if shipped_name else path.parent) / f"{path.stem}.calibration.json"
        frames = [] if data is None or not target.exists() else data.rglob("*")
        read = {f"--data {file}": file for file in frames if file.suffix != ".json" or file.name == "heads.json"}
        check_apart({"--output": target, "--report": report}, {**read, "--weights": path, "--data": data})
        trained = load_counter(weights, chosen_device(device), counter)
        folder(target.parent)
        opened = _opened(set_name, data, trained, view)
        found = calibrate_counter(
            trained,
            opened,
            _one_of("--method", method, "sampling-free", "sample"),
            rates=None if rates is None else number_list("--rates", rates),
            draws=draws,
            scale=_one_of("--scale", scale, "optimal", "relaxed"),
            every=every,
            seed=seed,
            progress=True,
            folds=fold_networks(trained, path, chosen_device(device)),
        )
        found.save(target)
        _write_report(report, found, opened, path)
        print(f"{found}\nwritten: {target}{'' if report is None else f', {report}'}")


def _write_report(report: Path | None, found: "CrowdCalibration", frames: "CrowdSet", weights: Path) -> None:
    if report is None:
        return
    from latedrop.cli.command import again, read_files, typed
    from latedrop.report import write_report
    from latedrop_crowd.training.log import described

    facts = again(typed.get(), read_files({"--weights": str(weights)}))
    write_report(
        report,
        title=f"People counting: {weights.stem} on {frames.name}",
        calibration=found.count,
        unit="people",
        reproduce={**facts, "names of frames and heads, SHA-256": described(frames)["sha256"]},
    )


def crowd_recalibrate(
    sources: Annotated[list[Path], argument("Images, folders and videos of the new scene.", metavar="SOURCE")],
    labels: Annotated[Path, option("CSV with columns frame and count: 10 to 40 frames, spread over the scene.")],
    weights: WEIGHTS,
    calibration: CALIBRATION = None,
    output: Annotated[
        Path | None, option("File to write; by default NAME.scene.calibration.json.", "--output", "-o")
    ] = None,
    counter: CounterOptions = NO_OPTIONS,
    device: Annotated[str, option(_DEVICE)] = "auto",
    debug: Annotated[bool, option(_DEBUG, "--debug")] = False,
) -> None:
    """Fit a calibration to a new scene from a few of its frames, whose people you counted.

    Example: latedrop crowd recalibrate lobby/ --labels lobby.csv --weights mall -o lobby.calibration.json
    """
    with one_line(debug):
        from latedrop.devices import chosen_device
        from latedrop.files import check_apart
        from latedrop_crowd.frames import open_frames
        from latedrop_crowd.layouts import read_counts
        from latedrop_crowd.recalibrating import recalibrate_counter

        path, _ = weights_path(weights)
        target = output or Path.cwd() / f"{path.stem}.scene.calibration.json"
        read = {"--weights": path, "--labels": labels, "--calibration": calibration, **_read(sources)}
        check_apart({"--output": target}, read)
        counts = read_counts(labels)
        trained, used = calibrated(weights, calibration, chosen_device(device), counter)
        folder(target.parent)
        stream = open_frames(sources, trained.channels)
        found = recalibrate_counter(trained, used, stream, counts)
        found.save(target)
        print(f"{found.recalibration}\nwritten: {target}")


def crowd_train(context: typer.Context) -> None:
    """Train a counter on the training frames of a set; it goes on from its checkpoint where it was stopped."""
    from latedrop_crowd.train import main

    hand_on(main, context.args, "latedrop crowd train")


def crowd_demo(
    out: Annotated[Path, option("Folder for report.html, panels, counts.csv and result.json.")] = Path("crowd-demo"),
    draws: Annotated[int, option("Thinned networks, where the variance is sampled.")] = 10,
    seed: Annotated[int, option("Fixes the scenes and the masks.")] = 0,
    as_json: Annotated[bool, option("Print JSON, and nothing else, to stdout.", "--json")] = False,
    debug: Annotated[bool, option(_DEBUG, "--debug")] = False,
) -> None:
    """The whole chain on synthetic scenes, without any data: calibrate, count with intervals, reject, draw.

    Example: latedrop crowd demo --out crowd-demo
    """
    with one_line(debug):
        from latedrop_crowd.demo import run, write

        where = folder(out)
        result = run(draws, seed, progress=True)
        files = write(result, where)
        if as_json:
            print(json.dumps({**result.summary(), "files": [str(path) for path in files]}, indent=1))
        else:
            _print_demo(result, files)


def _count_path(
    csv: Path | None,
    jsonl: bool,
    out: Path,
    panels: bool,
    sources: Iterable[Path],
    weights: str,
    calibration: Path | None,
) -> Path:
    """Where counts go: nowhere that is read. Panels stay out of folders of frames, or they were counted next time."""
    from latedrop.files import check_apart

    read = {**_read(sources), "--weights": weights_path(weights)[0], "--calibration": calibration}
    path = csv or out / ("counts.jsonl" if jsonl else "counts.csv")
    check_apart({"--out": out if panels else None, "--csv": path}, read)
    return path


def _read(sources: Iterable[Path]) -> dict[str, Path]:
    """All files of the sources, which no output may take the place of."""
    found = [file for source in sources for file in (source, *(source.iterdir() if source.is_dir() else ()))]
    return {f"SOURCE {file}": file for file in found}


def _opened(name: str, data: Path | None, trained: "Trained", view: int) -> "CrowdSet":
    """The set as the network was trained on it; its test frames are not needed."""
    from latedrop_crowd.layouts import open_as_trained
    from latedrop_crowd.scenes import make_scenes

    if name == "scenes":
        return make_scenes(160, 80, 0)
    if data is None:
        raise ArgumentError(f"expected the folder of {name}; found none. Pass --data DIR.")
    return open_as_trained(name, data, trained, part="train", view=view)


def _one_of(name: str, value: str, *allowed: str) -> Any:
    if value not in allowed:
        raise ArgumentError(f"expected {name} {' or '.join(allowed)}; found {value!r}.")
    return value


def _frames(number: int) -> str:
    return f"{number} frame{'s' if number != 1 else ''}"


@contextmanager
def _kept(path: Path) -> Iterator[list[float]]:
    """Whatever ends the counting: say what is in the file, and how to go on."""
    tally: list[float] = []
    try:
        yield tally
    except (LatedropError, OSError, KeyboardInterrupt):
        if tally:
            say(f"{path} has {_frames(len(tally))} of this run; the same command with --resume goes on after them.")
        raise


class _LeftOut:
    """Warns of frames that cannot be counted, and counts them."""

    number = 0

    def __call__(self, error: LatedropError) -> None:
        self.number += 1
        say(f"warning: left out: {error}")


def _warned(frames: "Iterable[CountedFrame]") -> "Iterator[CountedFrame]":
    """The frames, with a warning of those unlike what was seen: the first few one by one."""
    number = strange = 0
    for frame in frames:
        number += 1
        strange += bool(frame.reasons)
        if frame.reasons and strange <= _SHOWN:
            say(f"warning: {frame.name} is strange: {'; '.join(frame.reasons)}. Its interval is wider.")
        yield frame
    if strange > _SHOWN:
        say(f"warning: {strange} of {_frames(number)} are strange; see the column strangeness.")


def _panel(where: Path | None, frame: "CountedFrame", trained: "Trained") -> None:
    if where is None:
        return
    from latedrop_crowd.panels import write_panel

    # A frame's name may be a path, and a video's has a number behind it.
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in frame.name)
    write_panel(where / f"{name}.panel.png", frame, roi=trained.roi, enlarge=trained.enlarge, stride=trained.stride)


def _bar(rows: "Iterable[CountedFrame]", total: int | None, label: str) -> "Iterable[CountedFrame]":
    from latedrop.progress import shown_on

    return shown_on(rows, label, total, "frames", show=True)


def _print_demo(result: "CrowdDemo", files: list[Path]) -> None:
    from latedrop.report import table
    from latedrop_crowd.demo import NOTES, UNIT, rejection_table

    print(result.headline())
    print_table(table(result.evaluations, UNIT))
    for label, note in NOTES.items():
        print(f"{label}: {note}")
    print_table(rejection_table(result.rejection))
    print(f"{result.rejection['verdict']}: {result.rejection['why']}.")
    print(f"\nwritten: {', '.join(str(path) for path in files)}")

"""The commands of people counting: `latedrop crowd count`, `calibrate`, `recalibrate`, `train` and `watch`.

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
from latedrop.cli.command import bundled, typed
from latedrop.errors import ArgumentError
from latedrop.terminal import argument, folder, one_line, option, say
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
from latedrop_crowd.cli.watch import crowd_watch

if TYPE_CHECKING:
    from latedrop_crowd.calibration import CrowdCalibration
    from latedrop_crowd.counting import CountedFrame
    from latedrop_crowd.layouts import CrowdSet
    from latedrop_crowd.mcnn import Trained

__all__ = ["make_app"]

_DEVICE = "auto, cpu or cuda."
_SHOWN = 3  # warnings of strange frames
_DEBUG = "Show the traceback of an error."
_DATA = "Folder of the set, as it was released, or of your own frames; scenes need none."
_SET = "mall, ucsd, pets, own (frames of your own) or scenes."
_ENLARGED = {"ucsd": 2}  # its people are small


def make_app() -> typer.Typer:
    """The commands below `latedrop crowd`."""
    app = typer.Typer(help="Count people, with intervals: train, calibrate, count.", no_args_is_help=True)
    app.command("count")(bundled(crowd_count))
    app.command("calibrate")(bundled(crowd_calibrate))
    app.command("recalibrate")(bundled(crowd_recalibrate))
    app.command("train")(bundled(crowd_train))
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
    every: Annotated[int, option("Take each k-th frame of a folder or video.")] = 1,
    device: Annotated[str, option(_DEVICE)] = "auto",
    resume: Annotated[bool, option("Go on: frames that the file has are passed over.", "--resume")] = False,
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
        from latedrop.files import check_apart
        from latedrop.metrics.levels import checked_level
        from latedrop_crowd.counting import CountFile, count_people, finished_frames, provenance_of
        from latedrop_crowd.frames import open_frames
        from latedrop_crowd.mcnn import faster

        level = checked_level(level)
        path = out / "counts.csv"
        read = {**_read(sources), "--weights": weights_path(weights)[0], "--calibration": calibration}
        # Panels stay out of folders of frames, or they were counted next time.
        check_apart({"--out": out if panels else None, "counts.csv": path}, read)
        trained, used = calibrated(weights, calibration, chosen_device(device), counter)
        bad = _LeftOut() if skip_bad else None
        images = open_frames(sources, trained.channels, every=every, on_bad=bad)
        where = folder(out)
        done = finished_frames(path, provenance_of(used, level)) if resume else {}
        if done:
            say(f"passing over what {path} has: {_frames(len(done))}.")
        if not used.has_dropout:
            say(f"note: the width of intervals {used.width}.")
        rows = count_people(faster(trained), used, images, level, deviations=panels, skip=done, on_bad=bad)
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
        read = {f"--data {file}": file for file in frames if file.suffix != ".json"}
        check_apart({"--output": target, "--report": report}, {**read, "--weights": path, "--data": data})
        trained = load_counter(weights, chosen_device(device), counter)
        folder(target.parent)
        opened = _opened(set_name, data, trained)
        found = calibrate_counter(trained, opened, folds=fold_networks(trained, path, chosen_device(device)))
        found.save(target)
        _write_report(report, found, opened, path)
        print(f"{found}\nwritten: {target}{'' if report is None else f', {report}'}")


def _write_report(report: Path | None, found: "CrowdCalibration", frames: "CrowdSet", weights: Path) -> None:
    if report is None:
        return
    from latedrop.cli.command import again, read_files
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


def crowd_train(
    set_name: Annotated[str, option(_SET, "--set")],
    out: Annotated[Path, option("Where the weights go: NAME.safetensors.")],
    data: Annotated[Path | None, option(_DATA)] = None,
    epochs: Annotated[int | None, option("Passes over the training frames.")] = None,
    batch: Annotated[int | None, option("Frames per step.")] = None,
    lr: Annotated[float | None, option("Largest learning rate.")] = None,
    crop: Annotated[int | None, option("Side of random squares in pixels; whole frames by default.")] = None,
    rate: Annotated[float | None, option("Of embedded dropout.")] = None,
    seed: Annotated[int | None, option("Of weights, order, crops and masks.")] = None,
    enlarge: Annotated[int | None, option("Factor by which frames are enlarged; 2 by default for ucsd.")] = None,
    roi: Annotated[bool | None, option("Count only inside the region of interest.", "--roi/--no-roi")] = None,
    sigma: Annotated[float | None, option("Of a head's kernel in pixels; by default the set's own.")] = None,
    folds: Annotated[int, option("Number of blocks of time to cross-fit in.")] = 0,
    fresh: Annotated[bool, option("Start again, and write over what is there.", "--fresh")] = False,
    device: Annotated[str, option(_DEVICE)] = "auto",
    debug: Annotated[bool, option(_DEBUG, "--debug")] = False,
) -> None:
    """Train a counter on the training frames of a set; it goes on from its checkpoint where it was stopped.

    Example: latedrop crowd train --set mall --data mall_dataset --out mall.safetensors
    """
    with one_line(debug):
        from dataclasses import replace

        from latedrop.devices import chosen_device
        from latedrop.files import check_apart
        from latedrop_crowd.layouts import open_set
        from latedrop_crowd.scenes import make_scenes
        from latedrop_crowd.training import RECOMMENDED, Settings, cross_fit, read_log, summary, train

        check_apart({"--out": out}, {"--data": data})
        chosen = {"epochs": epochs, "batch": batch, "lr": lr, "crop": crop, "rate": rate, "seed": seed}
        given: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
        settings = replace(RECOMMENDED.get(set_name, Settings()), **given)
        if set_name == "scenes":
            frames = make_scenes()
        else:
            enlarge = _ENLARGED.get(set_name, 1) if enlarge is None else enlarge
            frames = open_set(set_name, _folder_of(set_name, data), enlarge=enlarge, use_roi=roi, sigma=sigma)
        command = typed.get().replace(str(data), "DIR").replace(str(out), out.name)  # folders are the user's business
        options: dict[str, Any] = {"fresh": fresh, "command": command}
        if folds:
            cross_fit(frames, settings, out, chosen_device(device), folds=folds, **options)
        else:
            train(frames, settings, out, chosen_device(device), **options)
        print(summary(out, read_log(out.with_suffix(".log.json"))))


def _read(sources: Iterable[Path]) -> dict[str, Path]:
    """All files of the sources, which no output may take the place of."""
    found = [file for source in sources for file in (source, *(source.iterdir() if source.is_dir() else ()))]
    return {f"SOURCE {file}": file for file in found}


def _opened(name: str, data: Path | None, trained: "Trained") -> "CrowdSet":
    """The set as the network was trained on it."""
    from latedrop_crowd.layouts import open_as_trained
    from latedrop_crowd.scenes import make_scenes

    if name == "scenes":
        return make_scenes(160, 80, 0)
    return open_as_trained(name, _folder_of(name, data), trained)


def _folder_of(name: str, data: Path | None) -> Path:
    if data is None:
        raise ArgumentError(f"expected the folder of {name}; found none. Pass --data DIR.")
    return data


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

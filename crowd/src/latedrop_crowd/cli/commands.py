"""Define the commands of people counting: `latedrop crowd count`, `calibrate`, `recalibrate`, `train` and `watch`.

Each command is a function that parses, calls and prints. The command line of latedrop finds them by the entry point
`latedrop.commands`, which names `make_app`. Imports are inside the commands, so that `--help` is fast.
"""

import inspect
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from latedrop import LatedropError
from latedrop.cli.command import bundled, typed
from latedrop.errors import ArgumentError
from latedrop.terminal import argument, folder, need, one_line, option, say

if TYPE_CHECKING:
    from latedrop_crowd.calibration import CrowdCalibration
    from latedrop_crowd.console.sources import Source
    from latedrop_crowd.console.watch import Settings
    from latedrop_crowd.counting import CountedFrame
    from latedrop_crowd.layouts import CrowdSet
    from latedrop_crowd.mcnn import Trained

__all__ = ["make_app"]

_DEVICE = "auto, cpu or cuda."
_SHOWN = 3  # maximum number of warnings about single unusual frames
_DEBUG = "Show the traceback of an error."
_DATA = "Folder of the data set as released, or of your own frames. Not used for scenes."
_SET = "Data set: mall, ucsd, pets, own (your own frames) or scenes (synthetic)."
_ENLARGED = {"ucsd": 2}  # its people are small

WEIGHTS = Annotated[
    str,
    option(
        "Counter: a file written by `crowd train`, the name of a shipped one such as mall, package.module:callable, or "
        "a .pt2 file.",
        "--weights",
        "-w",
    ),
]
CALIBRATION = Annotated[
    Path | None,
    option("File written by `crowd calibrate`; by default the one beside the weights.", "--calibration", "-c"),
]
_OTHERS = "For a counter trained elsewhere:"


class CounterOptions(NamedTuple):
    """Hold the options about the counter, None if not given; `command.bundled` expands them from one parameter."""

    state: Annotated[
        str | None, option(f"{_OTHERS} file with the weights, for package.module:callable.", "--state")
    ] = None
    input_scale: Annotated[float | None, option(f"{_OTHERS} largest pixel value of its input, such as 1 or 255.")] = (
        None
    )
    density_scale: Annotated[float | None, option(f"{_OTHERS} number of people per unit of its density map.")] = None
    relu: Annotated[bool, option(f"{_OTHERS} set negative densities to 0.", "--relu")] = False
    stride: Annotated[int | None, option(f"{_OTHERS} side of a cell of its density map in pixels; 4 by default.")] = (
        None
    )
    channels: Annotated[
        int | None, option(f"{_OTHERS} number of channels of its input: 1 (grey, the default) or 3 (colour).")
    ] = None
    roi: Annotated[
        Path | None,
        option("Image of the region of interest: count only where it is not black; by default that of the weights."),
    ] = None

    def given(self) -> dict[str, Any]:
        """Return the given options that describe a counter trained elsewhere."""
        skipped = ("roi", *(name for name, value in self._asdict().items() if value is None or value is False))
        return {name: value for name, value in self._asdict().items() if name not in skipped}


_SOURCES = "Videos, folders of images, camera numbers, rtsp:// and http:// streams."


class AlarmOptions(NamedTuple):
    """Hold the options about alarms and labels; `command.bundled` expands them from one parameter."""

    sure: Annotated[
        float, option("Probability of exceeding the limit from which a zone is red; green from that of keeping it.")
    ] = 0.9
    hold: Annotated[float, option("Seconds that a change must last before the colour changes.")] = 2.0
    notify: Annotated[
        list[str] | None,
        option("Send alarms to http(s)://..., mqtt(s)://host/topic or smtp(s)://host/me@example.org; repeatable."),
    ] = None
    propose: Annotated[float, option("Propose one frame for labelling per this many seconds.")] = 120.0
    reports: Annotated[Path | None, option("Folder for daily reports (HTML and CSV), written after midnight.")] = None

    def settings(self, level: float) -> "Settings":
        """Return the settings of the console; raise `ArgumentError` if a value is out of range."""
        from latedrop.metrics.levels import checked_level
        from latedrop_crowd.console.watch import Settings
        from latedrop_crowd.console.zones import Rule

        if not self.propose > 0:
            raise ArgumentError(f"expected --propose above 0 seconds; found {self.propose}. The default is 120.")
        return Settings(checked_level(level), Rule(self.sure, self.hold), self.propose, reports=self.reports)


class TokenOptions(NamedTuple):
    """Hold the access tokens; `command.bundled` expands them from one parameter."""

    token: Annotated[
        str | None, option("Token for full access; generated if --host is not local or another token is given.")
    ] = None
    label_token: Annotated[str | None, option("Token to view, label frames and acknowledge alarms.")] = None
    view_token: Annotated[str | None, option("Token to view only.")] = None

    def by_role(self) -> dict[str, str | None]:
        """Return the tokens by role."""
        return {"view": self.view_token, "label": self.label_token, "configure": self.token}


_NO_OPTIONS, _USUAL, _NO_TOKENS = CounterOptions(), AlarmOptions(), TokenOptions()


def make_app() -> typer.Typer:
    """Return the app with the commands of `latedrop crowd`."""
    app = typer.Typer(help="Count people with intervals: train, calibrate, count, watch.", no_args_is_help=True)
    for command in (crowd_count, crowd_calibrate, crowd_recalibrate, crowd_train, crowd_watch):
        about, _, example = inspect.cleandoc(command.__doc__ or "").partition("\n\nExample: ")
        epilog = f"Example:\n\n{example}" if example else None  # after the options, as in the commands of latedrop
        app.command(command.__name__.removeprefix("crowd_"), help=about, epilog=epilog)(bundled(command))
    return app


def crowd_count(
    sources: Annotated[list[Path], argument("Images, folders of images, and videos.", metavar="SOURCE")],
    weights: WEIGHTS,
    calibration: CALIBRATION = None,
    level: Annotated[float, option("Probability that the interval holds the true count.")] = 0.9,
    out: Annotated[Path, option("Folder for counts and panels.")] = Path("crowd-counts"),
    panels: Annotated[bool, option("Draw each frame with its density, uncertainty and faint regions; slow.")] = False,
    every: Annotated[int, option("Count every k-th frame of a folder or video.")] = 1,
    device: Annotated[str, option(_DEVICE)] = "auto",
    resume: Annotated[
        bool, option("Continue an interrupted run: skip frames that are in counts.csv.", "--resume")
    ] = False,
    skip_bad: Annotated[bool, option("Skip frames that cannot be counted, with a warning.", "--skip-bad")] = False,
    counter: CounterOptions = _NO_OPTIONS,
    as_json: Annotated[bool, option("Print one line of JSON per frame, and nothing else.", "--json")] = False,
    debug: Annotated[bool, option(_DEBUG, "--debug")] = False,
) -> None:
    """Count people with intervals, frame by frame; an interrupted run keeps its finished frames.

    Example: latedrop crowd count camera.mp4 --every 25 --weights mall --out monday
    """
    with one_line(debug):
        from latedrop.devices import chosen_device
        from latedrop.files import check_apart
        from latedrop.metrics.levels import checked_level
        from latedrop.terminal import shown_on
        from latedrop_crowd.counting import CountFile, count_people, finished_frames, provenance_of
        from latedrop_crowd.frames import open_frames
        from latedrop_crowd.mcnn import faster

        level = checked_level(level)
        path = out / "counts.csv"
        read = {**_read(sources), "--weights": weights_path(weights)[0], "--calibration": calibration}
        # Panels must not go into a folder of frames, or the next run would count them.
        check_apart({"--out": out if panels else None, "counts.csv": path}, read)
        trained, used = calibrated(weights, calibration, chosen_device(device), counter)
        bad_frames = []

        def skip(error: LatedropError) -> None:
            bad_frames.append(error)
            say(f"warning: skipped: {error}")

        bad = skip if skip_bad else None
        images = open_frames(sources, trained.channels, every=every, on_bad=bad)
        where = folder(out)
        done = finished_frames(path, provenance_of(used, level)) if resume else {}
        if done:
            say(f"skipping {_frames(len(done))} that {path} already has.")
        if not used.has_dropout:
            say(f"note: the width of the intervals {used.width}.")
        rows = count_people(faster(trained), used, images, level, deviations=panels, skip=done, on_bad=bad)
        with _kept(path) as tally, CountFile(path, resume=resume) as file:
            for frame in _warned(shown_on(rows, "counting", images.total, "frames", show=True)):
                file.add(frame)
                tally.append(frame.count)
                if panels:
                    _panel(where, frame, trained)
                print(json.dumps(frame.row()) if as_json else f"{frame.name}: {frame}", flush=True)
        if not tally and not done:
            raise LatedropError(
                f"expected frames that can be counted; all {len(bad_frames)} were skipped. See the warnings above."
            )
        print("" if as_json else f"written: {path}{f', panels in {where}' if panels and tally else ''}\n", end="")


def crowd_calibrate(
    set_name: Annotated[str, option(_SET, "--set")],
    weights: WEIGHTS,
    data: Annotated[Path | None, option(_DATA)] = None,
    output: Annotated[
        Path | None, option("File to write; by default beside the weights, or NAME.calibration.json.", "--output", "-o")
    ] = None,
    report: Annotated[Path | None, option("Also write an HTML report about the uncertainty of the count.")] = None,
    counter: CounterOptions = _NO_OPTIONS,
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
        from latedrop_crowd.mcnn import load_weights

        path, shipped_name = weights_path(weights)
        target = output or (Path.cwd() if shipped_name else path.parent) / f"{path.stem}.calibration.json"
        frames = [] if data is None or not target.exists() else data.rglob("*")
        read = {f"--data {file}": file for file in frames if file.suffix != ".json"}
        check_apart({"--output": target, "--report": report}, {**read, "--weights": path, "--data": data})
        trained = load_counter(weights, chosen_device(device), counter)
        folder(target.parent)
        opened = _opened(set_name, data, trained)
        names = [path.with_suffix(f".fold{number}.safetensors") for number in range(int(trained.about.get("folds", 0)))]
        folds = [load_weights(name, chosen_device(device)) for name in names]  # beside a cross-fitted counter
        calibration = calibrate_counter(trained, opened, folds=folds)
        calibration.save(target)
        if report is not None:
            _write_report(report, calibration, opened, path)
        print(f"{calibration}\nwritten: {target}{'' if report is None else f', {report}'}")


def _write_report(report: Path, calibration: "CrowdCalibration", frames: "CrowdSet", weights: Path) -> None:
    from latedrop.cli.command import again, read_files
    from latedrop.report import write_report
    from latedrop_crowd.training.network import described

    facts = again(read_files({"--weights": str(weights)}))
    write_report(
        report,
        title=f"People counting: {weights.stem} on {frames.name}",
        calibration=calibration.count,
        unit="people",
        reproduce={**facts, "names of frames and heads, SHA-256": described(frames)["sha256"]},
    )


def crowd_recalibrate(
    sources: Annotated[list[Path], argument("Images, folders and videos of the new scene.", metavar="SOURCE")],
    labels: Annotated[
        Path, option("CSV with columns frame and count, for 10 to 40 frames spread over time and scene.")
    ],
    weights: WEIGHTS,
    calibration: CALIBRATION = None,
    output: Annotated[
        Path | None, option("File to write; by default NAME.scene.calibration.json.", "--output", "-o")
    ] = None,
    counter: CounterOptions = _NO_OPTIONS,
    device: Annotated[str, option(_DEVICE)] = "auto",
    debug: Annotated[bool, option(_DEBUG, "--debug")] = False,
) -> None:
    """Adapt a calibration to a new scene, from a few frames in which you counted the people.

    Example: latedrop crowd recalibrate lobby/ --labels lobby.csv --weights mall -o lobby.calibration.json
    """
    with one_line(debug):
        from latedrop.devices import chosen_device
        from latedrop.files import check_apart
        from latedrop_crowd.calibration import recalibrate_counter
        from latedrop_crowd.frames import open_frames
        from latedrop_crowd.layouts import read_counts

        path, _ = weights_path(weights)
        target = output or Path.cwd() / f"{path.stem}.scene.calibration.json"
        read = {"--weights": path, "--labels": labels, "--calibration": calibration, **_read(sources)}
        check_apart({"--output": target}, read)
        counts = read_counts(labels)
        trained, used = calibrated(weights, calibration, chosen_device(device), counter)
        folder(target.parent)
        stream = open_frames(sources, trained.channels)
        recalibrated = recalibrate_counter(trained, used, stream, counts)
        recalibrated.save(target)
        print(f"{recalibrated.recalibration}\nwritten: {target}")


def crowd_train(
    set_name: Annotated[str, option(_SET, "--set")],
    out: Annotated[Path, option("File for the weights: NAME.safetensors.")],
    data: Annotated[Path | None, option(_DATA)] = None,
    epochs: Annotated[int | None, option("Number of passes over the training frames.")] = None,
    batch: Annotated[int | None, option("Number of frames per training step.")] = None,
    lr: Annotated[float | None, option("Maximum learning rate.")] = None,
    crop: Annotated[int | None, option("Side of random square crops in pixels; whole frames by default.")] = None,
    rate: Annotated[float | None, option("Rate of dropout during training.")] = None,
    seed: Annotated[int | None, option("Random seed of initial weights, frame order, crops and dropout masks.")] = None,
    enlarge: Annotated[int | None, option("Factor by which frames are enlarged; 2 by default for ucsd.")] = None,
    roi: Annotated[bool | None, option("Count only inside the region of interest.", "--roi/--no-roi")] = None,
    sigma: Annotated[
        float | None,
        option("Standard deviation of the kernel drawn at each head, in pixels; by default that of the set."),
    ] = None,
    folds: Annotated[
        int, option("Number of blocks of time for cross-fitting: one more network is trained per block.")
    ] = 0,
    fresh: Annotated[bool, option("Start again and overwrite earlier files.", "--fresh")] = False,
    device: Annotated[str, option(_DEVICE)] = "auto",
    debug: Annotated[bool, option(_DEBUG, "--debug")] = False,
) -> None:
    """Train a counter on the training frames of a set; an interrupted run continues from its checkpoint.

    Example: latedrop crowd train --set mall --data mall_dataset --out mall.safetensors
    """
    with one_line(debug):
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
        command = (
            typed.get().replace(str(data), "DIR").replace(str(out), out.name)
        )  # the log names no folders of the user
        options: dict[str, Any] = {"fresh": fresh, "command": command}
        if folds:
            cross_fit(frames, settings, out, chosen_device(device), folds=folds, **options)
        else:
            train(frames, settings, out, chosen_device(device), **options)
        print(summary(out, read_log(out.with_suffix(".log.json"))))


def crowd_watch(
    sources: Annotated[list[str] | None, argument(_SOURCES, metavar="SOURCE")] = None,
    demo: Annotated[bool, option("Watch two synthetic scenes; no data are needed.", "--demo")] = False,
    weights: Annotated[
        str | None,
        option("Counter, as for `crowd count`: a file, mall, ucsd, pets, ....", "--weights", "--model", "-w"),
    ] = None,
    calibration: CALIBRATION = None,
    level: Annotated[float, option("Probability that an interval holds the true count.")] = 0.9,
    memory: Annotated[Path, option("SQLite file for counts, zones, alarms and labels.")] = Path(
        "latedrop-console.sqlite"
    ),
    keep: Annotated[float, option("Maximum size of this file in MB.")] = 500.0,
    host: Annotated[str, option("Address to listen on; addresses that others can reach need a token.")] = "127.0.0.1",
    port: Annotated[int, option("Port to listen on; 0 takes a free one.")] = 8765,
    tokens: TokenOptions = _NO_TOKENS,
    alarms: AlarmOptions = _USUAL,
    fps: Annotated[
        float | None, option("Frames per second of folders (5 by default) or videos (by default their own).")
    ] = None,
    loop: Annotated[bool, option("Restart videos and folders when they end.", "--loop")] = False,
    counter: CounterOptions = _NO_OPTIONS,
    device: Annotated[str, option(_DEVICE)] = "auto",
    debug: Annotated[bool, option(_DEBUG, "--debug")] = False,
) -> None:
    """Watch cameras on a local page: counts with intervals, zones with limits, alarms, labels.

    Example: latedrop crowd watch rtsp://camera/stream --weights mall
    """
    with one_line(debug):
        need("console", "fastapi", "uvicorn", of="latedrop-crowd")
        from latedrop.devices import chosen_device
        from latedrop_crowd.console.notices import Notices
        from latedrop_crowd.console.server import serve
        from latedrop_crowd.console.store import Store
        from latedrop_crowd.console.watch import Watch
        from latedrop_crowd.mcnn import faster

        settings, cameras = alarms.settings(level), _watched(sources or [], demo, weights, fps, loop)
        trained, used = calibrated(weights or "scenes", calibration, chosen_device(device), counter)
        notices = Notices(alarms.notify or [])
        store = Store(memory, keep * 1e6)
        watch = Watch(cameras, faster(trained), used, store, settings, notices)
        serve(watch, host, port, tokens.by_role(), say)


def is_foreign(weights: str) -> bool:
    """Return True if `--weights` names a Python callable or a .pt2 program."""
    return (not Path(weights).is_file() and ":" in weights) or Path(weights).suffix.lower() == ".pt2"


def load_counter(weights: str, device: Any, options: CounterOptions) -> "Trained":
    """Load the counter on a device, with the options that describe it."""
    from latedrop.named import load_model
    from latedrop_crowd.mcnn import as_counter, load_weights

    given = options.given()
    if is_foreign(weights):
        model = load_model(weights, given.pop("state", None), device=str(device))
        trained = as_counter(model, **given, about={"network": weights})
    elif given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ArgumentError(
            f"expected {names} only with package.module:callable or a .pt2 file; found {weights}, "
            "which says itself how its frames and its map are scaled. Leave the option out."
        )
    else:
        trained = load_weights(weights_path(weights)[0], device)
    if options.roi is None:
        return trained
    import torch

    from latedrop_crowd.density import roi_cells
    from latedrop_crowd.layouts import read_roi

    mask = read_roi(options.roi).repeat(trained.enlarge, 0).repeat(trained.enlarge, 1)
    return replace(trained, roi=torch.from_numpy(roi_cells(mask, trained.stride)).to(device))


def weights_path(weights: str) -> tuple[Path, bool]:
    """Return the weights file, and True if its folder is not the user's; an existing path wins over a shipped name."""
    from latedrop_crowd.mcnn import shipped

    if is_foreign(weights):
        program = Path(weights).suffix.lower() == ".pt2"
        return (Path(weights), False) if program else (Path(f"{weights.rpartition(':')[2]}.py"), True)
    if Path(weights).is_file() or Path(weights).name != weights or weights.endswith(".safetensors"):
        return Path(weights), False
    return shipped(weights), True


def calibrated(
    weights: str, calibration: Path | None, device: Any, options: CounterOptions
) -> "tuple[Trained, CrowdCalibration]":
    """Load the counter and its calibration."""
    from latedrop_crowd.calibration import load_calibration

    trained = load_counter(weights, device, options)
    path, _ = weights_path(weights)
    beside = path.with_name(f"{path.stem}.calibration.json")
    if calibration is None and not beside.is_file():
        raise ArgumentError(
            f"expected --calibration, as there is no {beside.name} beside the weights. Run: latedrop crowd calibrate "
            f"--weights {weights} --set ..."
        )
    return trained, load_calibration(calibration or beside, trained)


def _read(sources: Iterable[Path]) -> dict[str, Path]:
    """Return all files of the sources by label, so that no output overwrites one."""
    files = [file for source in sources for file in (source, *(source.iterdir() if source.is_dir() else ()))]
    return {f"SOURCE {file}": file for file in files}


def _opened(name: str, data: Path | None, trained: "Trained") -> "CrowdSet":
    """Open the data set with the frame size and region that the network was trained on."""
    from latedrop_crowd.layouts import open_as_trained
    from latedrop_crowd.scenes import make_scenes

    if name == "scenes":
        return make_scenes(160, 80, 0)
    return open_as_trained(name, _folder_of(name, data), trained)


def _folder_of(name: str, data: Path | None) -> Path:
    """Return the folder of the data set; raise `ArgumentError` without --data."""
    if data is None:
        raise ArgumentError(f"expected the folder of {name}; found none. Pass --data DIR.")
    return data


def _frames(number: int) -> str:
    return f"{number} frame{'s' if number != 1 else ''}"


@contextmanager
def _kept(path: Path) -> Iterator[list[float]]:
    """Collect the counts of a run; if it is interrupted, say what the file holds and how to continue."""
    tally: list[float] = []
    try:
        yield tally
    except (LatedropError, OSError, KeyboardInterrupt):
        if tally:
            say(f"{path} has {_frames(len(tally))} of this run; repeat the command with --resume to continue.")
        raise


def _warned(frames: "Iterable[CountedFrame]") -> "Iterator[CountedFrame]":
    """Yield the frames, and warn of unusual ones: of the first few one by one, then of their number."""
    number = strange = 0
    for frame in frames:
        number += 1
        strange += bool(frame.reasons)
        if frame.reasons and strange <= _SHOWN:
            follows = "" if frame.uncountable else " Its interval is wider."
            say(f"warning: {frame.name} is unusual: {'; '.join(frame.reasons)}.{follows}")
        yield frame
    if strange > _SHOWN:
        say(f"warning: {strange} of {_frames(number)} are unusual; see the column strangeness.")


def _panel(where: Path, frame: "CountedFrame", trained: "Trained") -> None:
    from latedrop_crowd.panels import write_panel

    # The name of a frame may be a path, or that of a video followed by a number.
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in frame.name)
    write_panel(where / f"{name}.panel.png", frame, roi=trained.roi, enlarge=trained.enlarge, stride=trained.stride)


def _watched(sources: list[str], demo: bool, weights: str | None, fps: float | None, loop: bool) -> "list[Source]":
    from latedrop_crowd.console.sources import demo_sources, open_sources

    if demo == bool(sources):
        raise ArgumentError("expected either sources to watch or --demo; found both or neither. Pass one of them.")
    if not demo and weights is None:
        raise ArgumentError(
            "expected --weights; found none. Pass the counter for these cameras: mall, ucsd, pets, or a file."
        )
    return demo_sources() if demo else open_sources(sources, fps, loop=loop)

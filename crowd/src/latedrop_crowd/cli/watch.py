"""`latedrop crowd watch`: the operator's console."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from latedrop.errors import ArgumentError
from latedrop.terminal import argument, need, one_line, option, say
from latedrop_crowd.cli.counters import CALIBRATION, NO_OPTIONS, CounterOptions, calibrated

if TYPE_CHECKING:
    from latedrop_crowd.console.sources import Source
    from latedrop_crowd.console.watch import Settings

__all__ = ["crowd_watch"]

_SOURCES = "Videos, folders of images, numbers of cameras, rtsp:// and http:// streams."


class AlarmOptions(NamedTuple):
    """The options about alarms and labels, which `command.bundled` makes of one parameter."""

    sure: Annotated[float, option("Probability from which on a zone is red; as sure of the opposite, green.")] = 0.9
    hold: Annotated[float, option("Seconds that a change of colour must last.")] = 2.0
    notify: Annotated[
        list[str] | None,
        option("Send alarms to http(s)://..., mqtt(s)://host/topic or smtp(s)://host/me@example.org; repeatable."),
    ] = None
    propose: Annotated[float, option("Propose at most one frame for a label within this many seconds.")] = 120.0
    reports: Annotated[
        Path | None, option("Folder for a report of every day, HTML and CSV; written after midnight.")
    ] = None

    def settings(self, level: float) -> "Settings":
        """What can be chosen; `ArgumentError` where it cannot be so."""
        from latedrop.metrics.levels import checked_level
        from latedrop_crowd.console.alarms import Rule
        from latedrop_crowd.console.watch import Settings

        if not self.propose > 0:
            raise ArgumentError(f"expected --propose above 0 seconds; found {self.propose}.")
        return Settings(checked_level(level), Rule(self.sure, self.hold), self.propose, reports=self.reports)


class TokenOptions(NamedTuple):
    """The options about who may do what, which `command.bundled` makes of one parameter."""

    token: Annotated[
        str | None, option("Token that a browser must know to do all; generated where others can reach it.")
    ] = None
    label_token: Annotated[str | None, option("Token to look, label and acknowledge.")] = None
    view_token: Annotated[str | None, option("Token to look.")] = None

    def by_role(self) -> dict[str, str | None]:
        """The tokens by what they allow."""
        return {"view": self.view_token, "label": self.label_token, "configure": self.token}


_USUAL, _NO_TOKENS = AlarmOptions(), TokenOptions()


def crowd_watch(
    sources: Annotated[list[str] | None, argument(_SOURCES, metavar="SOURCE")] = None,
    demo: Annotated[bool, option("Watch two synthetic squares; no data is needed.", "--demo")] = False,
    weights: Annotated[
        str | None,
        option("A counter, as for `crowd count`: a file, mall, ucsd, pets, ....", "--weights", "--model", "-w"),
    ] = None,
    calibration: CALIBRATION = None,
    level: Annotated[float, option("Probability that an interval holds the true count.")] = 0.9,
    memory: Annotated[Path, option("File of all that is remembered.")] = Path("latedrop-console.sqlite"),
    keep: Annotated[float, option("Megabytes that it may grow to.")] = 500.0,
    host: Annotated[str, option("Address to listen on; others than the local one need a token.")] = "127.0.0.1",
    port: Annotated[int, option("Port to listen on; 0 takes a free one.")] = 8765,
    tokens: TokenOptions = _NO_TOKENS,
    alarms: AlarmOptions = _USUAL,
    fps: Annotated[float | None, option("Frames per second of folders, or of videos instead of their own.")] = None,
    loop: Annotated[bool, option("Begin videos and folders again when they end.", "--loop")] = False,
    threads: Annotated[int | None, option("Threads of the network; by default as torch chooses.")] = None,
    counter: CounterOptions = NO_OPTIONS,
    device: Annotated[str, option("auto, cpu or cuda.")] = "auto",
    debug: Annotated[bool, option("Show the traceback of an error.", "--debug")] = False,
) -> None:
    """Watch cameras on a local page: counts with intervals, zones with limits, alarms, labels.

    Example: latedrop crowd watch rtsp://camera/stream --weights mall
    """
    with one_line(debug):
        need("console", "fastapi", "uvicorn", of="latedrop-crowd")
        from latedrop.devices import chosen_device
        from latedrop_crowd.console.notices import Notices
        from latedrop_crowd.console.running import serve
        from latedrop_crowd.console.store import Store
        from latedrop_crowd.console.watch import Watch
        from latedrop_crowd.mcnn import faster

        settings, found = alarms.settings(level), _opened(sources or [], demo, weights, fps, loop)
        _use(threads)
        trained, used = calibrated(weights or "scenes", calibration, chosen_device(device), counter)
        notices = Notices(alarms.notify or [])
        store = Store(memory, keep * 1e6)
        watch = Watch(found, faster(trained), used, store, settings, notices)
        serve(watch, host, port, tokens.by_role(), say)


def _opened(sources: list[str], demo: bool, weights: str | None, fps: float | None, loop: bool) -> "list[Source]":
    from latedrop_crowd.console.sources import demo_sources, open_sources

    if demo == bool(sources):
        raise ArgumentError("expected either sources to watch or --demo; found both, or none of them.")
    if not demo and weights is None:
        raise ArgumentError("expected --weights, the counter that suits the cameras: mall, ucsd, pets, or a file.")
    return demo_sources() if demo else open_sources(sources, fps, loop=loop)


def _use(threads: int | None) -> None:
    import torch

    if threads is not None:
        if threads < 1:
            raise ArgumentError(f"expected --threads 1 or more; found {threads}.")
        torch.set_num_threads(threads)

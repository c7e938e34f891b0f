"""The memory of a stream: the tracker, the monitors, and the rows that wait for their labels; and the file of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import numpy as np
import numpy.typing as npt

from latedrop.errors import DataError, FileError
from latedrop.records import FieldError, Format, Limits, match, naming, record
from latedrop.streams.bag import ERRORS, SHARES, STRANGENESS, Usual
from latedrop.streams.monitor import Monitor, MonitorState, Row
from latedrop.streams.tracking import Tracker, TrackerState

__all__ = ["STREAM", "Settings", "State", "StateFile", "StreamRecord", "Waiting"]

Array = npt.NDArray[np.float64]
_Numbers: TypeAlias = tuple[Annotated[float, Limits(-1e300, 1e300)], ...]
_Count: TypeAlias = Annotated[int, Limits(0)]


@record
@dataclass(frozen=True)
class StreamRecord:
    """The state of a stream in a file; see `State`.

    Attributes:
        level: what intervals are to hold.
        made_with: tells one model from another.
        waiting: of every row that waits, its name and the four parts of `Waiting`.
    """

    level: Annotated[float, Limits(0, 1)]
    made_with: str
    outputs: Annotated[int, Limits(1, 2**20)]
    shares: tuple[str, ...]
    rows: _Count
    labels: _Count
    held: tuple[_Count, ...]
    tracker: TrackerState
    monitors: dict[str, MonitorState]
    waiting: tuple[tuple[Row, _Numbers, tuple[Annotated[float, Limits(1e-300, 1e300)], ...], _Numbers, _Numbers], ...]

    def checked(self) -> StreamRecord:
        """Check numbers and lengths against each other after reading; `State.resumed` compares the rest."""
        k = self.outputs
        match(self.labels <= self.rows, "labels", f"at most {self.rows}, as there were rows", self.labels)
        match(len(self.held) == k, "held", f"{k} numbers", self.held)
        match(max(self.held) <= self.labels, "held", f"at most {self.labels}, as there were labels", self.held)
        for i, (_, *parts) in enumerate(self.waiting):
            match([len(part) for part in parts] == [k] * 4, f"waiting[{i}]", f"a name and four lists of {k}", parts)
        names = [name for name, *_ in self.waiting]
        match(len(set(names)) == len(names), "waiting", "rows of different names", names)
        return self


STREAM = Format(
    StreamRecord,
    "latedrop stream",
    "a stream's state",
    "Pass another path, or delete the file to begin anew.",
    "state",
    indent=None,
)


@dataclass(frozen=True)
class Settings:
    """Settings that do not change while a stream runs; see `Stream`."""

    level: float
    alarm: float
    waiting: int
    step: float
    watch_every: int
    usual: Usual


@dataclass(frozen=True)
class Waiting:
    """A row that waits for its label: the predictor's mean and deviation, and the interval given, `(K,)` each."""

    mean: Array
    std: Array
    low: Array
    high: Array

    def lists(self) -> tuple[_Numbers, _Numbers, _Numbers, _Numbers]:
        """The four as plain numbers."""
        return tuple(self.mean.tolist()), tuple(self.std.tolist()), tuple(self.low.tolist()), tuple(self.high.tolist())


class State:
    """The changing part, made with the first row, when outputs and what can be watched are known."""

    def __init__(self, settings: Settings, outputs: int, strange: bool, shares: Sequence[str]) -> None:
        self.settings, self.outputs, self.shares = settings, outputs, tuple(shares)
        usual, alarm = settings.usual, settings.alarm
        self.tracker = Tracker(settings.level, outputs, settings.step)
        self.monitors = {"errors": Monitor("errors", ERRORS, [usual.errors] * outputs, alarm)}
        if strange:
            self.monitors["strangeness"] = Monitor("strangeness", STRANGENESS, [usual.strangeness], alarm)
        if len(self.shares) > 1:  # the share of one alone is always 1
            known = [usual.shares.get(name) for name in self.shares]
            self.monitors["shares"] = Monitor("shares", SHARES, known, alarm, both=True)
        self.waiting: dict[Row, Waiting] = {}
        self.rows = self.labels = 0
        self.held: npt.NDArray[np.int64] = np.zeros(outputs, np.int64)

    @property
    def next_number(self) -> int:
        """The number of the next row that has no name; no row that waits has it."""
        return max([self.rows, *(name + 1 for name in self.waiting if isinstance(name, int))])

    def expect(self, names: Sequence[Row], rows: Sequence[Waiting]) -> None:
        """Keep rows until their labels come; the oldest are forgotten where too many wait."""
        for name, row in zip(names, rows, strict=True):
            self.waiting.pop(name, None)
            self.waiting[name] = row
        for name in list(self.waiting)[: max(0, len(self.waiting) - self.settings.waiting)]:
            del self.waiting[name]
        self.rows += len(names)

    def learn(self, name: Row, target: Array) -> npt.NDArray[np.bool_]:
        """Learn from the label of a waiting row; whether the interval that was given held it, `(K,)`."""
        row = self.waiting.pop(name)
        inside: npt.NDArray[np.bool_] = (row.low <= target) & (target <= row.high)
        self.tracker.learn(row.mean, row.std, target)
        self.monitors["errors"].add((np.abs(target - row.mean) / row.std).tolist(), name)
        self.held = self.held + inside
        self.labels += 1
        return inside

    def recorded(self, made_with: str) -> StreamRecord:
        """Return what a file holds."""
        return StreamRecord(
            level=self.settings.level,
            made_with=made_with,
            outputs=self.outputs,
            shares=self.shares,
            rows=self.rows,
            labels=self.labels,
            held=tuple(self.held.tolist()),
            tracker=self.tracker.state(),
            monitors={name: monitor.state() for name, monitor in self.monitors.items()},
            waiting=tuple((name, *row.lists()) for name, row in self.waiting.items()),
        )

    @classmethod
    def resumed(cls, settings: Settings, stored: StreamRecord) -> State:
        """The inverse of `recorded`; `DataError` where the record is of a stream that watched other things."""
        state = cls(settings, stored.outputs, "strangeness" in stored.monitors, stored.shares)
        try:
            known = list(state.monitors)
            match(set(stored.monitors) == set(known), "monitors", f"those of {known}", [*stored.monitors])
            for name, monitor in state.monitors.items():
                monitor.resume(stored.monitors[name], f"monitors.{name}")
            state.tracker.resume(stored.tracker, "tracker")
        except FieldError as error:
            raise DataError(f"{error.message(STREAM.name)} {STREAM.again}") from error
        state.rows, state.labels, state.held = stored.rows, stored.labels, np.array(stored.held)
        state.waiting = {name: Waiting(*map(np.array, parts)) for name, *parts in stored.waiting}
        return state


class StateFile:
    """A file that one stream writes; what another one has written there meanwhile is not written over.

    Args:
        path: of the file.
        made_with: tells one model from another; a state of another one is refused.
    """

    def __init__(self, path: Path, made_with: str) -> None:
        self.path, self.made_with = path, made_with
        self._seen: tuple[int, int] | None = None
        self._ours = False

    def read(self, settings: Settings) -> State | None:
        """The state; None where there is no file yet, `FileError` where it is damaged or of another stream."""
        self._seen, self._ours = self._found(), True
        if self._seen is None:
            return None
        stored = STREAM.read(self.path)
        if stored.level == settings.level and stored.made_with == self.made_with:
            with naming(self.path):
                return State.resumed(settings, stored)
        whose = "this model" if stored.made_with == self.made_with else "another model or calibration"
        raise FileError(
            f"expected the state of a stream at level {settings.level:g} of this model in {self.path}; found level "
            f"{stored.level:g}, of {whose}. {STREAM.again}"
        )

    def write(self, state: State) -> None:
        """Replace the file."""
        if self._ours and self._found() not in (None, self._seen):
            raise FileError(
                f"expected {self.path} as this stream left it; another one has written to it. Use one stream, or one "
                "file for each."
            )
        STREAM.write(self.path, state.recorded(self.made_with))
        self._seen, self._ours = self._found(), True

    def _found(self) -> tuple[int, int] | None:
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

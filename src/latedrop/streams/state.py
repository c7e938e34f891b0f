"""What a stream knows: the tracker, the monitors, and the rows that wait for their labels; as plain data and back.

Every field is checked when it is read, and named where it is not as it should be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from latedrop.records import Fields, mapping, number, numbers, text, whole, wholes, wrong
from latedrop.streams.bag import ERRORS, SHARES, STRANGENESS
from latedrop.streams.monitor import Monitor, Row, row_name
from latedrop.streams.tracking import Tracker
from latedrop.streams.usual import Usual

__all__ = ["Settings", "State", "Waiting"]

_LARGEST = 1e300
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Settings:
    """What does not change while a stream runs; see `Stream`."""

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


class State:
    """What changes: made with the first row, when it is known how many outputs there are and what can be watched."""

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
        held: npt.NDArray[np.bool_] = (row.low <= target) & (target <= row.high)
        self.tracker.learn(row.mean, row.std, target)
        self.monitors["errors"].add((np.abs(target - row.mean) / row.std).tolist(), name)
        self.held = self.held + held
        self.labels += 1
        return held

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "outputs": self.outputs,
            "shares": list(self.shares),
            "rows": self.rows,
            "labels": self.labels,
            "held": self.held.tolist(),
            "tracker": self.tracker.to_dict(),
            "monitors": {name: monitor.to_dict() for name, monitor in self.monitors.items()},
            "waiting": [
                [name, *(part.tolist() for part in (row.mean, row.std, row.low, row.high))]
                for name, row in self.waiting.items()
            ],
        }

    @classmethod
    def from_fields(cls, fields: Fields, settings: Settings) -> State:
        """The inverse of `to_dict`; `DataError` where a field is not as it should be."""
        outputs = fields.take("outputs", whole, least=1)
        shares = tuple(text(name, "shares") for name in fields.take("shares", _list))
        monitors = fields.take("monitors", mapping(_any))
        state = cls(settings, outputs, "strangeness" in monitors, shares)
        if set(monitors) != set(state.monitors):
            wrong("monitors", f"of {', '.join(state.monitors)}", list(monitors))
        for name, monitor in state.monitors.items():
            monitor.restore(monitors[name], f"monitors.{name}")
        state.rows = fields.take("rows", whole, least=0)
        state.labels = fields.take("labels", whole, least=0, most=state.rows)
        state.held = np.array(fields.take("held", wholes, length=outputs, least=0, most=state.labels))
        state.tracker.restore(fields.take("tracker", _any), "tracker")
        for row in fields.take("waiting", _list):
            if not isinstance(row, list) or len(row) != 5:
                wrong("waiting", "a name and four lists", row)
            parts = [numbers(part, "waiting", length=outputs, least=-_LARGEST, most=_LARGEST) for part in row[1:]]
            for value in parts[1]:
                number(value, "waiting", least=1e-300)
            state.waiting[row_name(row[0], "waiting")] = Waiting(*map(np.array, parts))
        fields.end()
        return state


def _list(value: Any, name: str) -> list[Any]:
    return value if isinstance(value, list) else wrong(name, "a list", value)


def _any(value: Any, name: str) -> Any:
    return value

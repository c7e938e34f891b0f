"""Follow the labels of a stream with intervals: call `predict` now, `update` when the true value is known.

`tracking` moves the intervals and `monitor` raises alarms. This module keeps rows until their labels arrive, and stores
the state. With a path the state is written after every call, so a killed process loses at most its last call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from typing import Annotated, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from latedrop.data.arrays import from_table, is_table
from latedrop.errors import ArgumentError, DataError, FileError
from latedrop.metrics.levels import checked_level, normal_quantile
from latedrop.records import Format, Limits, match, record
from latedrop.streams.monitor import KINDS, Alarm, Monitor, Row, Usual
from latedrop.streams.tracking import STEP, Array, Tracker

__all__ = ["STREAM", "State", "Stream", "StreamPrediction"]

_MOST_WATCHED = 256  # rows of one call: with many, some of them say as much
_Numbers: TypeAlias = tuple[Annotated[float, Limits(-1e300, 1e300)], ...]
_Count: TypeAlias = Annotated[int, Limits(0)]
_Waiting: TypeAlias = tuple[Row, _Numbers, tuple[Annotated[float, Limits(1e-300, 1e300)], ...], _Numbers, _Numbers]
"""A row that waits for its label: its name, the predictor's mean and deviation, and both ends, of K numbers each."""


@dataclass(frozen=True)
class StreamPrediction:
    """Predictions of a stream.

    Attributes:
        ids: the name of each row, for `Stream.update`.
        mean: `(N, ...)`, the prediction with the running bias added; the median, where targets were transformed.
        low, high: `(N, ...)`, both ends of the interval.
        level: the coverage that the interval is tracked to.
        prediction: the predictor's own prediction.
        alarms: the alarms that are on after these rows.
    """

    ids: list[Row]
    mean: Tensor
    low: Tensor
    high: Tensor
    level: float
    prediction: Any = field(repr=False)
    alarms: tuple[Alarm, ...] = ()

    def interval(self) -> tuple[Tensor, Tensor]:
        """Return both ends of the interval, `(N, ...)`."""
        return self.low, self.high

    def __len__(self) -> int:
        return len(self.ids)


class Stream:
    """Intervals that follow the errors of a stream of rows, and alarms; safe to use from several threads.

    Args:
        predict: maps inputs to a prediction with `mean`, `interval(level)` and perhaps `novelty` and `shares`, such
            as `Predictor.predict`; None where predictions are passed to `follow` instead.
        level: the coverage that intervals should have.
        path: file of the state; an existing one is resumed. None keeps the state in memory.
        alarm: probability of a false alarm, of each kind and over the whole stream.
        waiting: how many rows can wait for their label; older ones are forgotten.
        step: how far a label moves the width; more follows faster and is less steady.
        usual: distribution of the validation rows; None takes the first rows of the stream instead.
        made_with: a text that identifies the model; the state of another model is refused.
        unit: has `forward` and `inverse`, where the model was trained on transformed targets: errors are followed in
            the model's unit, and the prediction has `in_model_unit()`.

    >>> import latedrop, torch
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
    >>> stream = latedrop.calibrate(net, (x, x**2)).stream(level=0.9)
    >>> for row in range(20):
    ...     p = stream.predict(x[row : row + 1])
    ...     _ = stream.update(x[row : row + 1] ** 2)
    >>> len(stream.coverage), len(stream.bias)  # one for each output
    (1, 1)
    """

    def __init__(
        self,
        predict: Callable[[Any], Any] | None = None,
        level: float = 0.9,
        path: str | os.PathLike[str] | None = None,
        *,
        alarm: float = 0.01,
        waiting: int = 1000,
        step: float = STEP,
        usual: Usual | None = None,
        made_with: str = "",
        unit: Any = None,
    ) -> None:
        for name, value, most in (("alarm", alarm, 1), ("step", step, 10)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < most:
                raise ArgumentError(f"expected {name} between 0 and {most}; found {value!r}.")
        if type(waiting) is not int or waiting < 1:
            raise ArgumentError(f"expected waiting to be a whole number of rows, 1 or more; found {waiting!r}.")
        self.level = checked_level(level)
        self._alarm, self._most_waiting, self._step = alarm, waiting, step
        self._predict, self._unit, self._usual = predict, unit, usual or Usual()
        self._lock = RLock()
        self._last: list[Row] = []
        self._state = State(self.level, made_with)
        self._file = None if path is None else StateFile(Path(path))
        if self._file is not None:
            self._state = self._file.read(self._state)

    def predict(self, x: Any, ids: Sequence[Row] | None = None) -> StreamPrediction:
        """Predict N rows, with intervals as the labels so far have made them.

        Args:
            x: inputs, as the predictor takes them.
            ids: your own names for the rows, texts or whole numbers; numbered from 0 on where None.
        """
        if self._predict is None:
            raise ArgumentError("expected a stream with a predictor; this one has none. Pass predictions to follow().")
        return self.follow(self._predict(x), ids)

    def follow(self, prediction: Any, ids: Sequence[Row] | None = None) -> StreamPrediction:
        """Follow a prediction that is already made, like `predict`."""
        mean, std = self._columns(prediction if self._unit is None else prediction.in_model_unit())
        with self._lock:
            state = self._begun(prediction, mean.shape[1])
            taken = [name + 1 for name, *_ in state.waiting if isinstance(name, int)]
            names = _names(len(mean), ids, max([state.rows, *taken]))
            centre, half = mean + state.tracker.bias, std * state.tracker.factor(self.level)
            low, high = centre - half, centre + half
            self._watch(prediction, names)
            again, parts = set(names), (part.tolist() for part in (mean, std, low, high))
            rows = [(name, *map(tuple, row)) for name, *row in zip(names, *parts, strict=True)]
            waiting = [*(row for row in state.waiting if row[0] not in again), *rows]
            state.waiting = tuple(waiting[-self._most_waiting :])  # the oldest are forgotten
            state.rows += len(names)
            self._last = names
            self._save()
            shown = [self._shown(part, prediction.mean) for part in (centre, low, high)]
            return StreamPrediction(names, shown[0], shown[1], shown[2], self.level, prediction, self.alarms)

    def update(self, y: Any, ids: Sequence[Row] | Row | None = None) -> Tensor:
        """Learn from labels of any waiting rows; return whether their intervals held them, `(M, K)`.

        Args:
            y: M labels, in the shape of the model's outputs.
            ids: rows of the labels; None means all rows of the last call of `predict`.
        """
        with self._lock:
            names, state = self._last if ids is None else _plain(ids), self._state
            rows = {row[0]: row for row in state.waiting}
            absent = [name for name in names if name not in rows]
            if not state.outputs or absent or len(set(names)) != len(names):
                raise DataError(
                    f"expected ids of rows that wait for a label, each once; found {(absent or names)[:3]!r}. They "
                    "have had their label, were never predicted, or were forgotten: "
                    f"{self._most_waiting} rows wait at most."
                )
            target = _targets(y, len(names), state.outputs)
            if self._unit is not None:
                target = _targets(self._unit.forward(torch.from_numpy(target)), len(names), state.outputs)
            inside = [self._learn(rows.pop(name), label) for name, label in zip(names, target, strict=True)]
            state.waiting = tuple(rows.values())
            self._save()
        return torch.from_numpy(np.array(inside, dtype=bool).reshape(len(names), state.outputs))

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """Return the alarms that are on."""
        return tuple(monitor.alarm for monitor in self._state.monitors.values() if monitor.alarm is not None)

    @property
    def evidence(self) -> dict[str, float]:
        """Return the capital of each kind of alarm, by name; an alarm is raised at `1 / alarm`."""
        return {name: monitor.capital for name, monitor in self._state.monitors.items()}

    @property
    def rows(self) -> int:
        """Return the number of predicted rows."""
        return self._state.rows

    @property
    def labels(self) -> int:
        """Return the number of labels learned from."""
        return self._state.labels

    @property
    def waiting(self) -> tuple[Row, ...]:
        """Return the rows that wait for a label, oldest first."""
        return tuple(name for name, *_ in self._state.waiting)

    @property
    def coverage(self) -> tuple[float, ...]:
        """Return the share of labels inside their intervals, for each output; empty before the first label."""
        with self._lock:
            return tuple(count / self._state.labels for count in self._state.held) if self._state.labels else ()

    @property
    def bias(self) -> tuple[float, ...]:
        """Return the bias that is added to each output now; empty before the first row."""
        with self._lock:
            return tuple(self._state.tracker.bias.tolist())

    def silence(self) -> None:
        """Switch alarms off and take the rows from now on as usual."""
        with self._lock:
            monitors = self._state.monitors.items()
            nothing = {name: Monitor.of(KINDS[name], [None] * len(monitor.counts)) for name, monitor in monitors}
            self._state.monitors = nothing
            self._save()

    def __repr__(self) -> str:
        shown = ", ".join(f"{share:.1%}" for share in self.coverage) or "none"
        names = ", ".join(alarm.kind for alarm in self.alarms) or "none"
        return (
            f"Stream at level {self.level:g}: {self.rows} rows; {self.labels} labels, {shown} of them held; alarms: "
            f"{names}"
        )

    def _columns(self, prediction: Any) -> tuple[Array, Array]:
        """Return centre and standard deviation of the predictor's own interval, `(N, K)` each."""
        low, high = (end.detach().double().cpu() for end in prediction.interval(self.level))
        if low.dim() > 2:
            raise DataError(
                f"expected one value or a vector per row in a stream; found outputs of shape {tuple(low.shape[1:])}. "
                "Calibrate with a readout, such as a map's sum."
            )
        mean, half = (part.reshape(len(low), -1).numpy() for part in ((low + high) / 2, (high - low) / 2))
        if not (np.isfinite(mean).all() and np.isfinite(half).all() and (half > 0).all()):
            raise DataError(
                "expected finite predictions with intervals wider than 0; found others. A floor keeps a variance above "
                "0: calibrate with the default method, or floor=True."
            )
        return mean, half / normal_quantile((1 + self.level) / 2)

    def _begun(self, prediction: Any, outputs: int) -> State:
        """Return the state; the first row tells the outputs and the possible alarms."""
        state, usual = self._state, self._usual
        if not state.outputs:
            shares = tuple(getattr(prediction, "shares", None) or ())
            counts: dict[str, list[tuple[float, ...] | None]] = {"errors": [usual.errors] * outputs}
            if getattr(prediction, "novelty", None) is not None:
                counts["strangeness"] = [usual.strangeness]
            if len(shares) > 1:  # the share of one alone is always 1
                counts["shares"] = [usual.shares.get(name) for name in shares]
            monitors = {name: Monitor.of(KINDS[name], known) for name, known in counts.items()}
            state.outputs, state.shares, state.monitors = outputs, shares, monitors
            state.held, state.tracker = (0,) * outputs, Tracker.of(outputs)
        if state.outputs != outputs:
            raise DataError(f"expected {state.outputs} outputs, as in rows before; found {outputs}.")
        return state

    def _learn(self, row: _Waiting, target: Array) -> npt.NDArray[np.bool_]:
        """Learn from the label of a waiting row; return whether its interval held it, `(K,)`."""
        state, (mean, std, low, high) = self._state, map(np.array, row[1:])
        inside: npt.NDArray[np.bool_] = (low <= target) & (target <= high)
        state.tracker.learn(mean, std, target, self.level, self._step)
        self._bet("errors", (np.abs(target - mean) / std).tolist(), row[0])
        state.held = tuple((np.array(state.held) + inside).tolist())
        state.labels += 1
        return inside

    def _watch(self, prediction: Any, names: Sequence[Row]) -> None:
        """Bet on novelty and shares of rows, which need no labels."""
        state = self._state
        some = range(0, len(names), max(1, -(-len(names) // _MOST_WATCHED)))
        strange, shares = getattr(prediction, "novelty", None), getattr(prediction, "shares", None) or {}
        for kind, columns in (("strangeness", [strange]), ("shares", [shares.get(name) for name in state.shares])):
            known = [column.detach().cpu().tolist() for column in columns if column is not None]
            if kind in state.monitors and len(known) == len(columns):
                for i in some:
                    self._bet(kind, [column[i] for column in known], names[i])

    def _bet(self, kind: str, scores: Sequence[float], row: Row) -> None:
        self._state.monitors[kind].add(KINDS[kind], scores, row, self._alarm)

    def _shown(self, values: Array, mean: Tensor) -> Tensor:
        """Return values in the shape, unit and precision of the predictions."""
        shaped = torch.from_numpy(values).reshape(mean.shape)
        return (shaped if self._unit is None else self._unit.inverse(shaped)).to(mean)

    def _save(self) -> None:
        if self._file is not None and self._state.outputs:
            self._file.write(self._state)


def _names(count: int, ids: Sequence[Row] | None, first: int) -> list[Row]:
    names: list[Row] = list(range(first, first + count)) if ids is None else _plain(ids)
    if len(names) != count or len(set(names)) != count or not all(type(name) in (int, str) for name in names):
        raise ArgumentError(
            f"expected {count} different ids, texts or whole numbers, one for each row; found {len(names)}, such as "
            f"{names[:3]!r}."
        )
    return names


def _plain(ids: Any) -> list[Row]:
    """Return one id or several as a list of Python values, which JSON can hold."""
    several = ids if isinstance(ids, Iterable) and not isinstance(ids, str) else [ids]
    return [name.item() if isinstance(name, np.generic) else name for name in several]


def _targets(y: Any, count: int, outputs: int) -> Array:
    try:
        one = is_table(y) and len(getattr(y, "columns", "1")) == 1  # the order of several columns is not known here
        target = (from_table(y, "labels") if one else torch.as_tensor(y)).detach().double().cpu().numpy()
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"expected labels as numbers; found {type(y).__name__} ({error}).") from error
    fits = target.size == count * outputs and (outputs == 1 or target.ndim == 0 or target.shape[-1] == outputs)
    if not fits or not np.isfinite(target).all():
        raise DataError(
            f"expected {count} finite labels, of {outputs} value{'s' * (outputs > 1)} each; found shape "
            f"{tuple(target.shape)}. Pass the ids of the rows that have labels."
        )
    return target.reshape(count, outputs)


@record
@dataclass
class State:
    """Everything about a stream that changes; it is stored as it is. Without outputs before the first row.

    Attributes:
        level: the coverage that intervals should have.
        made_with: identifies the model.
        outputs: number of outputs K.
        shares: names of the terms whose shares are watched.
        rows: how many were predicted.
        labels: how many were learned from.
        held: how many labels lay inside their interval, `(K,)`.
        tracker: moves the intervals.
        monitors: raise the alarms, by kind.
        waiting: rows that wait for their label, the oldest first.
    """

    level: Annotated[float, Limits(0, 1)]
    made_with: str
    outputs: Annotated[int, Limits(1, 2**20)] = 0
    shares: tuple[str, ...] = ()
    rows: _Count = 0
    labels: _Count = 0
    held: tuple[_Count, ...] = ()
    tracker: Tracker = field(default_factory=lambda: Tracker.of(0))
    monitors: dict[str, Monitor] = field(default_factory=dict)
    waiting: tuple[_Waiting, ...] = ()

    def checked(self) -> State:
        """Check numbers and lengths against each other after reading."""
        k = self.outputs
        match(self.labels <= self.rows, "labels", f"at most {self.rows}, as there were rows", self.labels)
        match(len(self.held) == k, "held", f"{k} numbers", self.held)
        match(max(self.held) <= self.labels, "held", f"at most {self.labels}, as there were labels", self.held)
        match(len(self.tracker.theta) == k, "tracker.theta", f"{k} numbers", self.tracker.theta)
        scores = {"errors": k} | ({"strangeness": 1} if "strangeness" in self.monitors else {})
        scores |= {"shares": len(self.shares)} if len(self.shares) > 1 else {}
        match(self.monitors.keys() == scores.keys(), "monitors", f"those of {[*scores]}", [*self.monitors])
        for name, count in scores.items():
            fits = self.monitors[name].fits(KINDS[name], count)
            match(fits, f"monitors.{name}", f"lists of numbers for {count} scores", self.monitors[name].counts)
        for i, (_, *parts) in enumerate(self.waiting):
            match([len(part) for part in parts] == [k] * 4, f"waiting[{i}]", f"a name and four lists of {k}", parts)
        names = [name for name, *_ in self.waiting]
        match(len(set(names)) == len(names), "waiting", "rows of different names", names)
        return self


STREAM = Format(
    State,
    "latedrop stream",
    "a stream's state",
    "Pass another path, or delete the file to begin anew.",
    "state",
    indent=None,
)


class StateFile:
    """A file that only one stream writes; changes by another stream are not overwritten."""

    def __init__(self, path: Path) -> None:
        self.path, self._seen = path, _stamp(path)

    def read(self, fresh: State) -> State:
        """Return the state in the file, or `fresh` without one; `FileError` if it is damaged or of another stream."""
        if self._seen is None:
            return fresh
        state = STREAM.read(self.path)
        if (state.level, state.made_with) == (fresh.level, fresh.made_with):
            return state
        whose = "this model" if state.made_with == fresh.made_with else "another model or calibration"
        raise FileError(
            f"expected the state of a stream at level {fresh.level:g} of this model in {self.path}; found level "
            f"{state.level:g}, of {whose}. {STREAM.again}"
        )

    def write(self, state: State) -> None:
        """Replace the file by this state."""
        if _stamp(self.path) not in (None, self._seen):
            raise FileError(
                f"expected {self.path} as this stream left it; another one has written to it. Use one stream, or one "
                "file for each."
            )
        STREAM.write(self.path, state)
        self._seen = _stamp(self.path)


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return inode and time of a file; None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns

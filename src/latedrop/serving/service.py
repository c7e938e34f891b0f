"""Queue requests of several clients, run them as one batch and return to each its own rows."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from latedrop.metrics.levels import checked_level
from latedrop.serving.batching import Batcher, Job
from latedrop.serving.bodies import Array, Asked, Form, ids_of, json_object, named_columns
from latedrop.serving.limits import Limits, RefusalError

__all__ = ["Answer", "Counts", "Service"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)


@dataclass(frozen=True)
class Answer:
    """Columns `(N, ...)` by name, and facts about all rows."""

    columns: Mapping[str, Array]
    about: Mapping[str, Any]


class Service:
    """Predictions for many clients at once.

    Batching changes a prediction only by rounding, because matrix products round differently in batches of other sizes.
    With `alone` every request is a batch of its own, and other requests change no digit.

    Args:
        predictor: any object with `predict(rows)`, where `rows` is an array `(N, ...)` or the result of `arrange`; the
            result has `to_dict`, which takes a level if it has `interval`.
        form: the expected form of rows.
        limits: sizes and times that are not exceeded.
        level: level of intervals, if a request has none.
        stream: makes the predictions and follows labels, see `Predictor.stream`.
        arrange: maps inputs by name to the argument of `predict`.
        alone: run every request by itself.
    """

    def __init__(
        self,
        predictor: Any,
        form: Form | None = None,
        limits: Limits | None = None,
        *,
        level: float = 0.9,
        stream: Any = None,
        arrange: Callable[[Mapping[str, Array]], Any] = dict,
        alone: bool = False,
    ) -> None:
        self.form, self.limits, self.level = form or Form(), limits or Limits(), checked_level(level)
        self.stream, self.counts = stream, Counts()
        self._predictor, self._arrange = predictor, arrange
        self._alone = alone or _rows_meet(getattr(predictor, "calibration", None))
        options: dict[str, Any] = {"wait": self.limits.wait, "room": self.limits.queue_rows, "notice": self.counts.ran}
        self._batcher = Batcher(self._run, most=self.limits.batch_rows, **options)

    def submit(self, asked: Asked) -> Future[Answer]:
        """Queue a request; the future has its answer, or the error."""
        if asked.ids is not None and self.stream is None:
            raise RefusalError(
                "expected ids where the service follows a stream; found some, and it does not: --stream."
            )
        if asked.level is not None and self.stream is not None and asked.level != self.stream.level:
            raise RefusalError(f"expected level {self.stream.level:g}, which the stream tracks; found {asked.level:g}.")
        like = tuple((name, value.shape[1:], value.dtype.str) for name, value in asked.arrays.items())
        key = None if self._alone else (like, asked.ids is None)
        return self._batcher.submit(Job(asked, asked.rows, key, time.monotonic() + self.limits.timeout))

    def update(self, body: bytes) -> dict[str, Any]:
        """Pass labels, JSON `{"ids": [...], "labels": [...]}`, to the stream; return its state afterwards."""
        if self.stream is None:
            raise RefusalError(
                "expected a service that follows a stream; this one does not. Start it with --stream.", 404
            )
        request = json_object(body, ("ids", "labels"))
        ids, labels = ids_of(request.get("ids")), request.get("labels")
        if ids is None or not isinstance(labels, list):
            raise RefusalError('expected {"ids": [...], "labels": [...]}; found no such lists.')
        try:
            values = np.array(labels)
        except ValueError:
            values = np.array(None)
        if values.dtype.kind not in "fiub":
            raise RefusalError("expected labels as numbers, as many for every id; found something else.")
        stream = self.stream
        inside = stream.update(values.astype(np.float64), list(ids)).tolist()
        alarms = [alarm.kind for alarm in stream.alarms]
        return {"held": inside, "labels": stream.labels, "coverage": list(stream.coverage), "alarms": alarms}

    def gauges(self) -> dict[str, float]:
        """Return the current numbers for Prometheus."""
        gauges: dict[str, float] = {"latedrop_queue_rows": self._batcher.waiting, "latedrop_up": int(self.healthy)}
        if self.stream is not None:
            gauges |= {"latedrop_stream_labels": self.stream.labels, "latedrop_stream_alarms": len(self.stream.alarms)}
        return gauges

    @property
    def healthy(self) -> bool:
        """Return True while requests are accepted."""
        return self._batcher.alive

    def close(self) -> None:
        """Finish the accepted requests and accept no more."""
        self._batcher.close(self.limits.drain)

    def _run(self, requests: Sequence[Asked]) -> list[Answer]:
        names = requests[0].arrays
        arrays = {name: np.concatenate([asked.arrays[name] for asked in requests]) for name in names}
        x = arrays[""] if "" in arrays else self._arrange(arrays)
        ends = np.cumsum([asked.rows for asked in requests])
        if self.stream is not None:
            return self._streamed(x, requests, ends)
        prediction = self._predictor.predict(x)
        levels = [self.level if asked.level is None else asked.level for asked in requests]
        by_level = {level: named_columns(prediction, level) for level in dict.fromkeys(levels)}
        return [
            Answer(_cut(by_level[level], end - asked.rows, end), {"level": level})
            for asked, end, level in zip(requests, ends, levels, strict=True)
        ]

    def _streamed(self, x: Any, requests: Sequence[Asked], ends: Any) -> list[Answer]:
        given = None if requests[0].ids is None else [name for asked in requests for name in asked.ids or ()]
        answer = self.stream.predict(x, given)
        columns = {name: np.asarray(getattr(answer, name).cpu()) for name in ("mean", "low", "high")}
        strange = getattr(answer.prediction, "novelty", None)
        columns |= {} if strange is None else {"novelty": np.asarray(strange.cpu())}
        about = {"level": answer.level, "alarms": [alarm.kind for alarm in answer.alarms]}
        return [
            Answer(_cut(columns, end - asked.rows, end), {**about, "ids": answer.ids[end - asked.rows : end]})
            for asked, end in zip(requests, ends, strict=True)
        ]


def _rows_meet(calibration: Any) -> bool:
    """Return True if a row's prediction depends on other rows of its batch or on its position."""
    sites = getattr(calibration, "sites", None) or ()
    return not getattr(calibration, "shared", True) or any(getattr(site, "coupled", False) for site in sites)


def _cut(columns: Mapping[str, Array], start: int, end: int) -> dict[str, Array]:
    return {name: values[start:end] for name, values in columns.items()}


class Counts:
    """Count requests by path and status, their seconds, rows and batches, for Prometheus; threads may share it.

    >>> counts = Counts()
    >>> counts.answered("/predict", 200, 0.004, rows=3)
    >>> "latedrop_rows_total 3" in counts.text({"latedrop_queue_rows": 0})
    True
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._requests: dict[tuple[str, int], int] = defaultdict(int)
        self._seconds, self._batches = _Histogram(_SECONDS), _Histogram(_ROWS)
        self._rows = 0

    def answered(self, path: str, status: int, seconds: float, rows: int = 0) -> None:
        """Count one request by path and status, with its seconds and rows."""
        with self._lock:
            self._requests[path, status] += 1
            self._rows += rows
            if path == "/predict":
                self._seconds.add(seconds)

    def ran(self, rows: int) -> None:
        """Count one batch and its rows."""
        with self._lock:
            self._batches.add(rows)

    def text(self, gauges: Mapping[str, float]) -> str:
        """Return all counts and the current gauges as text."""
        with self._lock:
            lines = ["# TYPE latedrop_requests_total counter"]
            lines += [
                f'latedrop_requests_total{{path="{path}",status="{status}"}} {count}'
                for (path, status), count in sorted(self._requests.items())
            ]
            lines += ["# TYPE latedrop_rows_total counter", f"latedrop_rows_total {self._rows}"]
            lines += self._seconds.lines("latedrop_predict_seconds") + self._batches.lines("latedrop_batch_rows")
        for name, value in gauges.items():
            lines += [f"# TYPE {name} gauge", f"{name} {value:g}"]
        return "\n".join(lines) + "\n"


class _Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds, self._counts = bounds, [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[sum(value > bound for bound in self._bounds)] += 1
        self._sum += value

    def lines(self, name: str) -> list[str]:
        total, lines = 0, [f"# TYPE {name} histogram"]
        for bound, count in zip((*map("{:g}".format, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self._sum:g}", f"{name}_count {total}"]

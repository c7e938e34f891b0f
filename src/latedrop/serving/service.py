"""Queue requests of several clients, run them as one batch and return to each its own rows."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby
from threading import Condition, Lock, Thread
from typing import Any

import numpy as np

from latedrop.errors import FileError
from latedrop.metrics.levels import checked_level
from latedrop.serving.bodies import (
    Array,
    Asked,
    Form,
    Limits,
    RefusalError,
    ids_of,
    json_object,
    named_columns,
    numbers,
)

__all__ = ["Answer", "Batcher", "Counts", "Job", "Service"]


@dataclass(frozen=True)
class Answer:
    """Columns `(N, ...)` by name, and facts about all rows."""

    columns: Mapping[str, Array]
    about: Mapping[str, Any]


class Service:
    """Predictions for many clients at once.

    Batching changes a prediction only by rounding, because matrix products round differently in batches of other sizes.
    With `batch_rows=1` every request is a batch of its own; so it is if rows of a batch affect each other.

    Args:
        predictor: any object with `predict(rows)`, where `rows` is an array `(N, ...)` or the result of `arrange`; the
            result has `to_dict`, which takes a level if it has `interval`.
        form: the expected form of rows.
        limits: sizes and times that are not exceeded.
        level: level of intervals, if a request has none.
        stream: makes the predictions and follows labels, see `Predictor.stream`.
        arrange: maps inputs by name to the argument of `predict`.
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
    ) -> None:
        self.form, self.limits, self.level = form or Form(), limits or Limits(), checked_level(level)
        self.stream, self.counts = stream, Counts()
        self._predictor, self._arrange = predictor, arrange
        most = 1 if _rows_meet(getattr(predictor, "calibration", None)) else self.limits.batch_rows
        self._batcher = Batcher(self._run, most=most, wait=self.limits.wait, room=self.limits.queue_rows)

    def submit(self, asked: Asked) -> Future[Answer]:
        """Queue a request; the future has its answer, or the error."""
        if asked.ids is not None and self.stream is None:
            raise RefusalError(
                "expected ids where the service follows a stream; found some, and it does not: --stream."
            )
        if asked.level is not None and self.stream is not None and asked.level != self.stream.level:
            raise RefusalError(f"expected level {self.stream.level:g}, which the stream tracks; found {asked.level:g}.")
        like = tuple((name, value.shape[1:], value.dtype.str) for name, value in asked.arrays.items())
        late = time.monotonic() + self.limits.timeout
        return self._batcher.submit(Job(asked, asked.rows, (like, asked.ids is None), late))

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
        stream = self.stream
        inside = stream.update(numbers("labels", labels, "float64"), list(ids)).tolist()
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
        self._batcher.close(self.limits.timeout)

    def _run(self, requests: Sequence[Asked]) -> list[Answer]:
        self.counts.ran()
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
        self._counts = Counter[str]({"rows_total": 0, "batches_total": 0})

    def answered(self, path: str, status: int, seconds: float, rows: int = 0) -> None:
        """Count one request by path and status, with its seconds and rows."""
        with self._lock:
            self._counts[f'requests_total{{path="{path}",status="{status}"}}'] += 1
            self._counts[f'seconds_total{{path="{path}"}}'] += seconds  # type: ignore[assignment]
            self._counts["rows_total"] += rows

    def ran(self) -> None:
        """Count one batch."""
        with self._lock:
            self._counts["batches_total"] += 1

    def text(self, gauges: Mapping[str, float]) -> str:
        """Return all counts and the current gauges as text."""
        with self._lock:
            counts = sorted(self._counts.items())
        lines = []
        for name, group in groupby(counts, lambda count: count[0].partition("{")[0]):
            lines += [f"# TYPE latedrop_{name} counter", *(f"latedrop_{key} {value:g}" for key, value in group)]
        for name, value in gauges.items():
            lines += [f"# TYPE {name} gauge", f"{name} {value:g}"]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Job:
    """A request that waits.

    Attributes:
        content: what `run` is given.
        rows: how many rows it has.
        key: jobs of one key can run together.
        deadline: of `time.monotonic`; later it is not run any more.
        answer: what `run` returned for it, or the error.
    """

    content: Any
    rows: int
    key: Hashable
    deadline: float
    answer: Future[Any] = field(default_factory=Future)
    born: float = field(default_factory=time.monotonic)

    def fail(self, error: Exception) -> None:
        """Answer with an error, if there is no answer yet."""
        if not self.answer.done():
            self.answer.set_exception(error)


class Batcher:
    """Gather requests into batches, in a queue and a thread that empties it.

    The thread takes the oldest request and all later ones of the same `key`, until there are `most` rows or the oldest
    has waited for `wait` seconds. What arrives while a batch runs waits for the next one: under load batches fill by
    themselves.

    Args:
        run: from the contents of some jobs to as many answers. Where it raises for several, each is run by
            itself, so that the error goes to whom it belongs to; not so `FileError`, which is nobody's.
        most: rows of a batch; a job with more runs alone.
        wait: seconds that the oldest job waits for others.
        room: rows that may wait.

    Attributes:
        waiting: rows that wait.
    """

    def __init__(self, run: Callable[[Sequence[Any]], Sequence[Any]], *, most: int, wait: float, room: int) -> None:
        self._run, self._most, self._wait, self._room = run, most, wait, room
        self._jobs: deque[Job] = deque()
        self.waiting = 0
        self._changed = Condition()
        self._closed = False
        self._thread = Thread(target=self._work, name="latedrop-batches", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether jobs are taken and run."""
        return self._thread.is_alive() and not self._closed

    def submit(self, job: Job) -> Future[Any]:
        """Queue a job, or raise `RefusalError` where there is no room or the batcher is closed."""
        with self._changed:
            if self._closed:
                raise RefusalError("expected a service that runs; it is stopping. Ask again, or another one.", 503)
            if self.waiting + job.rows > self._room:
                raise RefusalError(
                    f"expected room for {job.rows} rows in the queue; {self.waiting} of {self._room} wait. Ask again "
                    "later, or with fewer rows.",
                    429,
                )
            self._jobs.append(job)
            self.waiting += job.rows
            self._changed.notify()
        return job.answer

    def close(self, timeout: float | None = None) -> None:
        """Take no more jobs, finish those that wait, and end the thread; what is late by then gets an error."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout)
        with self._changed:
            left, self.waiting = list(self._jobs), 0
            self._jobs.clear()
        for job in left:
            job.fail(RefusalError("expected to be answered before the service stopped; there was no time.", 503))

    def _work(self) -> None:
        while batch := self._next():
            alive = [job for job in batch if self._in_time(job)]
            if alive:
                self._answer(alive)

    def _next(self) -> list[Job]:
        """The jobs to run next; none at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            if not self._jobs:
                return []
            first = self._jobs[0]
            left = min(first.born + self._wait, first.deadline) - time.monotonic()
            self._changed.wait_for(lambda: self._closed or self.waiting >= self._most, max(left, 0))
            chosen, left_over, rows = [], deque[Job](), 0
            for job in self._jobs:
                if job is first or (job.key == first.key and rows + job.rows <= self._most):
                    chosen.append(job)
                    rows += job.rows
                else:
                    left_over.append(job)
            self._jobs = left_over
            self.waiting -= rows
            return chosen

    def _in_time(self, job: Job) -> bool:
        if not job.answer.set_running_or_notify_cancel():
            return False
        if time.monotonic() > job.deadline:
            job.fail(RefusalError("expected to be answered in time; the queue was too long. Ask again later.", 503))
            return False
        return True

    def _answer(self, jobs: list[Job]) -> None:
        try:
            answers = self._run([job.content for job in jobs])
        except Exception as error:
            for job in jobs:
                if len(jobs) > 1 and not isinstance(error, FileError):
                    self._answer([job])
                else:
                    job.fail(error)
            return
        for job, answer in zip(jobs, answers, strict=True):
            job.answer.set_result(answer)

"""Requests gathered into batches: one thread runs them, several at a time where they wait at the same time.

The thread takes the oldest request and all later ones of the same `key`, until there are `most` rows or the oldest has
waited for `wait` seconds. What arrives while a batch runs waits for the next one: under load batches fill by
themselves.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Condition, Thread
from typing import Any

from latedrop.errors import FileError
from latedrop.serving.limits import RefusalError

__all__ = ["Batcher", "Job"]


@dataclass(frozen=True)
class Job:
    """A request that waits.

    Attributes:
        content: what `run` is given.
        rows: how many rows it has.
        key: jobs of one key can run together; None runs alone.
        deadline: of `time.monotonic`; later it is not run any more.
        answer: what `run` returned for it, or the error.
    """

    content: Any
    rows: int
    key: Hashable
    deadline: float
    answer: Future[Any] = field(default_factory=Future)
    born: float = field(default_factory=time.monotonic)


class Batcher:
    """A queue and the thread that empties it.

    Args:
        run: from the contents of some jobs to as many answers. Where it raises for several, each is run by
            itself, so that the error goes to whom it belongs to; not so `FileError`, which is nobody's.
        most: rows of a batch; a job with more runs alone.
        wait: seconds that the oldest job waits for others.
        room: rows that may wait.
        notice: is told the rows of every batch.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Any]], Sequence[Any]],
        *,
        most: int,
        wait: float,
        room: int,
        notice: Callable[[int], None] = lambda rows: None,
    ) -> None:
        self._run, self._most, self._wait, self._room, self._notice = run, most, wait, room, notice
        self._jobs: deque[Job] = deque()
        self._waiting = 0
        self._changed = Condition()
        self._closed = False
        self._thread = Thread(target=self._work, name="latedrop-batches", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Rows that wait."""
        return self._waiting

    @property
    def alive(self) -> bool:
        """Whether jobs are taken and run."""
        return self._thread.is_alive() and not self._closed

    def submit(self, job: Job) -> Future[Any]:
        """Queue a job, or raise `RefusalError` where there is no room or the batcher is closed."""
        with self._changed:
            if self._closed:
                raise RefusalError("expected a service that runs; it is stopping. Ask again, or another one.", 503)
            if self._waiting + job.rows > self._room:
                raise RefusalError(
                    f"expected room for {job.rows} rows in the queue; {self._waiting} of {self._room} wait. Ask again "
                    "later, or with fewer rows.",
                    429,
                )
            self._jobs.append(job)
            self._waiting += job.rows
            self._changed.notify()
        return job.answer

    def close(self, timeout: float | None = None) -> None:
        """Take no more jobs, finish those that wait, and end the thread; what is late by then gets an error."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout)
        with self._changed:
            left, self._waiting = list(self._jobs), 0
            self._jobs.clear()
        for job in left:
            _fail(job, RefusalError("expected to be answered before the service stopped; there was no time.", 503))

    def _work(self) -> None:
        while batch := self._next():
            alive = [job for job in batch if self._in_time(job)]
            if alive:
                self._notice(sum(job.rows for job in alive))
                self._answer(alive)

    def _next(self) -> list[Job]:
        """The jobs to run next; none at the end."""
        with self._changed:
            while not self._jobs:
                if self._closed:
                    return []
                self._changed.wait()
            first = self._jobs[0]
            until = min(first.born + self._wait, first.deadline)
            while first.key is not None and not self._closed and self._waiting < self._most:
                left = until - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    break
            taken = self._fitting()
            chosen = set(map(id, taken))
            self._jobs = deque(job for job in self._jobs if id(job) not in chosen)
            self._waiting -= sum(job.rows for job in taken)
            return taken

    def _fitting(self) -> list[Job]:
        """The oldest job, and what can run beside it."""
        first = self._jobs[0]
        taken, rows = [first], first.rows
        if first.key is None:
            return taken
        for job in list(self._jobs)[1:]:
            if job.key == first.key and rows + job.rows <= self._most:
                taken.append(job)
                rows += job.rows
        return taken

    def _in_time(self, job: Job) -> bool:
        if not job.answer.set_running_or_notify_cancel():
            return False
        if time.monotonic() > job.deadline:
            _fail(job, RefusalError("expected to be answered in time; the queue was too long. Ask again later.", 503))
            return False
        return True

    def _answer(self, jobs: list[Job]) -> None:
        try:
            answers = self._run([job.content for job in jobs])
        except Exception as error:
            if len(jobs) > 1 and not isinstance(error, FileError):
                for job in jobs:
                    self._answer([job])
                return
            for job in jobs:
                _fail(job, error)
            return
        for job, answer in zip(jobs, answers, strict=True):
            job.answer.set_result(answer)


def _fail(job: Job, error: Exception) -> None:
    if not job.answer.done():
        job.answer.set_exception(error)

"""Requests are gathered into batches, and every one gets its own answer or its own error."""

from __future__ import annotations

import time
from concurrent.futures import Future
from threading import Event
from typing import Any

import pytest

from latedrop.errors import DataError, FileError
from latedrop.serving import Limits, RefusalError
from latedrop.serving.service import Batcher, Job


class Doubling:
    """Doubles numbers, remembers the batches, and waits for `gate` before each."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = Event()
        self.begun = Event()

    def __call__(self, contents: Any) -> list[int]:
        self.begun.set()
        assert self.gate.wait(10)
        self.batches.append(list(contents))
        if any(content < 0 for content in contents):
            raise DataError("expected numbers above 0; found others.")
        return [2 * content for content in contents]


def job(content: int, rows: int = 1, key: Any = "a", seconds: float = 30.0) -> Job:
    return Job(content, rows, key, time.monotonic() + seconds)


def busy(run: Doubling, **options: Any) -> tuple[Batcher, Future[Any]]:
    """A batcher that is at work on a first job, so that what comes now waits."""
    batcher = Batcher(run, **{"most": 8, "wait": 0.0, "room": 100, **options})
    first = batcher.submit(job(100, key="first"))
    assert run.begun.wait(10)
    return batcher, first


def test_other_keys_run_apart_and_many_rows_alone() -> None:
    run = Doubling()
    batcher, _ = busy(run)
    asked = [("a", 1), ("b", 1), ("a", 9), ("a", 1), ("b", 7), ("b", 1)]
    answers = [batcher.submit(job(i, rows, key)) for i, (key, rows) in enumerate(asked)]
    run.gate.set()
    assert [answer.result(10) for answer in answers] == [0, 2, 4, 6, 8, 10]
    assert sorted(run.batches[1:]) == [[0, 3], [1, 4], [2], [5]]
    assert batcher.waiting == 0
    batcher.close()


def test_the_first_waits_for_others() -> None:
    run = Doubling()
    run.gate.set()
    batcher = Batcher(run, most=2, wait=30.0, room=100)
    answers = [batcher.submit(job(i)) for i in range(2)]
    assert [answer.result(10) for answer in answers] == [0, 2]
    assert run.batches == [[0, 1]]
    batcher.close()


def test_an_error_goes_to_whom_it_belongs() -> None:
    run = Doubling()
    batcher, _ = busy(run)
    good, bad, also = (batcher.submit(job(i)) for i in (1, -1, 2))
    run.gate.set()
    assert (good.result(10), also.result(10)) == (2, 4)
    with pytest.raises(DataError, match="above 0"):
        bad.result(10)
    batcher.close()


def test_an_error_of_a_file_is_not_tried_again() -> None:
    calls = []

    def run(contents: Any) -> list[int]:
        calls.append(contents)
        raise FileError("expected room on the disk; found none.")

    batcher = Batcher(run, most=2, wait=30.0, room=100)
    answers = [batcher.submit(job(i)) for i in range(2)]
    for answer in answers:
        with pytest.raises(FileError):
            answer.result(10)
    assert calls == [[0, 1]]
    batcher.close()


def test_what_is_late_or_cancelled_does_not_run() -> None:
    run = Doubling()
    batcher, _ = busy(run)
    late, cancelled = batcher.submit(job(1, seconds=-1.0)), batcher.submit(job(2))
    assert cancelled.cancel()
    run.gate.set()
    with pytest.raises(RefusalError, match="in time") as caught:
        late.result(10)
    assert caught.value.status == 503
    assert batcher.submit(job(3)).result(10) == 6
    assert run.batches == [[100], [3]]
    batcher.close()


def test_closing_finishes_what_was_taken_and_takes_no_more() -> None:
    run = Doubling()
    batcher, _ = busy(run)
    taken = [batcher.submit(job(i)) for i in range(3)]
    run.gate.set()
    batcher.close()
    assert [answer.result(0) for answer in taken] == [0, 2, 4]
    with pytest.raises(RefusalError, match="stopping") as caught:
        batcher.submit(job(1))
    assert caught.value.status == 503
    assert not batcher.alive


def test_what_cannot_be_finished_gets_an_error() -> None:
    run = Doubling()
    batcher, _ = busy(run)
    left = batcher.submit(job(1))
    batcher.close(timeout=0.01)
    with pytest.raises(RefusalError, match="no time"):
        left.result(0)
    run.gate.set()


@pytest.mark.parametrize(
    "options", [{"batch_rows": 0}, {"wait": -1.0}, {"timeout": 0.0}, {"pixels": 0}, {"timeout": float("nan")}]
)
def test_limits_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Limits(**options)

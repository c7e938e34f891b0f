"""Counts that follow labels: a file of true counts of some frames, and a stream that learns from them.

The stream follows what is reported: counts and intervals after the guard for strange frames and the recalibration for a
scene. A label is used after its frame was counted, never before. Labels of frames that a former run has counted are
used when the next one begins: they may come as late as they like.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from latedrop.errors import FileError
from latedrop.files import plain_cell
from latedrop.streams import Stream
from latedrop_crowd.calibration import CrowdCalibration
from latedrop_crowd.calibration.record import Reading
from latedrop_crowd.counting import CountedFrame
from latedrop_crowd.layouts.annotations import csv_rows, names_of

__all__ = ["FOLLOWED", "counts_stream", "followed", "label_of", "read_labels", "reported"]

FOLLOWED = "+stream"
"""Behind the provenance of counts that follow labels: a file has either these or plain ones."""


def read_labels(path: str | os.PathLike[str]) -> dict[str, float]:
    """True counts by the name of their frame, from a CSV with columns `frame` and `count`; others are passed over."""
    found: dict[str, float] = {}
    for line, row in csv_rows(path, "frame", "count"):
        name, text = plain_cell(row["frame"]), row["count"]
        try:
            count = float(text)
        except ValueError:
            count = -1.0
        if not (isfinite(count) and count >= 0) or found.get(name, count) != count:
            raise FileError(
                f"expected a frame and its count, 0 or more and one alone, in line {line} of {path}; found {name!r} "
                f"and {text!r}."
            )
        found[name] = count
    return found


def label_of(name: str, labels: Mapping[str, float]) -> float | None:
    """The true count of a frame, which is named as in the file of counts, or without its ending; None: not known."""
    return next((labels[known] for known in names_of(name)[:2] if known in labels), None)


def counts_stream(
    calibration: CrowdCalibration, level: float = 0.9, path: str | os.PathLike[str] | None = None
) -> Stream:
    """A stream for the counts of a calibration; a state of another calibration is refused.

    What was usual is known from the validation frames. After a recalibration it is not: the first frames of the
    stream, and the first labels, then tell.
    """
    usual = calibration.count.usual() if calibration.recalibration is None else None
    made_with = hashlib.sha256(calibration.to_json().encode()).hexdigest()
    return Stream(None, level, path, usual=usual, made_with=made_with)


def followed(
    frames: Iterable[CountedFrame],
    stream: Stream,
    labels: Mapping[str, float],
    on_alarm: Callable[[str], object] = lambda text: None,
) -> Iterator[CountedFrame]:
    """The frames with counts and intervals of the stream, which learns from their labels.

    Args:
        frames: from `count_people`.
        stream: from `counts_stream`.
        labels: from `read_labels`.
        on_alarm: called once with a sentence for each alarm.
    """
    told = {alarm.kind for alarm in stream.alarms}

    def learn(names: Iterable[str | int]) -> None:
        for name in names:
            label = label_of(str(name), labels)
            if label is not None and name in stream.waiting:
                stream.update(label, name)
        for alarm in stream.alarms:
            if alarm.kind not in told:
                told.add(alarm.kind)
                change = "is no longer as it was" if alarm.kind == "strangeness" else "are no longer as they were"
                on_alarm(f"{alarm.kind} {change}, since frame {alarm.row} at the latest")

    learn(stream.waiting)
    for frame in frames:
        if frame.uncountable:
            yield replace(frame, provenance=f"{frame.provenance}{FOLLOWED}")
            continue
        widening = next(iter(stream.widening), 1.0)
        found = stream.follow(reported(frame.reading), [frame.name])
        count, low, high = (max(0.0, float(value)) for value in (found.mean, found.low, found.high))
        kept = max(0.0, frame.count_kept + count - frame.count)
        made_by = f"{frame.provenance}{FOLLOWED}"
        yield replace(
            frame, count=count, std=frame.std * widening, low=low, high=high, count_kept=kept, provenance=made_by
        )
        learn([frame.name])  # after the frame was written down: were it counted again, its label would count twice


def reported(reading: Reading) -> Any:
    """What is reported of a frame, as `Stream.follow` takes it."""
    return _Reported(reading)


@dataclass(frozen=True)
class _Reported:
    """What is reported of a frame, as a stream takes it: one row, whose ends are not cut off at 0."""

    reading: Reading

    @property
    def mean(self) -> Tensor:
        return _row(self.reading.mean)

    @property
    def novelty(self) -> Tensor:
        return _row(self.reading.strangeness)

    @property
    def shares(self) -> dict[str, Tensor] | None:
        return self.reading.count.shares

    def interval(self, level: float) -> tuple[Tensor, Tensor]:
        low, high = self.reading.interval(level)
        return _row(low), _row(high)


def _row(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)

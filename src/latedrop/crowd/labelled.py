"""Counts that follow labels: a file of true counts of some frames, and a stream that learns from them.

A label is used after its frame was counted, never before. Labels of frames that a former run has counted are used when
the next one begins: they may come as late as they like.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from math import isfinite

from latedrop.crowd.counting import CountedFrame
from latedrop.errors import FileError
from latedrop.files import plain_cell, readable
from latedrop.streams import Stream

__all__ = ["followed", "read_labels"]


def read_labels(path: str | os.PathLike[str]) -> dict[str, float]:
    """True counts by the name of their frame, from a CSV with columns `frame` and `count`; others are passed over."""
    with readable(path, "true counts"), open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
        reader = csv.DictReader(file)
        if not {"frame", "count"} <= set(reader.fieldnames or ()):
            raise FileError(f"expected the columns frame and count in {path}; found {reader.fieldnames}.")
        found: dict[str, float] = {}
        for row in reader:
            name, text = plain_cell(row["frame"] or ""), row["count"] or ""
            try:
                count = float(text)
            except ValueError:
                count = -1.0
            if not (isfinite(count) and count >= 0) or not name or found.get(name, count) != count:
                raise FileError(
                    f"expected a frame and its count, 0 or more and one alone, in line {reader.line_num} of {path}; "
                    f"found {name!r} and {text!r}."
                )
            found[name] = count
    return found


def followed(
    frames: Iterable[CountedFrame],
    stream: Stream,
    labels: dict[str, float],
    on_alarm: Callable[[str], object] = lambda text: None,
) -> Iterator[CountedFrame]:
    """The frames with counts and intervals of the stream, which learns from their labels.

    Args:
        frames: from `count_people`.
        stream: made without a predictor.
        labels: from `read_labels`.
        on_alarm: called once with a sentence for each alarm.
    """
    told = {alarm.kind for alarm in stream.alarms}

    def learn(names: Iterable[str | int]) -> None:
        for name in names:
            if name in labels and name in stream.waiting:
                stream.update(labels[str(name)], name)
        for alarm in stream.alarms:
            if alarm.kind not in told:
                told.add(alarm.kind)
                on_alarm(f"{alarm.kind} are no longer as they were, since frame {alarm.row} at the latest")

    learn(stream.waiting)
    for frame in frames:
        found = stream.follow(frame.prediction, [frame.name])
        count, low, high = (max(0.0, float(value)) for value in (found.mean, found.low, found.high))
        kept = max(0.0, frame.count_kept + count - frame.count)
        yield replace(frame, count=count, low=low, high=high, count_kept=kept)
        learn([frame.name])  # after the frame was written down: were it counted again, its label would count twice

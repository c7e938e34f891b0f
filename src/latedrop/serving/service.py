"""A predictor behind a queue: requests of several clients run as one batch, each gets its own rows back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from latedrop.metrics.levels import checked_level
from latedrop.serving.answers import named_columns
from latedrop.serving.batching import Batcher, Job
from latedrop.serving.bodies import Array, Asked, Form, ids_of, json_object
from latedrop.serving.counts import Counts
from latedrop.serving.limits import Limits, RefusalError

__all__ = ["Answer", "Service"]


@dataclass(frozen=True)
class Answer:
    """Columns `(N, ...)` by name, and what belongs to all rows."""

    columns: Mapping[str, Array]
    about: Mapping[str, Any]


class Service:
    """Predictions for many clients at once.

    A prediction equals the one of the request by itself, up to rounding: matrix products round differently in batches
    of other sizes. With `alone` every request is a batch, and no other request changes a digit.

    Args:
        predictor: anything with `predict(rows)`, `rows` an array `(N, ...)` or what `arrange` makes of several; the
            result has `to_dict`, with a level where it has `interval`.
        form: what rows look like.
        limits: what is too much.
        level: of intervals, where a request names none.
        stream: follows labels, see `Predictor.stream`; then predictions are its own.
        arrange: from inputs by name to what `predict` takes.
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
        """Labels for the stream, as JSON `{"ids": [...], "labels": [...]}`; what it then is like."""
        if self.stream is None:
            raise RefusalError(
                "expected a service that follows a stream; this one does not. Start it with --stream.", 404
            )
        found = json_object(body, ("ids", "labels"))
        ids, labels = ids_of(found.get("ids")), found.get("labels")
        if ids is None or not isinstance(labels, list):
            raise RefusalError('expected {"ids": [...], "labels": [...]}; found no such lists.')
        try:
            values = np.array(labels)
        except ValueError:
            values = np.array(None)
        if values.dtype.kind not in "fiub":
            raise RefusalError("expected labels as numbers, as many for every id; found something else.")
        held = self.stream.update(values.astype(np.float64), list(ids))
        return {"held": held.tolist(), **self._followed()}

    def gauges(self) -> dict[str, float]:
        """Numbers as they are now, for Prometheus."""
        found: dict[str, float] = {"latedrop_queue_rows": self._batcher.waiting, "latedrop_up": int(self.healthy)}
        if self.stream is not None:
            found |= {"latedrop_stream_labels": self.stream.labels, "latedrop_stream_alarms": len(self.stream.alarms)}
        return found

    @property
    def healthy(self) -> bool:
        """Whether requests are taken."""
        return self._batcher.alive

    def close(self) -> None:
        """Finish what was taken, and take no more."""
        self._batcher.close(self.limits.drain)

    def _run(self, requests: Sequence[Asked]) -> list[Answer]:
        names = requests[0].arrays
        arrays = {name: _joined([asked.arrays[name] for asked in requests]) for name in names}
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
        found = self.stream.predict(x, given)
        columns = {name: np.asarray(getattr(found, name).cpu()) for name in ("mean", "low", "high")}
        strange = getattr(found.prediction, "strangeness", None)
        columns |= {} if strange is None else {"strangeness": np.asarray(strange.cpu())}
        about = {"level": found.level, "alarms": [alarm.kind for alarm in found.alarms]}
        return [
            Answer(_cut(columns, end - asked.rows, end), {**about, "ids": found.ids[end - asked.rows : end]})
            for asked, end in zip(requests, ends, strict=True)
        ]

    def _followed(self) -> dict[str, Any]:
        s = self.stream
        return {"labels": s.labels, "coverage": list(s.coverage), "alarms": [alarm.kind for alarm in s.alarms]}


def _rows_meet(calibration: Any) -> bool:
    """Whether a row's prediction depends on the rows beside it, or on its place among them."""
    sites = getattr(calibration, "sites", None) or ()
    return not getattr(calibration, "shared", True) or any(getattr(site, "coupled", False) for site in sites)


def _joined(parts: Sequence[Array]) -> Array:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _cut(columns: Mapping[str, Array], start: int, end: int) -> dict[str, Array]:
    return {name: values[start:end] for name, values in columns.items()}

"""What a service counts, as text for Prometheus."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from threading import Lock

__all__ = ["Counts"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)


class Counts:
    """Requests by path and status, how long they took, rows, and batches; safe to use from several threads.

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
        """Count a request."""
        with self._lock:
            self._requests[path, status] += 1
            self._rows += rows
            if path == "/predict":
                self._seconds.add(seconds)

    def ran(self, rows: int) -> None:
        """Count a batch."""
        with self._lock:
            self._batches.add(rows)

    def text(self, gauges: Mapping[str, float]) -> str:
        """All of it, and some numbers as they are now."""
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
        total, found = 0, [f"# TYPE {name} histogram"]
        for bound, count in zip((*map("{:g}".format, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            found.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*found, f"{name}_sum {self._sum:g}", f"{name}_count {total}"]

"""How much a service takes, and how it says no."""

from __future__ import annotations

from dataclasses import dataclass

from latedrop.errors import ArgumentError, LatedropError

__all__ = ["Limits", "RefusalError"]


class RefusalError(LatedropError):
    """A request that is not answered with a prediction; `status` is that of HTTP."""

    def __init__(self, message: str, status: int = 422) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Limits:
    """Set the limits of a service.

    Attributes:
        batch_rows: rows that run at once; more requests are not gathered into one batch.
        wait: seconds that the first request of a batch waits for others.
        queue_rows: rows that wait at most; more are refused with status 429.
        request_rows: rows of one request; more are refused with status 413.
        body_bytes: bytes of one request; more are refused with status 413.
        timeout: seconds until a request is given up, with status 503.
        pixels: of one image; more are refused with status 413.
        requests: that are being read or answered at once; more are refused with status 503.
        drain: seconds that a service which is told to stop has to finish what it took.
    """

    batch_rows: int = 256
    wait: float = 0.002
    queue_rows: int = 8192
    request_rows: int = 4096
    body_bytes: int = 16 << 20
    timeout: float = 30.0
    pixels: int = 64_000_000
    requests: int = 1024
    drain: float = 30.0

    def __post_init__(self) -> None:
        for name in ("batch_rows", "queue_rows", "request_rows", "body_bytes", "pixels", "requests"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"expected {name} to be 1 or more; found {getattr(self, name)}.")
        for name, least in (("wait", 0.0), ("timeout", 0.001), ("drain", 0.0)):
            if not least <= getattr(self, name) < 1e6:
                raise ArgumentError(f"expected {name} as seconds, {least:g} or more; found {getattr(self, name)}.")
        if self.request_rows > self.queue_rows:
            raise ArgumentError(
                f"expected a queue that holds one request, of up to {self.request_rows} rows; found room for "
                f"{self.queue_rows}. Make the queue larger, or requests smaller."
            )

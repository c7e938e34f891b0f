"""A small HTTP client for load tests: one connection, kept open, a request after the other."""

from __future__ import annotations

import asyncio
import json
from typing import Any

__all__ = ["Client", "Lost", "message"]


class Lost(Exception):  # noqa: N818
    """The connection ended before there was an answer: the client knows that it has none."""


class Client:
    """One connection to a service."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, raw: bytes, timeout: float = 60.0) -> tuple[int, bytes]:
        """Status and body of the answer to a raw request, or `Lost`."""
        try:
            if self._streams is None:
                self._streams = await asyncio.open_connection("127.0.0.1", self.port)
            reader, writer = self._streams
            writer.write(raw)
            return await asyncio.wait_for(self._answer(reader), timeout)
        except (OSError, EOFError, asyncio.IncompleteReadError, ValueError, IndexError) as error:
            self.close()
            raise Lost(str(error)) from error

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[int, bytes]:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
        lengths = [int(line.partition(":")[2]) for line in head if line.startswith("content-length:")]
        body = await reader.readexactly(lengths[0])
        if any(line.startswith("connection: close") for line in head):
            self.close()
        return int(head[0].split()[1]), body


def message(body: bytes | Any, kind: str = "application/json", path: str = "/predict") -> bytes:
    """A raw POST request; anything but bytes is written as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode("latin-1", "replace") + content

"""Messages from the counting thread to every open page; a page that is slow misses some, and holds up nobody."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

__all__ = ["Hub"]

_WAITING = 32


class Hub:
    """Hands messages on; `tell` may be called from any thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pages: set[asyncio.Queue[str | None]] = set()

    def begin(self) -> None:
        """Called in the server's loop when it is up."""
        self._loop = asyncio.get_running_loop()

    def end(self) -> None:
        """Let pages go; also from another thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._hand_on, None)

    def tell(self, message: dict[str, Any]) -> None:
        """A message to all pages."""
        if self._loop is not None and self._pages and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._hand_on, json.dumps(message))

    async def listen(self) -> AsyncIterator[str]:
        """Server-sent events, for one page."""
        own: asyncio.Queue[str | None] = asyncio.Queue(_WAITING)
        self._pages.add(own)
        try:
            yield "retry: 1000\n\n"
            while True:
                try:
                    text = await asyncio.wait_for(own.get(), 10)
                except asyncio.TimeoutError:  # another class than TimeoutError before Python 3.11
                    yield ": still here\n\n"
                    continue
                if text is None:
                    return
                yield f"data: {text}\n\n"
        finally:
            self._pages.discard(own)

    def _hand_on(self, text: str | None) -> None:
        for page in self._pages:
            if page.full():
                page.get_nowait()
            page.put_nowait(text)

"""Wait for what another thread or process does."""

import time
from collections.abc import Callable
from typing import Any


def waited(for_what: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Call until the result is true, and return it; fail after so many seconds."""
    end = time.monotonic() + seconds
    while not (result := for_what()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
    return result

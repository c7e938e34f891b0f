"""Small tensors run faster on one thread, and tests beside each other do not wait for one another."""

from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """What a test sets ends with it."""
    yield
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """No progress is told, however slow the machine; what a test compares on stderr does not depend on time."""
    monkeypatch.setattr("latedrop.progress._EVERY", float("inf"))

"""Counts the rows of tables that are alive at once."""

import weakref
from typing import Any

import pytest

from latedrop.cli.tables import Rows, rows


class Held:
    """`now`, at `most` and in `all` so many rows were held, from when this is made to the end of the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.most = self.all = 0

        def counted(*values: Any) -> Rows:
            made = Rows(*values)
            self.now += len(made)
            self.all += len(made)
            self.most = max(self.most, self.now)
            weakref.finalize(made, self._gone, len(made))
            return made

        monkeypatch.setattr(rows, "Rows", counted)

    def _gone(self, count: int) -> None:
        self.now -= count

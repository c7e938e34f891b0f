"""Counts the rows of tables that are alive at once."""

import weakref
from typing import Any

import pytest

from latedrop.cli import tables


class Held:
    """`now`, at `most` and in `all` so many rows were held, from when this is made to the end of the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.most = self.all = 0
        made = tables.Rows

        def counted(*values: Any) -> tables.Rows:
            rows = made(*values)
            self.now += len(rows)
            self.all += len(rows)
            self.most = max(self.most, self.now)
            weakref.finalize(rows, self._gone, len(rows))
            return rows

        monkeypatch.setattr(tables, "Rows", counted)

    def _gone(self, count: int) -> None:
        self.now -= count

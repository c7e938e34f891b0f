"""What is usual: counted, kept small, and checked when it is read."""

from typing import Any

import pytest

from latedrop.errors import DataError
from latedrop.records import checked, plain
from latedrop.streams.monitor import SHARES, STRANGENESS, Usual, usual_of_rows


def test_rows_are_counted() -> None:
    found = usual_of_rows([0.5, 1.0, 1e9, float("inf")], {"floor": [0.0, 1.0]})
    assert found.strangeness is not None
    assert (len(found.strangeness), sum(found.strangeness), found.strangeness[-1]) == (len(STRANGENESS) + 1, 4, 2)
    assert (found.shares["floor"][0], found.shares["floor"][-1]) == (1, 1)
    assert usual_of_rows(None, {}) == Usual()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("strangeness", [1]),
        ("strangeness", [-1] * (len(STRANGENESS) + 1)),
        ("shares", {"floor": [0] * len(SHARES)}),
        ("shares", None),
        ("more", 1),
    ],
    ids=["short", "negative", "bins", "none", "other"],
)
def test_damaged_counts_are_refused(field: str, value: Any) -> None:
    with pytest.raises(DataError, match="usual"):
        checked(Usual, plain(Usual()) | {field: value}, "usual", "")

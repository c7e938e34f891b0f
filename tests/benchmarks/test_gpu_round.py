"""The benchmark of one round on a GPU: a case of it runs anywhere, and its tables show what is missing."""

import pytest

from benchmarks.gpu_round import Case, compiled_table, step_table


@pytest.mark.parametrize("work", ["plain", "by hand", "draws", "first order"])
def test_a_case_is_timed(work: str) -> None:
    assert Case("MLP", small=True).measured(work, 2) > 0


def test_tables_show_what_failed() -> None:
    record = {
        "ms": {"MLP, 1, plain, new": 0.5, "MLP, 1, draws, new": 2.0, "MLP, 1, draws, old": "OutOfMemoryError: full"},
        "compiled": {
            "MLP, default, 1": {"seconds": 20.0, "bytes": 2e6, "auto_bytes": 1e6, "ms": 1.0, "plain_ms": 0.5},
            "MLP, draws, 1": "no time was left",
        },
    }
    lines = [*step_table(record).splitlines(), *compiled_table(record).splitlines()]
    assert "| MLP, 1 | 0.5 | - | 2 | - | - | OutOfMemoryError: full | - | - |" in lines
    assert "| MLP, default, 1 | 20 | 1 | 2 | 2 | 1 |" in lines
    assert len(lines) == 6, "a case without a time has no row"

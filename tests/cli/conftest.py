"""The command line, run in the process of the tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command line in this process: exit code, stdout, stderr."""
    from latedrop.cli import app as cli

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            cli.main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        assert isinstance(stop.value.code, int | None)
        return stop.value.code or 0, printed.out, printed.err

    return run

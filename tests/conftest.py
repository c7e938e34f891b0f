"""Small tensors run faster on one thread, the default here; the command line, Ray and its cluster for tests."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

THREADS = int(os.environ.get("OMP_NUM_THREADS", "1"))
torch.set_num_threads(THREADS)


@pytest.fixture(autouse=True)
def as_many_threads() -> Iterator[None]:
    """Undo what a test sets when it ends."""
    yield
    if torch.get_num_threads() != THREADS:
        torch.set_num_threads(THREADS)


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Each test begins with the same random numbers of torch, alone or after others."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """No progress is told, however slow the machine; what a test compares on stderr does not depend on time."""
    monkeypatch.setattr("latedrop.terminal._EVERY", float("inf"))


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


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make an empty folder the current one; modules that were imported from it are forgotten after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for module in tmp_path.glob("*.py"):
        sys.modules.pop(module.stem, None)


@pytest.fixture(scope="module")
def ray() -> Any:
    if sys.platform != "linux":
        pytest.skip("Ray is tested on Linux")
    return pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster(ray: Any) -> Iterator[Any]:
    """Two workers on this machine."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()

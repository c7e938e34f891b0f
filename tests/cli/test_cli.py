"""The command line: what it prints, its exit codes, and one line for every error."""

import subprocess
import sys
import warnings
from collections.abc import Callable

import pytest

import latedrop
from latedrop.cli import main
from latedrop.errors import LatedropWarning

Run = Callable[..., tuple[int, str, str]]


def test_the_package_can_be_run_as_a_module() -> None:
    words = [sys.executable, "-m", "latedrop", "--version"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"latedrop {latedrop.__version__}\n", "")


def test_no_command_shows_the_help(call: Run) -> None:
    code, out, err = call()
    assert code == 2
    assert "Usage: latedrop" in out + err


@pytest.mark.parametrize(
    "words",
    [
        "fly",
        "evaluate a b --data c --batch-size many",
        "sites",
        "sites a --colour red",
        "calibrate a --data b -o c --seed -1",
    ],
)
def test_usage_errors(call: Run, words: str) -> None:
    code, out, err = call(*words.split())
    assert (code, out) == (2, "")
    assert "Usage: latedrop" in err


def test_system_error_is_one_line(call: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("latedrop.named.load_model", full)
    assert call("sites", "any:net") == (1, "", "latedrop: [Errno 28] No space left on device\n")


@pytest.mark.filterwarnings("always")
def test_warnings_are_one_line(call: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def warned(*_: object, **__: object) -> None:
        warnings.warn("only 3 rows.", LatedropWarning, stacklevel=2)
        raise latedrop.LatedropError("expected more.")

    monkeypatch.setattr("latedrop.named.load_model", warned)
    assert call("sites", "any:net") == (1, "", "latedrop: warning: only 3 rows.\nlatedrop: expected more.\n")


def test_missing_extra(call: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("latedrop.terminal.find_spec", lambda name: None)
    message = 'expected onnx and onnxruntime; not installed. Run: pip install "latedrop[onnx]"'
    assert call("export", "any:net", "cal.json", "-o", "net.onnx") == (1, "", f"latedrop: {message}\n")


def test_missing_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(SystemExit, match=r'latedrop: expected rich; not installed. Run: pip install "latedrop\[cli\]"'):
        main(["--help"])


def test_without_typer_the_module_imports_and_main_says_what_to_do() -> None:
    code = "import sys; sys.modules['typer'] = None; from latedrop.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == 'latedrop: expected typer; not installed. Run: pip install "latedrop[cli]"\n'


def test_help_loads_nothing_heavy() -> None:
    code = """
import sys
from latedrop.cli.app import main
try:
    main(["--help"])
except SystemExit:
    pass
heavy = {
    "matplotlib", "pandas", "pyarrow", "sklearn", "torch", "latedrop.report.page"
} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

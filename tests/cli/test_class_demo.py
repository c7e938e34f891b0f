"""The demo for classes: real digits, everything seeded, nothing global touched."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from latedrop.errors import ArgumentError

pytest.importorskip("sklearn", reason="scikit-learn ships the digits")
from latedrop.cli import class_demo

needs_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib draws the figures")


@pytest.fixture(scope="module")
def result() -> class_demo.ClassDemo:
    return class_demo.run(epochs=25, progress=False)


def test_what_is_measured(result: class_demo.ClassDemo) -> None:
    found = result.judgement
    assert found.verdict.rows == 397
    assert found.verdict.accuracy > 0.85
    assert found.sets is not None
    assert found.sets.level == 0.95
    keep = result.prediction.kept(result.rule)
    assert result.kept == pytest.approx(float(keep.double().mean()))
    wrong = (result.prediction.label != found.labels)[keep]
    assert result.errors == pytest.approx(float(wrong.double().mean()))
    assert {row.score: row.auroc for row in result.detection}["novelty"] > 0.9


@needs_matplotlib
def test_files(result: class_demo.ClassDemo, tmp_path: Path) -> None:
    page, picture, record = class_demo.write(result, tmp_path)
    assert "latedrop demo --task classification --seed 0" in page.read_text()
    assert picture.read_bytes()[1:4] == b"PNG"
    found = json.loads(record.read_text())
    assert found["measures"]["accuracy"] == pytest.approx(result.judgement.verdict.accuracy)


def test_what_is_printed(result: class_demo.ClassDemo, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    class_demo.print_result(result, [Path("report.html")], as_json=False)
    out = capsys.readouterr().out
    assert "397 test rows" in out
    assert "Digits turned by a quarter" in out
    class_demo.print_result(result, [Path("report.html")], as_json=True)
    assert json.loads(capsys.readouterr().out)["files"] == ["report.html"]


def test_wrong_arguments(call: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    pytest.importorskip("typer")
    code, _, err = call("demo", "--task", "classes", "--out", tmp_path / "demo")
    assert (code, "expected --task regression or classification; found 'classes'" in err) == (2, True)
    for words in ({"seed": -1}, {"epochs": 0}):
        with pytest.raises(ArgumentError, match="expected"):
            class_demo.run(**words)

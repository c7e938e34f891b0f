"""Options of the commands together: folders, missing weights, odd names and units, bounds that are empty."""

import csv
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

for package in ("typer", "rich"):
    pytest.importorskip(package, reason="typer and rich make the command line")

CODE = """
import torch
from torch import nn

def _net(outputs):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, outputs))

def net():
    return _net(1)

def two():
    return _net(2)
"""
HEAD = ["a", "b", "c", "y", "w"]
Run = Callable[..., tuple[int, str, str]]


def written(path: str, rows: list[list[object]], head: list[str] = HEAD) -> None:
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([head, *rows])


@pytest.fixture(autouse=True)
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[object]]]:
    """Sixty rows, in `val.csv` and `test.csv`, in a folder that is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("combined_model.py").write_text(CODE)
    dice = np.random.default_rng(0)
    for name in ("val", "test"):
        x = dice.normal(size=(60, 3))
        made = [[*map(float, row), float(row[0] + 0.3 * dice.normal()), 1 + i % 3] for i, row in enumerate(x)]
        written(f"{name}.csv", made)
    yield made
    sys.modules.pop("combined_model", None)


@pytest.fixture
def calibrated(call: Run) -> str:
    options = ("--data", "val.csv", "--target", "y", "--ignore", "w", "--method", "linear")
    assert call("calibrate", "combined_model:net", *options, "-o", "cal.json")[0] == 0
    return "cal.json"


def test_a_folder_is_evaluated_as_one_file(call: Run, calibrated: str, rows: list[list[object]]) -> None:
    Path("parts").mkdir()
    written("parts/p1.csv", rows[:20])
    written("parts/p2.csv", rows[20:])
    asked = ("evaluate", "combined_model:net", calibrated, "--json", "--report", "page.html", "--data")
    code, out, err = call(*asked, "parts")
    assert (code, err) == (0, "")
    found, whole = json.loads(out), json.loads(call(*asked, "test.csv")[1])
    assert found["measures"] == whole["measures"]
    lines = [row["row"] for row in whole["worst"]]
    assert [row["row"] for row in found["worst"]] == [
        f"p1.csv:{line}" if line <= 21 else f"p2.csv:{line - 20}" for line in lines
    ]
    assert found["read"]["data"]["path"] == "parts"
    assert len(found["read"]["data"]["sha256"]) == 64


class TestWeights:
    OPTIONS = ("--target", "y", "--row-weights", "w", "--method", "linear", "-o", "cal.json")

    @pytest.mark.parametrize("cell", ["", "nan", "NA"], ids=["empty", "nan", "NA"])
    def test_missing_ones_are_missing_values(self, call: Run, rows: list[list[object]], cell: str) -> None:
        written("gaps.csv", [*rows[:5], [*rows[5][:-1], cell], *rows[6:]])
        asked = ("calibrate", "combined_model:net", "--data", "gaps.csv", *self.OPTIONS)
        code, _, err = call(*asked)
        assert code == 1
        assert "expected finite numbers in gaps.csv; found NaN, infinite or missing ones, first at line 7" in err
        assert call(*asked, "--drop-nan")[::2] == (0, "")
        without = json.loads(Path("cal.json").read_text())["latedrop"]["table"]
        written("gaps.csv", rows[:5] + rows[6:])
        assert call(*asked)[::2] == (0, "")
        assert without == json.loads(Path("cal.json").read_text())["latedrop"]["table"]

    def test_rows_of_weight_0_are_as_if_absent(self, call: Run, rows: list[list[object]]) -> None:
        asked = ("calibrate", "combined_model:net", "--data", "some.csv", *self.OPTIONS, "--intervals", "conformal")
        tables = []
        for some in (rows, [*rows[:7], [1, 2, "", "", 0], *rows[7:], [1, 2, 3, "NA", 0]]):
            written("some.csv", some)
            code, out, err = call(*asked)
            assert (code, err, "left out" in out) == (0, "", False)
            tables.append(json.loads(Path("cal.json").read_text())["latedrop"]["table"])
        assert tables[0] == tables[1]

    def test_conformal_rows_need_none(self, call: Run) -> None:
        asked = ("calibrate", "combined_model:net", "--data", "val.csv", *self.OPTIONS, "--intervals", "conformal")
        assert call(*asked)[::2] == (0, "")


@pytest.mark.filterwarnings("always::latedrop.LatedropWarning")  # the network is not trained
def test_names_with_commas_stand_in_quotes(call: Run, rows: list[list[object]]) -> None:
    head = ["a", "b", "c", "<i>y</i>", 'the "width", in %']
    for name in ("val.csv", "test.csv"):
        written(name, rows, head)
    target = '<i>y</i>,"the ""width"", in %"'
    asked = ("calibrate", "combined_model:two", "--data", "val.csv", "--target", target, "-o", "cal.json")
    assert call(*asked, "--report", "cal.html")[0] == 0
    asked = ("evaluate", "combined_model:two", "cal.json", "--data", "test.csv", "--report", "page.html")
    assert call(*asked, "--unit", '"<b>m, s</b>",%')[0] == 0
    page = Path("page.html").read_text()
    assert "&lt;b&gt;m, s&lt;/b&gt;" in page
    assert not [tag for tag in ("<i>y", "<b>m") if tag in page + Path("cal.html").read_text()]


def test_too_many_units_are_refused(call: Run, calibrated: str) -> None:
    message = "latedrop: expected one unit, or one for each of 1 outputs; found 2: ['m', 's'].\n"
    asked = ("evaluate", "combined_model:net", calibrated, "--data", "test.csv", "--unit", "m,s")
    assert call(*asked) == (2, "", message)


@pytest.mark.parametrize("text", ["", "  ", "coverage0>=0.1"], ids=["empty", "spaces", "level"])
def test_bounds_that_say_nothing_do_not_pass(call: Run, calibrated: str, text: str) -> None:
    code, out, err = call("evaluate", "combined_model:net", calibrated, "--data", "test.csv", "--require", text)
    assert (code, out) == (2, "")
    assert err.startswith("latedrop: expected ")

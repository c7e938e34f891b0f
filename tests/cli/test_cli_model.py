"""The commands on a user's own model and files: what they print and write, exit codes, one line for every error."""

import csv
import hashlib
import json
import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

import latedrop
from latedrop.cli import app as cli
from latedrop.errors import DataError
from rounding import assert_same_up_to_rounding, rounding
from written import arrays_of, rows_of

ROOT = Path(__file__).parents[2]
CODE = """
import torch
from torch import nn

print("the user's own words")

class Net(nn.Module):
    def __init__(self, outputs=1):
        super().__init__()
        self.first, self.second = nn.Linear(3, 16), nn.Linear(16, outputs)

    def forward(self, x):
        return self.second(self.first(x).tanh())

class Parts(Net):
    def forward(self, x):
        hidden = self.first(x).tanh()
        return {"mean": self.second(hidden), "hidden": hidden}

class Fails(Net):
    def forward(self, x):
        raise KeyError("a bug of the user's")

def _seeded(kind, *arguments):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(*arguments)

def net():
    return _seeded(Net)

def two():
    return _seeded(Net, 2)

def parts():
    return _seeded(Parts)

def fails():
    return _seeded(Fails)

def mean(output):
    return output["mean"]
"""
QUICK = ("--rates", "0.3", "--draws", "10")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(call: Run) -> Run:
    """Run it, without what the model prints."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code, out, err = call(*arguments)
        return code, out, err.replace("the user's own words\n", "")

    return run


@pytest.fixture(autouse=True)
def folder(user_folder: Path) -> Path:
    """A user's folder, as the current one: code, weights, and rows in every kind of file."""
    Path("user_model.py").write_text(CODE)
    dice = np.random.default_rng(0)
    for name in ("val", "test"):
        x = dice.normal(size=(60, 3)).astype(np.float32)
        y = x[:, 0] * x[:, 1] + 0.1 * dice.normal(size=60)
        np.savez(f"{name}.npz", x=x, y=y[:, None], y2=np.stack([y, -y], 1))
        with open(f"{name}.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["id", "a", "b", "c", "y", "z"])
            writer.writerows([f"r{i}", *map(float, x[i]), y[i], -y[i]] for i in range(60))
    return user_folder


def written(path: str, rows: list[list[object]], head: Sequence[str] = ("a", "b", "c", "y", "z")) -> None:
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([head, *rows])


@pytest.fixture
def lines() -> list[list[object]]:
    """The rows of `test.csv`, for `written`."""
    return [[row[name] for name in "abcyz"] for row in rows_of("test.csv")]


@pytest.fixture
def calibrated(call: Run) -> str:
    columns = ("--target", "y", "--ignore", "id,z")
    code, _, err = call("calibrate", "user_model:net", "--data", "val.csv", *columns, *QUICK, "-o", "cal.json")
    assert (code, err) == (0, "")
    return "cal.json"


class TestSites:
    def test_by_shape(self, call: Run) -> None:
        code, out, err = call("sites", "user_model:net", "--input-shape", "3")
        assert (code, err) == (0, "")
        assert re.search(r"second +Linear +element +16 +1", out)
        assert "1 site: dropout goes on the input of these layers." in out

    def test_by_data_as_json(self, call: Run) -> None:
        asked = ("--data", "val.csv", "--inputs", "a,b,c", "--json")
        code, out, _ = call("sites", "user_model:Net", *asked)
        assert (code, [site["name"] for site in json.loads(out)["sites"]]) == (0, ["second"])
        assert call("sites", "user_model:Net", "--data", "val.npz", "--json") == (0, out, "")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "expected --data or --input-shape, rows to run the model on; found none."),
            (["--input-shape", "3,x"], "as the sizes of one row, such as 3,224,224; found '3,x'."),
            (["--input-shape", "0"], "expected --input-shape as the sizes of one row, such as 3,224,224; found '0'."),
            (["--input-shape", "3", "--data", "val.csv"], "--data or --input-shape; found both. Leave one out."),
        ],
    )
    def test_wrong_arguments(self, call: Run, arguments: list[str], message: str) -> None:
        code, out, err = call("sites", "user_model:net", *arguments)
        assert (code, out, err.count("\n"), message in err) == (2, "", 1, True)


class TestCalibrate:
    def test_same_as_in_python(self, calibrated: str) -> None:
        data = arrays_of("val.npz")
        net = sys.modules["user_model"].net()
        expected = latedrop.calibrate(net, (data["x"], data["y"]), method=latedrop.Sampling([0.3], 10)).calibration
        record = latedrop.Calibration.from_json(Path(calibrated).read_text())
        assert record.scale == pytest.approx(expected.scale, rel=rounding())
        assert record.fingerprint == expected.fingerprint

    def test_table_and_report(self, call: Run) -> None:
        rates, report = ("--rates", "0.2,0.3", "--draws", "10"), ("--report", "c.html")
        code, out, err = call("calibrate", "user_model:net", "--data", "val.npz", *rates, "-o", "c.json", *report)
        assert (code, err) == (0, "")
        assert len(re.findall(r"^ 0\.[23]( \*)? ", out, re.MULTILINE)) == 2
        assert "60 validation rows; the rate in use is marked *.\n" in out
        assert "one constant variance" in out
        assert out.endswith("written: c.json, c.html\n")
        assert "Calibration of user_model:net" in Path("c.html").read_text()

    def test_json_is_all_that_is_printed(self, call: Run) -> None:
        code, out, err = call("calibrate", "user_model:net", "--data", "val.npz", *QUICK, "-o", "c.json", "--json")
        record = json.loads(out)
        assert (code, err) == (0, "")
        assert (record["rate"], record["rows"], record["intervals"]) == (0.3, 60, "gaussian")
        assert (record["files"], len(record["table"])) == (["c.json"], 1)

    @pytest.mark.parametrize("method", ["linear", "propagate"])
    def test_methods(self, call: Run, method: str) -> None:
        rates = ("--rates", "0.1") if method == "propagate" else ()
        arguments = ("--data", "val.npz", *rates, "-o", "c.json", "--method", method, "--floor", "--json")
        code, out, _ = call("calibrate", "user_model:net", *arguments)
        assert (code, json.loads(out)["method"]) == (0, method)

    def test_conformal_holds_half_of_the_rows_back(self, call: Run) -> None:
        arguments = ("--data", "val.npz", *QUICK, "-o", "c.json")
        code, out, _ = call("calibrate", "user_model:net", *arguments, "--intervals", "conformal")
        record = latedrop.Calibration.from_json(Path("c.json").read_text())
        scores = len(record.intervals.scores[0])
        assert (code, record.rows + scores) == (0, 60)
        assert f"{record.rows} validation rows, {scores} more for the conformal intervals" in out
        code, _, _ = call("calibrate", "user_model:net", *arguments, "--conformal-data", "test.npz")
        record = latedrop.Calibration.from_json(Path("c.json").read_text())
        assert (code, record.rows, len(record.intervals.scores[0])) == (0, 60, 60)

    def test_readouts(self, call: Run) -> None:
        arguments = ("--data", "val.npz", *QUICK, "-o", "c.json")
        code, _, err = call("calibrate", "user_model:parts", *arguments)
        assert (code, "Pass --readout: a part's name or index" in err) == (1, True)
        assert call("calibrate", "user_model:parts", *arguments, "--readout", "mean")[0] == 0
        assert call("predict", "user_model:parts", "c.json", "--data", "test.npz", "-o", "out.csv")[0] == 0
        assert call("calibrate", "user_model:parts", *arguments, "--readout", "user_model:mean")[0] == 0
        predict = ("predict", "user_model:parts", "c.json", "--data", "test.npz", "-o", "out.csv")
        code, _, err = call(*predict)
        assert (code, err.count("\n")) == (1, 1)
        assert "Name it: --readout package.module:function" in err
        assert call(*predict, "--readout", "user_model:mean")[0] == 0

    @pytest.mark.parametrize(
        ("words", "code", "message"),
        [
            ("nte --data val.npz", 2, "Did you mean 'net'?"),
            ("net --data none.csv", 1, "expected data at none.csv; the system says: No such file"),
            ("net --data val.csv", 2, "expected --target, the column of val.csv"),
            ("net --data val.csv --target yy", 2, "expected column 'yy' in val.csv"),
            ("net --data val.csv --target y", 1, "numbers in column 'id' of val.csv; found 'r0'"),
            ("net --data val.csv --target y --inputs a,b", 1, "Its input was columns a, b of val.csv: see --inputs."),
            ("two --data val.npz", 1, "It was array y of val.npz: see --target."),
            ("fails --data val.npz", 1, 'it raised KeyError: "a bug of the user\'s"'),
            ("net --data val.npz --method linear --draws 5", 2, "options that belong to --method linear; found"),
            ("net --data val.npz --rates a", 2, "expected --rates as numbers separated by commas"),
            ("net --data val.npz --report c.pdf", 2, "expected an output that ends in .html"),
            ("net --data val.npz --device tpu", 2, "expected --device auto, cpu"),
        ],
    )
    def test_one_line_and_no_file(self, call: Run, words: str, code: int, message: str) -> None:
        status, out, err = call("calibrate", *f"user_model:{words} --draws 5 -o c.json".split())
        assert (status, out, err.count("\n")) == (code, "", 1)
        assert err.startswith("latedrop: expected ")
        assert message in err
        assert not list(Path().glob("c.json*"))

    def test_debug_keeps_the_traceback(self) -> None:
        with pytest.raises(DataError, match="a bug of the user's"):
            cli.main(["calibrate", "user_model:fails", "--data", "val.npz", "-o", "c.json", "--debug"])

    def test_rows_that_are_not_finite(self, call: Run) -> None:
        lines = Path("val.csv").read_text().splitlines()
        lines[4], lines[6] = "r3,,1,2,3,4", "r5,1,2,nan,3,4"
        Path("gaps.csv").write_text("\n".join(lines))
        arguments = ("--data", "gaps.csv", "--target", "y", "--ignore", "id,z", *QUICK, "-o", "c.json")
        code, _, err = call("calibrate", "user_model:net", *arguments)
        assert (code, "first at lines 5, 7. Mend them, or leave such rows out: --drop-nan." in err) == (1, True)
        code, out, _ = call("calibrate", "user_model:net", *arguments, "--drop-nan")
        assert (code, "58 validation rows, 2 left out" in out) == (0, True)


class TestPredict:
    def test_csv(self, call: Run, calibrated: str) -> None:
        arguments = ("--data", "test.csv", "-o", "out.csv", "--keep", "id", "--keep", "z,c", "--level", "0.8")
        code, out, err = call("predict", "user_model:net", calibrated, *arguments)
        assert (code, err) == (0, "")
        assert out == "60 rows predicted, with intervals at level 0.8\nwritten: out.csv\n"
        rows, given = rows_of("out.csv"), rows_of("test.csv")
        assert list(rows[0]) == ["id", "z", "c", "mean", "std", "low", "high"]
        assert [[row[name] for name in ("id", "z", "c")] for row in rows] == [
            [row[name] for name in ("id", "z", "c")] for row in given
        ]
        uq = latedrop.load(calibrated, sys.modules["user_model"].net())
        expected = uq.predict(arrays_of("test.npz")["x"]).to_dict(0.8)
        for name, values in expected.items():
            assert_same_up_to_rounding([float(row[name]) for row in rows], values[:, 0].numpy())

    def test_columns_in_another_order(self, call: Run, calibrated: str) -> None:
        call("predict", "user_model:net", calibrated, "--data", "test.csv", "-o", "out.csv")
        names = ["z", "c", "y", "b", "extra", "a"]
        with open("turned.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows({name: row.get(name, "text") for name in names} for row in rows_of("test.csv"))
        assert call("predict", "user_model:net", calibrated, "--data", "turned.csv", "-o", "turned_out.csv")[0] == 0
        assert Path("turned_out.csv").read_text() == Path("out.csv").read_text()

    @pytest.mark.parametrize("end", ["parquet", "npz"])
    def test_other_files(self, call: Run, calibrated: str, end: str) -> None:
        parquet, arrow_csv = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow.csv")
        parquet.write_table(arrow_csv.read_csv("test.csv"), "test.parquet")
        expected = latedrop.load(calibrated, sys.modules["user_model"].net()).predict(arrays_of("test.npz")["x"]).mean
        arguments = ("--data", "test.parquet", "-o", f"out.{end}", "--keep", "z")
        assert call("predict", "user_model:net", calibrated, *arguments)[0] == 0
        arrays = arrays_of("out.npz") if end == "npz" else parquet.read_table("out.parquet").to_pydict()
        assert list(arrays) == ["z", "mean", "std", "low", "high"]
        assert_same_up_to_rounding(np.ravel(arrays["mean"]), expected[:, 0])

    def test_rows_without_numbers_are_left_empty(self, call: Run, calibrated: str) -> None:
        lines = Path("test.csv").read_text().splitlines()
        lines[4] = "r3,1,NA,3,,"
        Path("gaps.csv").write_text("\n".join(lines))
        arguments = ("--data", "gaps.csv", "-o", "out.csv", "--keep", "id", "--json")
        code, out, err = call("predict", "user_model:net", calibrated, *arguments)
        assert code == 0
        assert "NaN or missing values in 1 of 60 rows, at line 5 of gaps.csv; their predictions are left empty." in err
        record = json.loads(out)
        assert (record["rows"], record["empty"], record["file"]) == (60, 1, "out.csv")
        rows = rows_of("out.csv")
        assert list(rows[3].values()) == ["r3", "", "", "", ""]
        assert all(all(row.values()) for i, row in enumerate(rows) if i != 3)
        code, out, err = call("predict", "user_model:net", calibrated, *arguments, "--drop-nan")
        assert err.endswith("at line 5 of gaps.csv; these rows are left out.\n")
        record = json.loads(out)
        assert (code, record["rows"], record["empty"], record["dropped"]) == (0, 59, 0, 1)
        assert rows_of("out.csv") == [row for row in rows if row["id"] != "r3"]

    def test_standard_output_holds_rows_alone(self, call: Run, calibrated: str) -> None:
        code, out, err = call("predict", "user_model:net", calibrated, "--data", "test.csv", "-o", "-")
        assert (code, err, out.count("\n")) == (0, "", 61)
        assert out.startswith("mean,std,low,high\n")
        code, out, err = call("predict", "user_model:net", calibrated, "--data", "test.csv", "--json")
        assert (code, out) == (2, "")
        assert err == "latedrop: expected --json or the rows on stdout; found both. Name a file with -o.\n"

    @pytest.mark.parametrize(
        ("arguments", "code", "message"),
        [
            (["none.json", "--data", "test.csv"], 1, "expected a calibration file at none.json"),
            (["cal.json", "--data", "test.csv", "--level", "90"], 2, "a probability inside (0, 1); found 90.0"),
            (["cal.json", "--data", "test.csv", "--keep", "w"], 2, "expected column 'w' in test.csv"),
            (["cal.json", "--data", "clash.csv", "--keep", "mean"], 2, "found mean, names of the output"),
            (["cal.json", "--data", "head.csv"], 1, "expected at least one row in head.csv; found none."),
            (["cal.json", "--data", "text.csv"], 1, "numbers in column 'b' of text.csv; found 'low' in line 42"),
        ],
    )
    @pytest.mark.usefixtures("calibrated")
    def test_one_line_and_no_file(self, call: Run, arguments: list[str], code: int, message: str) -> None:
        lines = Path("test.csv").read_text().splitlines()
        Path("head.csv").write_text(lines[0] + "\n")
        Path("clash.csv").write_text("a,b,c,mean\n1,2,3,4\n")
        Path("text.csv").write_text("\n".join([*lines[:41], "r41,1,low,3,4,5", *lines[41:]]))
        Path("out.csv").write_text("old")
        status, out, err = call("predict", "user_model:net", *arguments, "-o", "out.csv", "--batch-size", "16")
        assert (status, out, err.count("\n")) == (code, "", 1)
        assert message in err
        assert [path.name for path in Path().glob("out.csv*")] == ["out.csv"]
        assert Path("out.csv").read_text() == "old"

    @pytest.mark.parametrize("out", ["out.csv", "out.npz"])
    def test_ctrl_c_leaves_nothing(self, call: Run, calibrated: str, monkeypatch: pytest.MonkeyPatch, out: str) -> None:
        calls = 0

        def stop(*_: object, **__: object) -> Any:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise KeyboardInterrupt
            return {"mean": np.zeros(16)}

        monkeypatch.setattr("latedrop.cli.predicting.predicted", stop)
        code, printed, err = call(
            "predict", "user_model:net", calibrated, "--data", "test.csv", "-o", out, "--batch-size", "16"
        )
        assert (code, printed, "stopped" in err) == (130, "", True)
        assert not list(Path().glob("out*"))


class TestEvaluate:
    def test_table_and_report(self, call: Run, calibrated: str) -> None:
        arguments = ("--data", "test.csv", "--report", "page.html", "--level", "0.8")
        code, out, err = call("evaluate", "user_model:net", calibrated, *arguments)
        assert (code, err) == (0, "")
        assert out.startswith("60 test rows\n")
        assert all(re.search(rf"^ {label} +0\.3", out, re.MULTILINE) for label in ("raw", "scaled", "relaxed"))
        assert "at 80 %" in out
        assert out.endswith("written: page.html\n")
        assert "user_model:net on test.csv" in Path("page.html").read_text()

    def test_a_table_for_each_target(self, call: Run) -> None:
        arguments = ("--data", "val.csv", "--target", "y,z", "--ignore", "id", *QUICK, "-o", "c.json")
        assert call("calibrate", "user_model:two", *arguments)[0] == 0
        code, out, _ = call("evaluate", "user_model:two", "c.json", "--data", "test.csv")
        assert code == 0
        assert re.findall(r"^(y|z)$", out, re.MULTILINE) == ["y", "z"]
        assert re.findall(r"^ (y|z) .*(?:good|weak|bad)", out, re.MULTILINE) == ["y", "z"]
        code, out, _ = call("evaluate", "user_model:two", "c.json", "--data", "test.csv", "--json")
        record = json.loads(out)
        rmse = [record["outputs"][name]["evaluations"][0]["rmse"] for name in ("y", "z")]
        assert record["evaluations"][0]["rmse"] == pytest.approx(np.sqrt(np.mean(np.square(rmse))), rel=rounding())
        data = ("--data", "test.npz", "--target", "y2")
        code, out, _ = call("evaluate", "user_model:two", "c.json", *data, "--json")
        assert list(json.loads(out)["outputs"]) == ["y", "z"]  # as calibrated, where the array has no names

    def test_verdict_in_text_json_and_page_is_the_same(self, call: Run, calibrated: str) -> None:
        arguments = ("evaluate", "user_model:net", calibrated, "--data", "test.csv")
        text = call(*arguments, "--report", "page.html")[1]
        record = json.loads(call(*arguments, "--json")[1])["verdict"]
        page = Path("page.html").read_text(encoding="utf-8")
        for about, finding in record["findings"].items():
            assert re.search(rf"^{about} +{finding['grade']} +{re.escape(finding['text'])}$", text, re.MULTILINE)
            assert finding["text"].lower() in page.lower()
        assert record["text"] == "; ".join(finding["text"] for finding in record["findings"].values())

    def test_json_has_it_all(self, call: Run, calibrated: str) -> None:
        arguments = ("--data", "test.csv", "--unit", "m", "--json", "--require", "rows>=60")
        code, out, _ = call("evaluate", "user_model:net", calibrated, *arguments)
        record = json.loads(out)
        assert code == 0
        assert record["command"] == shlex.join(["latedrop", "evaluate", "user_model:net", calibrated, *arguments])
        for name, path in (("data", "test.csv"), ("calibration", calibrated)):
            assert record["read"][name] == {"path": path, "sha256": hashlib.sha256(Path(path).read_bytes()).hexdigest()}
        assert (record["name"], record["unit"]) == ("y", "m")
        assert record["measures"]["coverage90"] == pytest.approx(record["evaluations"][1]["coverage"])
        assert record["requirements"] == [{"measure": "rows", "sign": ">=", "bound": 60, "found": 60, "met": True}]
        worst = record["worst"][0]
        line = Path("test.csv").read_text().splitlines()[worst["row"] - 1].split(",")
        names = Path("test.csv").read_text().splitlines()[0].split(",")
        assert float(line[names.index("y")]) == pytest.approx(worst["target"], rel=rounding())
        assert all(
            float(line[names.index(name)]) == pytest.approx(v, rel=rounding()) for name, v in worst["inputs"].items()
        )

    def test_a_requirement_that_does_not_hold(self, call: Run, calibrated: str) -> None:
        arguments = ("evaluate", "user_model:net", calibrated, "--data", "test.csv", "--require")
        code, out, err = call(*arguments, "rows>=61,coverage50>=0,rmse<0", "--report", "page.html")
        assert code == 3
        assert re.fullmatch(r"latedrop: required rows >= 61; found 60\.\nlatedrop: required rmse < 0; found .+\n", err)
        assert out.startswith("60 test rows\n")
        assert Path("page.html").exists()
        assert call(*arguments, "rows>=60")[0] == 0

    def test_one_line(self, call: Run, calibrated: str) -> None:
        Path("head.csv").write_text("a,b,c,y\n")
        for words, status, message in (
            ("test.csv --unit m,s", 2, "one unit, or one for each of 1 outputs; found 2: ['m', 's']"),
            ("test.csv --report page.pdf", 2, "expected an output that ends in .html or .htm; found 'page.pdf'"),
            ("head.csv", 1, "expected rows to evaluate in head.csv; found none."),
        ):
            code, out, err = call("evaluate", "user_model:net", calibrated, "--data", *words.split())
            assert (code, out, err.count("\n"), message in err) == (status, "", 1, True)

    def test_what_was_not_foreseen(self, call: Run, calibrated: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_: object, **__: object) -> None:
            raise ZeroDivisionError("oh")

        monkeypatch.setattr("latedrop.prediction.predictor.Predictor.predict_labelled", broken)
        code, out, err = call("evaluate", "user_model:net", calibrated, "--data", "test.csv")
        assert (code, out) == (1, "")
        assert err.startswith("latedrop: ZeroDivisionError: oh. This was not foreseen: pass --debug")


class TestExport:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ("-o model.txt", "ends in .onnx"),
            ("-o model.onnx --level 2", "inside (0, 1)"),
            ("-o model.onnx --input-shape 5", "inputs that the model takes"),
            ("-o model.onnx --data val.csv --input-shape 3", "Leave one out"),
        ],
    )
    def test_wrong_words(self, call: Run, calibrated: str, words: str, message: str) -> None:
        code, out, err = call("export", "user_model:net", calibrated, *words.split())
        assert (code in (1, 2), out, message in err) == (True, "", True)

    def test_a_file_predicts_as_the_model_does(self, call: Run, calibrated: str) -> None:
        code, out, _ = call("export", "user_model:net", calibrated, "-o", "model.onnx", "--level", "0.8")
        assert (code, "written: model.onnx" in out) == (0, True)
        x = arrays_of("test.npz")["x"]
        expected = latedrop.load(calibrated, sys.modules["user_model"].net()).predict(x).interval(0.8)[0]
        assert_same_up_to_rounding(latedrop.load_onnx("model.onnx").predict(x).interval()[0], expected.numpy())


class TestVerbose:
    def test_v_and_vv(self, call: Run) -> None:
        before = list(logging.getLogger("latedrop").handlers)  # other libraries of this process may have changed them
        words = ("calibrate", "user_model:net", "--data", "val.npz", *QUICK, "-o", "cal.json")
        assert call(*words)[2] == ""
        once, twice, again = (call(*words, word)[2].splitlines() for word in ("-v", "-vv", "--verbose"))
        assert once[0].startswith("latedrop: model user_model:net: Net, on ")
        assert once[1] == "latedrop: data val.npz: 60 rows, arrays x, y, y2"
        assert once[-1] == "latedrop: written: cal.json"
        assert any(line.startswith("latedrop.terminal: calibrating: 60 rows in ") for line in twice)
        assert len(twice) > len(once) == len(again)
        assert logging.getLogger("latedrop").handlers == before
        assert call(*words)[2] == ""


class TestHelp:
    @pytest.mark.parametrize("command", ["sites", "calibrate", "predict", "evaluate", "export", "serve"])
    def test_every_command_ends_with_examples_that_parse(self, call: Run, command: str) -> None:
        code, out, _ = call(command, "--help")
        assert code == 0
        assert f"latedrop {command}" in out.partition("Examples:")[2]
        assert out.index("--debug") < out.index("Examples:")
        parser = typer.main.get_command(cli.make_app()).commands[command]  # type: ignore[attr-defined]
        for line in cli._EXAMPLES[command]:
            assert parser.make_context(command, shlex.split(line)[2:]).params

    @pytest.mark.parametrize(
        ("command", "required"),
        [("calibrate", ["--data", "--output"]), ("predict", ["--data"]), ("evaluate", ["--data"])],
    )
    def test_what_is_required_comes_first(self, call: Run, command: str, required: list[str]) -> None:
        options = call(command, "--help")[1].partition(" Options ")[2]
        assert re.findall(r"--[a-z-]+", options)[: len(required)] == required


class TestPage:
    """docs/command_line.md: every line of bash on it runs, and prints what the page says, up to the numbers."""

    PAGE = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
    STEPS = re.findall(r"^```bash\n([^`]*)^```\n\n```text\n([^`]*)^```$", PAGE, re.MULTILINE)

    @pytest.mark.slow
    def test_it_is_true(self, folder: Path, call: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        assert len(self.STEPS) == 8
        (folder / "my_model.py").write_text((ROOT / "examples" / "my_model.py").read_text())
        for name, start in (("latedrop", "-c 'from latedrop.cli.app import main; main()'"), ("python", "")):
            (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {start} "$@"\n')
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        for bash, text in self.STEPS:
            printed = ""
            for line in bash.replace("\\\n", "").splitlines():
                if line.startswith("latedrop") and not re.search(r" [|>] ", line):
                    printed += "".join(call(*shlex.split(line)[1:])[1:])
                else:
                    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
                    printed += done.stdout + done.stderr
            assert self._shape(printed) == self._shape(text), printed

    @staticmethod
    def _shape(text: str) -> list[str]:
        """The words of each line, with # for numbers."""
        lines = [re.sub(r"-?\d[\d.]*", "#", re.sub(r"─+", "─", line)).replace(" *", "") for line in text.splitlines()]
        return [" ".join(line.split()) for line in lines if line.strip() and "rows/s" not in line]


class TestData:
    """Commands know more of the data than its numbers: transformed targets, and names."""

    COLUMNS = ("--data", "val.csv", "--target", "y", "--ignore", "id,z")

    def calibrated(self, call: Run, *options: str, model: str = "net") -> Any:
        code, _, err = call("calibrate", f"user_model:{model}", *self.COLUMNS, *options, "-o", "cal.json")
        assert (code, err) == (0, "")
        return json.loads(Path("cal.json").read_text())["latedrop"]

    def test_standardised_targets(self, call: Run) -> None:
        plain = self.calibrated(call, *QUICK)
        with open("val.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        for row in rows:
            row["y"] = str(float(row["y"]) * 50 + 200)
        with open("val.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        standardised = self.calibrated(call, *QUICK, "--target-mean", "200", "--target-std", "50")
        assert standardised["target"] == {"kind": "standardized", "mean": [200.0], "std": [50.0]}
        assert standardised["table"][0]["scale"] == pytest.approx(plain["table"][0]["scale"], rel=rounding())
        assert standardised["table"][0]["rmse"] == pytest.approx(50 * plain["table"][0]["rmse"], rel=rounding())
        assert call("predict", "user_model:net", "cal.json", "--data", "test.csv", "-o", "out.csv")[0] == 0
        means = [float(row["mean"]) for row in rows_of("out.csv")]
        assert 100 < min(means) < max(means) < 300

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--target-mean", "1"), "expected --target-mean with --target-std, or --target-log alone"),
            (("--target-mean", "1", "--target-std", "1", "--target-log"), "expected --target-mean with --target-std"),
            (("--target-mean", "a", "--target-std", "1"), "expected --target-mean as numbers separated by commas"),
            (("--target-log",), "expected targets above 0, as their logarithm was learned"),
        ],
        ids=["mean alone", "both", "text", "log"],
    )
    def test_wrong_transforms(self, call: Run, options: tuple[str, ...], message: str) -> None:
        code, out, err = call("calibrate", "user_model:net", *self.COLUMNS, *QUICK, *options, "-o", "cal.json")
        assert (code != 0, out) == (True, "")
        assert message in err

    @pytest.mark.filterwarnings("always::latedrop.LatedropWarning")  # the network is not trained
    def test_names_with_commas_stand_in_quotes(self, call: Run, lines: list[list[object]]) -> None:
        head = ["a", "b", "c", "<i>y</i>", 'the "width", in %']
        for name in ("val.csv", "test.csv"):
            written(name, lines, head)
        target = '<i>y</i>,"the ""width"", in %"'
        asked = ("calibrate", "user_model:two", "--data", "val.csv", "--target", target, "-o", "cal.json")
        assert call(*asked, "--report", "cal.html")[0] == 0
        asked = ("evaluate", "user_model:two", "cal.json", "--data", "test.csv", "--report", "page.html")
        assert call(*asked, "--unit", '"<b>m, s</b>",%')[0] == 0
        page = Path("page.html").read_text()
        assert "&lt;b&gt;m, s&lt;/b&gt;" in page
        assert not [tag for tag in ("<i>y", "<b>m") if tag in page + Path("cal.html").read_text()]

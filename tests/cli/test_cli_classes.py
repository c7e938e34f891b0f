"""The commands on classifiers and columns of labels: what they print and write, and a line for every wrong input."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import latedrop
from latedrop.calibration.class_record import ClassCalibration
from rounding import rounding
from written import rows_of

CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, outputs=3):
        super().__init__()
        self.first, self.second = nn.Linear(4, 16), nn.Linear(16, outputs)

    def forward(self, x):
        return self.second(self.first(x).tanh())

def _seeded(outputs):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Net(outputs)
        with torch.no_grad():
            model.second.weight.mul_(10)
        return model

def net():
    return _seeded(3)

def one():
    return _seeded(1)

def soft():
    return nn.Sequential(_seeded(3), nn.Softmax(1))

class Broken(Net):
    def forward(self, x):
        return super().forward(x) / (x[:, :1] * 0)

def broken():
    model = Broken()
    model.load_state_dict(net().state_dict())
    return model

def log(probabilities):
    return probabilities.clamp_min(1e-12).log()
"""
NAMES = ("cat", "dog", "owl, snowy")
Run = Callable[..., tuple[int, str, str]]
CALIBRATE = ("calibrate", "user_classes:net", "-o", "cal.json")
PYTHON = re.compile(r"\w=|lambda|\(\)|labels\.|uq\b|_names|None")
"""What has no place in a message on the command line."""


def arrays_of(model: Any, rows: int, seed: int) -> tuple[Any, Any]:
    dice = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, generator=dice)
    z = model(x).detach()
    z = z if z.shape[1] > 1 else torch.cat([torch.zeros_like(z), z], 1)
    noise = -torch.log(-torch.log(torch.rand(z.shape, generator=dice)))
    return x.numpy(), (z * 0.8 + noise).argmax(1).numpy()


@pytest.fixture(autouse=True)
def folder(user_folder: Path) -> Path:
    """A user's folder, as the current one: code, and labelled rows as text and as numbers."""
    sys.path.insert(0, str(user_folder))
    Path("user_classes.py").write_text(CODE)
    import user_classes

    for seed, name in enumerate(("val", "test")):
        x, y = arrays_of(user_classes.net(), 80, seed)
        y2 = arrays_of(user_classes.one(), 80, seed)[1]
        np.savez(f"{name}.npz", x=x, y=y, text=np.array(NAMES)[y], hot=np.eye(3)[y], half=y + 0.5)
        with open(f"{name}.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["id", "a", "b", "c", "d", "kind", "code", "first", "yes"])
            for i in range(80):
                writer.writerow([i, *map(float, x[i]), NAMES[y[i]], y[i], y[i] + 1, ["no", "yes"][y2[i]]])
    return user_folder


def data(name: str, target: str) -> tuple[str, ...]:
    """Return the options of `calibrate`; leverage alone is quick."""
    words = ("--data", name, "--target", target, "--terms", "leverage")
    return words if name.endswith(".npz") else (*words, "--inputs", "a,b,c,d")


@pytest.fixture
def calibrated(call: Run) -> str:
    code, _, err = call(*CALIBRATE, *data("val.csv", "kind"), "--sets", "lac")
    assert (code, err) == (0, "")
    return "cal.json"


def record_in(path: str) -> ClassCalibration:
    return ClassCalibration.from_json(Path(path).read_text())


def test_text_labels_keep_their_names(call: Run) -> None:
    code, out, err = call(*CALIBRATE, *data("val.csv", "kind"), "--json")
    answer, record = json.loads(out), record_in("cal.json")
    assert (code, err, record.names, answer["names"]) == (0, "", NAMES, list(NAMES))
    assert (answer["task"], answer["rows"], answer["files"]) == ("classification", 80, ["cal.json"])
    assert record.columns == {"inputs": ("a", "b", "c", "d"), "targets": ("kind",)}
    assert answer["verdict"]["text"] == str(record.verdict)


@pytest.mark.parametrize("words", ["val.csv code", "val.npz y", "val.npz text", "val.parquet kind"])
def test_the_same_labels_in_any_form(call: Run, words: str) -> None:
    file, target = words.split()
    if file.endswith("parquet"):
        pandas = pytest.importorskip("pandas")
        frame = pandas.read_csv("val.csv")
        frame.assign(kind=frame["kind"].astype("category")).to_parquet(file)
    code, _, err = call(*CALIBRATE, *data(file, target))
    assert (code, err) == (0, "")
    with np.load("val.npz") as arrays:
        rows = arrays["x"], arrays["y"]
    net, method = sys.modules["user_classes"].net(), latedrop.Terms(["leverage"])
    expected = latedrop.calibrate(net, rows, method=method, progress=False).calibration
    record = record_in("cal.json")
    assert record.fit.temperature == pytest.approx(expected.fit.temperature, rel=rounding())
    assert record.names == (() if target in ("code", "y") else NAMES)


def test_names_say_the_order_of_the_outputs(call: Run) -> None:
    order = ("--class-names", '"owl, snowy",dog,cat')
    code, out, _ = call(*CALIBRATE, *data("val.csv", "kind"), *order, "--json")
    assert (code, json.loads(out)["names"]) == (0, ["owl, snowy", "dog", "cat"])
    assert record_in("cal.json").verdict.accuracy < 0.5  # as the order is wrong
    code, out, _ = call(*CALIBRATE, *data("val.csv", "first"), "--class-names", "1,2,3", "--json")
    assert (code, json.loads(out)["names"]) == (0, ["1", "2", "3"])
    assert record_in("cal.json").verdict.accuracy > 0.5
    names = ("--class-names", "x,y,z", "--json")
    code, out, _ = call(*CALIBRATE, *data("val.csv", "code"), *names)
    assert (code, json.loads(out)["names"]) == (0, ["x", "y", "z"])  # numbers are the classes' own
    assert record_in("cal.json").verdict.accuracy > 0.5


@pytest.mark.filterwarnings("default")
def test_an_order_worse_than_chance_is_warned_of(call: Run) -> None:
    order = ("--class-names", 'dog,"owl, snowy",cat')
    code, _, err = call(*CALIBRATE, *data("val.csv", "kind"), *order)
    assert (code, err.count("\n")) == (0, 1)
    assert "less than by chance" in err


@pytest.mark.parametrize("end", ["csv", "npz"])
def test_a_rule(call: Run, end: str) -> None:
    code, out, err = call(*CALIBRATE, *data("val.csv", "kind"), "--reject", "0.7")
    assert (code, err) == (0, "")
    assert "Rule: keep rows of confidence" in out
    rule = record_in("cal.json").rule
    assert (rule.risk, record_in("cal.json").rows + rule.rows) == (0.7, 80)
    lines = Path("test.csv").read_text().splitlines()
    lines[3] = "2,,1,1,1,cat,0,1,no"
    Path("gaps.csv").write_text("\n".join(lines))
    assert call("predict", "user_classes:net", "cal.json", "--data", "gaps.csv", "-o", f"out.{end}")[0] == 0
    if end == "csv":
        certain = [row["kept"] == "True" for row in rows_of("out.csv")]
    else:
        with np.load("out.npz") as arrays:
            certain = arrays["kept"].tolist()
    uq = latedrop.load("cal.json", sys.modules["user_classes"].net())
    with np.load("test.npz") as arrays:
        expected = uq.predict(arrays["x"]).kept()
    assert certain[:3] == [*expected[:2].tolist(), False]
    code, out, _ = call("evaluate", "user_classes:net", "cal.json", "--data", "test.csv", "--require", "kept>=2")
    assert (code, "Does the rule hold?" in out) == (3, True)


@pytest.mark.parametrize("end", ["csv", "parquet", "npz"])
def test_predictions_in_files(call: Run, calibrated: str, end: str) -> None:
    lines = Path("test.csv").read_text().splitlines()
    lines[3] = "2,,1,1,1,cat,0,1,no"
    Path("gaps.csv").write_text("\n".join(lines))
    arguments = ("--data", "gaps.csv", "-o", f"out.{end}", "--level", "0.9", "--batch-size", "1")
    code, out, err = call("predict", "user_classes:net", calibrated, *arguments)
    assert (code, out) == (0, f"80 rows predicted, with sets at level 0.9\nwritten: out.{end}\n")
    assert "in 1 of 80 rows, at line 4" in err
    uq = latedrop.load(calibrated, sys.modules["user_classes"].net())
    with np.load("test.npz") as arrays:
        p = uq.predict(arrays["x"])
    members = p.prediction_set(0.9)
    if end == "npz":
        with np.load("out.npz") as actual:
            assert actual["label"].tolist()[:2] == p.label.tolist()[:2]
            assert (actual["label"][2], bool(np.isnan(actual["probabilities"][2]).all())) == (-1, True)
            assert np.array_equal(np.delete(actual["set"], 2, 0), np.delete(members.numpy(), 2, 0))
        return
    if end == "parquet":
        pandas = pytest.importorskip("pandas")
        pandas.read_parquet("out.parquet").to_csv("out.csv", index=False)
    rows = rows_of("out.csv")
    assert list(rows[0]) == ["label", "confidence", "entropy", "novelty", "set", *(f"p_{name}" for name in NAMES)]
    assert set(rows[2].values()) == {""}
    for i in (0, 1, 3, 40):
        assert rows[i]["label"] == NAMES[int(p.label[i])]
        assert float(rows[i]["p_dog"]) == pytest.approx(float(p.probabilities[i, 1]), rel=rounding())
        inside = next(csv.reader([rows[i]["set"]])) if rows[i]["set"] else []
        assert inside == [name for name, there in zip(NAMES, members[i].tolist(), strict=True) if there]


def test_evaluate(call: Run, calibrated: str) -> None:
    evaluate = ("evaluate", "user_classes:net", calibrated, "--data", "test.csv")
    code, out, err = call(*evaluate, "--report", "page.html")
    assert (code, err) == (0, "")
    assert "80 test rows\n" in out
    for line in (r"Better than one temperature\? +(good|weak|bad) ", "temperature alone +[0-9]", "90 % sets hold"):
        assert re.search(line, out), line
    page = Path("page.html").read_text()
    assert "user_classes:net on test.csv" in page
    assert "owl, snowy" in page
    code, out, _ = call(*evaluate, "--json", "--level", "0.8")
    record = json.loads(out)
    assert (code, record["rows"], record["dropped"], record["sets"]["level"]) == (0, 80, 0, 0.8)
    assert {"accuracy", "nll", "brier", "ece", "gain", "coverage80", "size80"} <= set(record["measures"])
    assert [row["label"] for row in record["scores"]][-1] == "the model's softmax"


def test_requirements(call: Run, calibrated: str) -> None:
    evaluate = ("evaluate", "user_classes:net", calibrated, "--data", "test.csv", "--require")
    assert call(*evaluate, "accuracy>=0.3,nll<5,coverage75>=0.5,size75<=3,rows>=80")[0] == 0
    code, _, err = call(*evaluate, "accuracy>=1.5,ece<=1")
    assert (code, err.count("\n"), "required accuracy >= 1.5; found 0." in err) == (3, 1, True)
    code, _, err = call(*evaluate, "rmse<3")
    assert (code, "found 'rmse'. Known: " in err, "accuracy" in err) == (2, True, True)


def test_one_logit_and_two_names(call: Run) -> None:
    arguments = (*data("val.csv", "yes"), "-o", "cal.json", "--json")
    code, out, _ = call("calibrate", "user_classes:one", *arguments)
    assert (code, json.loads(out)["names"], json.loads(out)["verdict"]["accuracy"] > 0.5) == (0, ["no", "yes"], True)
    code, out, _ = call("evaluate", "user_classes:one", "cal.json", "--data", "test.csv", "--json")
    assert (code, json.loads(out)["measures"]["accuracy"] > 0.5) == (0, True)


def test_an_exported_program(call: Run) -> None:
    model = sys.modules["user_classes"].net().eval()
    rows = ({0: torch.export.Dim("rows", min=2)},)
    torch.export.save(torch.export.export(model, (torch.zeros(2, 4),), dynamic_shapes=rows), "net.pt2")
    assert call("calibrate", "net.pt2", *data("val.csv", "kind"), "-o", "cal.json")[0] == 0
    code, out, _ = call("predict", "net.pt2", "cal.json", "--data", "test.csv")
    assert (code, next(csv.DictReader(io.StringIO(out)))["label"] in NAMES) == (0, True)
    code, out, _ = call("evaluate", "net.pt2", "cal.json", "--data", "test.csv", "--json")
    assert (code, json.loads(out)["rows"]) == (0, 80)


SINGLE = "id,a,b,c,d,kind\n" + "".join(f"{i},{i},1,1,1,cat\n" for i in range(9))


@pytest.mark.parametrize(
    ("model", "file", "words", "message"),
    [
        ("net", "val.csv", "first", "expected labels from 0 to 2, as the model has 3 classes; found 1 to 3"),
        ("net", "val.npz", "half --task classification", "whole numbers in 'half'; found '"),
        ("net", "val.npz", "hot", "as one-hot labels are. Name one column"),
        ("net", "val.npz", "hot --task classification", "expected one label for each row, (80,)"),
        ("net", "val.csv", "code,first --task classification", "expected one target, the labels"),
        (
            "net",
            "single.csv",
            "kind",
            "The classes in 'kind' of single.csv are, from 0 on, cat. Name all",
        ),
        ("net", "single.csv", "kind --class-names cat,dog,owl", "rows of class 0 alone"),
        ("net", "two.csv", "kind --class-names cat,dog,owl", "as many validation rows as classes"),
        ("net", "val.csv", "kind --class-names cat,dog", "expected labels among cat, dog in 'kind'; found 'owl"),
        ("net", "val.csv", "kind --class-names cat,dog,owl", "expected labels among cat, dog, owl"),
        ("soft", "val.csv", "kind", "expected logits, as they are before a softmax"),
        ("broken", "val.csv", "kind", "NaN or inf"),
        ("one", "val.csv", "kind", 'are, from 0 on, cat, dog, "owl, snowy". Name all'),
        ("net", "val.csv", "kind --per-class", "expected --sets with --per-class"),
        ("net", "val.csv", "kind --reject 2", "expected --reject inside (0, 1)"),
        ("one", "val.csv", "a --inputs b,c,d,code --sets lac", "expected --sets with classes"),
        ("net", "val.csv", "kind --floor", "expected options that belong to --method terms; found --floor."),
        ("net", "val.csv", "kind --inputs a,b", "Its input was columns a, b of val.csv: see --inputs."),
        ("net", "val.csv", "kind --target-log", "found --target-mean, --target-std or --target-log."),
    ],
)
def test_wrong_input_is_one_line(call: Run, model: str, file: str, words: str, message: str) -> None:
    Path("single.csv").write_text(SINGLE)
    Path("two.csv").write_text("id,a,b,c,d,kind\n1,1,1,1,1,cat\n2,2,1,1,1,dog\n")
    target, *options = words.split()
    code, out, err = call("calibrate", f"user_classes:{model}", *data(file, target), *options, "-o", "cal.json")
    assert message in err
    assert (code in (1, 2), out, err.count("\n")) == (True, "", 1)
    assert not PYTHON.search(err), err
    assert not Path("cal.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("predict", "--data", "test.csv", "--level", "0.9"), "calibration with prediction sets for --level"),
        (("evaluate", "--data", "test.csv", "--level", "0.9"), "Calibrate with --sets lac."),
        (("evaluate", "--data", "test.csv", "--unit", "cm"), "expected options that classes have; found --unit"),
    ],
    ids=["level", "test level", "unit"],
)
def test_options_that_do_not_fit_the_calibration(call: Run, words: tuple[str, ...], message: str) -> None:
    assert call(*CALIBRATE, *data("val.csv", "kind"))[0] == 0
    code, out, err = call(words[0], "user_classes:net", "cal.json", *words[1:])
    assert (code, out, message in err) == (2, "", True)


def test_a_label_that_the_calibration_does_not_know(call: Run, calibrated: str) -> None:
    Path("new.csv").write_text(Path("test.csv").read_text().replace("dog", "frog", 1))
    code, _, err = call("evaluate", "user_classes:net", calibrated, "--data", "new.csv")
    assert (code, "found 'frog' at line" in err) == (1, True)

"""Images that a table names, through the whole command line: real files in, columns out, and each wrong one named."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from latedrop.cli.tables import image_transform
from rounding import assert_same_up_to_rounding

Image: Any = pytest.importorskip("PIL.Image")

CODE = """
import numpy as np
import torch
from torch import nn

def net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1))

def small(image):
    return np.asarray(image.convert("RGB").resize((8, 9)), np.float32).transpose(2, 0, 1) / 255

def tiny(image):
    return small(image)[:, :2, :2]

def half(image):
    return torch.tensor(np.asarray(image.convert("RGB").resize((8, 8)))).permute(2, 0, 1) / 510

def text(image):
    return "no numbers"
"""
Run = Callable[..., tuple[int, str, str]]
SMALL = "pictured_model:small"
QUICK = ("--rates", "0.3", "--draws", "4")


@pytest.fixture(autouse=True)
def place(user_folder: Path) -> Path:
    Path("pictured_model.py").write_text(CODE)
    Path("photos/more").mkdir(parents=True)
    dice = np.random.default_rng(0)
    lines = ["file,size,y"]
    for index in range(12):
        name = f"more/{index}.jpg" if index % 2 else f"{index}.png"
        Image.fromarray(dice.integers(0, 255, (10 + index % 2, 12, 3)).astype(np.uint8)).save(f"photos/{name}")
        lines.append(f"{name},{index},{0.1 * index}")
    Path("val.csv").write_text("\n".join(lines) + "\n")
    return user_folder


def calibrate(call: Run, *words: object, target: str = "y") -> tuple[int, str, str]:
    model = ("calibrate", "pictured_model:net", "--data", "val.csv", "--images", "photos")
    return call(*model, "--target", target, "-o", "cal.json", *QUICK, *words)


@pytest.mark.filterwarnings("ignore")
def test_from_photos_to_intervals(call: Run, place: Path) -> None:

    code, _, err = calibrate(call, "--transform", "pictured_model:small")
    assert (code, [line for line in err.splitlines() if "warning" not in line]) == (0, [])
    words = ("pictured_model:net", "cal.json", "--data", "val.csv", "--images", "photos")
    assert call("predict", *words, "--keep", "file,size", "-o", "out.csv", "--batch-size", 5)[0] == 0
    with open("out.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["file"] for row in rows[:2]] == ["0.png", "more/1.jpg"]
    from pictured_model import net  # type: ignore[import-not-found]

    from latedrop import load

    transform = image_transform("pictured_model:small")
    with Image.open("photos/more/1.jpg") as image:
        x = torch.tensor(transform(image))[None]
    assert x.shape == (1, 3, 9, 8)
    expected = load("cal.json", net()).predict(x)
    assert_same_up_to_rounding(float(rows[1]["mean"]), expected.mean.item())
    assert_same_up_to_rounding(float(rows[1]["std"]), expected.std.item())
    assert call("evaluate", *words)[0] == 0
    code, out, err = call("predict", *words[:4])
    assert (code, out) == (2, "")
    assert "expected --images, the folder of the images, as the calibration was made with images" in err


@pytest.mark.filterwarnings("ignore")
def test_names_in_another_table(call: Run, place: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    with open("val.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    table = pyarrow.table({"path": [row["file"] for row in rows], "y": [float(row["y"]) for row in rows]})
    parquet.write_table(table, "val.parquet")
    words = ("--data", "val.parquet", "--images", "photos", "--column", "path", "--transform", "pictured_model:small")
    assert call("calibrate", "pictured_model:net", *words, "--target", "y", "-o", "cal.json", *QUICK)[0] == 0
    assert call("predict", "pictured_model:net", "cal.json", *words[:4], "--keep", "path", "-o", "out.parquet")[0] == 0


@pytest.mark.filterwarnings("ignore")
def test_a_function_of_ones_own(call: Run, place: Path) -> None:
    assert calibrate(call, "--transform", "pictured_model:half")[0] == 0
    code, _, err = calibrate(call, "--transform", "pictured_model:text")
    assert (code, err) == (1, f"latedrop: expected numbers from --transform; found <U10 of shape () for {first()}.\n")


def first() -> Path:
    return Path("photos") / "0.png"


def damage(name: str) -> None:
    path = Path("photos") / name
    path.write_bytes(path.read_bytes()[:60])


def deepen(name: str) -> None:
    Image.fromarray(np.full((10, 12), 40_000, np.uint16)).save(Path("photos") / name)


@pytest.mark.parametrize(
    ("wrong", "words", "message"),
    [
        (lambda: damage("2.png"), SMALL, "expected an image at photos/2.png, named at line 4 of val.csv; it"),
        (lambda: Path("photos/2.png").unlink(), SMALL, "expected image '2.png', named at line 4 of val.csv, in"),
        (lambda: deepen("0.png"), "", "it has more than 8 bits per channel, mode I;16"),
        (lambda: None, "", "expected images of one shape; found (3, 10, 12) and, for 'more/1.jpg' at line 3"),
        (lambda: None, "pictured_model:tiny", "Its input was column file of val.csv: see --transform."),
        (lambda: None, "size=8", "expected --transform as package.module:function; found 'size=8'. Name the function"),
        (lambda: None, f"{SMALL} --column path", "expected column 'path' in val.csv; it is not there."),
        (lambda: None, f"{SMALL} --inputs size", "expected --inputs or --images; found both."),
        (lambda: None, f"{SMALL} --images none", "expected a folder of images at none; there is none."),
        (lambda: None, f"{SMALL} --data val.npz", "expected a table with names of images, csv or parquet"),
    ],
)
def test_each_wrong_input_is_one_line(call: Run, place: Path, wrong: Any, words: str, message: str) -> None:
    np.savez("val.npz", x=np.zeros((3, 2)), y=np.zeros(3))
    wrong()
    code, out, err = calibrate(call, *(["--transform", *words.split()] if words else []))
    assert (code in (1, 2), out, err.count("\n")) == (True, "", 1)
    assert message in err


def test_the_formula() -> None:
    pixels = np.arange(6 * 8 * 3, dtype=np.uint8).reshape(6, 8, 3)
    image = Image.fromarray(pixels)
    assert_same_up_to_rounding(image_transform("")(image), pixels.transpose(2, 0, 1) / 255)
    assert image_transform("")(image.convert("L")).shape == (3, 6, 8)

"""Calibration files that were edited, with a checksum made to fit: every field is checked, and named."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import latedrop
from latedrop.errors import ArgumentError, DataError, FileError
from latedrop.records import checksum_of

NAN, INF = float("nan"), float("inf")
STRANGE: list[Any] = [None, True, "x", "", -1, 0, NAN, INF, -INF, 1e300, 10**400, 10**12, [], [[]], {}, {"a": 1}, [NAN]]


def network(outputs: int = 1) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, outputs))


def record_of(kind: str) -> dict[str, Any]:
    outputs = 2 if kind == "two outputs" else 1
    model = network(outputs)
    x = torch.linspace(-1, 1, 90).reshape(30, 3)
    with torch.no_grad():
        y = model(x) + 0.1 * torch.sin(40 * x[:, :1])
    options: dict[str, Any] = {"draws": 5, "rates": [0.1, 0.3], "progress": False}
    if kind == "isotonic":
        pytest.importorskip("sklearn")
        options["intervals"] = "isotonic"
    elif kind == "conformal":
        options["conformal_data"] = (x, y)
    elif kind == "terms":
        options = {"reference": x + 0.1, "progress": False}
    elif kind == "per site":
        options = {"method": "linear", "per_site": True, "floor": True, "progress": False}
    found = latedrop.calibrate(model, (x, y), **options).calibration
    if kind == "two outputs":
        found = found.with_choice(found.tradeoff()[3])
    record: dict[str, Any] = json.loads(found.to_json())["latedrop"]
    return record


RECORD = record_of("one")


def resealed(record: dict[str, Any]) -> str:
    return json.dumps({"latedrop": record, "checksum": checksum_of(record)})


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a record; of long lists the first one."""
    if path:
        yield path
    items = (
        list(value.items())
        if isinstance(value, dict)
        else list(enumerate(value))[:1]
        if isinstance(value, list)
        else []
    )
    for key, item in items:
        yield from leaves(item, (*path, key))


def put(record: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed: dict[str, Any] = json.loads(json.dumps(record))
    inner: Any = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


@pytest.mark.filterwarnings("ignore:.* of these rows are rows that the calibration was fitted to")
@pytest.mark.parametrize(
    "kind",
    ["conformal", *(pytest.param(k, marks=pytest.mark.slow) for k in ("two outputs", "isotonic", "per site", "terms"))],
)
def test_whatever_is_put_anywhere_is_refused_in_our_words(kind: str) -> None:
    """Or it is a value that the field may have: then the calibration prints, and is saved as it was."""
    record = record_of(kind)
    assert latedrop.Calibration.from_json(resealed(record))
    accepted = 0
    for path in leaves(record):
        for value in STRANGE:
            changed = put(record, path, value)
            with contextlib.suppress(DataError):
                found = latedrop.Calibration.from_json(resealed(changed))
                assert str(found)
                assert json.loads(found.to_json())["latedrop"] == changed
                accepted += 1
    assert accepted > 0


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("scales",), [NAN], r"expected calibration.scales\[0\] to be a number from 0 to 3.4e\+38; found nan"),
        (("scales",), [-1], r"expected calibration.scales\[0\] to be a number"),
        (("scales",), [1e300], r"expected calibration.scales\[0\] to be a number from 0 to 3.4e\+38; found 1e\+300"),
        (("scales",), [1.0, 1.0], "expected calibration.scales to be a list of 1"),
        (("floors",), [-0.1], r"expected calibration.floors\[0\] to be a number"),
        (("least_variance",), [0.0], r"expected calibration.least_variance\[0\] to be a number"),
        (("sites",), [], "expected calibration.sites to be a list that is not empty"),
        (
            ("sites", 0, "kind"),
            "pixel",
            r"expected calibration.sites\[0\].kind to be one of element, channel; found 'pixel'",
        ),
        (("sites", 0, "units"), [0], r"expected calibration.sites\[0\].units\[0\] to be a whole number"),
        (
            ("method",),
            "magic",
            "expected calibration.method to be one of terms, sample, linear, propagate; found 'magic'",
        ),
        (("draws",), 10**12, r"expected calibration.draws to be a whole number from 2 to 1e\+06; found 1000000000000"),
        (("draws",), 2.5, "expected calibration.draws to be a whole number"),
        (("rate",), 1.0, "expected calibration.rate to be a number from 0 to 1; found 1.0"),
        (("rate",), {"nowhere": 0.1}, "expected calibration.rate to be rates of its sites; found .'nowhere'"),
        (("choice",), -2, "expected calibration.choice"),
        (("output_shape",), [2**20, 2**20], "expected calibration.output_shape to be a shape of at most"),
        (("seed",), "x", "expected calibration.seed to be a whole number"),
        (("more",), 1, "expected no other fields in calibration; found 'more'"),
        (("table", 0, "rmse"), NAN, r"expected calibration.table\[0\].rmse to be a number"),
    ],
)
def test_a_file_names_the_field(tmp_path: Path, path: tuple[Any, ...], value: Any, message: str) -> None:
    file = tmp_path / "c.json"
    file.write_text(resealed(put(RECORD, path, value)))
    with pytest.raises(FileError, match=message) as raised:
        latedrop.load(file, network())
    assert str(raised.value).startswith(f"{file}: ")


def test_a_field_that_is_missing(tmp_path: Path) -> None:
    for name in RECORD:
        record = {key: value for key, value in RECORD.items() if key != name}
        (tmp_path / "c.json").write_text(resealed(record))
        if name in (
            "columns",
            "terms",
            "verdict",
            "constant",
            "ratio_to_draws",
            "target",
            "seen",
        ):  # which older files lack
            latedrop.load(tmp_path / "c.json", network())
            continue
        with pytest.raises(
            FileError, match="format 1" if name == "format" else f"a field calibration.{name}; it is missing"
        ):
            latedrop.load(tmp_path / "c.json", network())


def test_a_floor_that_the_model_cannot_hold(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(resealed(put(RECORD, ("floors",), [1e60])))
    with pytest.raises(FileError, match=r"expected scales and floors in .*c.json that give a finite variance"):
        latedrop.load(path, network())
    with pytest.warns(latedrop.LatedropWarning, match="the model's weights are not those"):
        latedrop.load(path, network().double())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"expected the JSON of a calibration; .*an empty file"),
        (b"[" * 200_000, "expected the JSON of a calibration; .*lists inside lists"),
        (b'{"latedrop":' * 100_000, "expected the JSON of a calibration"),
        (b"[1, 2]", "expected the JSON of a calibration; found something else"),
        (b'"text"', "expected the JSON of a calibration; found something else"),
        (b'{"latedrop": [], "checksum": []}', "expected the JSON of a calibration; found something else"),
        (b"\x00\x01\x80\xff", "found a file that is not UTF-8 text"),
        ('{"a": "ü"}'.encode("utf-16"), "found a file that is not UTF-8 text"),
        ('{"a": "ü"}'.encode("latin-1"), "found a file that is not UTF-8 text"),
        (b"9" * 10_000, "expected the JSON of a calibration"),
    ],
)
def test_other_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(content)
    with pytest.raises(FileError, match=message):
        latedrop.load(path, network())


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"expected a calibration file at .*; the system says"):
        latedrop.load(tmp_path, network())


def test_a_mark_of_the_byte_order_is_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(b"\xef\xbb\xbf" + resealed(RECORD).encode())
    assert latedrop.load(path, network()).calibration.rows == 30


def test_draws_without_end_are_refused_in_python_too() -> None:
    with pytest.raises(ArgumentError, match="expected at most 1000000 draws; found 1000000000000"):
        latedrop.sample(network(), torch.zeros(2, 3), 0.1, 10**12)

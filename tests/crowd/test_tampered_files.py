"""JSON of the crowd commands, edited or of another kind: refused in our words, with the field."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("scipy")
pytest.importorskip("safetensors")

import safetensors.torch
import torch

from latedrop.crowd.calibration import load_calibration
from latedrop.crowd.counting import finished_frames
from latedrop.crowd.mcnn import MCNN, load_weights, shipped
from latedrop.crowd.training.log import read_log
from latedrop.errors import FileError
from latedrop.records import checksum_of

RESULTS = Path(__file__).parents[2] / "docs" / "results"
STRANGE: list[Any] = [None, True, "x", -1, float("nan"), 1e300, 10**12, [], {}, [[1]]]
OTHER = [b"", b"[" * 200_000, b"[1]", b'"x"', b"null", b"\x00\xff\xfe", '{"a": "ü"}'.encode("utf-16")]


@pytest.fixture(scope="module")
def trained() -> Any:
    return load_weights(shipped("scenes"))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("method",), "magic", "expected crowd.method to be one of sampling-free, sample; found 'magic'"),
        (("fingerprint",), 3, "expected crowd.fingerprint to be a text"),
        (("policy", "threshold"), -1, "expected crowd.policy.threshold to be a number from 0"),
        (("policy", "faint_mass"), float("nan"), "expected crowd.policy.faint_mass to be a number"),
        (("policy", "objective"), "best", "expected crowd.policy.objective to be one of count, regions"),
        (("roi",), [], "expected crowd.roi to be an object"),
        (("about",), [], "expected crowd.about to be an object"),
        (("count",), {}, "crowd.count: expected the JSON of a calibration"),
        (("more",), 1, "expected no other fields in crowd; found 'more'"),
    ],
)
def test_a_crowd_calibration_names_the_field(
    tmp_path: Path, trained: Any, path: tuple[str, ...], value: Any, message: str
) -> None:
    record = json.loads(shipped("scenes", ".calibration.json").read_text())["crowd"]
    inner = record
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"crowd": record, "checksum": checksum_of(record)}))
    with pytest.raises(FileError, match=message):
        load_calibration(file, trained)


@pytest.mark.parametrize("content", OTHER)
def test_other_files(tmp_path: Path, trained: Any, content: bytes) -> None:
    file = tmp_path / "yacht.json"
    file.write_bytes(content)
    for read in (
        lambda: load_calibration(file, trained),
        lambda: read_log(file),
    ):
        with pytest.raises(FileError, match=r"yacht\.json"):
            read()


def test_folders(tmp_path: Path, trained: Any) -> None:
    (tmp_path / "yacht.json").mkdir()
    for read in (lambda: load_calibration(tmp_path, trained), lambda: read_log(tmp_path)):
        with pytest.raises(FileError, match="the system says: Is a directory"):
            read()


def test_counts_nested_without_end(tmp_path: Path) -> None:
    file = tmp_path / "counts.jsonl"
    file.write_text("[" * 200_000 + "\n")
    with pytest.raises(FileError, match="expected a file of counts in"):
        finished_frames(file)


@pytest.mark.parametrize(
    "about", ["[1]", "[" * 200_000, '{"channels": "x"}', '{"channels": 0}', '{"enlarge": -2}', "{"]
)
def test_what_weights_say_about_themselves(tmp_path: Path, about: str) -> None:
    file = tmp_path / "w.safetensors"
    file.write_bytes(safetensors.torch.save(MCNN().state_dict(), {"latedrop": about}))
    with pytest.raises(FileError, match=r"w\.safetensors: expected "):
        load_weights(file)


def test_every_field_of_a_log(tmp_path: Path) -> None:
    """Whatever a field holds: the log is read, or refused in our words."""
    source = next(iter(sorted(shipped("scenes").parent.glob("*.log.json"))))
    log = json.loads(source.read_text())
    file = tmp_path / "w.log.json"
    for name in ("data", "settings", "mean_predictor", "epochs", "best_epoch", "validation", "test"):
        refused = 0
        for value in STRANGE:
            file.write_text(json.dumps({**log, name: value}))
            try:
                read_log(file)
            except FileError:
                refused += 1
        assert refused > 0 or name in ("epochs", "best_epoch")


def test_a_checkpoint_that_is_something_else(tmp_path: Path) -> None:
    from latedrop.crowd.training.checkpoint import Checkpoint, Fit

    model = MCNN()
    state = Fit(model, model, torch.optim.Adam(model.parameters()))
    file = tmp_path / "w.checkpoint"
    for content in (
        {"identity": "[]"},
        {"identity": "[" * 200_000},
        {"identity": "{}"},
        [1],
        {"identity": "{}", "model": 3},
    ):
        torch.save(content, file)
        with pytest.raises(FileError, match="expected the checkpoint of a training in"):
            Checkpoint(file, {}).read(state)

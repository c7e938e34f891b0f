"""JSON of the crowd commands, edited or of another kind: refused in our words.

The calibrations of counters are tested with all other records.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from latedrop.errors import FileError
from latedrop_crowd.calibration import load_calibration
from latedrop_crowd.mcnn import MCNN, load_weights, shipped
from latedrop_crowd.training.network import read_log

STRANGE: list[Any] = [None, True, "x", -1, float("nan"), 1e300, 10**12, [], {}, [[1]]]
OTHER = [b"", b"[" * 200_000, b"[1]", b'"x"', b"null", b"\x00\xff\xfe", '{"a": "ü"}'.encode("utf-16")]


@pytest.fixture(scope="module")
def trained() -> Any:
    return load_weights(shipped("scenes"))


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
    from latedrop_crowd.training.loop import Checkpoint, Fit

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

"""A training under way, and the file that it goes on from after it was stopped."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from latedrop.errors import FileError
from latedrop.files import parsed, write_aside
from latedrop.records import checked
from latedrop_crowd.mcnn import MCNN

__all__ = ["Checkpoint", "Fit", "differences"]


@dataclass
class Fit:
    """A training under way.

    Attributes:
        model: whose weights Adam moves.
        average: the average of its weights; this is what is validated and kept.
        optimizer: Adam.
        seconds: spent.
        history: by epoch, `loss` and `mae` of validation counts.
    """

    model: MCNN
    average: MCNN
    optimizer: torch.optim.Adam
    seconds: float = 0.0
    history: list[dict[str, float]] = field(default_factory=list)

    @property
    def epoch(self) -> int:
        """Epochs done."""
        return len(self.history)


@dataclass(frozen=True)
class Checkpoint:
    """A file that a stopped training goes on from.

    Attributes:
        path: of the file.
        identity: settings and frames; plain JSON. Those of another training are refused.
    """

    path: Path
    identity: dict[str, Any]

    def write(self, state: Fit) -> None:
        """Put the training into the file, all of it or nothing."""
        content = {
            "identity": json.dumps(self.identity),
            "model": state.model.state_dict(),
            "average": state.average.state_dict(),
            "optimizer": state.optimizer.state_dict(),
            "seconds": state.seconds,
            "history": state.history,
        }
        buffer = io.BytesIO()
        torch.save(content, buffer)
        write_aside(self.path, buffer.getvalue())

    def read(self, state: Fit) -> None:
        """Take the training up from the file, if there is one.

        Raises:
            FileError: the file is damaged, or of another training.
        """
        if not self.path.exists():
            return
        with self._readable():
            content = torch.load(self.path, map_location="cpu", weights_only=True)
            identity = checked(
                dict[str, Any], parsed(content["identity"], "the identity of a training", ""), "identity", ""
            )
        other = differences(self.identity, identity)
        if other:
            raise FileError(
                f"expected the checkpoint {self.path} to be of this training; found another: {other}. "
                "Use the same settings and frames to go on, or pass --fresh to start again."
            )
        with self._readable():
            state.model.load_state_dict(content["model"])
            state.average.load_state_dict(content["average"])
            state.optimizer.load_state_dict(content["optimizer"])
            state.seconds, state.history = content["seconds"], content["history"]

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever the unpickler, or torch, stumbles over
            raise FileError(
                f"expected the checkpoint of a training in {self.path}; it cannot be read ({type(error).__name__}). "
                "Pass --fresh to start again."
            ) from error


def differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """What differs between two identities, in words; empty if nothing does.

    >>> differences({"settings": {"lr": 0.1, "seed": 0}}, {"settings": {"lr": 0.2, "seed": 0}})
    'lr 0.2 instead of 0.1'
    """
    words = []
    for group, values in json.loads(json.dumps(wanted)).items():
        there = found.get(group)
        there = there if isinstance(there, dict) else {}
        words += [
            f"{key} {there.get(key)} instead of {value}" for key, value in values.items() if there.get(key) != value
        ]
    return ", ".join(words)

"""Finished stages of a set on disk, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from latedrop.errors import FileError
from latedrop.files import write_aside
from latedrop.records import Limits, checked, naming
from latedrop.studies.command import dumped, read_result
from latedrop.terminal import folder

__all__ = ["SCHEMA", "Parts"]

SCHEMA = 1


@dataclass(frozen=True)
class Parts:
    """The folder of one set's stages.

    Attributes:
        folder: made with the first stage, removed with `clear`.
        key: what every stage depends on; a stage with another key is refused.
        fresh: do as if nothing were there.
        seconds: of each stage, now or when it was made.
    """

    folder: Path
    key: Mapping[str, Any]
    fresh: bool = False
    seconds: dict[str, float] = field(default_factory=dict)

    def find(self, name: str, **more: Any) -> dict[str, Any] | None:
        """A finished stage, or None.

        Raises:
            FileError: it is damaged, or made with other settings or weights.
        """
        path = self._path(name)
        if self.fresh or not path.exists():
            return None
        record = read_result(path, SCHEMA)
        if record.get("key") != {**self.key, **more}:
            raise FileError(
                f"expected a stage made with {json.dumps({**self.key, **more})} in {path}; found "
                f"{json.dumps(record.get('key'))}. Pass another --out, or --fresh to compute it again."
            )
        with naming(path):
            remedy = "Pass --fresh to compute it again."
            self.seconds[name] = checked(Annotated[float, Limits(0)], record.get("seconds"), f"{name}.seconds", remedy)
            stage: dict[str, Any] = checked(dict[str, Any], record.get("stage"), f"{name}.stage", remedy)
            return stage

    def keep(self, name: str, run: Callable[[], tuple[dict[str, Any], float]], **more: Any) -> dict[str, Any]:
        """A finished stage, or what `run` gives, a stage and its seconds, written at once."""
        found = self.find(name, **more)
        if found is not None:
            return found
        stage, seconds = run()
        record = {"schema": SCHEMA, "key": {**self.key, **more}, "seconds": seconds, "stage": stage}
        folder(self.folder)
        write_aside(self._path(name), dumped(record))
        self.seconds[name] = seconds
        # As it would be read: a run that goes on and one that was never stopped give the same bytes.
        again: dict[str, Any] = json.loads(json.dumps(stage))
        return again

    def clear(self) -> None:
        """Remove the stages, and the folders that are then empty."""
        for path in self.folder.glob("*.json"):
            path.unlink()
        with suppress(OSError):
            self.folder.rmdir()
            self.folder.parent.rmdir()

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"

"""Options of `latedrop crowd count` about frames that are counted already, and about labels that counts follow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from latedrop.terminal import say

if TYPE_CHECKING:
    from latedrop_crowd.calibration import CrowdCalibration
    from latedrop_crowd.counting import CountedFrame

__all__ = ["Following"]


@dataclass(frozen=True)
class Following:
    """What counts follow.

    Attributes:
        labels: file of true counts; None: none are known yet.
        state: file of what was learned; None keeps it in memory.
        counts: file that the counts go to.
    """

    labels: Path | None
    state: Path | None
    counts: Path

    @property
    def on(self) -> bool:
        """Whether counts follow labels, or are watched at least."""
        return self.labels is not None or self.state is not None

    def done(self, calibration: CrowdCalibration, level: float) -> dict[str, str]:
        """The frames that the file has, with marks of their pictures; `FileError` where counted by other means."""
        from latedrop.metrics.levels import checked_level
        from latedrop_crowd.counting import finished_frames, provenance_of
        from latedrop_crowd.labelled import FOLLOWED

        made_by = provenance_of(calibration, checked_level(level))
        done = finished_frames(self.counts, made_by + FOLLOWED if self.on else made_by)
        if done:
            say(f"passing over what {self.counts} has: {len(done)} frame{'s' if len(done) != 1 else ''}.")
        if done and self.on and self.state is None:
            say("warning: without --stream, what was learned from labels before is lost.")
        return done

    def of(
        self, rows: Iterator[CountedFrame], calibration: CrowdCalibration, level: float, done: Iterable[str]
    ) -> Iterator[CountedFrame]:
        """The frames, whose counts follow labels where there are any; `done` are names of those counted before."""
        if not self.on:
            return rows
        from latedrop.files import check_apart
        from latedrop_crowd.labelled import counts_stream, followed, read_labels

        check_apart({"--csv": self.counts, "--stream": self.state}, {"--labels": self.labels})
        labels = {} if self.labels is None else read_labels(self.labels)
        stream = counts_stream(calibration, level, self.state)
        names = {*done, *map(str, stream.waiting)}
        found = followed(rows, stream, labels, lambda text: say(f"alarm: {text}"))
        return self._checked(found, labels, names)

    def _checked(
        self, frames: Iterator[CountedFrame], labels: Mapping[str, float], names: set[str]
    ) -> Iterator[CountedFrame]:
        """The frames; a warning at the end where labels fit none of them, nor any counted before."""
        from latedrop_crowd.labelled import label_of

        used = not labels or any(label_of(name, labels) is not None for name in names)
        some = ""
        for frame in frames:
            used, some = used or label_of(frame.name, labels) is not None, frame.name
            yield frame
        if not used:
            example = next(iter(labels))
            say(
                f"warning: no label in {self.labels} is of a frame that was counted: it has {example!r}, where "
                f"frames are called {some!r}. Name them as the column frame of {self.counts} does."
            )

"""Count people frame by frame, with intervals, and write each count to a file at once.

Each frame gets a count, its standard deviation, the interval `[low, high]` that contains the true count with
probability `level`, and a strangeness. If the calibration has a policy, it also gets the count without rejected
regions. Each line of the file contains a hash of calibration and picture, so that a file never mixes two. Memory does
not grow with the number of frames.
"""

from __future__ import annotations

import csv
import hashlib
import io
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from latedrop import LatedropError, Prediction
from latedrop.errors import DataError, FileError, OutputError
from latedrop.files import csv_line, locked, plain_cell, readable
from latedrop.metrics.levels import checked_level
from latedrop_crowd.calibration import CrowdCalibration
from latedrop_crowd.calibration.record import Reading
from latedrop_crowd.mcnn import Trained
from latedrop_crowd.regions import Policy, Regions, find_regions, usual_threshold

__all__ = ["COLUMNS", "CountFile", "CountedFrame", "count_people", "finished_frames", "provenance_of", "write_counts"]

COLUMNS = ("frame", "count", "std", "low", "high", "count_kept", "regions_rejected", "strangeness", "provenance")
"""Columns of a file of counts."""
_Frame = tuple[str, Tensor]


@dataclass(frozen=True)
class CountedFrame:
    """Hold the results of one frame. `count`, `low`, `high` and `count_kept` are at least 0.

    Attributes:
        name: name of the frame.
        count: number of people inside the region of interest.
        std: standard deviation of the count.
        low: lower end of the interval.
        high: upper end of the interval.
        level: probability of the interval.
        count_kept: the count without rejected regions.
        density: people per cell, `(h, w)`.
        std_map: standard deviation of the density, `(h, w)`.
        regions: R connected regions of the density.
        rejected: mask of rejected regions, bool `(R,)`.
        faint: mask of regions that are kept but faint by the `Policy`, bool `(R,)`.
        reading: calibrated count and map; its `interval` gives other levels.
        image: the frame, `(C, H, W)` in [0, 1].
        strangeness: distance from the frames of the calibration; above 1 is unusual, see `calibration.record`.
        reasons: reasons why the frame is unusual; empty if it is usual.
        provenance: hash of calibration and level, a dot, and a hash of the picture.
        mapped: False if `std_map` was not computed and is 0.
    """

    name: str
    count: float
    std: float
    low: float
    high: float
    level: float
    count_kept: float
    density: npt.NDArray[np.float64] = field(repr=False)
    std_map: npt.NDArray[np.float64] = field(repr=False)
    regions: Regions = field(repr=False)
    rejected: npt.NDArray[np.bool_] = field(repr=False)
    faint: npt.NDArray[np.bool_] = field(repr=False)
    reading: Reading = field(repr=False)
    image: Tensor = field(repr=False)
    strangeness: float = 0.0
    reasons: tuple[str, ...] = ()
    provenance: str = ""
    mapped: bool = True

    @property
    def prediction(self) -> Prediction:
        """Return the count as a `Prediction` of one row, before guard and recalibration for a scene."""
        return self.reading.count

    @property
    def uncountable(self) -> str:
        """Return the reason why the frame cannot be counted; empty if it can."""
        return self.reading.uncountable

    def row(self) -> dict[str, Any]:
        """Return the line for a file of counts, by `COLUMNS`; numbers are None if the frame cannot be counted."""
        numbers = (self.count, self.std, self.low, self.high, self.count_kept)
        cells = (self.name, *(None if self.uncountable else round(n, 4) for n in numbers), int(self.rejected.sum()))
        return dict(zip(COLUMNS, (*cells, float(f"{self.strangeness:.4g}"), self.provenance), strict=True))

    def __str__(self) -> str:
        if self.uncountable:
            return f"cannot count: {self.uncountable}"
        text = f"{self.count:.1f} people, {100 * self.level:.4g} % interval {self.low:.1f} to {self.high:.1f}"
        return f"{text} (unusual: {'; '.join(self.reasons)})" if self.reasons else text


def count_people(
    trained: Trained,
    calibration: CrowdCalibration,
    frames: Iterable[_Frame],
    level: float = 0.9,
    *,
    deviations: bool = True,
    skip: Collection[str] | Mapping[str, str] = (),
    on_bad: Callable[[LatedropError], object] | None = None,
) -> Iterator[CountedFrame]:
    """Count the people of each frame.

    Args:
        trained: the network, on any device.
        calibration: calibration of this network.
        frames: pairs of a name and an image `(C, H, W)` in [0, 1], such as from `open_frames`.
        level: probability of the intervals.
        deviations: also compute the standard deviation of every cell, which costs several times a count.
        skip: names of frames to skip. For a mapping from names to hashes, as from `finished_frames`, the pictures must
            have the same hashes.
        on_bad: called with the error of a frame that cannot be counted, which is then skipped. If None, the error is
            raised.

    Raises:
        DataError: a frame does not fit the network; the message names it.
        OutputError: the density has a negative sum.
        FileError: a frame to skip differs from the picture that was counted under its name.
    """
    level = checked_level(level)
    made_by = provenance_of(calibration, level)
    for name, image in frames:
        if name in skip:
            if isinstance(skip, Mapping) and skip[name] not in ("", _mark(image)):
                raise FileError(
                    f"expected the frames that were counted before; found another picture under the name {name}. Pass "
                    "the folder that the counts were made of, or another --out."
                )
            continue
        try:
            ready = trained.prepared(name, image)
            counted = _counted(trained, calibration, name, image, ready, level, deviations)
            counted = replace(counted, provenance=f"{made_by}.{_mark(image)}")
        except (DataError, OutputError) as error:
            named = error if name in str(error) else type(error)(f"{name}: {error}")
            if on_bad is None:
                raise named from error
            on_bad(named)
        else:
            yield counted


def provenance_of(calibration: CrowdCalibration, level: float) -> str:
    """Return a hash of calibration (with its weights and its scale) and level."""
    return hashlib.sha256(f"{calibration.to_json()} {level!r}".encode()).hexdigest()[:12]


def _mark(image: Tensor) -> str:
    """Return a hash of the size and of every 8th pixel of a picture."""
    some = image[:, ::8, ::8].detach().cpu().contiguous()
    return hashlib.sha256(f"{tuple(image.shape)}".encode() + some.numpy().tobytes()).hexdigest()[:8]


def write_counts(rows: Iterable[CountedFrame], path: str | os.PathLike[str], *, resume: bool = False) -> int:
    """Write each count at once, so that a crash loses no finished frame; return the number of counts.

    With `resume`, append to the file; pass its `finished_frames` to `count_people` as `skip`.
    """
    number = 0
    with CountFile(path, resume=resume) as file:
        for row in rows:
            file.add(row)
            number += 1
    return number


def finished_frames(path: str | os.PathLike[str], provenance: str | None = None) -> dict[str, str]:
    """Read the names and picture hashes of the frames in a file of counts; empty if there is no file.

    If a `provenance` is given, raise `FileError` for counts with another one.
    """
    path = Path(path)
    with readable(path, "a file of counts"):
        text = path.read_bytes().decode("utf-8-sig", errors="replace") if path.exists() else ""
    text = text[: text.rfind("\n") + 1]
    if not text:
        return {}
    try:
        rows = csv.DictReader(io.StringIO(text, newline=""))  # names may contain other line ends
        if tuple(rows.fieldnames or ()) != COLUMNS:
            raise KeyError(COLUMNS)
        marks = {plain_cell(str(row["frame"])): str(row["provenance"]).partition(".") for row in rows}
    except (ValueError, KeyError, TypeError, csv.Error):
        raise FileError(
            f"expected a file of counts in {path}, with {', '.join(COLUMNS)}; found something else. Pass another file."
        ) from None
    if provenance is not None and {made_by for made_by, _, _ in marks.values()} - {provenance}:
        raise FileError(
            f"expected counts of these weights, this calibration and this level in {path}; found others. Pass the "
            "same weights, calibration and level to continue, or another file."
        )
    return {name: mark for name, (_, _, mark) in marks.items()}


class CountFile:
    """Append counts to a CSV file by whole lines, locked against other processes; a context manager."""

    def __init__(self, path: str | os.PathLike[str], *, resume: bool = False) -> None:
        self.path = Path(path)
        with self._writable("Pass another file."):
            self._file = self.path.open("a", encoding="utf-8", newline="")
        try:
            if locked(self._file) is False:
                raise FileError(f"expected {self.path} for this run alone; another run is writing to it. Wait for it.")
            self._empty = self.path.stat().st_size == 0
            if not self._empty and not resume:
                raise FileError(
                    f"expected no counts in {self.path} yet; found some. Resume to add to them, or pass another file."
                )
            whole = self.path.read_bytes().rfind(b"\n") + 1
            with self._writable("Pass another file."):
                os.truncate(self.path, whole)  # a crash may have left half a line
                if not whole:
                    self._line(COLUMNS)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> CountFile:
        return self

    def add(self, frame: CountedFrame) -> None:
        """Write one frame and flush."""
        with self._writable(f"Frames before {frame.name} are in it."):
            self._line(frame.row().values())
        self._empty = False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()
        if self._empty:  # the next run would refuse a file with only a header
            self.path.unlink(missing_ok=True)

    def _line(self, values: Any) -> None:
        self._file.write(csv_line(values))
        self._file.flush()

    @contextmanager
    def _writable(self, remedy: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise FileError(f"expected to write {self.path}; the system says: {error}. {remedy}") from error


def _counted(
    trained: Trained,
    calibration: CrowdCalibration,
    name: str,
    image: Tensor,
    ready: Tensor,
    level: float,
    deviations: bool,
) -> CountedFrame:
    """Count one prepared frame, and apply the policy to its regions."""
    by_ratio = calibration.policy is not None and calibration.policy.least_ratio > 0
    reading = calibration.read(trained, ready, deviations=deviations or by_ratio).check(name)
    low, high = reading.interval(level)
    count = reading.mean
    policy = calibration.policy or Policy(usual_threshold(reading.density[None]))
    regions = find_regions(reading.density, reading.std, threshold=policy.threshold)
    rejected = policy.rejects(regions)
    gone = float(reading.density[regions.mask(rejected)].sum())
    return CountedFrame(
        name=name,
        count=max(0.0, count),
        std=reading.deviation,
        low=max(0.0, low),
        high=max(0.0, high),
        level=level,
        count_kept=max(0.0, count - gone),
        density=reading.density,
        std_map=reading.std,
        regions=regions,
        rejected=rejected,
        faint=policy.faint(regions),
        reading=reading,
        image=image,
        strangeness=reading.strangeness,
        reasons=reading.reasons,
        mapped=calibration.pixels is not None and (deviations or by_ratio),
    )

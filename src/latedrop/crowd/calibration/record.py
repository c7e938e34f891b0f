"""The record of a calibrated counter: what it says about a frame, and how it is kept as JSON."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from latedrop import Calibration, Prediction, Predictor, sample
from latedrop.calibration.fitted_terms import term_of
from latedrop.calibration.record import CALIBRATION, Choice
from latedrop.calibration.weights import fingerprint
from latedrop.crowd.calibration.cells import READOUTS, Cells
from latedrop.crowd.calibration.one_pass import count_in_one_pass
from latedrop.crowd.calibration.recalibration import Recalibration, t_quantile
from latedrop.crowd.calibration.usual import STRANGE, Usual
from latedrop.crowd.mcnn import Trained
from latedrop.crowd.regions import Policy
from latedrop.dropout.sampling import own_output
from latedrop.errors import DataError, FileError
from latedrop.json_text import read_text
from latedrop.metrics.levels import central_quantile
from latedrop.records import Format, Limits, match, naming, record
from latedrop.stored_tensors import inline
from latedrop.terms import Dropout

__all__ = ["METHODS", "NO_DROPOUT", "CrowdCalibration", "CrowdMethod", "Reading", "load_calibration", "roi_record"]

CrowdMethod: TypeAlias = Literal["sampling-free", "sample"]

METHODS: tuple[CrowdMethod, ...] = ("sampling-free", "sample")
NO_DROPOUT = "the count's variance has no share of dropout: on the validation frames it was worth nothing"


@dataclass(frozen=True)
class Reading:
    """What a calibrated counter says about one frame.

    Attributes:
        count: of one row, `(1,)`: people inside the region of interest, as the core gives them.
        density: `(h, w)`, people per cell, zero outside the region of interest.
        std: its standard deviation, `(h, w)`; zeros where cells were not calibrated, or were not asked for.
        mean: the count, recalibrated for its scene where that was done.
        variance: of the count, wider where the frame is strange; of a t-distribution the squared scale.
        dof: degrees of freedom of its t-distribution; None: it is Gaussian.
        strangeness: 1 where the usual ends, see `usual`.
        reasons: what is strange, in words; none below `STRANGE`.
    """

    count: Prediction
    density: npt.NDArray[np.float64]
    std: npt.NDArray[np.float64]
    mean: float
    variance: float
    dof: float | None
    strangeness: float
    reasons: tuple[str, ...]

    @property
    def deviation(self) -> float:
        """Standard deviation of the count."""
        heavier = 1.0 if self.dof is None else self.dof / (self.dof - 2)
        return float((self.variance * heavier) ** 0.5)

    def interval(self, level: float) -> tuple[float, float]:
        """What holds the true count with probability `level`."""
        if self.dof is None and self.variance == float(self.count.variance):
            low, high = (float(end) for end in self.count.interval(level))
            return low, high
        reach = self.variance**0.5 * (central_quantile(level) if self.dof is None else t_quantile(level, self.dof))
        return self.mean - float(reach), self.mean + float(reach)


@record
@dataclass(frozen=True)
class Region:
    """A region of interest, in cells.

    Attributes:
        shape: `(h, w)`.
        sha256: digest of its mask.
    """

    shape: tuple[Annotated[int, Limits(1)], Annotated[int, Limits(1)]]
    sha256: str


@record
@dataclass(frozen=True)
class CrowdCalibration:
    """All that turns a counter's output into counts with intervals. Frozen, and plain JSON on disk.

    Attributes:
        method: `"sampling-free"` or `"sample"`.
        count: the record of the count.
        pixels: the record of the cells inside the region of interest: one scale for all of them. None where counts
            alone were known: the map then has no deviations.
        policy: which regions to reject; None: it was not fitted.
        fingerprint: of the weights that it belongs to.
        roi: the region of interest; None where the whole frame counts.
        about: set, frames, settings and versions; plain JSON.
        usual: size and brightness of the frames that were seen; None where it is not known.
        recalibration: for a new scene, from some of its frames; None: it was not done.
    """

    method: CrowdMethod
    count: Calibration
    pixels: Calibration | None
    policy: Policy | None
    fingerprint: str
    roi: Region | None
    about: dict[str, Any]
    usual: Usual | None = None
    recalibration: Recalibration | None = None

    @property
    def has_dropout(self) -> bool:
        """Whether dropout has a share in the variance of the count."""
        if self.count.terms is None:
            return self.count.chosen()[0][0] > 0
        return any(share > 0 and term_of(name) == Dropout.name for name, share in self.count.terms.shares.items())

    def read(self, trained: Trained, image: Tensor, *, deviations: bool = True) -> Reading:
        """Count, map and deviations of one frame `(C, H, W)`, of the size that the network takes.

        Without `deviations` those of the map are left out, as zeros: one pass is then enough where dropout has no share
        in the count's variance.
        """
        x, cells = image[None], Cells(trained)
        if self.method == "sample":
            moments = sample(
                trained.model,
                x,
                self.count.rate,
                self.count.draws,
                self.count.seed,
                self.count.sites,
                cells.with_count,
            )
            count = Prediction(moments.mean[:, -1], moments.variance[:, -1], self.count)
            raw = moments.variance[:, :-1]
            maps = moments.mean[0, :-1], (raw if self.pixels is None else self.pixels.variance(raw))[0]
        elif deviations or self.count.terms is None:
            count = Predictor(trained.model, self.count, trained.count_of).predict(x)
            maps = self._cells(trained, cells, x)
        else:
            count, map_ = count_in_one_pass(trained, self.count, x)
            maps = cells(map_)[0], torch.zeros_like(cells(map_)[0])
        density, variance = (cells.spread(part, image) for part in maps)
        variance = np.zeros_like(variance) if self.pixels is None else variance
        mean, grown, strangeness, reasons = self._judged(count, image)
        dof = None if self.recalibration is None else self.recalibration.dof
        return Reading(count, density, np.sqrt(variance), mean, grown, dof, strangeness, reasons)

    def _cells(self, trained: Trained, cells: Cells, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the cells of one frame, without sampling."""
        if self.pixels is None:
            mean = own_output(trained.model, x, cells)[0]
            return mean, torch.zeros_like(mean)
        found = Predictor(trained.model, self.pixels, cells).predict(x)
        return found.mean[0], found.variance[0]

    def _judged(self, count: Prediction, image: Tensor) -> tuple[float, float, float, tuple[str, ...]]:
        """Mean and variance of the count after guard and recalibration, how strange the frame is, and why."""
        known = 0.0 if count.strangeness is None else float(count.strangeness)
        other, reasons = (0.0, ()) if self.usual is None else self.usual.strangeness(image)
        usual = 1.0 if self.recalibration is None else self.recalibration.strangeness
        mean, variance = float(count.mean), float(count.variance)
        strangeness = max(known / usual, other)
        if known / usual > STRANGE:
            far = f"{known / usual:.3g} times the limit"
            reasons = (*reasons, f"features unlike those of the frames that were seen, {far}")
        if strangeness != known:  # the terms' own guard has grown by the features alone, and knows of no new scene
            variance = max(1.0, strangeness) * (self.plain_variance(count) + self._constant) - self._constant
        if self.recalibration is not None:
            mean, variance = self.recalibration.apply(mean, variance)
        return mean, variance, strangeness, reasons

    def plain_variance(self, count: Prediction) -> float:
        """The variance of the count without what the guard has added: guarded is `g (v + c) - c`."""
        terms, variance = self.count.terms, float(count.variance)
        if terms is None or terms.guard is None or not terms.guard.grows or count.strangeness is None:
            return variance
        factor = float(terms.guard.factor(count.strangeness))
        return (variance + self._constant) / factor - self._constant

    @property
    def _constant(self) -> float:
        """Mean squared error of the validation counts, as the terms' guard has it: times the scale in use."""
        constant = self.count.constant[0] if self.count.constant else self.count.table[0].rmses[0] ** 2
        return constant if self.count.terms is None else constant * self.count.chosen()[0][0]

    def with_choice(self, choice: Choice) -> CrowdCalibration:
        """The same calibration with another scale in use, `"optimal"` or `"relaxed"`, for count and cells."""
        pixels = None if self.pixels is None else self.pixels.with_choice(choice)
        return replace(self, count=self.count.with_choice(choice), pixels=pixels)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON; the weights are not in it."""
        CROWD.write(path, self, inline)

    def to_json(self) -> str:
        """Readable JSON, with a checksum over its content."""
        return CROWD.to_json(self, inline)

    @classmethod
    def from_json(cls, content: str) -> CrowdCalibration:
        """Read what `to_json` wrote; `DataError` where it is damaged, edited, or something else."""
        if f'"{CROWD.key}"' not in content and f'"{CALIBRATION.key}"' in content:
            raise DataError(
                "expected the calibration of a people counter, of its count and its map; found that of a single "
                "readout, as Predictor.save writes. Run `crowd calibrate`."
            )
        return CROWD.from_json(content)

    def checked(self) -> CrowdCalibration:
        """Check the readouts after reading."""
        for name, part in (("count", self.count), ("pixels", self.pixels)):
            there = None if part is None else part.custom_readout
            match(part is None or there == READOUTS[name], f"{name}.custom_readout", READOUTS[name], there)
        return self

    def __str__(self) -> str:
        lines = [f"{self.method}, {self.count.rows} validation frames of {self.about.get('set', '?')}"]
        for name, part in (("count", self.count), ("cells", self.pixels)):
            if part is None or part.terms is not None:
                lines += ["cells: not calibrated, as only counts are known"] if part is None else _said(part)
                continue
            last = part.table[[row.rate for row in part.table].index(part.rate)]
            lines.append(
                f"{name}: scale {part.scales[0]:.4g}, floor {part.floors[0]:.4g}, "
                f"validation RMSE {last.rmses[0]:.4g}, NLL {last.nll_unscaled:.4g} raw, {last.nll_scaled:.4g} scaled"
            )
        if not self.has_dropout:
            lines.append(NO_DROPOUT)
        lines.append(f"regions: {'no policy' if self.policy is None else self.policy}")
        lines += [] if self.recalibration is None else [str(self.recalibration)]
        return "\n".join(lines)


def load_calibration(path: str | os.PathLike[str], trained: Trained) -> CrowdCalibration:
    """Bring a saved calibration back to its network.

    Raises:
        FileError: no such file; damaged; of a single readout; made for other weights, another readout or another region
            of interest.
    """
    content = read_text(path, CROWD.what)
    with naming(path):
        found = CrowdCalibration.from_json(content)
    if found.fingerprint != fingerprint(trained.model):
        raise FileError(
            f"expected the calibration of these weights in {path}; it was made for others (set "
            f"{found.about.get('set', '?')}), or with another scaling of frames or map. Run `crowd calibrate` again."
        )
    if found.roi != roi_record(trained):
        shapes = ["none" if r is None else " x ".join(map(str, r.shape)) for r in (roi_record(trained), found.roi)]
        raise FileError(
            f"expected a calibration for the weights' region of interest ({shapes[0]} cells); {path} was made for "
            f"another ({shapes[1]} cells). Run `crowd calibrate` again."
        )
    return found


def _said(record: Calibration) -> list[str]:
    """What a calibration by terms says of itself, the count's first."""
    return [f"count: {record.verdict}", *(f"  {line}" for line in (record.terms.lines() if record.terms else []))]


def roi_record(trained: Trained) -> Region | None:
    """Shape and digest of a network's region of interest."""
    if trained.roi is None:
        return None
    cells = trained.roi.cpu().numpy().astype(np.uint8)
    return Region((cells.shape[0], cells.shape[1]), hashlib.sha256(cells.tobytes()).hexdigest())


CROWD = Format(CrowdCalibration, "crowd", "a crowd calibration", "Run `crowd calibrate` again.", "crowd")

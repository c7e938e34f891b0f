"""The record of a calibrated counter: what it says about a frame, and how it is kept as JSON."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from latedrop import Calibration, Prediction, Predictor, sample
from latedrop.calibration.record import Choice
from latedrop.calibration.weights import fingerprint
from latedrop.crowd.calibration.cells import READOUTS, Cells
from latedrop.crowd.mcnn import Trained
from latedrop.crowd.regions import Policy
from latedrop.errors import DataError, FileError
from latedrop.files import write_aside
from latedrop.records import Fields, mapping, or_none, parsed, read_text, sealed, text, unsealed, wholes

__all__ = ["METHODS", "CrowdCalibration", "CrowdMethod", "Reading", "load_calibration", "roi_record"]

CrowdMethod: TypeAlias = Literal["sampling-free", "sample"]

METHODS: tuple[CrowdMethod, ...] = ("sampling-free", "sample")
_FORMAT = 1


@dataclass(frozen=True)
class Reading:
    """What a calibrated counter says about one frame.

    Attributes:
        count: of one row, `(1,)`: people inside the region of interest.
        density: `(h, w)`, people per cell, zero outside the region of interest.
        std: its standard deviation, `(h, w)`.
    """

    count: Prediction
    density: npt.NDArray[np.float64]
    std: npt.NDArray[np.float64]


@dataclass(frozen=True)
class CrowdCalibration:
    """All that turns a counter's output into counts with intervals. Frozen, and plain JSON on disk.

    Attributes:
        method: `"sampling-free"` or `"sample"`.
        count: the record of the count.
        pixels: the record of the cells inside the region of interest: one scale for all of them.
        policy: which regions to reject; None: it was not fitted.
        fingerprint: of the weights that it belongs to.
        roi: shape and digest of the region of interest; None where the whole frame counts.
        about: set, frames, settings and versions; plain JSON.
    """

    method: CrowdMethod
    count: Calibration
    pixels: Calibration
    policy: Policy | None
    fingerprint: str
    roi: Mapping[str, Any] | None
    about: Mapping[str, Any]

    def read(self, trained: Trained, image: Tensor) -> Reading:
        """Count, map and deviations of one frame `(C, H, W)`, of the size that the network takes."""
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
            pixels = Prediction(moments.mean[:, :-1], moments.variance[:, :-1], self.pixels)
        else:
            count = Predictor(trained.model, self.count, trained.count_of).predict(x)
            pixels = Predictor(trained.model, self.pixels, cells).predict(x)
        return Reading(count, *cells.maps(pixels, image))

    def with_choice(self, choice: Choice) -> CrowdCalibration:
        """The same calibration with another scale in use, `"optimal"` or `"relaxed"`, for count and cells."""
        return replace(self, count=self.count.with_choice(choice), pixels=self.pixels.with_choice(choice))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON; the weights are not in it."""
        write_aside(path, self.to_json().encode())

    def to_json(self) -> str:
        """Readable JSON, with a checksum over its content."""
        record = {
            "format": _FORMAT,
            "method": self.method,
            "count": json.loads(self.count.to_json()),
            "pixels": json.loads(self.pixels.to_json()),
            "policy": None if self.policy is None else self.policy.to_dict(),
            "fingerprint": self.fingerprint,
            "roi": None if self.roi is None else dict(self.roi),
            "about": dict(self.about),
        }
        return sealed("crowd", record) + "\n"

    @classmethod
    def from_json(cls, content: str) -> CrowdCalibration:
        """Read what `to_json` wrote; `DataError` where it is damaged, edited, or something else."""
        again = "Run `crowd calibrate` again."
        document = parsed(content, "a crowd calibration", again)
        if isinstance(document, dict) and "latedrop" in document:
            raise DataError(
                "expected the calibration of a people counter, of its count and its map; found that of a single "
                "readout, as Predictor.save writes. Run `crowd calibrate`."
            )
        fields = Fields(unsealed(document, "crowd", "a crowd calibration", _FORMAT, again, again), "crowd")
        found = cls(
            method=fields.take("method", text, among=METHODS),  # type: ignore[arg-type]
            count=fields.take("count", _calibration),
            pixels=fields.take("pixels", _calibration),
            policy=fields.take("policy", or_none(Policy.from_dict)),
            fingerprint=fields.take("fingerprint", text),
            roi=fields.take("roi", or_none(_roi)),
            about=fields.take("about", mapping(lambda value, name: value)),
        )
        fields.end()
        return found

    def __str__(self) -> str:
        lines = [f"{self.method}, {self.count.rows} validation frames of {self.about.get('set', '?')}"]
        for name, record in (("count", self.count), ("cells", self.pixels)):
            last = record.table[[row.rate for row in record.table].index(record.rate)]
            lines.append(
                f"{name}: scale {record.scales[0]:.4g}, floor {record.floors[0]:.4g}, "
                f"validation RMSE {last.rmses[0]:.4g}, NLL {last.nll_unscaled:.4g} raw, {last.nll_scaled:.4g} scaled"
            )
        if self.count.scales[0] == 0:
            lines.append("the count's deviation is the floor alone: the same for every frame")
        lines.append(f"regions: {'no policy' if self.policy is None else self.policy}")
        return "\n".join(lines)


def load_calibration(path: str | os.PathLike[str], trained: Trained) -> CrowdCalibration:
    """Bring a saved calibration back to its network.

    Raises:
        FileError: no such file; damaged; of a single readout; made for other weights, another readout or another region
            of interest.
    """
    content = read_text(path, "a crowd calibration")
    try:
        found = CrowdCalibration.from_json(content)
    except DataError as error:
        raise FileError(f"{path}: {error}") from error
    for name, record in (("count", found.count), ("pixels", found.pixels)):
        if record.custom_readout != READOUTS[name]:
            raise FileError(
                f"expected the {name} of {path} to be calibrated for {READOUTS[name]}; it was made for the readout "
                f"{record.custom_readout or record.readout!r}. Run `crowd calibrate` again."
            )
    if found.fingerprint != fingerprint(trained.model):
        raise FileError(
            f"expected the calibration of these weights in {path}; it was made for others (set "
            f"{found.about.get('set', '?')}). Run `crowd calibrate` with these weights."
        )
    if found.roi != roi_record(trained):
        shapes = ["none" if r is None else " x ".join(map(str, r["shape"])) for r in (roi_record(trained), found.roi)]
        raise FileError(
            f"expected a calibration for the weights' region of interest ({shapes[0]} cells); {path} was made for "
            f"another ({shapes[1]} cells). Run `crowd calibrate` again."
        )
    return found


def roi_record(trained: Trained) -> dict[str, Any] | None:
    """Shape and digest of a network's region of interest."""
    if trained.roi is None:
        return None
    cells = trained.roi.cpu().numpy().astype(np.uint8)
    return {"shape": list(cells.shape), "sha256": hashlib.sha256(cells.tobytes()).hexdigest()}


def _calibration(value: Any, name: str) -> Calibration:
    try:
        return Calibration.from_json(json.dumps(value))
    except DataError as error:
        raise DataError(f"{name}: {error}") from error


def _roi(value: Any, name: str) -> dict[str, Any]:
    fields = Fields(value, name)
    found = {"shape": list(fields.take("shape", wholes, length=2, least=1)), "sha256": fields.take("sha256", text)}
    fields.end()
    return found

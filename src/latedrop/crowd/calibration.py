"""The calibration of a people counter: one record for its count, one for the cells of its map, and what to reject.

The count is what an operator reads; its variance is that of the sum, not the sum of the cells' variances. So each has
its own record, `variance = scale · raw + floor`, fitted on the set's validation frames. Without sampling, the raw
variance is of first order for the count and propagated for the cells; with sampling, one run of draws gives both.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from latedrop.calibration.predictor import Prediction, Predictor, calibrate
from latedrop.calibration.record import Calibration, Choice
from latedrop.calibration.search import fingerprint
from latedrop.crowd.density import heads_inside, roi_cells
from latedrop.crowd.layouts import CrowdSet
from latedrop.crowd.mcnn import Trained
from latedrop.crowd.regions import Maps, Policy, fit_policy, near_cells, to_cells
from latedrop.errors import ArgumentError, DataError, FileError, LatedropWarning
from latedrop.files import write_aside
from latedrop.model.finding import find_sites
from latedrop.model.sites import Rate
from latedrop.variance.sampling import sample

__all__ = [
    "METHODS",
    "CrowdCalibration",
    "CrowdMethod",
    "Reading",
    "calibrate_counter",
    "load_calibration",
    "read_maps",
]

CrowdMethod: TypeAlias = Literal["sampling-free", "sample"]

METHODS: tuple[CrowdMethod, ...] = ("sampling-free", "sample")
_FORMAT = 1
_READOUTS = {"count": "Trained.count_of", "pixels": "_Cells"}
# Injected dropout ruins counts at large rates, so the paper looks below 0.01. Propagated variances of the cells are all
# but proportional to the rate, which the scale takes up: one rate is enough.
_SAMPLED_RATES = (0.001, 0.002, 0.005, 0.01)
_PROPAGATED_RATES = (0.01,)
# A frame has thousands of cells, so a few frames fix a scale; regions are a few to a frame, so they need more.
_PIXEL_FRAMES, _POLICY_FRAMES = 24, 80


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
        x, cells = image[None], _Cells(trained)
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
        h, w = image.shape[-2] // 4, image.shape[-1] // 4
        return Reading(count, cells.spread(pixels.mean[0], (h, w)), cells.spread(pixels.std[0], (h, w)))

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
        return json.dumps({"crowd": record, "checksum": _checksum(record)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> CrowdCalibration:
        """Read what `to_json` wrote; `DataError` where it is damaged, edited, or something else."""
        try:
            document = json.loads(text)
        except ValueError as error:
            raise DataError(
                f"expected the JSON of a crowd calibration; {error}. Run `crowd calibrate` again."
            ) from error
        if isinstance(document, dict) and "latedrop" in document:
            raise DataError(
                "expected the calibration of a people counter, of its count and its map; found that of a single "
                "readout, as Predictor.save writes. Run `crowd calibrate`."
            )
        record = document.get("crowd") if isinstance(document, dict) else None
        if not isinstance(record, dict) or record.get("format") != _FORMAT:
            raise DataError(
                f"expected a crowd calibration, format {_FORMAT}; found something else. Run `crowd calibrate` again."
            )
        if _checksum(record) != document.get("checksum"):
            raise DataError(
                "expected the content that was saved; the checksum does not match: the file was edited or damaged. "
                "Run `crowd calibrate` again."
            )
        return cls(
            method=record["method"],
            count=Calibration.from_json(json.dumps(record["count"])),
            pixels=Calibration.from_json(json.dumps(record["pixels"])),
            policy=None if record["policy"] is None else Policy.from_dict(record["policy"]),
            fingerprint=record["fingerprint"],
            roi=record["roi"],
            about=record["about"],
        )

    def __str__(self) -> str:
        lines = [f"{self.method}, {self.count.rows} validation frames of {self.about.get('set', '?')}"]
        for name, record in (("count", self.count), ("cells", self.pixels)):
            last = record.table[[row.rate for row in record.table].index(record.rate)]
            lines.append(
                f"{name}: scale {record.scales[0]:.4g}, floor {record.floors[0]:.4g}, validation RMSE {last.rmse:.4g}, "
                f"NLL {last.nll_unscaled:.4g} raw, {last.nll_scaled:.4g} scaled"
            )
        if self.count.scales[0] == 0:
            lines.append("the count's deviation is the floor alone: the same for every frame")
        lines.append(f"regions: {'no policy' if self.policy is None else self.policy}")
        return "\n".join(lines)


def calibrate_counter(
    trained: Trained,
    crowd_set: CrowdSet,
    method: CrowdMethod = "sampling-free",
    *,
    rates: Sequence[Rate] | None = None,
    draws: int = 50,
    scale: Choice = "optimal",
    floor: bool = True,
    every: int = 1,
    policy: bool = True,
    seed: int = 0,
    progress: bool = True,
) -> CrowdCalibration:
    """Calibrate a counter on the validation frames of a set.

    Args:
        trained: the network; it is left as it was.
        crowd_set: its validation frames are used, no others.
        method: `"sampling-free"` suits a CPU; `"sample"` runs `draws` thinned networks, GPU work for large frames.
        rates: to choose from with `"sample"`: the count's NLL decides, and the cells take the same rate, so that one
            run of draws serves both. Without sampling, the rate that the cells' variance is propagated at.
        draws: thinned networks per rate.
        scale: which scale intervals use: `"optimal"`, `"relaxed"` or a number.
        floor: fit a constant variance beside the scale: what is left where no mask moves the output.
        every: use each k-th validation frame only.
        policy: also choose which regions to reject.
        seed: fixes all masks.
        progress: show bars.

    Raises:
        DataError: the set's region of interest or size of frames is not the network's, or it has too few frames.
    """
    if method not in METHODS:
        raise ArgumentError(f"expected method 'sampling-free' or 'sample'; found {method!r}.")
    if every < 1:
        raise ArgumentError(f"expected every to be at least 1 frame; found {every}.")
    _check_set(trained, crowd_set)
    chosen = crowd_set.validation[::every]
    if len(chosen) < 2:
        raise DataError(
            f"expected at least 2 validation frames in {crowd_set.name}, and better a hundred; found {len(chosen)}."
        )
    cells = _Cells(trained)
    counts, maps = (
        _Frames(trained, crowd_set, chosen, None),
        _Frames(trained, crowd_set, _some(chosen, _PIXEL_FRAMES), cells),
    )
    sites = find_sites(trained.model, counts.image(chosen[0]))
    shared: dict[str, Any] = {"sites": sites, "scale": scale, "floor": floor, "seed": seed, "progress": progress}
    if method == "sample":
        sampled = {"draws": draws, **shared}
        count = calibrate(trained.model, counts, rates or _SAMPLED_RATES, readout=trained.count_of, **sampled)
        pixels = _calibrated_cells(trained, maps, [count.calibration.rate], cells, **sampled)
    else:
        count = calibrate(trained.model, counts, method="linear", readout=trained.count_of, **shared)
        pixels = _calibrated_cells(
            trained, maps, rates or _PROPAGATED_RATES, cells, method="propagate", mean="model", **shared
        )
    found = CrowdCalibration(
        method=method,
        count=count.calibration,
        pixels=pixels,
        policy=None,
        fingerprint=fingerprint(trained.model),
        roi=_roi_record(trained),
        about=_about(trained, crowd_set, len(chosen), len(maps), every),
    )
    if not policy:
        return found
    measured = read_maps(trained, found, crowd_set, _some(chosen, _POLICY_FRAMES), progress=progress)
    return replace(found, policy=fit_policy(measured, near=near_cells(crowd_set.sigma)))


def load_calibration(path: str | os.PathLike[str], trained: Trained) -> CrowdCalibration:
    """Bring a saved calibration back to its network.

    Raises:
        FileError: no such file; damaged; of a single readout; made for other weights, another readout or another region
            of interest.
    """
    try:
        found = CrowdCalibration.from_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"expected a crowd calibration at {path}; the system says: {error}.") from error
    except (DataError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise FileError(f"{path}: {error}") from error
    for name, record in (("count", found.count), ("pixels", found.pixels)):
        if record.custom_readout != _READOUTS[name]:
            raise FileError(
                f"expected the {name} of {path} to be calibrated for {_READOUTS[name]}; it was made for the readout "
                f"{record.custom_readout or record.readout!r}. Run `crowd calibrate` again."
            )
    if found.fingerprint != fingerprint(trained.model):
        raise FileError(
            f"expected the calibration of these weights in {path}; it was made for others (set "
            f"{found.about.get('set', '?')}). Run `crowd calibrate` with these weights."
        )
    if found.roi != _roi_record(trained):
        shapes = ["none" if r is None else " x ".join(map(str, r["shape"])) for r in (_roi_record(trained), found.roi)]
        raise FileError(
            f"expected a calibration for the weights' region of interest ({shapes[0]} cells); {path} was made for "
            f"another ({shapes[1]} cells). Run `crowd calibrate` again."
        )
    return found


def read_maps(
    trained: Trained,
    calibration: CrowdCalibration,
    crowd_set: CrowdSet,
    indices: Sequence[int],
    *,
    progress: bool = True,
) -> Maps:
    """Density, deviations and true heads of some frames of a set, all of one size, for `regions`."""
    from tqdm import tqdm

    cells, frames = _Cells(trained), _Frames(trained, crowd_set, indices, None)
    means, stds, heads = [], [], []
    for index in tqdm(indices, desc="reading maps", unit="frame", delay=2, disable=not progress, leave=False):
        x = frames.image(index)
        pixels = Predictor(trained.model, calibration.pixels, cells).predict(x)
        shape = (x.shape[-2] // 4, x.shape[-1] // 4)
        means.append(cells.spread(pixels.mean[0], shape).astype(np.float32))
        stds.append(cells.spread(pixels.std[0], shape).astype(np.float32))
        heads.append(counted_heads(crowd_set, index))
    roi = None if trained.roi is None else trained.roi.cpu().numpy()
    return Maps(np.stack(means), np.stack(stds), heads, roi)


def counted_heads(crowd_set: CrowdSet, index: int) -> npt.NDArray[np.float64]:
    """The heads of a frame that count, `(P, 2)` as x, y in cells."""
    points = crowd_set.frames[index].points
    return to_cells(points[heads_inside(points, crowd_set.shape(index), crowd_set.roi)])


class _Cells:
    """The readout for cells: those inside the region of interest, flat, `(N, M)`; others have no variance to fit."""

    def __init__(self, trained: Trained) -> None:
        self.trained = trained
        self.index = None if trained.roi is None else trained.roi.flatten().nonzero().flatten()

    def __call__(self, density: Tensor) -> Tensor:
        flat = self.trained.masked(density).flatten(1)
        return flat if self.index is None else flat[:, self.index.to(flat.device)]

    def with_count(self, density: Tensor) -> Tensor:
        """The cells, and the count last."""
        cells = self(density)
        return torch.cat([cells, cells.sum(1, keepdim=True)], 1)

    def spread(self, values: Tensor, shape: tuple[int, int]) -> npt.NDArray[np.float64]:
        """The map `(h, w)` with these values in the cells that count, and zeros elsewhere."""
        flat = values.detach().cpu().double()
        if self.index is not None:
            flat = torch.zeros(shape[0] * shape[1], dtype=torch.float64).index_copy(0, self.index.cpu(), flat)
        found: npt.NDArray[np.float64] = flat.reshape(shape).numpy()
        return found


class _Frames:
    """Frames of a set as batches of one: with their counts, or with the cells of their maps."""

    def __init__(self, trained: Trained, crowd_set: CrowdSet, indices: Sequence[int], cells: _Cells | None) -> None:
        self.crowd_set, self.indices, self.cells = crowd_set, indices, cells
        self.channels = trained.model.channels
        self.device = next(trained.model.parameters()).device

    def image(self, index: int) -> Tensor:
        """One frame, `(1, C, H, W)`."""
        return self.crowd_set.image(index, self.channels)[None].to(self.device)

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in self.indices:
            if self.cells is None:
                target = torch.tensor([float(self.crowd_set.count(index))])
            else:
                target = self.cells(self.crowd_set.density(index)[None].to(self.device)).cpu()
            yield self.image(index), target


def _calibrated_cells(
    trained: Trained, frames: _Frames, rates: Sequence[Rate], cells: _Cells, **settings: Any
) -> Calibration:
    with warnings.catch_warnings():
        # Where all channels of a cell are off no mask moves it; that is known of ReLU networks, and in the record.
        warnings.filterwarnings("ignore", "of .* validation values, some have zero variance", LatedropWarning)
        warnings.filterwarnings("ignore", "only .* validation rows", LatedropWarning)
        return calibrate(trained.model, frames, rates, readout=cells, per_output=False, **settings).calibration


def _check_set(trained: Trained, crowd_set: CrowdSet) -> None:
    enlarge = int(trained.about.get("enlarge", 1))
    if crowd_set.enlarge != enlarge:
        raise DataError(
            f"expected frames enlarged {enlarge} times, as the network was trained with; found {crowd_set.enlarge}. "
            f"Open the set with enlarge={enlarge}."
        )
    theirs = None if crowd_set.roi is None else roi_cells(crowd_set.roi)
    ours = None if trained.roi is None else trained.roi.cpu().numpy()
    same = ours is theirs if ours is None or theirs is None else np.array_equal(theirs, ours)
    if not same:
        said = ["none" if roi is None else f"{roi.shape[0]} x {roi.shape[1]} cells" for roi in (ours, theirs)]
        raise DataError(
            f"expected the network's region of interest ({said[0]}); found another in {crowd_set.name} ({said[1]}). "
            "Open the set that the network was trained for."
        )


def _roi_record(trained: Trained) -> dict[str, Any] | None:
    if trained.roi is None:
        return None
    cells = trained.roi.cpu().numpy().astype(np.uint8)
    return {"shape": list(cells.shape), "sha256": hashlib.sha256(cells.tobytes()).hexdigest()}


def _about(trained: Trained, crowd_set: CrowdSet, frames: int, maps: int, every: int) -> dict[str, Any]:
    from latedrop import __version__

    return {
        "set": crowd_set.name,
        "weights": trained.about.get("set"),
        "frames": {"count": frames, "cells": maps},
        "every": every,
        "enlarge": crowd_set.enlarge,
        "versions": {"latedrop": __version__, "torch": torch.__version__},
    }


def _some(indices: Sequence[int], most: int) -> list[int]:
    """At most so many, evenly spaced, from the first to the last."""
    at = np.unique(np.linspace(0, len(indices) - 1, min(most, len(indices))).round().astype(int))
    return [indices[i] for i in at]


def _checksum(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()

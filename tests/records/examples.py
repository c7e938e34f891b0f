"""A small record of every kind, made by real calls; `python tests/records/examples.py` writes them to `golden/`."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import latedrop
from latedrop.calibration.class_record import CLASSES
from latedrop.calibration.record import CALIBRATION
from latedrop.onnx_files.metadata import METADATA, Metadata
from latedrop.prediction.detector import DETECTOR
from latedrop.prediction.exporting import _record
from latedrop.records import Format
from latedrop.stored_tensors import inline
from latedrop.streams.stream import STREAM
from networks import mlp

GOLDEN = Path(__file__).parent / "golden"
KINDS: dict[str, Format[Any]] = {
    "terms": CALIBRATION,
    "rates": CALIBRATION,
    "per_site": CALIBRATION,
    "classes": CLASSES,
    "detector": DETECTOR,
    "stream": STREAM,
    "onnx": METADATA,
    "onnx_classes": METADATA,
}
"""The format of each golden file; "crowd" comes with the package for people counting."""
try:
    from latedrop_crowd.calibration.record import CROWD

    KINDS["crowd"] = CROWD
except ImportError:  # without scipy
    pass


def network(outputs: int = 1) -> nn.Module:
    return mlp(3, 6, 4, outputs)


def rows(count: int = 40, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))


def calibrated(outputs: int = 1, count: int = 40, **options: Any) -> latedrop.Predictor:
    model, x = network(outputs), rows(count)
    y = model(x).detach() + 0.1 * torch.sin(40 * x[:, :1])
    return latedrop.calibrate(model, (x, y), progress=False, **options)


def by_terms() -> latedrop.Predictor:
    terms = ["dropout", "leverage", "gradients", "neighbours", latedrop.terms.Size()]
    terms += [latedrop.terms.ErrorForest(trees=2)]
    method = latedrop.Terms(terms, mean="corrected")
    return calibrated(count=64, method=method, reference=rows(60, 1), target=latedrop.Standardized(1.0, 2.0))


def by_rates() -> latedrop.Predictor:
    x = rows(30, 2)
    held_out = x, network(2)(x).detach() + 0.1
    uq = calibrated(2, method=latedrop.Sampling([0.1, 0.3], draws=5)).conformal(held_out)
    return uq.scaled(uq.calibration.tradeoff()[3])


def classifier() -> Any:
    x = rows(60)
    task = latedrop.Classification(["a", "b", "c"])
    uq = latedrop.calibrate(network(3), (x, torch.arange(60) % 3), task=task, progress=False)
    return uq.conformal((rows(40, 3), torch.arange(40) % 3)).reject((rows(40, 4), torch.arange(40) % 3), risk=0.01)


def write_all(folder: Path) -> None:
    """Write a file of every kind."""
    uq, two, classes = by_terms(), by_rates(), classifier()
    CALIBRATION.write(folder / "terms.json", uq.calibration, inline)
    CALIBRATION.write(folder / "rates.json", two.calibration, inline)
    per_site = calibrated(method=latedrop.Propagation([{"2": 0.1, "4": 0.2}], floor=True)).calibration
    CALIBRATION.write(folder / "per_site.json", per_site, inline)
    CLASSES.write(folder / "classes.json", classes.calibration, inline)
    classes.detector(rows(50, 5), ["novelty", "entropy", "neighbours"]).save(folder / "detector.json")
    stream = uq.stream()
    for seed in range(4):
        stream.predict(rows(2, seed), ids=[f"row {seed}", seed])
        stream.update(torch.zeros(1, 1), ids=[seed])
    STREAM.write(folder / "stream.json", stream._state)
    METADATA.write(folder / "onnx.json", Metadata(_record(two.calibration, 0.9)))
    METADATA.write(folder / "onnx_classes.json", Metadata(_record(classes.calibration, 0.9)))
    write_crowd(folder / "crowd.json", uq.calibration, per_site)


def write_crowd(path: Path, count: latedrop.Calibration, pixels: latedrop.Calibration) -> None:
    from latedrop_crowd.calibration.recalibration import Recalibration
    from latedrop_crowd.calibration.record import READOUTS, CrowdCalibration, Region, Usual
    from latedrop_crowd.regions import Policy

    CrowdCalibration(
        count=replace(count, custom_readout=READOUTS["count"]),
        pixels=replace(pixels, custom_readout=READOUTS["pixels"]),
        policy=Policy(0.1, 0.5, 0.2, 3.0, "regions", 0.4, 2.0, 9, 7),
        fingerprint="f",
        roi=Region((18, 24), "a" * 64),
        about={"set": "scenes", "frames": {"count": 12}},
        usual=Usual((72, 96), 0.2, 0.8),
        recalibration=Recalibration(10.0, 1.0, 0.1, 4.0, 2.0, 9.0, 0.2, 0.01, 0.0, 8, 6.0, 3.0, 1.0, "line", 7.0),
    ).save(path)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    write_all(GOLDEN)

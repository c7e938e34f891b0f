"""Which architectures can be written as an ONNX file, how close it is to torch, how large, and how fast.

    python -m benchmarks.onnx_export                      # measure all
    python -m benchmarks.onnx_export --only BERT U-Net    # measure these, and keep what the JSON has of the others

Each is calibrated to first order and by draws, written, and run beside torch on the same rows, in changing order, with
one thread and with two. Closeness is the largest difference of mean and standard deviation, in standard deviations; the
median too, as single rows may lie at a jump of the gradient, where torch itself differs between batches.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

import latedrop
from benchmarks.timing import machine, markdown_table, medians, stored, turns_within, write
from latedrop.data.rows import tensors
from latedrop.dropout.sampling import own_output

if TYPE_CHECKING:
    from architectures import Architecture

WAYS: dict[str, dict[str, Any]] = {
    "first order": {"method": "linear"},
    "draws": {"method": latedrop.Sampling(rates=[0.1], draws=10)},
}
ROWS, SECONDS, THREADS = 16, 1.0, (1, 2)
FAST = ("MLP", "DataParallel", "TorchScript", "compile", "spectral", "orthogonal")  # the same network, or no network
LONG = ("ResNet-50", "EfficientNet", "Swin", "ConvNeXt", "DeepLab")  # more than a minute each to trace


def main() -> None:
    parser = argparse.ArgumentParser(description="Architectures as ONNX files.")
    parser.add_argument("--only", nargs="+", help="how their names begin")
    parser.add_argument("--threads", type=int, nargs="+", default=THREADS, help="numbers of threads to time")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    import onnxruntime

    from architectures import ARCHITECTURES, Architecture, images, missing
    from latedrop_crowd.mcnn import MCNN

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    record: dict[str, Any] = {"machine": machine(torch.device("cpu")), "rows": ROWS, "architectures": {}}
    record["machine"] |= {"onnxruntime": onnxruntime.__version__}
    if options.only:
        record["architectures"] = stored("onnx_cpu").get("architectures", {})
    counter = Architecture("MCNN, the sum of its map", "torch", MCNN, images(80, channels=1))
    for architecture in (*ARCHITECTURES, counter):
        wanted = options.only or [architecture.name]
        if not any(architecture.name.startswith(word) for word in wanted) or missing(architecture.library):
            continue
        if not options.only and any(word in architecture.name for word in (*FAST, *LONG)):
            continue
        record["architectures"][architecture.name] = {way: measured(architecture, way, options.threads) for way in WAYS}
        print(architecture.name, json.dumps(record["architectures"][architecture.name]), flush=True)
        write("onnx_cpu", record)


def measured(architecture: Architecture, way: str, threads: Sequence[int]) -> dict[str, Any]:
    """Size, closeness and speed; or why there is no file."""
    model, _ = architecture.make()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        x = architecture.inputs(ROWS)
    readout = _few_outputs(architecture, model, x)
    y = own_output(model, x, readout)
    noise = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)) * y.abs().mean()
    try:
        uq = latedrop.calibrate(model, (x, y + noise), readout=readout, progress=False, **WAYS[way])
        with tempfile.TemporaryDirectory() as folder:
            path = uq.to_onnx(Path(folder) / "model.onnx", x)
            return {"kilobytes": round(path.stat().st_size / 1024), **_beside(uq, path, x, threads)}
    except latedrop.LatedropError as error:
        return {"refused": str(error).partition("found one ")[2].partition(". Deploy")[0] or str(error)}


def _few_outputs(architecture: Architecture, model: torch.nn.Module, x: Any) -> Any:
    """The readout; of large outputs their sum, which takes one backward pass."""
    readout = architecture.readout
    if own_output(model, x, readout)[0].numel() <= 4:
        return readout

    def summed(output: Any) -> Tensor:
        value = readout(output) if callable(readout) else output if readout is None else output[readout]
        whole: Tensor = value.flatten(1).sum(1, keepdim=True)
        return whole

    return summed


def _beside(uq: Any, path: Path, x: Any, threads: Sequence[int]) -> dict[str, Any]:
    p = uq.predict(x)
    predictors = {count: latedrop.load_onnx(path, threads=count) for count in threads}
    predictor = predictors[threads[0]]
    names = [value.name for value in predictor.session.get_inputs()]
    given = dict(zip(names, (value.numpy() for value in tensors(x)), strict=True))
    answer = predictor.predict(given)
    std = p.std.numpy()
    off = {"mean": np.abs(answer.mean - p.mean.numpy()) / std, "std": np.abs(answer.std - std) / std}
    both = {f"{way}, {count}": _timed(way, count, uq, x, predictors[count], given)
            for count in threads for way in ("torch", "onnx")}  # fmt: skip
    times, rounds, _ = turns_within(both, repeats=9, seconds=SECONDS, device=torch.device("cpu"))
    return {
        "off": {name: float(value.max()) for name, value in off.items()},
        "median_off": {name: float(np.median(value)) for name, value in off.items()},
        "seconds": medians(times),
        "rounds": rounds,
    }


def _timed(way: str, threads: int, uq: Any, x: Any, predictor: Any, given: Any) -> Any:
    def run() -> Any:
        torch.set_num_threads(threads)
        return uq.predict(x) if way == "torch" else predictor.predict(given)

    return run


def markdown(record: dict[str, Any]) -> str:
    """The table of docs/onnx.md."""
    measured_ways = [way_record for ways in record["architectures"].values() for way_record in ways.values()]
    timed = {key for way_record in measured_ways for key in way_record.get("seconds", ())}
    threads = [count for count in THREADS if f"onnx, {count}" in timed]
    heads = ["architecture", "way", "file", "off, in std", "median off", "torch, ms"]
    heads += ["times faster", *(f"with {count} threads" for count in threads[1:])]
    rows = [
        [name, way, *_cells(way_record, threads)]
        for name, ways in record["architectures"].items()
        for way, way_record in ways.items()
    ]
    return markdown_table(heads, rows, 2)


def _cells(way_record: dict[str, Any], threads: Sequence[int]) -> list[str]:
    if "refused" in way_record:
        return [f"refused: {way_record['refused']}", *[""] * (3 + len(threads))]
    size, seconds = way_record["kilobytes"], way_record["seconds"]
    cells = [f"{size / 1024:.1f} MB" if size >= 1024 else f"{size} KB"]
    cells += [f"{max(way_record[name].values()):.0e}" for name in ("off", "median_off")]
    cells.append(f"{1000 * seconds['torch, 1']:.3g}")
    for count in threads:
        known = f"onnx, {count}" in seconds
        cells.append(f"{seconds[f'torch, {count}'] / seconds[f'onnx, {count}']:.2g}" if known else "")
    return cells


if __name__ == "__main__":
    main()

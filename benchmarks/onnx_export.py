"""Which architectures can be written as an ONNX file, how close it is to torch, how large, and how fast.

`python -m benchmarks.onnx_export` measures all, `--only BERT U-Net` those whose names begin so, and keeps the others.
Each is calibrated to first order and by draws, written, and run beside torch on the same rows, in changing order, with
one thread and with two. Differences of mean and standard deviation are in standard deviations: the largest, and the
median too, as single rows may lie at a jump of the gradient, where torch itself differs between batches.
"""

import argparse
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import latedrop
from benchmarks.timing import machine, markdown_table, medians, stored, turns_within, write
from latedrop.data.rows import tensors
from latedrop.dropout.sampling import own_output
from latedrop.network.network import part_of

WAYS: dict[str, Any] = {"first order": "linear", "draws": latedrop.Sampling(rates=[0.1], draws=10)}
ROWS, SECONDS, THREADS = 16, 1.0, (1, 2)
FAST = ("MLP", "DataParallel", "TorchScript", "compile", "spectral", "orthogonal")  # the same network, or no network
LONG = ("ResNet-50", "EfficientNet", "Swin", "ConvNeXt", "DeepLab")  # more than a minute each to trace


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.onnx_export")
    parser.add_argument("--only", nargs="+", help="how their names begin")
    only = parser.parse_args().only
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    import onnxruntime

    from architectures import ARCHITECTURES, Architecture, images, missing
    from latedrop_crowd.mcnn import MCNN

    warnings.simplefilter("ignore")
    record: dict[str, Any] = {"architectures": {}} | (stored("onnx_cpu") if only else {}) | {"rows": ROWS}
    record["machine"] = {**machine(torch.device("cpu")), "onnxruntime": onnxruntime.__version__}
    for each in (*ARCHITECTURES, Architecture("MCNN, the sum of its map", "torch", MCNN, images(80, channels=1))):
        wanted = each.name.startswith(tuple(only)) if only else not any(word in each.name for word in FAST + LONG)
        if wanted and not missing(each.library):
            record["architectures"][each.name] = {way: measured(each, method) for way, method in WAYS.items()}
            write("onnx_cpu", record)


def measured(architecture: Any, method: Any) -> dict[str, Any]:
    """Return size, differences and seconds; or why there is no file."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model, x, readout = architecture.make()[0], architecture.inputs(ROWS), architecture.readout
    if own_output(model, x, readout)[0].numel() > 4:  # the sum of large outputs takes one backward pass
        of, readout = readout, lambda output: part_of(output, of).flatten(1).sum(1, keepdim=True)
    y = own_output(model, x, readout)
    noise = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)) * y.abs().mean()
    try:
        uq = latedrop.calibrate(model, (x, y + noise), readout=readout, method=method, progress=False)
        with tempfile.TemporaryDirectory() as folder:
            path = uq.to_onnx(Path(folder) / "model.onnx", x)
            return {"kilobytes": round(path.stat().st_size / 1024), **_beside(uq, path, x)}
    except latedrop.LatedropError as error:
        return {"refused": str(error).partition("found one ")[2].partition(". Deploy")[0] or str(error)}


def _beside(uq: Any, path: Path, x: Any) -> dict[str, Any]:
    predictors, runs = {count: latedrop.load_onnx(path, threads=count) for count in THREADS}, {}
    names = [value.name for value in predictors[1].session.get_inputs()]
    given = dict(zip(names, (value.numpy() for value in tensors(x)), strict=True))
    p, answer = uq.predict(x), predictors[1].predict(given)
    std = p.std.numpy()
    off = {"mean": np.abs(answer.mean - p.mean.numpy()) / std, "std": np.abs(answer.std - std) / std}

    def run(predict: Any, rows: Any, threads: int) -> None:
        torch.set_num_threads(threads)
        predict(rows)

    for count, predictor in predictors.items():
        runs[f"torch, {count}"] = partial(run, uq.predict, x, count)
        runs[f"onnx, {count}"] = partial(run, predictor.predict, given, count)
    times, rounds, _ = turns_within(runs, repeats=9, seconds=SECONDS, device=torch.device("cpu"))
    most, median = ({name: float(of(value)) for name, value in off.items()} for of in (np.max, np.median))
    return {"off": most, "median_off": median, "seconds": medians(times), "rounds": rounds}


def _cells(row: dict[str, Any]) -> list[str]:
    if "refused" in row:
        return [f"refused: {row['refused']}", *[""] * 5]
    size, seconds = row["kilobytes"], row["seconds"]
    off = [f"{max(row[key].values()):.0e}" for key in ("off", "median_off")]
    ratios = [seconds.get(f"torch, {n}", np.nan) / seconds.get(f"onnx, {n}", 1) for n in THREADS]
    faster = ["" if np.isnan(ratio) else f"{ratio:.2g}" for ratio in ratios]
    return [
        f"{size / 1024:.1f} MB" if size >= 1024 else f"{size} KB",
        *off,
        f"{1000 * seconds['torch, 1']:.3g}",
        *faster,
    ]


def table(_: object = None) -> str:
    rows = []
    for name, ways in stored("onnx_cpu")["architectures"].items():
        rows += [[name, way, *_cells(row)] for way, row in ways.items()]
    heads = ["architecture", "way", "file", "off, in std", "median off", "torch, ms", "times faster", "with 2 threads"]
    return markdown_table(heads, rows, 2)


if __name__ == "__main__":
    main()

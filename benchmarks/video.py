"""People counting on video: frames per second of MCNN at 480 x 640 with 50 draws, and where the time goes.

    python -m benchmarks.video                                  # needs a CUDA device; JSON to benchmarks/results
    python -m benchmarks.video --precisions float16 --frames 8  # these only; the JSON keeps the others
    python -m benchmarks.video --tables                         # table and figure from the JSON alone

The masks are the same on every engine and in every precision, so that what half precision changes is seen draw by
draw. The floor of a frame is the larger of two times: its arithmetic at the rate of a large matrix product, and the
bytes that its layers must read and write at the rate of a large copy, both measured in the same run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.timing import RESULTS, in_turns, machine, write
from latedrop import Moments, find_sites, sample
from latedrop.crowd import load_weights, shipped

DRAWS, RATE, SIZE = 50, 0.01, (480, 640)
CHUNK = 25
PRECISIONS: dict[str, tuple[torch.dtype, bool]] = {
    "float32": (torch.float32, False),
    "tf32": (torch.float32, True),
    "bfloat16": (torch.bfloat16, True),
    "float16": (torch.float16, True),
}
ENGINES = ("auto", "compiled")
MEASURED = ("float16", "bfloat16", "tf32", "float32")
"""The precisions in the order in which they are measured: a run that is cut short has the quick ones."""
IMAGES = Path(__file__).parents[1] / "docs" / "images"
AIM = 150


def main() -> None:
    parser = argparse.ArgumentParser(description="Frames per second of a people counter with 50 draws.")
    parser.add_argument("--tables", action="store_true", help="table and figure from the JSON; measure nothing")
    parser.add_argument("--frames", type=int, nargs="+", help="frames that run at once; 1 and 8")
    parser.add_argument("--precisions", nargs="+", choices=list(PRECISIONS), help="all four, if not given")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    if options.tables:
        record = json.loads((RESULTS / "video_gpu.json").read_text(encoding="utf-8"))
        print(markdown(record))
        print(figure(record))
        return
    if not torch.cuda.is_available():
        raise SystemExit("expected a CUDA device; torch finds none.")
    device = torch.device("cuda")
    torch.backends.cudnn.benchmark = True
    record: dict[str, Any] = {"machine": machine(device), "draws": DRAWS, "rate": RATE, "size": list(SIZE), "rows": []}
    if options.frames or options.precisions:
        record["rows"] = kept_rows(RESULTS / "video_gpu.json", record)
    record["floor"] = floor(device)
    for frames in options.frames or (1, 8):
        expected = reference(frames, device)
        for precision in [name for name in MEASURED if name in (options.precisions or PRECISIONS)]:
            rows = measure(precision, frames, device, options.repeats, expected)
            record["rows"] = merged(record["rows"], rows)
            write("video_gpu", record)
            print(json.dumps(rows), flush=True)
    print(markdown(record))


def kept_rows(path: Path, record: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of an earlier run; none where the machine, its versions or the task were others."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    same = all(known.get(key) == record[key] for key in ("machine", "draws", "rate", "size"))
    return list(known["rows"]) if same else []


def merged(known: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Old and new rows, the new ones instead of old ones of the same kind; by frames, then precision, then engine."""
    rows = {(row["frames"], row["precision"], row["engine"]): row for row in (*known, *found)}
    names = list(PRECISIONS)
    return [rows[key] for key in sorted(rows, key=lambda k: (k[0], names.index(k[1]), ENGINES.index(k[2])))]


def count(density: Tensor) -> Tensor:
    """People in the frame; a sum of half precision would be rough."""
    return density.float().sum((1, 2, 3))


def network(dtype: torch.dtype, device: torch.device) -> nn.Module:
    model = load_weights(shipped("mall")).model.to(device, dtype)
    return model.to(memory_format=torch.channels_last).eval().requires_grad_(False)


def drawn(precision: str, frames: int, device: torch.device) -> tuple[nn.Module, Tensor, partial[Moments]]:
    """The network and the frames in this precision, and what samples the count."""
    dtype, fast = PRECISIONS[precision]
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = fast
    model = network(dtype, device)
    x = torch.rand(frames, 1, *SIZE, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    x = x.to(memory_format=torch.channels_last)
    chunk = min(DRAWS, max(1, 8 * CHUNK // frames))
    return model, x, partial(sample, model, x, RATE, DRAWS, sites=find_sites(model, x), readout=count, chunk=chunk)


def reference(frames: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Means and standard deviations of the counts in float32."""
    _, _, run = drawn("float32", frames, device)
    moments = run()
    return moments.mean, moments.variance.sqrt()


def measure(
    precision: str, frames: int, device: torch.device, repeats: int, expected: tuple[Tensor, Tensor]
) -> list[dict[str, Any]]:
    """Plain passes, and both engines; counts and deviations beside those that are expected."""
    model, x, run = drawn(precision, frames, device)
    many = x.repeat(max(1, 64 // frames), 1, 1, 1)

    def plain() -> None:
        with torch.no_grad():
            model(many)

    engines = ENGINES[:1] if precision == "float32" else ENGINES
    times = in_turns(
        {"plain": plain, **{engine: partial(run, engine=engine) for engine in engines}}, repeats=repeats, device=device
    )
    whole = times["plain"] / len(many) * frames * DRAWS
    mean, std = expected
    rows = []
    for engine in engines:
        torch.cuda.reset_peak_memory_stats(device)
        moments = run(engine=engine)
        rows.append(
            {
                "precision": precision,
                "engine": engine,
                "frames": frames,
                "seconds": times[engine],
                "frames_per_second": frames / times[engine],
                "plain_multiple": times[engine] / whole,
                "bytes": torch.cuda.max_memory_allocated(device),
                "mean_off_in_std": float(((moments.mean - mean).abs() / std).mean()),
                "std_ratio": float((moments.variance.sqrt() / std).mean()),
            }
        )
    return rows


def floor(device: torch.device) -> dict[str, Any]:
    """What one frame must compute and move, and the ceilings of this device."""
    model = network(torch.float32, device)
    x = torch.rand(1, 1, *SIZE, device=device)
    prefix = sum(_flops(column[:1], x) for column in model.columns)
    total = _flops(model, x)
    moved = [0]

    def note(layer: nn.Module, args: Any, output: Tensor) -> None:
        if isinstance(layer, (nn.Conv2d, nn.MaxPool2d)):
            moved[0] += args[0].numel() + output.numel()

    after = [layer for column in model.columns for layer in list(column)[3:]] + [model.fuse]
    handles = [layer.register_forward_hook(note) for layer in after]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    flops = prefix + DRAWS * (total - prefix)
    ceilings = {name: _ceiling(dtype, device) for name, dtype in (("tf32", torch.float32), ("float16", torch.float16))}
    big = torch.empty(2**29, device=device)
    copy = in_turns({"copy": lambda: big.clone()}, repeats=5, device=device)["copy"]
    return {
        "flops_of_a_pass": total,
        "flops_before_the_sites": prefix,
        "flops_of_a_frame": flops,
        "values_moved_in_a_draw": moved[0],
        "product_flops_per_second": ceilings,
        "copy_bytes_per_second": 2 * big.numel() * 4 / copy,
    }


def floors(record: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Seconds of a frame by arithmetic and by bytes, for the precisions with a measured ceiling."""
    found = record["floor"]
    sizes = {"tf32": 4, "float16": 2}
    return {
        name: (
            found["flops_of_a_frame"] / rate,
            record["draws"] * found["values_moved_in_a_draw"] * sizes[name] / found["copy_bytes_per_second"],
        )
        for name, rate in found["product_flops_per_second"].items()
    }


def markdown(record: dict[str, Any]) -> str:
    lines = [
        "| precision | engine | frames at once | frames per second | time / (plain x 50) | count off, in std | std |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row['precision']} | {row['engine']} | {row['frames']} | {row['frames_per_second']:.0f} | "
        f"{row['plain_multiple']:.2f} | {row['mean_off_in_std']:.3f} | {row['std_ratio']:.3f}x |"
        for row in record["rows"]
    ]
    lines += ["", "| precision | arithmetic, ms a frame | bytes, ms a frame | floor, frames per second |"]
    lines += ["| --- | ---: | ---: | ---: |"]
    lines += [
        f"| {name} | {1e3 * a:.2f} | {1e3 * b:.2f} | {1 / max(a, b):.0f} |" for name, (a, b) in floors(record).items()
    ]
    return "\n".join(lines)


def figure(record: dict[str, Any]) -> Path:
    """Frames per second by precision and engine."""
    import matplotlib.pyplot as plt

    plot, axes = plt.subplots(figsize=(7.2, 3.8), layout="constrained")
    styles = {("auto", 1): ("#56B4E9", "auto, 1 frame"), ("auto", 8): ("#0072B2", "auto, 8 frames")}
    styles |= {("compiled", 1): ("#E69F00", "compiled, 1 frame"), ("compiled", 8): ("#D55E00", "compiled, 8 frames")}
    names = list(PRECISIONS)
    for place, (key, (colour, label)) in enumerate(styles.items()):
        rows = [row for row in record["rows"] if (row["engine"], row["frames"]) == key]
        where = [names.index(row["precision"]) + 0.2 * (place - 1.5) for row in rows]
        bars = axes.bar(where, [row["frames_per_second"] for row in rows], 0.19, color=colour, label=label)
        for number in axes.bar_label(bars, fmt="%.0f", fontsize=8, padding=1.5, zorder=4):
            number.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    axes.axhline(AIM, color="black", linestyle="--", linewidth=1, label=f"aim: {AIM}")
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel="frames per second", xlabel="precision of weights and activations")
    axes.set_ylim(0, 1.25 * max(row["frames_per_second"] for row in record["rows"]))
    axes.set_title(f"MCNN, 480 x 640, {record['draws']} draws, {record['machine']['device']}", fontsize=10)
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper left")
    IMAGES.mkdir(parents=True, exist_ok=True)
    plot.savefig(IMAGES / "video_gpu.png", dpi=150)
    plt.close(plot)
    return IMAGES / "video_gpu.png"


def _flops(module: nn.Module, x: Tensor) -> int:
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        module(x)
    return counter.get_total_flops()


def _ceiling(dtype: torch.dtype, device: torch.device) -> float:
    """Operations per second of a large matrix product."""
    size = 8192
    torch.backends.cuda.matmul.allow_tf32 = True
    a = torch.randn(size, size, device=device, dtype=dtype)
    return 2 * size**3 / in_turns({"product": lambda: a @ a}, repeats=5, device=device)["product"]


if __name__ == "__main__":
    main()

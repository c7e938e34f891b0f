"""First-order variance against sampling: what it costs, and how well it agrees.

    python -m benchmarks.linear                  # measure on the GPU if there is one, else on the CPU
    python -m benchmarks.linear --figures        # draw from the JSON alone

Time is a multiple of one plain forward pass of the same batch, in the same run. Agreement is the rank correlation over
examples with a reference of 5000 draws at rate 0.01, and the ratio of variances against the rate.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.nets import Net, nets
from benchmarks.timing import RESULTS, in_turns, machine, write
from latedrop import find_sites, linearize, sample
from latedrop.devices import chosen_device

RATE = 0.01
REFERENCE = 5000
DRAWS = (10, 100, 1000)
RATES = (0.0005, 0.002, 0.01, 0.05, 0.1, 0.2, 0.35, 0.5)
IMAGES = Path(__file__).parents[1] / "docs" / "images"


def main() -> None:
    parser = argparse.ArgumentParser(description="First-order variance against sampling.")
    parser.add_argument("--figures", action="store_true", help="draw from the JSON that is there; measure nothing")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--draws", type=int, nargs="+", default=list(DRAWS), help="draws to time")
    parser.add_argument("--only-cost", action="store_true", help="leave out the agreement, which is slow on a CPU")
    parser.add_argument("--nets", nargs="+", help="measure only these and keep what the JSON has of the others")
    options = parser.parse_args()
    if options.figures:
        figures()
        return
    device = chosen_device("auto")
    kind = "gpu" if device.type == "cuda" else "cpu"
    record: dict[str, Any] = {"machine": machine(device), "rate": RATE, "reference_draws": REFERENCE, "nets": {}}
    path = RESULTS / f"linear_{kind}.json"
    if options.nets and path.exists():
        record["nets"] = json.loads(path.read_text(encoding="utf-8"))["nets"]
    for large, small in zip(nets(kind), nets("small"), strict=True):
        if options.nets and large.name not in options.nets:
            continue
        found = cost(large, device, options.draws, options.repeats)
        if not options.only_cost:
            found |= agreement(small, device)
        record["nets"][large.name] = found
        print(table({large.name: found}), flush=True)
        write(f"linear_{kind}", record)


def cost(net: Net, device: torch.device, draws: list[int], repeats: int) -> dict[str, Any]:
    """Seconds of one plain pass, and everything else as multiples of it."""
    model = net.trained(device)
    x = net.task(net.rows, torch.Generator().manual_seed(0))[0].to(device)
    sites = find_sites(model, x[:2])

    def plain() -> Tensor:
        with torch.no_grad():
            return model(x)

    candidates = {"plain": plain, "linear": partial(linearize, model, x, sites, net.readout)}
    for count in draws:
        candidates[f"sample_{count}"] = partial(sample, model, x, RATE, count, sites=sites, readout=net.readout)
    quick = in_turns(
        {k: v for k, v in candidates.items() if k in ("plain", "linear", "sample_10")}, repeats=repeats, device=device
    )
    slow = in_turns(
        {"plain": plain, **{k: v for k, v in candidates.items() if k not in quick}}, repeats=1, device=device
    )
    ratios = {name: seconds / quick["plain"] for name, seconds in quick.items() if name != "plain"}
    ratios |= {name: seconds / slow["plain"] for name, seconds in slow.items() if name != "plain"}
    return {"rows": net.rows, "sites": len(sites), "plain_seconds": quick["plain"], "multiples": ratios}


def agreement(net: Net, device: torch.device) -> dict[str, Any]:
    """Rank correlation with a long sample, for `linearize` and for shorter samples; variance ratio by rate."""
    model = net.trained(device)
    x = net.task(net.rows, torch.Generator().manual_seed(5))[0].to(device)
    sites = find_sites(model, x[:2])
    result = linearize(model, x, sites, net.readout)
    first = result.variance_by_site.sum(-1).flatten()
    reference = sample(model, x, RATE, REFERENCE, seed=1, sites=sites, readout=net.readout).variance.flatten()
    correlations = {"linear": spearman(first, reference)}
    for count in DRAWS:
        drawn = sample(model, x, RATE, count, seed=2, sites=sites, readout=net.readout).variance.flatten()
        correlations[f"sample_{count}"] = spearman(drawn, reference)
    ratios = {}
    for rate in RATES:
        drawn = sample(model, x, rate, 2000, seed=3, sites=sites, readout=net.readout).variance.flatten()
        ratio = drawn / (first * rate / (1 - rate))
        ratios[str(rate)] = [float(ratio.quantile(q)) for q in (0.1, 0.5, 0.9)]
    return {"examples": net.rows, "rank_correlation": correlations, "ratio_by_rate": ratios}


def spearman(a: Tensor, b: Tensor) -> float:
    """Rank correlation of two flat tensors."""
    ranks = torch.stack([t.argsort().argsort().double() for t in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])


def table(found: dict[str, Any]) -> str:
    lines = []
    for name, row in found.items():
        times = "  ".join(f"{key} {value:8.2f}x" for key, value in row["multiples"].items())
        lines.append(f"{name:13s} time:  {times}")
        if "rank_correlation" in row:
            ranks = "  ".join(f"{key} {value:.3f}" for key, value in row["rank_correlation"].items())
            lines.append(f"{'':13s} ranks: {ranks}")
    return "\n".join(lines)


def markdown() -> str:
    """The table of docs/variance.md, from the committed results."""
    lines = [
        "| network | on | linear | 10 draws | 100 draws | 1000 draws | 100 draws / linear |",
        "| --- " * 2 + "| ---: " * 5 + "|",
    ]
    for kind, name in (("cpu", "CPU"), ("gpu", "GPU")):
        record = json.loads((RESULTS / f"linear_{kind}.json").read_text(encoding="utf-8"))
        for net, row in record["nets"].items():
            times = row["multiples"]
            cells = [f"{times[key]:.1f}" for key in ("linear", "sample_10")]
            cells += [f"{times[key]:.0f}" for key in ("sample_100", "sample_1000")]
            cells.append(f"{times['sample_100'] / times['linear']:.0f}")
            lines.append(f"| {net.replace('_', ' ')} | {name} | {' | '.join(cells)} |")
    record = json.loads((RESULTS / "linear_gpu.json").read_text(encoding="utf-8"))
    lines += ["", "| network | linear | 10 draws | 100 draws | 1000 draws |", "| --- | ---: | ---: | ---: | ---: |"]
    for net, row in record["nets"].items():
        lines.append(
            f"| {net.replace('_', ' ')} | {' | '.join(f'{v:.3f}' for v in row['rank_correlation'].values())} |"
        )
    return "\n".join(lines)


def figures() -> None:
    """Sampled variance over first-order variance, against the rate."""
    import matplotlib.pyplot as plt

    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("linear_*.json"))]
    record = next(r for r in records if all("ratio_by_rate" in row for row in r["nets"].values()))
    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    styles = zip(("#0072B2", "#D55E00", "#009E73", "#CC79A7"), ("o", "s", "^", "D"), strict=True)
    for (name, row), (colour, marker) in zip(record["nets"].items(), styles, strict=True):
        rates = [float(rate) for rate in row["ratio_by_rate"]]
        low, middle, high = zip(*row["ratio_by_rate"].values(), strict=True)
        axes.plot(rates, middle, color=colour, marker=marker, label=name.replace("_", " "))
        axes.fill_between(rates, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.axhline(1, color="black", linewidth=1, linestyle="--", label="first order")
    axes.set(xscale="log", yscale="log", xlabel="dropout rate", ylabel="sampled variance / first-order variance")
    axes.set_yticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
    axes.set_xticks([0.001, 0.01, 0.1, 0.5], ["0.001", "0.01", "0.1", "0.5"])
    axes.minorticks_off()
    axes.set_title("Sampled variance, 2000 draws: median over examples, 10-90 % band", fontsize=10)
    axes.legend(frameon=False)
    IMAGES.mkdir(parents=True, exist_ok=True)
    figure.savefig(IMAGES / "linear_by_rate.png", dpi=150)
    print(IMAGES / "linear_by_rate.png")
    print(markdown())


if __name__ == "__main__":
    main()

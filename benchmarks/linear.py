"""How well first-order variance agrees with sampling: `python -m benchmarks.linear`, `--figure` for the picture alone.

On four briefly trained networks: the rank correlation over examples with a reference of 5000 draws at rate 0.01, of
first order and of shorter samples, and the ratio of variances against the rate. `benchmarks.speed` has the cost.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.nets import Net, small_nets
from benchmarks.timing import machine, markdown_table, stored, write
from latedrop import find_sites, linearize, plots, sample
from latedrop.devices import chosen_device
from latedrop.metrics import rank_correlation

RATE, REFERENCE, DRAWS = 0.01, 5000, (10, 100, 1000)
RATES = (0.0005, 0.002, 0.01, 0.05, 0.1, 0.2, 0.35, 0.5)
IMAGE = Path(__file__).parents[1] / "docs" / "images" / "linear_by_rate.png"


def agreement(net: Net, device: torch.device) -> dict[str, Any]:
    """Return rank correlations with a long sample, and quantiles of the ratio of variances by rate."""
    model = net.trained(device)
    x = net.task(net.rows, torch.Generator().manual_seed(5))[0].to(device)
    sites = find_sites(model, x[:2])
    first = linearize(model, x, sites, net.readout).variance_by_site.sum(-1).flatten()

    def drawn(rate: float, draws: int, seed: int) -> Tensor:
        return sample(model, x, rate, draws, seed=seed, sites=sites, readout=net.readout).variance.flatten()

    reference = drawn(RATE, REFERENCE, 1)
    variances = {"linear": first} | {f"sample_{count}": drawn(RATE, count, 2) for count in DRAWS}
    ratios = {}
    for rate in RATES:
        ratio = drawn(rate, 2000, 3) / (first * rate / (1 - rate))
        ratios[str(rate)] = [float(ratio.quantile(q)) for q in (0.1, 0.5, 0.9)]
    return {
        "examples": net.rows,
        "rank_correlation": {
            name: float(rank_correlation(torch.zeros_like(reference), variance, reference))
            for name, variance in variances.items()
        },
        "ratio_by_rate": ratios,
    }


def table(record: dict[str, Any]) -> str:
    """Return the rank correlations of each network."""
    nets = {net.replace("_", " "): row["rank_correlation"].values() for net, row in record["nets"].items()}
    rows = [[net, *(f"{value:.3f}" for value in values)] for net, values in nets.items()]
    return markdown_table(["network", "linear", "10 draws", "100 draws", "1000 draws"], rows)


def figure(record: dict[str, Any]) -> None:
    """Draw sampled variance over first-order variance, against the rate."""
    drawing = plots.new_figure(7.2, 4.2)
    axes = drawing.subplots()
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
    drawing.savefig(IMAGE, dpi=150)


if __name__ == "__main__":
    if "--figure" not in sys.argv:
        device = chosen_device("auto")
        record = {"machine": machine(device), "rate": RATE, "reference_draws": REFERENCE}
        write("linear", record | {"nets": {net.name: agreement(net, device) for net in small_nets()}})
    figure(stored("linear"))

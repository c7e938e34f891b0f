"""How well first-order variance agrees with sampling: `python -m benchmarks.linear`

On four briefly trained networks: the rank correlation over examples with a reference of 5000 draws at rate 0.01, of
first order and of shorter samples, and the ratio of variances against the rate. `benchmarks.speed` has the cost.
"""

from typing import Any

import torch
from torch import Tensor

from benchmarks.nets import Net, small_nets
from benchmarks.timing import machine, markdown_table, write
from latedrop import find_sites, linearize, sample
from latedrop.devices import chosen_device
from latedrop.metrics import rank_correlation

RATE, REFERENCE, DRAWS = 0.01, 5000, (10, 100, 1000)
RATES = (0.0005, 0.002, 0.01, 0.05, 0.1, 0.2, 0.35, 0.5)


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
    nets = {net.replace("_", " "): row["rank_correlation"].values() for net, row in record["nets"].items()}
    rows = [[net, *(f"{value:.3f}" for value in values)] for net, values in nets.items()]
    return markdown_table(["network", "linear", "10 draws", "100 draws", "1000 draws"], rows)


if __name__ == "__main__":
    device = chosen_device("auto")
    record = {"machine": machine(device), "rate": RATE, "reference_draws": REFERENCE}
    write("linear", record | {"nets": {net.name: agreement(net, device) for net in small_nets()}})

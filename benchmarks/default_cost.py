"""What the default of `calibrate` costs: `python -m benchmarks.default_cost`.

The time of a whole calibration of some rows, and of a prediction, as multiples of plain passes over the same rows, in
one run and in changing order. Rows that the probe runs and the cross-validation of the fit are part of it.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import torch

from benchmarks.nets import Net, nets
from benchmarks.timing import in_turns, machine, write
from latedrop import Batches, LatedropWarning, calibrate
from latedrop.devices import chosen_device

BATCH = 64


def main() -> None:
    parser = argparse.ArgumentParser(description="What the default of calibrate costs.")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--nets", nargs="+", help="these only")
    options = parser.parse_args()
    device = chosen_device("auto")
    kind = "gpu" if device.type == "cuda" else "cpu"
    record: dict[str, Any] = {"machine": machine(device), "rows": options.rows, "batch": BATCH, "nets": {}}
    for net in nets("cpu"):
        if options.nets and net.name not in options.nets:
            continue
        record["nets"][net.name] = cost(net, device, options.rows, options.repeats)
        write(f"default_cost_{kind}", record)
    print(markdown(record))


def cost(net: Net, device: torch.device, rows: int, repeats: int) -> dict[str, float]:
    """Seconds of plain passes, of a calibration and of a prediction."""
    model, generator = net.trained(device), torch.Generator().manual_seed(2)
    batch = max(1, min(BATCH, net.rows))
    x = net.task(min(rows, 32 * net.rows), generator)[0].to(device)
    with torch.no_grad():
        own = torch.cat([model(part) if net.readout is None else net.readout(model(part)) for part in x.split(batch)])
    target = own + own.std() * torch.randn(own.shape, device=device)
    options: dict[str, Any] = {"readout": net.readout, "batches": Batches(batch), "progress": False}

    def plain() -> None:
        with torch.no_grad():
            for part in x.split(batch):
                model(part)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LatedropWarning)
        uq = calibrate(model, (x, target), **options)
        candidates = {
            "plain": plain,
            "calibrate": lambda: calibrate(model, (x, target), **options),
            "predict": lambda: uq.predict(x),
        }
        return in_turns(candidates, repeats=repeats, device=device)


def markdown(record: dict[str, Any]) -> str:
    """Multiples of the plain passes."""
    lines = ["| network | plain passes [ms] | calibrate | predict |", "| --- | ---: | ---: | ---: |"]
    for name, found in record["nets"].items():
        ratios = " | ".join(f"{found[part] / found['plain']:.1f}" for part in ("calibrate", "predict"))
        lines.append(f"| {name} | {1000 * found['plain']:.3g} | {ratios} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

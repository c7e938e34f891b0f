"""What a calibration shares between its rates, and what masks cost.

    python -m benchmarks.costs                # the CPU, or the GPU where there is one; JSON to benchmarks/results
    python -m benchmarks.costs --tables       # from the JSON alone

Rates: the 15 of the paper in one calibration, against one rate, and against 15 calls of `sample`; 100 draws each, fewer
where a network is slow, so that two rounds fit the time that it gets. Masks: the time to make all masks of all draws,
as a share of sampling, and against uniform numbers from torch's own generator, which the masks of earlier versions were
cut from.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.nets import speed_nets
from benchmarks.timing import RESULTS, machine, medians, seconds_of, turns_within, write
from latedrop import Network, Site, find_sites, sample
from latedrop.calibration.methods import PAPER_RATES
from latedrop.devices import chosen_device
from latedrop.dropout.chunks import fitting_chunk
from latedrop.dropout.masks import masks
from latedrop.dropout.options import Sampling
from latedrop.dropout.sampling import sample_rates

DRAWS: dict[str, dict[str, int]] = {"cpu": {"mcnn": 4, "residual_cnn": 20, "transformer": 20}, "gpu": {}}
FEWEST = 4
RATE = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description="What rates share, and what masks cost.")
    parser.add_argument("--tables", action="store_true", help="from the JSON that is there; measure nothing")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of each network, at most")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--budget", type=float, help="seconds for the rounds of a network; 120, on a GPU 4")
    parser.add_argument("--nets", nargs="+", help="measure only these and keep what the JSON has of the others")
    options = parser.parse_args()
    if options.tables:
        for path in sorted(RESULTS.glob("costs_*.json")):
            print(markdown(json.loads(path.read_text(encoding="utf-8"))))
        return
    device = chosen_device(options.device)
    kind = "gpu" if device.type == "cuda" else "cpu"
    budget = (4.0 if kind == "gpu" else 120.0) if options.budget is None else options.budget
    path = RESULTS / f"costs_{kind}.json"
    record: dict[str, Any] = {"machine": machine(device), "rates": len(PAPER_RATES), "nets": {}}
    if options.nets and path.exists():
        record["nets"] = json.loads(path.read_text(encoding="utf-8"))["nets"]
    nets = speed_nets(kind)
    for net in nets:
        if options.nets and net.name not in options.nets:
            continue
        model = net.made(device)
        x, _ = net.data(net.batches.get("large", 1), device)
        draws = DRAWS[kind].get(net.name, 100)
        known = record["nets"] | {net.name: measure(model, x, draws, device, options.repeats, budget)}
        record["nets"] = {each.name: known[each.name] for each in nets if each.name in known}
        write(f"costs_{kind}", record)
    print(markdown(record))


def measure(
    model: nn.Module, x: Tensor, draws: int, device: torch.device, repeats: int, budget: float
) -> dict[str, Any]:
    """Everything about one network, with `draws` draws or as many fewer as `budget` seconds ask for."""
    sites = find_sites(model, x[:3])
    rates = list(PAPER_RATES)
    # A round is about 32 calls of one rate: 15 apart, 15 together, one alone, and the masks.

    def at(wanted: list[float], count: int) -> Any:
        return sample_rates(model, x, wanted, sites, Sampling(count))

    draws = fitting_draws(partial(at, [RATE]), draws, budget / 64, device)
    found, rounds, failed = turns_within(
        {
            "one": partial(at, [RATE], draws),
            "all": partial(at, rates, draws),
            "apart": lambda: [sample(model, x, rate, draws, sites=sites) for rate in rates],
            "masks": partial(all_masks, sites, draws, fitting_chunk(Network(model), x, sites, draws), x),
            "uniforms": partial(all_uniforms, sites, draws, device),
        },
        repeats=repeats,
        seconds=budget,
        device=device,
    )
    if failed:
        raise SystemExit(f"expected all of it to run; failed: {failed}.")
    times = medians(found)
    return {
        "rows": len(x),
        "draws": draws,
        "rounds": rounds,
        "one_seconds": times["one"],
        "all_over_one": times["all"] / times["one"],
        "apart_over_one": times["apart"] / times["one"],
        "mask_share": times["masks"] / times["one"],
        "uniform_share": times["uniforms"] / times["one"],
    }


def fitting_draws(run: Callable[[int], Any], draws: int, seconds: float, device: torch.device) -> int:
    """`draws`, halved until so many take no longer than `seconds`, by how long a few take; `FEWEST` at least."""
    few = min(draws, FEWEST)
    run(few)
    each = seconds_of(partial(run, few), device) / few
    while draws // 2 >= FEWEST and draws * each > seconds:
        draws //= 2
    run(draws)  # the warm-up of what is measured
    return draws


def all_masks(sites: Sequence[Site], draws: int, chunk: int, like: Tensor) -> None:
    """Every mask of every draw, as sampling makes them."""
    for start in range(0, draws, chunk):
        for site in sites:
            for call in range(site.calls):
                masks(0, range(start, min(start + chunk, draws)), site.name, call, site.units, RATE, like)


def all_uniforms(sites: Sequence[Site], draws: int, device: torch.device) -> None:
    """As many masks from uniform numbers of a generator that is seeded for each draw and site."""
    generator = torch.Generator(device)
    for site in sites:
        for call in range(site.calls * draws):
            generator.manual_seed(call)
            numbers = torch.empty(site.units, device=device).uniform_(generator=generator)
            (numbers >= RATE).float() / (1 - RATE)


def markdown(record: dict[str, Any]) -> str:
    lines = [
        "| network | rows | draws | 15 rates / one | 15 calls / one | masks, share | torch's numbers instead |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {name.replace('_', ' ')} | {row['rows']} | {row['draws']} | {row['all_over_one']:.1f} | "
        f"{row['apart_over_one']:.1f} | {row['mask_share']:.0%} | {row['uniform_share']:.0%} |"
        for name, row in record["nets"].items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()

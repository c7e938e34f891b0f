"""Time and memory of draws, beside other libraries: same network, same draws, one run.

    python -m benchmarks.speed                                   # the CPU's set, or the GPU's where there is one
    python -m benchmarks.speed --nets mcnn                       # these only; the JSON keeps the others

Time is a multiple of `plain x T`: T = 50 deterministic forward passes of the same rows, run at the batch size at which
the network takes the least time per row. Memory is the peak of what a call allocates. Tests compare the answers. A
ratio's interval is that of its median over the rounds, by order statistics. A candidate whose first call, by which
memory is measured, takes too long gets no rounds: that call is its time.
"""

import argparse
import gc
import os
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import timing
from benchmarks.nets import Net, speed_nets
from benchmarks.peers import LIBRARIES, PEERS, Case, Run, not_installed, twin, versions_of
from latedrop import Network, Site, find_sites, sample
from latedrop.devices import chosen_device

RATE, DRAWS = 0.05, 50
LABELS = {
    "torch_uncertainty_batch": "torch-uncertainty, on_batch",
    "torch_uncertainty_loop": "torch-uncertainty, loop",
    "baal": "baal",
    "baal_cached": "baal, cached",
}
"""The peers, and what they are called on pages."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws beside other libraries.")
    parser.add_argument("--nets", nargs="+", choices=[net.name for net in speed_nets("cpu")], help="only these")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--seconds", type=float, help="for the rounds of a network and batch; 4 on a GPU, 10 on a CPU")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    device = chosen_device(options.device)
    kind = "gpu" if device.type == "cuda" else "cpu"
    nets = {net.name: net for net in speed_nets(kind)}
    measured_nets = timing.stored(f"speed_{kind}").get("nets", {}) if options.nets else {}
    plan = Plan.of(device)
    plan = plan if options.seconds is None else plan._replace(budget=options.seconds)
    for name in options.nets or nets:
        batches = nets[name].batches.items()
        measured_nets[name] = {size: measure(nets[name], rows, device, plan) for size, rows in batches}
        ordered = {name: measured_nets[name] for name in nets if name in measured_nets}
        timing.write(f"speed_{kind}", {"kind": kind, "rate": RATE, "draws": DRAWS, "nets": ordered})
        print(table(), flush=True)


class Plan(NamedTuple):
    """How much time and memory a measurement may take: `budget` seconds for all rounds, `cap` for one call."""

    budget: float
    cap: float
    bytes: float
    repeats: int = 5

    @classmethod
    def of(cls, device: torch.device) -> "Plan":
        if device.type == "cuda":
            return cls(4, 3, 0.8 * torch.cuda.get_device_properties(device).total_memory)
        return cls(10, 20, 0.4 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def measure(net: Net, rows: int, device: torch.device, plan: Plan) -> dict[str, Any]:
    model, x = net.built(device).eval().requires_grad_(False), net.inputs(rows, device)  # untrained: time is the same
    sites = find_sites(model, x[:3])
    torch.manual_seed(0)
    pass_bytes, by_multiple = passes(model, x, device, plan)
    case = Case(model, twin(model, sites, RATE), x)
    return {
        "machine": timing.machine(device) | {"peers": versions_of(LIBRARIES.values())},
        "rows": rows,
        "sites": len(sites),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "plain_bytes": pass_bytes,
        "plain_seconds_per_row": {str(multiple): _short(value) for multiple, value in by_multiple.items()},
        **compare(case, sites, min(by_multiple, key=by_multiple.__getitem__), device, plan),
    }


def compare(case: Case, sites: Sequence[Site], multiple: int, device: torch.device, plan: Plan) -> dict[str, Any]:
    """Measure all candidates beside plain passes over `multiple` times the rows."""
    entries, runs = {}, {}
    for name, prepare in candidates(case, sites, device).items():
        if not_installed(name):
            entries[name] = {"status": "not installed"}
            continue
        _free(device)
        try:
            run, prepared = timing.timed(prepare, device)
            (_, first), most = timing.peak_bytes(partial(timing.timed, run, device), device)
        except Exception as error:
            entries[name] = {"status": timing.first_line(error)}
            continue
        entries[name] = {"bytes": most, "prepare_seconds": _short(prepared), "first_seconds": _short(first)}
        if first > plan.cap and name != "latedrop_compiled":
            entries[name] |= {"seconds": first, "rounds": 1}
        else:
            runs[name] = run
    plain, share = plain_passes(case.model, case.x, multiple, DRAWS)
    limits = {"repeats": plan.repeats, "seconds": plan.budget, "device": device}
    times, _, failed = timing.turns_within({"plain": plain, **runs}, **limits)
    base = [taken / share for taken in times["plain"]]
    whole = statistics.median(base)
    entries |= {name: {"status": why} for name, why in failed.items()}
    for name, entry in entries.items():
        if "status" not in entry:
            taken = times.get(name, [entry.get("seconds", 0.0)])
            entry["seconds"] = _short(statistics.median(taken))
            entry["ratio"] = _short(entry["seconds"] / whole)
            if len(taken) == len(base) > 1:
                low, middle, high = timing.interval([ours / plain for ours, plain in zip(taken, base, strict=True)])
                entry["ratio"], entry["interval"] = _short(middle), [_short(low), _short(high)]
    _free(device)
    return {"plain_multiple": multiple, "plain_seconds": _short(whole), "rounds": len(base), "candidates": entries}


def candidates(case: Case, sites: Sequence[Site], device: torch.device) -> dict[str, Callable[[], Run]]:
    def sampled(engine: Any) -> Run:
        network = Network(case.model)

        def run() -> tuple[Tensor, Tensor]:
            moments = sample(network, case.x, RATE, DRAWS, sites=sites, engine=engine)
            return moments.mean, moments.variance

        return run

    ours = {"latedrop": partial(sampled, "auto")}
    if device.type == "cuda":
        ours["latedrop_compiled"] = partial(sampled, "compiled")
    return ours | {name: partial(peer, case, DRAWS) for name, peer in PEERS.items()}


def passes(model: nn.Module, x: Tensor, device: torch.device, plan: Plan) -> tuple[int, dict[int, float]]:
    """Return bytes of one deterministic pass, and seconds per row with 1, 2, 4, ... up to 50 times the rows."""
    once, _ = plain_passes(model, x, 1, 1)
    once()
    _, one = timing.peak_bytes(once, device)
    single = timing.seconds_of(once, device)
    seconds, multiple = {}, 1
    while multiple <= DRAWS and (multiple == 1 or multiple * one < plan.bytes / 4):
        count = min(16, 1 + int(0.02 / (single * multiple)))  # several in a row where one is quick
        run, _ = plain_passes(model, x, multiple, multiple * count)
        run()
        taken = statistics.median(timing.seconds_of(run, device) for _ in range(3))
        seconds[multiple] = taken / (multiple * count * len(x))
        if taken > 2:
            break
        multiple *= 2
    return one, seconds


def plain_passes(model: nn.Module, x: Tensor, multiple: int, draws: int) -> tuple[Callable[[], None], float]:
    """Return deterministic passes over `multiple` times the rows, and which share of `draws` passes they make up."""
    batch = x.repeat(multiple, *(1,) * (x.dim() - 1))
    count = max(1, draws // multiple)

    def run() -> None:
        with torch.no_grad():
            for _ in range(count):
                model(batch)

    return run, count * multiple / draws


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def measured() -> Iterator[tuple[str, str, int, dict[str, Any], str | None]]:
    """Yield network (a star: with version 0.2.0), machine, rows, entries, and the fastest peer, of both JSON files."""
    for kind in ("cpu", "gpu"):
        nets = timing.stored(f"speed_{kind}").get("nets", {})
        for name, batch in ((name, batch) for name, batches in nets.items() for batch in batches.values()):
            entries = batch["candidates"]
            ran = [key for key in LABELS if "ratio" in entries.get(key, {})]
            best = min(ran, key=lambda key, of=entries: of[key]["seconds"], default=None)
            old = " *" * (batch["machine"]["latedrop"] == "0.2.0")
            yield f"{name.replace('_', ' ')}{old}", kind.upper(), batch["rows"], entries, best


def table(_: object = None) -> str:
    """Return multiples of plain x T, and peak memory, for latedrop, the fastest peer, and a plain loop."""
    lines = []
    for name, kind, rows, entries, best in measured():
        cells = [name, kind, rows]
        cells += [_ratio(entries.get(key, {})) for key in ("latedrop", "latedrop_compiled")]
        cells += ["-" if best is None else f"{_ratio(entries[best])}, {LABELS[best]}", _ratio(entries.get("loop", {}))]
        sizes = [entries.get(key or "", {}).get("bytes") for key in ("latedrop", best)]
        mebibytes = [None if size is None else size / 2**20 for size in sizes]
        cells.append(" / ".join("-" if x is None else f"{x:.0f}" if x >= 1000 else f"{x:.3g}" for x in mebibytes))
        lines.append(cells)
    heads = ["network", "on", "rows", "latedrop", "compiled", "best peer", "plain loop"]
    return timing.markdown_table([*heads, "memory, latedrop / best peer [MiB]"], lines, 2)


def _ratio(entry: dict[str, Any]) -> str:
    if "ratio" not in entry:
        return "-"
    middle, *ends = (f"{x:.0f}" if x >= 20 else f"{x:.2f}" for x in (entry["ratio"], *entry.get("interval", ())))
    return f"{middle} ({' to '.join(ends)})" if ends else middle


if __name__ == "__main__":
    main()

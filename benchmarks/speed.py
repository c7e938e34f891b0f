"""Time, memory and rightness of sampling, beside other libraries: same network, same draws, one run.

    python -m benchmarks.speed                                   # the CPU's set, or the GPU's where there is one
    python -m benchmarks.speed --nets mcnn --draws 10 50         # these only; the JSON keeps the others
    python -m benchmarks.speed --resume                          # what a run that was cut short has not measured
    python -m benchmarks.speed --tables                          # tables from the JSON alone

Time is a multiple of `plain x T`: T deterministic forward passes of the same rows, run at the batch size at which the
network takes the least time per row. Memory is the peak of what a call allocates. An answer is right where its mean
standard deviation, and its mean, differ from those of a long reference by no more than T draws must by chance. All
candidates take turns, in an order that changes; quick ones run once before they are timed. `benchmarks.peers` says what
each of them does. A ratio's interval is that of its median over the rounds, by order statistics. A candidate whose
first call, by which memory is measured, takes longer than `--cap` gets no rounds: that call is its time.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.nets import SpeedNet, speed_nets, twin
from benchmarks.peers import PEERS, Case, Run, not_installed, peer_versions
from benchmarks.speed_pages import LABELS, OTHER_TARGET, one_table, rows_for_readme, tables
from benchmarks.timing import RESULTS, first_line, interval, machine, peak_bytes, seconds_of, timed, turns_within, write
from latedrop import Site, find_sites, linearize, sample
from latedrop.devices import chosen_device

RATE = 0.05
REFERENCE = 5000
ROWS = 8
ENGINES = {"cpu": ("auto", "loop"), "gpu": ("auto", "loop", "compiled")}
COMPILED = (50,)
"""The draws at which the compiled engine is measured: every number of draws is a program of its own."""
COMPILES = ("latedrop_compiled",)
"""Candidates whose first call says nothing of the others: it compiles."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Sampling beside other libraries.")
    parser.add_argument(
        "--nets",
        nargs="+",
        choices=[net.name for net in speed_nets("cpu")],
        help="measure only these and keep what the JSON has of the others",
    )
    parser.add_argument("--draws", type=int, nargs="+", default=[10, 50, 200])
    parser.add_argument("--batch", nargs="+", default=["small", "large"], choices=["small", "large"])
    parser.add_argument("--repeats", type=int, default=5, help="rounds, at most")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--budget", type=float, help="seconds after which no further round starts; 10, on a GPU 4")
    parser.add_argument("--cap", type=float, help="seconds of a first call beyond which none follows; 20, on a GPU 3")
    parser.add_argument("--engines", nargs="+", help="of latedrop.sample")
    parser.add_argument("--compiled", type=int, nargs="+", default=list(COMPILED), help="draws of the compiled engine")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="leave out what the JSON has from the same machine, versions, rows and draws",
    )
    parser.add_argument("--tables", action="store_true", help="tables from the JSON; measure nothing")
    options = parser.parse_args()
    if options.tables:
        for path in sorted(RESULTS.glob("speed_*.json")):
            record = json.loads(path.read_text(encoding="utf-8"))
            print(tables(record), end="\n\n")
        print(rows_for_readme())
        return
    warnings.simplefilter("ignore")
    device = chosen_device(options.device)
    kind = "gpu" if device.type == "cuda" else "cpu"
    engines = tuple(options.engines or ENGINES[kind])
    plan = Plan.of(device, options.repeats, options.budget, options.cap, engines, tuple(options.compiled))
    path = RESULTS / f"speed_{kind}.json"
    nets = {net.name: net for net in speed_nets(kind)}
    draws = sorted(set(options.draws))
    part = options.resume or options.nets is not None or len(options.batch) < 2
    known = json.loads(path.read_text(encoding="utf-8"))["nets"] if part and path.exists() else {}
    for name in options.nets or nets:
        for batch in [batch for batch in nets[name].batches if batch in options.batch]:
            rows = nets[name].batches[batch]
            if options.resume and measured(known.get(name, {}).get(batch), rows, draws, device):
                print(f"{name}, {batch}: measured already", flush=True)
                continue
            found = measure(nets[name], rows, draws, device, plan)
            known.setdefault(name, {})[batch] = found
            write(f"speed_{kind}", {"kind": kind, "rate": RATE, "nets": _in_order(known, nets)})
            print(one_table(name, found), flush=True)


@dataclass(frozen=True)
class Plan:
    """Which engines run, and how much time and memory a measurement may take.

    `budget` seconds for all rounds, `cap` for one call of one candidate.
    """

    repeats: int
    budget: float
    cap: float
    bytes: float
    reference_seconds: float
    engines: tuple[str, ...] = ENGINES["cpu"]
    compiled: tuple[int, ...] = COMPILED

    @classmethod
    def of(
        cls,
        device: torch.device,
        repeats: int,
        budget: float | None,
        cap: float | None,
        engines: tuple[str, ...],
        compiled: tuple[int, ...] = COMPILED,
    ) -> Plan:
        if device.type == "cuda":
            size, rounds, most, reference = 0.8 * torch.cuda.get_device_properties(device).total_memory, 4, 3, 5
        else:
            size = 0.4 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            rounds, most, reference = 10, 20, 10
        budget, cap = rounds if budget is None else budget, most if cap is None else cap
        return cls(repeats, budget, cap, size, reference, engines, compiled)


def measured(found: dict[str, Any] | None, rows: int, draws: Sequence[int], device: torch.device) -> bool:
    """Whether a result is there, of this machine, these versions, as many rows and the same draws."""
    if found is None:
        return False
    same = found["machine"] == _machine(device) and found["rows"] == rows
    return same and list(found["draws"]) == [str(count) for count in draws]


def measure(net: SpeedNet, rows: int, draws: Sequence[int], device: torch.device, plan: Plan) -> dict[str, Any]:
    """Everything about one network and batch."""
    begin = time.perf_counter()
    model = net.made(device)
    x, _ = net.data(rows, device)
    sites = find_sites(model, x[:3])
    case = Case(model, twin(model, sites, RATE), x, net.data(32, device, seed=1))
    pass_bytes, by_multiple = passes(model, x, max(draws), device, plan)
    reference = Reference.drawn(model, x[:ROWS], sites, plan.reference_seconds, device)
    last: dict[str, dict[str, Any]] = {
        name: {"draws": 1, "seconds": by_multiple[1] * rows, "bytes": pass_bytes} for name in LABELS
    }
    by_draws: dict[str, Any] = {}
    for count in draws:
        torch.manual_seed(0)
        multiple = best_multiple(by_multiple, count)
        found = compare(case, sites, count, multiple, reference, last, device, plan)
        by_draws[str(count)] = {"plain_multiple": multiple, **found}
        for name, entry in found["candidates"].items():
            if "seconds" in entry or name in OTHER_TARGET:
                last[name] = {"draws": count, **entry}
    return {
        "machine": _machine(device),
        "rows": rows,
        "sites": len(sites),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "plain_bytes": pass_bytes,
        "plain_seconds_per_row": {str(multiple): _short(value) for multiple, value in by_multiple.items()},
        "reference_draws": len(reference.outputs),
        "draws": by_draws,
        "minutes": round((time.perf_counter() - begin) / 60, 2),
    }


def compare(
    case: Case,
    sites: Sequence[Site],
    draws: int,
    multiple: int,
    reference: Reference,
    last: dict[str, dict[str, Any]],
    device: torch.device,
    plan: Plan,
) -> dict[str, Any]:
    """All candidates at one number of draws; `last` has what each took before.

    Those without draws run with the first number of draws only: nothing changes for them.
    """
    found: dict[str, dict[str, Any]] = {}
    runs: dict[str, Callable[[], Any]] = {}
    for name, prepare in candidates(case, sites, draws, plan).items():
        if name in OTHER_TARGET and last[name]["draws"] > 1:
            found[name] = {key: value for key, value in last[name].items() if key != "draws"}
            continue
        refused = "not installed" if not_installed(name) else _too_much(last[name], draws, plan)
        if refused:
            found[name] = {"status": refused}
            continue
        _free(device)
        try:
            run, prepared = timed(prepare, device)
            ((mean, variance), first), most = peak_bytes(partial(timed, run, device), device)
        except Exception as error:
            found[name] = {"status": first_line(error)}
            continue
        found[name] = {"bytes": most, "prepare_seconds": _short(prepared), "first_seconds": _short(first)}
        if first > plan.cap and name not in COMPILES:
            found[name] |= {"seconds": first, "rounds": 1}
        else:
            runs[name] = run
        if name not in OTHER_TARGET:
            found[name] |= reference.judged(mean, variance, draws, shared=name.startswith("latedrop"))
    plain, share = plain_passes(case.model, case.x, multiple, draws)
    times, _, failed = turns_within({"plain": plain, **runs}, repeats=plan.repeats, seconds=plan.budget, device=device)
    base = [taken / share for taken in times["plain"]]
    whole = statistics.median(base)
    found |= {name: {"status": why} for name, why in failed.items()}
    for name, entry in found.items():
        if "status" not in entry:
            taken = times.get(name, [entry.get("seconds", 0.0)])
            entry["seconds"] = _short(statistics.median(taken))
            before = entry.get("ratio")  # of fewer draws, where this is not measured again
            entry["ratio"] = _short(entry["seconds"] / whole)
            if len(taken) == len(base) > 1:
                low, middle, high = interval([ours / plain for ours, plain in zip(taken, base, strict=True)])
                entry["ratio"], entry["interval"] = _short(middle), [_short(low), _short(high)]
            elif before and "interval" in entry:
                entry["interval"] = [_short(end * entry["ratio"] / before) for end in entry["interval"]]
    _free(device)
    return {"plain_seconds": _short(whole), "rounds": len(base), "candidates": found}


def candidates(case: Case, sites: Sequence[Site], draws: int, plan: Plan) -> dict[str, Callable[[], Run]]:
    """What prepares each run, by name."""

    def sampled(engine: Any) -> Run:
        def run() -> tuple[Tensor, Tensor]:
            moments = sample(case.model, case.x, RATE, draws, sites=sites, engine=engine)
            return moments.mean, moments.variance

        return run

    def first_order() -> Run:
        def run() -> tuple[Tensor, Tensor]:
            result = linearize(case.model, case.x, sites)
            return result.mean, result.variance(RATE)

        return run

    engines = [engine for engine in plan.engines if engine != "compiled" or draws in plan.compiled]
    names = {engine: "latedrop" if engine == "auto" else f"latedrop_{engine}" for engine in engines}
    ours: dict[str, Callable[[], Run]] = {names[engine]: partial(sampled, engine) for engine in engines}
    return ours | {"linearize": first_order} | {name: partial(peer, case, draws) for name, peer in PEERS.items()}


def passes(model: nn.Module, x: Tensor, most: int, device: torch.device, plan: Plan) -> tuple[int, dict[int, float]]:
    """Bytes of one deterministic pass, and seconds per row with 1, 2, 4, ... up to `most` times the rows of `x`."""
    once, _ = plain_passes(model, x, 1, 1)
    once()
    _, one = peak_bytes(once, device)
    single = seconds_of(once, device)
    found: dict[int, float] = {}
    multiple = 1
    while multiple <= most and (multiple == 1 or multiple * one < plan.bytes / 4):
        count = min(16, 1 + int(0.02 / (single * multiple)))  # several in a row where one is quick
        run, _ = plain_passes(model, x, multiple, multiple * count)
        try:
            run()
            taken = statistics.median(seconds_of(run, device) for _ in range(3))
        except (RuntimeError, MemoryError):
            if multiple == 1:
                raise
            break
        found[multiple] = taken / (multiple * count * len(x))
        if taken > 2:
            break
        multiple *= 2
    return one, found


def plain_passes(model: nn.Module, x: Tensor, multiple: int, draws: int) -> tuple[Callable[[], None], float]:
    """Deterministic passes over `multiple` times the rows, and which share of `draws` passes over `x` they make up."""
    batch = x.repeat(multiple, *(1,) * (x.dim() - 1))
    count = max(1, draws // multiple)

    def run() -> None:
        with torch.no_grad():
            for _ in range(count):
                model(batch)

    return run, count * multiple / draws


def best_multiple(seconds_per_row: dict[int, float], draws: int) -> int:
    """The multiple of the batch with the least time per row, among those that `draws` passes can be put together to."""
    return min((multiple for multiple in seconds_per_row if multiple <= draws), key=seconds_per_row.__getitem__)


@dataclass(frozen=True)
class Reference:
    """Many draws of a few rows, `(draws, rows, ...)`, with another seed than what is judged by them."""

    outputs: Tensor

    @classmethod
    def drawn(
        cls, model: nn.Module, x: Tensor, sites: Sequence[Site], seconds: float, device: torch.device
    ) -> Reference:
        """As many draws as take about `seconds`, at most `REFERENCE`."""
        draw = partial(sample, model, x, RATE, sites=sites, seed=1, keep_draws=True)
        first = draw(draws=10)
        each = seconds_of(lambda: draw(draws=10), device) / 10
        fitting = 2**29 // (4 * first.mean.numel())
        count = max(100, min(REFERENCE, int(seconds / each), fitting))
        outputs = draw(draws=count).outputs
        assert outputs is not None
        return cls(outputs)

    def judged(self, mean: Tensor, variance: Tensor, draws: int, *, shared: bool) -> dict[str, Any]:
        """How far mean and standard deviation are from the reference, and whether chance explains it.

        With `shared` masks the rows err together; with masks of their own they err apart, and less on average.
        """
        rows = self.outputs.shape[1]
        spread, middle = self.outputs.std(0), self.outputs.mean(0)
        expected, chance = self._chance(draws, shared)
        error = variance[:rows].to(spread).reshape(spread.shape).sqrt().mean() - expected
        known = spread > 0
        off = ((mean[:rows].to(middle).reshape(middle.shape) - middle)[known] / spread[known]).square().mean().sqrt()
        by_chance = (1 / draws + 1 / len(self.outputs)) ** 0.5
        return {
            "std_error": _short(float(error / spread.mean())),
            "std_chance": _short(float(chance / spread.mean())),
            "mean_error": _short(float(off)),
            "mean_chance": _short(by_chance),
            "right": bool(error.abs() <= 4 * chance and off <= 4 * by_chance),
        }

    def _chance(self, draws: int, shared: bool) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of what `draws` draws give for the standard deviation, averaged over rows."""
        outputs = self.outputs if shared else self._apart
        size = max(2, min(draws, len(outputs) // 5))
        groups = outputs[: len(outputs) // size * size].unflatten(0, (-1, size))
        each = groups.std(1).flatten(1).mean(1)
        whole = outputs.std(0).mean()
        expected = whole + (each.mean() - whole) * (size / draws)
        return expected, each.std() * (size / draws + size / len(outputs)) ** 0.5

    @cached_property
    def _apart(self) -> Tensor:
        """The same draws in another order for each row."""
        generator = torch.Generator().manual_seed(0)
        order = [torch.randperm(len(self.outputs), generator=generator) for _ in range(self.outputs.shape[1])]
        return torch.stack([self.outputs[o.to(self.outputs.device), row] for row, o in enumerate(order)], 1)


def _too_much(last: dict[str, Any], draws: int, plan: Plan) -> str:
    """Why a candidate is left out, from what fewer draws took; empty where it is not."""
    grows = draws / last["draws"]
    seconds, size = last["seconds"] * grows, last["bytes"] * grows
    if seconds > plan.cap:
        return f"skipped: about {seconds:.0f} s a repeat"
    return f"skipped: about {size / 2**30:.0f} GiB" if size > plan.bytes else ""


def _in_order(known: dict[str, Any], nets: dict[str, SpeedNet]) -> dict[str, Any]:
    """Networks and batches in the order in which they are defined, whichever was measured last."""
    return {
        name: {size: known[name][size] for size in nets[name].batches if size in known[name]}
        for name in nets
        if name in known
    }


def _machine(device: torch.device) -> dict[str, Any]:
    return machine(device) | {"peers": peer_versions()}


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _short(value: float) -> float:
    """Four digits are more than a measurement has."""
    return float(f"{value:.4g}")


if __name__ == "__main__":
    main()

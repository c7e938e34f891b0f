"""Draws and first order of two versions of latedrop on a CPU, side by side: the ratio of their times.

    python -m benchmarks.core_speed --old ../before/src --new src
    python -m benchmarks.core_speed --tables                            # from the JSON alone

Each version has processes of its own, one for each round, in an order that changes with the round, so that a noisy
machine disturbs both alike. A process takes the least CPU time of several calls, after two that are not timed; the
table has medians over the rounds. The network is made ready before, as a predictor does: the old version knows a
model by its identity, the new one by a `Network`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import latedrop
from benchmarks.nets import Residual
from benchmarks.timing import RESULTS, machine, write
from benchmarks.trees import answer_of, digest

RATE, DRAWS, SECONDS = 0.05, 50, 0.25
ROWS = (1, 8, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws and first order of two versions on a CPU.")
    parser.add_argument("--old", type=Path, help="folder that holds latedrop/ of the older version")
    parser.add_argument("--new", type=Path, help="the same of the newer one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tables", action="store_true", help="from the JSON that is there; measure nothing")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure()))
        return
    if options.tables:
        print(markdown(json.loads((RESULTS / "core_speed_cpu.json").read_text(encoding="utf-8"))))
        return
    if options.old is None or options.new is None:
        parser.error("expected --old and --new, the source folders of two versions")
    trees, rounds = {"old": options.old, "new": options.new}, []
    for number in range(options.rounds):
        names = ["old", "new"] if number % 2 else ["new", "old"]
        rounds.append({name: answer_of("benchmarks.core_speed", ["--measure"], trees[name]) for name in names})
    cases = list(rounds[0]["new"]["ms"])
    ms = {name: {case: statistics.median(r[name]["ms"][case] for r in rounds) for case in cases} for name in trees}
    record = {
        "machine": machine(torch.device("cpu")),
        "sources": {name: rounds[0][name]["source"] for name in trees},
        "draws": DRAWS,
        "rounds": options.rounds,
        "ms": ms,
        "ratios": {case: [r["new"]["ms"][case] / r["old"]["ms"][case] for r in rounds] for case in cases},
    }
    write("core_speed_cpu", record)
    print(markdown(record))


def measure() -> dict[str, Any]:
    """Return milliseconds of every case, in the version of latedrop that is imported."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    times: dict[str, float] = {}
    for name, (model, x) in nets().items():
        ready = latedrop.Network(model) if "Network" in latedrop.__all__ or hasattr(latedrop, "Network") else model
        sites = latedrop.find_sites(model, x[:4])
        for rows in ROWS:
            part = x[:rows]
            draw = lambda part=part, ready=ready, sites=sites: latedrop.sample(ready, part, RATE, DRAWS, sites=sites)  # noqa: E731
            times[f"{name}, draws, {rows}"] = least(draw)
            first = lambda part=part, ready=ready, sites=sites: latedrop.linearize(ready, part, sites)  # noqa: E731
            times[f"{name}, first order, {rows}"] = least(first)
    return {"source": digest(), "ms": times}


def least(run: Callable[[], Any]) -> float:
    """Return the least milliseconds of a call, of as many as fit into the time for one case."""
    run(), run()
    times: list[float] = []
    while sum(times) < SECONDS or len(times) < 3:
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return 1000 * min(times)


def nets() -> dict[str, tuple[nn.Module, Tensor]]:
    """Return small networks with random weights, and 64 rows for each."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Linear(13, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 1)
        steps = nn.Linear(6, 32), nn.LSTM(32, 32, batch_first=True)
        made = {
            "MLP": (nn.Sequential(*layers), torch.randn(64, 13)),
            "residual CNN": (Residual(16, 2), torch.randn(64, 3, 16, 16)),
            "LSTM": (Steps(*steps), torch.randn(64, 12, 6)),
        }
    return {name: (model.eval(), x) for name, (model, x) in made.items()}


class Steps(nn.Module):
    """A linear layer, a recurrent one, and the last step."""

    def __init__(self, first: nn.Module, recurrent: nn.Module) -> None:
        super().__init__()
        self.first, self.recurrent, self.head = first, recurrent, nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.recurrent(self.first(x).tanh())
        head: Tensor = self.head(states[:, -1])
        return head


def markdown(record: dict[str, Any]) -> str:
    """Return a row for each case: both times, and the median and the largest of the rounds' ratios."""
    lines = ["| network, work, rows | old, ms | new, ms | ratio | largest |", "| --- | ---: | ---: | ---: | ---: |"]
    for case, ratios in record["ratios"].items():
        old, new = record["ms"]["old"][case], record["ms"]["new"][case]
        lines.append(f"| {case} | {old:.2f} | {new:.2f} | {statistics.median(ratios):.2f} | {max(ratios):.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""Stacked training against one network at a time, on Boston and yacht: `python -m benchmarks.uci --data DIR`.

The candidates train the same networks (same rows, sizes, batches, optimiser) in turns on the same machine and
threads. `loop` indexes tensors and calls `torch.optim.Adam(fused=True)`, about as fast as one network at a time goes;
`loader` takes its batches from a shuffling `DataLoader`, as most published code does. One network at a time is timed on
few epochs of one network and multiplied to all epochs of all of them; the stack is timed on the same few
epochs of all its networks and multiplied by the epochs alone. One network at a time has one thread: with two, tensors
this small take longer, on a busy machine many times so.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.timing import in_turns, machine, write
from studies.uci.data import SETS, UciSet, load, parts
from studies.uci.measured_set import RATES
from studies.uci.stacked import Plan, key, train

EPOCHS = {"boston-housing": 12, "yacht": 12}
LABELS = {"boston-housing": "Boston", "yacht": "yacht"}


def network(inputs: int, hidden: int, rate: float) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Dropout(rate), nn.Linear(hidden, 1))


def step(net: nn.Module, optimiser: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimiser.zero_grad()
    nn.functional.mse_loss(net(x)[:, 0], y).backward()
    optimiser.step()


def loop(x: Tensor, y: Tensor, item: UciSet, epochs: int) -> None:
    net = network(x.shape[1], item.hidden, 0.1).to(x.device)
    optimiser = torch.optim.Adam(net.parameters(), lr=item.learning_rate, fused=True)
    for _ in range(epochs):
        for rows in torch.randperm(len(x), device=x.device).split(item.batch):
            step(net, optimiser, x[rows], y[rows])


def loader(x: Tensor, y: Tensor, item: UciSet, epochs: int) -> None:
    net = network(x.shape[1], item.hidden, 0.1).to(x.device)
    optimiser = torch.optim.Adam(net.parameters(), lr=item.learning_rate)
    batches = DataLoader(TensorDataset(x, y), item.batch, shuffle=True)
    for _ in range(epochs):
        for rows, target in batches:
            step(net, optimiser, rows, target)


def alone(one: Callable[..., None], *arguments: Any) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        one(*arguments)
    finally:
        torch.set_num_threads(threads)


def measure(item: UciSet, data: Path | None, device: torch.device, repeats: int) -> dict[str, Any]:
    cut = parts(item, load(item, data))
    x, y = (torch.tensor(part["train"], dtype=torch.float32, device=device) for part in (cut.x, cut.y))
    epochs, networks = EPOCHS[item.name], item.splits * (len(RATES) + 1)
    # A captured graph pays once for all epochs: on the GPU the stack is timed whole.
    stacked = item.epochs if device.type == "cuda" else epochs
    plan = Plan((item.hidden,), (0.0, *RATES), item.learning_rate, item.batch, stacked)
    seeds = [key(item.name, split) for split in range(item.splits)]
    seconds = in_turns(
        {
            "stacked": lambda: train(x, y, plan, seeds),
            "loop": lambda: alone(loop, x[0], y[0], item, epochs),
            "loader": lambda: alone(loader, x[0], y[0], item, epochs),
        },
        repeats=repeats,
        device=device,
    )
    whole = {name: value * item.epochs / epochs * networks for name, value in seconds.items() if name != "stacked"}
    whole["stacked"] = seconds["stacked"] * item.epochs / stacked
    return {
        "networks": networks,
        "epochs": item.epochs,
        "timed_epochs": {"stacked": stacked, "others": epochs},
        "seconds_for_all": {name: round(value, 2) for name, value in whole.items()},
        "times_faster": {name: round(whole[name] / whole["stacked"], 1) for name in ("loop", "loader")},
    }


def markdown(record: dict[str, Any]) -> str:
    """The table of training times in docs/uci.md."""
    lines = [
        "| | one at a time, `DataLoader` | one at a time, indexed tensors | stacked | times faster |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, found in record["sets"].items():
        seconds, times = found["seconds_for_all"], found["times_faster"]
        cells = [f"{seconds[key]:.0f} s" for key in ("loader", "loop", "stacked")]
        lines.append(f"| {LABELS[name]} | {' | '.join(cells)} | {times['loader']:.0f} and {times['loop']:.0f} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.uci", description=__doc__)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    record: dict[str, Any] = {"machine": machine(device), "sets": {}}
    for name in EPOCHS:
        record["sets"][name] = measure(SETS[name], options.data, device, options.repeats)
        print(name, record["sets"][name])
    print(write(f"uci_{device.type}", record))


if __name__ == "__main__":
    main()

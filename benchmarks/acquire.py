"""How many labelled rows it takes until an error, by who chooses them: `python -m benchmarks.acquire`

Batches of 20 from 40 rows on; a quarter of the labelled rows is for validation.
"""

import math
import statistics
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.nets import Rows, divided, mlp, scaled, step
from benchmarks.peers import imported, versions_of
from benchmarks.sets import in_and_out, shipped
from benchmarks.sets import table as rows_of
from benchmarks.timing import by_sets, interval, markdown_table
from latedrop import calibrate, sample

ROUNDS, BATCH, START = 9, 20, 40
GOAL = 6  # random choice's mean error after as many batches is the goal
SETS = ("digits", "concrete", "kin8nm")


def curves(name: str, seed: int) -> dict[str, list[float]]:
    """Return the curve of every rule, all from the same first rows."""
    rows = shipped("load_digits") if name == "digits" else in_and_out(rows_of(name, 10_000))
    parts = scaled(divided(rows, seed, (0.6, 0.4)), targets=False)
    pool, test = ((x[:most], y[:most]) for (x, y), most in zip(parts, (1500, 1000), strict=True))
    if name != "digits":
        mean, std = pool[1].mean(), pool[1].std()
        pool, test = ((x, (y - mean) / std) for x, y in (pool, test))
    first = torch.randperm(len(pool[0]), generator=torch.Generator().manual_seed(seed))[:START].tolist()
    return {rule: _curve(pool, test, list(first), rule, seed) for rule in RULES}


def _curve(pool: Rows, test: Rows, labelled: list[int], rule: str, seed: int) -> list[float]:
    (x, y), (x_test, y_test) = pool, test
    classes = not y.is_floating_point()
    loss = nn.functional.cross_entropy if classes else nn.functional.mse_loss
    errors = []
    for turn in range(ROUNDS):
        torch.manual_seed(100 * seed + turn)
        net = mlp(x.shape[1], 10 if classes else 1)
        fit = [row for i, row in enumerate(labelled) if i % 4]
        optimiser = torch.optim.Adam(net.parameters(), 3e-3, weight_decay=1e-4)
        for _ in range(200):
            step(optimiser, loss(net(x[fit]), y[fit]))
        with torch.no_grad():
            output = net.eval()(x_test)
        wrong = (output.argmax(1) != y_test).double() if classes else (output - y_test).square()
        errors.append(float(wrong.mean()) if classes else float(wrong.mean().sqrt()))
        rest = torch.tensor([row for row in range(len(x)) if row not in set(labelled)])
        labelled = labelled + rest[RULES[rule](net, x, y, labelled, rest, 100 * seed + turn)].tolist()
    return errors


def _random(net: nn.Module, x: Tensor, y: Tensor, labelled: list[int], rest: Tensor, seed: int) -> Tensor:
    return torch.randperm(len(rest), generator=torch.Generator().manual_seed(seed))[:BATCH]


def _baal(net: nn.Module, x: Tensor, y: Tensor, labelled: list[int], rest: Tensor, seed: int) -> Tensor:
    """Take the first that baal ranks by 30 thinned networks at rate 0.1: BALD of classes, variance of numbers."""
    heuristics = imported("baal.active.heuristics")
    outputs = sample(net, x[rest], rate=0.1, draws=30, keep_draws=True).outputs
    ranked = heuristics.Variance() if y.is_floating_point() else heuristics.BALD()
    predictions = outputs if y.is_floating_point() else outputs.softmax(2)
    return torch.from_numpy(ranked(predictions.double().permute(1, 2, 0).numpy())[:BATCH].copy())


def _uq(diverse: bool, score: str | None = None) -> Callable[..., Tensor]:
    def choose(net: nn.Module, x: Tensor, y: Tensor, labelled: list[int], rest: Tensor, seed: int) -> Tensor:
        validation, fit = labelled[::4], [row for i, row in enumerate(labelled) if i % 4]
        uq = calibrate(net, (x[validation], y[validation]), reference=x[fit], progress=False)
        doubt = "std" if y.is_floating_point() else "entropy"
        return uq.acquire(x[rest], BATCH, diverse=diverse, score=score or doubt, seed=seed)

    return choose


RULES: dict[str, Callable[..., Tensor]] = {
    "random": _random,
    "baal": _baal,
    "largest": _uq(diverse=False),
    "uncertain": _uq(diverse=True),
    "novelty": _uq(diverse=True, score="novelty"),
}


def table(record: dict[str, Any]) -> str:
    """Return labelled rows until the error that random choice has on average after `GOAL` batches."""
    rows = []
    most = START + (ROUNDS - 1) * BATCH
    for name, runs in record["sets"].items():
        goal = statistics.mean(run["random"][GOAL] for run in runs)
        cells = []
        for rule in RULES:
            ends = interval([min(until(run[rule], goal), most + 1) for run in runs])
            low, middle, high = [f"> {most}" if end > most else f"{end:.0f}" for end in ends]
            cells.append(f"{middle} ({low} to {high})")
        rows.append([name, f"{goal:.3f}", *cells])
    return markdown_table(["set", "error", *RULES], rows)


def until(errors: list[float], goal: float) -> float:
    """Return the rows at which the lowest error so far reaches a goal, between two rounds in proportion."""
    lowest = list(accumulate(errors, min))
    for turn, error in enumerate(lowest):
        if error <= goal:
            share = 0.0 if turn == 0 else (lowest[turn - 1] - goal) / (lowest[turn - 1] - error)
            return START + BATCH * (turn - 1 + share if turn else 0)
    return math.inf


if __name__ == "__main__":
    by_sets("acquire", curves, SETS, seeds=5, start=START, batch=BATCH, **versions_of(["baal"]))

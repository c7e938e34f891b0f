"""What people ask for beside an interval, measured: `python -m benchmarks.asked NAME ...`.

`regions`: several outputs together. `uq.joint(rows)` beside a box by Bonferroni, of conformal intervals at
`1 - (1 - level) / K` each from the same rows, which need not be divided. Volumes are compared at equal coverage: both
are blown up or shrunk until they hold 90 % of the test rows.

`shift`: `uq.adapted(x_target, rows)` beside `uq.conformal(rows)`, where target rows are drawn with a chance that grows
as `exp(tilt · position)` along an input, one of those that the target follows most, in either direction; and where they
lie beyond all labelled rows (cut), which has to be refused. The target's inputs are the test rows', without labels.

`acquire`: labelled rows until an error, in batches of 20 from 40 on. A quarter of the labelled rows is for validation.

`language`: what dropout does to a small transformer (GPT-2 of two layers) that predicts the next character of Python's
help topics, trained without dropout and with it.

`labels`: several labels for one row. Probabilities beside the model's own, and sets that may miss a tenth of the labels
beside those of probability above one half.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import instead_sets
from benchmarks.sets import MORE, _place, _sheet, numbers
from benchmarks.timing import interval, machine, markdown_table, write
from latedrop import (
    FirstOrder,
    JointPrediction,
    LatedropError,
    Prediction,
    Predictor,
    calibrate,
    calibrate_multilabel,
    metrics,
    sample,
)
from latedrop.errors import DataError
from latedrop.prediction import joint as joint_module

Rows = tuple[Tensor, Tensor]
SEEDS = 5
LEVEL = 0.9


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.asked", description="Regions and others, measured.")
    parser.add_argument("names", nargs="*", choices=[[], *PARTS], default=[*PARTS])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in options.names:
        start = time.process_time()
        record = {"machine": machine(torch.device("cpu")), "seeds": options.seeds, **PARTS[name](options.seeds)}
        write(f"asked_{name}", record | {"cpu_seconds": round(time.process_time() - start)})


def network(inputs: int, outputs: int, hidden: int = 64) -> nn.Sequential:
    sizes = (inputs, hidden, hidden, outputs)
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def trained(
    net: nn.Module, rows: Rows, seed: int, *, steps: int = 1000, loss: Callable[[Tensor, Tensor], Tensor] | None = None
) -> nn.Module:
    """Train by Adam on batches of 64, with a tenth of the rows to stop by."""
    loss = loss or nn.functional.mse_loss
    dice = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(rows[0]), generator=dice)
    stop, fit = order[: max(2, len(order) // 10)], order[max(2, len(order) // 10) :]
    optimiser = torch.optim.Adam(net.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    least, best = math.inf, net.state_dict()
    x, y = rows
    for step in range(steps):
        batch = fit[torch.randint(len(fit), (64,), generator=dice)]
        optimiser.zero_grad()
        loss(net(x[batch]), y[batch]).backward()
        optimiser.step()
        schedule.step()
        if step % 50 == 49:
            with torch.no_grad():
                now = float(loss(net(x[stop]), y[stop]))
            if now < least:
                least, best = now, {name: value.clone() for name, value in net.state_dict().items()}
    net.load_state_dict(best)
    return net.eval()


def divided(rows: Rows, seed: int, shares: Sequence[float]) -> list[Rows]:
    """Divide rows by chance."""
    order = torch.randperm(len(rows[0]), generator=torch.Generator().manual_seed(seed))
    ends = (np.cumsum(shares)[:-1] * len(order)).round().astype(int).tolist()
    return [(rows[0][part], rows[1][part]) for part in order.tensor_split(ends)]


def standardised(rows: Sequence[Rows]) -> list[Rows]:
    """Standardise inputs and targets by the first rows."""
    x, y = rows[0]
    moments = [(part.mean(0), part.std(0).clamp_min(1e-6)) for part in (x, y)]
    return [tuple((part - m) / s for part, (m, s) in zip(pair, moments, strict=True)) for pair in rows]  # type: ignore[misc]


def _buildings(seed: int) -> Rows:
    source = MORE["residential_building"]
    data = numbers([list(row) for row in _sheet(_place("residential_building", source))[source.skip :]])
    return torch.tensor(data[:, :-2]).float(), torch.tensor(data[:, -2:]).float()


def _serum(seed: int) -> Rows:
    from sklearn.datasets import load_diabetes

    found = load_diabetes()
    data = torch.tensor(np.column_stack([found.data, found.target])).float()
    outputs = [4, 5, 6, 7]  # total, low- and high-density cholesterol, their ratio
    return data[:, [k for k in range(11) if k not in outputs]], data[:, outputs]


def _digits(seed: int) -> Rows:
    from sklearn.datasets import load_digits

    images = torch.tensor(load_digits().images).float()
    hidden = nn.functional.avg_pool2d(images[:, None, 2:6, 2:6], 2)[:, 0].flatten(1)
    seen = torch.ones(8, 8, dtype=torch.bool)
    seen[2:6, 2:6] = False
    return images[:, seen], hidden


def _waves(seed: int) -> Rows:
    dice = torch.Generator().manual_seed(seed)
    count, past, ahead = 2000, 24, 12
    t = torch.arange(past + ahead)
    phase = 6.28 * torch.rand(2, count, 1, generator=dice)
    noise = [0.15 * torch.randn(count, generator=dice)]
    for _ in t[1:]:
        noise.append(0.9 * noise[-1] + 0.15 * torch.randn(count, generator=dice))
    series = torch.sin(6.28 * t / 24 + phase[0]) + 0.4 * torch.sin(6.28 * t / 7 + phase[1]) + torch.stack(noise, 1)
    return series[:, :past], series[:, past:]


MANY: dict[str, Callable[[int], Rows]] = {
    "buildings: price, cost": _buildings,
    "diabetes: four of serum": _serum,
    "digits: four hidden parts": _digits,
    "waves: twelve steps (synthetic)": _waves,
}


def regions(seeds: int) -> dict[str, Any]:
    """Compare ellipsoids and bands with a box by Bonferroni."""
    return {
        "level": LEVEL,
        "sets": {name: [_regions(rows(seed), seed) for seed in range(seeds)] for name, rows in MANY.items()},
    }


def _regions(rows: Rows, seed: int) -> dict[str, Any]:
    train, validation, other, (x, y) = standardised(divided(rows, seed, (0.4, 0.2, 0.2, 0.2)))
    torch.manual_seed(seed)
    net = trained(network(x.shape[1], y.shape[1]), train, seed)
    uq = calibrate(net, validation, reference=train[0], progress=False)
    outputs = y.shape[1]
    joint = uq.joint(other)
    p, alone = joint.predict(x), uq.conformal(other).predict(x)
    with patch.object(joint_module, "_COMMON", (1.0,)):
        same = uq.joint(other).predict(x)
    region, bands = p.region(LEVEL), p.bands(LEVEL)
    z = (y - p.mean).double() / p.std
    errors = joint.joint_errors
    assert errors is not None
    ball = float(region.log_volume.mean() - region.root.diagonal(dim1=1, dim2=2).log().sum(1).mean())
    log_std = float(p.std.double().log().sum(1).mean())

    def equal(prediction: JointPrediction) -> float:
        root = torch.linalg.cholesky(prediction.correlation)
        reach = torch.linalg.solve_triangular(root, z[..., None], upper=False)[..., 0].norm(dim=1)
        size = float(root.diagonal(dim1=1, dim2=2).log().sum(1).mean())
        return ball + outputs * math.log(_quantile(reach)) + size + log_std

    try:
        box = alone.interval(1 - (1 - LEVEL) / outputs)
        width = (box[1] - box[0]).double() / 2
        reach = ((y - p.mean).double().abs() / width).amax(1)
        bonferroni = {
            "coverage": float((reach <= 1).double().mean()),
            "log_volume": outputs * math.log(2) + float(width.log().sum(1).mean()),
            "equal": outputs * math.log(2 * _quantile(reach)) + float(width.log().sum(1).mean()),
        }
    except LatedropError:  # too few rows for the level
        bonferroni = {}
    return {
        "outputs": outputs,
        "rows": len(other[0]),
        "test": len(x),
        "alone": errors.alone,
        "share": errors.share,
        "ellipsoid": {
            "coverage": float(region.contains(y).double().mean()),
            "log_volume": float(region.log_volume.mean()),
            "equal": equal(p),
        },
        "same": {"equal": equal(same)},
        "ball": {"equal": ball + outputs * math.log(_quantile(z.norm(dim=1))) + log_std},
        "bands": {
            "coverage": float(((bands[0] <= y) & (y <= bands[1])).all(1).double().mean()),
            "log_volume": float((bands[1] - bands[0]).double().log().sum(1).mean()),
            "equal": outputs * math.log(2 * _quantile(z.abs().amax(1))) + log_std,
        },
        "bonferroni": bonferroni,
    }


def _quantile(values: Tensor) -> float:
    return float(values.quantile(LEVEL, interpolation="higher"))


def regions_table(record: dict[str, Any]) -> str:
    """Coverage, and the side of a cube of the same volume at equal coverage, in units of that of the Bonferroni box."""
    rows = []
    for name, runs in record["sets"].items():
        runs = [run for run in runs if run["bonferroni"]]
        side = {
            kind: interval(
                [math.exp((run[kind]["equal"] - run["bonferroni"]["equal"]) / run["outputs"]) for run in runs]
            )
            for kind in ("bands", "ball", "same", "ellipsoid")
        }
        held = [
            f"{statistics.mean(run[kind]['coverage'] for run in runs):.1%}"
            for kind in ("bonferroni", "bands", "ellipsoid")
        ]
        rows.append([name, *held, *[f"{middle:.2f} ({low:.2f} to {high:.2f})" for low, middle, high in side.values()]])
    head = ["outputs", "box holds", "bands hold", "ellipsoid holds", "bands", "ball", "one correlation", "ellipsoid"]
    return markdown_table(head, rows)


SHIFTED = ("concrete", "kin8nm", "power-plant", "wine-quality-red", "airfoil", "protein-tertiary-structure")
TILTS = {"none": 0.0, "mild": 1.0, "strong": 2.0}
BASES = {"the default": "terms", "first order and a floor": FirstOrder(floor=True)}


def shift(seeds: int) -> dict[str, Any]:
    """Compare intervals with and without the target's inputs."""
    names = (*SHIFTED, "synthetic")
    return {"level": LEVEL, "sets": {name: [_shift(name, seed) for seed in range(seeds)] for name in names}}


def _shift(name: str, seed: int) -> dict[str, Any]:
    dice = torch.Generator().manual_seed(seed)
    if name == "synthetic":  # noise that grows tenfold along an input
        x = torch.randn(3000, 4, generator=dice)
        data = torch.cat([x, x[:, 1:2].sin() + (0.8 * x[:, :1]).exp() * 0.3 * torch.randn(3000, 1, generator=dice)], 1)
        order = [0]
    else:
        array = instead_sets.table(name)
        order = np.argsort(-np.abs(np.corrcoef(array.T)[-1, :-1]), kind="stable").tolist()
        data = torch.tensor(array).float()
    train, validation, other, rest = standardised(divided((data[:, :-1], data[:, -1:]), seed, (0.3, 0.15, 0.25, 0.3)))
    torch.manual_seed(seed)
    net = trained(network(train[0].shape[1], 1), train, seed)
    column = order[seed // 2 % len(order)]
    along, position = [(-1) ** seed * rows[0][:, column] for rows in (other, rest)]
    found: dict[str, Any] = {}
    for base, method in BASES.items():
        reference = train[0] if method == "terms" else None
        uq = calibrate(net, validation, reference=reference, method=method, progress=False)  # type: ignore[arg-type]
        for kind, tilt in TILTS.items():
            weights = (tilt * position.clamp(-3, 3)).exp()
            found[f"{base}, {kind}"] = _adapted(
                uq, rest, torch.multinomial(weights, len(weights) // 3, generator=dice), other
            )
        edge = float(position.quantile(0.7))  # targets lie where no labelled row does
        below = (along <= edge).nonzero()[:, 0]
        labelled = other[0][below], other[1][below]
        found[f"{base}, cut"] = _adapted(uq, rest, (position > edge).nonzero()[:, 0], labelled)
    return found


def _adapted(uq: Predictor, rest: Rows, chosen: Tensor, labelled: Rows) -> dict[str, Any]:
    x, y = rest[0][chosen], rest[1][chosen].double()
    if not len(chosen):
        return {"plain": None, "adapted": None}
    plain = _judged(uq.conformal(labelled).predict(x), y)
    try:
        adapted = uq.adapted(x, labelled)
    except DataError:
        return {"plain": plain, "adapted": None}
    other = {"effective": adapted.effective_rows, "rows": len(labelled[0])}
    return {"plain": plain, "adapted": _judged(adapted.predict(x), y) | other}


def _judged(p: Prediction, y: Tensor) -> dict[str, float]:
    low, high = (end.double() for end in p.interval(LEVEL))
    finite = (high - low < 1e30)[:, 0]
    low, high, kept = low[finite], high[finite], y[finite]
    score = (high - low) + 2 / (1 - LEVEL) * ((low - kept).clamp_min(0) + (kept - high).clamp_min(0))
    nll = metrics.nll(p.mean, p.variance, y)
    inside = (low <= kept) & (kept <= high)
    return {
        "coverage": float((inside.sum() + (~finite).sum()) / len(y)),
        "score": float(score.mean()),
        "nll": float(nll),
        "endless": float((~finite).double().mean()),
        "rows": len(y),
    }


def shift_table(record: dict[str, Any]) -> str:
    """Coverage and interval score, over all sets and seeds."""
    rows = []
    for name in next(iter(record["sets"].values()))[0]:
        runs = [run[name] for runs in record["sets"].values() for run in runs if run[name]["plain"] is not None]
        ran = [run for run in runs if run["adapted"] is not None]
        refused = f"{len(runs) - len(ran)} of {len(runs)}"
        if len(ran) < len(runs) / 2:
            rows.append([name, refused, *["-"] * 6])
            continue
        kinds = "plain", "adapted"
        held = [f"{statistics.mean(run[kind]['coverage'] for run in ran):.1%}" for kind in kinds]
        off = [f"{statistics.mean(abs(run[kind]['coverage'] - LEVEL) for run in ran):.1%}" for kind in kinds]
        low, middle, high = interval([run["adapted"]["score"] / run["plain"]["score"] for run in ran])
        share = statistics.median(run["adapted"]["effective"] / run["adapted"]["rows"] for run in ran)
        rows.append([name, refused, f"{share:.0%}", *held, *off, f"{middle:.3f} ({low:.3f} to {high:.3f})"])
    head = [
        "variance, shift",
        "refused",
        "effective rows",
        "plain holds",
        "adapted holds",
        "plain is off by",
        "adapted",
    ]
    return markdown_table([*head, "score, adapted / plain"], rows)


def _pairs(seed: int) -> Rows:
    """Two digits of scikit-learn side by side, with noise: labels are the digits there.

    An image is in several rows, also of different parts, each time with other noise and another neighbour.
    """
    from sklearn.datasets import load_digits

    found, dice = load_digits(), torch.Generator().manual_seed(seed)
    images, digits = torch.tensor(found.images).float() / 16, torch.tensor(found.target)
    count = 3000
    which = torch.randint(len(images), (count, 2), generator=dice)
    labels = torch.zeros(count, 10).scatter_(1, digits[which], 1.0)
    empty = torch.rand(count, generator=dice) < 0.3  # one digit alone
    labels[empty] = nn.functional.one_hot(digits[which[empty, 0]], 10).float()
    second = torch.where(empty[:, None, None], 0.0, images[which[:, 1]])
    both = torch.cat([images[which[:, 0]], second], 2)
    return (both + 0.3 * torch.randn(both.shape, generator=dice)).flatten(1), labels


def _sums(seed: int) -> Rows:
    """Labels with noise, rare ones among them, by directions of the inputs."""
    dice = torch.Generator().manual_seed(seed)
    x = torch.randn(3000, 20, generator=dice)
    directions, shifts = torch.randn(20, 12, generator=dice) / 3, torch.linspace(-4, 0, 12)
    return x, (torch.rand(3000, 12, generator=dice) < torch.sigmoid(2 * x @ directions + shifts)).float()


LABELLED: dict[str, Callable[[int], Rows]] = {
    "two digits, ten labels": _pairs,
    "directions, twelve labels (synthetic)": _sums,
}
MISSED = 0.1


def labels(seeds: int) -> dict[str, Any]:
    """Compare probabilities and sets with the model's own."""
    runs = {name: [_labels(rows(seed), seed) for seed in range(seeds)] for name, rows in LABELLED.items()}
    return {"missed": MISSED, "sets": runs}


def _labels(rows: Rows, seed: int) -> dict[str, Any]:
    (train, *others) = divided(rows, seed, (0.4, 0.15, 0.15, 0.3))
    center, spread = train[0].mean(0), train[0].std(0).clamp_min(1e-6)
    validation, other, (x, y) = [((part[0] - center) / spread, part[1]) for part in others]
    torch.manual_seed(seed)
    net = network(x.shape[1], y.shape[1])
    loss = nn.functional.binary_cross_entropy_with_logits
    optimiser = torch.optim.Adam(net.parameters(), 2e-3)
    inputs = (train[0] - center) / spread
    for part in (part for _ in range(30) for part in torch.randperm(len(inputs)).split(64)):
        optimiser.zero_grad()
        loss(net(inputs[part]), train[1][part]).backward()
        optimiser.step()
    uq = calibrate_multilabel(net.eval(), validation).control(other)
    p = uq.predict(x)
    own = torch.sigmoid(p.logits)
    by_half = own >= 0.5
    inside = p.label_set(MISSED)
    return {
        "choice": uq.calibration.choice,
        "nll": [_label_nll(each, y) for each in (own, p.probabilities)],
        "ece": [_label_ece(each, y) for each in (own, p.probabilities)],
        "missed": [_missed(each, y) for each in (by_half, inside)],
        "size": [float(each.sum(1).double().mean()) for each in (by_half, inside)],
        "labels": float(y.sum(1).mean()),
    }


def _label_nll(p: Tensor, y: Tensor) -> float:
    return float(nn.functional.binary_cross_entropy(p.clamp(1e-12, 1 - 1e-12), y.double()))


def _label_ece(p: Tensor, y: Tensor) -> float:
    """Over all labels: the mean distance of share and probability, in 15 bins of as many."""
    ordered, order = p.flatten().sort()
    parts = zip(ordered.tensor_split(15), y.double().flatten()[order].tensor_split(15), strict=True)
    return statistics.mean(abs(float(a.mean() - b.mean())) for a, b in parts)


def _missed(inside: Tensor, y: Tensor) -> float:
    return float(((y.bool() & ~inside).sum(1) / y.sum(1).clamp_min(1)).mean())


def labels_table(record: dict[str, Any]) -> str:
    """Means over seeds."""

    def mean(runs: list[dict[str, Any]], key: str, digits: str) -> list[str]:
        return [format(statistics.mean(run[key][i] for run in runs), digits) for i in range(2)]

    rows = []
    for name, runs in record["sets"].items():
        spread = statistics.stdev(run["missed"][1] for run in runs)
        missed = mean(runs, "missed", ".1%")
        labels_there = f"{statistics.mean(run['labels'] for run in runs):.1f}"
        figures = [*mean(runs, "nll", ".3f"), *mean(runs, "ece", ".3f"), missed[0], f"{missed[1]} (± {spread:.1%})"]
        rows.append([name, *figures, labels_there, *mean(runs, "size", ".1f")])
    head = ["labels", "nats: model", "calibrated", "ECE: model", "calibrated", "missed: p > 0.5", "sets"]
    return markdown_table([*head, "labels there", "size: p > 0.5", "sets"], rows)


ROUNDS, BATCH, START = 9, 20, 40
GOAL = 6  # random choice's mean error after as many batches is the goal
POOLS = ("digits", "concrete", "kin8nm")


def acquire(seeds: int) -> dict[str, Any]:
    """Compare ways to choose rows for labels: test error after each batch."""
    runs = {name: [_acquire(name, seed) for seed in range(seeds)] for name in POOLS}
    return {"start": START, "batch": BATCH, "sets": runs}


def _acquire(name: str, seed: int) -> dict[str, list[float]]:
    if name == "digits":
        from sklearn.datasets import load_digits

        found = load_digits()
        rows = torch.tensor(found.data).float(), torch.tensor(found.target)
    else:
        data = torch.tensor(instead_sets.table(name)).float()
        rows = data[:, :-1], data[:, -1:]
    pool, test = divided(rows, seed, (0.6, 0.4))
    (x, _), (x_test, _) = standardised([(pool[0], pool[0]), (test[0], test[0])])
    x, x_test = x[:1500], x_test[:1000]
    y, y_test = pool[1][:1500], test[1][:1000]
    if name != "digits":
        y, y_test = (y - y.mean()) / y.std(), (y_test - y.mean()) / y.std()
    first = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:START].tolist()
    return {rule: _curve((x, y), (x_test, y_test), list(first), rule, seed) for rule in RULES}


def _curve(pool: Rows, test: Rows, labelled: list[int], rule: str, seed: int) -> list[float]:
    (x, y), (x_test, y_test) = pool, test
    classes = not y.is_floating_point()
    errors = []
    for turn in range(ROUNDS):
        torch.manual_seed(100 * seed + turn)
        net = network(x.shape[1], 10 if classes else 1)
        fit = [row for i, row in enumerate(labelled) if i % 4]
        loss = nn.functional.cross_entropy if classes else nn.functional.mse_loss
        optimiser = torch.optim.Adam(net.parameters(), 3e-3, weight_decay=1e-4)
        for _ in range(200):
            optimiser.zero_grad()
            loss(net(x[fit]), y[fit]).backward()
            optimiser.step()
        with torch.no_grad():
            output = net.eval()(x_test)
        wrong = (output.argmax(1) != y_test).double() if classes else (output - y_test).square()
        errors.append(float(wrong.mean()) if classes else float(wrong.mean().sqrt()))
        rest = torch.tensor([row for row in range(len(x)) if row not in set(labelled)])
        labelled = labelled + rest[RULES[rule](net, x, y, labelled, rest, 100 * seed + turn)].tolist()
    return errors


def _random(net: nn.Module, x: Tensor, y: Tensor, labelled: list[int], rest: Tensor, seed: int) -> Tensor:
    return torch.randperm(len(rest), generator=torch.Generator().manual_seed(seed))[:BATCH]


def _draws(net: nn.Module, x: Tensor, y: Tensor, labelled: list[int], rest: Tensor, seed: int) -> Tensor:
    """Take the largest disagreement of 30 thinned networks at rate 0.1: BALD of classes, the variance of numbers."""
    moments = sample(net, x[rest], rate=0.1, draws=30, keep_draws=True)
    assert moments.outputs is not None
    if y.is_floating_point():
        return moments.outputs[..., 0].var(0).topk(BATCH).indices
    p = moments.outputs.softmax(2).double()
    mean = p.mean(0)
    information = (p * p.clamp_min(1e-30).log()).sum(2).mean(0) - (mean * mean.clamp_min(1e-30).log()).sum(1)
    return information.topk(BATCH).indices


def _uq(diverse: bool, score: Any) -> Callable[..., Tensor]:
    def choose(net: nn.Module, x: Tensor, y: Tensor, labelled: list[int], rest: Tensor, seed: int) -> Tensor:
        held, fit = labelled[::4], [row for i, row in enumerate(labelled) if i % 4]
        uq = calibrate(net, (x[held], y[held]), reference=x[fit], progress=False)
        used = score or ("std" if y.is_floating_point() else "entropy")
        return uq.acquire(x[rest], BATCH, diverse=diverse, score=used, seed=seed)

    return choose


RULES: dict[str, Callable[..., Tensor]] = {
    "random": _random,
    "draws": _draws,
    "largest": _uq(diverse=False, score=None),
    "uncertain": _uq(diverse=True, score=None),
    "novelty": _uq(diverse=True, score="novelty"),
}


def acquire_table(record: dict[str, Any]) -> str:
    """Labelled rows until the error that random choice has on average after `GOAL` batches."""
    rows = []
    most = START + (ROUNDS - 1) * BATCH
    for name, runs in record["sets"].items():
        goal = statistics.mean(run["random"][GOAL] for run in runs)
        cells = []
        for rule in RULES:
            ends = interval([min(_until(run[rule], goal), most + 1) for run in runs])
            low, middle, high = [f"> {most}" if end > most else f"{end:.0f}" for end in ends]
            cells.append(f"{middle} ({low} to {high})")
        rows.append([name, f"{goal:.3f}", *cells])
    return markdown_table(["set", "error", *RULES], rows)


def _until(errors: list[float], goal: float) -> float:
    """Rows at which the lowest error so far reaches a goal, between two rounds in proportion."""
    lowest = [min(errors[: turn + 1]) for turn in range(len(errors))]
    for turn, error in enumerate(lowest):
        if error <= goal:
            share = 0.0 if turn == 0 else (lowest[turn - 1] - goal) / (lowest[turn - 1] - error)
            return START + BATCH * (turn - 1 + share if turn else 0)
    return math.inf


RATES = (0.01, 0.03, 0.1, 0.3)
PAST = 24


def language(seeds: int) -> dict[str, Any]:
    """Measure what dropout does to a small transformer that predicts the next character."""
    return {"rates": RATES, "runs": [_language(seed) for seed in range(seeds)]}


def _language(seed: int) -> dict[str, Any]:
    from pydoc_data.topics import topics

    from transformers import GPT2Config, GPT2LMHeadModel

    text = "".join(topics[name] for name in sorted(topics)[:20])
    signs = sorted(set(text))
    codes = torch.tensor([signs.index(sign) for sign in text]).unfold(0, PAST + 1, 1)
    cut = 3 * len(codes) // 4
    torch.manual_seed(seed)
    result: dict[str, Any] = {}
    for trained_with in (0.0, 0.1):
        shape = {"vocab_size": len(signs), "n_positions": PAST, "n_embd": 64, "n_layer": 2, "n_head": 4}
        rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), trained_with)
        net = GPT2LMHeadModel(GPT2Config(**shape, **rates, bos_token_id=0, eos_token_id=0))
        optimiser = torch.optim.AdamW(net.parameters(), 3e-3)
        for _ in range(400):
            rows = codes[torch.randint(cut, (32,))]
            optimiser.zero_grad()
            logits = net(rows[:, :-1]).logits
            nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).backward()
            optimiser.step()
        net.eval()
        held = codes[cut + PAST :]
        held = held[torch.randperm(len(held))[:900]]
        x, y = held[:, :-1], held[:, -1]
        uq = calibrate(net, (x[:500], y[:500]), readout=_last, progress=False)
        x, y = x[500:], y[500:]
        found = {"plain": _right(uq.predict(x).logits.softmax(1), y), "default": _right(uq.predict(x).probabilities, y)}
        for rate in RATES:
            draws = sample(net, x, rate, 10, readout=_last, keep_draws=True).outputs
            assert draws is not None
            p = draws.double().softmax(2)
            one = [_right(each, y) for each in p]
            found[f"one at {rate}"] = [statistics.mean(pair[k] for pair in one) for k in range(2)]
            found[f"mean at {rate}"] = _right(p.mean(0), y)
        result[f"trained with {trained_with:g}"] = found
    return result


def _last(output: Any) -> Tensor:
    return output.logits[:, -1]  # type: ignore[no-any-return]


def _right(p: Tensor, y: Tensor) -> list[float]:
    """Return the share of right answers and the negative log-likelihood in nats."""
    nll = -p.gather(1, y[:, None]).clamp_min(1e-30).log()
    return [float((p.argmax(1) == y).double().mean()), float(nll.mean())]


def language_table(record: dict[str, Any]) -> str:
    """Means over seeds: share of right next characters, and nats."""
    rows = []
    for kind in next(iter(record["runs"][0].values())):
        cells = []
        for trained_with in record["runs"][0]:
            pairs = [run[trained_with][kind] for run in record["runs"]]
            cells += [f"{statistics.mean(p[0] for p in pairs):.1%}", f"{statistics.mean(p[1] for p in pairs):.3f}"]
        rows.append([kind, *cells])
    return markdown_table(["network", "trained without dropout", "nats", "trained with 0.1", "nats"], rows)


PARTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "regions": regions,
    "shift": shift,
    "labels": labels,
    "acquire": acquire,
    "language": language,
}


if __name__ == "__main__":
    main()

"""Measure what calibrated probabilities and sets of several labels are worth: `python -m benchmarks.labels`

They are compared with the model's own probabilities, and sets that may miss a tenth of the labels with those of
probability above one half.
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy as cross_entropy
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.nets import BATCH, Rows, calibration_error, divided, mlp, scaled, trained
from benchmarks.sets import shipped
from benchmarks.timing import by_sets, markdown_table
from latedrop import calibrate_multilabel

MISSED = 0.1


def compared(name: str, seed: int) -> dict[str, Any]:
    """Return the measures of the model and of its calibration."""
    train, validation, other, (x, y) = scaled(divided(SETS[name](seed), seed, (0.4, 0.15, 0.15, 0.3)), targets=False)
    torch.manual_seed(seed)
    net = mlp(x.shape[1], y.shape[1])
    epochs = [batch for _ in range(30) for batch in torch.randperm(len(train[0])).split(BATCH)]
    net = trained(net, train, batches=epochs, loss=binary_cross_entropy_with_logits, decay=False)
    uq = calibrate_multilabel(net, validation).control(other)
    p = uq.predict(x)
    probabilities = torch.sigmoid(p.logits), p.probabilities
    sets = probabilities[0] >= 0.5, p.label_set(MISSED)
    return {
        "nll": [float(cross_entropy(each.clamp(1e-12, 1 - 1e-12), y.double())) for each in probabilities],
        "ece": [calibration_error(each.flatten(), y.double().flatten()) for each in probabilities],
        "missed": [missed(each, y) for each in sets],
        "size": [float(each.sum(1).double().mean()) for each in sets],
        "labels": float(y.sum(1).mean()),
    }


def missed(inside: Tensor, y: Tensor) -> float:
    """Return the mean over rows of the share of their labels that a set does not have."""
    return float(((y.bool() & ~inside).sum(1) / y.sum(1).clamp_min(1)).mean())


def _pairs(seed: int) -> Rows:
    """Return two digits of scikit-learn side by side, with noise: labels are the digits there.

    An image is in several rows, also of different parts, each time with other noise and another neighbour.
    """
    dice, (digits, classes), count = torch.Generator().manual_seed(seed), shipped("load_digits"), 3000
    images = digits.reshape(-1, 8, 8) / 16
    which = torch.randint(len(images), (count, 2), generator=dice)
    labels = torch.zeros(count, 10).scatter_(1, classes[which], 1.0)
    empty = torch.rand(count, generator=dice) < 0.3  # one digit alone
    labels[empty] = nn.functional.one_hot(classes[which[empty, 0]], 10).float()
    second = torch.where(empty[:, None, None], 0.0, images[which[:, 1]])
    both = torch.cat([images[which[:, 0]], second], 2)
    return (both + 0.3 * torch.randn(both.shape, generator=dice)).flatten(1), labels


def _sums(seed: int) -> Rows:
    """Return labels with noise, rare ones among them, by directions of the inputs."""
    dice = torch.Generator().manual_seed(seed)
    x = torch.randn(3000, 20, generator=dice)
    directions, shifts = torch.randn(20, 12, generator=dice) / 3, torch.linspace(-4, 0, 12)
    return x, (torch.rand(3000, 12, generator=dice) < torch.sigmoid(2 * x @ directions + shifts)).float()


SETS: dict[str, Callable[[int], Rows]] = {
    "two digits, ten labels": _pairs,
    "directions, twelve labels (synthetic)": _sums,
}


def table(record: dict[str, Any]) -> str:

    def mean(runs: list[dict[str, Any]], key: str, digits: str) -> list[str]:
        return [format(statistics.mean(run[key][i] for run in runs), digits) for i in range(2)]

    rows = []
    for name, runs in record["sets"].items():
        spread = statistics.stdev(run["missed"][1] for run in runs)
        half, control = mean(runs, "missed", ".1%")
        labels_there = f"{statistics.mean(run['labels'] for run in runs):.1f}"
        figures = [*mean(runs, "nll", ".3f"), *mean(runs, "ece", ".3f"), half, f"{control} (± {spread:.1%})"]
        rows.append([name, *figures, labels_there, *mean(runs, "size", ".1f")])
    head = ["labels", "nats: model", "calibrated", "ECE: model", "calibrated", "missed: p > 0.5", "sets"]
    return markdown_table([*head, "labels there", "size: p > 0.5", "sets"], rows)


if __name__ == "__main__":
    by_sets("labels", compared, SETS, seeds=10, missed=MISSED)

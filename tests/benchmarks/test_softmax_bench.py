"""What the benchmark of the mean softmax compares with is right where the answer is known."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks import softmax
from latedrop.calibration.softmax import log_mean_softmax


def test_gaussian_logits_of_two_classes_are_integrated() -> None:
    z = torch.tensor([[2.0, 0.0], [-1.0, 1.0]], dtype=torch.float64)
    spread = 4 * (1 - torch.eye(2, dtype=torch.float64)).expand(2, 2, 2)
    closed = log_mean_softmax(z, spread, torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(softmax.integrated(z, spread), closed, atol=2e-3, rtol=0)


def test_parts_add_up_and_become_tables() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)).eval().requires_grad_(False)
    x, y = torch.randn(40, 4), torch.arange(40) % 3
    found = softmax.errors(net, (x, y), (x[:20], y[:20]))
    for row in found["by"].values():
        assert abs(row["first_order"] + row["closed"] - row["together"]) < 1e-9
    assert softmax.error_table({"error": {"a net": found}}).count("\n") == 1 + len(softmax.RATES)

"""Check that a row's mean and variance do not depend on the rows beside it, their number and their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from latedrop import Sites, inject, linearize, sample
from rounding import assert_same_up_to_rounding

RATE, DRAWS = 0.3, 12


def check_rows_alone(
    model: nn.Module,
    take: Callable[[list[int]], Any],
    batches: Sequence[list[int]],
    sites: Sites,
    *,
    linear: bool = True,
    collate: Any = None,
) -> Tensor:
    """Draws and first order of every batch, `take(rows)`, are those of each row alone; gives the draws of the last."""
    for rows in batches:
        x, each = take(rows), [take([row]) for row in rows]
        many = sample(model, x, RATE, DRAWS, sites=sites, keep_draws=True, collate=collate)
        alone = [sample(model, one, RATE, DRAWS, sites=sites, keep_draws=True, collate=collate) for one in each]
        by_row_draws = torch.cat([moments.outputs for moments in alone if moments.outputs is not None], 1)
        assert_same_up_to_rounding(many.outputs, by_row_draws)
        loop = sample(model, x, RATE, DRAWS, sites=sites, engine="loop", collate=collate)
        assert_same_up_to_rounding(loop.variance, many.variance)
        if linear:
            first_order = linearize(model, x, sites, collate=collate).variance_by_site
            by_row = torch.cat([linearize(model, one, sites, collate=collate).variance_by_site for one in each])
            assert_same_up_to_rounding(first_order, by_row)
    return many.outputs


def injected(model: nn.Module, sites: Sites, *inputs: Any) -> Tensor:
    """Return the same draws, one pass after the other, as the user would run them."""
    outputs = []
    with torch.no_grad(), inject(model, sites, RATE):
        for _ in range(DRAWS):
            outputs.append(model(*inputs))
    return torch.stack(outputs)


def slope_of_small_rates(model: nn.Module, x: Any, sites: Sites, collate: Any = None) -> Tensor:
    """Variance over draws at a small rate, per unit of `rate / (1 - rate)`: the limit that first order is."""
    rate = 1e-3
    moments = sample(model, x, rate, 20_000, sites=sites, collate=collate)
    return moments.variance / (rate / (1 - rate))

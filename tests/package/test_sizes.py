"""Sizes of rows that a model's code reads: rows of one size in the example tell nothing about others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from latedrop import find_sites, linearize, sample
from latedrop.errors import SiteError
from rounding import assert_same_up_to_rounding


class Graphs(nn.Module):
    """Nodes of padded graphs, taken out by sizes that Python reads, and summed for each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        counts = sizes.tolist()
        nodes = torch.cat([row[:count] for row, count in zip(x, counts, strict=True)])
        hidden = self.second(self.first(nodes).tanh()).tanh()
        return self.head(torch.stack([part.sum(0) for part in hidden.split(counts)]))  # type: ignore[no-any-return]


def test_equal_sizes_of_the_example_are_not_taken_for_all() -> None:
    torch.manual_seed(0)
    model, x = Graphs().eval(), torch.randn(6, 4, 3)
    same = torch.full((6,), 3)
    with pytest.raises(SiteError, match="kind='channel'"):
        find_sites(model, x, same)
    sites = find_sites(model, x, same, kind="channel")
    sizes = torch.tensor([3, 3, 3, 2, 4, 3])  # as many in all
    for measured in (
        lambda *part: sample(model, part, 0.2, 30, sites=sites).variance,
        lambda *part: linearize(model, part, sites).variance_by_site.sum(2),
    ):
        together = measured(x, sizes)
        alone = torch.cat([measured(x[i : i + 1], sizes[i : i + 1]) for i in range(6)])
        assert_same_up_to_rounding(alone, together)

"""Graphs of any number of nodes: all nodes of a batch in one tensor, then summed graph by graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from alone import check_rows_alone, injected, slope_of_small_rates
from latedrop import Batches, calibrate, find_sites, linearize, load, propagate, sample
from latedrop.errors import ArgumentError, DataError, OutputError, SiteError
from latedrop.network.sites import Kind
from networks import Net
from quick import quick
from rounding import assert_same_up_to_rounding, rounding

Graph = dict[str, Tensor]
BATCHES = ([0, 1, 2], [3], [5, 3, 0, 4], [8, 7, 6, 5, 4, 3, 2, 1, 0])


def graphs(sizes: list[int], seed: int = 0) -> list[Graph]:
    """Rings with a chord."""
    generator, items = torch.Generator().manual_seed(seed), []
    for size in sizes:
        nodes = torch.randn(size, 4, generator=generator)
        ring = torch.stack([torch.arange(size), torch.arange(size).roll(1)])
        items.append({"nodes": nodes, "edges": torch.cat([ring, ring.flip(0), torch.tensor([[0], [size // 2]])], 1)})
    return items


EQUAL_FIRST = graphs([3, 3, 3, 2, 4, 3, 5, 1, 3])  # the sizes of the first six divide by 3 and by 6
MIXED = graphs([5, 2, 3, 1, 4, 7, 2, 6, 3])


def one_batch(items: list[Graph]) -> tuple[Tensor, Tensor, Tensor, int]:
    """Nodes, edges, and the graph of each node."""
    sizes = [len(item["nodes"]) for item in items]
    first = np.cumsum([0, *sizes])[:-1].tolist()
    edges = torch.cat([item["edges"] + start for item, start in zip(items, first, strict=True)], 1)
    owner = torch.repeat_interleave(torch.arange(len(items)), torch.tensor(sizes))
    return torch.cat([item["nodes"] for item in items]), edges, owner, len(items)


class MessagePassing(nn.Module):
    """Two rounds of messages, a sum over each graph, and two layers for the sums."""

    def __init__(self, pool: str = "index_add") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.message, self.update = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(16, 8)
        self.hidden, self.leave, self.pool = nn.Linear(8, 8), nn.Linear(8, 1), pool

    def forward(self, nodes: Tensor, edges: Tensor, owner: Tensor, count: int) -> Tensor:
        h = self.enter(nodes).tanh()
        for _ in range(2):
            sent = torch.zeros_like(h).index_add(0, edges[1], self.message(h[edges[0]]))
            h = self.update(torch.cat([h, sent], 1)).tanh()
        return self.leave(self.hidden(self._sums(h, owner, count)).tanh())

    def _sums(self, h: Tensor, owner: Tensor, count: int) -> Tensor:
        if self.pool == "scatter":
            return h.new_zeros(count, 8).scatter_add(0, owner[:, None].expand(-1, 8), h)
        if self.pool == "segment":
            return torch.segment_reduce(h, "sum", lengths=owner.bincount(minlength=count))
        return h.new_zeros(count, 8).index_add(0, owner, h)


class Padded(MessagePassing):
    """Takes nodes that are padded to `(graphs, nodes, 4)` and how many are real; puts all real ones into one tensor."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        del self.update

    def forward(self, nodes: Tensor, sizes: Tensor) -> Tensor:  # type: ignore[override]
        real = torch.arange(nodes.shape[1]) < sizes[:, None]
        owner = real.nonzero()[:, 0]
        if self.how == "mask":
            h = self.enter(nodes)[real].tanh()
        elif self.how == "nonzero":
            h = self.enter(nodes[tuple(real.nonzero().T)]).tanh()
        else:
            h = self.enter(torch.cat([row[:size] for row, size in zip(nodes, sizes.tolist(), strict=True)])).tanh()
            owner = torch.repeat_interleave(torch.arange(len(nodes)), sizes)
        h = self.message(h).tanh()
        return self.leave(self.hidden(self._sums(h, owner, len(nodes))).tanh())


def padded(items: list[Graph]) -> tuple[Tensor, Tensor]:
    sizes = torch.tensor([len(item["nodes"]) for item in items])
    return nn.utils.rnn.pad_sequence([item["nodes"] for item in items], batch_first=True), sizes


@pytest.mark.parametrize("pool", ["index_add", "scatter", "segment"])
@pytest.mark.parametrize("items", [EQUAL_FIRST, MIXED], ids=["equal first", "mixed"])
def test_a_graph_is_the_same_in_every_batch(items: list[Graph], pool: str) -> None:
    model = MessagePassing(pool)
    sites = find_sites(model, items, kind="channel", collate=one_batch)
    assert [site.name for site in sites] == ["message", "update", "hidden", "leave"]
    assert {site.batch_axis for site in sites} == {None}
    draws = check_rows_alone(model, lambda rows: [items[i] for i in rows], BATCHES, sites, collate=one_batch)
    assert_same_up_to_rounding(draws, injected(model, sites, *one_batch([items[i] for i in BATCHES[-1]])))


def test_sizes_that_the_examples_did_not_show() -> None:
    """All example graphs have one node, as many as there are rows."""
    model, items = MessagePassing(), graphs([1, 1, 1, 1, 3, 2, 4])
    sites = find_sites(model, items[:4], kind="channel", collate=one_batch)
    check_rows_alone(model, lambda rows: [items[i] for i in rows], ([4, 5, 6], [0, 4, 5]), sites, collate=one_batch)
    padding, (nodes, sizes) = Padded("mask"), padded(items)
    sites = find_sites(padding, nodes[:4], sizes[:4], kind="channel")
    check_rows_alone(padding, lambda rows: (nodes[rows], sizes[rows]), ([4, 5, 6], [0, 4, 5]), sites)
    refused = r"site 'message' to have a multiple of 3 entries.*found shape \(9, 8\).*find the sites on such examples"
    sites = find_sites(Padded("loop"), nodes[:4], sizes[:4])
    with pytest.raises(SiteError, match=refused):
        linearize(Padded("loop"), (nodes[4:], sizes[4:]), sites)


@pytest.mark.parametrize("how", ["mask", "nonzero", "loop"])
@pytest.mark.parametrize("items", [EQUAL_FIRST, MIXED], ids=["equal first", "mixed"])
def test_real_nodes_of_padded_graphs(items: list[Graph], how: str) -> None:
    model, (nodes, sizes) = Padded(how), padded(items)
    sites = find_sites(model, nodes, sizes, kind="channel")
    assert [site.name for site in sites] == ["message", "hidden", "leave"]
    check_rows_alone(model, lambda rows: (nodes[rows], sizes[rows]), BATCHES, sites)


@pytest.mark.slow
def test_first_order_is_the_limit_of_small_rates() -> None:
    model, items = MessagePassing(), MIXED[:4]
    sites = find_sites(model, items, kind="channel", collate=one_batch)
    variances = linearize(model, items, sites, collate=one_batch).variance_by_site.sum(-1)
    # 20 000 draws of rare masks: a relative standard error of about 5 %.
    torch.testing.assert_close(slope_of_small_rates(model, items, sites, one_batch), variances, rtol=0.25, atol=1e-6)


def shared_shift(net: Net, x: Tensor) -> Tensor:
    """Add the same shift, made of weights alone, to every row: no entry of that belongs to one row."""
    shift: Tensor = net.shift(net.make(net.weights).relu()).sum()
    return net.enter(x).tanh() + shift


@pytest.mark.parametrize("kind", ["element", "channel"])
@pytest.mark.parametrize("rows", [9, 10, 33])
def test_entries_that_serve_all_rows_count_for_each(rows: int, kind: Kind) -> None:
    """Their mean number of a row is a whole one where there is an odd number of rows."""
    layers = {"make": nn.Linear(4, 8), "shift": nn.Linear(8, 5), "enter": nn.Linear(5, 1)}
    model, x = Net(shared_shift, weights=nn.Parameter(torch.randn(3, 4)), **layers), torch.randn(rows, 5)
    sites = find_sites(model, x, kind=kind)
    each = torch.cat([linearize(model, row, sites).variance_by_site for row in x.split(1)])
    torch.testing.assert_close(linearize(model, x, sites).variance_by_site, each)


@pytest.mark.parametrize("items", [EQUAL_FIRST, MIXED], ids=["equal first", "mixed"])
def test_element_masks_are_refused_with_the_right_advice(items: list[Graph]) -> None:
    with pytest.raises(SiteError, match=r"as many entries for every row.*'message'.*nodes of graphs.*kind='channel'"):
        find_sites(MessagePassing(), items, kind="element", collate=one_batch)
    with pytest.raises(SiteError, match=r"entries for every row.*'message'.*kind='channel'"):
        find_sites(Padded("mask"), *padded(items))
    chosen = [(site.name, site.kind) for site in find_sites(MessagePassing(), items, collate=one_batch)]
    assert chosen == [("message", "channel"), ("update", "channel"), ("hidden", "element"), ("leave", "element")]
    assert [s.name for s in find_sites(MessagePassing(), items, select=["hidden", "leave"], collate=one_batch)]


def test_masks_of_ones_own_are_refused() -> None:
    sites = find_sites(MessagePassing(), MIXED, kind="channel", collate=one_batch)
    with pytest.raises(ArgumentError, match=r"rows with shared=False; \['message', 'update', .* have none"):
        sample(MessagePassing(), MIXED, 0.1, 5, sites=sites, shared=False, collate=one_batch)
    with pytest.raises(ArgumentError, match="expected engine='auto' with collate="):
        sample(MessagePassing(), MIXED, 0.1, 5, sites=sites, engine="compiled", collate=one_batch)
    with pytest.raises(SiteError, match=r"a mask of its own for every unit; site 'message'"):
        propagate(MessagePassing(), MIXED, 0.1, sites, collate=one_batch)


@pytest.mark.filterwarnings("ignore:.* of these rows are rows that the calibration was fitted to")
@pytest.mark.parametrize("method", ["sample", "linear"])
def test_the_whole_road(method: Any, tmp_path: Any) -> None:
    model, items = MessagePassing(), graphs([2 + i % 5 for i in range(40)])
    y = torch.stack([item["nodes"][:, :1].sum(0) for item in items])
    sites, fit = find_sites(model, items, kind="channel", collate=one_batch), quick([0.05, 0.2], 10)
    options: dict[str, Any] = {"sites": sites, "method": method}
    uq = fit(model, (items, y), batches=Batches(7, collate=one_batch), **options)
    halves = [(items[:15], y[:15]), (items[15:], y[15:])]
    again = fit(model, halves, batches=Batches(collate=one_batch), **options)
    assert uq.calibration.scales == pytest.approx(again.calibration.scales, rel=rounding())
    p = uq.predict(items)
    assert_same_up_to_rounding(uq.predict(items[::-1]).variance.flip(0), p.variance)
    assert_same_up_to_rounding(uq.predict(items[3:4]).variance, p.variance[3:4])
    uq.save(tmp_path / "c.json")
    loaded = load(tmp_path / "c.json", model, collate=one_batch)
    assert_same_up_to_rounding(loaded.predict(items).variance, p.variance)
    parts = list(loaded.predict_batches([(items[:30], y[:30]), items[30:32], items[32:]]))
    assert_same_up_to_rounding(torch.cat([part.variance for part in parts]), p.variance)
    assert uq.conformal((items, y)).predict(items[:2]).interval(0.5)[0].shape == (2, 1)
    assert abs(sum(uq.explain(items[:1]).sites.values()) - 1) < 1e-6


class Batch:
    """An object of somebody's own, as graph libraries have them."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts


def test_batches_that_are_objects() -> None:
    class Takes(MessagePassing):
        def forward(self, batch: Batch) -> Tensor:  # type: ignore[override]
            return super().forward(*batch.parts)

    def collate(items: list[Graph]) -> Batch:
        return Batch(*one_batch(items))

    model = Takes()
    sites = find_sites(model, EQUAL_FIRST, kind="channel", collate=collate)
    check_rows_alone(model, lambda rows: [EQUAL_FIRST[i] for i in rows], BATCHES, sites, collate=collate)


def test_a_wrong_collate_is_an_error() -> None:
    model = MessagePassing()
    sites = find_sites(model, MIXED, kind="channel", collate=one_batch)

    def first_two(items: list[Graph]) -> Any:
        return one_batch(items[:2])

    def twice(items: list[Graph]) -> Any:
        return one_batch(items + items)

    def by_size(items: list[Graph]) -> Any:
        return one_batch(sorted(items, key=lambda item: len(item["nodes"])))

    for wrong in (first_two, twice):
        with pytest.raises(OutputError, match=r"counts the 9 examples; found shape .*with collate=, a batch must"):
            sample(model, MIXED, 0.1, 5, sites=sites, collate=wrong)
    for collate, match in (
        (first_two, "collate= to make a batch with one output for each item"),
        (by_size, "collate= to keep the order"),
        (lambda items: [item["no"] for item in items], "collate= to make a batch of 3 items; it raised KeyError"),
    ):
        with pytest.raises(DataError, match=match):
            find_sites(model, MIXED, kind="channel", collate=collate)
    with pytest.raises(DataError, match="a list of items with collate="):
        sample(model, MIXED[0], 0.1, 5, sites=sites, collate=one_batch)
    with pytest.raises(DataError, match="collate= to be a function"):
        sample(model, MIXED, 0.1, 5, sites=sites, collate="stack")  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"one target for each of the 9 input rows.*collate="):
        calibrate(model, (MIXED, torch.zeros(8, 1)), batches=Batches(collate=one_batch))


def test_what_is_not_finite_is_found_in_the_batch() -> None:
    model, bad = MessagePassing(), graphs([3, 4, 5])
    sites = find_sites(model, bad, kind="channel", collate=one_batch)
    bad[1]["nodes"][0, 0] = torch.nan
    with pytest.raises(DataError, match="found 1 NaN or inf among 48 input values"):
        sample(model, bad, 0.1, 5, sites=sites, collate=one_batch)

"""What a prediction for graphs costs, in plain passes: CPU time of one thread, both in turns in one process.

    python -m benchmarks.graphs    # writes results/graphs.json; python -m benchmarks.pages draws the table

Graphs have 20 to 30 nodes with places at random; edges come from the nearest neighbors of each. Targets are the outputs
of the network with noise that grows with them, so that every term has a share. Two calls are not counted: the first
batch tells which entries are whose.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import latedrop
from benchmarks.timing import interval, machine, markdown_table, passes, write

GRAPHS, ROWS, INPUTS, EDGE_INPUTS, ROUNDS = 128, 200, 16, 5, 15
WIDTHS = (64, 128)

if find_spec("torch_geometric") is not None:  # the table is drawn without it
    from torch_geometric.data import Batch, Data
    from torch_geometric.loader import DataLoader
    from torch_geometric.nn import GATConv, GCNConv, NNConv, SchNet, global_add_pool
    from torch_geometric.utils import to_dense_batch


class Convolutions(nn.Module):
    """Three convolutions, and a sum over each graph unless it is about nodes."""

    def __init__(self, conv: Callable[[int, int], nn.Module], width: int, *, nodes: bool) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(map(conv, (INPUTS, width, width), [width] * 3))
        self.out, self.nodes = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)), nodes

    def forward(self, data: Any) -> Tensor:
        h = data.x
        for convolution in self.convolutions:
            h = convolution(h, data.edge_index).relu()
        return self.out(h if self.nodes else global_add_pool(h, data.batch))  # type: ignore[no-any-return]


class EdgeNetworks(nn.Module):
    """Three rounds of messages by a network on edges, each an update of nodes by another."""

    def __init__(self, width: int, *, nodes: bool) -> None:
        super().__init__()
        sizes = [2 * width + EDGE_INPUTS, 2 * width] * 3
        parts = [nn.Sequential(nn.Linear(size, width), nn.SiLU(), nn.Linear(width, width)) for size in sizes]
        self.enter, self.parts, self.out = nn.Linear(INPUTS, width), nn.ModuleList(parts), nn.Linear(width, 1)
        self.nodes = nodes

    def forward(self, data: Any) -> Tensor:
        h, (i, j) = self.enter(data.x), data.edge_index
        for edge, node in zip(self.parts[::2], self.parts[1::2], strict=True):
            sent = edge(torch.cat([h[i], h[j], data.edge_attr], 1))
            h = h + node(torch.cat([h, torch.zeros_like(h).index_add(0, j, sent)], 1))
        return self.out(h if self.nodes else global_add_pool(h, data.batch))  # type: ignore[no-any-return]


class EdgeWeights(nn.Module):
    """Three rounds of NNConv, whose weights are made for every edge."""

    def __init__(self, width: int) -> None:
        super().__init__()
        weights = nn.Sequential(nn.Linear(EDGE_INPUTS, width), nn.ReLU(), nn.Linear(width, width * width))
        self.enter, self.conv, self.out = nn.Linear(INPUTS, width), NNConv(width, width, weights), nn.Linear(width, 1)

    def forward(self, data: Any) -> Tensor:
        h = self.enter(data.x).relu()
        for _ in range(3):
            h = h + self.conv(h, data.edge_index, data.edge_attr).relu()
        return self.out(global_add_pool(h, data.batch))  # type: ignore[no-any-return]


class Near(nn.Module):
    """Pairs of near atoms of one graph, made inside of the model."""

    def forward(self, pos: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        places, real = to_dense_batch(pos, batch)
        near = (torch.cdist(places, places) < 1) & real[:, :, None] & real[:, None] & ~torch.eye(places.shape[1]).bool()
        number = real.flatten().cumsum(0).reshape(real.shape) - 1
        graph, a, b = near.nonzero().T
        i, j = number[graph, a], number[graph, b]
        return torch.stack([j, i]), (pos[i] - pos[j]).norm(dim=1)


def attention(size: int, width: int) -> nn.Module:
    return GATConv(size, width // 4, heads=4)  # type: ignore[no-any-return]


NETWORKS: dict[str, tuple[str, int, Callable[[int], nn.Module]]] = {
    "GCN": ("graphs", 3, lambda width: Convolutions(GCNConv, width, nodes=False)),
    "GAT": ("graphs", 3, lambda width: Convolutions(attention, width, nodes=False)),
    "NNConv, half as wide": ("graphs", 3, lambda width: EdgeWeights(width // 2)),
    "SchNet": ("graphs", 3, lambda width: SchNet(width, width, 3, 25, 1.0, interaction_graph=Near())),
    "networks on edges": ("graphs", 12, lambda width: EdgeNetworks(width, nodes=False)),
    "GCN, 3 neighbors": ("nodes", 3, lambda width: Convolutions(GCNConv, width, nodes=True)),
    "GCN, 12 neighbors": ("nodes", 12, lambda width: Convolutions(GCNConv, width, nodes=True)),
    "GAT, 12 neighbors": ("nodes", 12, lambda width: Convolutions(attention, width, nodes=True)),
    "networks on edges, 3 neighbors": ("nodes", 3, lambda width: EdgeNetworks(width, nodes=True)),
    "networks on edges, 12 neighbors": ("nodes", 12, lambda width: EdgeNetworks(width, nodes=True)),
}
"""What the rows are, how many neighbors a node has, and the network of a width."""


def graphs(count: int, neighbors: int, seed: int) -> list[Any]:
    g, made = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        nodes = int(torch.randint(20, 31, (), generator=g))
        pos, x = torch.randn(nodes, 3, generator=g), torch.randn(nodes, INPUTS, generator=g)
        near = torch.cdist(pos, pos).fill_diagonal_(torch.inf).topk(neighbors, largest=False).indices
        edges = torch.stack([near.flatten(), torch.arange(nodes).repeat_interleave(neighbors)])
        z, edge_attr = torch.randint(1, 9, (nodes,), generator=g), torch.randn(edges.shape[1], EDGE_INPUTS, generator=g)
        made.append(Data(x=x, z=z, pos=pos, edge_index=edges, edge_attr=edge_attr))
    return made


def labelled(model: nn.Module, data: list[Any]) -> list[Any]:
    """Return the graphs with targets `y` of each graph or node."""
    g, made = torch.Generator().manual_seed(0), []
    outputs = [plain(model, Batch.from_data_list([graph])) for graph in data]
    spread = torch.cat(outputs).std()
    for graph, output in zip(data, outputs, strict=True):
        noise = spread * torch.randn(output.shape, generator=g) * (2 * output / spread).exp().clamp(0.01, 100)
        made.append(graph.clone().update({"y": output + noise}))
    return made


def measured() -> dict[str, Any]:
    torch.set_num_threads(1)
    record: dict[str, Any] = {"machine": machine(torch.device("cpu")), "graphs": GRAPHS, "widths": WIDTHS}
    record |= {"ratios": {}, "made_of": {}}
    for name, (_, neighbors, network) in NETWORKS.items():
        val, train, new = (graphs(count, neighbors, i) for i, count in enumerate((ROWS, ROWS, GRAPHS)))
        for width in WIDTHS:
            torch.manual_seed(0)
            model, batch = network(width).eval(), Batch.from_data_list(new)
            valid, reference = (DataLoader(part, 50) for part in (labelled(model, val), train))
            uq = latedrop.calibrate(model, valid, reference=reference, progress=False)
            ratios = passes(partial(uq.predict, batch), partial(plain, model, batch), ROUNDS)
            record["ratios"].setdefault(name, []).append(interval(ratios))
            record["made_of"].setdefault(name, []).append(uq.calibration.terms.choice)
            print(name, width, f"{statistics.median(ratios):.1f}", uq.calibration.terms.choice, flush=True)
    return record


@torch.no_grad()
def plain(model: nn.Module, batch: Any) -> Tensor:
    return model(batch.z, batch.pos, batch.batch) if isinstance(model, SchNet) else model(batch)  # type: ignore[no-any-return]


def markdown(record: dict[str, Any]) -> str:
    """The table of benchmarks/NOTES.md; a star where the forest has no share."""
    rows = []
    for name, ratios in record["ratios"].items():
        pairs = zip(ratios, record["made_of"][name], strict=True)
        cells = [f"{m:.1f} ({low:.1f} to {high:.1f}){'' if 'forest' in of else ' *'}" for (low, m, high), of in pairs]
        rows.append([name, NETWORKS[name][0], *cells])
    return markdown_table(["network", "rows", *(f"width {width}" for width in record["widths"])], rows, words=2)


if __name__ == "__main__":
    write("graphs", measured())

"""Measure what a prediction for graphs costs, in plain passes: `python -m benchmarks.graphs`

CPU time of one thread, prediction and plain pass in turns. Graphs have 20 to 30 nodes with random places; edges come
from the nearest neighbors of each. Targets are outputs of the network with noise that grows with them, so that every
term has a share.
"""

import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import latedrop
from benchmarks.nets import mlp
from benchmarks.timing import interval, machine, markdown_table, write

GRAPHS, ROWS, INPUTS, EDGE_INPUTS, WIDTHS, ROUNDS = 128, 200, 16, 5, (64, 128), 15

if find_spec("torch_geometric") is not None:  # the table is drawn without it
    from torch_geometric.data import Batch, Data
    from torch_geometric.loader import DataLoader
    from torch_geometric.nn import GAT, GCN, NNConv, SchNet, global_add_pool
    from torch_geometric.utils import to_dense_batch


class Convolutions(nn.Module):
    """Three convolutions, and a sum over each graph unless nodes are the rows."""

    def __init__(self, conv: Callable[..., nn.Module], width: int, *, nodes: bool = False) -> None:
        super().__init__()
        self.convolutions, self.out, self.nodes = conv(INPUTS, width, 3), mlp(width, hidden=(width,)), nodes

    def forward(self, data: Any) -> Tensor:
        h = self.convolutions(data.x, data.edge_index).relu()
        return self.out(h if self.nodes else global_add_pool(h, data.batch))


class Messages(nn.Module):
    """Three rounds of messages by a network on edges, each an update of nodes by another; or three by `NNConv`."""

    def __init__(self, width: int, *, nodes: bool = False, weights: bool = False) -> None:
        super().__init__()
        self.enter, self.out, self.nodes = nn.Linear(INPUTS, width), nn.Linear(width, 1), nodes
        sizes = [] if weights else [2 * width + EDGE_INPUTS, 2 * width] * 3
        parts = [nn.Sequential(nn.Linear(size, width), nn.SiLU(), nn.Linear(width, width)) for size in sizes]
        self.parts = nn.ModuleList(parts)
        self.conv = NNConv(width, width, mlp(EDGE_INPUTS, width**2, (width,))) if weights else None

    def forward(self, data: Any) -> Tensor:
        h, (i, j) = self.enter(data.x), data.edge_index
        if self.conv is not None:
            h = h.relu()
            for _ in range(3):
                h = h + self.conv(h, data.edge_index, data.edge_attr).relu()
        for edge, node in zip(self.parts[::2], self.parts[1::2], strict=True):
            sent = edge(torch.cat([h[i], h[j], data.edge_attr], 1))
            h = h + node(torch.cat([h, torch.zeros_like(h).index_add(0, j, sent)], 1))
        return self.out(h if self.nodes else global_add_pool(h, data.batch))


def schnet(width: int) -> nn.Module:
    def near(pos: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:  # pairs of one graph, inside of the model
        places, real = to_dense_batch(pos, batch)
        pairs = (torch.cdist(places, places) < 1) & real[:, :, None] & real[:, None]
        number = real.flatten().cumsum(0).reshape(real.shape) - 1
        graph, a, b = (pairs & ~torch.eye(places.shape[1]).bool()).nonzero().T
        i, j = number[graph, a], number[graph, b]
        return torch.stack([j, i]), (pos[i] - pos[j]).norm(dim=1)

    return SchNet(width, width, 3, 25, 1.0, interaction_graph=near)


NETWORKS: dict[str, tuple[int, Callable[[int], nn.Module]]] = {
    "GCN": (3, lambda width: Convolutions(GCN, width)),
    "GAT": (3, lambda width: Convolutions(partial(GAT, heads=4), width)),
    "NNConv, half as wide": (3, lambda width: Messages(width // 2, weights=True)),
    "SchNet": (3, schnet),
    "networks on edges": (12, Messages),
    "GCN, 3 neighbors": (3, lambda width: Convolutions(GCN, width, nodes=True)),
    "GCN, 12 neighbors": (12, lambda width: Convolutions(GCN, width, nodes=True)),
    "GAT, 12 neighbors": (12, lambda width: Convolutions(partial(GAT, heads=4), width, nodes=True)),
    "networks on edges, 3 neighbors": (3, lambda width: Messages(width, nodes=True)),
    "networks on edges, 12 neighbors": (12, lambda width: Messages(width, nodes=True)),
}
"""The neighbors of a node, and the network of a width; rows are nodes where the name has the neighbors."""


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


@torch.no_grad()
def plain(model: nn.Module, batch: Any) -> Tensor:
    return model(batch.z, batch.pos, batch.batch) if isinstance(model, SchNet) else model(batch)


def measured(name: str, width: int) -> tuple[list[float], str]:
    """Return the CPU time of a prediction in plain passes, after two rounds that do not count, and the terms."""
    torch.manual_seed(0)
    neighbors, network = NETWORKS[name]
    valid, train, new = (graphs(count, neighbors, i) for i, count in enumerate((ROWS, ROWS, GRAPHS)))
    model, batch, ratios = network(width).eval(), Batch.from_data_list(new), []
    outputs, g = [plain(model, Batch.from_data_list([graph])) for graph in valid], torch.Generator().manual_seed(0)
    spread = torch.cat(outputs).std()
    for graph, y in zip(valid, outputs, strict=True):
        graph.y = y + spread * torch.randn(y.shape, generator=g) * (2 * y / spread).exp().clamp(0.01, 100)
    uq = latedrop.calibrate(model, DataLoader(valid, 50), reference=DataLoader(train, 50), progress=False)
    for _ in range(ROUNDS + 2):
        start = time.process_time()
        uq.predict(batch)
        middle = time.process_time()
        plain(model, batch)
        ratios.append((middle - start) / (time.process_time() - middle))
    return interval(ratios[2:]), uq.calibration.terms.choice


def table(record: dict[str, Any]) -> str:
    rows = []
    for name, ratios in record["ratios"].items():
        pairs = zip(ratios, record["made_of"][name], strict=True)
        cells = [f"{m:.1f} ({low:.1f} to {high:.1f}){'' if 'forest' in of else ' *'}" for (low, m, high), of in pairs]
        rows.append([name, "nodes" if "neighbors" in name else "graphs", *cells])
    return markdown_table(["network", "rows", *(f"width {width}" for width in record["widths"])], rows, words=2)


if __name__ == "__main__":
    torch.set_num_threads(1)
    pairs = {name: list(zip(*(measured(name, width) for width in WIDTHS), strict=True)) for name in NETWORKS}
    ratios, made_of = ({name: pair[place] for name, pair in pairs.items()} for place in range(2))
    about = {"machine": machine(torch.device("cpu")), "graphs": GRAPHS, "widths": WIDTHS}
    write("graphs", {**about, "ratios": ratios, "made_of": made_of})

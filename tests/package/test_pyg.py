"""Networks of PyTorch Geometric as they are: loaders of graphs go in, one interval for each graph or each node."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from latedrop import Batches, Predictor, Terms, calibrate, calibrate_multilabel, find_sites, linearize, load, sample
from latedrop.errors import ArgumentError, DataError, LatedropWarning, OutputError, SiteError
from rounding import assert_same_up_to_rounding
from untouched import assert_same, state

with contextlib.suppress(ImportError):
    import rich.style  # noqa: F401 - scikit-learn imports it late, and it takes a random number when it is imported
pytest.importorskip("torch_geometric", reason="not installed: torch_geometric")
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GATConv, GCNConv, NNConv, SchNet, global_add_pool, global_mean_pool


def graphs(count: int, fewest: int = 2, most: int = 8, seed: int = 0) -> list[Data]:
    """Random trees with numbers on nodes and edges, places, and targets of the graph and of each node."""
    g, made = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        n = int(torch.randint(fewest, most + 1, (), generator=g))
        ends = torch.tensor([(i, int(torch.randint(0, i, (), generator=g))) for i in range(1, n)]).T
        x, edges = torch.randn(n, 4, generator=g), torch.cat([ends, ends.flip(0)], 1)
        node = (x[:, :1] * torch.zeros(n, 1).index_add(0, edges[1], x[edges[0], :1])).tanh()
        attributes = {"node_y": node, "y": node.sum().reshape(1, 1), "label": (node.sum() > 0).long().reshape(1)}
        numbers = {"edge_attr": torch.randn(edges.shape[1], 3, generator=g), "pos": 2 * torch.randn(n, 3, generator=g)}
        kinds = torch.randint(1, 9, (n,), generator=g)
        made.append(Data(x=x, edge_index=edges, z=kinds, **numbers, **attributes))
    return made


class OfBatch(nn.Module):
    """Takes the batch; two rounds of a convolution, and a sum over each graph unless it is about nodes."""

    def __init__(self, conv: Any = GCNConv, out: int = 1, *, nodes: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.out, self.nodes = conv(4, 16), conv(16, 16), nn.Linear(16, out), nodes

    def forward(self, data: Any) -> Tensor:
        h = self.second(self.first(data.x, data.edge_index).relu(), data.edge_index).relu()
        return self.out(h if self.nodes else global_add_pool(h, data.batch))


class OfAttributes(nn.Module):
    """Takes attributes by their names, and has an own weight for every edge."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 8)
        self.conv = NNConv(8, 8, nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 64)), aggr="mean")
        self.out = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor | None = None) -> Tensor:
        h = self.enter(x).relu()
        for _ in range(2):
            h = h + self.conv(h, edge_index, edge_attr).relu()
        return self.out(global_mean_pool(h, batch))  # type: ignore[no-any-return]


class Pairs(nn.Module):
    """Edges between near atoms of one graph, made inside of the model: their number is in no batch."""

    def forward(self, pos: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        near = (torch.cdist(pos, pos) < 4) & (batch[:, None] == batch) & ~torch.eye(len(pos), dtype=torch.bool)
        i, j = near.nonzero().T
        return torch.stack([j, i]), (pos[i] - pos[j]).norm(dim=1)


def schnet() -> nn.Module:
    return SchNet(16, 16, 2, 8, 4.0, interaction_graph=Pairs())  # type: ignore[no-any-return]


def attention(width: int, out: int) -> nn.Module:
    return GATConv(width, out // 2, heads=2)  # type: ignore[no-any-return]


MODELS: dict[str, Any] = {
    "GCN": OfBatch,
    "GAT": lambda: OfBatch(attention),
    "MPNN": OfAttributes,
    "SchNet": schnet,
    "nodes": lambda: OfBatch(nodes=True),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_five_lines(name: str, tmp_path: Any) -> None:
    model, nodes = MODELS[name]().eval(), name == "nodes"
    batches = Batches(unpack="node_y" if nodes else None)
    train, val, test = graphs(80, seed=1), graphs(70, seed=2), graphs(12, seed=3)
    loaders = [DataLoader(rows, 32, generator=torch.Generator()) for rows in (val, train)]
    before = state(model)
    uq = calibrate(model, loaders[0], reference=loaders[1], batches=batches, progress=False)
    assert_same(before, state(model))
    terms = uq.calibration.terms
    assert {"leverage", "gradients"} <= {term.name for term in terms.terms}
    assert terms.reference_rows == sum(graph.num_nodes if nodes else 1 for graph in train)
    batch = next(iter(DataLoader(test, 12)))
    p = uq.predict(batch)
    assert p.mean.shape == (batch.num_nodes if nodes else 12, 1)
    assert bool(p.std.isfinite().all())
    own = model(batch) if name in ("GCN", "GAT", "nodes") else None
    if own is not None:
        assert_same_up_to_rounding(p.mean, own.detach())
    rows = slice(int(batch.ptr[5]), int(batch.ptr[6])) if nodes else slice(5, 6)
    for alone in (uq.predict(test[5]), uq.predict([test[5]]), next(uq.predict_batches(DataLoader([test[5]])))):
        assert_same_up_to_rounding(alone.std, p.std[rows])
        assert_same_up_to_rounding(alone.novelty, p.novelty[rows])
    uq.save(tmp_path / "graphs.json")
    assert_same_up_to_rounding(load(tmp_path / "graphs.json", model).predict(batch).std, p.std)


@pytest.mark.parametrize("name", MODELS)
def test_draws_of_a_batch(name: str) -> None:
    """At rate 0 the plain model; all draws at once are those of a loop; a graph has the same alone."""
    model, test = MODELS[name]().eval(), graphs(7)
    batch = Batch.from_data_list(test)
    sites = find_sites(model, batch)
    calm = sample(model, batch, 0.0, 4, sites=sites)
    assert float(calm.variance.max()) == 0
    together = sample(model, batch, 0.2, 6, sites=sites, keep_draws=True)
    loop = sample(model, batch, 0.2, 6, sites=sites, engine="loop", keep_draws=True)
    assert bool((together.variance > 0).any())
    assert_same_up_to_rounding(together.outputs, loop.outputs)
    rows = slice(int(batch.ptr[2]), int(batch.ptr[3])) if name == "nodes" else slice(2, 3)
    alone = sample(model, test[2], 0.2, 6, sites=sites)
    assert_same_up_to_rounding(alone.variance, together.variance[rows])


@pytest.mark.parametrize("name", ["GCN", "GAT", "MPNN", "SchNet"])
def test_first_order_of_many_graphs_is_that_of_each(name: str) -> None:
    model, test = MODELS[name]().eval(), graphs(9)
    sites = find_sites(model, Batch.from_data_list(test))
    together = linearize(model, test, sites).variance_by_site
    each = torch.cat([linearize(model, graph, sites).variance_by_site for graph in test])
    assert_same_up_to_rounding(together, each)


def test_known_layouts_cost_a_third_of_the_backward_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pass learns which layers see nodes and which edges; before it a graph alone has the same std."""
    model, test, gradients = OfAttributes().eval(), graphs(9), torch.autograd.grad
    uq = calibrate(model, DataLoader(graphs(70, seed=2), 35), reference=DataLoader(graphs(80), 40), progress=False)
    first = Predictor(model, uq.calibration).predict(test[3])
    passes: list[int] = []
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: passes.append(1) or gradients(*a, **k))
    uq.predict(test)
    learning = len(passes)
    p = uq.predict(test)
    assert learning == 3 * (len(passes) - learning)
    assert_same_up_to_rounding(p.std[3:4], first.std)


def test_kinds_are_chosen() -> None:
    sites = find_sites(OfBatch().eval(), Batch.from_data_list(graphs(5)))
    assert [(site.name, site.kind, site.batch_axis) for site in sites] == [
        ("second.lin.weight", "channel", None),
        ("out", "element", 0),
    ]
    sites = find_sites(OfBatch(nodes=True).eval(), Batch.from_data_list(graphs(5)))
    assert {(site.kind, site.batch_axis, site.coupled) for site in sites} == {("element", 0, True)}


def test_classes_of_graphs() -> None:
    model = OfBatch(out=2).eval()
    loader = DataLoader(graphs(60), 20)
    uq = calibrate(model, loader, reference=loader, batches=Batches(unpack="label"), progress=False)
    p = uq.predict(graphs(5, seed=9))
    assert p.probabilities.shape == (5, 2)
    assert p.novelty is not None


def test_pairs_data_sets_and_more_nodes_than_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("latedrop.calibration.measure.MOST_ROWS", 100)
    model, val = OfBatch(nodes=True).eval(), graphs(50)
    y = torch.cat([graph.node_y for graph in val])
    uq = calibrate(model, (val, y), reference=graphs(60, seed=4), method=Terms(["dropout", "gradients"]))
    assert 50 <= uq.calibration.rows <= 100
    assert uq.predict(DataLoader(val, 7)).mean.shape == y.shape


def test_nodes_run_together() -> None:
    model, test = OfBatch(nodes=True).eval(), Batch.from_data_list(graphs(9))
    whole, cut = linearize(model, test), linearize(model, test, chunk=4)
    torch.testing.assert_close(whole.variance_by_site, cut.variance_by_site)
    weights = torch.ones(test.num_nodes)
    weights[3] = 0
    with pytest.raises(DataError, match=r"all nodes of a graph.*no node the weight 0"):
        calibrate(model, ([test[i] for i in range(9)], test.node_y), row_weights=weights, progress=False)


def test_errors_in_words() -> None:
    model, val = OfBatch().eval(), graphs(12)
    with pytest.raises(DataError, match=r"targets of graphs as their attribute 'yield'; found .*unpack=name"):
        calibrate(model, DataLoader(val, 4), batches=Batches(unpack="yield"))
    for graph in val:
        graph.two = torch.zeros(2)
    with pytest.raises(DataError, match=r"one target for each of 4 graphs or of their .* shape \(8,\).*\(1, targets\)"):
        calibrate(model, DataLoader(val[:4], 4), batches=Batches(unpack="two"))
    mixed = HeteroData(atom={"x": torch.zeros(2, 4)})
    with pytest.raises(DataError, match=r"one type of nodes; found HeteroData.*collate="):
        calibrate(model, ([mixed, mixed], torch.zeros(2, 1)))

    class Renamed(OfAttributes):
        def forward(self, x: Tensor, edges: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x, edges, weights)

    with pytest.raises(DataError, match=r"parameters named as its attributes .*; found \['edges', 'weights'\]"):
        find_sites(Renamed().eval(), Batch.from_data_list(val))
    with pytest.raises(SiteError, match="as many entries for every row"):
        find_sites(model, Batch.from_data_list(val), kind="element")


def test_graphs_that_see_each_other() -> None:
    class Together(OfBatch):
        def forward(self, data: Any) -> Tensor:
            h = self.first(data.x, data.edge_index).relu()
            h = self.second(h - h.mean(0), data.edge_index).relu()
            return self.out(global_add_pool(h, data.batch))

    batch = Batch.from_data_list(graphs(6))
    with pytest.warns(match="examples that do not depend on each other"):
        sites = find_sites(Together().eval(), batch)
    assert all(site.coupled for site in sites)
    draws = sample(Together().eval(), batch, 0.2, 4, sites=sites)
    assert draws.mean.shape == (6, 1)


def calibrated(nodes: bool, data: Any = None, **options: Any) -> Predictor:
    torch.manual_seed(0)
    data = DataLoader(graphs(60, seed=2), 30) if data is None else data
    batches = Batches(unpack="node_y" if nodes else None)
    return calibrate(OfBatch(nodes=nodes).eval(), data, batches=batches, progress=False, **options)  # type: ignore[return-value]


def with_feature(graph: Data, value: float, name: str = "x") -> Data:
    changed = graph.clone()
    changed[name][0, 0] = value
    return changed


@pytest.mark.parametrize("nodes", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_not_finite_are_refused(value: float, nodes: bool) -> None:
    uq, test = calibrated(nodes), graphs(5)
    bad = [*test[:3], with_feature(test[3], value), test[4]]
    unknown = [with_feature(graph, torch.nan, "node_y") for graph in test]
    assert_same_up_to_rounding(uq.predict(unknown).std, uq.predict(test).std)
    with pytest.raises(DataError, match=r"finite inputs; found 1 NaN or inf among \d+ .* in 1 of 5 graphs.*impute"):
        uq.predict(bad)
    with pytest.raises(DataError, match="inputs that the model takes; it raised AttributeError"):
        uq.predict(test[0].x)
    for wrong in (bad[3], [bad[3]], DataLoader(bad, 2)):
        with pytest.raises(DataError, match="finite inputs; found 1 NaN or inf"):
            uq.predict(wrong)
    for at in (0, 45):
        val = graphs(60, seed=2)
        val[at] = with_feature(val[at], value)
        with pytest.raises(DataError, match="finite inputs; found 1 NaN or inf"):
            calibrated(nodes, DataLoader(val, 30))
        with pytest.raises(DataError, match="finite inputs; found 1 NaN or inf"):
            calibrated(nodes, reference=DataLoader(val, 30))
    with pytest.raises(DataError, match="finite inputs; found 1 NaN or inf"):
        find_sites(OfAttributes().eval(), Batch.from_data_list([with_feature(test[0], value, "edge_attr"), test[1]]))


@pytest.mark.parametrize("nodes", [False, True])
@pytest.mark.parametrize("conv", [GCNConv, attention])
def test_graphs_beyond_numbers(conv: Any, nodes: bool) -> None:
    """Of a graph whose output or leverage overflows nothing is known; all others are answered as ever."""
    model, batches = OfBatch(conv, nodes=nodes).eval(), Batches(unpack="node_y" if nodes else None)
    uq = calibrate(model, DataLoader(graphs(60, seed=2), 30), batches=batches, progress=False)
    test = graphs(5)
    huge = test[1].clone()
    huge.x = huge.x * 1e38
    count = huge.num_nodes if nodes else 1
    for wrong in (huge, [huge], [huge, huge], DataLoader([huge, huge], 1)):
        with pytest.warns(LatedropWarning, match="nothing is known of"):
            p = uq.predict(wrong)
        assert len(p) == count * (1 if wrong is huge or wrong == [huge] else 2)
        assert bool((p.std > 3e38).all())
        assert bool((p.novelty > 3e38).all())
    with pytest.warns(LatedropWarning, match=f"nothing is known of {count} of"):
        p = uq.predict([test[0], huge, *test[2:]])
    usual = uq.predict(test)
    start = test[0].num_nodes if nodes else 1
    beyond = torch.zeros(len(usual), dtype=torch.bool)
    beyond[start : start + count] = True
    assert bool((p.std[beyond] > 3e38).all())
    assert_same_up_to_rounding(p.std[~beyond], usual.std[~beyond])
    with torch.no_grad():
        model.out.bias.fill_(torch.nan)
    with pytest.warns(LatedropWarning, match="weights"), pytest.raises(OutputError, match="finite output"):
        uq.predict(test)


def test_overflowing_validation_graphs_are_told_of() -> None:
    val = graphs(60, seed=2)
    val[0].x = val[0].x.sign() * 3e38
    with pytest.raises((DataError, OutputError), match="finite"):
        calibrated(False, DataLoader(val, 30))


@pytest.mark.parametrize("nodes", [False, True])
def test_graphs_without_a_loader(nodes: bool) -> None:
    val, train, test = graphs(60, seed=2), graphs(60, seed=3), graphs(7)
    exact = calibrated(nodes, DataLoader(val, 60), reference=DataLoader(train, 60)).predict(test)

    def forms(rows: list[Data]) -> list[Any]:
        return [
            rows,
            tuple(rows),
            Batch.from_data_list(rows),
            [Batch.from_data_list(part) for part in (rows[:30], rows[30:])],
        ]

    for data, reference in zip(forms(val), forms(train), strict=True):
        uq = calibrated(nodes, data, reference=reference)
        assert_same_up_to_rounding(uq.predict(test).std, exact.std)
        assert_same_up_to_rounding(uq.predict([Batch.from_data_list(test[:3]), *test[3:]]).std, exact.std)
    assert uq.conformal(graphs(40, seed=8), "node_y" if nodes else None).predict(test).std.shape == exact.std.shape
    if nodes:
        big = graphs(1, fewest=90, most=90)[0]
        assert calibrated(nodes, big).calibration.rows == 90
    with pytest.raises(DataError, match="at least one row; found none"):
        uq.predict([])


def test_several_labels_of_graphs() -> None:
    model, val = OfBatch(out=3).eval(), graphs(60)
    for graph in val:
        graph.y = (graph.x[:1, :3] > 0).float()
    for data in (val, DataLoader(val, 30)):
        uq = calibrate_multilabel(model, data)
        assert uq.predict(val[:5]).probabilities.shape == (5, 3)


def test_graphs_to_label_are_places_in_the_list() -> None:
    pool = graphs(20, seed=5)
    places = calibrated(nodes=False).acquire(pool, 4)
    assert len({*places.tolist()} & {*range(20)}) == 4
    with pytest.raises(ArgumentError, match=r"rows are nodes.*Rank graphs by their nodes"):
        calibrated(nodes=True).acquire(pool, 4)

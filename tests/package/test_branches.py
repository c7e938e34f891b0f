"""Networks in which values decide what runs: one network per kind of row, experts, early exits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from alone import DRAWS, RATE, check_rows_alone, injected
from latedrop import Network, Site, Terms, calibrate, find_sites, inject, linearize, propagate, sample
from latedrop.dropout.first_order import Linearization
from latedrop.errors import ArgumentError, LatedropWarning, SiteError
from networks import Net

BATCHES = ([0], [20], [33], [0, 1, 2, 3], [20, 0, 33, 1, 21], [*range(40)], [*range(39, 0, -1)])


def rows() -> Tensor:
    """The first entry is the kind of the row: the first 18 are of one kind."""
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    x[:, 0] = torch.tensor([0.0] * 18 + [1.0] * 14 + [2.0] * 8)
    return x


class Kinds(nn.Module):
    """A network for each kind of row, called in one of several ways."""

    def __init__(self, how: str, *, routed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(4, 8)
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)) for _ in range(3))
        self.how = how
        if routed:
            self.router = nn.Linear(8, 3)
            with torch.no_grad():
                self.router.weight *= 8

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x).tanh()
        kind = self.router(h).argmax(1) if hasattr(self, "router") else x[:, 0].long()
        if self.how == "each":
            return torch.cat([self.nets[int(k)](row[None]) for k, row in zip(kind, h, strict=True)])
        out = h.new_zeros(len(x), 1)
        for i, net in enumerate(self.nets):
            mine = kind == i
            if self.how == "always":
                out[mine] = net(h[mine])
            elif self.how == "places":
                places = mine.nonzero()[:, 0]
                out = out.index_add(0, places, net(h[places]))
            elif self.how == "any" and mine.any():
                out[mine] = net(h[mine])
            elif self.how == "select" and mine.any():
                out.masked_scatter_(mine[:, None], net(h.masked_select(mine[:, None]).view(-1, 8)))
        return out


WAYS = ["always", "places", "any", "select", "each"]


@pytest.mark.parametrize("how", WAYS)
def test_a_network_for_each_kind_of_row(how: str) -> None:
    model, x = Kinds(how), rows()
    sites = find_sites(model, x, kind="channel")
    assert [site.name for site in sites] == [f"nets.{i}.{j}" for i in range(3) for j in (0, 2)]
    draws = check_rows_alone(model, lambda index: x[index], BATCHES, sites)
    torch.testing.assert_close(draws, injected(model, sites, x[BATCHES[-1]]))


@pytest.mark.filterwarnings("ignore:the output depends on the sites .'router'. in a way that has no gradient")
@pytest.mark.parametrize("how", WAYS)
def test_draws_that_are_routed_apart(how: str) -> None:
    """A mask before the router sends a row to another expert in each draw."""
    model, x = Kinds(how, routed=True), rows()
    sites = find_sites(model, x, kind="channel")
    assert {site.name for site in sites} == {"router"} | {f"nets.{i}.{j}" for i in range(3) for j in (0, 2)}
    check_rows_alone(model, lambda index: x[index], BATCHES, sites)
    with pytest.raises(ArgumentError, match="engine='rows'"):
        sample(model, x, RATE, DRAWS, sites=sites, engine="rows")


def test_rows_that_are_features_alone_need_no_channels() -> None:
    """Where each row has one entry at most, an element is a channel."""
    model, x = Kinds("any"), rows()
    assert find_sites(model, x) == find_sites(model, x, kind="channel")
    with pytest.raises(SiteError, match=r"as many entries for every row.*layer 'nets.0.0'.*Use kind='channel'"):
        find_sites(Kinds("each"), x)

    def of_pictures(net: Net, x: Tensor) -> Tensor:
        h, bright = net.enter(x), x.mean((1, 2, 3)) > 0
        out = h.new_zeros(len(x), 2, 4, 4)
        out[bright], out[~bright] = net.a(h[bright]), net.b(h[~bright])
        return out.mean((2, 3))

    model = Net(of_pictures, enter=nn.Conv2d(1, 2, 3), a=nn.Conv2d(2, 2, 3), b=nn.Conv2d(2, 2, 3))
    images = torch.randn(9, 1, 8, 8)
    with pytest.raises(SiteError, match=r"as many entries for every row.*layer 'a'.*kind='channel'"):
        find_sites(model, images)
    sites = find_sites(model, images, kind="channel")
    check_rows_alone(model, lambda index: images[index], ([0, 3, 5], [8, 7]), sites)


def test_a_branch_that_no_row_takes_is_warned_about() -> None:
    model, x = Kinds("any"), rows()
    unreached = r"none of 30 rows reached the parameters \['nets.2.0.weight', 'nets.2.0.bias', 'nets.2.2.weight'"
    with pytest.warns(LatedropWarning, match=unreached):
        sites = find_sites(model, x[:30])
    assert {site.name for site in sites} == {f"nets.{i}.{j}" for i in range(2) for j in (0, 2)}
    moments = sample(model, x, RATE, DRAWS, sites=sites)
    assert not bool(moments.variance[32:].any())
    assert bool(moments.variance[:32].all())


def test_layers_that_never_run_are_nothing_to_warn_about() -> None:
    """Without a look at values all rows go the same way."""
    layers = {"a": nn.Linear(4, 8), "b": nn.Linear(8, 1), "only_for_training": nn.Linear(8, 1)}
    spare = Net(lambda net, x: net.b(net.a(x).relu()), **layers)
    assert [site.name for site in find_sites(spare, rows())] == ["b"]


def test_a_site_that_does_not_fire_adds_nothing() -> None:
    model, x = Kinds("any"), rows()
    sites = find_sites(model, x)
    names = [site.name for site in sites]
    variances = linearize(model, x, sites).variance_by_site[:, 0]
    for kind, own in ((slice(18), "nets.0."), (slice(18, 32), "nets.1."), (slice(32, 40), "nets.2.")):
        here = torch.tensor([name.startswith(own) for name in names])
        assert bool(variances[kind][:, here].all())
        assert not bool(variances[kind][:, ~here].any())
    with torch.no_grad(), inject(model, sites, RATE, draw=1):
        alone = model(x[:1])
        torch.testing.assert_close(alone, model(x)[:1])


def test_features_of_rows_are_taken_where_layers_always_run() -> None:
    def skips(net: Net, x: Tensor) -> Tensor:
        h, hard = net.enter(x).tanh(), x[:, 1:2] > 0
        if hard.any():
            h = torch.where(hard, net.more(h).tanh(), h)
        return net.leave(h)

    model, x = Net(skips, enter=nn.Linear(4, 8), more=nn.Linear(8, 8), leave=nn.Linear(8, 1)), rows()
    sites = find_sites(model, x)
    assert [site.skipped for site in sites] == [True, False]
    uq = calibrate(model, (x, x.sum(1, keepdim=True)), method=Terms(["leverage"]), progress=False)
    alone = torch.cat([uq.predict(row[None]).variance for row in x])
    torch.testing.assert_close(uq.predict(x).variance, alone)


def test_no_site_fires_at_all() -> None:
    def skips(net: Net, x: Tensor) -> Tensor:
        h, hard = net.enter(x).tanh(), x[:, 0] > 0
        out = h[:, :1].clone()
        if hard.any():
            out[hard] = net.leave(h[hard])
        return out

    model, x = Net(skips, enter=nn.Linear(4, 4), leave=nn.Linear(4, 1)), rows()
    sites = find_sites(model, x)
    assert not bool(sample(model, x[:5], RATE, DRAWS, sites=sites).variance.any())
    assert not bool(linearize(model, x[:5], sites).variance_by_site.any())
    torch.testing.assert_close(linearize(model, x, sites).mean, model(x).detach())


def test_weights_that_are_used_past_their_site_are_warned_about() -> None:
    """A site that ran on every batch when the sites were found, and does not now."""

    class Past(Kinds):
        direct = False

        def forward(self, x: Tensor) -> Tensor:
            h = self.enter(x).tanh()
            return h @ self.nets[1][0].weight.T[:, :1] if self.direct else self.nets[1](h)

    model, x = Past("any"), rows()
    sites = find_sites(model, x, select="nets.1.0")
    model.direct = True
    for run in (
        lambda: sample(model, x, RATE, DRAWS, sites=sites),
        lambda: linearize(model, x, sites),
        lambda: propagate(model, x, RATE, sites),
    ):
        with pytest.warns(LatedropWarning, match=r"the sites \['nets.1.0'\] did not run in this batch"):
            outputs = run()
        assert not bool((outputs.variance(RATE) if isinstance(outputs, Linearization) else outputs.variance).any())
    network = Network(model)
    with pytest.warns(LatedropWarning, match="did not run in this batch"):
        sample(network, x, RATE, DRAWS, sites=sites)
    sample(network, x, RATE, DRAWS, sites=sites)  # once is enough: warnings are errors here


def test_tied_layers_run_in_turn() -> None:
    model, x = Kinds("any"), rows()
    model.nets[1][0].weight = model.nets[0][0].weight
    sites = find_sites(model, x)
    assert len(sites) == 6
    check_rows_alone(model, lambda index: x[index], BATCHES[:4], sites)


def test_values_that_decide_nothing_cost_nothing() -> None:
    """Reading a constant, or looking at inputs, leaves draws as rows of one batch."""

    def looks(net: Net, x: Tensor) -> Tensor:
        if x.isnan().any():
            raise ValueError
        return net.b(net.a(x).relu() * net.keep + net.keep.sum().item())

    model = Net(looks, a=nn.Linear(4, 8), b=nn.Linear(8, 1), keep=torch.tensor([True, False] * 4))
    (site,) = find_sites(model, rows())
    assert site == Site("b", "element", "Linear", (8,))


@pytest.mark.parametrize("how", ["values", "places"])
def test_experts_that_choose_among_the_rows_are_warned_about(how: str) -> None:
    """Two rows and three have one best each; of more rows, which one that is depends on those beside it."""

    def choose(net: Net, x: Tensor) -> Tensor:
        h, best = net.enter(x).tanh(), x[:, 1].topk(max(1, len(x) // 2)).indices
        if how == "places":
            return net.leave(h.index_add(0, best, net.expert(h[best])))
        chosen = best.tolist()
        return net.leave(torch.stack([net.expert(row) if i in chosen else row for i, row in enumerate(h)]))

    model, x = Net(choose, enter=nn.Linear(4, 8), expert=nn.Linear(8, 8), leave=nn.Linear(8, 1)), rows()
    x[:3, 1] = torch.tensor([9.0, 8.0, 7.0])
    with pytest.warns(LatedropWarning, match="the output of a row changes with the rows beside it"):
        assert all(site.coupled for site in find_sites(model, x, kind="channel"))

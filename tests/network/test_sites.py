from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from latedrop import Site, find_sites, inject, sample
from latedrop.errors import ArgumentError, DataError, LatedropWarning, SiteError
from latedrop.network.sites import Sites, rates_by_site
from networks import Net
from rounding import assert_same_up_to_rounding
from zoo import mlp, residual, unet


def names(sites: Sites) -> list[str]:
    return [site.name for site in sites]


def test_select_by_pattern_type_predicate_and_list() -> None:
    model, x = unet(), torch.zeros(2, 1, 8, 8)
    assert names(find_sites(model, x, select="down*")) == ["down2"]
    assert names(find_sites(model, x, select=nn.ConvTranspose2d)) == ["up"]
    assert names(find_sites(model, x, select=lambda name, module: module.kernel_size == (1, 1))) == ["out"]
    assert names(find_sites(model, x, select=["out", nn.ConvTranspose2d])) == ["up", "out"]


def test_table_is_readable() -> None:
    table = str(find_sites(residual(), torch.zeros(2, 3, 8, 8)))
    assert table.splitlines()[0].split() == ["site", "layer", "masks", "units", "calls"]
    assert "conv1  Conv2d  element  512 = 8 x 8 x 8  1" in table


def test_channel_masks_drop_whole_channels_at_every_place() -> None:
    model = nn.Sequential(nn.Conv2d(1, 6, 1), nn.Conv2d(6, 6, 1, groups=6, bias=False))
    x = torch.rand(4, 1, 5, 5) + 1
    outputs = sample(model, x, 0.5, 8, sites=find_sites(model, x, kind="channel"), keep_draws=True).outputs
    zero = outputs == 0
    assert bool((zero.all((1, 3, 4)) == zero.any(1).any(-1).any(-1)).all())
    assert zero.any()
    assert not zero.all()


def test_one_row_or_a_fixed_batch_will_do() -> None:
    fixed = Net(lambda net, x: net.second(net.first(x.view(4, 3))), first=nn.Linear(3, 8), second=nn.Linear(8, 1))
    assert names(find_sites(residual(), torch.zeros(1, 3, 8, 8))) == ["conv1", "conv2", "head"]
    assert names(find_sites(fixed, torch.zeros(4, 3))) == ["second"]
    with pytest.raises(DataError, match="it raised RuntimeError"):
        find_sites(fixed, torch.zeros(4, 7))
    with pytest.raises(DataError, match="at least one row"):
        find_sites(residual(), torch.zeros(0, 3, 8, 8))
    with pytest.raises(ArgumentError, match="example inputs"):
        find_sites(residual())
    with pytest.raises(ArgumentError, match="'element' or 'channel'"):
        find_sites(residual(), torch.zeros(1, 3, 8, 8), kind="pixel")


def test_examples_folded_into_another_axis() -> None:
    class Windows(nn.Module):
        """Cuts images into windows that join the batch, as Swin does, and then shuffles where asked."""

        def __init__(self, order: str) -> None:
            super().__init__()
            self.order = order
            self.embed, self.mix, self.head = nn.Conv2d(1, 4, 1), nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(x).flatten(2).transpose(1, 2)
            n, places, width = h.shape
            if self.order == "outer":
                h = self.mix(h.reshape(n * places, width)).view(n, places, width)
            elif self.order == "inner":
                h = self.mix(h.transpose(0, 1).reshape(n * places, width)).view(places, n, width).transpose(0, 1)
            else:
                permutation = torch.arange(n * places).flip(0)
                h = self.mix(h.reshape(n * places, width)[permutation])[permutation].view(n, places, width)
            return self.head(h.mean(1))

    x = torch.randn(5, 1, 3, 3)
    outer, inner = (find_sites(Windows(order), x)[0] for order in ("outer", "inner"))
    assert (outer.units, outer.batch_axis, outer.interleaved) == ((9, 4), 0, False)
    assert (inner.units, inner.batch_axis, inner.interleaved) == ((9, 4), 0, True)
    for order in ("outer", "inner"):
        model = Windows(order)
        for shared in (True, False):
            sites = find_sites(model, x)
            assert bool((sample(model, x, 0.3, 5, sites=sites, shared=shared).variance > 0).all())
        whole, alone = sample(model, x, 0.3, 5, sites=sites), sample(model, x[2:3], 0.3, 5, sites=sites)
        assert_same_up_to_rounding(whole.mean[2:3], alone.mean)
    with pytest.raises(SiteError, match=r"folded in another order\. Use kind='channel'"):
        find_sites(Windows("other"), x)
    assert find_sites(Windows("other"), x, kind="channel")[0].units == (4,)


def test_data_flow_sees_through_no_grad_detach_and_buffers() -> None:
    def odd(net: Net, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = net.first(x).detach()
        buffer = torch.zeros(len(x), 4)
        buffer[:, 1:3] = h[:, :2]
        return net.second(buffer) + net.side(x)

    model = Net(odd, first=nn.Linear(3, 4), second=nn.Linear(4, 2), side=nn.Linear(3, 2))
    assert names(find_sites(model, torch.randn(5, 3))) == ["second"]


def test_rates_by_site() -> None:
    sites = [Site(name, "element", "Linear", (4,)) for name in ("a.one", "a.two", "b")]
    assert rates_by_site(sites, 0.1) == {"a.one": 0.1, "a.two": 0.1, "b": 0.1}
    assert rates_by_site(sites, {"a.*": 0.1, "a.two": 0.2}) == {"a.one": 0.1, "a.two": 0.2, "b": 0.0}
    with pytest.raises(ArgumentError, match=r"'c\*' matches none of \['a.one', 'a.two', 'b'\]"):
        rates_by_site(sites, {"c*": 0.1})


def test_place_of_a_unit() -> None:
    site = Site("conv", "element", "Conv2d", (3, 4, 5))
    assert site.place(0) == (0, 0, 0)
    assert site.place(59) == (2, 3, 4)
    assert Site("fc", "element", "Linear", (4,), calls=3).place(9) == (2, 1)


def headed(run: Callable[..., Any]) -> Net:
    return Net(run, body=nn.Linear(4, 8), head=nn.Linear(8, 1), noise=0.0)


def centred(net: Net, x: Tensor) -> Tensor:
    """Take the mean of the batch off, which no row has by itself."""
    hidden = net.body(x).relu()
    return net.head(hidden - hidden.mean(0))


def neighbours(net: Net, x: Tensor, edges: Tensor) -> Tensor:
    """Rows are the nodes of one graph; `edges` has two rows, however many nodes there are."""
    hidden = net.body(x).relu()
    return net.head(hidden.new_zeros(len(x), 8).index_add(0, edges[1], hidden[edges[0]]))


def test_rows_that_depend_on_each_other_are_warned_about() -> None:
    x = torch.randn(7, 4)
    with pytest.warns(LatedropWarning, match=r"examples that do not depend on each other.*method='linear' is wrong"):
        assert names(find_sites(headed(centred), x)) == ["head"]
    with pytest.warns(LatedropWarning, match="do not depend on each other"):
        assert names(find_sites(headed(neighbours), x, torch.randint(7, (2, 20)))) == ["head"]


def test_outputs_that_are_not_one_per_row_tell_nothing() -> None:
    def scaled(net: Net, x: Tensor) -> dict[str, Tensor]:
        hidden = net.body(x).relu()
        return {"y": net.head(hidden), "norm": hidden.norm(), "steps": torch.arange(4.0), "mean": hidden.mean(0)}

    assert names(find_sites(headed(scaled), torch.randn(7, 4))) == ["head"]


def test_numbers_that_are_drawn_for_nothing_are_no_noise() -> None:
    model = headed(lambda net, x: net.head(net.body(x).relu()) + net.noise * torch.rand([]))
    x = torch.randn(7, 4)
    assert names(find_sites(model, x)) == ["head"]
    model.noise = 1.0
    with pytest.warns(LatedropWarning, match="draws random numbers by itself"):
        find_sites(model, x)


def test_each_pass_is_the_next_draw_unless_fixed() -> None:
    model, x = mlp(), torch.randn(4, 5)
    sites = find_sites(model, x)
    with torch.no_grad():
        with inject(model, sites, 0.3) as injection:
            first, second = model(x), model(x)
            injection.draw = 0
            again = model(x)
        with inject(model, sites, 0.3, draw=1):
            fixed = [model(x[:2]), model(x[2:])]
    assert not torch.equal(first, second)
    assert torch.equal(first, again)  # the same call on the same batch
    assert_same_up_to_rounding(torch.cat(fixed), second)


def test_gradients_flow_where_the_caller_wants_them() -> None:
    model, x = mlp(), torch.randn(4, 5)
    with inject(model, find_sites(model, x), 0.3):
        model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())

"""Sequences: packed in several ways, sorted inside of the model, with steps along the first axis."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence, pad_sequence

from alone import check_rows_alone, injected
from latedrop import Terms, calibrate, find_sites, sample
from latedrop.errors import DataError, LatedropWarning, SiteError
from networks import Net
from rounding import assert_same_up_to_rounding

BATCHES = ([0, 1, 2], [3], [3, 1], [5, 2, 0, 1], [*range(8)])
KINDS = pytest.mark.parametrize("kind", ["element", "channel"])
MIXED, EQUAL_FIRST = torch.tensor([7, 3, 5, 2, 7, 4, 6, 3]), torch.tensor([3, 3, 3, 7, 2, 5, 4, 3])


class Sequences(nn.Module):
    """Tokens `(N, L)` and lengths `(N,)`; a method for each way of packing."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.embed, self.rnn = nn.Embedding(20, 8), nn.LSTM(8, 8, batch_first=how != "steps_first")
        self.second = nn.GRU(8, 8, batch_first=True) if how == "twice" else None
        self.each = nn.Linear(8, 8) if how in ("entries", "attention") else None
        self.leave = nn.Linear(8, 1)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        features: Tensor = getattr(self, self.how)(tokens, lengths)
        return self.leave(features)

    def packed(self, tokens: Tensor, lengths: Tensor) -> PackedSequence:
        return pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)

    def last(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        _, (h, _) = self.rnn(self.packed(tokens, lengths))
        return h[-1]

    def steps_first(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        _, (h, _) = self.rnn(pack_padded_sequence(self.embed(tokens.T), lengths, enforce_sorted=False))
        return h[-1]

    def packed_tokens(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(tokens, lengths, batch_first=True, enforce_sorted=False)
        _, (h, _) = self.rnn(packed._replace(data=self.embed(packed.data)))
        return h[-1]

    def a_list(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        rows = [self.embed(row[:length]) for row, length in zip(tokens, lengths, strict=True)]
        _, (h, _) = self.rnn(pack_sequence(rows, enforce_sorted=False))
        return h[-1]

    def by_hand(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        sorted_lengths, order = lengths.sort(descending=True)
        _, (h, _) = self.rnn(pack_padded_sequence(self.embed(tokens[order]), sorted_lengths, batch_first=True))
        return h[-1][order.argsort()]

    def twice(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        _, h = self.second(self.rnn(self.packed(tokens, lengths))[0])
        return h[-1]

    def entries(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        out, _ = self.rnn(self.packed(tokens, lengths))
        padded, _ = pad_packed_sequence(out._replace(data=self.each(out.data).tanh()), batch_first=True)
        return padded.sum(1)

    def attention(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        out, _ = pad_packed_sequence(self.rnn(self.packed(tokens, lengths))[0], batch_first=True)
        beyond = torch.arange(out.shape[1]) >= lengths[:, None]
        weights = self.each(out).sum(-1).masked_fill(beyond, -torch.inf).softmax(1)
        return (weights[..., None] * out).sum(1)


def tokens() -> Tensor:
    return torch.randint(1, 20, (8, 7), generator=torch.Generator().manual_seed(0))


WAYS = ["last", "steps_first", "packed_tokens", "a_list", "by_hand", "twice", "entries", "attention"]


@KINDS
@pytest.mark.parametrize("lengths", [MIXED, EQUAL_FIRST], ids=["mixed", "equal first"])
@pytest.mark.parametrize("how", WAYS)
def test_packed_inside_of_the_model(how: str, lengths: Tensor, kind: str) -> None:
    model, x = Sequences(how), tokens()
    if how == "entries" and kind == "element":  # steps of all rows in one tensor, longest rows first
        with pytest.raises(SiteError, match=r"as many entries for every row.*layer 'each'.*kind='channel'"):
            find_sites(model, x, lengths)
        return
    sites = find_sites(model, x, lengths, kind=kind)
    middle = {"twice": ["second"], "entries": ["each"], "attention": ["each"]}.get(how, [])
    assert [site.name for site in sites] == ["rnn", *middle, "leave"]
    draws = check_rows_alone(model, lambda rows: (x[rows], lengths[rows]), BATCHES, sites)
    assert_same_up_to_rounding(draws, injected(model, sites, x[BATCHES[-1]], lengths[BATCHES[-1]]))


@KINDS
@pytest.mark.filterwarnings("ignore:the draws of this model run one by one")
def test_rows_that_must_be_sorted(kind: str) -> None:
    """A model that takes the longest row first takes no two draws at once."""

    class Sorted(Sequences):
        def packed(self, tokens: Tensor, lengths: Tensor) -> PackedSequence:
            return pack_padded_sequence(self.embed(tokens), lengths, batch_first=True)

    model, x = Sorted("last"), tokens()
    lengths = MIXED.sort(descending=True).values
    sites = find_sites(model, x, lengths, kind=kind)
    check_rows_alone(model, lambda rows: (x[rows], lengths[rows]), ([0, 1, 2], [2], [1, 5, 7]), sites)


def sorts(net: Net, x: Tensor) -> Tensor:
    """Sort the rows, by torch or by Python, and put them back before the last layer."""
    keys = x[:, 0]
    if net.how == "torch":
        order, back = keys.argsort(), keys.argsort().argsort()
        return net.c(net.b(net.a(x[order]).tanh()).tanh()[back])
    places = sorted(range(len(x)), key=keys.tolist().__getitem__)
    rows = x[places] if net.how == "list" else torch.stack([x[i] for i in places])
    return net.c(net.b(net.a(rows).tanh()).tanh()[[places.index(i) for i in range(len(x))]])


def sorting(how: str = "torch") -> Net:
    torch.manual_seed(0)
    return Net(sorts, a=nn.Linear(4, 8), b=nn.Linear(8, 8), c=nn.Linear(8, 1), how=how)


@KINDS
@pytest.mark.parametrize("how", ["torch", "list", "stack"])
def test_rows_that_a_model_sorts(how: str, kind: str) -> None:
    """First order was that of the row which the sorting put in its place."""
    model, x = sorting(how), torch.randn(8, 4)
    sites = find_sites(model, x, kind=kind)
    assert [site.moved for site in sites] == [True, False]
    check_rows_alone(model, lambda rows: x[rows], BATCHES, sites)


def test_features_of_rows_are_not_taken_where_these_are_sorted() -> None:
    """Every row had the features of the one that the sorting put in its place."""
    model, x = sorting(), torch.randn(60, 4)
    uq = calibrate(model, (x, x.sum(1, keepdim=True)), method=Terms(["leverage"]), progress=False)
    assert_same_up_to_rounding(uq.predict(x).variance[5:6], uq.predict(x[5:6]).variance)


def recurrent(run: Callable[..., Tensor]) -> Net:
    torch.manual_seed(0)
    return Net(run, a=nn.LSTM(4, 8), b=nn.LSTM(8, 8), c=nn.Linear(8, 1))


def steps_first(net: Net, x: Tensor) -> Tensor:
    """Take steps along the first axis, `(L, N, 4)`; give one output for each row."""
    return net.c(net.b(net.a(x)[0])[0][-1])


@pytest.mark.parametrize("rows", [2, 3, 5, 6])
def test_steps_along_the_first_axis_are_refused(rows: int) -> None:
    """With as many steps as rows, steps were taken for rows."""
    model, x = recurrent(steps_first), torch.randn(5, rows, 4)
    with pytest.raises(DataError, match=r"first axis counts the examples.*such as the steps of sequences"):
        find_sites(model, x)
    with pytest.raises(DataError, match="first axis counts the examples"):
        calibrate(model, (x[:, :5], torch.randn(5, 1)), progress=False)


@KINDS
@pytest.mark.parametrize("steps", [1, 2, 3, 8])
def test_rows_along_the_second_axis_of_a_layer(steps: int, kind: str) -> None:
    model, x = recurrent(lambda net, x: steps_first(net, x.transpose(0, 1))), torch.randn(8, steps, 4)
    sites = find_sites(model, x, kind=kind)
    assert [site.batch_axis for site in sites] == [1, 0]
    check_rows_alone(model, lambda rows: x[rows], BATCHES, sites)


def test_an_output_for_every_step_is_warned_about() -> None:
    each_step = recurrent(lambda net, x: net.c(net.b(net.a(x)[0])[0]))
    with pytest.warns(LatedropWarning, match="changes with the rows beside it.*steps of one sequence"):
        find_sites(each_step, torch.randn(5, 5, 4))


def lists() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(int(length), 4, generator=generator) for length in MIXED]


def takes_packed() -> Net:
    return recurrent(lambda net, packed: net.c(net.b(net.a(packed)[0])[1][0][-1]))


def packs(items: list[Tensor]) -> PackedSequence:
    return pack_sequence(items, enforce_sorted=False)


def takes_padded() -> Net:
    def run(net: Net, x: Tensor, lengths: Tensor) -> Tensor:
        beyond = torch.arange(x.shape[1]) >= lengths[:, None]
        return net.b(net.a(x).tanh().masked_fill(beyond[..., None], 0).sum(1))

    return Net(run, a=nn.Linear(4, 8), b=nn.Linear(8, 1))


def pads(items: list[Tensor]) -> tuple[Tensor, Tensor]:
    return pad_sequence(items, batch_first=True), torch.tensor([len(item) for item in items])


@KINDS
@pytest.mark.parametrize(("make", "collate"), [(takes_packed, packs), (takes_padded, pads)])
def test_lists_of_sequences(make: Callable[[], Net], collate: Callable[[list[Tensor]], object], kind: str) -> None:
    model, items = make(), lists()
    sites = find_sites(model, items, kind=kind, collate=collate)
    check_rows_alone(model, lambda rows: [items[i] for i in rows], BATCHES, sites, collate=collate)


def test_packed_inputs_are_refused_without_collate() -> None:
    for x in (packs(lists()), (packs(lists()),)):
        with pytest.raises(DataError, match=r"found a PackedSequence, in which it counts steps.*collate="):
            sample(takes_packed(), x, 0.1, 5)
        with pytest.raises(DataError, match="found a PackedSequence"):
            find_sites(takes_packed(), x)

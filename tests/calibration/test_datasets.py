"""Data sets, loaders and batches that are mappings: every entry point takes them, and gives what arrays give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import latedrop
from latedrop.errors import ArgumentError, DataError
from latedrop.evaluation.evaluation import compare
from networks import mlp
from rounding import assert_same_up_to_rounding, rounding


class Tabular:
    """Data set with only the part of the interface of Hugging Face that latedrop uses."""

    def __init__(self, columns: dict[str, list[Any]], kind: str | None = None) -> None:
        self.columns, self.format = columns, {"type": kind}

    @property
    def column_names(self) -> list[str]:
        return list(self.columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def with_format(self, kind: str) -> Tabular:
        return Tabular(self.columns, kind)

    def iter(self, batch_size: int) -> Iterator[dict[str, Any]]:
        for start in range(0, len(self), batch_size):
            part = {name: values[start : start + batch_size] for name, values in self.columns.items()}
            yield {name: torch.tensor(v) for name, v in part.items()} if self.format["type"] == "torch" else part


class Dicts(Dataset):
    """Rows that are dicts, with one entry that no model takes."""

    def __init__(self, x: Tensor, y: Tensor, names: tuple[str, str] = ("input", "label")) -> None:
        self.x, self.y, self.names = x, y, names

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {self.names[0]: self.x[i], self.names[1]: self.y[i], "id": i}

    def __len__(self) -> int:
        return len(self.x)


class Stream(IterableDataset):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(self.x, self.y, strict=True)


def real_dataset(x: Tensor, y: Tensor) -> Any:
    return pytest.importorskip("datasets").Dataset.from_dict({"x": x.tolist(), "label": y.tolist()})


FORMS = {
    "loader": lambda x, y: DataLoader(TensorDataset(x, y), batch_size=16),
    "data set of torch": TensorDataset,
    "stream of torch": Stream,
    "data set of dicts": Dicts,
    "loader of dicts": lambda x, y: DataLoader(Dicts(x, y), batch_size=16),
    "like Hugging Face": lambda x, y: Tabular({"x": x.tolist(), "label": y.tolist()}),
    "Hugging Face": real_dataset,
    "stream of Hugging Face": lambda x, y: real_dataset(x, y).to_iterable_dataset(),
}


@pytest.fixture
def net() -> nn.Module:
    return mlp(3, 20, 1, act=nn.ReLU)


@pytest.fixture
def rows(net: nn.Module) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=dice)
    return x, net(x).detach() + 0.3 * torch.randn(40, 1, generator=dice) * x[:, :1]


@pytest.mark.filterwarnings("ignore:.* of these rows are rows that the calibration was fitted to")
@pytest.mark.filterwarnings("ignore:.* of the validation rows are among the reference rows")
@pytest.mark.filterwarnings("ignore:.* of the test rows are rows that the calibration was fitted to")
@pytest.mark.parametrize("form", FORMS)
def test_every_entry_point(net: nn.Module, rows: tuple[Tensor, Tensor], form: str) -> None:
    data = FORMS[form](*rows)
    plain = latedrop.calibrate(net, rows, reference=rows[0], progress=False)
    uq = latedrop.calibrate(net, data, reference=data, batches=latedrop.Batches(16), progress=False)
    expected = plain.predict(rows[0])
    assert uq.calibration.rows == uq.calibration.terms.reference_rows == 40  # type: ignore[union-attr]
    prediction = uq.predict(data)
    assert_same_up_to_rounding(prediction.mean, expected.mean)
    assert_same_up_to_rounding(prediction.std, expected.std)
    assert_same_up_to_rounding(prediction.novelty, expected.novelty)
    both, target = uq.predict_labelled(data)
    assert_same_up_to_rounding(both.std, expected.std)
    assert torch.equal(target, rows[1])
    ours, scores = compare(both, target), compare(expected, rows[1])
    assert ours[0].nll == pytest.approx(scores[0].nll, rel=rounding())
    uq.batch_size = 16
    sizes = [len(part.mean) for part in uq.predict_batches(data)]
    assert sizes == [16, 16, 8]
    ends = uq.conformal(data).predict(rows[0]).interval(0.8)
    assert_same_up_to_rounding(ends, plain.conformal(rows).predict(rows[0]).interval(0.8))


@pytest.mark.parametrize("form", FORMS)
def test_what_looks_at_inputs_alone(net: nn.Module, rows: tuple[Tensor, Tensor], form: str) -> None:
    x, data = rows[0], FORMS[form](*rows)
    assert latedrop.find_sites(net, data) == latedrop.find_sites(net, x)
    ways: list[Callable[[Any], Any]] = [
        lambda given: latedrop.sample(net, given, 0.2, 10, keep_draws=True),
        lambda given: latedrop.propagate(net, given, 0.2),
        lambda given: latedrop.linearize(net, given),
    ]
    for way in ways:
        actual, expected = vars(way(data)), vars(way(x))
        assert {name for name, value in expected.items() if isinstance(value, Tensor)} >= {"mean"}
        for name, value in expected.items():
            if isinstance(value, Tensor):
                assert_same_up_to_rounding(actual[name], value)
            else:
                assert actual[name] == value


def test_targets_of_another_name(net: nn.Module, rows: tuple[Tensor, Tensor]) -> None:
    data = Dicts(*rows, names=("input", "price"))
    uq = latedrop.calibrate(net, data, batches=latedrop.Batches(unpack="price"), progress=False)
    assert_same_up_to_rounding(uq.predict(data).std, latedrop.calibrate(net, rows, progress=False).predict(rows[0]).std)
    assert torch.equal(uq.predict_labelled(data, "price")[1], rows[1])
    (actual,) = uq.predict_batches([{"x": rows[0], "price": rows[1]}], "price")
    assert_same_up_to_rounding(actual.mean, uq.predict(rows[0]).mean)


class Two(nn.Module):
    """Takes two inputs by name, and labels too, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 20), nn.ReLU(), nn.Linear(20, 1))

    def forward(self, values: Tensor, mask: Tensor, labels: Tensor | None = None) -> Tensor:
        assert labels is None
        return self.layers(values * mask)


def test_inputs_go_by_their_names(rows: tuple[Tensor, Tensor]) -> None:
    x, y = rows
    batch = {"mask": (x > 0).float(), "values": x, "labels": y, "row": torch.arange(40)}
    model = Two()
    uq = latedrop.calibrate(model, [batch], progress=False)
    expected = uq.predict({"values": x, "mask": batch["mask"]})
    (actual,) = uq.predict_batches([batch])
    assert_same_up_to_rounding(actual.std, expected.std)


class Splits(dict[str, Any]):
    """Several data sets by name, as Hugging Face's `load_dataset` gives."""

    column_names: Mapping[str, Any] = {}

    def with_format(self, kind: str) -> Splits:
        return self


@pytest.mark.parametrize(
    ("make", "unpack", "message"),
    [
        (lambda x, y: [{"input": x}], None, r"the targets of a batch under one of labels, .*; found none among"),
        (lambda x, y: [{"input": x, "y": y, "label": y}], None, r"found \['label', 'y'\] among its keys"),
        (lambda x, y: [{"input": x, "y": y}], "price", "under 'price'; found none among its keys"),
        (lambda x, y: [(x, y)], "price", r"expected batches that are mappings.*under 'price'; found tuple"),
        (
            lambda x, y: Tabular({"a": x.tolist(), "b": x.tolist(), "y": y.tolist()}),
            None,
            r"among the inputs of the model, \['input'\]; found \['a', 'b'\]",
        ),
        (lambda x, y: Splits(train=1, test=2), None, r"one data set; found a mapping of \['train', 'test'\]"),
    ],
    ids=["no targets", "two targets", "another name", "no mapping", "unknown inputs", "splits"],
)
def test_what_cannot_be_told_apart(net: nn.Module, rows: Any, make: Any, unpack: str | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        latedrop.calibrate(net, make(*rows), progress=False, batches=latedrop.Batches(unpack=unpack))


def test_rows_of_several_batches_cannot_have_their_own_masks(net: nn.Module, rows: tuple[Tensor, Tensor]) -> None:
    loader = DataLoader(TensorDataset(rows[0]), 10)
    with pytest.raises(ArgumentError, match="expected shared=True with a loader or a data set"):
        latedrop.sample(net, loader, 0.2, 4, shared=False)

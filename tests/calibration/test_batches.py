"""Every form of data gives the same rows, and what is no data is refused with a word about why."""

import re
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from latedrop.data.batches import Batches, inputs_of, row_batches, row_total
from latedrop.data.rows import row_count, take_rows
from latedrop.errors import ArgumentError, DataError

MODEL = nn.Linear(2, 1, device="meta").to_empty(device="cpu")  # only its device and dtype are looked at
X, Y = torch.arange(14.0).reshape(7, 2), torch.arange(7.0)[:, None]


def batches(data: Any, model: nn.Module, **options: Any) -> Iterator[tuple[Any, Tensor]]:
    return iter(Batches(**options).read(data, model))


def collected(data: Any, **options: Any) -> tuple[list[int], Tensor, Tensor]:
    """The batches' sizes, then all inputs and all targets."""
    parts = list(batches(data, MODEL, **options))
    return [len(y) for _, y in parts], torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(X, Y, strict=True))


def locked(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


def table(**columns: Any) -> pandas.DataFrame:
    return pandas.DataFrame({"a": X[:, 0].numpy(), **columns})


@pytest.fixture
def _every_warning() -> Iterator[None]:
    """torch gives some warnings once per process; here each time."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


FORMS = {
    "pair": (X, Y),
    "list": [X, Y],
    "arrays": (X.numpy(), Y.numpy()),
    "mixed": (X, Y.numpy()),
    "tables": (table(b=X[:, 1].numpy()), pandas.DataFrame({"y": Y[:, 0].numpy()})),
    "nullable columns": (table(b=pandas.array(X[:, 1].tolist(), "Float64")), Y),
    "integer columns": (table(b=X[:, 1].int().numpy()), Y),
    "batches of tables": [(table(b=X[:, 1].numpy()).iloc[:4], Y[:4]), (table(b=X[:, 1].numpy()).iloc[4:], Y[4:])],
    "loader": DataLoader(TensorDataset(X, Y), batch_size=3),
    "stream": DataLoader(Stream(), batch_size=3),
    "two batches": [(X[:4], Y[:4]), (X[4:], Y[4:])],
    "tuple of two batches": ((X[:4], Y[:4]), (X[4:], Y[4:])),
    "zip": zip(X.split(3), Y.split(3), strict=True),
}


@pytest.mark.parametrize("data", FORMS.values(), ids=FORMS)
def test_every_form_gives_all_rows_in_order(data: Any) -> None:
    _, x, y = collected(data, size=3)
    assert torch.equal(x, X)
    assert torch.equal(y, Y)


def test_float64_inputs_take_the_models_dtype_and_targets_keep_theirs() -> None:
    _, x, y = collected((X.double().numpy(), Y.double().numpy()))
    assert x.dtype == torch.float32
    assert y.dtype == torch.float64
    ((x, _),) = batches((X.numpy(), Y), deepcopy(MODEL).double())
    assert x.dtype == torch.float64


REAL = {
    "int": np.arange(7),
    "bool": np.arange(7) % 2 == 1,
    "big-endian": np.arange(7, dtype=">f8"),
    "long double": np.arange(7, dtype=np.longdouble),
    "reversed": np.arange(7.0)[::-1],
    "read-only": locked(np.arange(7.0)),
}


@pytest.mark.parametrize("y", REAL.values(), ids=REAL)
@pytest.mark.usefixtures("_every_warning")
def test_any_real_array_is_a_target_and_an_input(y: np.ndarray) -> None:
    twice = np.broadcast_to(y[:, None], (7, 2))  # read-only, in the order and the type of y
    inputs, targets = collected((twice, y))[1:]
    np.testing.assert_array_equal(targets.numpy(), np.asarray(y).astype(targets.numpy().dtype))
    np.testing.assert_array_equal(inputs.numpy(), twice.astype(inputs.numpy().dtype))
    assert inputs.is_floating_point() == (y.dtype.kind == "f")


def test_scalars_belong_to_no_row() -> None:
    x = {"a": torch.zeros(5, 2), "lengths": torch.ones(5), "temperature": torch.tensor(2.0)}
    assert row_count(x) == 5
    part = take_rows(x, slice(1, 3))
    assert (part["a"].shape, part["lengths"].shape, part["temperature"]) == ((2, 2), (2,), 2)
    with pytest.raises(DataError, match="first axis counts the examples"):
        row_count({"a": 3})


def test_a_generator_is_read_once_and_lazily() -> None:
    read = []

    def data() -> Iterator[tuple[Tensor, Tensor]]:
        for i in range(3):
            read.append(i)
            yield X, Y

    stream = batches(data(), MODEL)
    next(stream)
    assert read == [0]
    assert len(list(stream)) == 2
    assert read == [0, 1, 2]


class One(nn.Module):
    def forward(self, x: Tensor, *, flag: bool = False) -> Tensor:
        return x


class Two(nn.Module):
    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return x + z


class Perhaps(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x


class Any_(nn.Module):  # noqa: N801
    def forward(self, *inputs: Tensor) -> Tensor:
        return inputs[0]


def test_a_pair_that_cannot_be_inputs_is_inputs_and_targets() -> None:
    for model in (One(), nn.Sequential(nn.Linear(2, 1)), nn.DataParallel(One())):
        assert inputs_of([X, Y], model) is X
    for model in (Two(), Any_()):
        assert inputs_of((X, Y), model) == (X, Y)
    for batch in (X, [X], (X, Y, Y), {"x": X, "mask": Y}):
        assert inputs_of(batch, Perhaps()) is batch
    with pytest.raises(DataError, match=r"found a pair, and the model's second input, 'mask', is optional.*unpack="):
        inputs_of([X, Y], Perhaps())


@pytest.mark.parametrize("size", [0, -1, None, 2.5, True, "3"])
def test_a_batch_has_at_least_one_row(size: Any) -> None:
    match = re.escape(f"expected a batch size of at least 1; found {size!r}")
    with pytest.raises(ArgumentError, match=match):
        list(row_batches(X, size))
    with pytest.raises(ArgumentError, match=match):
        list(batches([(X, Y)], MODEL, size=size))
    with pytest.raises(ArgumentError, match=match):
        list(batches((X, Y), MODEL, size=size))


REFUSED = {
    "none": (None, r"expected a pair \(x, y\) or an iterable of batches.*found a NoneType"),
    "inputs alone": (X, r"expected a pair \(x, y\) or an iterable of batches.*found a Tensor"),
    "dict": ({"x": X, "y": Y}, r"expected a pair \(x, y\) or an iterable of batches.*found a dict"),
    "triple": ((X, Y, Y), r"expected every batch to be a pair.*found Tensor of 7"),
    "batches of three": ([(X, Y, Y)], r"expected every batch to be a pair.*found tuple of 3\. Pass unpack="),
    "list of targets": ((X, Y.flatten().tolist()), r"targets as a tensor, array or table; found list\. Convert"),
    "text column": ((table(b=["x"] * 7), Y), r"expected numeric inputs; found column 'b' of type \w+\. Encode text"),
    "categories": ((table(b=pandas.Categorical(["x"] * 7)), Y), r"found column 'b' of type category\. Encode"),
    "missing in a column": ((table(b=pandas.array([1] * 6 + [None], "Int64")), Y), r"found 1 NaN or inf among 14"),
    "table without columns": ((pandas.DataFrame(index=range(7)), pandas.Series(["x"] * 7)), "column None of type"),
    "no inputs": ((["a"] * 7, Y), r"expected inputs with at least one tensor.*found list"),
    "scalar target": ((X, torch.tensor(1.0)), r"one target for each of the 7 input rows; found targets of shape \(\)"),
    "too few targets": ((X, Y[:6]), r"one target for each of the 7 input rows; found targets of shape \(6, 1\)"),
    "text targets": ((X, np.array(["a"] * 7)), r"expected numeric targets; found a numpy array of dtype <U1"),
    "complex array": ((X, np.zeros(7, complex)), r"expected numeric targets.*complex128"),
    "complex tensor": ((X, torch.zeros(7, dtype=torch.cfloat)), r"expected real targets; found torch\.complex64"),
    "nan": ((X, torch.full((7,), torch.nan)), r"expected finite targets; found 7 NaN or inf among 7\. Drop"),
    "masked": ((X, np.ma.masked_equal(np.arange(7), 3)), r"expected targets without missing values; found 1 masked"),
    "masked inputs": ((np.ma.masked_equal(np.eye(7, 2), 1), Y), "inputs without missing values; found 2 mask"),
    "nan inputs": ((torch.full((7, 2), torch.nan), Y), r"expected finite inputs; found 14 NaN or inf among 14"),
    "text inputs": ((np.array([["a"]] * 7), Y), r"expected numeric inputs.*Encode text"),
}


@pytest.mark.parametrize(("data", "match"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_data_is_refused(data: Any, match: str) -> None:
    row_total(data)  # what is wrong is for `batches` to say
    with pytest.raises(DataError, match=match):
        list(batches(data, MODEL))


def test_unpack_must_give_a_pair() -> None:
    with pytest.raises(DataError, match=r"expected every batch to be a pair.*found Tensor of 7"):
        list(batches([(X, Y)] * 3, MODEL, unpack=lambda batch: batch[0]))


def test_a_first_batch_without_rows_is_passed_over() -> None:
    data = [(X[:0], Y[:0]), (X[:3], Y[:3]), (X[3:], Y[3:])]
    read = Batches().read(data, MODEL)
    first = read.first(2)
    assert first is not None
    assert torch.equal(first[0], X[:2])
    assert [len(y) for _, y in read] == [3, 4]
    assert Batches().read(data[:1], MODEL).first(2) is None

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from latedrop.data.arrays import place
from latedrop.data.rows import row_count, take_rows
from latedrop.errors import DataError
from latedrop.network.network import call


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, a: Tensor, b: Tensor | None = None) -> Tensor:
        return self.fc(a if b is None else a + b)


def test_a_mapping_goes_to_the_parameters_of_its_names() -> None:
    model = Keywords()
    a, b = torch.ones(3, 2), torch.ones(3, 2)
    assert torch.equal(call(model, {"a": a, "b": b}), model(a, b))  # the same call on the same batch
    assert torch.equal(call(model, (a, b)), model(a, b))
    assert torch.equal(call(model, a), model(a))


def test_rows_and_slices() -> None:
    x = {"a": torch.zeros(5, 2), "lengths": torch.ones(5), "temperature": torch.tensor(2.0)}
    assert row_count(x) == 5
    part = take_rows(x, slice(1, 3))
    assert part["a"].shape == (2, 2)
    assert part["lengths"].shape == (2,)
    assert part["temperature"] == 2
    with pytest.raises(DataError, match="first axis counts the examples"):
        row_count({"a": 3})


def test_arrays_and_tensors_take_the_models_dtype() -> None:
    model = Keywords()
    assert place(np.zeros((2, 2)), model).dtype == torch.float32
    assert place(np.zeros((2, 2), dtype=np.int64), model).dtype == torch.int64
    assert place(torch.zeros(2, 2, dtype=torch.float64), model).dtype == torch.float32
    assert place(torch.zeros(2, 2, dtype=torch.float64), model.double()).dtype == torch.float64
    model.float()
    frozen = np.zeros((2, 2), dtype=np.float32)
    frozen.flags.writeable = False
    assert place(frozen, model).shape == (2, 2)
    assert place(np.zeros((4, 2), dtype=">f4")[::-1], model).dtype == torch.float32
    with pytest.raises(DataError, match="3 NaN or inf among 4"):
        place(np.array([[np.nan, np.inf], [1, -np.inf]]), model)
    with pytest.raises(DataError, match="numeric inputs"):
        place(np.array(["a", "b"]), model)

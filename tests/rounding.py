"""How far two results may lie apart that differ in nothing but rounding: the one place of these tolerances.

Each operation on floats is off by up to half an `eps` of its result. A matrix product, a mean or a variance adds many
terms, and the order in which it adds them depends on the batch size, the number of threads and the processor. Two
orders of a sum of n terms differ by at most `n * eps` of what is added up, and commonly, since single errors have
either sign, by about `sqrt(n) * eps`. `FACTOR` leaves room for what a typical error is not: a few layers in a row
pass their errors on, and the largest of many numbers is looked at.

The error is relative to what was added up, not to the sum: terms of 1 that cancel to 0.001 leave an error of some
`eps`, not of `eps / 1000`. `scale` is the size of what was added up; without it, the mean size of the expected numbers,
below which no single number is held to more digits than its neighbours.

Not for draws (those are held to their standard error), nor for approximations of a closed form.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

FACTOR = 8
# As many terms as the widest layers of most models in the tests have, their convolutions included.
TERMS = 1024


def rounding(dtype: torch.dtype = torch.float32, terms: int = TERMS) -> float:
    """Relative error by rounding, of what was computed in `dtype` and adds up `terms` numbers: 3e-5 for floats."""
    return FACTOR * torch.finfo(dtype).eps * math.sqrt(terms)


def assert_same_up_to_rounding(
    actual: Any,
    expected: Any,
    *,
    terms: int = TERMS,
    scale: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Tensors, arrays, numbers, or tuples, lists and dicts of them; integers and booleans are equal.

    `dtype` is the coarsest that something was computed in on the way, as networks do in float32 whatever holds what is
    made of it later; results that are coarser themselves count as such.
    """
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        pairs = [(actual[name], expected[name]) for name in expected]
    elif isinstance(expected, tuple | list) and any(isinstance(value, Tensor) for value in expected):
        pairs = list(zip(actual, expected, strict=True))
    else:
        pairs = []
    for one, other in pairs:
        assert_same_up_to_rounding(one, other, terms=terms, scale=scale, dtype=dtype)
    if pairs:
        return
    both = [value if isinstance(value, Tensor) else torch.as_tensor(np.array(value)) for value in (actual, expected)]
    kinds = [value.dtype for value in both if value.is_floating_point()]
    if not kinds:
        np.testing.assert_array_equal(*both)
        return
    error = rounding(max([*kinds, dtype], key=lambda kind: torch.finfo(kind).eps), terms)
    size = both[1].detach().double().abs()
    size = float(size[size.isfinite()].mean().nan_to_num()) if scale is None else scale
    if isinstance(actual, Tensor) and isinstance(expected, Tensor):
        torch.testing.assert_close(actual, expected, rtol=error, atol=error * size, equal_nan=True)
    else:
        np.testing.assert_allclose(*both, rtol=error, atol=error * size)


assert_same_doubles = partial(assert_same_up_to_rounding, dtype=torch.float64)
"""For what is computed in float64 all through."""

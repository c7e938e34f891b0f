"""Rows beyond what numbers can hold, as those with a value of 1e20, whose square does not fit float32.

They are left out while their batch is predicted, so that all others are answered as ever; of the rows themselves the
prediction says that nothing is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from warnings import warn

import torch
from torch import Tensor, nn

from latedrop.calibration.guard import LARGEST
from latedrop.data.arrays import any_true, check_dtypes, check_inputs, floating
from latedrop.data.batches import row_batches
from latedrop.data.rows import Items, map_rows, row_count, take_rows, tensors
from latedrop.dropout.moments import out_of_memory
from latedrop.errors import DataError, LatedropError, LatedropWarning
from latedrop.network.sites import Site

__all__ = [
    "checked_novelty",
    "failures_explained",
    "predicted_rows",
    "warn_of_rows_beyond",
]

_Predicted = TypeVar("_Predicted")


def checked_novelty(novelty: Tensor) -> Tensor:
    """Return novelty as it is; `DataError` about the rows where it is beyond the largest number."""
    beyond = ~(novelty < LARGEST)
    if any_true(beyond):
        raise DataError(
            f"expected inputs whose features fit a number; found {int(beyond.sum())} of {len(beyond)} rows whose do "
            "not. Leave these rows out.",
            rows=beyond,
        )
    return novelty


def predicted_rows(
    run: Callable[[Any], _Predicted], x: Any, batch_size: int, sites: Sequence[Site], alone: Callable[[Any], object]
) -> tuple[list[_Predicted], Tensor | None]:
    """Return what `run` makes of each batch without its rows that are beyond, and these rows, `(N,)`; None without any.

    An error that names no rows stays one, and any where rows see each other. `alone` tries a single row. Where all rows
    are beyond, a row of zeros is predicted.
    """
    apart = not any(site.coupled for site in sites)
    parts: list[_Predicted] = []
    masks: list[Tensor] = []
    failure: LatedropError | None = None
    for part in [x] if 0 < row_count(x) <= batch_size else row_batches(x, batch_size):
        rest, beyond = part, torch.zeros(row_count(part), dtype=torch.bool)
        masks.append(beyond)
        while not bool(beyond.all()):
            try:
                parts.append(run(rest))
                break
            except LatedropError as error:
                if not apart or error.rows is None:
                    raise
                more = _named(error, alone, rest)
                if not bool(more.any()):
                    raise
                beyond[~beyond], failure = more, error
                rest = take_rows(part, (~beyond).nonzero()[:, 0].tolist())
    beyond = torch.cat([torch.zeros(0, dtype=torch.bool), *masks])
    if failure is not None and not parts:
        if isinstance(x, Items):  # there are no items of zeros
            raise failure
        parts.append(run(map_rows(take_rows(x, slice(1)), torch.zeros_like)))
    return parts, beyond if bool(beyond.any()) else None


def warn_of_rows_beyond(rows: Tensor, stacklevel: int) -> None:
    """Warn of rows of which nothing is known."""
    warn(
        f"nothing is known of {int(rows.sum())} of {len(rows)} rows: what the network makes of their inputs fits no "
        "number. Their novelty is the largest number, and their interval the widest. Look at their inputs, and "
        "leave such rows out.",
        LatedropWarning,
        stacklevel=stacklevel,
    )


def _works(run: Callable[[Any], object], row: Any) -> bool:
    try:
        run(row)
    except LatedropError:
        return False
    return True


def _named(error: LatedropError, run: Callable[[Any], object], x: Any) -> Tensor:
    """Return the rows that an error is about, `(N,)`, after trying each where it is about a part of them."""
    rows = row_count(x)
    if error.rows is not None and len(error.rows) == rows:
        return error.rows.cpu()  # type: ignore[no-any-return]
    return torch.tensor([not _works(run, take_rows(x, slice(i, i + 1))) for i in range(rows)])


@contextmanager
def failures_explained(x: Any, model: nn.Module) -> Iterator[None]:
    """Raise `DataError` where the model fails on inputs that were placed, and say what may be wrong with them."""
    try:
        yield
    except LatedropError as error:
        check_inputs(floating(x))  # which says how many of all rows are not finite
        _check_axes(x, error)
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, AssertionError) as error:
        if out_of_memory(error):
            raise
        _check_axes(x, error)
        check_dtypes(x, model, error)
        raise DataError(
            f"expected inputs that the model takes; it raised {type(error).__name__}: {error}. Pass inputs of the "
            "shapes and dtypes that it was calibrated with; batches in a list, or with targets, go to "
            "predict_batches(batches, unpack)."
        ) from error


def _check_axes(x: Any, error: Exception) -> None:
    """After a failure: raise where the inputs look like a single row, without the axis that counts rows."""
    shapes = [tuple(value.shape) for value in tensors(x)]
    if shapes and all(len(shape) == 1 for shape in shapes):
        raise DataError(
            f"expected rows as inputs, their first axis counting them; found shape {', '.join(map(str, shapes))}, "
            "which looks like a single row. Pass x[None] to predict one row."
        ) from error

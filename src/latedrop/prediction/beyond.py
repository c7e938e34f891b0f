"""Rows beyond what numbers can hold, as those with a value of 1e20, whose square does not fit float32.

Another row stands in for each while its batch is predicted, so that all others are answered as ever; of the row itself
the prediction says that nothing is known.
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
from latedrop.data.items import Items
from latedrop.data.rows import map_rows, replaced, row_count, take_rows, tensors
from latedrop.dropout.moments import out_of_memory
from latedrop.errors import DataError, LatedropError, LatedropWarning
from latedrop.network.sites import Site

__all__ = [
    "LARGEST",
    "checked_novelty",
    "failures_explained",
    "predicted_rows",
    "warn_of_rows_beyond",
]

_TRIED = 16  # rows, evenly spread, of which one has to work alone

_Predicted = TypeVar("_Predicted")


def checked_novelty(novelty: Tensor) -> Tensor:
    """As it is; `DataError` about the rows where it is beyond the largest number."""
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
    """Return what `run` makes of each batch, and the rows that are beyond, `(N,)`, for which another stood in; or None.

    An error that names no rows stays one, and any where rows see each other. `alone` tries a single row.
    """
    apart = not any(site.coupled for site in sites)
    parts: list[_Predicted] = []
    masks: list[Tensor] = []
    spare = None
    for part in [x] if 0 < row_count(x) <= batch_size else row_batches(x, batch_size):
        standing, beyond = part, torch.zeros(row_count(part), dtype=torch.bool)
        while len(parts) == len(masks):
            try:
                parts.append(run(standing))
            except LatedropError as error:
                spare = _working(alone, x) if apart and spare is None and error.rows is not None else spare
                more = beyond if spare is None else _named(error, alone, standing) & ~beyond
                if not bool(more.any()):
                    raise
                beyond |= more
                standing = replaced(part, beyond, spare)
        masks.append(beyond)
    return parts, None if spare is None else torch.cat(masks)


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


def _working(run: Callable[[Any], object], x: Any) -> Any:
    """A row that can be predicted, of some in `x` or one of zeros; None where there is none."""
    rows = row_count(x)
    tried = [take_rows(x, slice(i, i + 1)) for i in range(0, rows, max(1, rows // _TRIED))]
    tried += [] if isinstance(x, Items) else [map_rows(tried[0], torch.zeros_like)]
    return next((row for row in tried if _works(run, row)), None)


def _named(error: LatedropError, run: Callable[[Any], object], x: Any) -> Tensor:
    """The rows that an error is about, `(N,)`; found one by one where it is about a part of them."""
    rows = row_count(x)
    if error.rows is not None and len(error.rows) == rows:
        return error.rows.cpu()  # type: ignore[no-any-return]
    return torch.tensor([not _works(run, take_rows(x, slice(i, i + 1))) for i in range(rows)])


@contextmanager
def failures_explained(x: Any, model: nn.Module) -> Iterator[None]:
    """Where the model fails on inputs that were placed, `DataError` that says what may be wrong with them."""
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

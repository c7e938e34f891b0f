"""Rules for shapes, parts of tensors, what is gathered and scattered, and tensors that are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from latedrop.onnx_files.emitting import Emitter, Value, rule
from latedrop.onnx_files.tracing import Affine, Size, refuse

__all__: list[str] = []

_END = 2**63 - 1


@rule("view", "_unsafe_view", "reshape", "squeeze", "unsqueeze")
def _viewed(e: Emitter, result: Value, x: Value, *_: Any) -> Any:
    return x.name if x.shape == result.shape else e.reshape(x, result.shape)


@rule("permute")
def _permuted(e: Emitter, result: Value, x: Value, order: Sequence[int]) -> Any:
    return e.op("Transpose", x, perm=[axis % len(order) for axis in order])


@rule("transpose", "t")
def _transposed(e: Emitter, result: Value, x: Value, a: int = 0, b: int = -1) -> Any:
    order = list(range(len(x.shape)))
    if order:
        order[a], order[b] = order[b], order[a]
    return e.op("Transpose", x, perm=order)


@rule("expand")
def _expanded(e: Emitter, result: Value, x: Value, sizes: Any, **_: Any) -> Any:
    if x.shape == result.shape:
        return x.name
    known = (*[1] * (len(result.shape) - len(x.shape)), *x.shape)
    wanted = [1 if a == b else b for a, b in zip(known, result.shape, strict=True)]
    return e.op("Expand", x, e.shape(wanted))


@rule("repeat")
def _tiled(e: Emitter, result: Value, x: Value, times: Sequence[Size]) -> Any:
    shape = [1] * (len(times) - len(x.shape)) + list(x.shape)
    return e.op("Tile", e.reshape(x, shape), e.shape(times))


@rule("_to_copy", "prims.convert_element_type", "to")
def _copied(e: Emitter, result: Value, x: Value, *_: Any, **__: Any) -> Any:
    return e.cast(x, result.dtype)


@rule("slice")
def _sliced(
    e: Emitter, result: Value, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    if x.shape == result.shape and step == 1:
        return x.name
    ends = [e.size(start or 0), e.size(_END if end is None else end)]
    return e.op("Slice", x, *ends, e.constant([dim]), e.constant([step]))


@rule("select")
def _selected(e: Emitter, result: Value, x: Value, dim: int, index: Any) -> Any:
    if isinstance(index, Affine):
        return e.op("Squeeze", e.op("Gather", x, e.size(index), axis=dim), e.constant([dim]))
    return e.op("Gather", x, e.constant(index), axis=dim)


@rule("split_with_sizes", "split")
def _split(e: Emitter, result: Sequence[Value], x: Value, sizes: Any, dim: int = 0) -> Any:
    parts = [value.shape[dim] for value in result]
    return e.op("Split", x, e.shape(parts), outputs=len(parts), axis=dim) if len(parts) > 1 else [x.name]


@rule("unbind")
def _unbound(e: Emitter, result: Sequence[Value], x: Value, dim: int = 0) -> Any:
    return [e.op("Gather", x, e.constant(i), axis=dim) for i in range(len(result))]


@rule("cat")
def _joined(e: Emitter, result: Value, parts: Sequence[Value], dim: int = 0) -> Any:
    kept = [part for part in parts if part.shape != (0,)]  # torch leaves these out
    return e.op("Concat", *(e.cast(part, result.dtype) for part in kept), axis=dim)


@rule("flip")
def _flipped(e: Emitter, result: Value, x: Value, dims: Sequence[int]) -> Any:
    count = len(dims)
    ends = [e.constant([-1] * count), e.constant([-_END] * count)]
    return e.op("Slice", x, *ends, e.constant([d % len(x.shape) for d in dims]), e.constant([-1] * count))


@rule("constant_pad_nd")
def _padded(e: Emitter, result: Value, x: Value, pads: Sequence[int], value: Any = 0) -> Any:
    axes = len(x.shape)
    before, after = [0] * axes, [0] * axes
    for i in range(len(pads) // 2):
        before[axes - 1 - i], after[axes - 1 - i] = pads[2 * i], pads[2 * i + 1]
    return e.op("Pad", x, e.constant([*before, *after]), e.number(value, x.dtype), mode="constant")


@rule("slice_scatter")
def _put_back(
    e: Emitter, result: Value, x: Value, part: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    first, size, many = start or 0, x.shape[dim], part.shape[dim]
    if isinstance(first, Affine) or isinstance(many, Affine):
        return part.name if part.shape == x.shape else refuse("that writes some rows of a batch back (slice_scatter)")
    if first < 0:
        first = first + size if isinstance(size, int) else refuse("that counts rows from the end (slice_scatter)")
    if step == 1 and first == 0 and many == size:
        return part.name
    along = [1] * len(x.shape)
    along[dim] = many
    places = e.constant([first + step * i for i in range(many)])
    index = e.op("Expand", e.op("Reshape", places, e.constant(along)), e.shape(part.shape))
    return e.op("ScatterElements", x, index, part, axis=dim)


@rule("gather")
def _gathered(e: Emitter, result: Value, x: Value, dim: int, index: Value, **_: Any) -> Any:
    return e.op("GatherElements", x, index, axis=dim)


@rule("scatter")
def _scattered(e: Emitter, result: Value, x: Value, dim: int, index: Value, source: Any) -> Any:
    name = e.operand(source, x.dtype)
    if not isinstance(source, Value):
        name = e.op("Expand", name, e.shape(index.shape))
    elif source.shape != index.shape:
        refuse("that scatters a part of a tensor (scatter)")
    return e.op("ScatterElements", x, index, name, axis=dim)


@rule("scatter_add")
def _added(e: Emitter, result: Value, x: Value, dim: int, index: Value, source: Value) -> Any:
    if source.shape != index.shape:
        refuse("that scatters a part of a tensor (scatter_add)")
    return e.op("ScatterElements", x, index, source, axis=dim, reduction="add")


@rule("index_select")
def _rows_of(e: Emitter, result: Value, x: Value, dim: int, index: Value) -> Any:
    return e.op("Gather", x, index, axis=dim)


@rule("unfold")
def _unfolded(e: Emitter, result: Value, x: Value, dim: int, size: int, step: int) -> Any:
    axis = dim % len(x.shape)
    count = result.shape[axis]
    if isinstance(count, Affine):
        refuse("that takes windows over the rows of a batch (unfold)")
    found = e.op("Gather", x, e.constant([[step * i + j for j in range(size)] for i in range(count)]), axis=axis)
    order = [i for i in range(len(result.shape)) if i != axis + 1]
    return e.op("Transpose", found, perm=[*order, axis + 1])


@rule("embedding")
def _embedded(e: Emitter, result: Value, weight: Value, index: Value, *_: Any) -> Any:
    """An index below 0, which `Gather` would count from the end, goes beyond the end, and is an error as in torch."""
    below = e.op("Less", index, e.number(0, index.dtype))
    return e.op("Gather", weight, e.op("Where", below, e.number(weight.shape[0], index.dtype), index), axis=0)


@rule("index", "_unsafe_index")
def _indexed(e: Emitter, result: Value, x: Value, indices: Sequence[Value | None]) -> Any:
    places = [i for i, index in enumerate(indices) if index is not None]
    given = [index for index in indices if index is not None]
    if any(index.dtype == torch.bool for index in given):
        refuse("that picks entries by a mask, of any number (index)")
    if len(places) == 1:
        return e.op("Gather", x, given[0], axis=places[0])
    if places != list(range(places[0], places[0] + len(places))):
        refuse("with indices along axes that do not follow each other (index)")
    order = [*places, *(axis for axis in range(len(x.shape)) if axis not in places)]
    moved = e.op("Transpose", x, perm=order) if order != list(range(len(order))) else x.name
    found = e.op("GatherND", moved, _stacked(e, given))
    many, lead = max(len(index.shape) for index in given), places[0]
    back = [*range(many, many + lead), *range(many), *range(many + lead, len(result.shape))]
    return e.op("Transpose", found, perm=back) if back != list(range(len(back))) else found


@rule("index_put", "_unsafe_index_put")
def _index_put(
    e: Emitter, result: Value, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False
) -> Any:
    places = [i for i, index in enumerate(indices) if index is not None]
    given = [index for index in indices if index is not None]
    first, count = places[0], len(places)
    if places != list(range(first, first + count)) or any(index.dtype == torch.bool for index in given):
        refuse("that writes to entries by a mask, or along axes that do not follow each other (index_put)")
    picked = _broadcast(given)
    lead, rest = list(x.shape[:first]), list(x.shape[first + count :])
    shape = [*lead, *picked, *rest]
    full = values.name if list(values.shape) == shape else e.op("Expand", values, e.shape(shape))
    whole, reduction = x.name, "add" if accumulate else "none"
    if first:  # the axes of the indices in front, and back
        whole = e.op("Transpose", x, perm=_in_front(first, count, len(x.shape)))
        full = e.op("Transpose", full, perm=_in_front(first, len(picked), len(shape)))
    found = e.op("ScatterND", whole, _stacked(e, given), full, reduction=reduction)
    return found if not first else e.op("Transpose", found, perm=_in_front(count, first, len(x.shape)))


def _in_front(start: int, count: int, axes: int) -> list[int]:
    """The order of axes that brings some to the front."""
    moved = list(range(start, start + count))
    return [*moved, *(axis for axis in range(axes) if axis not in moved)]


def _broadcast(indices: Sequence[Value]) -> list[Size]:
    axes = max(len(index.shape) for index in indices)
    padded: list[list[Size]] = [[*[1] * (axes - len(index.shape)), *index.shape] for index in indices]
    return [next((size for size in sizes if size != 1), 1) for sizes in zip(*padded, strict=True)]


def _stacked(e: Emitter, indices: Sequence[Value]) -> str:
    """Indices of several axes, side by side in a last axis."""
    shape = _broadcast(indices)
    parts = []
    for index in indices:
        whole = e.cast(index, torch.int64)
        whole = whole if list(index.shape) == shape else e.op("Expand", whole, e.shape(shape))
        parts.append(e.op("Unsqueeze", whole, e.constant([-1])))
    return e.op("Concat", *parts, axis=-1) if len(parts) > 1 else parts[0]  # type: ignore[no-any-return]


@rule("topk")
def _topk(
    e: Emitter, result: Sequence[Value], x: Value, k: int, dim: int = -1, largest: bool = True, ordered: bool = True
) -> Any:
    return e.op("TopK", x, e.constant([k]), outputs=2, axis=dim, largest=int(largest), sorted=1)


@rule("sort")
def _sorted(
    e: Emitter, result: Sequence[Value], x: Value, dim: int = -1, descending: bool = False, **named: Any
) -> Any:
    size = x.shape[dim]
    if isinstance(size, Affine):
        refuse("that sorts the rows of a batch (sort)")
    return e.op("TopK", x, e.constant([size]), outputs=2, axis=dim, largest=int(descending), sorted=1)


@rule("sort.stable")
def _sorted_stably(
    e: Emitter, result: Sequence[Value], x: Value, *, dim: int = -1, descending: bool = False, **_: Any
) -> Any:
    return _sorted(e, result, x, dim, descending)


@rule("full", "full_like", "new_full")
def _full(e: Emitter, result: Value, _: Any, value: Any, **__: Any) -> Any:
    name = e.number(value, result.dtype)
    return e.op("Expand", name, e.shape(result.shape)) if result.shape else name


@rule("scalar_tensor")
def _scalar(e: Emitter, result: Value, value: Any, **_: Any) -> Any:
    return e.number(value, result.dtype)


@rule("empty", "zeros", "new_zeros", "zeros_like", "new_empty", "empty_like")
def _zeros(e: Emitter, result: Value, *_: Any, **__: Any) -> Any:
    return e.op("Expand", e.number(0, result.dtype), e.shape(result.shape))


@rule("ones", "ones_like", "new_ones")
def _ones(e: Emitter, result: Value, *_: Any, **__: Any) -> Any:
    return e.op("Expand", e.number(1, result.dtype), e.shape(result.shape))


@rule("arange")
def _counted(e: Emitter, result: Value, *limits: Any, **_: Any) -> Any:
    start, end, step = (0, limits[0], 1) if len(limits) == 1 else (*limits, 1)[:3]
    wide = result.dtype if result.dtype.is_floating_point else torch.int64
    found = e.op("Range", *(e.number(value, wide) for value in (start, end, step)))
    return e.cast(Value(found, result.shape, wide), result.dtype)


@rule("tril")
def _lower(e: Emitter, result: Value, x: Value, diagonal: int = 0) -> Any:
    return e.op("Trilu", x, e.constant(diagonal), upper=0)


@rule("triu")
def _upper(e: Emitter, result: Value, x: Value, diagonal: int = 0) -> Any:
    return e.op("Trilu", x, e.constant(diagonal), upper=1)


@rule("copy")
def _overwritten(e: Emitter, result: Value, x: Value, source: Value, *_: Any) -> Any:
    name = e.cast(source, result.dtype)
    return name if source.shape == result.shape else e.op("Expand", name, e.shape(result.shape))


@rule("diagonal")
def _diagonal(e: Emitter, result: Value, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    last = [len(x.shape) - 2, len(x.shape) - 1]
    size = x.shape[-1]
    if offset or [dim1 % len(x.shape), dim2 % len(x.shape)] != last or isinstance(size, Affine) or x.shape[-2] != size:
        refuse("with a diagonal of other axes than the last two (diagonal)")
    picked = e.op("Mul", x, e.constant(torch.eye(size, dtype=x.dtype).numpy(), None))
    return e.op("ReduceSum", picked, e.constant([-1]), keepdims=0)


@rule("as_strided")
def _strided(e: Emitter, result: Value, x: Value, sizes: Any, strides: Sequence[Any], offset: Any = None) -> Any:
    _check_strides(result.shape, strides, offset)
    return e.reshape(x, result.shape)


@rule("as_strided_scatter")
def _strided_back(
    e: Emitter, result: Value, x: Value, part: Value, sizes: Any, strides: Sequence[Any], offset: Any = None
) -> Any:
    _check_strides(part.shape, strides, offset)
    return e.reshape(part, result.shape)


def _check_strides(shape: Sequence[Size], strides: Sequence[Any], offset: Any) -> None:
    """Only another shape of the same numbers, as group norms and pools ask for, can be written."""
    wanted = [1]
    for size in reversed(shape[1:]):
        wanted.insert(0, wanted[0] * size if isinstance(size, int) else 0)
    told = [(a, b) for a, b, size in zip(strides, wanted, shape, strict=True) if size != 1]
    if any(a != b or b == 0 for a, b in told) or offset:
        refuse("that looks at memory in an order of its own (as_strided)")

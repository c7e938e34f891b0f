"""Convolutions of few channels on tensor cores: neighbouring columns as channels.

A layer of 16 channels leaves most of a tensor core's tile empty. In channels-last memory `f` neighbouring columns of a
row lie one behind the other, so that a picture `(N, H, W, C)` is at no cost one of `(N, H, W / f, f C)`. A convolution
of it, with weights laid out anew, gives the same numbers with `f` times as many channels on both sides; some of the
weights are zeros: 10/7 times the arithmetic for a kernel of 7 columns and f = 2, 6/5 for 5, 2 for 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx


def laid_out(weight: Tensor, factor: int) -> Tensor:
    """The weights `(O, C, k, k)` of a convolution with stride 1 and padding `k // 2`, for columns as channels."""
    index, rows = _places(tuple(weight.shape), factor)
    flat = torch.cat([weight.flatten(), weight.new_zeros(1)])
    return flat[index.to(weight.device)].view(rows).contiguous(memory_format=torch.channels_last)


def by_columns(x: Tensor, weight: Tensor, bias: Tensor | None, factor: int, padding: int) -> Tensor:
    """The convolution of `x` with weights from `laid_out`."""
    found = F.conv2d(
        _wide(x, factor), weight, None if bias is None else bias.repeat(factor), 1, _padding(weight, padding)
    )
    return _narrow(found, factor)


def columns_as_channels(factors: Callable[[tuple[int, ...]], int]) -> Callable[[fx.GraphModule], None]:
    """What changes the convolutions of a traced graph so; `factors` gives a factor for the shape of their weights."""

    def change(graph: fx.GraphModule) -> None:
        nodes, aten = graph.graph, torch.ops.aten
        for number, node in enumerate(nodes.find_nodes(op="call_function", target=aten.convolution.default)):
            value, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
            shape, width = tuple(weight.meta["val"].shape), value.meta["val"].shape[3]
            plain = stride == [1, 1] and dilation == [1, 1] and not transposed and groups == 1
            square = padding == [shape[2] // 2, shape[3] // 2]
            factor = factors(shape) if plain and square and min(shape[:2]) > 1 else 1
            if factor == 1 or width % factor:
                continue
            index, rows = _places(shape, factor)
            name = f"columns_{number}"
            graph.register_buffer(name, index.to(value.meta["val"].device))
            n, c, h, w = value.meta["val"].shape
            with nodes.inserting_before(node):
                zero = nodes.call_function(aten.constant_pad_nd.default, (_flat(nodes, weight), [0, 1], 0.0))
                picked = nodes.call_function(aten.index.Tensor, (zero, [nodes.get_attr(name)]))
                wide = nodes.call_function(aten.reshape.default, (picked, list(rows)))
                more = None if bias is None else nodes.call_function(aten.repeat.default, (bias, [factor]))
                there = _moved(nodes, value, (n, h, w // factor, factor * c))
                args = (there, wide, more, stride, [padding[0], rows[3] // 2], dilation, transposed, [0, 0], groups)
                found = nodes.call_function(aten.convolution.default, args)
                back = _moved(nodes, found, (n, h, w, shape[0]))
            node.replace_all_uses_with(back)
            nodes.erase_node(node)
        graph.recompile()

    return change


def _flat(nodes: fx.Graph, weight: fx.Node) -> fx.Node:
    return nodes.call_function(torch.ops.aten.reshape.default, (weight, [-1]))


def _moved(nodes: fx.Graph, value: fx.Node, shape: Sequence[int]) -> fx.Node:
    """To channels last, as another shape there, and back."""
    aten = torch.ops.aten
    last = nodes.call_function(aten.permute.default, (value, [0, 2, 3, 1]))
    other = nodes.call_function(aten.reshape.default, (last, list(shape)))
    return nodes.call_function(aten.permute.default, (other, [0, 3, 1, 2]))


def _places(shape: tuple[int, ...], factor: int) -> tuple[Tensor, tuple[int, ...]]:
    """Which weight goes where, the last being zero; and the shape of the new weights."""
    outputs, inputs, height, width = shape
    half = width // 2
    reach = (half + factor - 1) // factor
    p, q, j = (torch.arange(n) for n in (factor, factor, 2 * reach + 1))
    tap = factor * (j - reach)[None, None] + q[None, :, None] - p[:, None, None] + half  # (p, q, j)
    known = (tap >= 0) & (tap < width)
    o, c, y = torch.arange(outputs), torch.arange(inputs), torch.arange(height)
    start = (o[:, None, None] * inputs + c[None, :, None]) * height + y[None, None]  # (o, c, y)
    where = start[None, :, None, :, :, None] * width + tap.clamp(0, width - 1)[:, None, :, None, None]
    nowhere = outputs * inputs * height * width
    index = torch.where(known[:, None, :, None, None], where, nowhere)  # (p, o, q, c, y, j)
    return index.flatten(), (factor * outputs, factor * inputs, height, 2 * reach + 1)


def _wide(x: Tensor, factor: int) -> Tensor:
    n, c, h, w = x.shape
    return x.permute(0, 2, 3, 1).reshape(n, h, w // factor, factor * c).permute(0, 3, 1, 2)


def _narrow(x: Tensor, factor: int) -> Tensor:
    n, c, h, w = x.shape
    return x.permute(0, 2, 3, 1).reshape(n, h, w * factor, c // factor).permute(0, 3, 1, 2)


def _padding(weight: Tensor, rows: int) -> tuple[int, int]:
    return rows, weight.shape[3] // 2


def measured_layers(
    layers: Sequence[tuple[str, tuple[int, ...], tuple[int, int]]],
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
    timed: Callable[[dict[str, Callable[[], Any]]], dict[str, Any]],
) -> dict[str, Any]:
    """Every layer (name, shape of the weights, height and width) as it is, and by 2 and 4 columns with how far off."""
    found: dict[str, Any] = {}
    for name, shape, size in layers:
        generator = torch.Generator().manual_seed(0)
        weight = (0.05 * torch.randn(shape, generator=generator)).to(device, dtype)
        x = torch.randn(1, shape[1], *size, generator=generator).to(device, dtype).expand(rows, -1, -1, -1)
        x = x.contiguous(memory_format=torch.channels_last)
        half = shape[2] // 2
        plain = weight.contiguous(memory_format=torch.channels_last)
        runs: dict[str, Callable[[], Any]] = {"as it is": lambda x=x, w=plain, p=half: F.conv2d(x, w, None, 1, p)}
        runs["ReLU alone"] = lambda x=x: x.relu()
        off = {}
        for factor in (2, 4):
            wide = laid_out(weight, factor)
            runs[f"{factor} columns"] = lambda x=x, w=wide, f=factor, p=half: by_columns(x, w, None, f, p)
            there, here = runs[f"{factor} columns"](), runs["as it is"]()
            off[f"{factor} columns"] = float((there - here).abs().max() / here.abs().max())
        found[name] = timed(runs) | {"off": off, "shape": list(shape), "size": list(size)}
    return found


MCNN_LAYERS: list[tuple[str, tuple[int, ...], tuple[int, int]]] = [
    ("large 2", (32, 16, 7, 7), (240, 320)),
    ("large 3", (16, 32, 7, 7), (120, 160)),
    ("large 4", (8, 16, 7, 7), (120, 160)),
    ("medium 2", (40, 20, 5, 5), (240, 320)),
    ("medium 3", (20, 40, 5, 5), (120, 160)),
    ("medium 4", (10, 20, 5, 5), (120, 160)),
    ("small 2", (48, 24, 3, 3), (240, 320)),
    ("small 3", (24, 48, 3, 3), (120, 160)),
    ("small 4", (12, 24, 3, 3), (120, 160)),
]
"""The convolutions of MCNN that are run for every draw, but for the last, which has one pixel."""

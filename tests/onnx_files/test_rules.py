"""Every rule against torch: layers with their derivatives, and plain operators, on two numbers of rows."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from latedrop.onnx_files.writing import write_onnx
from latedrop.terms.forest import Trees
from rounding import rounding

onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")

IMAGES = (4, 8, 8)
LAYERS: dict[str, Callable[[], nn.Module | Callable[[Tensor], Tensor]]] = {
    "conv strided": lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1),
    "conv dilated": lambda: nn.Conv2d(4, 6, 3, dilation=2, padding=1, bias=False),
    "conv grouped": lambda: nn.Conv2d(4, 4, 3, groups=4),
    "conv uneven": lambda: nn.Conv2d(4, 2, (3, 2), stride=(3, 2)),
    "conv transposed": lambda: nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1, output_padding=1),
    "conv 1d": lambda: nn.Sequential(nn.Flatten(2), nn.Conv1d(4, 3, 5, stride=2)),
    "batch norm": lambda: nn.BatchNorm2d(4),
    "batch norm plain": lambda: nn.BatchNorm2d(4, affine=False),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "instance norm": lambda: nn.InstanceNorm2d(4),
    "layer norm": lambda: nn.LayerNorm(IMAGES),
    "layer norm plain": lambda: nn.LayerNorm(8, elementwise_affine=False),
    "max pool": lambda: nn.MaxPool2d(2),
    "max pool overlapping": lambda: nn.MaxPool2d(3, stride=2, padding=1),
    "max pool up": lambda: nn.MaxPool2d(3, stride=2, ceil_mode=True),
    "avg pool": lambda: nn.AvgPool2d(2),
    "avg pool overlapping": lambda: nn.AvgPool2d(3, stride=2, padding=1),
    "adaptive pool": lambda: nn.AdaptiveAvgPool2d(1),
    "adaptive pool uneven": lambda: nn.AdaptiveAvgPool2d((3, 5)),
    "nearest": lambda: nn.Upsample(scale_factor=2),
    "bilinear": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "nearest odd": lambda: nn.Upsample(size=(11, 5)),
    "nearest exact": lambda: nn.Upsample(size=(12, 16), mode="nearest-exact"),
    "bilinear corners": lambda: nn.Upsample(size=(11, 5), mode="bilinear", align_corners=True),
    "pad": lambda: nn.ZeroPad2d((1, 2, 0, 3)),
    "reflect": lambda: nn.ReflectionPad2d(2),
    "shuffle": lambda: nn.PixelShuffle(2),
    "softmax": lambda: nn.Softmax(1),
    "log softmax": lambda: nn.LogSoftmax(-1),
    "attention": lambda: lambda x: F.scaled_dot_product_attention(x, x.flip(2), x.roll(1, 3)),
    "causal attention": lambda: lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "prelu": lambda: nn.PReLU(),
    **{
        kind.__name__: kind for kind in (nn.GELU, nn.ELU, nn.SELU, nn.CELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Hardswish)
    },
    **{kind.__name__: kind for kind in (nn.LeakyReLU, nn.Hardtanh, nn.ReLU6, nn.Sigmoid, nn.Tanh, nn.Softsign)},
    "gelu tanh": lambda: nn.GELU(approximate="tanh"),
    "glu": lambda: nn.GLU(1),
    "in place": lambda: lambda x: F.relu_(x.clone() * 3).add(x).mul_(2),
    "parts": lambda: (
        lambda x: torch.cat([x[:, 1:3], x[:, -1:, ::2].repeat(1, 1, 2, 1), x.select(2, 3).unsqueeze(2).expand_as(x)], 1)
    ),
    "written part": lambda: lambda x: torch.zeros_like(x).index_copy(1, torch.tensor([2, 0]), x[:, :2]),
    "windows": lambda: lambda x: x.unfold(2, 3, 2),
    "indices": lambda: lambda x: x[:, [0, 2, 2]][:, :, [1, 0], [3, 4]],
    "statistics": lambda: lambda x: x.std((2, 3)) + x.var(1).mean((1, 2))[:, None] + x.amax((2, 3)),
    "norms": lambda: lambda x: x / x.norm(dim=1, keepdim=True) + F.normalize(x, dim=2),
    "logarithms": lambda: (
        lambda x: x.exp().log1p() + (0.1 * x).expm1() + x.abs().add(1).log().rsqrt() + x.logsumexp(1)[:, None]
    ),
    "chosen": lambda: lambda x: torch.where(x > 0.3, x.clamp(-1, 1), x.sin() + x.cos()).cumsum(2),
    "sorted": lambda: lambda x: x.sort(1, descending=True).values + x.topk(2, 1).values.sum(1, keepdim=True),
    "einsum": lambda: lambda x: torch.einsum("nchw,ndhw->ncd", x, x).tril(),
}


THIRD = 1 / 3  # which a file rounds to single precision
NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "product": lambda x: x * THIRD,
    "sum": lambda x: (x + THIRD) / 0.7 - (THIRD - x) + torch.add(x, x, alpha=THIRD),
    "power": lambda x: (x.square() + 0.1) ** THIRD + 1.3**x + THIRD / (x.square() + 1.3),
    "bounds": lambda x: x.clamp(-THIRD, 0.7) + x.clamp_min(-0.1) + x.clamp(0, 0.7),
    "comparison": lambda x: torch.where(x > THIRD, x, THIRD) + x.masked_fill(x > 0.2, THIRD),
    "filled": lambda x: x + torch.full_like(x, THIRD) * torch.full((3,), 0.7, dtype=x.dtype),
    "rest": lambda x: x.remainder(THIRD) + x.div(THIRD, rounding_mode="floor"),
    "leaky": lambda x: F.leaky_relu(x, THIRD) + F.elu(x, 0.7) + F.selu(x) + F.hardtanh(x, -THIRD, THIRD),
    "layer norm": lambda x: F.layer_norm(x, (3,), eps=THIRD) + F.group_norm(x, 1, eps=0.1),
    "softplus": lambda x: F.softplus(x, 1.3) + F.gelu(x, approximate="tanh") + F.silu(x * THIRD),
}


def with_derivatives(layers: Mapping[str, Callable[[Tensor], Tensor]], x: Tensor) -> dict[str, Tensor]:
    """The result of every layer, and a gradient of it."""
    results = {}
    for name, layer in layers.items():
        with torch.enable_grad():
            leaf = x.clone().requires_grad_()
            y = layer(leaf)
            (gradient,) = torch.autograd.grad(y.sin().sum(), leaf)
        key = name.replace(" ", "_")
        results |= {key: y.detach(), f"{key}_back": gradient.detach()}
    return results


def test_plain_numbers_in_double_precision(tmp_path: Path) -> None:
    function = partial(with_derivatives, NUMBERS)

    def rows(count: int) -> list[Tensor]:
        return [torch.randn(count, 3, generator=torch.Generator().manual_seed(count), dtype=torch.float64)]

    path = write_onnx(tmp_path / "numbers.onnx", function, rows, ["x"], {})
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (x,) = rows(9)
    expected = function(x)
    for (name, value), given in zip(expected.items(), session.run(list(expected), {"x": x.numpy()}), strict=True):
        bound = rounding(torch.float32) * float(value.abs().max())
        np.testing.assert_allclose(given, value.numpy(), rtol=0, atol=bound, err_msg=name)


@pytest.mark.slow
def test_layers_and_their_derivatives(tmp_path: Path) -> None:
    layers = {name: make() for name, make in LAYERS.items()}
    for layer in layers.values():
        if isinstance(layer, nn.Module):
            layer.eval().requires_grad_(False)

    function = partial(with_derivatives, layers)

    def rows(count: int) -> list[Tensor]:
        return [torch.randn(count, *IMAGES, generator=torch.Generator().manual_seed(count))]

    path = write_onnx(tmp_path / "layers.onnx", function, rows, ["x"], {})
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for count in (2, 9):
        (x,) = rows(count)
        expected = function(x)
        given = dict(zip(expected, session.run(list(expected), {"x": x.numpy()}), strict=True))
        for name, value in expected.items():
            size = float(value.abs().max())
            np.testing.assert_allclose(given[name], value.numpy(), rtol=1e-4, atol=1e-5 * size, err_msg=name)


def test_trees(tmp_path: Path) -> None:
    """One that splits often and one that is a single leaf, of two outputs; rows lie at thresholds, too."""
    tree = pytest.importorskip("sklearn.tree").DecisionTreeRegressor
    x = np.random.default_rng(0).normal(size=(200, 3)).round(1).astype(np.float32)
    y = np.stack([x[:, 0] * x[:, 1], x[:, 2]], 1)
    grown = [tree(max_depth=6).fit(x, target).tree_ for target in (y, np.ones_like(y))]
    trees = Trees.joined(grown, 0.5, 3)
    path = write_onnx(
        tmp_path / "trees.onnx", lambda x: {"sums": trees.sums(x)}, lambda n: [torch.from_numpy(x[:n])], ["x"], {}
    )
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    rows = np.concatenate(
        [x, np.float32(0.05) + x, trees.nodes[:, 1].nan_to_num(posinf=9.0)[:, None].numpy() * [1, 1, 1]]
    )
    rows = rows.astype(np.float32)
    np.testing.assert_array_equal(session.run(None, {"x": rows})[0], trees.sums(torch.from_numpy(rows)).numpy())

"""Random small architectures: the invariants of docs/design.md hold for whatever is put together.

A few seconds, always the same models. `make fuzz` tries more of them, some of them as traced programs too,
which take twenty times as long; `make fuzz FUZZ=150` for an hour.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from latedrop import find_sites, sample
from latedrop.dropout.masks import draw_keys, masks_from_keys
from latedrop.errors import ArgumentError
from untouched import assert_same, state

FACTOR, SEED = int(os.environ.get("LATEDROP_FUZZ", "1")), int(os.environ.get("LATEDROP_FUZZ_SEED", "0"))
TRACED = 16  # one model in so many is also compared as a traced program
PROFILE = settings(max_examples=150 * FACTOR, deadline=None, database=None, suppress_health_check=list(HealthCheck))

WIDTH, LENGTH, SIDE, WORDS = 6, 5, 6, 11
KINDS = ("flat", "series", "steps", "image", "tokens")
EVERYWHERE = ("relu", "in place", "tanh", "gelu", "residual", "branches", "state", "number", "dropout", "raw", "twice")
BLOCKS = {
    "flat": ("linear", "layer norm", "batch norm", "bilinear", "bottleneck"),
    "series": ("conv", "depthwise", "batch norm", "group norm", "pool", "transposed"),
    "steps": ("linear", "layer norm", "lstm", "gru", "rnn", "attention", "encoder", "bottleneck"),
    "image": ("conv", "depthwise", "batch norm", "group norm", "instance norm", "pool", "transposed"),
}
DTYPES = {torch.float32: 1e-3, torch.float64: 1e-9, torch.bfloat16: 0.15}
"""How far rounding may carry an output, of the largest."""


@dataclass(frozen=True)
class Plan:
    """Parts of a model; its repr is the code that makes it again."""

    seed: int
    kind: str
    blocks: tuple[str, ...]
    inner: tuple[str, ...]
    dtype: torch.dtype
    rows: int
    second_input: bool
    outputs: int
    train: bool


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    kind = draw(st.sampled_from(KINDS))
    own = BLOCKS["steps" if kind == "tokens" else kind]
    block = st.sampled_from(own) | st.sampled_from(EVERYWHERE)
    return Plan(
        seed=draw(st.integers(0, 2**16)),
        kind=kind,
        blocks=tuple(draw(st.lists(block, min_size=1, max_size=6))),
        inner=tuple(draw(st.lists(st.sampled_from(own[:3]), min_size=1, max_size=2))),
        dtype=draw(st.sampled_from(list(DTYPES))),
        rows=draw(st.integers(1, 5)),
        second_input=draw(st.booleans()),
        outputs=draw(st.integers(1, 2)),
        train=draw(st.booleans()),
    )


class Block(nn.Module):
    """One step of a plan; it takes and gives tensors of one shape."""

    def __init__(self, name: str, kind: str, inner: tuple[str, ...]) -> None:
        super().__init__()
        self.name, self.kind = name, kind
        self.layer = self._layer(name, kind)
        self.calls, self.factor = 0, 0.5
        self.register_buffer("seen", torch.zeros(()))
        if name in ("residual", "branches", "twice"):
            self.parts = nn.ModuleList(
                nn.Sequential(*(Block(other, kind, ()) for other in inner)) for _ in range(1 + (name == "branches"))
            )
        if name == "branches":
            self.join = nn.Linear(2 * WIDTH, WIDTH)
        if name == "raw":
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    @staticmethod
    def _layer(name: str, kind: str) -> nn.Module:
        axes = {"flat": 0, "series": 1, "steps": 0, "image": 2}[kind]
        conv: Any = {1: nn.Conv1d, 2: nn.Conv2d}.get(axes)
        up: Any = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d}.get(axes)
        make: dict[str, Any] = {
            "linear": lambda: nn.Linear(WIDTH, WIDTH),
            "bottleneck": lambda: nn.Sequential(nn.Linear(WIDTH, 2), nn.Tanh(), nn.Linear(2, WIDTH)),
            "bilinear": lambda: nn.Bilinear(WIDTH, WIDTH, WIDTH),
            "layer norm": lambda: nn.LayerNorm(WIDTH),
            "batch norm": lambda: {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d}[axes](WIDTH),
            "group norm": lambda: nn.GroupNorm(2, WIDTH),
            "instance norm": lambda: nn.InstanceNorm2d(WIDTH),
            "conv": lambda: conv(WIDTH, WIDTH, 3, padding=1),
            "depthwise": lambda: conv(WIDTH, WIDTH, 3, padding=1, groups=WIDTH),
            "transposed": lambda: up(WIDTH, WIDTH, 3, padding=1),
            "pool": lambda: {1: nn.AvgPool1d, 2: nn.MaxPool2d}[axes](3, 1, 1),
            "lstm": lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True),
            "gru": lambda: nn.GRU(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True),
            "rnn": lambda: nn.RNN(WIDTH, WIDTH, batch_first=True, num_layers=2, dropout=0.5),
            "attention": lambda: nn.MultiheadAttention(WIDTH, 2, dropout=0.5, batch_first=True),
            "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True),
            "relu": nn.ReLU,
            "in place": lambda: nn.ReLU(inplace=True),
            "tanh": nn.Tanh,
            "gelu": nn.GELU,
            "dropout": lambda: nn.Dropout(0.5),
        }
        return make.get(name, nn.Identity)()

    def forward(self, x: Tensor) -> Tensor:
        if self.name == "residual":
            x = x + self.parts[0](x.clone())
        elif self.name == "twice":
            x = self.parts[0](self.parts[0](x))
        elif self.name == "branches":
            a, b = (_channels_last(part(x.clone()), self.kind) for part in self.parts)
            x = _channels_last(self.join(torch.cat([a, b], -1)), self.kind)
        elif self.name == "state":  # kept in attributes and buffers, and written into them
            self.calls, self.last = self.calls + 1, x
            self.seen += 1
            x = x * (self.calls / self.seen)
        elif self.name == "number":
            x = x * self.factor
        elif self.name == "raw":
            x = _channels_last(_channels_last(x, self.kind) @ self.weight, self.kind)
        elif self.name == "attention":
            x = self.layer(x, x, x, need_weights=False)[0]
        elif self.name == "bilinear":
            x = self.layer(x, x)
        else:
            x = self.layer(x)
            x = x[0] if isinstance(x, tuple) else x
        return x


def _channels_last(x: Tensor, kind: str) -> Tensor:
    """To the end and back: for images and series both are the same exchange of axes."""
    return x.transpose(1, -1) if kind in ("series", "image") else x


class Model(nn.Module):
    """Inputs to width, the blocks, and one or two heads."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        kind = "steps" if plan.kind == "tokens" else plan.kind
        first: dict[str, Any] = {
            "flat": lambda: nn.Linear(3, WIDTH),
            "series": lambda: nn.Conv1d(2, WIDTH, 3, padding=1),
            "steps": lambda: nn.Linear(3, WIDTH),
            "image": lambda: nn.Conv2d(2, WIDTH, 3, padding=1),
            "tokens": lambda: nn.Embedding(WORDS, WIDTH),
        }
        self.first = first[plan.kind]()
        self.blocks = nn.Sequential(*(Block(name, kind, plan.inner) for name in plan.blocks))
        self.merge = nn.Linear(WIDTH + 2 * plan.second_input, WIDTH)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 2) for _ in range(plan.outputs))

    def forward(self, x: Tensor, more: Tensor | None = None) -> Any:
        h = self.blocks(self.first(x))
        if self.plan.kind in ("series", "image"):
            h = h.flatten(2).mean(2)
        elif h.dim() == 3:
            h = h.mean(1)
        h = h if more is None else torch.cat([h, more], 1)
        outputs = [head(torch.tanh(self.merge(h))) for head in self.heads]
        return outputs[0] if len(outputs) == 1 else dict(zip("ab", outputs, strict=True))


def made(plan: Plan) -> tuple[nn.Module, Any, Any]:
    """The model, inputs for it, and the readout."""
    torch.manual_seed(plan.seed)
    model = Model(plan)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2)
    shapes = {"flat": (3,), "series": (2, LENGTH), "steps": (LENGTH, 3), "image": (2, SIDE, SIDE)}
    if plan.kind == "tokens":
        x = torch.randint(0, WORDS, (plan.rows, LENGTH))
    else:
        x = torch.randn(plan.rows, *shapes[plan.kind]).to(plan.dtype)
    inputs = (x, torch.randn(plan.rows, 2).to(plan.dtype)) if plan.second_input else x
    return model.to(plan.dtype).train(plan.train), inputs, "b" if plan.outputs == 2 else None


def plain(model: nn.Module, x: Any, readout: Any) -> Tensor:
    """Return the output of the user's own model in eval mode; a copy, as it may write into itself."""
    other = Model(model.plan).to(model.plan.dtype)  # type: ignore[arg-type,union-attr]
    other.load_state_dict(model.state_dict())
    other.requires_grad_(False)  # torch computes some layers in another way where weights ask for gradients
    with torch.no_grad():
        output = other.eval()(*(part.clone() for part in (x if isinstance(x, tuple) else (x,))))
    return output if readout is None else output[readout]


def rows_of(x: Any, index: slice) -> Any:
    return tuple(part[index] for part in x) if isinstance(x, tuple) else x[index]


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    return bool((actual - expected).abs().max() <= DTYPES[dtype] * (expected.abs().max() + 1e-3))


@PROFILE
@seed(SEED)
@given(plans())
@pytest.mark.filterwarnings("ignore:.*nested tensors", "ignore:enable_nested_tensor")
def test_invariants(plan: Plan) -> None:
    model, x, readout = made(plan)
    expected = plain(model, x, readout)
    before, attributes = state(model), [(block.calls, block.factor) for block in blocks(model)]
    sites = find_sites(model, x)
    assert {site.name.partition(".")[0] for site in sites} >= {"merge", "heads"}
    assert not any(site.coupled for site in sites)

    nothing = sample(model, x, 0.0, 3, sites=sites, readout=readout)
    assert torch.equal(nothing.mean, expected.to(nothing.mean.dtype))  # rate 0 multiplies by 1, on the same batch
    assert not bool(nothing.variance.any())

    options: dict[str, Any] = {"seed": plan.seed, "sites": sites, "readout": readout, "keep_draws": True}
    one_by_one: Any = sample(model, x, 0.3, 5, engine="loop", **options).outputs
    for how in ({"engine": "rows"}, {"chunk": 2}):
        together: Any = sample(model, x, 0.3, 5, **how, **options).outputs
        assert close(together, one_by_one, plan.dtype), how
    alone: Any = sample(model, rows_of(x, slice(-1, None)), 0.3, 5, **options).outputs
    assert close(alone, one_by_one[:, -1:], plan.dtype)

    assert_same(before, state(model))
    assert attributes == [(block.calls, block.factor) for block in blocks(model)]
    for site in sites:
        few, more = (
            masks_from_keys(draw_keys(plan.seed, range(3), site.name, 0), site.units, rate) for rate in (0.2, 0.4)
        )
        assert bool(((more > 0) <= (few > 0)).all())
    if FACTOR > 1 and plan.seed % TRACED == 0:
        compiled_agrees(model, x, sites, readout, one_by_one, plan)


def compiled_agrees(model: nn.Module, x: Any, sites: Any, readout: Any, draws: Tensor, plan: Plan) -> None:
    """The program, traced and not compiled; where it is refused nothing is wrong."""
    options: dict[str, Any] = {"seed": plan.seed, "sites": sites, "readout": readout, "chunk": 3}
    try:
        with patch.object(torch, "compile", lambda graph, **_: graph):
            moments = sample(model, x, 0.3, 5, engine="compiled", **options)
    except ArgumentError:
        return
    assert close(moments.mean, draws.mean(0), plan.dtype)


def blocks(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, Block)]

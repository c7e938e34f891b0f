"""MCNN with 50 draws, for `benchmarks.gpu_round`: its convolutions one by one, and whole programs of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from latedrop.variance.engine import compiled

from benchmarks.gpu_setting import DRAWS, Setting, Unit
from benchmarks.thin_convolutions import MCNN_LAYERS, columns_as_channels, measured_layers
from benchmarks.video import count, network
from latedrop import find_sites, sample


def mcnn(setting: Setting) -> Iterator[Unit]:
    """MCNN with 50 draws: its convolutions one by one, then whole, with neighbouring columns as channels."""
    layers: dict[str, Any] = {}
    half = torch.float32 if setting.device.type == "cpu" else torch.float16
    yield f"layers, {_word(half)}", partial(_mcnn_layers, setting, half, layers)
    for frames in (1, 8):
        yield f"{frames} frames, {_word(half)}", partial(_mcnn, setting, half, frames, layers)
    if setting.device.type == "cuda":
        yield "1 frames, tf32", partial(_mcnn, setting, torch.float32, 1, layers)
        yield "8 frames, bfloat16", partial(_mcnn, setting, torch.bfloat16, 8, layers)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _mcnn_layers(setting: Setting, dtype: torch.dtype, layers: dict[str, Any]) -> dict[str, Any]:
    chosen = [(n, shape, (h // 4, w // 4)) for n, shape, (h, w) in MCNN_LAYERS] if setting.small else MCNN_LAYERS
    turns = partial(setting.turns, base="as it is")
    found = measured_layers(chosen, 2 if setting.small else DRAWS, dtype, setting.device, turns)
    layers.update(found)
    best = {
        name: min(layer["seconds"], key=lambda k: layer["seconds"][k] if "column" in k or k == "as it is" else 9e9)
        for name, layer in found.items()
    }
    return {"layers": found, "best": best}


def _mcnn(setting: Setting, dtype: torch.dtype, frames: int, layers: dict[str, Any]) -> dict[str, Any]:
    device, size = setting.device, (120, 160) if setting.small else (480, 640)
    draws = 4 if setting.small else DRAWS
    x = torch.rand(frames, 1, *size, generator=torch.Generator().manual_seed(0)).to(device)
    x = x.contiguous(memory_format=torch.channels_last)
    single = network(torch.float32, device)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    expected = sample(single, x, 0.01, draws, readout=count)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    chosen = {tuple(layer["shape"]): _best_factor(layer["seconds"]) for layer in layers.values()}
    ways: dict[str, Any] = {"compiled": lambda graph: None}
    ways["2 columns"] = columns_as_channels(lambda shape: 4 if shape[0] % 4 else 2)
    if chosen:
        ways["best columns"] = columns_as_channels(lambda shape: chosen.get(shape, 1))
    if dtype is not torch.float16 and chosen:
        del ways["2 columns"]
    runs: dict[str, Callable[[], Any]] = {}
    chunks = {"": None} if frames == 1 or setting.small else {"": 25}
    off: dict[str, Any] = {}
    y = x.to(dtype)
    for way, change in ways.items():
        for label, chunk in chunks.items():
            model = network(dtype, device)  # its programs are its own
            sites = find_sites(model, y)
            run = partial(sample, model, y, 0.01, draws, sites=sites, readout=count, chunk=chunk, engine="compiled")
            try:
                with _Changing(change):
                    moments = run()
            except Exception as error:
                off[way + label] = {"error": str(error)[:200]}
                continue
            runs[way + label] = run
            away = (moments.mean - expected.mean).abs() / expected.variance.sqrt()
            off[way + label] = {
                "count": float(away.mean()),
                "std": float((moments.variance / expected.variance).sqrt().mean()),
            }
    found = setting.turns(runs, "compiled") | {"off": off, "columns": {str(k): v for k, v in chosen.items()}}
    return found | {"frames per second": {name: frames / taken for name, taken in found["seconds"].items()}}


def _best_factor(seconds: dict[str, float]) -> int:
    known = {1: seconds["as it is"], 2: seconds.get("2 columns", 9e9), 4: seconds.get("4 columns", 9e9)}
    return min(known, key=known.__getitem__)


class _Changing:
    """Programs that are traced inside get their convolutions changed, on any device."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        self.change = change

    def __enter__(self) -> None:
        self.before = compiled.split, compiled.fill_up_channels
        split, fill_up_channels, change = compiled.split, compiled.fill_up_channels, self.change

        def changed(graph: Any, inputs: int) -> Any:
            change(graph)
            fill_up_channels(graph)
            return split(graph, inputs)

        compiled.split, compiled.fill_up_channels = changed, lambda graph: None

    def __exit__(self, *_: object) -> None:
        compiled.split, compiled.fill_up_channels = self.before

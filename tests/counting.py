"""How often a layer's weight is really used, whatever calls it."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from latedrop.data.rows import tensors

PRODUCTS = {"addmm", "mm", "bmm", "baddbmm", "addmv", "mv", "linear", "convolution"}


class Runs(TorchDispatchMode):
    """Counts products and convolutions by the layer whose weight they take, and operators by name."""

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        layers = {} if model is None else dict(model.named_modules())
        self.names = {
            layer.weight.untyped_storage()._cdata: name for name, layer in layers.items() if hasattr(layer, "weight")
        }
        self.layers: Counter[str] = Counter()
        self.operators: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operator = func._schema.name.partition("::")[2]
        self.operators[operator] += 1
        if operator in PRODUCTS:
            used = {self.names.get(value.untyped_storage()._cdata) for value in tensors(args)}
            self.layers.update(name for name in used if name is not None)
        return func(*args, **(kwargs or {}))

"""Parts of a model in TorchScript: they run outside Python, where nothing can be dropped."""

from __future__ import annotations

from typing import Any
from warnings import warn

import torch
from torch import nn

from latedrop.errors import LatedropWarning, SiteError
from latedrop.model.twin import Around
from latedrop.model.wrappers import named_layers

__all__ = ["check_scripts", "optimized_scripts", "wrap_scripts"]


def _names(model: nn.Module) -> list[str]:
    """The outermost parts of a model that are TorchScript."""
    scripts = [name for name, module in named_layers(model).items() if isinstance(module, torch.jit.ScriptModule)]
    return [name for name in scripts if not any(name.startswith(f"{other}.") for other in scripts)]


def optimized_scripts(model: nn.Module) -> list[str]:
    """Those that have another form for oneDNN, outside which they cannot run."""
    layers = named_layers(model)
    return [name for name in _names(model) if "mkldnn" in str(getattr(layers[name], "inlined_graph", ""))]


def check_scripts(model: nn.Module) -> None:
    """Refuse a model that is TorchScript, and warn of parts that are."""
    if isinstance(model, torch.jit.ScriptModule):
        raise SiteError(
            "expected a model whose layers run in Python; found TorchScript, inside which nothing can be dropped. Use "
            "the Python model, or export it with torch.export and pass latedrop.load_program(path)."
        )
    found = _names(model)
    if found:
        warn(
            f"{found} are TorchScript: no dropout goes inside them, only after them. Use the Python modules to reach "
            "their layers.",
            LatedropWarning,
            stacklevel=3,
        )


def wrap_scripts(twin: nn.Module, around: Around) -> None:
    """Calls of the TorchScript parts of a twin become `around(script, ...)`; their weights are no longer the twin's."""
    for module in list(twin.modules()):
        if not isinstance(module, torch.jit.ScriptModule):
            for name, part in list(module.named_children()):
                if isinstance(part, torch.jit.ScriptModule):
                    module.add_module(name, _Wrapped(part, around))


class _Wrapped(nn.Module):
    def __init__(self, script: nn.Module, around: Around) -> None:
        super().__init__()
        vars(self).update(script=script, around=around)  # not as a submodule, whose weights would be the model's

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.around(self.script, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["script"], name)

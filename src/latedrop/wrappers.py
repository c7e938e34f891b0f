"""Wrappers that only call another module (`torch.compile`, `DataParallel`, DDP), and names without them."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

__all__ = ["bare", "is_wrapper", "plain_names"]


def bare(model: nn.Module) -> nn.Module:
    """Return the module inside wrappers that only call it."""
    while (attribute := _wrapped_attribute(type(model))) is not None:
        model = getattr(model, attribute)
    return model


def is_wrapper(module: nn.Module) -> bool:
    """Return True for a module that only calls another one."""
    return _wrapped_attribute(type(module)) is not None


def plain_names(model: nn.Module) -> Callable[[str], str]:
    """Return a function that takes wrappers out of a name of `model.named_modules()` or `state_dict()`.

    >>> plain_names(nn.Sequential(nn.DataParallel(nn.Linear(2, 2))))("0.module.weight")
    '0.weight'
    """
    outer = [(f"{name}." if name else "", _wrapped_attribute(type(module))) for name, module in model.named_modules()]
    wrappers = [(start, f"{start}{attribute}.") for start, attribute in outer if attribute]

    def plain(name: str) -> str:
        name += "."
        for start, added in reversed(wrappers):  # the innermost first
            name = start + name.removeprefix(added) if name.startswith(added) else name
        return name[:-1]

    return plain


def _wrapped_attribute(kind: type) -> str | None:
    if issubclass(kind, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return "module"
    return "_orig_mod" if kind.__name__ == "OptimizedModule" else None

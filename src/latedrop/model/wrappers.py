"""Wrappers that only call another module, `torch.compile`, `DataParallel` and DDP, and names without them."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from latedrop.torch_inside import part_named, wrapped_attribute

__all__ = ["bare", "layer_named", "named_layers", "plain_names"]


def bare(model: nn.Module) -> nn.Module:
    """The module inside wrappers that only call it: those of `torch.compile`, `DataParallel` and DDP."""
    while (attribute := wrapped_attribute(model)) is not None:
        model = getattr(model, attribute)
    return model


def plain_names(model: nn.Module) -> Callable[[str], str]:
    """What turns a name of `model.named_modules()` or `state_dict()` into that without any wrapper.

    >>> plain_names(nn.Sequential(nn.DataParallel(nn.Linear(2, 2))))("0.module.weight")
    '0.weight'
    """
    outer = [(f"{name}." if name else "", wrapped_attribute(module)) for name, module in model.named_modules()]
    wrappers = [(start, f"{start}{attribute}.") for start, attribute in outer if attribute]

    def plain(name: str) -> str:
        name += "."
        for start, added in reversed(wrappers):  # the innermost first
            name = start + name.removeprefix(added) if name.startswith(added) else name
        return name[:-1]

    return plain


def named_layers(model: nn.Module) -> dict[str, nn.Module]:
    """`model.named_modules()`, without wrappers and what they add to names."""
    named = list(model.named_modules())
    if not any(wrapped_attribute(module) for _, module in named):
        return dict(named)
    plain = plain_names(model)
    return {plain(name): module for name, module in named if not wrapped_attribute(module)}


def layer_named(model: nn.Module, name: str) -> nn.Module | None:
    """A module of a model without wrappers, or None; without a walk over all of them."""
    return part_named(model, name)

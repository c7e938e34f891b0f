"""Compare a model and the process before and after latedrop worked on it."""

import random
from collections import OrderedDict

import numpy as np
import torch
from torch import nn


def state(model: nn.Module) -> dict[str, object]:
    """Everything about a model, and about the world, that must not change."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_pre_hooks_with_kwargs")
    return {
        "tree": [(name, id(module), type(module)) for name, module in model.named_modules()],
        "parameters": [(name, id(p), p.requires_grad, p.grad) for name, p in model.named_parameters()],
        "training": [module.training for module in model.modules()],
        "hooks": [OrderedDict(getattr(module, hook)) for module in model.modules() for hook in hooks],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "values": {name: value.clone() for name, value in model.state_dict().items()},
        "torch": torch.random.get_rng_state(),
        "numpy": np.random.get_state()[1].tolist(),
        "python": random.getstate(),
        "fastpath": torch.backends.mha.get_fastpath_enabled(),
        "grad": torch.is_grad_enabled(),
    }


def assert_same(before: dict[str, object], after: dict[str, object]) -> None:
    for key, value in before.items():
        if key == "values":
            for name, tensor in value.items():
                assert torch.equal(tensor, after[key][name]), name
        elif key == "torch":
            assert torch.equal(value, after[key])
        else:
            assert value == after[key], key

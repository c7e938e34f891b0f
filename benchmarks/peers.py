"""Draws by other libraries, each used as its own documentation says.

A peer is a function `(case, draws) -> run`: it prepares what the library lets one prepare, and `run()` gives mean and
variance. All work on a copy of the twin, the network with an `nn.Dropout` in front of every site's layer.

- `loop`: what most people write. T passes with only the dropout layers in train mode, and two running sums.
- `torch_uncertainty_batch`: `mc_dropout(..., on_batch=True)`; the batch repeated T times, in one pass.
- `torch_uncertainty_loop`: `mc_dropout(..., on_batch=False)`; T passes, concatenated.
- `baal`: `patch_module`, then `ModelWrapper.predict_on_batch`; the batch repeated T times, in one pass.
- `baal_cached`: `MCCachingModule` too, and T passes, as baal recommends with it.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from functools import partial
from importlib import import_module
from importlib.metadata import distributions
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from latedrop import Site
from latedrop.errors import ArgumentError

Run = Callable[[], tuple[Tensor, Tensor]]


class Case(NamedTuple):
    model: nn.Module
    twin: nn.Module
    x: Tensor


def twin(model: nn.Module, sites: Sequence[Site], rate: float) -> nn.Module:
    """Return a copy in eval mode with an `nn.Dropout` in front of every site's layer, as other libraries need it."""
    copy = duplicate(model)
    for site in sites:
        if site.weight is not None or site.kind != "element":
            raise ArgumentError(f"expected layers with element masks; found {site.name!r}, a {site.kind} site.")
        parent, _, name = site.name.rpartition(".")
        holder = copy.get_submodule(parent)
        setattr(holder, name, nn.Sequential(nn.Dropout(rate), holder.get_submodule(name)))
    return copy.eval()


def duplicate(model: nn.Module) -> nn.Module:
    """Return a deep copy whose recurrent weights lie in one piece again, as cuDNN wants them."""
    copy = deepcopy(model)
    for module in copy.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return copy


def loop(case: Case, draws: int) -> Run:
    model = duplicate(case.twin).eval()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.train()

    def run() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            first = model(case.x)
            # Relative to the first draw, as sums of squares far from zero lose their digits.
            total, squares = torch.zeros_like(first), torch.zeros_like(first)
            for _ in range(draws - 1):
                change = model(case.x) - first
                total += change
                squares += change.square()
            return first + total / draws, (squares - total.square() / draws) / (draws - 1)

    return run


def torch_uncertainty(case: Case, draws: int, *, on_batch: bool) -> Run:
    model = imported("torch_uncertainty.methods").mc_dropout(
        duplicate(case.twin), num_estimators=draws, on_batch=on_batch, task="regression", probabilistic=False
    )
    model = model.eval()  # of the wrapper: it leaves the dropout layers on

    def run() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            outputs = model(case.x).unflatten(0, (draws, len(case.x)))
            return outputs.mean(0), outputs.var(0)

    return run


def baal(case: Case, draws: int, *, cached: bool = False) -> Run:
    patched = imported("baal.bayesian.dropout").patch_module(duplicate(case.twin), inplace=True)
    caches: list[Any] = []
    if cached:
        caching = imported("baal.bayesian.caching_utils")
        patched = caching.MCCachingModule(patched)
        caches = [module for module in patched.modules() if isinstance(module, caching.LRUCacheModule)]
    library = imported("baal.modelwrapper")
    options = library.TrainingArgs(use_cuda=case.x.is_cuda, replicate_in_memory=not cached)
    wrapper = library.ModelWrapper(patched, options)
    wrapper.eval()

    def run() -> tuple[Tensor, Tensor]:
        for cache in caches:  # a new batch never finds its first layers cached; repeating one batch would
            cache._memory_input = cache._memory_output = None
        outputs = wrapper.predict_on_batch(case.x, iterations=draws)
        return outputs.mean(-1), outputs.var(-1)

    return run


PEERS: dict[str, Callable[[Case, int], Run]] = {
    "loop": loop,
    "torch_uncertainty_batch": partial(torch_uncertainty, on_batch=True),
    "torch_uncertainty_loop": partial(torch_uncertainty, on_batch=False),
    "baal": baal,
    "baal_cached": partial(baal, cached=True),
}
LIBRARIES = {"torch_uncertainty": "torch-uncertainty", "baal": "baal"}  # the package of each module


def imported(name: str) -> Any:
    """Import a module of a peer; torchvision without its operators, which nothing here runs, where they do not load."""
    try:
        import_module("torchvision")
    except RuntimeError:  # it was built for another torch, such as that for CUDA
        for part in [part for part in sys.modules if part.partition(".")[0] == "torchvision"]:
            del sys.modules[part]
        for operator in ("nms", "qnms"):
            declared = f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(*declared)
    return import_module(name)


def not_installed(name: str) -> bool:
    return any(name.startswith(module) and find_spec(module) is None for module in LIBRARIES)


def versions_of(packages: Iterable[str]) -> dict[str, str | None]:
    """Return the version of every package; None where it is not installed."""
    installed = {each.metadata["Name"].lower().replace("_", "-"): each.version for each in distributions()}
    return {package: installed.get(package.lower()) for package in packages}

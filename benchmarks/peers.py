"""Draws by other libraries, each used as its own documentation says.

A peer is a function `(case, draws) -> run`: it prepares what the library lets one prepare, and `run()` gives mean and
variance. All work on a copy of the twin, the network with an `nn.Dropout` in front of every site's layer.

- `loop`: what most people write. T passes with only the dropout layers in train mode, and two running sums.
- `torch_uncertainty_batch`: `mc_dropout(..., on_batch=True)`; the batch repeated T times, in one pass.
- `torch_uncertainty_loop`: `mc_dropout(..., on_batch=False)`; T passes, concatenated.
- `baal`: `patch_module`, then `ModelWrapper.predict_on_batch`; the batch repeated T times, in one pass.
- `baal_cached`: `MCCachingModule` too, and T passes, as baal recommends with it.
- `lightning_uq_box`: `MCDropoutRegression.predict_step`; T passes, stacked. It puts the whole network in train mode:
  with BatchNorm another network is sampled, and its statistics drift from call to call.
- `probly`: `Sampler(...).predict`; T passes, stacked. It needs Python 3.12 or later.

Parts of these libraries that nothing here runs import packages that may be missing or may not load (torchvision beside
a CPU build of torch). While a peer is imported, empty modules stand in for those of `STAND_INS` that cannot be
imported, and only for those. No code that is measured touches them.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from benchmarks.nets import duplicate

Run: TypeAlias = Callable[[], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Case:
    """Hold the network, its twin and a batch, for every peer."""

    model: nn.Module
    twin: nn.Module
    x: Tensor


def loop(case: Case, draws: int) -> Run:
    model = _dropping(case.twin)

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


def torch_uncertainty_batch(case: Case, draws: int) -> Run:
    return _torch_uncertainty(case, draws, on_batch=True)


def torch_uncertainty_loop(case: Case, draws: int) -> Run:
    return _torch_uncertainty(case, draws, on_batch=False)


def baal(case: Case, draws: int) -> Run:
    patched = imported("baal.bayesian.dropout").patch_module(duplicate(case.twin), inplace=True)
    return _baal(patched, case, draws, replicate=True)


def baal_cached(case: Case, draws: int) -> Run:
    dropout, caching = imported("baal.bayesian.dropout"), imported("baal.bayesian.caching_utils")
    patched = caching.MCCachingModule(dropout.patch_module(duplicate(case.twin), inplace=True))
    run = _baal(patched, case, draws, replicate=False)
    caches = [module for module in patched.modules() if isinstance(module, caching.LRUCacheModule)]

    def cold() -> tuple[Tensor, Tensor]:
        for cache in caches:  # a new batch never finds its first layers cached; repeating one batch would
            cache._memory_input = cache._memory_output = None
        return run()

    return cold


def lightning_uq_box(case: Case, draws: int) -> Run:
    methods = imported("lightning_uq_box.uq_methods")
    module = methods.MCDropoutRegression(duplicate(case.twin), num_mc_samples=draws, loss_fn=nn.MSELoss())
    module = module.to(case.x.device).eval()

    def run() -> tuple[Tensor, Tensor]:
        answer = module.predict_step(case.x)
        return answer["pred"], answer["pred_uct"].square().reshape(answer["pred"].shape)

    return run


def probly(case: Case, draws: int) -> Run:
    sampler = imported("probly.representer.sampler").Sampler(duplicate(case.twin).eval(), num_samples=draws)

    def run() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            samples = sampler.predict(case.x)
            return samples.tensor.mean(samples.sample_dim), samples.tensor.var(samples.sample_dim)

    return run


_FUNCTIONS = (loop, torch_uncertainty_batch, torch_uncertainty_loop, baal, baal_cached, lightning_uq_box, probly)
PEERS: dict[str, Callable[[Case, int], Run]] = {function.__name__: function for function in _FUNCTIONS}
"""Every peer by its name."""

STAND_INS = (
    *("cv2", "ema_pytorch", "gpytorch", "h5py", "huggingface_hub", "kornia", "lifelines", "matplotlib", "mpl_toolkits"),
    *("mpltern", "omegaconf", "pandas", "PIL", "rich", "seaborn", "segmentation_models_pytorch", "timm", "torchseg"),
    *("torchvision", "uncertainty_toolbox", "vbll", "vector_quantize_pytorch"),
)
"""Packages that the peers import and that nothing measured here uses."""

_MODULES = {
    "torch_uncertainty": ("torch-uncertainty", "torch_uncertainty"),
    "baal": ("baal", "baal"),
    "lightning_uq_box": ("lightning-uq-box", "lightning_uq_box"),
    "probly": ("probly", "probly"),
}


def not_installed(name: str) -> bool:
    """Whether the library of a peer is missing; the loops need none."""
    modules = [module for prefix, (_, module) in _MODULES.items() if name.startswith(prefix)]
    return any(find_spec(module) is None for module in modules)


def versions_of(packages: Iterable[str]) -> dict[str, str | None]:
    """Return the version of every package; None where it is not installed."""
    versions: dict[str, str | None] = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return versions


def peer_versions() -> dict[str, str | None]:
    """Return the version of every library that is compared with."""
    return versions_of(package for package, _ in _MODULES.values())


def _dropping(twin: nn.Module) -> nn.Module:
    """A copy in eval mode but for its dropout layers."""
    model = duplicate(twin).eval()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.train()
    return model


def _torch_uncertainty(case: Case, draws: int, *, on_batch: bool) -> Run:
    methods = imported("torch_uncertainty.methods")
    model = methods.mc_dropout(
        duplicate(case.twin), num_estimators=draws, on_batch=on_batch, task="regression", probabilistic=False
    )
    model = model.eval()  # of the wrapper: it leaves the dropout layers on

    def run() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            outputs = model(case.x).unflatten(0, (draws, len(case.x)))
            return outputs.mean(0), outputs.var(0)

    return run


def _baal(patched: nn.Module, case: Case, draws: int, *, replicate: bool) -> Run:
    library = imported("baal.modelwrapper")
    arguments = library.TrainingArgs(use_cuda=case.x.is_cuda, replicate_in_memory=replicate)
    wrapper = library.ModelWrapper(patched, arguments)
    wrapper.eval()

    def run() -> tuple[Tensor, Tensor]:
        outputs = wrapper.predict_on_batch(case.x, iterations=draws)
        return outputs.mean(-1), outputs.var(-1)

    return run


def imported(name: str) -> Any:
    """A module of a peer, with stand-ins for what it wants and nobody here needs."""
    if name in sys.modules:
        return sys.modules[name]
    for real in ("torchmetrics", "lightning.pytorch"):  # they look for packages themselves: show what there is
        _imports(real)
    with _standing_in(STAND_INS), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module(name)


@contextmanager
def _standing_in(names: Sequence[str]) -> Iterator[None]:
    """Empty modules instead of those of `names` that cannot be imported, while the context lasts."""
    missing = {name for name in names if name not in sys.modules and not _imports(name)}
    finder = _Finder(missing)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _Empty)]:
            del sys.modules[name]


def _imports(name: str) -> bool:
    before = set(sys.modules)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import_module(name)
    except Exception:  # whatever a package that does not fit this torch raises
        for half in set(sys.modules) - before:
            if half.split(".")[0] == name:
                del sys.modules[half]
        return False
    return True


class _Blank(type):
    """A class in which every name is another empty class, as annotations read names of names."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Blank(name, (), {})

    def __getitem__(cls, key: Any) -> Any:
        return _Blank("item", (), {})

    def __setitem__(cls, key: Any, value: Any) -> None:
        """Settings, such as those of matplotlib, are read and written while probly is imported."""

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


class _Empty(ModuleType):
    """A module in which every name is an empty class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Blank(name, (), {})
        setattr(self, name, made)
        return made


class _Finder(MetaPathFinder, Loader):
    """Finds empty modules of some packages."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] in self.names else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass

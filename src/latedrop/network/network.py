"""A model with its private copy, and how the copy is run: quietly, and by any number of threads at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from threading import Lock, RLock
from typing import Any, TypeVar
from warnings import warn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from latedrop.errors import ArgumentError, LatedropWarning, SiteError
from latedrop.network.calling import Readout, call, read
from latedrop.network.functional import WeightCall, WeightCalls
from latedrop.network.layers import SOURCES
from latedrop.network.passes import CURRENT, Pass, around_layer
from latedrop.network.private_copy import Guard, private_copy
from latedrop.network.sites import Site, missing_sites
from latedrop.torch_private import version_of
from latedrop.wrappers import bare

__all__ = ["Network", "check_module"]

_Result = TypeVar("_Result")
_FUSED = (nn.TransformerEncoderLayer, nn.TransformerEncoder)
"""In eval mode these may call none of their layers, but one fused kernel."""
_NO_GRADIENT = ("does not require grad and does not have a grad_fn", "differentiated Tensors does not require grad")


class Network:
    """A model, and the private copy of it that runs in its place.

    Threads share the copy. They take turns only where the model writes attributes or buffers of its own in a pass; the
    first pass tells.

    A copy follows what is written into the weights of the model, as it shares them. Changes of the model's structure
    after the copy was made are not seen; `current` makes a new copy where tensors were moved or replaced.

    Args:
        model: the user's.
        gradients: whether a backward pass through the copy reaches the model's parameters.

    Attributes:
        model: the user's; it is read, never run and never changed.
        copy: in eval mode; layers that are sites look up the current pass.
        layers: the modules of the copy by name, without what wrappers add.
        derives: whether the model differentiates inside its `forward` (forces, physics-informed networks).
        random: whether it draws random numbers of its own; None as long as no pass has told.
        weight: its first floating parameter, which tells device and dtype.
        notes: what others remember of this network: it goes with it.
    """

    def __init__(self, model: nn.Module, *, gradients: bool = False) -> None:
        check_module(model)
        self.model = model
        self.copy = private_copy(model, gradients=gradients)
        self.layers = dict(self.copy.named_modules())
        self.derives = False
        self.random: bool | None = None
        self.notes: dict[Any, Any] = {}
        self.weight = next((p for p in self.copy.parameters() if p.is_floating_point()), torch.empty(0))
        self._marks = _marks(model)
        self._routed: set[str] = set()
        self._routing = Lock()
        self._writes: bool | None = None
        self._turn = RLock()
        for name, layer in self.layers.items():
            if isinstance(layer, _FUSED):
                self.route([name])

    @classmethod
    def of(cls, model: nn.Module | Network) -> Network:
        """Return a network as it is, or one of a model."""
        return model if isinstance(model, Network) else cls(model)

    def current(self) -> Network:
        """Return this network, or a new one where tensors of the model were moved or replaced."""
        return self if _marks(self.model) == self._marks else Network(self.model)

    def route(self, names: Iterable[str]) -> None:
        """Let calls of some layers of the copy go through the current pass; once is enough."""
        for name in names:
            if name not in self._routed:
                with self._routing:
                    if name not in self._routed and name in self.layers:
                        around_layer(name, self.layers[name])
                        self._routed.add(name)

    def begin(
        self, sites: Sequence[Site], thinner: Any, rows: int | None, copies: int = 1, *, shared: bool = True
    ) -> Pass:
        """Return a pass that thins these sites; without any it is a plain one."""
        if not sites:
            return Pass()
        if any(site.name not in self._routed for site in sites):
            missing = missing_sites(self.copy, sites)
            if missing:
                raise SiteError(
                    f"expected the model to have the sites' layers; {missing} are not among its modules. "
                    "Find the sites again with find_sites(model, inputs)."
                )
            self.route(site.name for site in sites if site.weight is None)
        return Thinning(sites, thinner, rows, copies, shared=shared)

    @contextmanager
    def passing(self, now: Pass) -> Iterator[None]:
        """Make `now` the current pass of whoever runs the copy inside."""
        token = CURRENT.set(now)
        try:
            with self._functional(now):
                yield
        finally:
            CURRENT.reset(token)

    def output(self, x: Any, now: Pass | None = None) -> Any:
        """Return the raw output of the copy on inputs that it may write into; by default nothing is thinned."""
        now = _PLAIN if now is None else now
        with self.passing(now):
            output = call(self.copy, x)
        self.warn_of_idle(now)
        return output

    def warn_of_idle(self, now: Pass) -> None:
        """Warn of sites that should have run in a pass that is over, once for each."""
        names = [name for name in now.idle() if name not in self.notes]
        if not names:
            return
        self.notes.update(dict.fromkeys(names, True))
        warn(
            f"the sites {names} did not run in this batch, though they did when the sites were found: nothing is "
            "dropped there. If the model was changed since, find the sites again.",
            LatedropWarning,
            stacklevel=2,
        )

    def read(self, x: Any, readout: Readout, rows: int, now: Pass | None = None) -> Tensor:
        """Return what a readout takes of the output, `(rows, ...)`."""
        return read(self.output(x, now), readout, rows)

    def quietly(self, run: Callable[[], _Result], *, gradients: bool = False) -> _Result:
        """Return `run()`, which runs the copy: without gradients, and with the global random numbers as they were.

        A model that differentiates by itself gets the gradients that it needs: what `run` does is then done again.
        """
        if torch.is_inference_mode_enabled() and self.derives:
            with torch.inference_mode(False):
                return self.quietly(run, gradients=gradients)
        if self._writes is False:
            return self._quietly(run, gradients)
        with self._turn:  # what a pass writes into the copy, the pass of another thread must not read
            before = _contents(self.copy) if self._writes is None else None
            result = self._quietly(run, gradients)
            if before is not None:
                self._writes = _contents(self.copy) != before
            return result

    def _quietly(self, run: Callable[[], _Result], gradients: bool) -> _Result:
        generators = self._generators() if self.random is not False else []
        before = [generator.get_state() for generator in generators]
        try:
            with torch.set_grad_enabled(gradients or self.derives):
                found = run()
            if self.random is None and self._rolled(generators, before):
                with torch.set_grad_enabled(gradients or self.derives), Guard(bare(self.model)) as guard:
                    found = run()  # another thread may have drawn them: what this one does is looked at
                self.random = guard.random
            self.random = bool(self.random)
        except RuntimeError as error:
            if self.derives or not any(words in str(error) for words in _NO_GRADIENT):
                raise
            self.derives = True
            try:
                return self.quietly(run, gradients=gradients)
            except RuntimeError:
                self.derives = False
                raise
        finally:
            failed = self.random is None  # before the first pass could tell
            if self.random or (failed and self._rolled(generators, before)):
                for generator, state in zip(generators, before, strict=True):
                    generator.set_state(state)
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Network:
        return Network(deepcopy(self.model, memo))

    def __reduce__(self) -> Any:
        return Network, (self.model,)

    def _rolled(self, generators: Sequence[torch.Generator], before: Sequence[Tensor]) -> bool:
        pairs = zip(generators, before, strict=True)
        return not all(torch.equal(generator.get_state(), state) for generator, state in pairs)

    def _generators(self) -> list[torch.Generator]:
        """Return the global generators that the model may draw from."""
        if not self.weight.is_cuda:
            return [torch.default_generator]
        return [torch.default_generator, torch.cuda.default_generators[self.weight.device.index]]

    def _functional(self, now: Pass) -> Any:
        """Return the mode that finds weights without a module, where a site is one."""
        sites = {name: site for name, site in now.sites.items() if site.weight is not None}
        if not sites:
            return nullcontext()

        def thin(met: WeightCall) -> dict[Any, Any]:
            if met.name not in sites:
                return {}
            thinned = now.thinned(sites[met.name], met.inputs.values(), met.channels)
            return {place: thinned[id(value)] for place, value in met.inputs.items()}

        calls = now.calls = WeightCalls(self.copy, thin)
        self.route(name for name, layer in self.layers.items() if isinstance(layer, SOURCES))
        return calls


class Thinning(Pass):
    """A pass that thins: no layer takes a fused path around its sites."""

    def run(self, name: str, layer: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `Pass`."""
        if isinstance(layer, _FUSED):
            with _Unfused():
                return forward(*args, **kwargs)
        if self.calls is not None and isinstance(layer, SOURCES):  # a site of its own: what it calls is none
            with self.calls.apart():
                return super().run(name, layer, forward, args, kwargs)
        return super().run(name, layer, forward, args, kwargs)


class _Unfused(TorchFunctionMode):
    """Changes nothing; but torch's fused layers look whether there is a mode, and take no fused path then."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


_PLAIN = Pass()


def check_module(model: Any) -> None:
    """Raise `ArgumentError` where something else than a module was given."""
    if not isinstance(model, nn.Module):
        inner = isinstance(vars(model).get("module_") if hasattr(model, "__dict__") else None, nn.Module)
        remedy = "Pass its module_, the network that the wrapper has trained" if inner else "Pass the model itself"
        raise ArgumentError(
            f"expected a torch.nn.Module; found {type(model).__name__}. {remedy}; an exported program becomes one with "
            "latedrop.load_program(program)."
        )


def _contents(model: nn.Module) -> list[Any]:
    """Return what tells that a pass has written something into a model: other attributes, other values of tensors."""
    return [
        (name, id(value), len(value) if isinstance(value, (list, dict, set)) else 0)
        for module in model.modules()
        for name, value in vars(module).items()
        if name != "forward"
    ] + [version_of(buffer) for buffer in model.buffers()]


def _marks(model: nn.Module) -> list[int]:
    """Return which tensors a model holds, and where their numbers lie."""
    found = []
    for tensor in (*model.parameters(), *model.buffers()):
        found += [id(tensor), tensor.data_ptr() if tensor.layout is torch.strided else 0]
    return found

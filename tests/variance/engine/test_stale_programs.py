"""Programs that no longer say what their model says are made anew or refused; tracing disturbs nobody."""

from __future__ import annotations

import argparse
import ctypes
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from types import MappingProxyType
from typing import Any
from weakref import ref

import numpy as np
import pandas
import pytest
import torch
from latedrop.variance.engine import compiled, replay, whole
from latedrop.variance.engine.kept import PROGRAMS
from latedrop.variance.engine.snapshots import snapshot
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from latedrop import LatedropWarning, Predictor, calibrate, find_sites, sample
from latedrop.errors import ArgumentError

pytestmark = pytest.mark.filterwarnings("ignore:the model's weights were changed after the calibration")
DRAWS = {"method": "sample", "rates": [0.2], "draws": 6}
BOTH = pytest.mark.parametrize("options", [{}, DRAWS], ids=["default", "draws"])
FACTOR = {"k": 1.0}


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs run as they are."""
    for room in (whole, compiled):
        monkeypatch.setattr(room, "Compiled", lambda graph: graph)
    yield
    PROGRAMS.clear()
    FACTOR["k"] = 1.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.d = nn.Linear(5, 8), nn.Linear(8, 1)
        self.prepare()

    def prepare(self) -> None:
        pass

    def middle(self, h: Tensor, x: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor, k: Any = 1.0) -> Tensor:
        found: Tensor = self.d((float(k) * self.middle(self.a(x), x)).tanh())
        return found


def rows(count: int = 4, seed: int = 3) -> Tensor:
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(seed))


def calibrated(model: nn.Module, x: Any = None, **options: Any) -> Predictor:
    x = rows(80, 1) if x is None else x
    noise = torch.randn(80, 1, generator=torch.Generator().manual_seed(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LatedropWarning)
        return calibrate(model, (x, noise), progress=False, **options)


def assert_alike(uq: Predictor, x: Any) -> None:
    """By a program as step by step."""
    uq.engine = "compiled"
    found = uq.predict(x)
    uq.engine = "auto"
    torch.testing.assert_close(found.mean, uq.predict(x).mean, rtol=1e-4, atol=1e-5)


class Setting:
    def __init__(self, k: float) -> None:
        self.k = k

    def read(self, output: Tensor) -> Tensor:
        return output * self.k


@pytest.mark.slow
@BOTH
def test_numpy_scalars_of_the_inputs(options: Any) -> None:
    uq = calibrated(Net(), {"x": rows(80, 1), "k": np.float64(1)}, **options)
    for k in range(1, 7):
        assert_alike(uq, {"x": rows(), "k": np.float64(k)})


class Held(Net):
    """Something of a test's own says how much."""

    def prepare(self) -> None:
        self.first, self.second, self.third = Setting(1.0), Setting(1.0), Setting(1.0)
        self.number, self.many = np.float64(1.0), [1.0] * 1001
        self.register_buffer("bank", torch.randn(10, 5, generator=torch.Generator().manual_seed(0)))
        self.register_buffer("slope", torch.tensor(0.1))

    def middle(self, h: Tensor, x: Tensor) -> Tensor:
        near = torch.cdist(x, self.bank).min(1, keepdim=True).values
        return (h * self.first.k * self.third.k * float(self.number) * self.many[0] + near) * self.gain()

    def gain(self) -> float:
        return 1.0


def third(model: Any) -> None:
    model.third.k = 5.0


def number(model: Any) -> None:
    model.number = None
    model.number = np.float64(5.0)


def long_list(model: Any) -> None:
    model.many[0] = 5.0


def shorter(model: Any) -> None:
    model.bank = model.bank[:2]


def hook(model: Any) -> None:
    FACTOR["k"] = 5.0


CHANGES = [third, number, long_list, shorter, hook]


@BOTH
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_are_seen(change: Any, options: Any) -> None:
    model = Held()
    model.a.register_forward_hook(lambda layer, given, output: output * FACTOR["k"])
    uq = calibrated(model, **options)
    assert_alike(uq, rows())
    change(model)
    assert_alike(uq, rows())


def test_every_object_counts() -> None:
    model: Any = Held()
    model.nested = {"p": Setting(1.0), "q": [Setting(2.0), Setting(3.0)]}
    for part in (model.first, model.second, model.third, model.nested["p"], *model.nested["q"]):
        before = snapshot(model)
        part.k += 1
        assert snapshot(model) != before
        assert snapshot(model) == snapshot(model)


def test_classes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(Net):
        factor = 1.0

        def middle(self, h: Tensor, x: Tensor) -> Tensor:
            return h * self.factor

    uq = calibrated(Own())
    assert_alike(uq, rows())
    monkeypatch.setattr(Own, "factor", 5.0)
    assert_alike(uq, rows())
    monkeypatch.setattr(Own, "middle", lambda self, h, x: h * 9)
    assert_alike(uq, rows())


@BOTH
def test_the_object_of_a_readout_counts(options: Any) -> None:
    reading = Setting(1.0)
    uq = calibrated(Net(), readout=reading.read, **options)
    assert_alike(uq, rows())
    reading.k = 5.0
    assert_alike(uq, rows())


def test_numbers_that_torch_takes_out_of_buffers() -> None:
    class Slope(Held):
        def middle(self, h: Tensor, x: Tensor) -> Tensor:
            return nn.functional.leaky_relu(h, self.slope)

    uq = calibrated(Slope(), **DRAWS)
    assert_alike(uq, rows())
    uq.model.slope.fill_(3.0)
    assert_alike(uq, rows())
    uq.model.slope.data.fill_(0.5)
    assert_alike(uq, rows())


class AsParameter(Net):
    def middle(self, h: Tensor, x: Tensor) -> Tensor:
        return h + nn.Parameter(x)[:, :1]


class Applied(Net):
    def middle(self, h: Tensor, x: Tensor) -> Tensor:
        return h + x.detach().clone().apply_(lambda value: 2 * value)[:, :1]


class Noisy(Net):
    def middle(self, h: Tensor, x: Tensor) -> Tensor:
        return h + np.random.default_rng().normal()


class Mapped(Net):
    def middle(self, h: Tensor, x: Tensor) -> Tensor:
        return h + torch.vmap(lambda row: (row > 0).float().cumsum(0))(h)


class Copied(Net):
    def middle(self, h: Tensor, x: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return h + 2 * (torch.tensor(x)[:, :1] > 0)


@BOTH
@pytest.mark.parametrize("kind", [AsParameter, Applied, Noisy, Mapped, Copied], ids=lambda kind: kind.__name__)
@pytest.mark.filterwarnings("ignore::latedrop.LatedropWarning")
def test_what_no_program_can_say_is_refused(kind: Any, options: Any) -> None:
    uq = calibrated(kind(), **options)
    if kind is Mapped and not options:  # in which nothing stands for others
        return assert_alike(uq, rows())
    uq.engine = "compiled"
    with pytest.raises(ArgumentError, match="expected a model that can be traced"):
        uq.predict(rows())
    return None


def test_few_rows_are_not_enough_to_tell() -> None:
    """The first rows agree by chance; those between do not."""
    uq, x = calibrated(Copied(), **DRAWS), -rows(300).abs()
    x[2:] = x[2:].abs()
    assert uq.predict(x).mean[5:9].allclose(uq.predict(x[5:9]).mean, atol=1e-5)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 64), nn.Linear(64, 1)
        body = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
        self.body = body.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.body(self.first(x).bfloat16()).float())
        return found


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("kind", ["mixed", "far off"])
def test_rounding_is_no_reason_to_refuse(kind: str, count: int) -> None:
    model: nn.Module = Mixed() if kind == "mixed" else Net().double()
    x = rows(count)
    if isinstance(model, Net):
        model.d.bias.data += 1e10
        x = x.double()
    found, expected = (sample(model, x, 0.1, 20, engine=engine) for engine in ("compiled", "auto"))
    torch.testing.assert_close(found.mean, expected.mean, rtol=0.01, atol=0.01)


@lru_cache(None)
def ones(count: int) -> Tensor:
    return torch.ones(count, 1)


def test_what_a_model_keeps_elsewhere_is_no_part_of_a_trace() -> None:
    class Keeping(Net):
        def middle(self, h: Tensor, x: Tensor) -> Tensor:
            return h * ones(len(x))

    uq = calibrated(Keeping(), **DRAWS)
    uq.engine = "compiled"
    uq.predict(rows(4))
    kept = ones(24)  # six draws of four rows
    assert kept.tolist() == [[1.0]] * 24
    assert kept.numpy().sum() == 24


@contextmanager
def meanwhile(work: Callable[[], Any]) -> Iterator[list[Exception]]:
    """Another thread does it again and again; what it raised."""
    done, failed = threading.Event(), list[Exception]()

    def run() -> None:
        while not done.is_set():
            try:
                work()
            except Exception as error:
                failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield failed
    finally:
        done.set()
        thread.join()


@pytest.mark.slow
def test_compiled_models_of_other_threads_run_meanwhile() -> None:
    other, x = torch.compile(Net().eval(), backend="eager"), rows()

    def serve() -> None:
        with torch.no_grad():
            other(x)

    serve()
    with meanwhile(serve) as failed:
        for count in range(1, 5):
            assert_alike(calibrated(Net()), rows(count))
    assert failed == []


@pytest.mark.slow
def test_tracing_is_done_in_turns(tmp_path: Any) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    before = nn.Module.__call__
    one, two = calibrated(Net()), calibrated(Net())
    one.engine = "compiled"
    with meanwhile(lambda: two.to_onnx(tmp_path / "two.onnx", rows())) as failed:
        for count in range(1, 7):
            one.predict(rows(count))
    assert failed == []
    assert nn.Module.__call__ is before


def test_a_machine_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(graph: Any, examples: Any) -> Any:
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(whole, "Compiled", replay.Compiled)
    monkeypatch.setattr(replay, "compiled", none)
    uq = calibrated(Net())
    uq.engine = "compiled"
    with pytest.raises(ArgumentError, match=r"expected a C\+\+ compiler for engine='compiled'"):
        uq.predict(rows())


def test_a_few_draws_are_enough_to_check_a_program() -> None:
    passes = []

    class Counted(Net):
        def middle(self, h: Tensor, x: Tensor) -> Tensor:
            passes.append(len(h))
            return h

    counts = []
    for draws in (20, 50):
        model, x = Counted(), rows()
        passes.clear()
        found = sample(model, x, 0.2, draws, chunk=1, engine="compiled")
        counts.append(len(passes))
        torch.testing.assert_close(found.variance, sample(model, x, 0.2, draws).variance, rtol=1e-4, atol=1e-7)
    assert counts[0] == counts[1]


class Bag(dict):  # type: ignore[type-arg]
    """A dict with attributes."""


def held(kind: str) -> tuple[Any, Callable[[Any], Any], Callable[[Any], None]]:
    """Something that holds 1, how to read it, and what makes it 3."""
    if kind == "dict with attributes":
        bag = Bag()
        bag.k = 1.0  # type: ignore[attr-defined]
        return bag, lambda o: o.k, lambda o: setattr(o, "k", 3.0)
    if kind == "view of a dict":
        inner = {"k": 1.0}
        return MappingProxyType(inner), lambda o: o["k"], lambda o: inner.update(k=3.0)
    if kind == "array of objects":
        return np.array([1.0, "x"], dtype=object), lambda o: o[0], lambda o: o.__setitem__(0, 3.0)
    if kind == "series":
        return pandas.Series({"k": 1.0}), lambda o: o["k"], lambda o: o.__setitem__("k", 3.0)
    if kind == "weak reference":
        kept = KEPT.setdefault("kept", Bag())
        kept.k = 1.0
        return ref(kept), lambda o: o().k, lambda o: setattr(o(), "k", 3.0)
    return ctypes.c_float(1.0), lambda o: o.value, lambda o: setattr(o, "value", 3.0)


KEPT: dict[str, Any] = {}
KINDS = ("dict with attributes", "view of a dict", "array of objects", "series", "weak reference", "number of C")


@pytest.mark.parametrize("kind", KINDS)
def test_what_odd_containers_hold_is_looked_at(kind: str) -> None:
    own, get, change = held(kind)

    class Scaled(Net):
        def prepare(self) -> None:
            self.own = own

        def forward(self, x: Tensor, k: Any = 1.0) -> Tensor:
            return super().forward(x) * float(get(self.own))

    model, x = Scaled(), rows()
    before = sample(model, x, 0.2, 6, engine="compiled").mean
    change(model.own)
    torch.testing.assert_close(sample(model, x, 0.2, 6, engine="compiled").mean, 3 * before)


@BOTH
def test_inputs_with_a_sign_that_torch_has_not_written_yet(options: dict[str, Any]) -> None:
    model, x = Net(), rows(40)
    uq = calibrate(model, (x, torch.randn(40, 1)), progress=False, **options)
    compiled_uq = Predictor(model, uq.calibration, engine="compiled")
    turned = torch.fft.fft(torch.randn(4, 8), dim=1)[:, :5].conj().imag
    assert turned.is_neg()
    expected = uq.predict(turned.resolve_neg())
    torch.testing.assert_close(compiled_uq.predict(turned).mean, expected.mean)
    torch.testing.assert_close(compiled_uq.predict(turned).std, expected.std, rtol=1e-4, atol=1e-6)


class Small(Net):
    """Two percent more in a program."""

    def middle(self, h: Tensor, x: Tensor) -> Tensor:
        return h * (1.02 if torch.compiler.is_compiling() else 1.0)


class Counted(Net):
    """The number of rows in which something is so, as torch's own code takes it out of a tensor."""

    def middle(self, h: Tensor, x: Tensor) -> Tensor:
        return h * len(torch.tensor_split(x, (x[:, 0] > 0).sum().view(1))[0])


@pytest.mark.filterwarnings("ignore:expected examples that do not depend on each other")
@pytest.mark.parametrize("kind", [Small, Counted])
def test_small_differences_are_refused(kind: type[Net]) -> None:
    with pytest.raises(ArgumentError, match="other numbers in the program than step by step"):
        sample(kind(), rows(9), 0.2, 12, engine="compiled")


def test_outputs_far_from_zero_are_not() -> None:
    class Far(Net):
        def forward(self, x: Tensor, k: Any = 1.0) -> Tensor:
            return super().forward(x) + 1e5

    model, x = Far(), rows(9)
    found, expected = (sample(model, x, 0.2, 30, engine=engine) for engine in ("compiled", "auto"))
    torch.testing.assert_close(found.mean, expected.mean)


def test_what_a_program_fails_on_is_said_as_ever() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.last = nn.Embedding(20, 6), nn.Linear(6, 1)

        def forward(self, ids: Tensor) -> Tensor:
            found: Tensor = self.last(self.words(ids).mean(1))
            return found

    model, ids = Words(), torch.arange(8).reshape(2, 4)
    sites = find_sites(model, ids)
    sample(model, ids, 0.2, 6, sites=sites, engine="compiled")
    with pytest.raises(IndexError, match="index out of range in self"):
        sample(model, ids + 30, 0.2, 6, sites=sites, engine="compiled")


class Owner:
    def __init__(self, own: Any) -> None:
        self.own = own


ODD: dict[str, Callable[[], Any]] = {
    "frame": lambda: pandas.DataFrame({"a": range(2000), "b": ["s"] * 2000}),
    "small frame": lambda: pandas.DataFrame({"a": range(20), "b": ["s"] * 20}),
    "objects": lambda: np.array([["a", "b"]] * 1500, object),
    "lists": lambda: np.array([[], *([1] for _ in range(1500))], object),
    "owners": lambda: Owner(Owner(Owner(Owner(Owner(0))))),
    "loader": lambda: DataLoader(TensorDataset(torch.zeros(4, 2))),
    "pool": lambda: ThreadPoolExecutor(1),
    "parser": argparse.ArgumentParser,
    "function": lambda: lambda: ODD,
    "itself": lambda: KEPT.setdefault("itself", KEPT),
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_attributes_are_the_same_the_next_time(kind: str) -> None:
    model: Any = Net()
    model.attribute = ODD[kind]()
    assert snapshot(model) == snapshot(model)
    assert hash(snapshot(model)) == hash(snapshot(model))


@pytest.mark.parametrize("kind", ["offset in halves", "tiny"])
def test_what_rounding_does_is_not_refused(kind: str) -> None:
    class Rounded(Net):
        def forward(self, x: Tensor, k: Any = 1.0) -> Tensor:
            found = super().forward(x)
            return found + 10 if kind == "offset in halves" else found * 1e-20

    model, x = Rounded(), rows(9)
    if kind == "offset in halves":
        model, x = model.bfloat16(), x.bfloat16()
    sample(model, x, 0.1, 20, engine="compiled")


def test_a_dict_that_holds_itself() -> None:
    model: Any = Net()
    model.own = {"k": 1.0}
    model.own["own"] = model.own
    found = sample(model, rows(), 0.2, 6, engine="compiled")
    torch.testing.assert_close(found.mean, sample(model, rows(), 0.2, 6).mean)

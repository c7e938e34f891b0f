"""Nobody else notices: other threads and tasks that use a model, or latedrop, get the same as alone.

Two ways of looking. An `Onlooker` is a second thread that looks during every pass of a watched model, while the first
thread waits inside that pass: no race decides what it sees, so a switch that holds for all threads is seen every time.
`together` starts eight threads at one barrier, for races.
"""

from __future__ import annotations

import asyncio
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier, BrokenBarrierError, get_ident
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from latedrop import Prediction, Predictor, calibrate, find_sites, inject
from latedrop.errors import DataError
from latedrop.torch_private import reroute_calls
from networks import Net, Raw, mlp
from quick import quick
from rounding import assert_same_up_to_rounding, rounding
from zoo import ZOO, Case

pytestmark = pytest.mark.filterwarnings("ignore::latedrop.errors.LatedropWarning")

Result = TypeVar("Result")
Work = Callable[[nn.Module, Tensor, Tensor], Prediction]

THREADS = 8
TURNS = 2
RATE = 0.2
DRAWS = 4
PATIENCE = 60
"""Seconds after which a thread that waits for another one gives up: a deadlock fails instead of hanging."""


def watched(net: Net, x: Tensor) -> Tensor:
    """Let an onlooker look before and after each pass of a model."""
    _let_look()
    output: Tensor = net.inner(x)
    _let_look()
    return output


_ONLOOKERS: list[Callable[[], None]] = []


def _let_look() -> None:
    for look in _ONLOOKERS:
        look()


class Onlooker:
    """One thread of its own that looks whenever a watched model runs in another; `seen` has all it saw."""

    def __init__(self, look: Callable[[], Any]) -> None:
        self.look = look
        self.seen: list[Any] = []

    def __enter__(self) -> Onlooker:
        self._pool = ThreadPoolExecutor(1)
        self._thread = self._pool.submit(get_ident).result(PATIENCE)
        _ONLOOKERS.append(self._notice)
        return self

    def __exit__(self, *_: object) -> None:
        _ONLOOKERS.remove(self._notice)
        self._pool.shutdown()

    def now(self) -> Any:
        """Return what the thread sees now."""
        return self._pool.submit(self.look).result(PATIENCE)

    def _notice(self) -> None:
        if get_ident() != self._thread:
            self.seen.append(self.now())


def together(works: Sequence[Callable[[], Result]]) -> list[Result]:
    """Results of all, each in a thread of its own, started at once; what one of them raises is raised here."""
    start = Barrier(len(works))

    def begin(work: Callable[[], Result]) -> Result:
        start.wait(PATIENCE)
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        futures = [pool.submit(begin, work) for work in works]
        errors = [error for future in futures if (error := future.exception(PATIENCE)) is not None]
        for error in sorted(
            errors, key=lambda error: isinstance(error, BrokenBarrierError)
        ):  # a cause before its effects
            raise error
        return [future.result() for future in futures]


@pytest.fixture(autouse=True)
def _impatient_threads() -> Iterator[None]:
    """Threads change places every few operations, so that races happen; what one test leaves off, the next has on."""
    before = sys.getswitchinterval(), torch.backends.mha.get_fastpath_enabled(), torch.backends.cudnn.enabled
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before[0])
    torch.backends.mha.set_fastpath_enabled(before[1])
    torch.backends.cudnn.enabled = before[2]


def method(name: str, engine: str = "auto") -> Work:
    """Calibrate and predict."""
    return lambda model, x, y: predictor(model, x, y, name, engine).predict(x)


def predictor(model: nn.Module, x: Tensor, y: Tensor, name: str, engine: str = "auto") -> Predictor:
    return quick([0.1, RATE], DRAWS)(model, (x, y), method=name, engine=engine)


WORKS = {name: method(name) for name in ("sample", "linear", "propagate")} | {"loop": method("sample", "loop")}
CASES = {
    case.name: case for case in ZOO if case.name in ("mlp", "batchnorm_cnn", "residual_cnn", "lstm", "transformer")
}
CASES["raw"] = Case("raw", partial(Raw, 1), lambda: torch.randn(6, 5), ("w2", "w3"))
NO_RULE = ("lstm", "transformer")
"""Where `propagate` refuses a layer."""
ROLLS_DICE = ("batchnorm_cnn", "residual_cnn", "transformer")
"""Where a pass in train mode rolls dice or moves statistics, so that it is not to be repeated."""
BY_WORK = [(name, work) for name in CASES for work in WORKS if work != "propagate" or name not in NO_RULE]


def made(name: str, *, watch: bool = False, train: bool = False) -> tuple[nn.Module, Tensor, Tensor]:
    """A model, 24 rows of inputs and targets."""
    case = CASES[name]
    model, _ = case.make()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        x = torch.cat([case.inputs() for _ in range(4)])
        y = model(x)
        y = y + torch.randn(y.shape)
    model.train(train)
    next(model.parameters()).requires_grad_(False)
    return (Net(watched, inner=model).train(train) if watch else model), x, y


def plain(model: nn.Module, x: Tensor) -> Tensor:
    """As a user would call it who asks for no gradients, which lets attention take its fused path."""
    with torch.no_grad():
        return model(x)


def alike(actual: Tensor, expected: Tensor) -> bool:
    """Up to rounding, since a thread may compute on more or fewer cores than another; masks that differ do far more."""
    size = float(expected.detach().double().abs().mean())
    return torch.allclose(actual.double(), expected.double(), rtol=rounding(), atol=rounding() * size)


def same(actual: Prediction, expected: Prediction) -> bool:
    return alike(actual.mean, expected.mean) and alike(actual.variance, expected.variance)


def state_of(model: nn.Module) -> dict[str, list[Any]]:
    """All of a model that another thread may come across."""
    modules = list(model.modules())
    hooks = [key for key in vars(modules[0]) if key.endswith("_hooks")]
    tensors = [*model.parameters(), *model.buffers()]
    return {
        "training": [module.training for module in modules],
        "requires_grad": [tensor.requires_grad for tensor in tensors],
        "values": [(id(tensor), tensor._version) for tensor in tensors],
        "hooks": [[(key, list(vars(module)[key])) for key in hooks] for module in modules],
        "attributes": [list(vars(module)) for module in modules],
        "tree": [(id(module), type(module)) for module in modules],
    }


def switches() -> dict[str, Any]:
    """All that holds for every thread of the process; layers' `forward` and global hooks too."""
    layers = (nn.Linear, nn.Conv2d, nn.BatchNorm2d, nn.LSTM, nn.MultiheadAttention, nn.TransformerEncoderLayer)
    return {
        "attention fast path": torch.backends.mha.get_fastpath_enabled(),
        "cudnn": torch.backends.cudnn.enabled,
        "cudnn benchmark": torch.backends.cudnn.benchmark,
        "cudnn tf32": torch.backends.cudnn.allow_tf32,
        "matmul tf32": torch.backends.cuda.matmul.allow_tf32,
        "matmul precision": torch.get_float32_matmul_precision(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "forward": [layer.forward for layer in layers] + [F.linear, F.conv2d, F.scaled_dot_product_attention],
        "hooks": [list(value) for key, value in vars(torch_module).items() if re.match("_global_.*_hooks$", key)],
        "warnings": list(warnings.filters),
        "torch generator": torch.random.get_rng_state().tolist(),
        "numpy generator": np.random.get_state()[1].tolist(),
        "python generator": random.getstate(),
    }


def changed(before: dict[str, Any], seen: Sequence[dict[str, Any]]) -> set[str]:
    """Which entries were not always as before."""
    return {key for state in seen for key, value in state.items() if value != before[key]}


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(("name", "work"), BY_WORK)
def test_another_thread_sees_and_calls_the_plain_model(name: str, work: str, train: bool) -> None:
    model, x, y = made(name, watch=True, train=train)
    calls = not (train and name in ROLLS_DICE)

    def look() -> tuple[dict[str, Any], list[Tensor]]:
        state = state_of(model) | switches()  # before the calls, which move statistics
        return state, [plain(model, x), model(x)] if calls else []

    with Onlooker(look) as onlooker:
        before, outputs = onlooker.now()
        WORKS[work](model, x, y)
    assert onlooker.seen
    others = {"warnings"}  # filters that libraries add when they are first imported
    assert changed(before, [state for state, _ in onlooker.seen]) - others == set()
    for _, answers in onlooker.seen:
        assert all(map(alike, answers, outputs))
        assert [output.requires_grad for output in answers] == [False, True][: len(answers)]


@pytest.mark.parametrize("name", CASES)
def test_threads_that_share_a_predictor_get_the_serial_answer(name: str) -> None:
    model, x, y = made(name)
    ways = [("sample", "auto"), ("sample", "loop"), ("linear", "auto")]
    ways += [("propagate", "auto")] if name not in NO_RULE else []
    predictors = [predictor(model, x, y, *way) for way in ways]
    serial = [each.predict(x) for each in predictors]

    def work(thread: int) -> list[tuple[str, str]]:
        order = [(thread + turn) % len(ways) for turn in range(TURNS * len(ways))]
        return [ways[i] for i in order if not same(predictors[i].predict(x), serial[i])]

    wrong = together([lambda thread=thread: work(thread) for thread in range(THREADS)])
    assert wrong == [[]] * THREADS


@pytest.mark.parametrize("method", ["sample", "linear"])
@pytest.mark.parametrize("name", CASES)
def test_threads_that_calibrate_at_once_find_the_serial_calibration(name: str, method: str) -> None:
    model, x, y = made(name)
    serial = predictor(model, x, y, method).calibration.to_json()
    records = together([lambda: predictor(model, x, y, method).calibration.to_json()] * THREADS)
    assert records == [serial] * THREADS


def test_a_thread_that_fails_disturbs_no_other() -> None:
    model, x, y = made("mlp")
    before = state_of(model)
    uq = predictor(model, x, y, "linear")
    serial = uq.predict(x)

    def fail() -> bool:
        with pytest.raises(DataError, match="expected inputs that the model takes"):
            uq.predict(x[:, :3])
        return True

    def work() -> bool:
        return same(uq.predict(x), serial)

    assert together([lambda: all(fail() for _ in range(16)), lambda: all(work() for _ in range(16))] * 4) == [True] * 8
    assert changed(before, [state_of(model)]) == set()


@pytest.mark.parametrize("work", WORKS)
def test_a_thread_that_rolls_the_global_dice_is_not_rewound(work: str) -> None:
    model, x, y = made("mlp", watch=True)
    alone = WORKS[work](model, x, y)

    def roll() -> tuple[float, float, float]:
        return float(torch.rand(())), float(np.random.rand()), random.random()

    def seeded() -> None:
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)

    states = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            seeded()
            with Onlooker(roll) as onlooker:
                prediction = WORKS[work](model, x, y)
            seen = [*onlooker.seen, roll()]
            seeded()
            assert seen == [roll() for _ in seen]
    finally:
        np.random.set_state(states[0])
        random.setstate(states[1])
    # Somebody else's numbers do not make ours others; only how draws run may have changed, and with it the rounding.
    assert_same_up_to_rounding(prediction.mean, alone.mean)
    assert_same_up_to_rounding(prediction.variance, alone.variance)


def thinned(model: nn.Module, x: Tensor, seed: int, count: int = 3) -> list[Tensor]:
    """The first draws of a seed, with nobody else there."""
    with inject(model, find_sites(model, x), RATE, seed):
        return [plain(model, x) for _ in range(count)]


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", CASES)
def test_injected_dropout_is_for_its_own_thread(name: str, train: bool) -> None:
    model, x, _ = made(name, train=train)
    sites = find_sites(model, x)
    expected = thinned(model, x, 0)
    repeats = not (train and name in ROLLS_DICE)

    def look() -> tuple[list[bool], Tensor | None]:
        return [module.training for module in model.modules()], plain(model, x) if repeats else None

    with Onlooker(look) as onlooker:
        flags, output = onlooker.now()
        with inject(model, sites, RATE):
            for draw in expected:
                seen = onlooker.now()
                assert alike(plain(model, x), draw)
                assert seen[0] == flags
                assert output is None or alike(seen[1], output)
    assert onlooker.look()[0] == flags


def test_threads_that_inject_at_once_draw_their_own_masks() -> None:
    model, x, _ = made("batchnorm_cnn")
    sites = find_sites(model, x)
    expected = [thinned(model, x, seed) for seed in range(THREADS)]
    inside = Barrier(THREADS)

    def work(seed: int) -> bool:
        try:
            with inject(model, sites, RATE, seed):
                inside.wait(PATIENCE)
                outputs = [plain(model, x) for _ in range(3)]
                inside.wait(PATIENCE)
        except BaseException:
            inside.abort()
            raise
        return all(map(alike, outputs, expected[seed]))

    before = plain(model, x)
    assert together([lambda seed=seed: work(seed) for seed in range(THREADS)]) == [True] * THREADS
    assert alike(plain(model, x), before)


@pytest.mark.parametrize("name", CASES)
def test_tasks_may_leave_in_the_order_in_which_they_came(name: str) -> None:
    """A enters, B enters, A leaves, B leaves: as no stack would have it."""
    model, x, _ = made(name, train=name not in ROLLS_DICE)
    sites = find_sites(model, x)
    before, output = state_of(model), plain(model, x)
    expected = [thinned(model, x, seed) for seed in (0, 1)]

    async def run() -> list[list[Tensor]]:
        entered, second_entered, left = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def first() -> list[Tensor]:
            with inject(model, sites, RATE, 0):
                outputs = [plain(model, x)]
                entered.set()
                await second_entered.wait()
                outputs += [plain(model, x), plain(model, x)]
            outputs.append(plain(model, x))
            left.set()
            return outputs

        async def second() -> list[Tensor]:
            await entered.wait()
            with inject(model, sites, RATE, 1):
                outputs = [plain(model, x)]
                second_entered.set()
                await left.wait()
                outputs += [plain(model, x), plain(model, x)]
            return [*outputs, plain(model, x)]

        return await asyncio.gather(first(), second())

    outputs = asyncio.run(asyncio.wait_for(run(), PATIENCE))
    for mine, draws in zip(outputs, expected, strict=True):
        assert all(map(alike, mine, [*draws, output]))
    assert changed(before, [state_of(model)]) == set()


def test_nested_injections_are_left_one_by_one_and_stay_in_their_thread() -> None:
    model, x, _ = made("mlp")
    sites, output = find_sites(model, x), plain(model, x)
    with Onlooker(lambda: plain(model, x)) as onlooker:
        with inject(model, sites, RATE, draw=0):
            outer = plain(model, x)
            others = [onlooker.now()]
            with inject(model, sites, RATE, draw=1):
                inner = plain(model, x)
                others.append(onlooker.now())
            again = plain(model, x)
            others.append(onlooker.now())
        after = plain(model, x)
    assert alike(outer, again)
    assert alike(after, output)
    assert not alike(outer, output)
    assert not alike(inner, output)
    assert not alike(inner, outer)
    assert all(alike(other, output) for other in others)


@pytest.mark.parametrize("when", [1, 2, 3, 4])
def test_an_interrupt_while_calls_are_rerouted_leaves_nothing(when: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody presses Ctrl-C before one of the modules, or after it."""
    model, x = mlp(5, 8, 1), torch.randn(3, 5)
    sites, own = find_sites(model, x), [set(vars(module)) for module in model.modules()]
    for after in (False, True):
        left = when

        def interrupted(module: nn.Module, route: Any, after: bool = after) -> None:
            nonlocal left
            left -= 1
            if left > 0 or after:
                reroute_calls(module, route)
            if left == 0:
                raise KeyboardInterrupt

        monkeypatch.setattr("latedrop.dropout.inject.reroute_calls", interrupted)
        with pytest.raises(KeyboardInterrupt), inject(model, sites, 0.2):
            raise AssertionError("the body was reached")
        assert [set(vars(module)) for module in model.modules()] == own


def remembers(net: Net, x: Tensor) -> Tensor:
    """Keep a value in an attribute, and read it later in the same pass."""
    net.skip = net.a(x)
    return net.c(net.b(net.skip.relu()).relu() + net.skip)


def test_threads_take_turns_where_a_model_writes_into_itself() -> None:
    model, x = Net(remembers, a=nn.Linear(5, 64), b=nn.Linear(64, 64), c=nn.Linear(64, 1)), torch.randn(64, 5)
    uq = calibrate(model, (x, x[:, :1]), progress=False)
    batches = [x[i : i + 8] for i in range(0, 64, 8)]
    serial = [uq.predict(batch) for batch in batches]

    def work(thread: int) -> bool:
        return all(same(uq.predict(batches[thread]), serial[thread]) for _ in range(20))

    assert together([lambda thread=thread: work(thread) for thread in range(THREADS)]) == [True] * THREADS


def asks(net: Net, x: Tensor) -> Tensor:
    """Wait for another thread that predicts with another model."""
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(net.other.predict, x).result(PATIENCE).mean
    return net.b(net.a(x).relu()) + other.reshape(len(x), 1)


def test_a_prediction_within_a_prediction_by_another_thread() -> None:
    x, y = torch.randn(40, 5), torch.randn(40, 1)
    inner = calibrate(mlp(5, 8, 1), (x, y), progress=False)
    uq = calibrate(Net(asks, a=nn.Linear(5, 8), b=nn.Linear(8, 1), other=inner), (x, y), progress=False)
    assert_same_up_to_rounding(uq.predict(x).mean, uq.model(x).detach())

"""A whole prediction as one program gives what it gives step by step; here mostly without the compiler itself."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from latedrop.variance.engine import compiled, whole
from latedrop.variance.engine.kept import PROGRAMS
from torch import Tensor, nn

from latedrop import ClassPredictor, LatedropWarning, Prediction, Predictor, calibrate, find_sites
from latedrop.calibration.fitted_terms import FittedTerms
from latedrop.data.rows import map_rows, row_count
from latedrop.dropout.sampling import plain_output
from latedrop.errors import ArgumentError, DataError, OutputError
from latedrop.terms import Dropout, InputNoise, LocalErrors, Neighbours, Rows, Size, Term
from zoo import ZOO, Case


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs run as they are."""
    monkeypatch.setattr(whole, "Compiled", lambda graph: graph)
    yield
    PROGRAMS.clear()


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def rows(count: int = 80, seed: int = 1) -> Tensor:
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(seed))


def calibrated(model: nn.Module, **options: Any) -> Predictor:
    x = rows()
    noise = torch.randn(80, 1, generator=torch.Generator().manual_seed(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LatedropWarning)
        return calibrate(model, (x, x[:, :1] + (0.1 + x[:, 1:2].abs()) * noise), progress=False, **options)


def both(uq: Predictor, x: Any) -> tuple[Prediction, Prediction]:
    """By a program, and step by step."""
    program = Predictor(uq.model, uq.calibration, uq.readout, batch_size=uq.batch_size, engine="compiled")
    return program.predict(x), Predictor(uq.model, uq.calibration, uq.readout, batch_size=uq.batch_size).predict(x)


def other_rows(x: Any) -> Any:
    """Others of the same shape."""
    return map_rows(x, lambda t: t.flip(0) * 0.7 if t.is_floating_point() else t.flip(0))


def assert_same(found: Prediction, expected: Prediction) -> None:
    torch.testing.assert_close(found.output, expected.output)
    torch.testing.assert_close(found.raw_variance, expected.raw_variance, rtol=1e-4, atol=1e-9)
    assert (found.strangeness is None) == (expected.strangeness is None)
    if found.strangeness is not None:
        torch.testing.assert_close(found.strangeness, expected.strangeness)
    assert (found.shares is None) == (expected.shares is None)
    for name, share in (found.shares or {}).items():
        assert expected.shares is not None
        torch.testing.assert_close(share, expected.shares[name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("method", ["terms", pytest.param("linear", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", ZOO, ids=lambda case: case.name)
def test_it_equals_the_steps(case: Case, method: Any, uncompiled: None) -> None:
    model, x = case.make()
    own = plain_output(model, x, case.readout)
    if own[0].numel() > 64:
        pytest.skip("first order of so many outputs is not for tests")
    noise = torch.linspace(-1, 1, row_count(x)).reshape(-1, *[1] * (own.dim() - 1)) * (own.std() + 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LatedropWarning)
        uq = calibrate(model, (x, own + noise), readout=case.readout, method=method, progress=False)
        if method == "terms":
            uq = Predictor(model, replace(uq.calibration, terms=in_use(uq)), case.readout)
        assert_same(*both(uq, x))
        assert_same(*both(uq, other_rows(x)))


def in_use(uq: Predictor) -> FittedTerms:
    """Dropout and leverage with coefficients, whatever they are worth here."""
    terms = uq.calibration.terms
    assert terms is not None
    names = tuple(name for name in terms.columns if name.startswith("dropout") or name == "leverage")
    count = len(terms.coefficients)
    return replace(terms, columns=names, coefficients=tuple((0.1,) * len(names) for _ in range(count)))


@pytest.mark.parametrize("batch_size", [3, 256])
def test_all_batches_are_run(batch_size: int, uncompiled: None) -> None:
    uq = calibrated(mlp())
    uq.batch_size = batch_size
    found, expected = both(uq, rows(7, 5))
    assert_same(found, expected)
    assert len(PROGRAMS[uq.model]) == (2 if batch_size == 3 else 1)


def test_a_program_serves_all_inputs_of_its_shape_and_weights_written_in_place(uncompiled: None) -> None:
    uq = calibrated(mlp())
    uq.engine = "compiled"
    for seed in range(3):
        assert_same(*both(uq, rows(4, seed)))
    with torch.no_grad():
        uq.model[2].weight.mul_(1.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LatedropWarning)  # the weights were changed
        assert_same(*both(uq, rows(4, 9)))
        assert len(PROGRAMS[uq.model]) == 1
        uq.model[3] = nn.ReLU()
        assert_same(*both(uq, rows(4, 9)))
    assert len(PROGRAMS[uq.model]) == 2


def test_another_calibration_is_another_program(uncompiled: None) -> None:
    model = mlp()
    first, second = calibrated(model), calibrated(model, method="linear")
    x = rows(4, 3)
    for uq in (first, second, first):
        assert_same(*both(uq, x))
    assert len(PROGRAMS[model]) == 2


class Far(Term):
    """Of one's own, with a number that can be changed."""

    name = "far"

    def __init__(self, times: float = 1.0) -> None:
        self.times = times

    def values(self, rows: Rows) -> Tensor:
        return self.times * rows.x.square().sum(1)


class Below(Term):
    name = "below"

    def values(self, rows: Rows) -> Tensor:
        return rows.x[:, 0] + 10


@pytest.mark.parametrize(
    "term",
    [Size(), Dropout("draws", draws=5), Far(), "leverage"],
    ids=lambda t: getattr(t, "name", t),
)
def test_terms(term: Any, uncompiled: None) -> None:
    uq = calibrated(mlp(), terms=["dropout", term] if not isinstance(term, Dropout) else [term])
    terms = uq.calibration.terms
    assert terms is not None
    used = replace(terms, coefficients=tuple((0.1,) * len(terms.columns) for _ in terms.coefficients))
    uq = Predictor(uq.model, replace(uq.calibration, terms=used))
    assert_same(*both(uq, rows(6, 4)))
    assert_same(*both(uq, 2 * rows(6, 5)))


@pytest.mark.parametrize("term", [Neighbours(), LocalErrors()], ids=["neighbours", "local_errors"])
def test_terms_that_look_for_other_rows_are_refused(term: Term, uncompiled: None) -> None:
    uq = calibrated(mlp(), terms=[term])
    terms = uq.calibration.terms
    assert terms is not None
    used = replace(terms, columns=(term.name,), coefficients=((0.1,),))
    uq = Predictor(uq.model, replace(uq.calibration, terms=used), engine="compiled")
    with pytest.raises(ArgumentError, match=f"nearest of other rows .*{term.name}"):
        uq.predict(rows(6))


def test_noise_of_the_inputs(uncompiled: None) -> None:
    uq = calibrated(mlp(), terms=[InputNoise(0.1)])
    assert_same(*both(uq, rows(6, 4)))


def test_a_term_of_ones_own_that_changes_is_another_program(uncompiled: None) -> None:
    term = Far()
    uq = calibrated(mlp(), terms=[term])
    terms = uq.calibration.terms
    assert terms is not None
    used = replace(terms, columns=("far",), coefficients=((0.1,),))
    uq = Predictor(uq.model, replace(uq.calibration, terms=used))
    assert_same(*both(uq, rows(4, 4)))
    term.times = 3.0
    assert_same(*both(uq, rows(4, 4)))


def test_what_a_check_finds_is_said(uncompiled: None) -> None:
    uq = calibrated(mlp())
    uq.engine = "compiled"
    good = uq.predict(rows(4)).std
    bad = rows(4)
    bad[1, 2] = torch.nan
    with pytest.raises(DataError, match="expected finite inputs; found 1 NaN or inf among 20"):
        uq.predict(bad)
    assert torch.equal(uq.predict(rows(4)).std, good)
    below = calibrated(mlp(), terms=[Below()])
    terms = below.calibration.terms
    assert terms is not None
    used = replace(terms, columns=("below",), coefficients=((0.1,),))
    below = Predictor(below.model, replace(below.calibration, terms=used), engine="compiled")
    below.predict(rows(4))
    with pytest.raises(DataError, match="'below' to be finite and not below 0"):
        below.predict(rows(4) - 100)


def test_rows_beyond_numbers(uncompiled: None) -> None:
    uq = calibrated(mlp())
    x = rows(6)
    x[2] = 3e38
    with pytest.warns(LatedropWarning, match="nothing is known of 1 of 6 rows"):
        found, expected = both(uq, x)
    assert_same(found, expected)
    assert all(len(key[0]) == 1 and key[0][0][0][0] == 6 for key in PROGRAMS[uq.model])  # none of single rows


def test_a_broken_output_is_said(uncompiled: None) -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x) + x[:, :1].exp().log()

    uq = calibrated(Root())
    uq.engine = "compiled"
    uq.predict(rows(4))
    with pytest.raises(OutputError, match="found NaN or inf in 4 of 4 rows"):
        uq.predict(rows(4) + 200)


@pytest.mark.parametrize("kind", ["values", "state", "list"])
def test_what_cannot_be_a_program_is_refused(kind: str, uncompiled: None) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 8)
            self.last = nn.Linear(8, 1)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            if kind == "values" and h.sum() > 0:
                h = h * 1.0
            if kind == "state":
                self.calls += 1
            return self.last(h.relu())

    uq = calibrated(Odd())
    uq.engine = "compiled"
    x: Any = rows(4)
    if kind == "list":
        uq.collate, x = torch.stack, list(x)
    with pytest.raises(ArgumentError, match="engine"):
        uq.predict(x)
    uq.engine = "auto"
    assert uq.predict(x).std.shape == (4, 1)


def test_neither_the_model_nor_the_calibration_is_held(uncompiled: None) -> None:
    uq = calibrated(mlp())
    uq.engine = "compiled"
    uq.predict(rows(4))
    record, model = weakref.ref(uq.calibration), weakref.ref(uq.model)
    kept = uq.model
    del uq
    gc.collect()
    assert record() is None
    (program,) = PROGRAMS[kept].values()
    assert not program.holds()
    del kept, program
    gc.collect()
    assert model() is None


def test_threads_take_turns(uncompiled: None) -> None:
    uq = calibrated(mlp())
    uq.engine = "compiled"
    batches = [rows(4, seed) for seed in range(24)]
    expected = [uq.predict(x) for x in batches]
    with ThreadPoolExecutor(8) as pool:
        for found, one in zip(pool.map(uq.predict, batches), expected, strict=True):
            assert torch.equal(found.std, one.std)


def test_a_readout_and_maps(uncompiled: None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1))
    x = torch.randn(30, 1, 6, 6)

    def count(maps: Tensor) -> Tensor:
        return maps.sum((1, 2, 3))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LatedropWarning)
        uq = calibrate(model, (x, plain_output(model, x, count) + torch.randn(30)), readout=count, progress=False)
        spread = calibrate(
            model,
            (x, plain_output(model, x) + torch.randn(30, 1, 6, 6)),
            method="propagate",
            rates=[0.1],
            progress=False,
        )
    assert_same(*both(uq, x[:5]))
    assert_same(*both(spread, x[:5]))


def classifier(hidden: int = 20) -> tuple[ClassPredictor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, 4)).eval()
    x = torch.randn(200, 8)
    y = (1.5 * model(x) + torch.randn(200, 4)).argmax(1)
    return calibrate(model, (x, y), task="classification", progress=False), x


@pytest.mark.parametrize("hidden", [20, 300])
@pytest.mark.parametrize("dropout", [False, True])
def test_classes(hidden: int, dropout: bool, uncompiled: None) -> None:
    uq, x = classifier(hidden)
    if dropout:
        fit = replace(uq.calibration.fit, odds=(0.1,) * len(uq.calibration.sites))
        uq = ClassPredictor(uq.model, replace(uq.calibration, fit=fit))
    expected = uq.predict(x[:7])
    uq.engine = "compiled"
    found = uq.predict(x[:7])
    for name, value in vars(expected).items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(getattr(found, name), value)
    assert (found.mutual_information is not None) == dropout
    assert len(PROGRAMS[uq.model]) == 1
    bad = x[:7].clone()
    bad[3] = torch.nan
    with pytest.raises(DataError, match="expected finite inputs"):
        uq.predict(bad)


def test_classes_whose_outputs_became_probabilities(uncompiled: None) -> None:
    uq, x = classifier()
    uq.engine, uq.readout = "compiled", lambda logits: logits.softmax(1)
    for engine in ("auto", "compiled"):
        uq.engine = engine  # type: ignore[assignment]
        with pytest.raises(OutputError, match="expected logits"):
            uq.predict(x[:7])


def test_classes_take_one_pass() -> None:
    uq, x = classifier()
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    with uq.model[0].register_forward_hook(count):
        uq.predict(x[:7])
    assert passes == 1


def test_sites_that_are_given_are_enough() -> None:
    model = mlp()
    sites = find_sites(model, rows(3))
    run = whole.Whole(model, rows(3), sites, None, lambda x: [model(x) * 2], compiler=lambda graph: graph)
    found = run(rows(3, 7))
    assert found is not None
    torch.testing.assert_close(found[0], model(rows(3, 7)).detach() * 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_with_the_compiler() -> None:
    uq = calibrated(mlp())
    try:
        assert_same(*both(uq, rows(4, 3)))
    except ArgumentError as error:
        if "compile" not in str(error):
            raise
        pytest.skip(f"there is no C++ compiler: {error}")
    PROGRAMS.clear()


class Net(nn.Module):
    """Of which the tests below change something that is not a weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.prepare()

    def prepare(self) -> None:
        pass

    def middle(self, h: Tensor, x: Tensor) -> Tensor:
        return self.b(h)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.middle(self.a(x), x).tanh())


class Alias(Net):
    def prepare(self) -> None:
        self.e = self.b

    def middle(self, h: Tensor, x: Tensor) -> Tensor:
        return self.e(self.c(self.b(h)).tanh())

    def change(self) -> None:
        self.e = self.c


class Names(Net):
    def prepare(self) -> None:
        self.layers = nn.ModuleDict({"p": nn.Linear(8, 8), "q": nn.Linear(8, 8)})

    def middle(self, h: Tensor, x: Tensor) -> Tensor:
        return self.layers["q"](self.layers["p"](h).tanh())

    def change(self) -> None:
        p, q = self.layers.pop("p"), self.layers.pop("q")
        self.layers["q"], self.layers["p"] = p, q


class Weights(Net):
    def prepare(self) -> None:
        self.p, self.q = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

    def middle(self, h: Tensor, x: Tensor) -> Tensor:
        return h * self.p + self.q

    def change(self) -> None:
        p, q = self.p, self.q
        del self.p, self.q
        self.q, self.p = p, q


class Three(Net):
    def middle(self, h: Tensor, x: Tensor) -> Tensor:
        return 3 * self.b(h)


class Class(Net):
    def change(self) -> None:
        self.__class__ = Three  # type: ignore[assignment]


class Flag(Net):
    def prepare(self) -> None:
        self.k: Any = True

    def middle(self, h: Tensor, x: Tensor) -> Tensor:
        return h * (2 if self.k is True else 5)

    def change(self) -> None:
        self.k = 1


class Slots:
    __slots__ = ("k",)

    def __init__(self) -> None:
        self.k = 1.0


class Slotted(Net):
    def prepare(self) -> None:
        self.held = Slots()

    def middle(self, h: Tensor, x: Tensor) -> Tensor:
        return h * self.held.k

    def change(self) -> None:
        self.held.k = 3.0


class Partial(Net):
    def prepare(self) -> None:
        self.f = partial(nn.functional.leaky_relu, negative_slope=0.1)

    def middle(self, h: Tensor, x: Tensor) -> Tensor:
        return self.f(h)

    def change(self) -> None:
        self.f.keywords["negative_slope"] = 0.9


class Queue(Net):
    def prepare(self) -> None:
        self.k = deque([1.0, 2.0])

    def middle(self, h: Tensor, x: Tensor) -> Tensor:
        return h * self.k[0]

    def change(self) -> None:
        self.k.rotate(1)


class Closure(Net):
    def prepare(self) -> None:
        times = 1.0

        def f(h: Tensor) -> Tensor:
            return h * times

        def change() -> None:
            nonlocal times
            times = 4.0

        self.f, self.change = f, change

    def middle(self, h: Tensor, x: Tensor) -> Tensor:
        return self.f(h)


@pytest.mark.parametrize(
    "kind", [Alias, Names, Weights, Class, Flag, Slotted, Partial, Queue, Closure], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize("draws", [False, True], ids=["default", "draws"])
@pytest.mark.filterwarnings("ignore::latedrop.LatedropWarning")
def test_changes_of_the_model_are_seen(
    kind: Any, draws: bool, uncompiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "Compiled", lambda graph: graph)
    options: Any = {"method": "sample", "rates": [0.2], "draws": 6} if draws else {}
    uq, x = calibrated(kind(), **options), rows(4, 3)
    assert_same(*both(uq, x))
    uq.model.change()
    assert_same(*both(uq, x))


class Pair(Net):
    def forward(self, x: Tensor, z: Tensor) -> Tensor:  # type: ignore[override]
        return self.d((self.a(x) + self.b(self.a(z).tanh())).tanh())


def test_one_tensor_for_two_inputs(uncompiled: None) -> None:
    model, x, z = Pair(), rows(80, 1), rows(80, 2)
    y = plain_output(model, (x, z)) + 0.3 * torch.randn(80, 1)
    uq = calibrate(model, ((x, z), y), progress=False)
    one, two = rows(6, 5), rows(6, 6)
    assert_same(*both(uq, (one, one)))
    assert_same(*both(uq, (one, two)))


def test_an_input_that_the_model_holds(uncompiled: None) -> None:
    one = rows(6, 5)

    class Held(Net):
        def prepare(self) -> None:
            self.register_buffer("points", one)

        def middle(self, h: Tensor, x: Tensor) -> Tensor:
            return h + torch.cdist(x, self.points)[:, :1]

    uq = calibrated(Held())
    assert_same(*both(uq, one))
    assert_same(*both(uq, 3 * rows(6, 7)))


class ByNumpy(Net):
    def middle(self, h: Tensor, x: Tensor) -> Tensor:
        return h * torch.from_numpy(np.abs(x.detach().numpy()).mean(1, keepdims=True))


class ByList(Net):
    def middle(self, h: Tensor, x: Tensor) -> Tensor:
        return self.b(h) * max(max(x.tolist()))


class BufferByList(Net):
    def prepare(self) -> None:
        self.register_buffer("k", torch.tensor([1.0, 2.0]))

    def middle(self, h: Tensor, x: Tensor) -> Tensor:
        return h * (self.k * 2).tolist()[0]


@pytest.mark.parametrize("kind", [ByNumpy, ByList, BufferByList], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("draws", [False, True], ids=["default", "draws"])
@pytest.mark.filterwarnings("ignore::latedrop.LatedropWarning")
def test_values_that_are_taken_out_are_refused(
    kind: Any, draws: bool, uncompiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "Compiled", lambda graph: graph)
    options: Any = {"method": "sample", "rates": [0.2], "draws": 6} if draws else {}
    uq = calibrated(kind(), **options)
    uq.engine = "compiled"
    with pytest.raises(ArgumentError, match="expected a model that can be traced"):
        uq.predict(rows(4, 3))


@pytest.mark.parametrize("change", ["slope", "layer", "data", "closure"])
def test_what_a_term_of_ones_own_holds_is_seen(change: str, uncompiled: None) -> None:
    times = {"by": 1.0}

    class Own(Term):
        name = "own"

        def __init__(self) -> None:
            torch.manual_seed(3)
            self.net: Any = nn.Sequential(nn.Linear(5, 1), nn.LeakyReLU(0.1))

        def values(self, rows: Rows) -> Tensor:
            return times["by"] * self.net(rows.x)[:, 0].square().detach()

    term = Own()
    uq = calibrated(mlp(), terms=[term])
    terms = uq.calibration.terms
    assert terms is not None
    used = replace(terms, columns=("own",), coefficients=((0.1,),))
    uq = Predictor(uq.model, replace(uq.calibration, terms=used))
    assert_same(*both(uq, rows(4, 4)))
    if change == "slope":
        term.net[1].negative_slope = 0.9
    elif change == "layer":
        term.net[1] = nn.Tanh()
    elif change == "data":
        term.net[0].bias.data = torch.ones(1)
    else:
        times["by"] = 5.0
    assert_same(*both(uq, rows(4, 4)))


@dataclass
class Reads:
    """Not hashable, and with a number that can be changed."""

    times: float = 1.0

    def __call__(self, output: Tensor) -> Tensor:
        return output * self.times


def test_a_readout_that_holds_something(uncompiled: None) -> None:
    readout = Reads()
    uq = calibrated(mlp(), readout=readout)
    assert_same(*both(uq, rows(4, 4)))
    readout.times = 3.0
    assert_same(*both(uq, rows(4, 4)))


@pytest.mark.parametrize("method", ["terms", "linear", "propagate"])
def test_autocast(method: Any, uncompiled: None) -> None:
    uq = calibrated(mlp(), method=method)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = both(uq, rows(4, 4))
    assert found.mean.dtype == expected.mean.dtype
    torch.testing.assert_close(found.mean, expected.mean)
    torch.testing.assert_close(found.std, expected.std, rtol=1e-3, atol=1e-6)


def test_what_fails_in_a_program_is_said_as_ever(uncompiled: None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 1))
    x = torch.randint(0, 20, (80, 3))
    uq = calibrate(model, (x, torch.randn(80)), progress=False)
    uq.engine = "compiled"
    uq.predict(x[:4])
    with pytest.raises(DataError, match="IndexError: index out of range"):
        uq.predict(x[:4] + 50)

"""Input that cannot work is refused or warned of; the message says what was expected, what was found, what to do."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import latedrop
import networks
from latedrop import Batches, Predictor, Sampling, Terms, calibrate, find_sites, inject, load, sample
from latedrop.errors import ArgumentError, DataError, FileError, LatedropError, LatedropWarning, OutputError, SiteError
from networks import Net
from quick import quick
from rounding import assert_same_up_to_rounding

quietly = quick((0.1, 0.2), 10)


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build()


def mlp(outputs: int = 1, hidden: int = 20, seed: int = 0) -> nn.Module:
    return networks.mlp(3, hidden, outputs, seed=seed)


def maps_to_maps() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Conv2d(1, 9, 3, padding=1), nn.Tanh(), nn.Conv2d(9, 1, 3, padding=1)))


X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


def three_layers(run: Callable[..., Any]) -> nn.Module:
    layers = {"first": (3, 20), "second": (20, 20), "third": (20, 1)}
    return seeded(lambda: Net(run, **{name: nn.Linear(*sizes) for name, sizes in layers.items()}))


def branching() -> nn.Module:
    """Take the second layer for small batches only."""

    def run(net: Net, x: Tensor) -> Tensor:
        h = net.first(x).tanh()
        return net.third(net.second(h).tanh() if len(x) < 10 else h)

    return three_layers(run)


def halved() -> nn.Module:
    """Give exactly 0, with a variance of 0, where the first input is negative."""
    return three_layers(lambda net, x: net.third(net.first(x).tanh()) * (x[:, :1] > 0))


def broken() -> nn.Module:
    """Give NaN where the first input is large."""
    return three_layers(lambda net, x: torch.where(x[:, :1] > 1, torch.nan, net.third(net.first(x).tanh())))


def forgiving() -> nn.Module:
    """Give a finite output whatever the input is."""
    return three_layers(lambda net, x: net.third(net.first(x.nan_to_num(0.0, 0.0, 0.0)).tanh()))


def fussy() -> nn.Module:
    """Raise an error of its own where its input is not finite."""

    def run(net: Net, x: Tensor) -> Tensor:
        if not x.isfinite().all():
            raise ZeroDivisionError("not finite")
        return net.third(net.first(x).tanh())

    return three_layers(run)


def test_every_error_is_ours() -> None:
    for error in (ArgumentError, DataError, FileError, OutputError, SiteError):
        assert issubclass(error, LatedropError)
    assert issubclass(ArgumentError, ValueError)
    assert issubclass(LatedropWarning, UserWarning)


class TestSites:
    @pytest.mark.parametrize(
        ("sites", "match"),
        [
            ("encoder.*", r"expected 'encoder\.\*' to match at least one site; found none\. Sites: \['2'\].*\['0'\]"),
            ([nn.Conv2d, lambda name, module: False], "to match at least one site; found none"),
            ("0", r"expected '0'.*first layers, which are never sites: \['0'\]"),
            (find_sites(branching(), X, select="third"), r"\['third'\] are not among its modules.*find_sites\(model"),
        ],
        ids=["name", "type and predicate", "first layer", "another model"],
    )
    def test_no_site_matches(self, sites: Any, match: str) -> None:
        with pytest.raises(SiteError, match=match):
            quietly(mlp(), (X, Y), sites=sites)

    @pytest.mark.parametrize("rest", [(), (nn.ReLU(),), (nn.Flatten(), nn.Softplus())])
    def test_a_model_of_one_layer(self, rest: tuple[nn.Module, ...]) -> None:
        layer = seeded(lambda: nn.Linear(3, 1))
        model = nn.Sequential(layer, *rest) if rest else layer
        with pytest.raises(SiteError, match=r"found only first layers.*A model of one layer has no hidden units"):
            quietly(model, (X, Y))

    @pytest.mark.parametrize("model", [nn.Identity(), nn.ReLU()])
    def test_a_model_of_no_layer(self, model: nn.Module) -> None:
        with pytest.raises(SiteError, match="expected at least one weight layer with another one upstream"):
            quietly(model, (X, X))

    @pytest.mark.filterwarnings("ignore:the sites .* did not run in this batch")
    def test_a_site_that_another_branch_passes_by(self) -> None:
        for sites in (None, "third"):
            with pytest.warns(LatedropWarning, match="changes with the rows beside it"):
                quietly(branching(), (X, Y), sites=sites)


class TestOutputs:
    @pytest.mark.parametrize("readout", [lambda out: out.round(decimals=-3), lambda out: out * 0 - 3.3])
    def test_a_readout_that_does_not_vary(self, readout: Any) -> None:
        with pytest.raises(OutputError, match=r"expected an output that varies under dropout.*does not round"):
            quietly(mlp(), (X, Y), readout=readout)

    def test_a_rate_so_small_that_no_draw_drops_anything(self) -> None:
        with pytest.raises(OutputError, match="expected an output that varies under dropout"):
            quietly(mlp(), (X, Y), method=Sampling(rates=(1e-9,)))

    def test_a_rate_at_which_no_draw_drops_anything_is_left_out(self) -> None:
        method = Sampling(rates=(0.001, 0.1), draws=30, seed=6)
        with pytest.warns(LatedropWarning, match="all 40 at 1 rates, which are left out"):
            calibration = quietly(mlp(hidden=50), (X, Y), method=method).calibration
        assert [row.rate for row in calibration.table] == [0.1]

    def test_rows_that_no_draw_touches(self) -> None:
        untouched = int((X[:, 0] <= 0).sum())
        match = rf"of 40 validation values, some have zero.*: {untouched} at rate 0\.1; {untouched} at rate 0\.2"
        with pytest.warns(LatedropWarning, match=match):
            uq = quietly(halved(), (X, Y))
        for row in uq.calibration.table:
            assert row.zero_variances == untouched
            numbers = [value for value in vars(row).values() if isinstance(value, float)]
            assert all(map(math.isfinite, (*numbers, *row.scale, *row.relaxed_scale)))
        assert float(uq.predict(X).std.min()) > 0
        assert json.loads(uq.calibration.to_json(), parse_constant=pytest.fail)

    def test_one_output_of_several_that_does_not_vary(self) -> None:
        def readout(out: Tensor) -> Tensor:
            return torch.cat([out, 0 * out], 1)

        with pytest.raises(OutputError, match=r"output 1|outputs \[1\]"):
            quietly(mlp(), (X, torch.cat([Y, Y], 1)), readout=readout)

    @pytest.mark.parametrize("mean", ["draws", "model"])
    def test_nan_in_the_output(self, mean: str) -> None:
        rows = int((X[:, 0] > 1).sum())
        with pytest.raises(OutputError, match=rf"expected a finite output; found NaN or inf in {rows} of 40 rows"):
            quietly(broken(), (X, Y), method=Sampling(mean=mean))
        with pytest.raises(OutputError, match="expected a finite output"):
            sample(broken(), X, 0.1)

    def test_nan_in_the_output_of_a_prediction(self) -> None:
        predictor = quietly(broken(), (-X.abs(), Y))
        with pytest.raises(OutputError, match="expected a finite output; found NaN or inf in 1 of 1 rows"):
            predictor.predict(torch.full((1, 3), 5.0))

    def test_readouts_that_give_nothing_of_use(self) -> None:
        cases: list[tuple[Any, str]] = [
            ("logits", r"a part 'logits'; found Tensor of shape \(40, 1\)"),
            (3, "expected an output with a part 3"),
            (lambda out: out.long(), r"expected the readout to give a floating tensor; found torch\.int64"),
            (lambda out: None, "expected the readout to give a floating tensor; found NoneType"),
            (lambda out: out.sum(), r"first axis counts the 40 examples; found shape \(\)"),
            (lambda out: out.T, r"first axis counts the 40 examples; found shape \(1, 40\)"),
        ]
        for readout, match in cases:
            with pytest.raises(OutputError, match=match):
                quietly(mlp(), (X, Y), readout=readout)

    def test_an_output_of_several_parts_needs_a_readout(self) -> None:
        def run(net: Net, x: Tensor) -> dict[str, Tensor]:
            out = net.third(net.first(x).tanh())
            return {"mean": out, "aux": out}

        for readout, match in (
            (None, r"expected one floating tensor.*found 2 in dict.*'mean', 'aux'.*readout="),
            ("y", r"a part 'y'; found dict with parts \['mean', 'aux'\]"),
        ):
            with pytest.raises(OutputError, match=match):
                quietly(three_layers(run), (X, Y), readout=readout)


class TestData:
    @pytest.mark.filterwarnings("ignore:none of 40 rows reached the parameters")  # of a layer that never runs
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("make", [mlp, forgiving, fussy])
    def test_inputs_that_are_not_finite_whatever_the_model_does(self, make: Any, value: float) -> None:
        model, bad = make(), X.clone()
        bad[3, 1] = value
        sites = find_sites(model, X)
        predictor = quietly(model, (X, Y), method=Sampling(mean="model"), batches=Batches(7))
        for run in (
            lambda: quietly(model, (bad, Y)),
            lambda: predictor.predict(bad),
            lambda: predictor.predict(bad.numpy()),
            lambda: sample(model, bad, 0.0, 5, sites=sites),
            lambda: sample(model, (bad,), 0.1, 5, sites=sites, chunk=1),
        ):
            with pytest.raises(DataError, match="expected finite inputs; found 1 NaN or inf among 120"):
                run()

    @pytest.mark.parametrize(
        ("outputs", "readout", "shape"),
        [(1, lambda out: out[:, 0], (40, 1)), (1, None, (40, 2)), (2, None, (40, 3)), (1, None, (40, 1, 1))],
    )
    def test_targets_of_another_shape(self, outputs: int, readout: Any, shape: tuple[int, ...]) -> None:
        pattern = r"\(" + ", ".join(map(str, shape)) + r",?\)"
        with pytest.raises(DataError, match=rf"expected target of the mean's shape .*, found {pattern}; nothing is"):
            quietly(mlp(outputs), (X, torch.ones(shape)), readout=readout)

    @pytest.mark.parametrize("rows", [0, 1])
    @pytest.mark.parametrize("method", ["terms", "sample", "linear", "propagate"])
    def test_too_few_rows(self, rows: int, method: str) -> None:
        with pytest.raises(DataError, match=f"expected at least 2 validation rows.*found {rows}"):
            quietly(mlp(), (X[:rows], Y[:rows]), method=method)

    def test_an_empty_batch_among_others(self) -> None:
        assert quietly(mlp(), [(X, Y), (X[:0], Y[:0]), (X, Y)]).calibration.rows == 80

    def test_inputs_that_the_model_does_not_take(self) -> None:
        for x in (torch.ones(40, 4), (X, X)):
            with pytest.raises(DataError, match="expected the model to run on the example inputs; it raised"):
                quietly(mlp(), (x, Y))

    @pytest.mark.parametrize("x", [X.bfloat16(), torch.ones(40, 4), (X, X)], ids=["dtype", "width", "two inputs"])
    def test_inputs_to_predict_that_the_model_does_not_take(self, x: Any) -> None:
        with pytest.raises(LatedropError):
            quietly(mlp(), (X, Y)).predict(x)

    def test_double_tensors_are_cast_as_arrays_are(self) -> None:
        predictor = quietly(mlp(), (X.double(), Y.double()))
        for x in (X.double(), X.double().numpy()):
            assert_same_up_to_rounding(predictor.predict(x).mean, predictor.predict(X).mean)
        for huge in (X.double() + 1e39, X.double().numpy() + 1e39):
            with pytest.raises(DataError, match=r"expected inputs that fit torch\.float32"):
                predictor.predict(huge)

    def test_a_tuple_as_one_argument(self) -> None:
        model = Net(lambda net, pair: net.inner(pair[0]) + net.inner(pair[1]), inner=mlp())
        several: list[dict[str, Any]] = [{}, {"method": Sampling(draws=10, rates=[0.1])}, {"method": "linear"}]
        for options in several:
            uq = calibrate(model, (((X, X),), Y), progress=False, **options)
            assert uq.predict(((X, X),)).mean.shape == Y.shape

    def test_nothing_to_predict(self) -> None:
        predictor = quietly(mlp(), (X, Y))
        with pytest.raises(DataError, match="expected at least one row to predict; found none"):
            predictor.predict(X[:0])
        for x in (None, "text", [[1.0, 2.0, 3.0]]):
            with pytest.raises(DataError, match="expected inputs with at least one tensor whose first axis counts"):
                predictor.predict(x)

    @pytest.mark.filterwarnings("ignore:the draws of this model run one by one")
    def test_one_image_without_its_first_axis(self) -> None:
        x = torch.randn(12, 1, 6, 6, generator=torch.Generator().manual_seed(0))
        predictor = quietly(maps_to_maps(), (x, 3 * x))
        with pytest.raises(DataError, match=r"found shape \(1, 6, 6\), which looks like a single row. Pass x\[None\]"):
            predictor.predict(x[0])

    def test_inputs_of_another_dtype_than_the_weights(self) -> None:
        model, match = mlp().half(), r"expected inputs of torch\.float16.*found torch\.float32.*x\.to\(torch\.float16\)"
        with pytest.raises(DataError, match=match):
            quietly(model, (X, Y))
        with pytest.raises(DataError, match=match):
            sample(model, X, 0.1)
        with pytest.raises(DataError, match=match):
            quietly(model, (X.half(), Y)).predict(X)

    def test_batches_of_three_to_predict(self) -> None:
        with pytest.raises(LatedropError, match="unpack"):
            list(quietly(mlp(), (X, Y)).predict_batches(DataLoader(TensorDataset(X, Y, Y))))


class TestArguments:
    RATES = (1.0, 1.5, -0.1, 0, math.nan, math.inf, True, False, "0.1", [], [0.1, 1.0], [0.1, True], [[0.1]], [None])
    ONE_RATE = (1, 1.5, -0.1, math.nan, True, "0.1", None, [0.1])
    MAPPINGS = ({}, {"2": 0}, {"2": 1.0}, {"2": True}, {"2": None})
    DRAWS = (1, 0, -5, 2.5, True, "10")
    CHUNKS = (0, -1, "a", True, 1.5)
    IN_UNIT = r"expected a rate in \[0, 1\); found"
    INSIDE = r"expected (rates inside|at least one rate|a sequence of rates)"
    TWO_DRAWS = "expected at least 2 draws, as one has no variance; found"
    CHUNK = "expected chunk to be a whole number of at least 1 or None; found .*. See help"

    @pytest.mark.parametrize(
        ("use", "match", "values"),
        [
            (lambda rates: Sampling(rates=rates), INSIDE, (*RATES, np.float32(1.5), object())),
            (lambda rate: Sampling(rates=[rate]), "expected rates inside", MAPPINGS),
            (lambda rate: sample(mlp(), X, rate), IN_UNIT, ONE_RATE),
            (lambda rate: inject(mlp(), [], rate).__enter__(), IN_UNIT, ONE_RATE),
            (lambda draws: Sampling(draws=draws), TWO_DRAWS, DRAWS),
            (lambda draws: sample(mlp(), X, 0.1, draws), TWO_DRAWS, DRAWS),
            (lambda seed: Sampling(seed=seed), "expected seed to be a whole number; found", (1.5, None, "1", True)),
            (lambda chunk: Sampling(chunk=chunk), CHUNK, CHUNKS),
            (lambda chunk: sample(mlp(), X, 0.1, chunk=chunk), CHUNK, CHUNKS),
        ],
    )
    def test_numbers(self, use: Callable[[Any], object], match: str, values: tuple[Any, ...]) -> None:
        for value in values:
            with pytest.raises(ArgumentError, match=match):
                use(value)

    def test_a_mapping_that_matches_nothing(self) -> None:
        with pytest.raises(ArgumentError, match=r"every pattern.*'head\*' matches none of \['2'\]"):
            quietly(mlp(), (X, Y), method=Sampling(rates=[{"2": 0.1, "head*": 0.2}]))

    @pytest.mark.parametrize(
        ("kind", "name"),
        [
            (Sampling, "floor"),
            (Sampling, "shared"),
            (latedrop.FirstOrder, "floor"),
            (latedrop.Propagation, "floor"),
            (Terms, "guard"),
        ],
    )
    @pytest.mark.parametrize("value", ["no", 1, None, torch.ones(2)])
    def test_flags(self, kind: type[Any], name: str, value: Any) -> None:
        match = rf"expected {name} to be True or False; found .*\. See help\(latedrop\.{kind.__name__}\)"
        with pytest.raises(ArgumentError, match=match):
            kind(**{name: value})
        assert getattr(kind(**{name: np.True_}), name) is True

    @pytest.mark.parametrize(
        ("make", "match"),
        [
            (lambda: Batches(unpack=3), "unpack to be a function, a text or None; found 3"),  # type: ignore[arg-type]
            (lambda: Batches(collate=3), "collate to be a function or None; found 3"),  # type: ignore[arg-type]
            (lambda: Terms(features=3), "features to be a list of texts or None; found 3"),  # type: ignore[arg-type]
            (lambda: Terms(features="2"), "features to be a list of texts or None; found '2'"),
            (lambda: latedrop.Classification(names=3), "names to be a list of texts; found 3"),  # type: ignore[arg-type]
            (lambda: Sampling(rates=[{3: 0.1}]), "mappings of names"),  # type: ignore[dict-item]
            (lambda: Sampling(scale=10**400), "expected scale .* found 1000.*000"),
            (lambda: Sampling(scale=10**5000), "expected scale .* found an object of type int"),
            (lambda: find_sites(mlp(), X, select=3), "expected sites by a name pattern.* found 3"),  # type: ignore[arg-type]
            (lambda: quietly(mlp(), (X, Y), sites=[3]), "expected sites by a name pattern.* found 3"),
            (lambda: quietly(mlp(), (X, Y), readout=[]), r"expected readout .*\[\]. See help\(latedrop\.calibrate\)"),
            (lambda: quietly(mlp(), (X, Y), per_output="no"), "expected per_output to be True or False or None"),
        ],
    )
    def test_other_types(self, make: Any, match: str) -> None:
        with pytest.raises(ArgumentError, match=match):
            make()

    @pytest.mark.parametrize("scale", ["best", 0, -1, math.nan, math.inf, True, None, [1.0], np.ones(2), torch.ones(2)])
    def test_scale(self, scale: Any) -> None:
        match = r"expected scale 'optimal', 'relaxed', a positive number or a step of tradeoff\(\); found"
        with pytest.raises(ArgumentError, match=match):
            Sampling(scale=scale)
        predictor = quietly(mlp(), (X, Y))
        with pytest.raises(ArgumentError, match=match):
            predictor.scaled(scale)
        with pytest.raises(ArgumentError, match=match):
            predictor.predict(X).scaled(scale)

    @pytest.mark.parametrize(
        ("name", "kind"),
        [("criterion", Sampling), ("mean", Sampling), ("mean", latedrop.Propagation), ("mean", Terms)],
    )
    @pytest.mark.parametrize("value", ["best", "", 1, ["scaled"]])
    def test_words(self, name: str, kind: type[Any], value: Any) -> None:
        with pytest.raises(ArgumentError, match=f"expected {name} to be one of .*; found"):
            kind(**{name: value})

    @pytest.mark.parametrize("value", ["best", "", 1, ["sample"], None])
    def test_methods(self, value: Any) -> None:
        with pytest.raises(ArgumentError, match=r"expected method to be one of .*, or Terms\(\.\.\.\).*; found"):
            calibrate(mlp(), (X, Y), method=value)

    def test_engine(self) -> None:
        with pytest.raises(ArgumentError, match=r"expected engine to be one of .*; found 'cuda'"):
            sample(mlp(), X, 0.1, engine="cuda")
        predictor = quietly(mlp(), (X, Y))
        predictor.engine = "fast"  # type: ignore[assignment]
        with pytest.raises(ArgumentError, match=r"expected engine to be one of .*; found 'fast'"):
            predictor.predict(X)

    def test_options_of_predictions(self) -> None:
        predictor = quietly(mlp(), (X, Y))
        with pytest.raises(TypeError, match=r"unexpected keyword argument 'rate'"):  # which only classes have
            predictor.predict(X, rate=0.1)  # type: ignore[call-arg]
        with pytest.raises(ArgumentError, match="expected most, a number of units, to be 0 or more; found -1"):
            predictor.explain(X[:1], most=-1)

    @pytest.mark.parametrize("read", [load, latedrop.load_boxes, latedrop.load_multilabel])
    def test_loading_with_arguments_swapped(self, read: Any) -> None:
        with pytest.raises(ArgumentError, match=r"expected a torch\.nn\.Module; found str"):
            read(mlp(), "model.latedrop.json")

    def test_intervals(self) -> None:
        for kind in ("beta", "conformal"):
            with pytest.raises(ArgumentError, match=f"expected intervals to be one of .*; found '{kind}'"):
                quietly(mlp(), (X, Y), intervals=kind)

    def test_arguments_are_checked_before_the_work(self) -> None:
        model = mlp()
        model.forward = pytest.fail
        for options in ({"intervals": "beta"}, {"engine": "x"}, {"batches": 8}, {"method": "x"}, {"target": 3}):
            with pytest.raises(ArgumentError):
                calibrate(model, (X, Y), **options)  # type: ignore[arg-type]
        for make in (
            lambda: Sampling(criterion="x"),  # type: ignore[arg-type]
            lambda: Sampling(draws=1),
            lambda: Sampling(rates=[2]),
            lambda: latedrop.FirstOrder(scale="x"),  # type: ignore[arg-type]
            lambda: Terms(["nobody"]),
        ):
            with pytest.raises(ArgumentError):
                make()

    def test_levels(self) -> None:
        predicted = quietly(mlp(), (X, Y)).predict(X)
        for function in (predicted.interval, predicted.quantile, predicted.to_dict):
            with pytest.raises(ArgumentError, match=r"expected a probability inside \(0, 1\)"):
                function(90)
        with pytest.raises(LatedropError):
            predicted.quantile([])


class TestConformal:
    def test_data_that_give_no_intervals(self) -> None:
        predictor = quietly(mlp(), (X, Y))
        for data, match in (
            ((X[:0], Y[:0]), "expected at least one row to predict; found none"),
            ((X, Y[:5]), "one target for each of the 40 input rows"),
            ((X, torch.cat([Y, Y], 1)), "expected target of the mean's shape"),
        ):
            with pytest.raises(DataError, match=match):
                predictor.conformal(data)

    def test_maps(self) -> None:
        x = torch.randn(12, 1, 6, 6, generator=torch.Generator().manual_seed(0))
        with pytest.raises(ArgumentError, match=r"outputs of shape \(1, 6, 6\), whose entries are not exchangeable"):
            quietly(maps_to_maps(), (x, 3 * x)).conformal((x, 3 * x))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "model.latedrop.json"
    quietly(mlp(), (X, Y)).save(path)
    return path


class TestFiles:
    @pytest.mark.parametrize(
        "build",
        [
            lambda: nn.Sequential(nn.Linear(3, 20), nn.Linear(20, 1)),
            lambda: nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Bilinear(20, 20, 1)),
            lambda: nn.Linear(3, 1),
            branching,
        ],
        ids=["no such layer", "another type", "one layer", "other names"],
    )
    def test_another_model(self, saved: Path, build: Callable[[], nn.Module]) -> None:
        with pytest.raises(FileError, match=r"expected a model with the sites of .*\['2'\] are missing or of another"):
            load(saved, seeded(build))

    def test_a_readout_that_no_file_holds(self, saved: Path) -> None:
        def halve(out: Tensor) -> Tensor:
            return out / 2

        quietly(mlp(), (X, Y), readout=halve).save(saved)
        with pytest.raises(FileError, match=r"expected readout=.*the function '.*halve'.*Pass the same function"):
            load(saved, mlp())

    @pytest.mark.parametrize("kept", [slice(1), slice(2), 0])
    def test_a_readout_of_another_shape(self, saved: Path, kept: Any) -> None:
        quietly(mlp(3), (X, X), readout=lambda out: out * 1).save(saved)
        with pytest.raises(DataError, match=r"expected outputs of shape \(N, 3\), as in the calibration; found"):
            load(saved, mlp(3), readout=lambda out: out[:, kept]).predict(X)

    def test_a_failed_save_keeps_the_old_file(self, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before = saved.read_text()

        def full(*args: Any, **options: Any) -> int:
            raise OSError(28, "No space left on device")

        predictor = load(saved, mlp())
        monkeypatch.setattr(Path, "write_bytes", full)
        with pytest.raises(FileError, match="No space left on device"):
            predictor.save(saved)
        monkeypatch.undo()
        assert saved.read_text() == before
        assert isinstance(load(saved, mlp()), Predictor)

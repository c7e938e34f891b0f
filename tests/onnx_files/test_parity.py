"""A file gives what torch gives: over the zoo, by draws and to first order, at every optimisation level."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import latedrop
from architectures import ARCHITECTURES, missing
from latedrop.data.rows import map_rows, tensors
from latedrop.dropout.sampling import own_output
from networks import mlp, trained
from rounding import assert_same_up_to_rounding
from zoo import ZOO, Case

onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")

CASES = {case.name: case for case in ZOO}
QUICK = {"first order": ("mlp", "batchnorm_cnn", "residual_cnn", "dict_input"), "draws": ("mlp", "residual_cnn")}
LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL")
CLOSE = 1e-5  # of the standard deviation


def summed(output: Tensor) -> Tensor:
    return output.sum((1, 2, 3))


def rows_like(x: Any, count: int) -> Any:
    """Inputs of so many rows, from a fixed seed."""
    generator = torch.Generator().manual_seed(count)

    def made(value: Tensor) -> Tensor:
        shape = (count, *value.shape[1:])
        if value.is_floating_point():
            return torch.randn(shape, generator=generator)
        return torch.randint(20, shape, generator=generator)

    return map_rows(x, made)


def predictor_of(case: Case, **options: Any) -> tuple[Any, Any]:
    """A calibrated model of the zoo, whose errors are as large as its outputs, and inputs for it."""
    model, x = case.make()
    readout = summed if case.name in ("unet", "columns") else case.readout
    validation = rows_like(x, 24)
    y = own_output(model, validation, readout)
    noise = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    y = y + noise * y.abs().mean()
    return latedrop.calibrate(model, (validation, y), readout=readout, progress=False, **options), x


def arrays(x: Any) -> list[np.ndarray]:
    return [value.numpy() for value in tensors(x)]


def run(path: Path, x: Any, level: str = "ORT_ENABLE_ALL") -> dict[str, np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    given = dict(zip([value.name for value in session.get_inputs()], arrays(x), strict=True))
    return dict(zip(names, session.run(names, given), strict=True))


def assert_close(actual: np.ndarray, expected: Tensor, std: Tensor) -> None:
    off = np.abs(actual - expected.numpy())
    rounding = 1e-6 * float(expected.abs().max())
    assert off.shape == expected.shape
    assert bool((off <= CLOSE * std.numpy() + rounding).all()), float((off / std.numpy()).max())


def assert_same(path: Path, uq: Any, x: Any) -> dict[str, np.ndarray]:
    p, outputs = uq.predict(x), run(path, x)
    low, high = p.interval(0.9)
    for name, value in {"mean": p.mean, "low": low, "high": high}.items():
        assert_close(outputs[name], value, p.std)
    assert np.abs(outputs["std"] / p.std.numpy() - 1).max() < CLOSE
    return outputs


METHODS = {"first order": "linear", "draws": latedrop.Sampling(rates=[0.2], draws=8)}
ZOO_BY_METHOD = [
    pytest.param(way, name, marks=[] if name in QUICK[way] else pytest.mark.slow) for way in METHODS for name in CASES
]


@pytest.mark.parametrize(("way", "name"), ZOO_BY_METHOD)
def test_the_zoo(way: str, name: str, tmp_path: Path) -> None:
    uq, x = predictor_of(CASES[name], method=METHODS[way])
    path = uq.to_onnx(tmp_path / "model.onnx", x)
    for count in (1, 17):
        assert_same(path, uq, rows_like(x, count))


ARCHITECTURES_WRITTEN = (
    "ResNet-18",
    "Vision transformer",
    "BERT, classifier",
    "Graph convolution, dense",
    "Graph attention, dense",
    "Message passing on a fixed graph",
    "LSTM forecaster, embedded input",
    "GRU forecaster, embedded input",
    "MobileNetV3-Small",
    "T5, encoder and decoder",
    "1-D audio CNN",
    "Tied autoencoder",
    "`nn.Sequential` of anything",
    "`parametrizations.weight_norm`",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES_WRITTEN)
def test_architectures(name: str, tmp_path: Path) -> None:
    architecture = next(actual for actual in ARCHITECTURES if actual.name == name)
    absent = missing(architecture.library)
    if absent:
        pytest.skip(f"needs {absent}")
    model, _ = architecture.make()
    torch.manual_seed(1)
    x = architecture.inputs(12)
    y = own_output(model, x, architecture.readout)
    y = y + torch.randn(y.shape, generator=torch.Generator().manual_seed(2)) * y.abs().mean()
    uq = latedrop.calibrate(model, (x, y), readout=architecture.readout, method="linear", progress=False)
    assert_same(uq.to_onnx(tmp_path / "model.onnx", x), uq, x)


@pytest.mark.parametrize("way", METHODS)
def test_no_optimisation_takes_the_variance_away(way: str, tmp_path: Path) -> None:
    uq, x = predictor_of(CASES["batchnorm_cnn"], method=METHODS[way])
    path = uq.to_onnx(tmp_path / "model.onnx", x)
    kinds = {node.op_type for node in onnx.load(path).graph.node}
    assert not [kind for kind in kinds if kind in ("Dropout", "Bernoulli") or kind.startswith("Random")]
    rows = rows_like(x, 9)
    expected = uq.predict(rows).std.numpy()
    assert expected.min() > 0
    for level in LEVELS:
        assert np.abs(run(path, rows, level)["std"] / expected - 1).max() < CLOSE, level


def test_layers_before_the_first_site_run_once(tmp_path: Path) -> None:
    uq, x = predictor_of(CASES["residual_cnn"], method=METHODS["draws"])
    graph = onnx.load(uq.to_onnx(tmp_path / "model.onnx", x)).graph
    readers = {node.op_type for node in graph.node if graph.input[0].name in node.input}
    assert "Conv" in readers  # on the rows as they come, not on eight times as many
    assert not readers & {"Concat", "Expand", "Tile"}
    masks = [tensor for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.UINT8]
    assert masks
    assert all(tensor.dims[0] == 8 for tensor in masks)


@pytest.fixture(scope="module")
def learned() -> tuple[torch.nn.Module, Tensor, Tensor]:
    """A network that was trained, and rows on which its errors grow to one side."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, 3, generator=generator)
    y = x.prod(1, keepdim=True) + (0.1 + x[:, :1].exp() / 2) * torch.randn(500, 1, generator=generator)
    return trained(mlp(3, 24, 1, act=torch.nn.ReLU), x[:200], y[:200], 150, 1e-2), x, y


def test_default_calibration_with_its_guard(learned: Any, tmp_path: Path) -> None:
    model, x, y = learned
    uq = latedrop.calibrate(model, (x[200:], y[200:]), reference=x[:200], progress=False)
    path = uq.to_onnx(tmp_path / "model.onnx", x[:5])
    nodes = onnx.load(path).graph.node
    assert [node.domain for node in nodes if node.op_type == "TreeEnsemble"] == ["ai.onnx.ml"]
    made = {node.output[0]: node for node in nodes}
    double = {name for name, node in made.items() if node.op_type == "Cast" and node.attribute[0].i == 11}
    turned = {name for name, node in made.items() if node.op_type == "Transpose" and double & {*node.input}}
    assert not turned & {name for node in nodes if node.op_type == "MatMul" for name in node.input}  # see `Leverage`
    strange = torch.cat([x[:20], 30 * x[:20]])
    outputs, p = assert_same(path, uq, strange), uq.predict(strange)
    assert p.novelty.max() > 10
    assert np.abs(outputs["novelty"] / p.novelty.numpy() - 1).max() < CLOSE


def test_more_features_than_are_kept(tmp_path: Path) -> None:
    """They are narrowed by a random matrix, whose numbers have to be in the file."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 300), torch.nn.ReLU(), torch.nn.Linear(300, 1))
    x = torch.randn(200, 4)
    y = model(x).detach() + 0.1 * (1 + x[:, :1].abs()) * torch.randn(200, 1)
    uq = latedrop.calibrate(model, (x, y), progress=False)
    path = uq.to_onnx(tmp_path / "model.onnx", x[:5])
    outputs, p = assert_same(path, uq, x[:9]), uq.predict(x[:9])
    assert np.abs(outputs["novelty"] / p.novelty.numpy() - 1).max() < CLOSE


class Odd(torch.nn.Module):
    """Layers inside a function; the argument has a name that a result inside the file could have."""

    def __init__(self, function: Callable[[torch.nn.Sequential, Tensor], Tensor], inputs: int) -> None:
        super().__init__()
        self.function, self.layers = function, mlp(inputs, 8, 1, act=torch.nn.ReLU)

    def forward(self, v16: Tensor) -> Tensor:
        return self.function(self.layers, v16)


def remainders(layers: torch.nn.Sequential, x: Tensor) -> Tensor:
    """Take them of both kinds, of whole and of floating numbers."""
    whole = torch.fmod((x * 10).long(), 3).float()
    return layers(torch.cat([whole, torch.fmod(x, 0.7), torch.remainder(x, 0.7)], 1))


def twice(layers: torch.nn.Sequential, x: Tensor) -> Tensor:
    """Compute the same number twice from weights."""
    return layers(x * (layers[0].bias[:3].exp() + 1e-6)) + layers(x / (layers[0].bias[:3].exp() + 1e-6))


@pytest.mark.parametrize(
    ("function", "inputs"),
    [(remainders, 9), (twice, 3), (lambda layers, x: layers(x) + x[x > 0].sum() * 0, 3)],
    ids=["remainders", "twice", "any number of entries"],
)
def test_odd_models(function: Any, inputs: int, tmp_path: Path) -> None:
    model, x = Odd(function, inputs), torch.randn(80, 3)
    uq = latedrop.calibrate(model, (x, x[:, :1] + 0.3 * torch.randn(80, 1)), method="linear", progress=False)
    path = uq.to_onnx(tmp_path / "model.onnx", x[:5].abs())
    assert_same(path, uq, x[:9])


@pytest.mark.parametrize("unit", [latedrop.Log(), latedrop.Standardized(2.0, 3.0)], ids=["log", "standardized"])
@pytest.mark.filterwarnings("ignore::latedrop.LatedropWarning")
def test_targets_that_were_transformed(unit: Any, learned: Any, tmp_path: Path) -> None:
    model, x, y = learned
    uq = latedrop.calibrate(model, (x[200:], (y[200:] / 4).exp()), target=unit, progress=False)
    path = uq.to_onnx(tmp_path / "model.onnx", x[:5])
    assert_same(path, uq, x[:30])
    rows = torch.cat([1e4 * x[:1], x[1:30]])  # one of absurd size
    prediction, p = latedrop.load_onnx(path).predict(rows.numpy()), uq.predict(rows)
    for level in (0.5, 0.9):
        for ours, torchs in zip(prediction.interval(level), p.interval(level), strict=True):
            assert np.isfinite(ours).all()
            assert_same_up_to_rounding(ours, torchs.numpy())


@pytest.mark.parametrize(
    "terms",
    [["leverage", "size"], pytest.param(["dropout"], marks=pytest.mark.slow)],
    ids=lambda terms: "+".join(terms),
)
def test_other_terms(terms: list[str], tmp_path: Path, learned: Any) -> None:
    model, x, y = learned
    layers = [*model[:2], torch.nn.Dropout(0.2), model[2]]
    uq = latedrop.calibrate(
        torch.nn.Sequential(*layers), (x[200:], y[200:]), method=latedrop.Terms(terms), progress=False
    )
    assert_same(uq.to_onnx(tmp_path / "model.onnx", x[:5]), uq, x[:30])


@pytest.mark.parametrize("kind", ["gaussian", "isotonic", "conformal"])
def test_intervals_at_any_level(kind: str, learned: Any, tmp_path: Path) -> None:
    model, x, y = learned
    options: dict[str, Any] = {} if kind == "conformal" else {"intervals": kind}
    uq = latedrop.calibrate(model, (x[200:400], y[200:400]), method="linear", progress=False, **options)
    uq = uq.conformal((x[400:], y[400:])) if kind == "conformal" else uq
    prediction = latedrop.load_onnx(uq.to_onnx(tmp_path / "model.onnx", x[:5], level=0.8)).predict(x[:30].numpy())
    p = uq.predict(x[:30])
    for level in (0.5, 0.8, 0.95):
        for ours, expected_rows in zip(prediction.interval(level), p.interval(level), strict=True):
            assert_close(ours, expected_rows, p.std)
    assert_close(prediction.interval()[0], p.interval(0.8)[0], p.std)
    assert_close(prediction.quantile(0.3), p.quantile(0.3), p.std)
    assert set(prediction.to_dict()) == set(p.to_dict())

"""Traced draws and predictions give what the steps give; most tests run the graph without the compiler itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from latedrop import Network, Sampling, calibrate, find_sites, sample
from latedrop.dropout.moments import Engine
from latedrop.errors import ArgumentError, DataError, LatedropWarning, OutputError
from latedrop.network.sites import Site
from networks import Net
from rounding import assert_same_up_to_rounding
from untouched import assert_same, state
from zoo import ZOO, Case

RATES = (0.05, 0.3)
DRAWS = 11


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs run as they are."""
    monkeypatch.setattr(torch, "compile", lambda graph, **_: graph)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def programs(network: Network) -> int:
    return len(network.notes.get("programs", ()))


@pytest.mark.parametrize("case", ZOO, ids=lambda case: case.name)
def test_draws_are_those_of_the_steps(case: Case, uncompiled: None) -> None:
    model, x = case.make()
    sites, network = find_sites(model, x), Network(model)
    for rate in RATES:
        options: dict[str, Any] = {"sites": sites, "readout": case.readout, "chunk": 4}
        moments = sample(network, x, rate, DRAWS, 3, engine="compiled", **options)
        expected = sample(model, x, rate, DRAWS, 3, **options)
        assert_same_up_to_rounding(moments.mean, expected.mean)
        assert_same_up_to_rounding(moments.variance, expected.variance, scale=float(expected.mean.square().mean()))
    assert programs(network) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch's own compiler calls it
def test_the_compiler_itself() -> None:
    model, x = mlp(), torch.randn(6, 5)
    network = Network(model)
    for rate in RATES:
        moments, expected = (sample(network, x, rate, 20, engine=engine) for engine in ("compiled", "auto"))
        assert_same_up_to_rounding(moments.variance, expected.variance)
    y = torch.randn(6, 1)
    with pytest.warns(LatedropWarning, match="validation rows"):
        fast, usual = (calibrate(model, (x, y), engine=engine, progress=False) for engine in ("compiled", "auto"))
    for batch in (x, 2 * x):
        assert_same_up_to_rounding(fast.predict(batch).std, usual.predict(batch).std)


def test_programs_follow_the_weights(uncompiled: None) -> None:
    model, x = mlp(), torch.randn(3, 5)
    network, sites = Network(model), find_sites(model, x)
    for _ in range(2):
        moments = sample(network, x, 0.2, 20, sites=sites, engine="compiled")
        assert_same_up_to_rounding(moments.variance, sample(model, x, 0.2, 20, sites=sites).variance)
        with torch.no_grad():
            model[0].weight += 1
    assert programs(network) == 1


def test_few_programs_are_kept(uncompiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("latedrop.dropout.compiled._MOST", 2)
    model = mlp()
    network, sites = Network(model), find_sites(model, torch.randn(3, 5))
    for rows in range(1, 5):
        sample(network, torch.randn(rows, 5), 0.2, 4, sites=sites, engine="compiled")
    assert programs(network) == 2


@pytest.mark.parametrize("method", ["terms", "sample", "linear", "propagate"])
def test_calibration_and_prediction(method: Any, uncompiled: None) -> None:
    model, x = mlp(), torch.randn(40, 5)
    y = torch.randn(40, 1)
    options: dict[str, Any] = {"method": method, "progress": False}
    options |= {"method": Sampling(rates=[0.1, 0.2], draws=20)} if method == "sample" else {}
    fast, usual = (calibrate(model, (x, y), engine=name, **options) for name in ("compiled", "auto"))
    for batch in (x, 3 * x, x):
        a, b = fast.predict(batch), usual.predict(batch)
        assert_same_up_to_rounding(a.mean, b.mean)
        assert_same_up_to_rounding(a.std, b.std)
    assert programs(fast.network) == 1


def test_predictions_of_classes(uncompiled: None) -> None:
    model, x = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(60, 5)
    labels = torch.randint(0, 3, (60,))
    fast, usual = (calibrate(model, (x, labels), engine=name, progress=False) for name in ("compiled", "auto"))
    for batch in (x, 3 * x):
        a, b = fast.predict(batch), usual.predict(batch)
        assert_same_up_to_rounding(a.probabilities, b.probabilities)


@pytest.mark.filterwarnings("ignore:nothing is known of")
@pytest.mark.parametrize("value", [1e10, 3e38])
def test_absurd_rows_are_left_to_the_steps(value: float, uncompiled: None) -> None:
    model, x = mlp(), torch.randn(40, 5)
    fast, usual = (calibrate(model, (x, x[:, :1]), engine=name, progress=False) for name in ("compiled", "auto"))
    fast.predict(x)
    odd = x.clone()
    odd[3] = value
    a, b = fast.predict(odd), usual.predict(odd)
    assert_same_up_to_rounding(a.std, b.std)
    assert_same_up_to_rounding(a.novelty, b.novelty, dtype=torch.float32)


def test_the_model_is_as_before(uncompiled: None) -> None:
    model, x = mlp().train(), torch.randn(3, 5)
    before = state(model)
    sample(model, x, 0.2, 4, engine="compiled")
    assert_same(before, state(model))


def test_bad_input_is_told_as_ever(uncompiled: None) -> None:
    model, x = mlp(), torch.randn(3, 5)
    sites = find_sites(model, x)
    x[1, 2] = float("nan")
    with pytest.raises(DataError, match="found 1 NaN or inf among 15 input values"):
        sample(model, x, 0.2, 4, sites=sites, engine="compiled")

    def log(y: Tensor) -> Tensor:
        return y.abs().log() / 0

    with pytest.raises(OutputError, match="NaN or inf in 3 of 3 rows"):
        sample(model, torch.randn(3, 5), 0.2, 4, readout=log, engine="compiled")
    with pytest.raises(ArgumentError, match="expected another engine with keep_draws=True"):
        sample(model, torch.randn(3, 5), 0.2, 4, keep_draws=True, engine="compiled")


def test_draws_that_only_fill_up_a_chunk_do_not_count(uncompiled: None) -> None:
    model, x = mlp(), torch.randn(3, 5)
    sites = find_sites(model, x)
    for seed in range(100):
        outputs = sample(model, x, 0.3, 12, seed, sites, keep_draws=True).outputs
        largest = outputs[:9].amax() + 1e-4
        if bool(outputs[9:].amax() > largest):
            break
    else:
        pytest.fail("expected some seed whose last draws are the largest")

    def root(y: Tensor) -> Tensor:  # NaN in these draws
        return (largest - y).sqrt()

    moments = sample(model, x, 0.3, 9, seed, sites, root, chunk=6, engine="compiled")
    assert_same_up_to_rounding(moments.mean, sample(model, x, 0.3, 9, seed, sites, root).mean)


SMALL = {"vocab_size": 40, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
HUGGING_FACE = {
    "BertForSequenceClassification": {},
    "LlamaForSequenceClassification": {"num_key_value_heads": 1, "pad_token_id": 0},
    "ViTForImageClassification": {"image_size": 8, "patch_size": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_models_of_hugging_face(name: str, uncompiled: None) -> None:
    library = pytest.importorskip("transformers")
    kind = getattr(library, name)
    config = kind.config_class(num_labels=1, **SMALL, **HUGGING_FACE[name])
    model = kind(config).eval()
    x: Any = {"pixel_values": torch.randn(3, 3, 8, 8)}
    if name != "ViTForImageClassification":
        present = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
        x = {"input_ids": torch.randint(1, 40, (3, 5)) * present, "attention_mask": present}
    sites = find_sites(model, x)
    moments = sample(model, x, 0.2, 7, sites=sites, readout="logits", engine="compiled")
    expected = sample(model, x, 0.2, 7, sites=sites, readout="logits")
    assert_same_up_to_rounding(moments.mean, expected.mean)
    assert_same_up_to_rounding(moments.variance, expected.variance)


def decides(net: Net, x: Tensor) -> Tensor:
    hidden = net.first(x)
    return net.head(hidden.relu() if bool((hidden > 0).any()) else hidden)


def counts_passes(net: Net, x: Tensor) -> Tensor:
    """Count them in an attribute and in a buffer, which a program would count up alone."""
    net.passes += 1
    net.counted += 1
    return net.head(net.first(x) * (net.passes / net.counted))


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (lambda net, x: net.head(net.first(x) + torch.randn(8)), "noise of its own"),
        (lambda net, x: net.head(net.first(x)) * len((x > 0).nonzero()), "sizes that depend on values"),
        (decides, "Python code that decides by values of its tensors"),
        (counts_passes, "a model that writes into tensors of its own"),
    ],
)
def test_models_that_cannot_be_traced(run: Any, why: str, uncompiled: None) -> None:
    model = Net(run, first=nn.Linear(5, 8), head=nn.Linear(8, 1), passes=0, counted=torch.zeros(()))
    with pytest.raises(ArgumentError, match=f"found {why}.*Use engine='auto'"):
        sample(model, torch.randn(3, 5), 0.2, 4, sites=[Site("head", "element", "Linear", (8,))], engine="compiled")


def test_only_a_cuda_device_records() -> None:
    with pytest.raises(ArgumentError, match="expected a model on a CUDA device"):
        sample(mlp(), torch.randn(3, 5), 0.2, engine="recorded")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # advice of torch's compiler
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # which it calls itself
@pytest.mark.parametrize("engine", ["compiled", "recorded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype: torch.dtype, engine: Engine) -> None:
    model = mlp().cuda().to(dtype)
    network = Network(model)
    for rate in (0.2, 0.2, 0.4):
        x = torch.randn(64, 5, device="cuda", dtype=dtype)
        moments, expected = (sample(network, x, rate, 50, engine=each) for each in (engine, "auto"))
        assert_same_up_to_rounding(moments.mean, expected.mean, dtype=dtype)

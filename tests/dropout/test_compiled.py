"""Traced chunks give what the other engines give, and the prefix is cut off; here without the compiler itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from latedrop.variance.engine import compiled, replay, tracing
from latedrop.variance.engine.compiled import Program
from latedrop.variance.engine.kept import _MOST, PROGRAMS
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from latedrop import calibrate, find_sites, sample
from latedrop.crowd import MCNN
from latedrop.dropout.options import Sampling
from latedrop.errors import ArgumentError, DataError, LatedropWarning, OutputError
from latedrop.network.sites import Site
from zoo import ZOO, Case

RATES = (0.05, 0.3)
DRAWS = 11


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs run as they are."""
    monkeypatch.setattr(compiled, "Compiled", lambda graph: graph)
    yield
    PROGRAMS.clear()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.parametrize("chunk", [4, 11])
@pytest.mark.parametrize("case", ZOO, ids=lambda case: case.name)
def test_it_equals_the_other_engines(case: Case, chunk: int) -> None:
    model, x = case.make()
    sites = find_sites(model, x)
    run = Program(model, x, sites, Sampling(DRAWS, 3, case.readout), chunk, compiler=lambda graph: graph)
    for rate in RATES:
        mean, variance, finite = run(x, {site.name: rate for site in sites})
        expected = sample(model, x, rate, DRAWS, 3, sites, case.readout)
        torch.testing.assert_close(mean, expected.mean)
        torch.testing.assert_close(variance, expected.variance, rtol=1e-4, atol=1e-7)
        assert finite


def test_what_no_mask_reaches_is_in_the_first_graph() -> None:
    model, x = MCNN(), torch.rand(1, 1, 32, 48)
    run = Program(model, x, find_sites(model, x), Sampling(4), 2, compiler=lambda graph: graph)
    before, after = (
        [node for node in part.graph.nodes if "convolution" in str(node.target)] for part in (run._before, run._after)
    )
    assert (len(before), len(after)) == (3, 10)
    assert not any("arange" in str(node.target) for node in run._before.graph.nodes)


def test_other_inputs_of_the_shape_use_the_same_program(uncompiled: None) -> None:
    model = mlp()
    sites = find_sites(model, torch.randn(3, 5))
    for seed in range(3):
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(seed))
        found = sample(model, x, 0.2, 20, sites=sites, engine="compiled")
        torch.testing.assert_close(found.mean, sample(model, x, 0.2, 20, sites=sites).mean)
    assert len(PROGRAMS[model]) == 1
    sample(model, torch.randn(4, 5), 0.2, 20, sites=sites, engine="compiled")
    assert len(PROGRAMS[model]) == 2


def test_other_weights_are_another_program(uncompiled: None) -> None:
    model, x = mlp(), torch.randn(3, 5)
    sites = find_sites(model, x)
    sample(model, x, 0.2, 20, sites=sites, engine="compiled")
    with torch.no_grad():
        model[0].weight.mul_(2)  # in place: the program reads it
    expected = sample(model, x, 0.2, 20, sites=sites)
    torch.testing.assert_close(sample(model, x, 0.2, 20, sites=sites, engine="compiled").mean, expected.mean)
    assert len(PROGRAMS[model]) == 1
    model[0].weight = nn.Parameter(torch.randn(8, 5))
    expected = sample(model, x, 0.2, 20, sites=sites)
    torch.testing.assert_close(sample(model, x, 0.2, 20, sites=sites, engine="compiled").mean, expected.mean)
    assert len(PROGRAMS[model]) == 2


@pytest.mark.slow
def test_few_programs_are_kept(uncompiled: None) -> None:
    model = mlp()
    sites = find_sites(model, torch.randn(3, 5))

    def run() -> None:
        for rows in range(1, 12):
            sample(model, torch.randn(rows, 5), 0.2, 4, sites=sites, engine="compiled")

    with pytest.warns(LatedropWarning, match="more than 8 programs were compiled for one Sequential") as told:
        run()
    assert len(told) == 1
    assert len(PROGRAMS[model]) == _MOST


def test_a_program_that_takes_minutes_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "compiled", lambda graph, examples: graph)
    graph = torch.fx.symbolic_trace(lambda x: torch.relu(torch.relu(torch.relu(x))))
    assert torch.equal(replay.Compiled(graph)(torch.ones(2)), torch.ones(2))  # quick ones pass without a word
    monkeypatch.setattr(replay, "_LONG", 2)
    run = replay.Compiled(graph)
    with pytest.warns(LatedropWarning, match="a program of 3 operators takes minutes to compile") as told:
        run(torch.ones(2)), run(torch.ones(2))
    assert len(told) == 1


def test_calibration_and_prediction_by_it(uncompiled: None) -> None:
    model, x = mlp(), torch.randn(40, 5)
    y = torch.randn(40)
    fast, usual = (calibrate(model, (x, y), rates=[0.1, 0.2], draws=20, engine=name) for name in ("compiled", "auto"))
    assert fast.calibration.rate == usual.calibration.rate
    assert fast.engine == fast.scaled("relaxed").engine == "compiled"
    torch.testing.assert_close(fast.predict(x).std, usual.predict(x).std)
    assert len(PROGRAMS[model]) == 1  # one for both rates, and for the prediction


def test_the_model_is_as_before(uncompiled: None) -> None:
    model, x = mlp().train(), torch.randn(3, 5)
    before = torch.random.get_rng_state()
    sample(model, x, 0.2, 4, engine="compiled")
    assert model.training
    assert torch.equal(before, torch.random.get_rng_state())
    assert all("forward" not in module.__dict__ and not module._forward_pre_hooks for module in model.modules())


def test_bad_input_is_told_as_ever(uncompiled: None) -> None:
    model, x = mlp(), torch.randn(3, 5)
    x[1, 2] = float("nan")
    with pytest.raises(DataError, match="found 1 NaN or inf among 15 input values"):
        sample(model, x, 0.2, 4, engine="compiled")

    def log(y: Tensor) -> Tensor:
        return y.abs().log() / 0

    with pytest.raises(OutputError, match="NaN or inf in 3 of 3 rows"):
        sample(model, torch.randn(3, 5), 0.2, 4, readout=log, engine="compiled")
    with pytest.raises(ArgumentError, match="expected another engine with keep_draws=True"):
        sample(model, torch.randn(3, 5), 0.2, 4, keep_draws=True, engine="compiled")


def test_other_hooks_and_layers_are_another_program(uncompiled: None) -> None:
    model, x = mlp(), torch.randn(3, 5)
    for change in (lambda: None, lambda: model.register_forward_hook(lambda *a: 2 * a[2]), lambda: change_layer(model)):
        change()
        expected = sample(model, x, 0.2, 20)
        torch.testing.assert_close(sample(model, x, 0.2, 20, engine="compiled").mean, expected.mean)
    assert len(PROGRAMS[model]) == 3
    sample(model, x, 0.2, 20, engine="compiled")  # sites that are found again are the same ones
    assert len(PROGRAMS[model]) == 3


def change_layer(model: nn.Module) -> None:
    model[3] = nn.Sigmoid()


def test_draws_that_only_fill_up_a_chunk_do_not_count(uncompiled: None) -> None:
    torch.manual_seed(0)
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

    found = sample(model, x, 0.3, 9, seed, sites, root, chunk=6, engine="compiled")
    torch.testing.assert_close(found.mean, sample(model, x, 0.3, 9, seed, sites, root).mean)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x) + torch.randn(8))


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x)) * len((x > 0).nonzero())


class Packs(nn.Module):
    """Weights by their storage, as cuDNN has those of recurrent layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.empty(0).set_(self.first.weight.detach().untyped_storage(), 0, (8, 5), (5, 1))
        return self.head(x @ weight.T)


HUGGING_FACE = {
    "BertForSequenceClassification": {"num_attention_heads": 2, "intermediate_size": 16},
    "LlamaForSequenceClassification": {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 16,
        "pad_token_id": 0,
    },
    "ViTForImageClassification": {
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "image_size": 8,
        "patch_size": 4,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_models_of_hugging_face(name: str, uncompiled: None) -> None:
    library = pytest.importorskip("transformers")
    kind = getattr(library, name)
    config = kind.config_class(vocab_size=40, hidden_size=8, num_hidden_layers=1, num_labels=1, **HUGGING_FACE[name])
    torch.manual_seed(0)
    model = kind(config).eval()
    x: Any = {"pixel_values": torch.randn(3, 3, 8, 8)}
    if name != "ViTForImageClassification":
        present = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
        x = {"input_ids": torch.randint(1, 40, (3, 5)) * present, "attention_mask": present}
    sites = find_sites(model, x)
    found = sample(model, x, 0.2, 7, sites=sites, readout="logits", engine="compiled")
    expected = sample(model, x, 0.2, 7, sites=sites, readout="logits")
    torch.testing.assert_close(found.mean, expected.mean)
    torch.testing.assert_close(found.variance, expected.variance, rtol=1e-4, atol=1e-9)


class Decides(nn.Module):
    """Looks at the values of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.head(hidden.relu() if bool((hidden > 0).any()) else hidden)


def test_the_weights_of_a_graph_become_its_arguments() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    graph, x = make_fx(model)(torch.ones(2, 3)), torch.randn(2, 3)
    expected = model(x)
    held = tracing.lifted(graph)
    torch.testing.assert_close(graph(*held, x), expected)
    assert not list(graph.graph.find_nodes(op="get_attr"))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Noisy, "noise of its own"),
        (Counts, "sizes that depend on values"),
        (Packs, "what cannot be traced"),
        (Decides, "Python code that decides by values of its tensors"),
    ],
)
def test_models_that_no_program_can_stand_for(make: type[nn.Module], why: str, uncompiled: None) -> None:
    model, x = make(), torch.randn(3, 5)
    with pytest.raises(ArgumentError, match=f"found {why}.*Use engine='auto'"):
        sample(model, x, 0.2, 4, sites=[Site("head", "element", "Linear", (8,))], engine="compiled")


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")
@pytest.mark.filterwarnings("ignore:`torch.jit.trace_method` is deprecated")
@pytest.mark.filterwarnings("ignore:.* are TorchScript")
def test_a_model_with_a_traced_part(uncompiled: None) -> None:
    traced = torch.jit.trace(nn.ReLU(), torch.randn(2, 6))
    model, x = nn.Sequential(nn.Linear(4, 6), traced, nn.Linear(6, 6), nn.Linear(6, 1)), torch.randn(3, 4)
    sites = find_sites(model, x)
    found = sample(model, x, 0.2, 6, sites=sites, engine="compiled")
    torch.testing.assert_close(found.mean, sample(model, x, 0.2, 6, sites=sites).mean)


@pytest.mark.parametrize(
    ("layer", "filled"),
    [
        (nn.Conv2d(20, 12, 3, padding=1), (16, 24, 3, 3)),
        (nn.Conv2d(16, 12, 3, bias=False), (16, 16, 3, 3)),
        (nn.Conv1d(20, 16, 3), (16, 24, 3)),
        (nn.Conv2d(16, 8, 3), (8, 16, 3, 3)),
        (nn.Conv2d(20, 1, 3), (1, 20, 3, 3)),
        (nn.Conv2d(20, 20, 3, groups=2), (20, 10, 3, 3)),
        (nn.ConvTranspose2d(20, 12, 3), (20, 12, 3, 3)),
    ],
    ids=str,
)
def test_channels_are_filled_up_with_zeros(layer: Any, filled: tuple[int, ...]) -> None:
    layer = layer.bfloat16().requires_grad_(False)
    x = torch.randn(2, 20 if layer.in_channels == 20 else 16, *[9] * len(layer.kernel_size)).bfloat16()
    graph = make_fx(lambda x: layer(x).relu())(x)
    expected, sizes = graph(x), []
    tracing.fill_up_channels(graph)
    graph.graph.lint()
    torch.testing.assert_close(graph(x), expected)

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "convolution" in str(func):
                sizes.append(tuple(args[1].shape))
            return func(*args, **(kwargs or {}))

    with Watch():
        graph(x)
    assert sizes == [filled]


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch's own compiler calls it
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_on_a_gpu_it_is_a_graph_that_takes_new_inputs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = MCNN().to("cuda", dtype)
    sites: Any = find_sites(model, torch.rand(2, 1, 32, 48, device="cuda", dtype=dtype))
    for _ in range(3):
        x = torch.rand(2, 1, 32, 48, device="cuda", dtype=dtype)
        found = sample(model, x, 0.1, 8, sites=sites, chunk=4, engine="compiled")
        expected = sample(model, x, 0.1, 8, sites=sites)
        tolerance = {"rtol": 1e-3, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.1, "atol": 1e-3}
        torch.testing.assert_close(found.mean, expected.mean, **tolerance)
    assert len(PROGRAMS[model]) == 1

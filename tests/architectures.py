"""Architectures as people have them, unmodified, from the libraries they use; and what latedrop can do with each.

Weights are random, from the libraries' own initialisation; constant parameters (zero residual gains, tiny layer scales)
are moved off their constants, as training would do, so that every branch counts.
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.nn.utils import parametrizations

from latedrop import find_sites, inject, linearize, propagate, sample
from latedrop.data.rows import row_count
from latedrop.errors import LatedropError, LatedropWarning
from latedrop.network.network import call, read
from networks import Net
from zoo import unet

RATE = 0.1
DRAWS = 4
ROWS = 3


@dataclass(frozen=True)
class Architecture:
    """A model of some library, how to make it and what to feed it with.

    Attributes:
        name: as the table of the docs shows it.
        library: the package that it comes from; `"torch"` for those written here.
        build: makes the model, from random weights.
        inputs: makes inputs of so many rows.
        readout: what of the output counts.
        shown: the readout as the table shows it.
    """

    name: str
    library: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    readout: Any = None
    shown: str = ""

    def make(self) -> tuple[nn.Module, Any]:
        """The model in eval mode and its inputs, from a fixed seed, leaving the global random state alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.build()
            if not isinstance(model, torch.jit.ScriptModule):
                _as_trained(model)
            return model.eval(), self.inputs(ROWS)


@dataclass(frozen=True)
class Row:
    """One row of the table: what worked, and where something did not, why."""

    architecture: Architecture
    cells: tuple[str, ...]

    def __str__(self) -> str:
        shown = f", {self.architecture.shown}" if self.architecture.shown else ""
        return f"| {self.architecture.name}{shown} | {self.architecture.library} | {' | '.join(self.cells)} |"


def missing(*libraries: str) -> list[str]:
    """Return the libraries that cannot be imported here."""
    return [name for name in libraries if not _importable(name)]


def tried(architecture: Architecture, model: nn.Module, x: Any) -> Row:
    """Run everything once, and note what happened."""
    try:
        sites = find_sites(model, x)
        with inject(model, sites, RATE), torch.no_grad(), torch.random.fork_rng(devices=[]):  # some models draw numbers
            read(call(model, x), architecture.readout, row_count(x))
    except LatedropError as error:
        return Row(architecture, (f"no: {reason(error)}", *("no",) * 3))
    given = {"sites": sites, "readout": architecture.readout}
    return Row(
        architecture,
        (
            f"{len(sites)} site{'s' * (len(sites) > 1)}",
            _cell(lambda: sample(model, x, RATE, DRAWS, engine="rows", **given), "a loop"),
            _cell(lambda: linearize(model, x, **given), "no"),
            _cell(lambda: propagate(model, x, RATE, **given), "no"),
        ),
    )


def reason(error: BaseException) -> str:
    """Return an error's message in a few words."""
    text = str(error)
    for pattern, words in _REASONS.items():
        if actual := re.search(pattern, text):
            return words.format(*actual.groups())
    return text


_REASONS = {
    r"Batching rule not implemented for (\S+?)[;.]? ": "`{0}` has no batching rule",
    r"found the operator aten\._scaled_dot_product_\w+": "no rule for `scaled_dot_product_attention`",
    r"found the operator aten\._?(\w+)\.": "no rule for `{0}`",
    r"found a layer of type (\w+) in": "no rule for `{0}`",
    r"outputs per example, each costs a backward pass; found (\d+)": "{0} outputs; read out a sum",
    r"vmap: inplace arithmetic": "it updates a tensor in place",
    r"found TorchScript": "its layers run outside Python",
}


def _cell(run: Callable[[], Any], otherwise: str) -> str:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", LatedropWarning)
        try:
            run()
        except (LatedropError, RuntimeError) as error:
            return f"{otherwise}: {reason(error)}"
    return "warns: a map is averaged" if any("sums or averages" in str(w.message) for w in seen) else "yes"


def _as_trained(model: nn.Module) -> None:
    """Statistics that are not those of a new model, and no parameter that is all one number."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
                nn.init.normal_(module.running_mean, std=0.2)
                nn.init.uniform_(module.running_var, 0.5, 2)
        for parameter in model.parameters():
            if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
                parameter += torch.randn_like(parameter) * 0.2


@cache
def _importable(library: str) -> bool:
    if library in ("timm", "torchvision", "segmentation_models_pytorch") and not _import_torchvision():
        return False
    if find_spec(library) is None:
        return False
    importlib.import_module(library)
    return True


def _import_torchvision() -> bool:
    """Import torchvision also where its compiled operators are for another build of torch than the one here.

    Its models are plain Python. What stops the import is that shapes are registered for two compiled operators, so
    these are declared; nothing here calls them. The Makefile installs it into a folder of its own, as other libraries
    import torchvision wherever they find it, and would fail.
    """
    own = str(Path(sys.prefix) / "torchvision")
    if find_spec("torchvision") is None:
        if not Path(own).is_dir():
            return False
        sys.path.append(own)
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            _TORCHVISION.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        importlib.import_module("torchvision")
    finally:
        if own in sys.path:
            sys.path.remove(own)
    return True


_TORCHVISION = torch.library.Library("torchvision", "FRAGMENT")


def timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        return importlib.import_module("timm").create_model(name, num_classes=1, **options)

    return build


def torchvision(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(importlib.import_module("torchvision.models"), name)(**options)


def segmentation(name: str, **options: Any) -> Callable[[], nn.Module]:
    options = {"encoder_weights": None, "classes": 1, **options}
    return lambda: getattr(importlib.import_module("segmentation_models_pytorch"), name)(**options)


def transformers(name: str, **options: Any) -> Callable[[], nn.Module]:
    """A model of this class, from a config of a small size; its attention is torch's own fused function."""
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}

    def build() -> nn.Module:
        model = getattr(importlib.import_module("transformers"), name)
        return model(model.config_class(**{**sizes, **ends, **options}))

    return build


def images(size: int, channels: int = 3) -> Callable[[int], Tensor]:
    return lambda rows: torch.randn(rows, channels, size, size)


def text(rows: int) -> dict[str, Tensor]:
    """Tokens of several lengths, and the mask that says which of them count."""
    lengths = torch.arange(rows) % 4 + 5
    return {
        "input_ids": torch.randint(2, 50, (rows, 8)),
        "attention_mask": (torch.arange(8) < lengths[:, None]).long(),
    }


def graphs(rows: int) -> tuple[Tensor, Tensor]:
    """Features of the nodes and adjacency matrices, a graph per row."""
    links = (torch.rand(rows, 7, 7) < 0.3).float()
    return torch.randn(rows, 7, 5), ((links + links.mT + torch.eye(7)) > 0).float()


class GraphConvolution(nn.Module):
    """Two rounds of messages over a dense adjacency matrix, averaged into one number per graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(5, 16), nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        spread = adjacency / adjacency.sum(-1, keepdim=True)
        hidden = (spread @ self.first(nodes)).relu()
        return self.head((spread @ self.second(hidden)).relu().mean(1))


class GraphAttention(nn.Module):
    """Messages weighted by a softmax over the neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.score_from, self.score_to = nn.Linear(5, 16), nn.Linear(16, 1), nn.Linear(16, 1)
        self.head = nn.Linear(16, 1)

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        hidden = self.embed(nodes).relu()
        scores = F.leaky_relu(self.score_from(hidden) + self.score_to(hidden).mT)
        weights = scores.masked_fill(adjacency == 0, -1e9).softmax(-1)
        return self.head((weights @ hidden).mean(1))


def message_passing() -> nn.Module:
    """Messages along the edges of one graph that all rows share, gathered by index."""

    def run(net: Net, nodes: Tensor) -> Tensor:
        source, target = net.edges
        hidden = net.embed(nodes).relu()
        messages = net.message(torch.cat([hidden[:, source], hidden[:, target]], -1)).relu()
        received = torch.zeros_like(hidden).index_add(1, target, messages)
        return net.head(received)[..., 0]

    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0], [1, 2, 3, 4, 5, 6, 0, 3]])
    return Net(run, edges=edges, embed=nn.Linear(5, 16), message=nn.Linear(32, 16), head=nn.Linear(16, 1))


def forecaster(recurrent: type[nn.RNNBase], embed: nn.Module) -> nn.Module:
    """Two recurrent layers over a series; the last state gives the next three values."""

    def run(net: Net, series: Tensor) -> Tensor:
        states, _ = net.recurrent(net.embed(series))
        return net.head(states[:, -1])

    return Net(run, embed=embed, recurrent=recurrent(4, 12, num_layers=2, batch_first=True), head=nn.Linear(12, 3))


def step_forecaster() -> nn.Module:
    """An LSTM cell in a Python loop, which feeds its own forecast back."""

    def run(net: Net, series: Tensor) -> Tensor:
        state, outputs = None, []
        for step in range(series.shape[1]):
            state = net.cell(series[:, step], state)
        for _ in range(3):
            outputs.append(net.head(state[0]))
            state = net.cell(outputs[-1], state)
        return torch.cat(outputs, 1)

    return Net(run, cell=nn.LSTMCell(4, 12), head=nn.Linear(12, 4))


def audio_cnn() -> nn.Module:
    """Strided 1-D convolutions on the wave itself."""
    return nn.Sequential(
        *(nn.Conv1d(1, 16, 80, stride=4), nn.BatchNorm1d(16), nn.ReLU(), nn.MaxPool1d(4)),
        *(nn.Conv1d(16, 32, 3), nn.BatchNorm1d(32), nn.ReLU(), nn.MaxPool1d(4)),
        *(nn.Conv1d(32, 32, 3, dilation=2), nn.BatchNorm1d(32), nn.ReLU()),
        *(nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, 1)),
    )


def tied_autoencoder() -> nn.Module:
    """The decoder is the encoder's weight, transposed: a weight with a module and one without."""

    def run(net: Net, x: Tensor) -> Tensor:
        return F.linear(net.middle(net.encoder(x).relu()).relu(), net.encoder.weight.T)

    return Net(run, encoder=nn.Linear(6, 16), middle=nn.Linear(16, 16))


def tied_layers() -> nn.Module:
    """Two layers that hold one and the same parameter."""
    layers = {"first": nn.Linear(6, 12), "second": nn.Linear(12, 12), "third": nn.Linear(12, 12)}
    layers["third"].weight = layers["second"].weight
    return Net(
        lambda net, x: net.head(net.third(net.second(net.first(x).relu()).relu()).relu()),
        **layers,
        head=nn.Linear(12, 1),
    )


def mixed_sequential() -> nn.Module:
    """Of anything: 2-D and 1-D layers, a transformer layer and a bilinear upsampling, one after the other."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.GELU(), nn.Upsample(scale_factor=2, mode="bilinear"), nn.AvgPool2d(4)),
        *(nn.Flatten(2), nn.Conv1d(8, 8, 3, padding=1), nn.LayerNorm(16), nn.SiLU(), nn.Linear(16, 12)),
        nn.TransformerEncoderLayer(12, 2, 24, batch_first=True),
        *(nn.Flatten(), nn.PReLU(), nn.Linear(96, 1)),
    )


def mlp(change: Callable[[nn.Linear], nn.Module] = lambda layer: layer) -> nn.Sequential:
    layers = [change(nn.Linear(*sizes)) for sizes in ((6, 24), (24, 24), (24, 2))]
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.Tanh(), layers[2])


def lightning_module() -> nn.Module:
    lightning = importlib.import_module("lightning.pytorch")

    class Regressor(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            return F.mse_loss(self(batch[0]), batch[1])

    return Regressor()


def torchscript() -> nn.Module:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit")  # torch has moved on to torch.export
        return torch.jit.script(mlp())


def distributed_data_parallel() -> nn.Module:
    if not distributed.is_initialized():
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    return nn.parallel.DistributedDataParallel(mlp())


def table_rows(rows: int) -> Tensor:
    return torch.randn(rows, 6)


def series(rows: int) -> Tensor:
    return torch.randn(rows, 6, 4)


def half(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: build().to(torch.bfloat16)


_LAST = {"readout": lambda output: output.logits[:, -1, :3], "shown": "last token's logits"}

ARCHITECTURES = [
    Architecture("ResNet-50", "timm", timm("resnet50"), images(64)),
    Architecture("ConvNeXt-Atto", "timm", timm("convnext_atto"), images(64)),
    Architecture("EfficientNet-B0", "timm", timm("efficientnet_b0"), images(32)),
    Architecture("MobileNetV3-Small", "timm", timm("mobilenetv3_small_050"), images(32)),
    Architecture("ViT-Tiny/16", "timm", timm("vit_tiny_patch16_224", img_size=48), images(48)),
    Architecture("Swin-Tiny", "timm", timm("swin_tiny_patch4_window7_224", img_size=32, window_size=4), images(32)),
    Architecture("ResNet-18", "torchvision", torchvision("resnet18", num_classes=1), images(64)),
    Architecture(
        "Vision transformer",
        "torchvision",
        torchvision(
            "VisionTransformer",
            image_size=32,
            patch_size=8,
            num_layers=2,
            num_heads=2,
            hidden_dim=32,
            mlp_dim=64,
            num_classes=1,
        ),
        images(32),
    ),
    Architecture(
        "U-Net on ResNet-18", "segmentation_models_pytorch", segmentation("Unet", encoder_name="resnet18"), images(64)
    ),
    Architecture(
        "DeepLabV3+ on MobileNetV2",
        "segmentation_models_pytorch",
        segmentation("DeepLabV3Plus", encoder_name="mobilenet_v2"),
        images(64),
    ),
    Architecture("U-Net", "torch", unet, images(16, channels=1)),
    Architecture(
        "BERT, classifier",
        "transformers",
        transformers("BertForSequenceClassification", intermediate_size=64, num_labels=1),
        text,
        "logits",
        '`readout="logits"`',
    ),
    Architecture(
        "BERT, encoder",
        "transformers",
        transformers("BertModel", intermediate_size=64),
        text,
        "pooler_output",
        '`readout="pooler_output"`',
    ),
    Architecture(
        "GPT-2, language model with tied embeddings", "transformers", transformers("GPT2LMHeadModel"), text, **_LAST
    ),
    Architecture(
        "Llama",
        "transformers",
        transformers("LlamaForCausalLM", intermediate_size=64, num_key_value_heads=2),
        text,
        **_LAST,
    ),
    Architecture(
        "T5, encoder and decoder",
        "transformers",
        transformers("T5ForConditionalGeneration", d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4),
        lambda rows: {**text(rows), "decoder_input_ids": text(rows)["input_ids"][:, :4]},
        **_LAST,
    ),
    Architecture(
        "Mixtral, whose experts are no sites",
        "transformers",
        transformers("MixtralForCausalLM", intermediate_size=64, num_key_value_heads=2, num_local_experts=4),
        text,
        **_LAST,
    ),
    Architecture(
        "Mamba",
        "transformers",
        transformers("MambaForCausalLM", state_size=4),
        lambda rows: {"input_ids": text(rows)["input_ids"]},
        **_LAST,
    ),
    Architecture(
        "Wav2Vec 2.0",
        "transformers",
        transformers(
            "Wav2Vec2Model",
            intermediate_size=64,
            conv_dim=(16, 16, 16),
            conv_stride=(5, 2, 2),
            conv_kernel=(10, 3, 3),
            num_feat_extract_layers=3,
            num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=4,
        ),
        lambda rows: {"input_values": torch.randn(rows, 800)},
        lambda output: output.last_hidden_state.mean(1),
        "mean of `last_hidden_state`",
    ),
    Architecture(
        "PatchTST, forecaster",
        "transformers",
        transformers(
            "PatchTSTForPrediction",
            num_input_channels=2,
            context_length=32,
            patch_length=8,
            patch_stride=8,
            d_model=32,
            ffn_dim=64,
            prediction_length=4,
        ),
        lambda rows: {"past_values": torch.randn(rows, 32, 2)},
        "prediction_outputs",
        '`readout="prediction_outputs"`',
    ),
    Architecture("Graph convolution, dense", "torch", GraphConvolution, graphs),
    Architecture("Graph attention, dense", "torch", GraphAttention, graphs),
    Architecture("Message passing on a fixed graph", "torch", message_passing, lambda rows: torch.randn(rows, 7, 5)),
    Architecture("LSTM forecaster", "torch", lambda: forecaster(nn.LSTM, nn.Identity()), series),
    Architecture("LSTM forecaster, embedded input", "torch", lambda: forecaster(nn.LSTM, nn.Linear(4, 4)), series),
    Architecture("GRU forecaster, embedded input", "torch", lambda: forecaster(nn.GRU, nn.Linear(4, 4)), series),
    Architecture("LSTM cell, step by step", "torch", step_forecaster, series),
    Architecture("1-D audio CNN", "torch", audio_cnn, lambda rows: torch.randn(rows, 1, 800)),
    Architecture("Tied autoencoder", "torch", tied_autoencoder, table_rows),
    Architecture("Tied layers", "torch", tied_layers, table_rows),
    Architecture("`nn.Sequential` of anything", "torch", mixed_sequential, images(8, channels=1)),
    Architecture("`parametrizations.weight_norm`", "torch", lambda: mlp(parametrizations.weight_norm), table_rows),
    Architecture("`parametrizations.spectral_norm`", "torch", lambda: mlp(parametrizations.spectral_norm), table_rows),
    Architecture("`parametrizations.orthogonal`", "torch", lambda: mlp(parametrizations.orthogonal), table_rows),
    Architecture("bfloat16 MLP", "torch", half(mlp), lambda rows: table_rows(rows).bfloat16()),
    Architecture(
        "bfloat16 ViT-Tiny/16",
        "timm",
        half(timm("vit_tiny_patch16_224", img_size=48)),
        lambda rows: images(48)(rows).bfloat16(),
    ),
    Architecture("`torch.compile`d MLP", "torch", lambda: torch.compile(mlp(), backend="aot_eager"), table_rows),
    Architecture("`nn.DataParallel`", "torch", lambda: nn.DataParallel(mlp()), table_rows),
    Architecture("`DistributedDataParallel`", "torch", distributed_data_parallel, table_rows),
    Architecture("`LightningModule`", "lightning", lightning_module, table_rows),
    Architecture("TorchScript", "torch", torchscript, table_rows),
]

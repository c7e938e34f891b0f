"""Exported programs are models like others; the eager model that they were made from is the reference."""

import io
import os
from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

import latedrop
from latedrop import LatedropWarning, find_sites, inject, linearize, load_program, propagate, sample
from latedrop.data.rows import take_rows
from latedrop.errors import ArgumentError, FileError, SiteError
from latedrop.network.network import call, read
from networks import Net
from quick import quick
from rounding import assert_same_up_to_rounding
from zoo import ZOO, Case

# Torch's own: about recurrent layers on export, about itself when it decomposes a program, and (2.11) on reading one.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The tensor attributes .* were assigned during export:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),
]

RATE = 0.2
CASES = {case.name: case for case in ZOO}
# Sites of the eager model, and the weights of the program that have the same input.
WEIGHTS = {
    "mlp": {"2": ["2.weight"], "4": ["4.weight"]},
    "batchnorm_cnn": {"4": ["4.weight"], "9": ["9.weight"]},
    "unet": {name: [f"{name}.weight"] for name in ("down2", "up", "merge", "out")},
    "lstm": {"lstm": ["lstm.weight_ih_l0"], "head": ["head.weight"]},
    "time_major_gru": {"gru": ["gru.weight_ih_l0"], "head": ["head.weight"]},
    "transformer": {
        **{f"encoder.layers.{i}.self_attn": [f"encoder.layers.{i}.self_attn.in_proj_weight"] for i in (0, 1)},
        **{f"encoder.layers.{i}.linear{k}": [f"encoder.layers.{i}.linear{k}.weight"] for i in (0, 1) for k in (1, 2)},
        "head": ["head.weight"],
    },
    "attention": {"attention": ["attention.in_proj_weight", "attention.in_proj_weight[8]"], "head": ["head.weight"]},
    "reused": {"again": ["again.weight"], "head": ["head.weight"]},
    "dict_input": {"head": ["head.weight"]},
}
FURTHER = {  # attention's last projection is inside a layer of the eager model
    "transformer": {f"encoder.layers.{i}.self_attn.out_proj.weight" for i in (0, 1)},
    "attention": {"attention.out_proj.weight"},
}


def exported(model: nn.Module, x: Any, rows: Any = None) -> ExportedProgram:
    inputs = x if isinstance(x, tuple) else (x,)
    shapes = tuple({key: {0: rows} for key in part} if isinstance(part, dict) else {0: rows} for part in inputs)
    return export(model.eval(), inputs, dynamic_shapes=None if rows is None else shapes)


@cache
def made(name: str) -> tuple[nn.Module, nn.Module, Any, bytes]:
    """The eager model, its program, inputs, and the archive."""
    torch.manual_seed(0)
    model, x = CASES[name].make()
    archive = io.BytesIO()
    torch.export.save(exported(model, x, Dim("rows")), archive)
    archive.seek(0)
    return model, load_program(torch.export.load(archive)), x, archive.getvalue()


@pytest.fixture(params=WEIGHTS, ids=WEIGHTS.keys())
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def test_sites_and_first_order_variance_are_those_of_the_eager_model(case: Case) -> None:
    model, program, x, _ = made(case.name)
    linear, eager = linearize(program, x, readout=case.readout), linearize(model, x, readout=case.readout)
    ours = {s.name: v for s, v in zip(linear.sites, linear.variance_by_site.unbind(-1), strict=True)}
    weights, further = WEIGHTS[case.name], FURTHER.get(case.name, set())
    assert set(ours) == {name for names in weights.values() for name in names} | further
    assert_same_up_to_rounding(linear.mean, eager.mean)
    for site, expected_rows in zip(eager.sites, eager.variance_by_site.unbind(-1), strict=True):
        assert_same_up_to_rounding(sum(ours[name] for name in weights[site.name]), expected_rows)
    assert all(bool((ours[name] > 0).all()) for name in further)


def test_draws_are_the_same_in_both_engines_and_at_rate_zero_the_program_is_itself(case: Case) -> None:
    model, program, x, _ = made(case.name)
    sites = find_sites(program, x)
    loop = sample(program, x, RATE, 8, sites=sites, readout=case.readout, engine="loop", keep_draws=True)
    # Older versions of torch cannot take some views that programs of attention have inside vmap.
    engine = "auto" if case.name in ("transformer", "lstm", "time_major_gru") else "rows"
    fast = sample(program, x, RATE, 8, sites=sites, readout=case.readout, engine=engine, keep_draws=True)
    assert_same_up_to_rounding(fast.outputs, loop.outputs)
    alone = sample(program, take_rows(x, slice(1, 2)), RATE, 8, sites=sites, readout=case.readout)
    assert_same_up_to_rounding(alone.variance, loop.variance[1:2])
    with torch.no_grad():
        plain = read(call(program, x), case.readout, 6)
        assert_same_up_to_rounding(plain, read(call(model, x), case.readout, 6))
        with inject(program, sites, 0.0):
            # Rate 0 multiplies by 1, on the same batch.
            assert torch.equal(read(call(program, x), case.readout, 6), plain)
    own = sample(program, x, 0.0, sites=sites, readout=case.readout).mean
    assert_same_up_to_rounding(own, plain)
    # Weights of the private copy ask for no gradients, for which torch has another kernel of attention.
    assert case.name in ("attention", "transformer") or torch.equal(own, plain)


@pytest.mark.parametrize("name", ["mlp", "unet", "reused"])
def test_propagated_variance_is_that_of_the_eager_model(name: str) -> None:
    model, program, x, _ = made(name)
    assert_same_up_to_rounding(propagate(program, x, RATE).variance, propagate(model, x, RATE).variance)


def test_propagate_refuses_what_it_refuses_in_the_eager_model() -> None:
    _, program, x, _ = made("lstm")
    with pytest.raises(SiteError, match=r"found a layer of type lstm in the model \(GraphModule\)"):
        propagate(program, x, RATE)


def test_channels_and_masks_of_its_own_for_every_example() -> None:
    _, program, x, _ = made("unet")
    sites = find_sites(program, x, kind="channel", select="*.weight")
    assert [site.units for site in sites] == [(6,), (12,), (12,), (6,)]
    copies = x[:1].expand_as(x)
    own = sample(program, copies, RATE, 8, sites=sites, shared=False, keep_draws=True).outputs
    assert not torch.allclose(own[:, 0], own[:, 5])


@pytest.mark.parametrize(("name", "method"), [("mlp", "sample"), ("transformer", "linear")])
def test_the_whole_road_without_the_source(name: str, method: str, tmp_path: Path) -> None:
    model, _, x, archive = made(name)
    path, file = tmp_path / "model.pt2", tmp_path / "c.json"
    path.write_bytes(archive)
    x = torch.cat([x] * 5)
    y = model(x).detach() + 0.1 * torch.randn(30, 1)
    uq = quick([0.05, 0.2], 10)(load_program(path), (x, y), method=method)
    uq.save(file)
    again = latedrop.load(file, load_program(path))
    # A file keeps every digit, and the batch is the same.
    assert torch.equal(again.predict(x[:7]).variance, uq.predict(x[:7]).variance)
    low, high = again.predict(x).interval(0.9)
    assert bool((low < high).all())
    assert abs(sum(again.explain(x[:1]).sites.values()) - 1) < 1e-6
    with pytest.warns(LatedropWarning, match=r"the sites \[.*weight.*\] did not run in this batch"):
        latedrop.load(file, model).predict(x)


def test_a_fixed_number_of_rows_is_refused() -> None:
    model, _, x, _ = made("mlp")
    with pytest.raises(FileError, match=r"any number of rows; found one .* for 6\. Export it with a dynamic"):
        load_program(exported(model, x))


def test_decomposed_programs_and_blocks_without_gradients() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = net.first(x).relu()
        with torch.autocast("cpu", enabled=False):
            return net.third(torch.tanh(net.second(h)))

    model = Net(run, first=nn.Linear(5, 8), second=nn.Linear(8, 8), third=nn.Linear(8, 1))
    x = torch.randn(6, 5)
    program = exported(model, x, Dim("rows"))
    eager = linearize(model, x).variance_by_site
    for form in (program, program.run_decompositions()):
        linear = linearize(load_program(form), x)
        assert [site.name for site in linear.sites] == ["second.weight", "third.weight"]
        assert_same_up_to_rounding(linear.variance_by_site, eager)


def test_keywords_and_devices() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.head = nn.Linear(3, 4), nn.Linear(2, 4), nn.Linear(4, 1)

        def forward(self, left: Tensor, *, right: Tensor) -> Tensor:
            return self.head(torch.tanh(self.left(left) + self.right(right)))

    model, x = Two().eval(), {"left": torch.randn(6, 3), "right": torch.randn(6, 2)}
    shapes = {"left": {0: Dim.DYNAMIC}, "right": {0: Dim.DYNAMIC}}
    program = load_program(export(model, (x["left"],), {"right": x["right"]}, dynamic_shapes=shapes), device="cpu")
    assert_same_up_to_rounding(linearize(program, x).variance_by_site, linearize(model, x).variance_by_site)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_program_on_another_device() -> None:
    """An LSTM's first state is made inside the program: it has to move too, and its weights share one storage."""
    *_, x, archive = made("lstm")
    program = load_program(torch.export.load(io.BytesIO(archive)), device="cuda")
    here = load_program(torch.export.load(io.BytesIO(archive)))
    assert find_sites(program, x.cuda()) == find_sites(here, x)
    ours, linear = linearize(program, x), linearize(here, x)
    torch.testing.assert_close(ours.variance_by_site.cpu(), linear.variance_by_site, rtol=1e-3, atol=1e-6)
    assert bool((sample(program, x, RATE, 8).variance > 0).all())


def test_train_mode_is_refused() -> None:
    x = torch.randn(6, 5)
    dropout = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    norm = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    lstm = nn.LSTM(5, 4, num_layers=2, dropout=0.5)
    for model, operator in ((dropout, "dropout"), (norm, "batch_norm"), (lstm, "lstm")):
        with pytest.raises(FileError, match=rf"exported in eval mode; found \['aten.{operator}.*Call model.eval\(\)"):
            load_program(export(model.train(), (x,)))
    for model in (dropout, norm, nn.Sequential(nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, 1))):
        load_program(exported(model, x, Dim("rows")))


def rewritten(archive: bytes, change: Callable[[str, bytes], bytes | None], **more: bytes) -> bytes:
    out = io.BytesIO()
    with ZipFile(io.BytesIO(archive)) as old, ZipFile(out, "w") as new:
        root = old.namelist()[0].partition("/")[0]
        for name in old.namelist():
            content = change(name, old.read(name))
            if content is not None:
                new.writestr(name, content)
        for name, content in more.items():
            new.writestr(f"{root}/{name}", content)
    return out.getvalue()


def test_files_that_are_none(tmp_path: Path) -> None:
    *_, archive = made("mlp")
    weights = io.BytesIO()
    torch.save(nn.Linear(2, 2).state_dict(), weights)
    files = {
        "text": (b"hello", "found another kind of file, half of one"),
        "half": (archive[: len(archive) // 2], "found another kind of file, half of one"),
        "compiled": (rewritten(archive, lambda n, c: c, **{"data/aotinductor/model/a.so": b""}), "or machine code"),
        "weights": (weights.getvalue(), "found another kind of file.*Export the Python model"),
        "zip": (rewritten(archive, lambda n, c: None, readme=b"hello"), "found another kind of file"),
        "damaged": (rewritten(archive, lambda n, c: b"{}" if n.endswith("model.json") else c), "can read from"),
    }
    with pytest.raises(FileError, match=r"expected an exported program at .*the system says"):
        load_program(tmp_path / "nowhere.pt2")
    for name, (content, message) in files.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(FileError, match=message):
            load_program(tmp_path / name)


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["LATEDROP_EVIL"],)


@pytest.mark.parametrize("variable", [None, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"])
def test_nothing_is_unpickled(variable: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, x, archive = made("mlp")
    monkeypatch.setenv("LATEDROP_EVIL", str(tmp_path / "evil"))
    if variable:
        monkeypatch.setenv(variable, "1")
    before = dict(os.environ)
    for keywords in ({"extra": Evil()}, defaultdict(Fraction)):
        buffer = io.BytesIO()
        torch.save(((x,), keywords), buffer)
        path = tmp_path / "model.pt2"
        path.write_bytes(rewritten(archive, lambda n, c, b=buffer: b.getvalue() if "sample_inputs" in n else c))
        with pytest.raises(FileError, match=r"it holds pickled objects.*load the program by torch.export.load"):
            load_program(path)
        assert not (tmp_path / "evil").exists()
        assert dict(os.environ) == before


def test_a_program_itself_is_not_a_model() -> None:
    model, _, x, _ = made("mlp")
    with pytest.raises(ArgumentError, match=r"found ExportedProgram.*latedrop.load_program\(program\)"):
        find_sites(exported(model, x), x)

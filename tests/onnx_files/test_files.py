"""Files of ONNX: read without torch, refused where they cannot be written or read, and checked before they are left."""

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import latedrop
from latedrop.errors import ArgumentError, DataError, FileError, OutputError
from latedrop.onnx_files import tracing
from latedrop.onnx_files.derivatives import decompositions
from latedrop.onnx_files.metadata import sealed
from networks import Net, mlp
from rounding import assert_same_up_to_rounding

onnx = pytest.importorskip("onnx", reason="needs the extra onnx")

DRAWS = {"method": latedrop.Sampling(rates=[0.3], draws=20)}
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(60, 3, generator=GENERATOR)
Y = X.sum(1, keepdim=True) + torch.randn(60, 1, generator=GENERATOR)


def net(*last: nn.Module) -> nn.Module:
    return nn.Sequential(*mlp(3, 8, 1), *last)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    uq = latedrop.calibrate(net(), (X, Y), method="linear", progress=False)
    return uq, uq.to_onnx(tmp_path_factory.mktemp("onnx") / "model.onnx", X[:4])


NO_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("torch", "onnx", "tqdm"):
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, NoTorch())
import numpy as np
import latedrop
from latedrop import LatedropError, load_onnx

predictor = load_onnx(sys.argv[1])
found = predictor.predict(np.load(sys.argv[2]))
low, high = found.interval(0.5)
np.savez(sys.argv[3], mean=found.mean, std=found.std, low=low, high=high)
assert "torch" not in sys.modules
assert "load_onnx" in dir(latedrop)
try:
    predictor.predict(np.zeros((2, 9)))
except LatedropError:
    pass
else:
    raise AssertionError("a wrong shape was taken")
"""


def test_a_file_is_read_where_there_is_no_torch(written: tuple[Any, Path], tmp_path: Path) -> None:
    uq, path = written
    rows, out = tmp_path / "rows.npy", tmp_path / "out.npz"
    np.save(rows, X.numpy())
    words = [sys.executable, "-W", "error", "-c", NO_TORCH, str(path), str(rows), str(out)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    arrays, p = np.load(out), uq.predict(X)
    low, high = p.interval(0.5)
    for name, value in {"mean": p.mean, "std": p.std, "low": low, "high": high}.items():
        assert_same_up_to_rounding(arrays[name], value.numpy())


def test_names_and_metadata(written: tuple[Any, Path]) -> None:
    uq, path = written
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert [output.name for output in model.graph.output] == ["mean", "std", "low", "high"]
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "rows"
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    whole = json.loads(metadata["latedrop.calibration"])["latedrop"]
    assert whole["fingerprint"] == uq.calibration.fingerprint
    assert whole["table"][0]["scale"] == list(uq.calibration.scales)


ODD = Net(lambda net, x: x + 0.0 * torch.special.bessel_j0(x))
"""An operator without a translation after the last layer."""


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (net(ODD), DRAWS, "with the operator prims.bessel_j0, which torch.onnx cannot translate"),
        (net(), {"method": latedrop.Sampling([0.3], 20, shared=False)}, "shared=False"),
        (net().bfloat16(), {"method": "linear"}, "bfloat16"),
        (net(), {"method": latedrop.Terms(["neighbours"])}, "nearest of other rows"),
    ],
    ids=["operator", "own masks", "half precision", "neighbours"],
)
def test_what_cannot_be_written_is_refused(model: nn.Module, options: Any, words: str, tmp_path: Path) -> None:
    x = X.to(next(model.parameters()).dtype)
    uq = latedrop.calibrate(model, (x, Y), progress=False, **options)
    with pytest.raises(ArgumentError, match="expected a model that can be written as an ONNX file") as caught:
        uq.to_onnx(tmp_path / "model.onnx", x[:4])
    assert words in str(caught.value)
    assert not (tmp_path / "model.onnx").exists()


def test_rows_that_meet_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 8), Net(lambda net, x: x - 0.5 * x.mean(0)), nn.Linear(8, 1))
    with pytest.warns(latedrop.LatedropWarning, match="do not depend on each other"):
        uq = latedrop.calibrate(model, (X, Y), **DRAWS, progress=False)
    with pytest.raises(ArgumentError, match="whose rows affect each other"):
        uq.to_onnx(tmp_path / "model.onnx", X[:4])


def test_a_file_that_says_something_else_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uq = latedrop.calibrate(net(), (X, Y), method="linear", progress=False)
    monkeypatch.setitem(decompositions(), torch.ops.aten.tanh.default, torch.sigmoid)
    with pytest.raises(ArgumentError, match="whose file gives another mean"):
        uq.to_onnx(tmp_path / "model.onnx", X[:4])
    assert not (tmp_path / "model.onnx").exists()


@pytest.mark.parametrize("level", [0, 1, "high"])
def test_a_wrong_level(level: Any, written: tuple[Any, Path], tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="a probability inside"):
        written[0].to_onnx(tmp_path / "model.onnx", X[:4], level=level)
    with pytest.raises(ArgumentError, match="a probability inside"):
        latedrop.load_onnx(written[1]).predict(X.numpy()).interval(level)


def test_wrong_files(written: tuple[Any, Path], tmp_path: Path) -> None:
    with pytest.raises(FileError, match="an ONNX file"):
        latedrop.load_onnx(tmp_path / "absent.onnx")
    model, half = onnx.load(written[1]), written[1].read_bytes()[:500]
    del model.metadata_props[:]
    for content in (b"", half, model.SerializeToString()):
        (tmp_path / "other.onnx").write_bytes(content)
        with pytest.raises(FileError, match="that latedrop wrote, unchanged since"):
            latedrop.load_onnx(tmp_path / "other.onnx")


def test_one_flipped_bit_anywhere_is_refused_before_onnxruntime_sees_it(
    written: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnxruntime

    content, damaged = written[1].read_bytes(), tmp_path / "damaged.onnx"
    weights = written[0].model[0].weight.detach().numpy()
    stored = weights.tobytes() if weights.tobytes() in content else weights.T.tobytes()
    assert stored in content  # so that weights are among the bytes
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda *_, **__: pytest.fail("onnxruntime got the bytes"))
    for place in {*range(0, len(content), 97), content.index(stored), len(content) - 1}:
        for bit in (0, 7):
            other = bytearray(content)
            other[place] ^= 1 << bit
            damaged.write_bytes(other)
            with pytest.raises(FileError, match="the checksum does not match"):
                latedrop.load_onnx(damaged)


def edited_record(model: Any, **fields: Any) -> None:
    entry = next(entry for entry in model.metadata_props if entry.key == "latedrop")
    data = json.loads(entry.value)["latedrop"]
    data["format"] = fields.pop("format", data["format"])
    data["model"].update(fields)
    entry.value = json.dumps({"latedrop": data})


def other_type(model: Any) -> None:
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.STRING


def external_weights(model: Any) -> None:
    weights = max(model.graph.initializer, key=lambda values: len(values.raw_data))
    Path("weights.bin").write_bytes(weights.raw_data)
    weights.ClearField("raw_data")
    weights.data_location = onnx.TensorProto.EXTERNAL
    weights.external_data.add(key="location", value="weights.bin")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda model: edited_record(model, level=float("nan")), "NaN is no number of JSON"),
        (lambda model: edited_record(model, columns=3), "metadata.model.columns"),
        (lambda model: edited_record(model, format=1), "found format 1"),
        (lambda model: edited_record(model, intervals={"kind": "conformal"}), "metadata.model.intervals"),
        (other_type, "onnxruntime can run"),
        (external_weights, "onnxruntime can run"),
    ],
)
def test_what_somebody_edited_and_sealed_again_is_refused_in_our_words(
    edit: Any, words: str, written: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    model = onnx.load(written[1])
    edit(model)
    (tmp_path / "edited.onnx").write_bytes(sealed(model.SerializeToString()))
    with pytest.raises(FileError, match=words):
        latedrop.load_onnx(tmp_path / "edited.onnx")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (np.zeros((4, 2)), r"of shape \(N, 3\); found \(4, 2\)"),
        (np.full((4, 3), np.nan), "found 12 NaN or inf"),
        (np.array([["a", "b", "c"]]), "expected numbers"),
        ([[1.0, 2.0, 3.0], [1.0]], "as many in every row"),
        (np.zeros((0, 3)), "at least one row"),
        ({"other": np.zeros((4, 3))}, "expected the inputs"),
    ],
    ids=["shape", "nan", "texts", "ragged", "no rows", "name"],
)
def test_wrong_rows(rows: Any, words: str, written: tuple[Any, Path]) -> None:
    with pytest.raises(DataError, match=words):
        latedrop.load_onnx(written[1]).predict(rows)


def test_numbers_that_do_not_fit_are_no_predictions(written: tuple[Any, Path]) -> None:
    uq, path = written
    far = X[:3].double() * 1e300
    for predict, rows in ((uq.predict, far), (latedrop.load_onnx(path).predict, far.numpy())):
        with pytest.raises(DataError, match=r"that fit .*float32, the model's dtype; found 9 of 9"):
            predict(rows)


@pytest.mark.filterwarnings("ignore:nothing is known of 2 of 5 rows")
def test_rows_whose_output_is_not_finite_are_flagged(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(), nn.Linear(8, 1))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 3.0)
    uq = latedrop.calibrate(model, (X, model(X).detach() + Y), method="linear", progress=False)
    read = latedrop.load_onnx(uq.to_onnx(tmp_path / "model.onnx", X[:4]))
    rows = torch.cat([X[:3], torch.full((2, 3), 1e38)])
    for predict, given in ((uq.predict, rows), (read.predict, rows.numpy())):
        prediction = predict(given)
        low, high = prediction.interval(0.5)
        assert np.isfinite(np.asarray(prediction.mean)).ravel().tolist() == [True] * 3 + [False] * 2
        assert np.isfinite(np.asarray(prediction.std)).all()
        assert np.asarray(low)[3:].max() < -1e38
        assert np.asarray(high)[3:].min() > 1e38
        assert_same_up_to_rounding(np.asarray(high)[:3], uq.predict(rows[:3]).interval(0.5)[1])
        with pytest.raises(OutputError, match="expected a finite output; found NaN or inf"):
            predict(given[3:])


def test_kinds_are_whole_numbers_of_the_table(tmp_path: Path) -> None:
    def run(net: Net, x: Tensor, kind: Tensor) -> Tensor:
        return net.last(torch.tanh(net.first(torch.cat([x, net.table(kind)], 1))))

    model = Net(run, table=nn.Embedding(4, 3), first=nn.Linear(6, 8), last=nn.Linear(8, 1))
    kinds = torch.arange(60) % 4
    uq = latedrop.calibrate(model, ((X, kinds), Y), method="linear", progress=False)
    read = latedrop.load_onnx(uq.to_onnx(tmp_path / "model.onnx", (X[:4], kinds[:4])))
    expected = uq.predict((X, kinds)).mean.numpy()
    assert_same_up_to_rounding(read.predict((X.numpy(), kinds.numpy())).mean, expected)
    assert_same_up_to_rounding(read.predict((X.numpy(), kinds.double().numpy())).mean, expected)
    for wrong, words in (
        (kinds.numpy() + 0.5, "that fit int64"),
        (kinds.numpy() * 1e30, "that fit int64"),
        (kinds.numpy() - 1, "that the file takes"),
        (kinds.numpy() + 1, "that the file takes"),
    ):
        with pytest.raises(DataError, match=words):
            read.predict((X.numpy(), wrong))


@pytest.mark.parametrize(
    ("name", "value"),
    [("batch_size", 0), ("batch_size", 2.5), ("threads", 0), ("threads", "2"), ("providers", "CPU"), ("providers", [])],
)
def test_wrong_options(name: str, value: Any, written: tuple[Any, Path]) -> None:
    with pytest.raises(ArgumentError, match=name):
        latedrop.load_onnx(written[1], **{name: value})


def test_batches_and_tables(written: tuple[Any, Path], tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    whole, parts = (latedrop.load_onnx(written[1], batch_size=size, threads=1).predict(X.numpy()) for size in (256, 7))
    assert_same_up_to_rounding(parts.std, whole.std)
    frame = pandas.DataFrame(X.numpy(), columns=["a", "b", "c"])
    uq = latedrop.calibrate(net(), (frame, Y), method="linear", progress=False)
    path = uq.to_onnx(tmp_path / "model.onnx", frame[:4])
    prediction = latedrop.load_onnx(path).predict(frame[["c", "a", "b"]])
    assert_same_up_to_rounding(prediction.mean, whole.mean)
    with pytest.raises(DataError, match="expected the columns"):
        latedrop.load_onnx(path).predict(frame[["a", "b"]])


def test_sizes_that_grow_unevenly_are_refused() -> None:
    def squared(x: Tensor) -> list[Tensor]:
        return [torch.zeros(x.shape[0] ** 2 + (x.shape[0] == 5)) + x.sum()]

    with pytest.raises(ArgumentError, match="grow unevenly"):
        tracing.traced_for_any_rows(squared, lambda n: [torch.ones(n, 2)])


@pytest.mark.parametrize(
    ("off", "refused"),
    [
        ([9e-5] * 12, False),
        ([2e-4, *[1e-7] * 11], False),  # one row at a jump of the gradient
        ([2e-4] * 12, True),
        ([2e-4] * 7 + [1e-7] * 5, True),
        ([5e-2, *[1e-7] * 11], True),
        ([float("nan"), *[0.0] * 11], True),
    ],
    ids=["rounding", "a jump", "all", "most", "one by much", "nan"],
)
def test_a_few_rows_may_jump_and_no_more(off: list[float], refused: bool) -> None:
    from latedrop.onnx_files.writing import _judge

    with pytest.raises(ArgumentError, match="gives another std") if refused else nullcontext():
        _judge("std", np.array(off))

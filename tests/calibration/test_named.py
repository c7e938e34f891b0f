"""The user's model by name: code, weights, exported programs; nothing is unpickled."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from latedrop.errors import ArgumentError, FileError, LatedropError
from latedrop.named import as_arguments, load_model

CODE = """
import torch
from torch import nn

number = 3
ready = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 1)

    def forward(self, x):
        return self.second(self.first(x).relu())

class Space:
    net = Net

def build():
    return Net()

def broken():
    raise RuntimeError("no such checkpoint")

def needs(size):
    return Net()

def nothing():
    return None
"""

LOADS = """
import torch
from torch import nn
from user_code import Net

class Loads(Net):
    def __init__(self):
        super().__init__()
        self.load_state_dict(torch.load("own.pt", weights_only=True))

def loads():
    return Loads()

def lazy():
    return nn.LazyLinear(2)

loaded = Loads() if __import__("os").path.exists("own.pt") else None
"""


@pytest.fixture(autouse=True)
def module(user_folder: Path) -> Path:
    """A folder with the module user_code, as the current one."""
    needs = "import a_package_that_is_not_there\n"
    for name, code in {"code": CODE, "needs": needs, "loads": LOADS, "typo": "def f(:\n"}.items():
        (user_folder / f"user_{name}.py").write_text(code)
    return user_folder


def net() -> nn.Module:
    import user_code  # type: ignore[import-not-found]

    return user_code.Net()


class TestCode:
    @pytest.mark.parametrize("name", ["user_code:build", "user_code:ready"])
    def test_a_function_or_a_module(self, name: str) -> None:
        assert load_model(name, untrained=True)(torch.zeros(2, 3)).shape == (2, 1)

    @pytest.mark.parametrize("name", ["Net", "Space.net", "build"])
    def test_random_weights_are_refused(self, name: str) -> None:
        message = f"user_code:{name} to have trained weights; found random ones: made twice, first.weight, .*--weights"
        with pytest.raises(ArgumentError, match=message):
            load_model(f"user_code:{name}")
        assert isinstance(load_model(f"user_code:{name}", untrained=True), nn.Module)

    @pytest.mark.parametrize("name", ["Loads", "loads", "loaded"])
    def test_code_that_loads_its_own_weights(self, name: str, module: Path) -> None:
        load_model("user_code:build", untrained=True)
        trained = net()
        torch.save(trained.state_dict(), module / "own.pt")
        model = load_model(f"user_loads:{name}")
        assert torch.equal(model.state_dict()["first.weight"], trained.state_dict()["first.weight"])

    def test_weights_that_are_not_there_yet(self) -> None:
        with pytest.raises(ArgumentError, match="made twice, weight, bias came out different"):
            load_model("user_loads:lazy")

    @pytest.mark.parametrize(
        ("name", "error", "message"),
        [
            ("user_code", ArgumentError, "expected package.module:callable or a .pt2 file; found 'user_code'"),
            (":build", ArgumentError, "expected package.module:callable"),
            ("user_code:", ArgumentError, "expected package.module:callable"),
            ("model.onnx", ArgumentError, "expected package.module:callable or a .pt2 file; found 'model.onnx'"),
            ("user_code.py:build", ArgumentError, "Write user_code:build, without .py"),
            ("./folder/code.py:build", ArgumentError, "Write folder.code:build, without .py"),
            (r"folder\code.py:build", ArgumentError, "Write folder.code:build, without .py"),
            ("nowhere:build", ArgumentError, "a Python module 'nowhere' in the current folder or installed"),
            ("user_code.part:build", ArgumentError, "a Python module 'user_code.part'"),
            ("user_code:Nett", ArgumentError, "expected 'Nett' in user_code; .*Did you mean 'Net'"),
            ("user_code:zzzz", ArgumentError, r"What can be called there: .*Net, Space, build"),
            ("user_code:number", ArgumentError, "a module or a function that returns one at .*; found int"),
            ("user_code:nothing", ArgumentError, "to return a torch.nn.Module; found NoneType"),
            ("user_code:broken", LatedropError, "it raised RuntimeError: no such checkpoint"),
            ("user_code:needs", LatedropError, "missing 1 required .*It is called without arguments"),
            ("user_needs:net", LatedropError, "it needs a_package_that_is_not_there, which is not installed"),
            ("user_typo:f", LatedropError, "expected to import user_typo; it raised SyntaxError"),
        ],
    )
    def test_what_is_wrong(self, name: str, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            load_model(name)


class TestWeights:
    def check(self, path: str, trained: nn.Module, **settings: Any) -> None:
        loaded = load_model("user_code:Net", path, **settings)
        assert all(torch.equal(value, trained.state_dict()[name]) for name, value in loaded.state_dict().items())

    @pytest.mark.parametrize("kind", ["pt", "safetensors"])
    def test_state_dict(self, kind: str) -> None:
        save = torch.save if kind == "pt" else pytest.importorskip("safetensors.torch").save_file
        load_model("user_code:build", untrained=True)
        trained = net()
        save(trained.state_dict(), f"net.{kind}")
        self.check(f"net.{kind}", trained)

    @pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model"])
    @pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod."])
    def test_checkpoints(self, key: str, prefix: str) -> None:
        load_model("user_code:build", untrained=True)
        trained = net()
        weights = {prefix + name: value for name, value in trained.state_dict().items()}
        torch.save({key: weights, "epoch": 3}, "net.ckpt")
        self.check("net.ckpt", trained)

    def test_a_whole_module_is_not_unpickled(self) -> None:
        load_model("user_code:build", untrained=True)
        torch.save(net(), "whole.pt")
        with pytest.raises(FileError, match=r"reading it raised UnpicklingError.* in your own code, and name that"):
            load_model("user_code:Net", "whole.pt")
        with pytest.raises(ArgumentError, match=r"found 'whole.pt'.* weights go to --weights"):
            load_model("whole.pt")

    def test_weights_of_another_model(self) -> None:
        torch.save(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)).state_dict(), "other.pt")
        message = 'torch says: .*Missing key.*: "first.weight", .*Unexpected key.*: "0.weight", "0.bias"'
        with pytest.raises(FileError, match=f"expected weights of user_code:Net in other.pt; {message}"):
            load_model("user_code:Net", "other.pt")

    def test_without_safetensors(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "safetensors", None)
        with pytest.raises(LatedropError, match=r"expected safetensors .*latedrop\[safetensors\]"):
            load_model("user_code:Net", "net.safetensors")

    def test_code_in_a_file_does_not_run(self) -> None:
        class Evil:
            def __reduce__(self) -> tuple[Any, ...]:
                return Path.touch, (Path("touched"),)

        torch.save({"weight": Evil()}, "evil.pt")
        for name, weights in (("evil.pt", None), ("user_code:Net", "evil.pt")):
            with pytest.raises(LatedropError):
                load_model(name, weights)
        assert not Path("touched").exists()


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return self.second(self.first(x) + shift)


@pytest.mark.parametrize("named", [False, True])
def test_inputs_of_a_program_in_order_or_by_name(named: bool) -> None:
    x, shift = torch.randn(4, 3), torch.randn(4, 4)
    args, kwargs = ((), {"x": x, "shift": shift}) if named else ((x, shift), {})
    count = torch.export.Dim("rows", min=2)
    shapes = {"x": {0: count}, "shift": {0: count}}
    torch.export.save(torch.export.export(TwoInputs().eval(), args, kwargs, dynamic_shapes=shapes), "two.pt2")
    program = load_model("two.pt2", device="cpu" if named else "auto")
    inputs = as_arguments(program, {"shift": shift, "x": x} if named else {"a": x, "b": shift})
    assert isinstance(inputs, dict if named else tuple)
    assert (program(**inputs) if named else program(*inputs)).shape == (4, 1)

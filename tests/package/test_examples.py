"""Every example runs cell by cell, as a notebook does: it prints, draws its picture, warns of nothing."""

import contextlib
import random
import re
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from architectures import missing

with contextlib.suppress(ImportError):
    import rich.style  # noqa: F401 - scikit-learn imports it late, and it takes a random number when it is imported
with contextlib.suppress(ImportError), warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch_geometric  # noqa: F401 - it calls what torch has deprecated when it is imported

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {"hf_trainer": ("transformers", "accelerate"), "lightning_predict": ("lightning",), "timm_images": ("timm",)}
NEEDS |= {"language_model": ("transformers",)}
NEEDS |= {"graphs": ("torch_geometric",), "potential": ("torch_geometric", "ase")}
NEEDS |= {"onnx_file": ("onnx", "onnxruntime"), "count_people": ("scipy", "PIL", "safetensors")}
FOUND = {"magnet_core_loss": ("magnet", "h5py"), "pitch_of_tones": ("torchcrepe",)}  # torchcrepe does not import whole
SEEDS_ALL = {"hf_trainer"}  # a Trainer of transformers seeds every generator when it is made
MODULES = {"my_model", "noise_model"}  # for the command line, which imports them
QUICK = {"count_people", "drift", "onnx_file", "tabular"}
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
MARKED = [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow, id=n) for n in NAMES]


def cells(name: str) -> list[tuple[str, str]]:
    """Kind and text of the cells, in jupytext's percent format: a line `# %%`, or `# %% [markdown]`, begins each."""
    parts = re.split(r"^# %%(.*)\n", (EXAMPLES / f"{name}.py").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [
        ("markdown" if "[markdown]" in head else "code", text)
        for head, text in zip(parts[1::2], parts[2::2], strict=True)
    ]


@pytest.mark.parametrize("name", sorted(set(NAMES) - MODULES))
def test_an_example_is_a_notebook(name: str) -> None:
    kinds = [kind for kind, _ in cells(name)]
    words = [text for kind, text in cells(name) if kind == "markdown"]
    assert (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").startswith("# %% [markdown]\n")
    assert kinds.count("code") >= 3
    assert all(line.startswith("#") or not line for text in words[1:] for line in text.splitlines())


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec")  # Lightning's own
@pytest.mark.parametrize("name", MARKED)
def test_example_runs(name: str, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = NEEDS.get(name, ())
    absent = [library for library in missing("torchvision", *wanted) if library in wanted] if wanted else []
    absent += [library for library in FOUND.get(name, ()) if find_spec(library) is None]
    if absent:
        pytest.skip(f"not installed: {', '.join(absent)}")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.chdir(tmp_path)
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        run(name, monkeypatch)
    if name in SEEDS_ALL:
        random.setstate(states[0])
        np.random.set_state(states[1])
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1][1].tolist()
    assert capsys.readouterr().out
    assert [path.stem for path in tmp_path.rglob("*.png")] == ([] if name in MODULES else [name])
    import matplotlib.pyplot as plt

    for path in tmp_path.rglob("*.png"):
        assert plt.imread(path).shape[1] >= 1000
    plt.close("all")


def run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cell after cell in one module, which has no file, as in a notebook."""
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)  # where dataclasses look for their own module
    code = [text for kind, text in cells(name) if kind == "code"]
    for number, text in enumerate(code or [(EXAMPLES / f"{name}.py").read_text(encoding="utf-8")]):
        exec(compile(text, f"{name}, cell {number}", "exec"), vars(module))

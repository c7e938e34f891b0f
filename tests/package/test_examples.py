"""Every example runs cell by cell, as a notebook does: it prints its headline, draws its picture, warns of nothing."""

import contextlib
import random
import re
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from architectures import missing

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")
pytest.importorskip("pandas")
with contextlib.suppress(ImportError):
    import rich.style  # noqa: F401 - scikit-learn imports it late, and it takes a random number when it is imported
with contextlib.suppress(ImportError), warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch_geometric  # noqa: F401 - it calls what torch has deprecated when it is imported

EXAMPLES = Path(__file__).parents[2] / "examples"
# What each must print; the numbers themselves may differ in the last digits from machine to machine.
HEADLINES = {
    "another_population": "of the new machines",
    "boxes": "within the margins of 90 %",
    "band": "in the gap     the 90 % interval holds",
    "count_people": "the 90 % interval holds",
    "conformal": "share of 5000 fresh rows inside the interval",
    "density_map": "over draws the count has std",
    "digits": "that the rule keeps",
    "drift": "of the rows with the stream",
    "exported_program": "of 500 fresh rows",
    "forecast": "of 6000 fresh values",
    "labelling": "of digits right with",
    "language_model": "next character:",
    "magnet_core_loss": "the 90 % interval holds",
    "molecules": "of 300 fresh molecules",
    "my_model": "written: net.pt, train.csv, val.csv, test.csv, new.csv",
    "graphs": "of the large ones",
    "hf_trainer": "of 500 fresh reviews",
    "images": "weights and BatchNorm statistics unchanged: True",
    "lightning_predict": "20 batches with mean, std, low, high",
    "onnx_file": "largest difference between torch and onnxruntime",
    "pitch_of_tones": "90 % interval holds  other notes",
    "regions": "share of 2000 fresh paths",
    "potential": "the dynamics stopped after",
    "save_load": "same predictions after loading: True",
    "segmentation": "of 200 fresh images",
    "several_labels": "labels missing a tenth",
    "sklearn_pipeline": "of 111 test rows",
    "tabular": "of 110 test rows",
    "timm_images": "of 500 fresh images",
    "tokens": "of 500 fresh sequences",
    "units": "with one scale for all:",
}
NEEDS = {"hf_trainer": ("transformers", "accelerate"), "lightning_predict": ("lightning",), "timm_images": ("timm",)}
NEEDS |= {"language_model": ("transformers",)}
NEEDS |= {"graphs": ("torch_geometric",), "potential": ("torch_geometric", "ase")}
NEEDS |= {"onnx_file": ("onnx", "onnxruntime"), "count_people": ("scipy", "PIL", "safetensors")}
FOUND = {"magnet_core_loss": ("magnet", "h5py"), "pitch_of_tones": ("torchcrepe",)}  # torchcrepe does not import whole
SEEDS_ALL = {"hf_trainer"}  # a Trainer of transformers seeds every generator when it is made
MODULES = {"my_model"}  # for the command line, which imports it
QUICK = {"count_people", "drift", "onnx_file", "tabular"}
NAMES = [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow, id=n) for n in sorted(HEADLINES)]


def cells(name: str) -> list[tuple[str, str]]:
    """Kind and text of the cells, in jupytext's percent format: a line `# %%`, or `# %% [markdown]`, begins each."""
    parts = re.split(r"^# %%(.*)\n", (EXAMPLES / f"{name}.py").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [
        ("markdown" if "[markdown]" in head else "code", text)
        for head, text in zip(parts[1::2], parts[2::2], strict=True)
    ]


def test_every_example_has_a_headline() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(HEADLINES)


@pytest.mark.parametrize("name", sorted(set(HEADLINES) - MODULES))
def test_an_example_is_a_notebook(name: str) -> None:
    kinds = [kind for kind, _ in cells(name)]
    words = [text for kind, text in cells(name) if kind == "markdown"]
    assert (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").startswith("# %% [markdown]\n")
    assert kinds.count("code") >= 3
    assert "What to see: " in words[-1]
    assert all(line.startswith("#") or not line for text in words[1:] for line in text.splitlines())


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec")  # Lightning's own
@pytest.mark.parametrize("name", NAMES)
def test_example_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert HEADLINES[name] in capsys.readouterr().out
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

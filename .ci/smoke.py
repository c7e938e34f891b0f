"""What a release must do where it is installed; `make dist` runs it far from the repository, and under mypy --strict.

`python smoke.py` is for latedrop alone, `commands` behind it for `latedrop[cli]`, `crowd` for latedrop-crowd beside it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor, nn

import latedrop

COUNTER = (".safetensors", ".calibration.json")
COMMAND = [sys.executable, "-c", "from latedrop.cli import main; main()"]


def regression(folder: Path) -> tuple[Tensor, Tensor]:
    """Both ends of an interval, from a predictor that was saved and loaded again."""
    x = torch.linspace(-1, 1, 64)[:, None]
    model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
    y = model(x).detach() + 0.1 * torch.randn(64, 1)
    uq: latedrop.Predictor = latedrop.calibrate(model, (x, y), task="regression", progress=False)
    uq.save(folder / "model.latedrop.json")
    again: latedrop.Predictor = latedrop.load(folder / "model.latedrop.json", model)
    p: latedrop.Prediction = again.predict(x)
    assert torch.equal(p.variance, uq.predict(x).variance)
    assert bool((p.std > 0).all())
    return p.interval(0.9)


def classes() -> Tensor:
    """Which classes a prediction set holds."""
    x = torch.randn(120, 4)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))
    labels = (model(x) + 0.1 * torch.randn(120, 4)).argmax(1)
    uq = latedrop.calibrate(model, (x, labels), task="classification", progress=False)
    p: latedrop.ClassPrediction = uq.conformal((x, labels)).predict(x)
    return p.prediction_set(0.9)


def package_data(crowd: bool) -> None:
    """The marker for type checkers is there; trained counters and the console's page only with latedrop-crowd."""
    assert files("latedrop").joinpath("py.typed").is_file(), "py.typed is missing"
    assert not [path for path in files("latedrop").iterdir() if path.name in ("crowd", "console", "studies")]
    if not crowd:
        return
    package = files("latedrop_crowd")
    names = ["py.typed", "console/page/index.html"]
    names += [f"weights/{name}{end}" for name in ("scenes", "mall", "ucsd", "pets") for end in COUNTER]
    for name in names:
        assert package.joinpath(name).is_file(), f"{name} is missing"


def said(*words: str) -> str:
    """What the command prints."""
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def without_commands() -> None:
    """Without its extra the command says which one it needs."""
    done = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert 'pip install "latedrop[cli]"' in done.stderr, done.stderr


def with_commands() -> None:
    """The command prints its help, and says what people counting needs."""
    assert "calibrate" in said("--help")
    assert said("--version").split() == ["latedrop", version("latedrop")]
    done = subprocess.run([*COMMAND, "crowd", "count"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install latedrop-crowd" in done.stderr, done.stderr


def with_crowd(folder: Path) -> None:
    """The command finds those of latedrop-crowd, and counts people in a picture with a counter that this ships."""
    assert "crowd" in said("--help")
    assert version("latedrop-crowd") == version("latedrop")
    from PIL import Image

    picture = folder / "square.png"
    Image.new("L", (192, 144), 128).save(picture)
    said("crowd", "count", str(picture), "--weights", "scenes", "--out", str(folder / "counts"), "--no-panels")
    assert "square.png" in (folder / "counts" / "counts.csv").read_text(encoding="utf-8")


def main() -> None:
    """All of it."""
    assert version("latedrop") == latedrop.__version__
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        low, high = regression(Path(folder))
        assert low.shape == high.shape == (64, 1)
        assert classes().shape == (120, 4)
        package_data(crowd=sys.argv[1:] == ["crowd"])
        if sys.argv[1:] == ["crowd"]:
            with_crowd(Path(folder))
        elif sys.argv[1:] == ["commands"]:
            with_commands()
        else:
            without_commands()
    print(f"latedrop {latedrop.__version__} of {Path(latedrop.__file__).parent}: it works")


if __name__ == "__main__":
    main()

"""How many files and functions of latedrop a call enters, by `sys.setprofile`: `python -m benchmarks.hops`

Each case runs once before, so that imports and cached values do not count.
"""

import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import latedrop
from benchmarks.nets import Residual, mlp
from benchmarks.timing import machine, markdown_table, write

RATES, DRAWS, ROWS = (0.05, 0.1, 0.2), 20, 64
METHODS = {"terms": "terms", "sample": latedrop.Sampling(RATES, DRAWS), "linear": "linear"}


def cases() -> dict[str, Callable[[], Any]]:
    """Return the calls to follow, on two small networks with random weights."""
    runs = {}
    torch.manual_seed(0)
    nets = {"MLP": (mlp(8, hidden=(32, 32)), (8,)), "CNN": (Residual(8, 1), (3, 8, 8))}
    for net, (model, shape) in nets.items():
        x, y = torch.randn(ROWS, *shape), torch.randn(ROWS, 1)
        for name, method in METHODS.items():
            options = {"reference": x if name == "terms" else None, "progress": False}
            calibrate = partial(latedrop.calibrate, model.eval(), (x, y), method=method, **options)
            runs[f"calibrate, {name}, {net}"] = calibrate
            runs[f"predict, {name}, {net}"] = partial(calibrate().predict, x)
        network, sites = latedrop.Network(model), latedrop.find_sites(model, x)
        runs[f"sample, {net}"] = partial(latedrop.sample, network, x, 0.1, DRAWS, 0, sites)
    return dict(sorted(runs.items(), key=lambda case: case[0].partition(",")[0]))


def entered(run: Callable[[], Any], folder: Path = Path(latedrop.__file__).parent) -> set[Any]:
    """Return the code of every function below a folder that a call enters; comprehensions do not count."""
    codes: set[Any] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        named = code.co_name[0] != "<" or code.co_name == "<lambda>"
        if event == "call" and named and code.co_filename.startswith(f"{folder}/"):
            codes.add(code)

    run()
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return codes


def table(record: dict[str, Any]) -> str:
    return markdown_table(["call", "files", "functions"], [[name, *counts] for name, counts in record["cases"].items()])


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    codes = {name: entered(run) for name, run in cases().items()}
    counts = {name: (len({code.co_filename for code in each}), len(each)) for name, each in codes.items()}
    about = {"rates": len(RATES), "draws": DRAWS, "rows": ROWS, "machine": machine(torch.device("cpu"))}
    write("hops", about | {"cases": counts})

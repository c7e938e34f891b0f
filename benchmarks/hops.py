"""How far one has to walk through the source to follow one call: files and functions of latedrop that it enters.

    python -m benchmarks.hops

`sys.setprofile` tells of every Python function that is entered. Only those in files of latedrop count; what torch and
others do in between is left out. Each case runs once before, so that imports and what is made once are not counted.
The numbers do not depend on the machine's speed.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import latedrop
from benchmarks.nets import Residual
from benchmarks.timing import machine, markdown_table, write

FOLDER = Path(latedrop.__file__).parent
RATES, DRAWS, ROWS = (0.05, 0.1, 0.2), 20, 64
METHODS: dict[str, Any] = {"terms": "terms", "sample": latedrop.Sampling(RATES, DRAWS), "linear": "linear"}


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts = {name: walked(run) for name, run in cases().items()}
    record = {"rates": len(RATES), "draws": DRAWS, "rows": ROWS, "machine": machine(torch.device("cpu"))}
    write("hops", record | {"cases": counts})
    print(table(record | {"cases": counts}))


def cases() -> dict[str, Callable[[], Any]]:
    """Return the calls that are followed: of the default, of draws and of first order."""
    runs: dict[str, Callable[[], Any]] = {}
    for net, (model, x) in nets().items():
        y = torch.randn(len(x), 1, generator=torch.Generator().manual_seed(0))
        for name, method in METHODS.items():

            def calibrated(method: Any = method, model: nn.Module = model, x: Tensor = x, y: Tensor = y) -> Any:
                reference = x if method == "terms" else None
                return latedrop.calibrate(model, (x, y), method=method, reference=reference, progress=False)

            runs[f"calibrate, {name}, {net}"] = calibrated
            predictor = calibrated()
            runs[f"predict, {name}, {net}"] = lambda predictor=predictor, x=x: predictor.predict(x)
        network, sites = latedrop.Network(model), latedrop.find_sites(model, x)
        runs[f"sample, {net}"] = lambda n=network, x=x, sites=sites: latedrop.sample(n, x, 0.1, DRAWS, 0, sites)
    return dict(sorted(runs.items(), key=lambda case: case[0].partition(",")[0]))


def nets() -> dict[str, tuple[nn.Module, Tensor]]:
    """Return two small networks with random weights, and rows for them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)
        mlp = nn.Sequential(*layers).eval(), torch.randn(ROWS, 8)
        return {"MLP": mlp, "CNN": (Residual(8, 1).eval(), torch.randn(ROWS, 3, 8, 8))}


def walked(run: Callable[[], Any]) -> dict[str, int]:
    """Count files and functions of one call, after another one."""
    run()
    functions = entered(run, FOLDER)
    return {"files": len({code.co_filename for code in functions}), "functions": len(functions)}


def entered(run: Callable[[], Any], folder: Path) -> set[Any]:
    """Return the code of every function in files below a folder that a call enters.

    Comprehensions are functions in some versions of Python and not in others: they are none here.
    """
    seen: set[Any] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        named = code.co_name[0] != "<" or code.co_name == "<lambda>"
        if event == "call" and named and code.co_filename.startswith(f"{folder}/"):
            seen.add(code)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return seen


def table(record: dict[str, Any]) -> str:
    """Return a row for each case."""
    rows = [[name, counts["files"], counts["functions"]] for name, counts in record["cases"].items()]
    return markdown_table(["call", "files", "functions"], rows)


if __name__ == "__main__":
    main()

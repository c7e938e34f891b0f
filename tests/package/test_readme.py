"""The README is right: its code runs, its tables are the committed results, its links lead somewhere."""

import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).parents[2] / "README.md"

if not README.is_file():
    pytest.skip("the README is in the repository, not in the package", allow_module_level=True)


@pytest.fixture(scope="module")
def page() -> str:
    return README.read_text(encoding="utf-8")


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


def test_its_numbers_are_those_of_the_results(page: str) -> None:
    pytest.importorskip("benchmarks", reason="the benchmarks are in the repository")
    from benchmarks.pages import headline_table

    assert headline_table() in page

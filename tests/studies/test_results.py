"""The committed pages of every study are what its committed JSON gives."""

from importlib import import_module
from pathlib import Path

import pytest

from studies import pages
from studies.__main__ import NAMES
from studies.driver import parsed

RESULTS = Path(pages.__file__).parent / "results"


@pytest.mark.parametrize("name", NAMES)
def test_pages_follow_the_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "find_spec", lambda name: None)  # text alone: figures depend on matplotlib
    study = import_module(f"studies.{name}.study").STUDY
    files = study.pages(study.read(RESULTS / name, parsed(study, [])), RESULTS / name)
    assert set(files) == {"claims.md", "tables.md"}
    for page, content in files.items():
        committed = (RESULTS / name / page).read_text(encoding="utf-8")
        assert content.decode() == committed, f"run: python -m studies {name} --figures --out studies/results/{name}"

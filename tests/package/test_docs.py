"""Check the pages and the README: every python block runs, every link leads somewhere, its numbers are right."""

import contextlib
import random
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import latedrop
from architectures import missing
from benchmarks.pages import headline_table
from latedrop.errors import LatedropWarning

ROOT = Path(__file__).parents[2]
DOCS, README = ROOT / "docs", ROOT / "README.md"
PAGES = sorted([*DOCS.glob("*.md"), *DOCS.glob("reference/*.md"), ROOT / "crowd" / "README.md"])
OTHERS = [ROOT / f"{name}.md" for name in ("README", "SECURITY", "CONTRIBUTING", "CHANGELOG", "studies/README")]
OTHERS += [ROOT / ".github" / "PULL_REQUEST_TEMPLATE.md", ROOT / "benchmarks" / "NOTES.md"]
LONG = {"adapters", "classification", "coming_from", "crowd", "deployment", "tutorial_maps", "tutorial_text"}
WIDEST = 88
"""Columns of a line of code that the site shows without cutting it off."""
WIDE = {"studies"}
"""Pages with longer lines, to be narrowed."""

# A block may be preceded by <!-- warns: pattern -->: then it must warn, and the warning must match. Before that,
# <!-- needs: timm, ... --> names libraries without which it does not run.
BLOCK = re.compile(
    r"(?:^<!-- needs: (?P<needs>.+?) -->\n+)?(?:^<!-- warns: (?P<warns>.+?) -->\n+)?^```python\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
CODE = re.compile(r"^```(?:python|sh|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.fixture
def undisturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give a temporary working directory and random state, and open no window for figures."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    numpy_state, python_state = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        yield
    np.random.set_state(numpy_state)
    random.setstate(python_state)
    with contextlib.suppress(ImportError):
        import matplotlib.pyplot as plt

        plt.close("all")


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=pytest.mark.slow if p.stem in LONG else ()) for p in PAGES],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec")  # Lightning's own
@pytest.mark.filterwarnings("ignore:.*structlog.threadlocal", "ignore:.*torch.jit.script")  # baal's, laplace-torch's
@pytest.mark.usefixtures("undisturbed")
def test_python_blocks_run(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    namespace = {"__name__": page.stem}
    absent: set[str] = set()
    for block in BLOCK.finditer(text):
        if block["needs"] and (lacking := needed(block["needs"])):
            absent |= lacking
            continue
        lines_before = text[: block.start("code")].count("\n")
        code = compile("\n" * lines_before + block["code"], str(page), "exec")
        expected = pytest.warns(LatedropWarning, match=block["warns"]) if block["warns"] else contextlib.nullcontext()
        with expected:
            exec(code, namespace)
    if absent:
        pytest.skip(f"the other blocks ran; not installed: {', '.join(sorted(absent))}")


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    targets = [link for link in _links(page) if "://" not in link]
    assert [link for link in targets if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_of_the_repository_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"(?<![\w/])(?:tests|docs|benchmarks|examples)/[\w/]+\.(?:py|json|md)", page.read_text("utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", [p for p in PAGES if p.stem not in WIDE and p.parent == DOCS], ids=lambda p: p.stem)
def test_lines_of_code_fit_the_site(page: Path) -> None:
    blocks = CODE.findall(page.read_text(encoding="utf-8"))
    assert [line for block in blocks for line in block.splitlines() if len(line) > WIDEST] == []


def test_index_lists_every_page() -> None:
    listed = {(DOCS / link).resolve() for link in _links(DOCS / "README.md")}
    assert {page.resolve() for page in PAGES} - {DOCS / "README.md"} <= listed


def test_design_lists_every_room() -> None:
    page = (DOCS / "design.md").read_text(encoding="utf-8")
    source = Path(latedrop.__file__).parent
    rooms = {path.stem for path in source.glob("*.py")} | {path.parent.name for path in source.glob("*/*.py")}
    assert sorted(room for room in rooms - {"__init__"} if f"`{room}`" not in page) == []


def test_gallery_lists_every_example_and_picture() -> None:
    linked = _links(DOCS / "gallery.md")
    assert {f"../examples/{path.name}" for path in (ROOT / "examples").glob("*.py")} <= linked
    pictures = sorted((DOCS / "images").glob("gallery_*.png"))
    assert {f"images/{path.name}" for path in pictures} <= linked
    assert [path.name for path in pictures if path.stat().st_size > 150_000] == []


def test_every_error_class_is_in_the_reference() -> None:
    page = (DOCS / "reference" / "latedrop.md").read_text(encoding="utf-8")
    assert [name for name in latedrop.errors.__all__ if f"autoclass:: {name}\n" not in page] == []


def needed(names: str) -> set[str]:
    """Return the libraries, separated by commas in `names`, that are not installed."""
    wanted = set(names.split(", "))
    return wanted & set(missing("torchvision", *wanted))  # which some of them import


def _links(page: Path) -> set[str]:
    return set(LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))))


def test_the_code_of_the_readme_runs_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    names: dict = {}
    with torch.random.fork_rng(devices=[]):
        for index, block in enumerate(blocks):
            exec(compile(block, f"README, block {index}", "exec"), names)
    assert len(blocks) >= 2
    assert names["p"].std.shape == names["y"].shape
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.latedrop.json"]


def test_the_numbers_of_the_readme_are_those_of_the_results() -> None:
    assert headline_table() in README.read_text(encoding="utf-8")

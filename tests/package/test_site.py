"""The site that `make docs` builds: no warning, no broken link, nothing loaded from elsewhere, every public name."""

import importlib
import os
import re
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("furo", reason="the extra `docs` builds the site")
pytest.importorskip("myst_parser", reason="the extra `docs` builds the site")

ROOT = Path(__file__).parents[2]
DOCUMENTED = ("latedrop", "latedrop.metrics", "latedrop.metrics.classes", "latedrop.plots", "latedrop.terms")
DOCUMENTED += ("latedrop.errors", "latedrop.streams", "latedrop.report", "latedrop_crowd", "latedrop.adapters.sklearn")
DOCUMENTED += ("latedrop.records", "latedrop.stored_tensors", "latedrop.files")
DOCUMENTED += ("latedrop.cli.command", "latedrop.terminal", "latedrop.named", "latedrop.devices")
DOCUMENTED += ("latedrop.web", "latedrop.metrics.levels")
DOCUMENTED += ("latedrop.adapters.lightning", "latedrop.adapters.huggingface", "latedrop.adapters.ray")
DOCUMENTED += ("latedrop.adapters.ase",)
LOADED = {"script": "src", "img": "src", "link": "href", "source": "srcset", "iframe": "src", "video": "src"}
"""Attributes that a browser follows by itself; it follows a link in the text only when asked to."""
REMOTE_STYLE = re.compile(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//")
REMOTE_CALL = re.compile(
    r"(?:fetch|import|open|importScripts)\(\s*[\"'`](?:https?:)?//|\.src\s*=\s*[\"'`](?:https?:)?//"
)

pytestmark = pytest.mark.slow


class Page(HTMLParser):
    """The files that a page loads, its links and its anchors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.leads: list[str] = []
        self.anchors: set[str] = set()
        self.formulas = 0
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := attributes.get(name))}
        self.formulas += tag == "math"
        if tag == "a" and attributes.get("href"):
            self.leads.append(attributes["href"] or "")
        if tag in LOADED and attributes.get("rel") not in ("next", "prev", "canonical") and attributes.get(LOADED[tag]):
            self.loads.append(attributes[LOADED[tag]] or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as `make docs` does, in another folder."""
    folder = tmp_path_factory.mktemp("site")
    options = ["--quiet", "--fail-on-warning", "--keep-going", "-b", "html", "-d", str(folder / "doctrees")]
    command = [sys.executable, "-m", "sphinx", *options, "-c", "docs/site", ".", str(folder / "site")]
    built = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    return folder / "site"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html") if "_static" not in path.parts}


def test_links_and_anchors_exist(site: Path, pages: dict[Path, Page]) -> None:
    broken = []
    for path, page in pages.items():
        for link in page.leads:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchored = target in pages and parts.fragment
            if not target.exists() or (anchored and unquote(parts.fragment) not in pages[target].anchors):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert broken == []
    assert len(pages) > 40
    assert (site / "index.html").exists()


def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    remote = {link for page in pages.values() for link in page.loads if urlsplit(link).netloc}
    assert remote == set()
    missing = [
        f"{path.relative_to(site)}: {link}"
        for path, page in pages.items()
        for link in page.loads
        if not link.startswith("data:") and not (path.parent / unquote(urlsplit(link).path)).exists()
    ]
    assert missing == []
    for kind, pattern in (("*.css", REMOTE_STYLE), ("*.js", REMOTE_CALL)):
        remote_files = [path.name for path in site.rglob(kind) if pattern.search(path.read_text(encoding="utf-8"))]
        assert remote_files == []
    texts = (path.read_text(encoding="utf-8") for path in pages)
    assert not any(REMOTE_STYLE.search(text) for text in texts)


def test_formulas_are_drawn_by_the_browser(site: Path, pages: dict[Path, Page]) -> None:
    assert pages[site / "docs" / "variance.html"].formulas > 10
    assert pages[site / "docs" / "reference" / "metrics.html"].formulas > 0
    left = {path.name for path in pages if re.search(r"\\(?:frac|mathrm|sum)\b", _without_code(path))}
    assert left == set()


def test_reference_has_every_public_name(site: Path) -> None:
    listed = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode().splitlines()
    known = {line.split(" ")[0] for line in listed if " py:" in line}
    lacking = [
        f"{module}.{name}"
        for module in DOCUMENTED
        for name in importlib.import_module(module).__all__
        if not {f"{module}.{name}", f"latedrop.{name}"} & known
    ]
    assert lacking == []


def test_search_knows_the_pages(site: Path) -> None:
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    assert index.startswith("Search.setIndex(")
    assert all(f'"docs/{name}"' in index for name in ("calibrate", "glossary", "reference/metrics"))


def _without_code(path: Path) -> str:
    return re.sub(r"<(pre|code)\b.*?</\1>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)

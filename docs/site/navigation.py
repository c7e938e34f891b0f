"""The navigation, from the tables of docs/README.md: each section that opens with a table of pages is a part of it."""

import re
import shutil
from pathlib import Path
from posixpath import normpath
from typing import Any

from docutils import nodes
from sphinx.addnodes import download_reference
from sphinx.application import Sphinx

SECTION = re.compile(r"^## (?P<title>.+)\n+\| page \|.*\n\| --- .*\n(?P<rows>(?:\|.*\n)+)", re.MULTILINE)
PAGE = re.compile(r"^\| \[[^\]]+\]\(([^)#]+)\.md\)", re.MULTILINE)


def sections(index: str) -> dict[str, list[str]]:
    """The pages of each section, as docs/README.md names them: relative to docs/, and without their ending."""
    return {section["title"]: PAGE.findall(section["rows"]) for section in SECTION.finditer(index)}


def setup(app: Sphinx) -> dict[str, Any]:
    """Put it under the front page, which is also written as index.html."""
    app.connect("source-read", _add)
    app.connect("doctree-read", _plain_headings, priority=900)  # after Sphinx has collected the headings
    app.connect("build-finished", _index)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _add(app: Sphinx, name: str, source: list[str]) -> None:
    docs = Path(app.srcdir, "docs")
    if name == app.config.root_doc:
        index = docs / "README.md"
        app.env.note_dependency(str(index))
        source[0] += _tree("", ["All pages </docs/README>"])
        for title, pages in sections(index.read_text(encoding="utf-8")).items():
            source[0] += _tree(title, [normpath(f"/docs/{page}") for page in pages])
    below = {f"docs/{folder.name}": sorted(folder.glob("*.md")) for folder in docs.glob("results/*/")}
    below["docs/studies"] = [Path(app.srcdir, "studies", "README.md"), *sorted(docs.glob("../studies/results/*/*.md"))]
    for page in below.get(name, []):  # generated pages stand below the one that reads them
        source[0] += _tree(
            "", [f"/{page.resolve().relative_to(Path(app.srcdir).resolve()).with_suffix('').as_posix()}"]
        )


def _tree(title: str, pages: list[str]) -> str:
    options = [":hidden:", *([f":caption: {title}"] if title else [])]
    return "\n".join(["", "```{toctree}", *options, "", *pages, "```", ""])


def _plain_headings(app: Sphinx, doctree: nodes.document) -> None:
    """Links in headings stay in the page; in the table of contents Sphinx cannot have one to a file."""
    for link in list(app.env.tocs[app.env.docname].findall(download_reference)):
        link.replace_self(link.children)


def _index(app: Sphinx, failure: Exception | None) -> None:
    if failure is None:
        shutil.copyfile(Path(app.outdir, f"{app.config.root_doc}.html"), Path(app.outdir, "index.html"))

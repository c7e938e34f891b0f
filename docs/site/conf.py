"""How Sphinx makes the site: `make docs` runs it from the root of the repository, offline.

The pages are the Markdown files that a code host shows. The front page is README.md; the navigation is made of the
tables in docs/README.md (`navigation`); formulas become MathML, which browsers draw themselves (`mathml`).
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "crowd" / "src"), str(Path(__file__).parent)]

import latedrop  # noqa: E402

project = "latedrop"
author = copyright = "The latedrop authors"
version = release = latedrop.__version__

root_doc = "README"
include_patterns = [
    "*.md",
    "benchmarks/NOTES.md",
    "benchmarks/results/*.md",
    "docs/*.md",
    "docs/reference/*.md",
    "docs/results/*/*.md",
]
include_patterns += ["crowd/README.md", "studies/README.md", "studies/results/*/*.md"]
exclude_patterns = ["build", "dist", "data", "tests", "src", "examples", "**/.*", ".*"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "mathml", "docstrings", "navigation"]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4  # the anchors that code hosts give to headings
html_math_renderer = "mathml"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_type_aliases = {"Array": "Array"}  # by its name: what it stands for fills three lines
autodoc_inherit_docstrings = False
toc_object_entries_show_parents = "hide"
maximum_signature_line_length = 80
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = "latedrop"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "github-dark"

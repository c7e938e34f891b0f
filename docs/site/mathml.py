"""Formulas as MathML: the browser draws them, so that a page loads neither a script nor a font for them."""

import re
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)

ACCENT = re.compile(r"(\\(?:hat|bar)\s*\w)(?=[_^])")
"""An index after an accent: docutils would put it below the letter, so an empty group takes it."""
APPLIED = re.compile(r"<mo>&ApplyFunction;</mo>(?!\s*<mo[^>]*>\()")
"""A function before its argument, `log x`; browsers leave no space there, as formulas in print do."""
NAMED = re.compile(r"<mo>(\w{2,})</mo>")
"""`max` and `min`: as operators they would have space on both sides."""


def setup(app: Sphinx) -> dict[str, Any]:
    """Offer `html_math_renderer = "mathml"`."""
    app.add_html_math_renderer("mathml", inline_renderers=(_inline, None), block_renderers=(_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _inline(writer: Any, node: nodes.math) -> None:
    writer.body.append(_mathml(node, as_block=False))
    raise nodes.SkipNode


def _block(writer: Any, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="formula">{_mathml(node, as_block=True)}</div>')
    raise nodes.SkipNode


def _mathml(node: nodes.Node, as_block: bool) -> str:
    try:
        drawn = str(tex2mathml(ACCENT.sub(r"\1{}", node.astext()), as_block))
        return NAMED.sub(r"<mi>\1</mi>", APPLIED.sub('<mspace width="0.17em"></mspace>', drawn))
    except MathError as error:
        logger.warning("the formula cannot become MathML: %s", error, location=node)
        return ""

"""Formulas as MathML, which browsers show by themselves: no script, no network."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging

NAMESPACE = "http://www.w3.org/1998/Math/MathML"
ElementTree.register_namespace("", NAMESPACE)
ACCENTS = ("~", "ˆ")


def mathml(latex: str, block: bool) -> str:
    """Translate a formula.

    The translator puts the index of a letter with an accent below it; here it goes beside it.
    """
    tree = ElementTree.fromstring(tex2mathml(latex, as_block=block))
    for element in tree.iter(f"{{{NAMESPACE}}}munderover"):
        letter, index, accent = element
        if accent.text in ACCENTS:
            accented = ElementTree.Element(f"{{{NAMESPACE}}}mover", accent="true")
            accented.extend([letter, accent])
            element.tag = f"{{{NAMESPACE}}}msub"
            element[:] = [accented, index]
    return ElementTree.tostring(tree, encoding="unicode")


def visit(self: Any, node: nodes.Element) -> None:
    """Write an inline formula, or one in a block that scrolls if it is too wide."""
    block = isinstance(node, nodes.math_block)
    try:
        formula = mathml(node.astext(), block)
    except (MathError, ElementTree.ParseError) as error:
        logging.getLogger(__name__).warning("%s in %r", error, node.astext(), location=node)
        raise nodes.SkipNode from None
    self.body.append(f'<div class="math-block">{formula}</div>' if block else formula)
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the renderer."""
    app.add_html_math_renderer(
        "mathml", inline_renderers=(visit, None), block_renderers=(visit, None)
    )
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""Formulas as MathML, which browsers set themselves: no script, also on paper and from disk.

The converter is docutils' own. It knows a part of LaTeX; what of it this book writes otherwise is
translated first, and a formula that it cannot read is a warning.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any
from xml.etree import ElementTree

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.math import get_node_equation_number

logger = logging.getLogger(__name__)
BRACE, ACCENTS, NORM = "⏟", "ˆˉ~", "‖"
OTHERWISE = (
    (r"\\dots\b", r"\\ldots"),
    (r"\\[bB]ig[lr]?(?=[(\[]|\\{)", r"\\left"),  # they grow with what they hold
    (r"\\[bB]ig[lr]?(?=[)\]]|\\})", r"\\right"),
    (r"\\[bB]ig[lr]?(?![a-zA-Z])", ""),
    (r"\\top\b", r"\\mathsf{T}"),
    (r"(\\t?frac)\s*(\d)\s*(\d)", r"\1{\2}{\3}"),
)
FORMULA = r'<span class="math[^>]*>(?:(?!</span>).)*</span>'
TOUCHED = re.compile(rf"\({FORMULA}[,.;:?!)]*|{FORMULA}[,.;:?!)]+")
SIGN = re.compile(r"\\(?:[a-zA-Z]+|.)|.", re.DOTALL)
OPENS = {"{", "(", "[", r"\{", r"\left", r"\begin"}
CLOSES = {"}", ")", "]", r"\}", r"\right", r"\end"}
BLANKS = {r"\quad": "\u2003", r"\qquad": "\u2003\u2003"}


def connect(app: Sphinx) -> None:
    """Make it the renderer of formulas."""
    inline, block = partial(_add, tag="span", block=False), partial(_add, tag="div", block=True)
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    app.config.html_math_renderer = "mathml"
    app.connect("html-page-context", _hold)


def breakable(text: str) -> list[tuple[str, str]]:
    """A formula in parts, each with the blank after it: a narrow page may go on in the next line
    after a blank, and before a second sign of equality. One with rows of its own stays whole."""
    cuts, depth, equal = [(0, 0, "")], 0, False
    for found in SIGN.finditer(text):
        sign = found[0]
        depth += (sign in OPENS) - (sign in CLOSES)
        if depth == 0 and sign in {"&", r"\\"}:
            return [(text, "")]
        if depth == 0 and sign in BLANKS:
            cuts.append((*found.span(), BLANKS[sign]))
            equal = False
        elif depth == 0 and sign == "=":
            if equal:
                cuts.append((found.start(), found.start(), ""))
            equal = True
    ends = [*cuts[1:], (len(text), 0, "")]
    return [(text[a:b], blank) for (_, a, _), (b, _, blank) in zip(cuts, ends, strict=True)]


def mathml(text: str, block: bool) -> str:
    """A formula as MathML, on one line."""
    for pattern, other in OTHERWISE:
        text = re.sub(pattern, other, text)
    made = tex2mathml(text.strip(), as_block=block).replace("&ApplyFunction;", "\u2061")
    root = ElementTree.fromstring(made)
    for node in root.iter():
        node.tag, node.tail = node.tag.rpartition("}")[2], None
        said = node.text or ""  # words keep the blanks around them
        node.text = said.replace(" ", "\u00a0") if node.tag == "mtext" else said.strip() or None
        if node.text == BRACE:
            node.set("stretchy", "true")
        if node.text == NORM:  # both bars as high as a letter, also beside a power
            node.set("stretchy", "false")
    for node in root.iter("msub"):  # the name of a brace is below it, not beside it
        if node[0].tag == "munder" and node[0][1].text == BRACE:
            node.tag = "munder"
    for node in root.iter("munderover"):  # the index of an accented letter is beside it
        base, index, sign = node
        if sign.text and sign.text in ACCENTS:
            accented = ElementTree.Element("mover", accent="true")
            accented.extend([base, sign])
            node.tag, node[:] = "msub", [accented, index]
    root.set("xmlns", "http://www.w3.org/1998/Math/MathML")
    return ElementTree.tostring(root, encoding="unicode")


def _hold(app: Sphinx, name: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """No line of a page ends between a formula and a bracket or stop that touches it."""
    if "body" in context:
        context["body"] = TOUCHED.sub(r'<span class="held">\g<0></span>', context["body"])


def _add(self: Any, node: nodes.Element, tag: str, block: bool) -> None:
    self.body.append(self.starttag(node, tag, "", CLASS="math notranslate nohighlight"))
    if node.get("number"):
        self.body.append(f'<span class="eqno">({get_node_equation_number(self, node)})</span>')
    try:
        for part, blank in breakable(node.astext()) if block else [(node.astext(), "")]:
            self.body.append(mathml(part, block) + blank)
    except (MathError, ElementTree.ParseError) as error:
        logger.warning("formula %r: %s", node.astext(), error, location=node)
    self.body.append(f"</{tag}>")
    raise nodes.SkipNode

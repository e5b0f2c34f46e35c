"""Formulas as MathML, which browsers set themselves: no script, also on paper and from disk."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)
OTHERWISE = (  # what the converter does not know
    (r"\{aligned\}", "{align*}"),
    (r"\\arg\b", r"\\operatorname{arg}"),
    (r"\\[bB]ig[lr]?(?=[(\[]|\\{)", r"\\left"),  # they grow with what they hold
    (r"\\[bB]ig[lr]?(?=[)\]]|\\})", r"\\right"),
    (r"\\[bB]ig[lr]?(?![a-zA-Z])", ""),
)
LETTER = re.compile(r"\\math(bb|cal)\s*(?:\{([A-Z])\}|([A-Z]))")
LETTERS = {"bb": "𝔸𝔹ℂ𝔻𝔼𝔽𝔾ℍ𝕀𝕁𝕂𝕃𝕄ℕ𝕆ℙℚℝ𝕊𝕋𝕌𝕍𝕎𝕏𝕐ℤ", "cal": "𝒜ℬ𝒞𝒟ℰℱ𝒢ℋℐ𝒥𝒦ℒℳ𝒩𝒪𝒫𝒬ℛ𝒮𝒯𝒰𝒱𝒲𝒳𝒴𝒵"}


def connect(app: Sphinx) -> None:
    """Make it the renderer of formulas."""
    inline, block = partial(_add, tag="span"), partial(_add, tag="div")
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    app.config.html_math_renderer = "mathml"


def mathml(text: str, display: str) -> str:
    """Return a formula as MathML, ``inline`` or ``block``; raise ValueError if it is unreadable."""
    for pattern, other in OTHERWISE:
        text = re.sub(pattern, other, text)
    markup = convert(LETTER.sub(_letter, text.strip()), display=display)
    if unknown := re.search(r"\\[a-zA-Z]+", markup):
        raise ValueError(f"unknown command {unknown[0]}")
    return markup


def _letter(match: re.Match[str]) -> str:
    """Return a letter of its own code: browsers leave out the attribute for such letters."""
    return LETTERS[match[1]][ord(match[2] or match[3]) - ord("A")]


def _add(self: Any, node: nodes.Element, tag: str) -> None:
    self.body.append(self.starttag(node, tag, "", CLASS="math notranslate nohighlight"))
    try:
        self.body.append(mathml(node.astext(), "block" if tag == "div" else "inline"))
    except Exception as error:  # of many kinds
        logger.warning("formula %r: %s", node.astext(), error, location=node)
    self.body.append(f"</{tag}>")
    raise nodes.SkipNode

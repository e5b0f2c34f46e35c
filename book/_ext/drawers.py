"""A section with the label ``(NN-drawer)=`` is closed on the page, and opened by a click.

It holds what a first reading does not need. Browsers find text in it and print it; a link to
something inside opens it (``access.js``).
"""

from __future__ import annotations

from docutils import nodes
from sphinx.transforms import SphinxTransform

OPENING = (
    '<details class="drawer printed"><summary>Every number with its spread, the checks, and '
    "what was left out above</summary>"
)


class Drawers(SphinxTransform):
    """Put ``<details>`` around all that such a section holds below its heading."""

    default_priority = 710  # labels have become names of their sections

    def apply(self) -> None:
        for section in self.document.findall(nodes.section):
            if any(name.endswith("-drawer") for name in section["names"]):
                section.insert(1, nodes.raw("", OPENING, format="html"))
                section += nodes.raw("", "</details>", format="html")

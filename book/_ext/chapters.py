"""Numbers and drawers of the chapters.

Chapters have their numbers in titles and contents; figures and exercises are counted page by page
(``Figure 1.3``, in an appendix ``Figure 1A.3``). A cell of a notebook gives its figure a caption
and a ``name`` in its metadata, as ``mystnb``: ``figure``. A section with the label ``(NN-drawer)=``
is closed on the page, and opened by a click: it holds what a first reading does not need. Browsers
find text in it and print it; a link to something inside opens it (``access.js``).
"""

from __future__ import annotations

import re

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform

CHAPTER = re.compile(r"notebooks/(\d\d)_(appendix)?")
OPENING = (
    '<details class="drawer printed"><summary>Every number with its spread, the checks, and '
    "what was left out above</summary>"
)


class Numbered(SphinxTransform):
    """Put the number before the title of a chapter, and give every figure a name and a text."""

    default_priority = 700  # names and targets are made

    def apply(self) -> None:
        title = next(self.document.findall(nodes.title), None)
        chapter = CHAPTER.match(self.env.docname)
        if chapter and title is not None and not chapter[2]:
            title.insert(0, nodes.Text(f"{chapter[1]} "))
        for figure in self.document.findall(nodes.figure):
            if not figure["ids"]:
                self.document.set_id(figure)
            for caption in figure.findall(nodes.caption):
                for image in figure.findall(nodes.image):
                    image["alt"] = image.get("alt") or caption.astext()


def count_by_page(app: Sphinx, env: BuildEnvironment) -> list[str]:
    """Count figures and exercises anew on each page, after the number of its chapter."""
    for page, kinds in env.toc_fignumbers.items():
        chapter = CHAPTER.match(page)
        before = (f"{int(chapter[1])}{'A' if chapter[2] else ''}",) if chapter else ()
        for numbers in kinds.values():
            numbers.update({name: (*before, i) for i, name in enumerate(numbers, 1)})
    return []


class Drawers(SphinxTransform):
    """Put ``<details>`` around all that such a section holds below its heading."""

    default_priority = 710  # labels have become names of their sections

    def apply(self) -> None:
        for section in self.document.findall(nodes.section):
            if any(name.endswith("-drawer") for name in section["names"]):
                section.insert(1, nodes.raw("", OPENING, format="html"))
                for image in section.findall(nodes.image):
                    image["loading"] = "lazy"  # when the drawer is opened, or printed
                section += nodes.raw("", "</details>", format="html")

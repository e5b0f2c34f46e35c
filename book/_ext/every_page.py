"""What every page gets: numbers that a reader can cite, and a description in its head.

Chapters have their numbers in titles and contents; figures and exercises are counted page by page
(``Figure 1.3``, in an appendix ``Figure 1A.3``).

A cell of a notebook gives its figure a caption in its metadata, as ``mystnb``: ``figure``:
``caption`` (and ``name``, to refer to it by ``{numref}``). Where it names no alternative text,
the caption is also that.
"""

from __future__ import annotations

import re
import textwrap
from html import escape
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform

CHAPTER = re.compile(r"notebooks/(\d\d)_(appendix)?")


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
        for found in kinds.values():
            found.update({name: (*before, i) for i, name in enumerate(found, 1)})
    return []


def describe(
    app: Sphinx, name: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Add ``description`` and the Open Graph fields to a page that was written by someone."""
    if doctree is None:
        return
    # Entries of the bibliography are items of their list: docutils gives them a role that a list
    # may not hold and that ARIA 1.3 has withdrawn.
    context["body"] = context["body"].replace('role="doc-biblioentry"', 'role="listitem"')
    paragraphs = (
        p for p in doctree.findall(nodes.paragraph) if isinstance(p.parent, nodes.section)
    )
    first = next(paragraphs, nodes.paragraph()).astext()
    said = textwrap.shorten(first, 165, placeholder=" ...")
    title = re.sub(r"<[^>]*>", "", context.get("title", ""))
    tags = {"og:title": title, "og:description": said, "og:type": "article"}
    lines = [f'<meta name="description" content="{escape(said)}" />'] if said else []
    lines += [f'<meta property="{k}" content="{escape(v)}" />' for k, v in tags.items() if v]
    context["metatags"] = "\n".join([context.get("metatags", ""), *lines])

"""What every page gets: numbers that a reader can cite, and a description in its head.

Chapters have their numbers in titles and contents; figures and exercises are counted page by page
(``Figure 1.3``, in an appendix ``Figure 1A.3``, in another page beside it ``Figure 1F.3``).

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

from . import explorer, live, scorecard

CHAPTER = re.compile(r"notebooks/(\d\d)_(appendix|faults)?")


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
        before = (f"{int(chapter[1])}{(chapter[2] or '')[:1].upper()}",) if chapter else ()
        for found in kinds.values():
            found.update({name: (*before, i) for i, name in enumerate(found, 1)})
    return []


def load_scripts(
    app: Sphinx, name: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Load on a page the scripts of what stands on it, and no others."""
    found = list(doctree.findall(nodes.Element)) if doctree else []
    classes = {name for node in found for name in node.get("classes", ())}
    scripts: dict[str, dict[str, str]] = {}
    if "scorecard" in classes:
        scripts[scorecard.SCRIPT] = {}
    if "explorer" in classes:
        scripts[explorer.OURS[0]] = {"data-library": explorer.LIBRARY}
        app.add_css_file(explorer.OURS[1])
    if figures := [node["figure"] for node in found if "live-figure" in node.get("classes", ())]:
        scripts |= {f"live/{script}.js": {} for script in (*live.SCRIPTS, *figures)}
        app.add_css_file("live/live.css")
    for script, attributes in scripts.items():
        app.add_js_file(script, loading_method="defer", **attributes)  # type: ignore[arg-type]


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

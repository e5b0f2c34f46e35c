"""What a page says about itself to search engines and previews: its title and first sentence."""

from __future__ import annotations

import re
from html import escape
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

LENGTH = 160


def describe(
    app: Sphinx, name: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Add ``description`` and the Open Graph fields to a page that was written by someone."""
    if doctree is None:
        return
    said = description(doctree)
    title = re.sub(r"<[^>]*>", "", context.get("title", ""))
    tags = {"og:title": title, "og:description": said, "og:type": "article"}
    lines = [f'<meta name="description" content="{escape(said)}" />'] if said else []
    lines += [f'<meta property="{k}" content="{escape(v)}" />' for k, v in tags.items() if v]
    context["metatags"] = "\n".join([context.get("metatags", ""), *lines])


def description(doctree: nodes.document) -> str:
    """The first paragraph of the page, cut between words where it is long."""
    for section in doctree.findall(nodes.section):
        for node in section.children:
            if isinstance(node, nodes.paragraph):
                text = " ".join(node.astext().split())
                if len(text) <= LENGTH:
                    return text
                return text[:LENGTH].rsplit(" ", 1)[0] + " ..."
    return ""

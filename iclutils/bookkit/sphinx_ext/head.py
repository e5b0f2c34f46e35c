"""What a page says about itself to search engines and previews, and mended markup of others."""

from __future__ import annotations

import re
import textwrap
from html import escape
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx


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

"""Markup of others, mended for those who listen to a page instead of looking at it."""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx


def mend(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Entries of the bibliography are items of their list: docutils gives them a role that a
    list may not hold and that ARIA 1.3 has withdrawn.
    """
    if "body" in context:
        context["body"] = context["body"].replace('role="doc-biblioentry"', 'role="listitem"')

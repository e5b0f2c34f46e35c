"""Sphinx extension of the book: numbers from the results, and no request to any network.

Results are read from ``book/results`` of the tree that is built; where they or code changed, build
all pages anew, as ``tools/build.py`` does. A claim that is not in the ledger
is a warning, which ``-W`` makes an error.
"""

from __future__ import annotations

import gc
import re
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from pybtex import plugin
from sphinx.application import Sphinx
from sphinx.util.typing import ExtensionMetadata

from . import api, chapters, equations, live, markdown, pictures, roles, scorecard

PLAIN = re.compile(r'<span class="[npw]">([^<]*)</span>')  # names, punctuation, blanks
DIRECTIVES = {
    "api": api.Api,
    "evidence": scorecard.Evidence,
    "live": live.Live,
    "modelcards": api.ModelCards,
    "scorecard": scorecard.Scorecard,
    "times": scorecard.Times,
}


def setup(app: Sphinx) -> ExtensionMetadata:
    """Register everything above; and two ways to save time, a third of a build's."""
    plugin._load_entry_point = cache(plugin._load_entry_point)  # else all packages at each citation
    gc.freeze()  # of torch and its like nothing is garbage: do not look through it again and again
    gc.set_threshold(100_000, 50, 50)
    app.config.release = metadata.version("iclutils")  # the foot of each page names it
    for name, directive in DIRECTIVES.items():
        app.add_directive(name, directive)
    for name in roles.ROLES:
        app.add_role(name, roles.Number())
    app.add_css_file("live/live.css")  # on all pages: it has the colours
    for transform in chapters.TRANSFORMS:
        app.add_transform(transform)
    app.add_post_transform(pictures.Pictures)
    api.connect(app)
    equations.connect(app)
    app.connect("env-get-updated", chapters.count_by_page, priority=600)
    app.connect("builder-inited", lambda _: markdown.read_results.cache_clear())
    app.connect("builder-inited", live.copy_scripts)
    app.connect("html-page-context", live.load_scripts)
    app.connect("html-page-context", _tidy)
    app.connect("html-page-context", chapters.stay_in_part)
    app.connect("build-finished", live.write_weights)
    app.connect("build-finished", _leave_out_icons)
    if silent := app.extensions.get("sphinx_multitoc_numbering"):
        silent.parallel_read_safe = True  # it numbers pages after all are read, and does not say so
    return {"version": metadata.version("iclutils"), "parallel_read_safe": True}


def _tidy(app: Sphinx, page: str, template: str, context: Any, doctree: Any) -> None:
    """Call the entries of a list of citations its items (their older role is for ``li`` alone);
    mark an arrow of two signs, which a phone must not break; leave out of code the marks of what
    has no colour, a tenth of a page."""
    if "body" in context:
        body = context["body"].replace('role="doc-biblioentry"', 'role="listitem"')
        body = body.replace('"pre">-&gt;<', '"pre arrow">-&gt;<')
        context["body"] = PLAIN.sub(r"\1", body)


def _leave_out_icons(app: Sphinx, exception: Exception | None) -> None:
    """Empty the theme's script of icons: its style sheet draws the same."""
    icons = Path(app.outdir, "_static/scripts/fontawesome.js")
    if exception is None and icons.is_file():
        icons.write_text("")

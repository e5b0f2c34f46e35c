"""Sphinx extension of the book: numbers from the results, and no request to any network.

``DIRECTIVES`` and ``roles.ROLES`` list what the pages can use; the class of each says what it
shows. Results are read from ``book/results/TIER/CLAIM.json`` of the tree that is built. A claim
that is not in the ledger is a warning, which ``-W`` makes an error.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.util.typing import ExtensionMetadata

from . import (
    api,
    equations,
    every_page,
    evidence,
    explorer,
    figures,
    live,
    markdown,
    pages,
    panels,
    roles,
    scorecard,
)

DIRECTIVES = {
    "api": api.Api,
    "chapterfigure": figures.ChapterFigure,
    "citation": pages.Citation,
    "evidence": evidence.Evidence,
    "gallery": figures.Gallery,
    "live": live.Live,
    "livetimes": pages.LiveTimes,
    "modelcards": pages.ModelCards,
    "modules": api.Modules,
    "scorecard": scorecard.Scorecard,
    "status": pages.Status,
    "verdicts": scorecard.Verdicts,
}


def setup(app: Sphinx) -> ExtensionMetadata:
    """Register everything above."""
    for name, directive in DIRECTIVES.items():
        app.add_directive(name, directive)
    for name in roles.ROLES:
        app.add_role(name, roles.Number())
    app.add_post_transform(explorer.PictureAndSpecification)
    app.add_transform(every_page.Numbered)
    api.connect(app)
    equations.connect(app)
    app.connect("env-get-updated", every_page.count_by_page, priority=600)
    app.connect("config-inited", _configure, priority=100)
    app.connect("builder-inited", lambda _: markdown.read_results.cache_clear())
    app.connect("html-page-context", every_page.describe)
    app.connect("html-page-context", every_page.load_scripts)
    app.connect("html-page-context", panels.stack)
    app.connect("build-finished", _write_scripts)
    if silent := app.extensions.get("sphinx_multitoc_numbering"):
        silent.parallel_read_safe = True  # it numbers pages after all are read, and does not say so
    return {"version": metadata.version("iclutils"), "parallel_read_safe": True}


def _configure(app: Sphinx, config: Config) -> None:
    """Add the marks by which generated Markdown names its classes and targets."""
    config.myst_enable_extensions = {*config.myst_enable_extensions, "attrs_block", "attrs_inline"}


def _write_scripts(app: Sphinx, exception: Exception | None) -> None:
    if exception is None and app.builder.format == "html":
        static = Path(app.outdir, "_static")
        if (icons := static / "scripts/fontawesome.js").is_file():
            icons.write_text("")  # the theme's style sheet draws the same icons
        explorer.write(static)
        if (static / "live").is_dir():  # the book has such figures
            live.write(static)

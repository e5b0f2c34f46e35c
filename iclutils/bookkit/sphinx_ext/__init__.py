"""Sphinx extension of the book: numbers from the results, and no request to any network.

- ``{scorecard}``: all claims with the source's figure, ours, the null's, and a filter;
- ``{verdicts}``: how many findings hold, by source, as links into the scorecard;
- ``{status}``: the last run of each notebook; ``{citation}``: how to cite the book;
- ``{chapterfigure} NN-section``: a figure of a chapter with its text; ``{gallery}``: the pictures
  that a module's examples draw;
- ``{measured}`01.name```, with ``.field`` and ``@null``, ``@real`` or ``@paper`` if wanted: a
  number from the results, ``.percent`` of it as "87 %"; ``{real}`01.name```: short for ``@real``;
  ``{verdict}`01.name```: the verdict, likewise;
- ``{published}`01.name```: the source's figure;
- ``{modelcards}``: the cards of the shipped models;
- ``{api}``: the reference of modules, from their docstrings; ``{modules}``: a table of them;
- ``{messages}``: the pages about errors, each with the message it shows;
- ``{packages}``: which part of the package uses which, drawn from the imports.

Results are read from ``book/results/TIER/CLAIM.json`` of the tree that is built. A claim that is
not in the ledger is a warning, which ``-W`` makes an error. Formulas become MathML, chapters and
figures get numbers, and launch buttons come from ``iclutils.bookkit.address``. Claims that a
chapter prints lead to their rows of the scorecard, and every page describes itself in its head.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.errors import ConfigError
from sphinx.util.typing import ExtensionMetadata

from ...errors import IclError
from .. import address
from . import (
    api,
    chapters,
    equations,
    explorer,
    gallery,
    head,
    markdown,
    numbers,
    packages,
    pages,
    roles,
    scorecard,
)

DIRECTIVES = {
    "api": api.Api,
    "chapterfigure": chapters.ChapterFigure,
    "citation": pages.Citation,
    "gallery": gallery.Gallery,
    "messages": pages.Messages,
    "modelcards": pages.ModelCards,
    "modules": api.Modules,
    "packages": packages.Packages,
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
    app.add_transform(numbers.Numbered)
    api.connect(app)
    equations.connect(app)
    app.connect("env-get-updated", numbers.count_by_page, priority=600)
    app.connect("config-inited", _configure, priority=100)
    app.connect("builder-inited", lambda _: markdown.read_results.cache_clear())
    app.connect("doctree-read", chapters.link_claims)
    for act in (scorecard.load_script, explorer.load, head.describe):
        app.connect("html-page-context", act)
    app.connect("build-finished", _copy_scripts)
    if silent := app.extensions.get("sphinx_multitoc_numbering"):
        silent.parallel_read_safe = True  # it numbers pages after all are read, and does not say so
    return {"version": metadata.version("iclutils"), "parallel_read_safe": True}


def _configure(app: Sphinx, config: Config) -> None:
    """Set what the YAML file cannot know: launch buttons, and the marks by which generated Markdown
    names its classes and targets.
    """
    try:
        config.html_theme_options.update(address.launch_options())
    except IclError as error:
        raise ConfigError(str(error)) from error
    config.myst_enable_extensions = {*config.myst_enable_extensions, "attrs_block", "attrs_inline"}


def _copy_scripts(app: Sphinx, exception: Exception | None) -> None:
    if exception is None and app.builder.format == "html":
        static = Path(app.outdir, "_static")
        if (icons := static / "scripts/fontawesome.js").is_file():
            icons.write_text("")  # the theme's style sheet draws the same icons
        explorer.write(static)

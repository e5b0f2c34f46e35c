"""Sphinx extension of the book: numbers from the results, and no request to any network.

- ``{scorecard}``: all claims with the source's figure, ours, verdict and provenance, and a filter;
- ``{verdicts}``: how many rows have which verdict, as links into the scorecard;
- ``{status}``: the last run of each notebook; ``{citation}``: how to cite the book;
- ``{chapterfigure} NN-section``: a figure of a chapter with its text;
- ``{measured}`01.name```, with ``.field`` and ``@tier`` if wanted: a number from the results;
- ``{published}`01.name```: the source's figure;
- ``{modelcards}``: the cards of the shipped models;
- ``{api}``: the reference of modules, from their docstrings;
- ``{messages}``: every message of an error, and the page that explains it.

Results are read from ``book/results/TIER/CLAIM.json`` of the tree that is built. A claim that is
not in the ledger is a warning, which ``-W`` makes an error. MathJax is copied from an installed
package into the pages, and launch buttons come from ``iclutils.bookkit.address``.
Claims that a chapter prints lead to their rows of the scorecard, and every page describes itself
in its head.
"""

from __future__ import annotations

import re
import shutil
from importlib import metadata
from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.errors import ConfigError
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import ExtensionMetadata

from ... import zoo
from ...errors import IclError
from .. import address
from . import access, api, chapters, explorer, meta, scorecard, shown
from .citation import Citation
from .messages import Messages
from .roles import Measured, Published
from .status import Status

MATHJAX = "mathjax/tex-svg.js"  # SVG output needs no fonts, so it also works from disk


def setup(app: Sphinx) -> ExtensionMetadata:
    """Register everything above."""
    app.add_directive("scorecard", scorecard.Scorecard)
    app.add_directive("verdicts", scorecard.Verdicts)
    app.add_directive("status", Status)
    app.add_directive("citation", Citation)
    app.add_directive("chapterfigure", chapters.ChapterFigure)
    app.add_directive("modelcards", ModelCards)
    app.add_directive("messages", Messages)
    app.add_role("measured", Measured())
    app.add_role("published", Published())
    app.connect("config-inited", _configure, priority=100)
    shown.connect(app)
    explorer.connect(app)
    api.connect(app)
    app.connect("doctree-read", chapters.link_claims)
    app.connect("html-page-context", scorecard.load_script)
    app.connect("html-page-context", meta.describe)
    app.connect("html-page-context", access.mend)
    app.connect("build-finished", _copy_mathjax)
    if silent := app.extensions.get("sphinx_multitoc_numbering"):
        silent.parallel_read_safe = True  # it numbers pages after all are read, and does not say so
    return {"version": metadata.version("iclutils"), "parallel_read_safe": True}


def _configure(app: Sphinx, config: Config) -> None:
    """Set what the YAML file cannot know: launch buttons, and MathJax on this disk."""
    try:
        config.html_theme_options.update(address.launch_options())
    except IclError as error:
        raise ConfigError(str(error)) from error
    config.mathjax_path = MATHJAX


def _copy_mathjax(app: Sphinx, exception: Exception | None) -> None:
    if exception is None and app.builder.format == "html":
        package = metadata.distribution("sphinx-mathjax-offline")
        source = Path(str(package.locate_file(f"sphinx-mathjax-offline/static/{MATHJAX}")))
        target = Path(app.outdir, "_static", MATHJAX)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


class ModelCards(SphinxDirective):
    """``{modelcards}``: the card of each shipped model, its title one level down."""

    def run(self) -> list[nodes.Node]:
        """Parse the cards in place."""
        shown.use(self.env)
        try:
            cards = [_one_level_down(zoo.read_card(name)) for name in zoo.names()]
        except IclError as error:
            raise self.error(str(error)) from error
        lines = "\n\n".join(cards or ["No model is shipped yet."]).splitlines()
        container = nodes.Element()
        self.state.nested_parse(StringList(lines), 0, container, match_titles=True)
        return container.children


def _one_level_down(card: str) -> str:
    """Markdown without its front matter and with every heading one level lower."""
    card = re.sub(r"\A---\n.*?\n---\n", "", card, flags=re.DOTALL)
    pieces = re.split(r"^(```.*?^```)", card, flags=re.DOTALL | re.MULTILINE)
    pieces[::2] = [re.sub(r"^#", "##", piece, flags=re.MULTILINE) for piece in pieces[::2]]
    return "".join(pieces)

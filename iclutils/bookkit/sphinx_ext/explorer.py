"""Explorers on the pages: the still picture first, and the specification beside it.

A notebook output that has both becomes one container. A page with such a container, and no
other, loads the Vega libraries, a style sheet and ``explorer.js``, which puts the drawing in the
place of the picture. The specification stands in the page, since a page on disk may not read
files. Where scripts are off, and in print, the picture stays.
"""

from __future__ import annotations

import json
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

from ...plots.explorer import MIME

HERE = Path(__file__).parent
OURS = ("explorer.js", "explorer.css")
LIBRARY = f"vega-{metadata.version('vl-convert-python')}.js"  # Vega, Vega-Lite and Vega-Embed


def connect(app: Sphinx) -> None:
    """Register the transform, the page's scripts, and the files they are."""
    app.add_post_transform(Together)
    app.connect("html-page-context", _load)
    app.connect("build-finished", _write)


class Specification:
    """MyST-NB's renderer of the specification (an entry point of the package)."""

    mime_priority_overrides: tuple[tuple[str, str, int | None], ...] = ()

    @staticmethod
    def handle_mime(renderer: Any, data: Any, inline: bool) -> list[nodes.Element] | None:
        """The specification as JSON in a script that no browser runs."""
        if data.mime_type != MIME:
            return None
        # Without its schema: that is an address, and of the version that notebooks draw, not of
        # the library here.
        spec = {key: value for key, value in data.content.items() if key != "$schema"}
        content = json.dumps(spec, ensure_ascii=False, separators=(",", ":"))
        text = content.replace("<", "\\u003c")  # nothing in it can end the script
        return [nodes.raw("", f'<script type="application/json">{text}</script>', format="html")]


class Together(SphinxPostTransform):
    """Put the picture and the specification of one output into one container, for HTML."""

    default_priority = 3  # before MyST-NB keeps one of them
    formats = ("html",)

    def run(self, **_: Any) -> None:
        """Replace each output that has both."""
        for bundle in list(self.document.findall(_is_bundle)):
            kinds = {part["mime_type"]: part for part in bundle.children}
            if {MIME, "image/png"} <= set(kinds):
                found = [*kinds["image/png"].children, *kinds[MIME].children]
                bundle.replace_self(nodes.container("", *found, classes=["explorer"]))


def _is_bundle(node: nodes.Node) -> bool:
    return isinstance(node, nodes.container) and node.get("nb_element") == "mime_bundle"


def _is_explorer(node: nodes.Node) -> bool:
    return isinstance(node, nodes.container) and "explorer" in node["classes"]


def _load(app: Sphinx, page: str, template: str, context: Any, tree: nodes.document | None) -> None:
    if tree is not None and any(tree.findall(_is_explorer)):
        app.add_js_file(LIBRARY, loading_method="defer")
        app.add_js_file(OURS[0], loading_method="defer")
        app.add_css_file(OURS[1])


def _write(app: Sphinx, exception: Exception | None) -> None:
    if exception is not None or app.builder.format != "html":
        return
    static = Path(app.outdir, "_static")
    for name in OURS:
        shutil.copyfile(HERE / name, static / name)
    if not (static / LIBRARY).is_file():
        import vl_convert

        # In a function of its own, so that its names do not meet those of other scripts.
        bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
        bundle = f"(() => {{{bundle}}})();"
        (static / LIBRARY).write_text(bundle, encoding="utf-8")

"""Explorers on the pages: the still picture first, and the specification beside it.

``explorer.js`` puts a button below the picture; who presses it gets the Vega libraries, and the
drawing in the place of the picture. The specification stands in the page, since a page on disk may
not read files. Where scripts are off, and in print, the picture stays.
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

OURS = ("explorer.js", "explorer.css")
LIBRARY = f"vega-{metadata.version('vl-convert-python')}.js"  # Vega, Vega-Lite and Vega-Embed


class Specification:
    """MyST-NB's renderer of the specification (an entry point of the package)."""

    mime_priority_overrides: tuple[tuple[str, str, int | None], ...] = ()

    @staticmethod
    def handle_mime(renderer: Any, data: Any, inline: bool) -> list[nodes.Element] | None:
        """The specification as JSON in a script that no browser runs."""
        if data.mime_type != MIME:
            return None
        # Without its schema, which is an address, and not of the version of the library here.
        spec = {key: value for key, value in data.content.items() if key != "$schema"}
        content = json.dumps(spec, ensure_ascii=False, separators=(",", ":"))
        text = content.replace("<", "\\u003c")  # nothing in it can end the script
        return [nodes.raw("", f'<script type="application/json">{text}</script>', format="html")]


class PictureAndSpecification(SphinxPostTransform):
    """Put the picture and the specification of one output into one container, for HTML."""

    default_priority = 3  # before MyST-NB keeps one of them
    formats = ("html",)

    def run(self, **_: Any) -> None:
        for bundle in list(self.document.findall(nodes.container)):
            if bundle.get("nb_element") == "mime_bundle":
                kinds = {part["mime_type"]: part for part in bundle.children}
                if {MIME, "image/png"} <= set(kinds):
                    found = [*kinds["image/png"].children, *kinds[MIME].children]
                    bundle.replace_self(nodes.container("", *found, classes=["explorer"]))


def load(app: Sphinx, page: str, template: str, context: Any, tree: nodes.document | None) -> None:
    """Load the scripts on a page with an explorer, and on no other."""
    if tree and any("explorer" in found["classes"] for found in tree.findall(nodes.container)):
        library: dict[str, Any] = {"data-library": LIBRARY}
        app.add_js_file(OURS[0], loading_method="defer", **library)
        app.add_css_file(OURS[1])


def write(static: Path) -> None:
    """Write the scripts and the style sheet into the folder of static files."""
    for name in OURS:
        shutil.copyfile(Path(__file__).with_name(name), static / name)
    if not (static / LIBRARY).is_file():
        import vl_convert

        # In a function of its own, so that its names do not meet those of other scripts.
        bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
        (static / LIBRARY).write_text(f"(() => {{{bundle}}})();", encoding="utf-8")

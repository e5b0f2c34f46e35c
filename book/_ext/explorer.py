"""Explorers on the pages: the still picture first, and the specification beside it.

``explorer.js`` puts a button below the picture; who presses it gets the Vega libraries, and the
drawing in the place of the picture. The specification stands in the page, since a page on disk may
not read files. Where scripts are off, and in print, the picture stays.
"""

from __future__ import annotations

import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform

from iclutils.plots.explorer import MIME

OURS = ("explorer.js", "explorer.css")
LIBRARY = f"vega-{metadata.version('vl-convert-python')}.js"  # Vega, Vega-Lite and Vega-Embed


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


def write(static: Path) -> None:
    """Write the scripts and the style sheet into the folder of static files."""
    for name in OURS:
        shutil.copyfile(Path(__file__).with_name(name), static / name)
    if not (static / LIBRARY).is_file():
        import vl_convert

        # In a function of its own, so that its names do not meet those of other scripts.
        bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
        (static / LIBRARY).write_text(f"(() => {{{bundle}}})();", encoding="utf-8")

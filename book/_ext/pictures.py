"""Figures of the chapters as part of the page, so that their letters are the page's own.

A browser draws an SVG file without the fonts of the page that shows it. So the file's content
stands in the page: text can be found and copied, and looks the same on every screen.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform

# What matplotlib writes for files alone: the file's head, its metadata, a style for all elements,
# fonts, turns by nothing, blanks. Style and fonts stand in ``custom.css``.
LEFT_OUT = re.compile(
    r"^.*?(?=<svg)|<metadata>.*?</metadata>|<style.*?</style>"
    r"|font-family: 'DejaVu Sans'[^;\"]*;? ?|(?<=\n) +| transform=\"rotate\(-0 [^)]*\)\"",
    re.DOTALL,
)
NAMED = re.compile(r' id="([^"]*)"')
TAG, DIGITS = re.compile("<[^>]+>"), re.compile(r"(\.\d\d)\d+")  # a hundredth of a point is enough
SIZE = re.compile(r'width="([\d.]+)pt" height="([\d.]+)pt"')


class Pictures(SphinxPostTransform):
    """Put the content of each SVG file that a notebook drew in the place of its image."""

    default_priority = 5  # before images are collected
    formats: ClassVar[Any] = ("html",)

    def run(self, **kwargs: Any) -> None:
        for image in list(self.document.findall(nodes.image)):
            path = Path(self.env.srcdir, image["uri"])
            if path.suffix == ".svg" and path.is_file():
                text = inline(
                    path.read_text(encoding="utf-8"), image.get("alt", ""), f"p{path.stem[:8]}"
                )
                image.replace_self(nodes.raw("", text, format="html"))


def inline(svg: str, alt: str, prefix: str) -> str:
    """Return an SVG file as an element of a page, its names begun with a prefix."""
    svg = TAG.sub(lambda tag: DIGITS.sub(r"\1", tag[0]), LEFT_OUT.sub("", svg))
    used = set(re.findall(r"#([\w-]+)", svg))
    svg = NAMED.sub(lambda m: f' id="{prefix}-{m[1]}"' if m[1] in used else "", svg)
    svg = re.sub(r"(href=\"|url\()#", rf"\1#{prefix}-", svg)
    said = f'class="plot" role="img" aria-label="{html.escape(alt)}"'
    pixels = 'width="{:.0f}" height="{:.0f}"'
    return SIZE.sub(
        lambda m: f"{said} {pixels.format(float(m[1]) / 0.75, float(m[2]) / 0.75)}", svg, count=1
    )

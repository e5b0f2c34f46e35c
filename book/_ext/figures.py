"""Numbers of chapters, figures and exercises, and figures that a page takes from a chapter.

Chapters have their numbers in titles and contents; figures and exercises are counted page by page
(``Figure 1.3``, in an appendix ``Figure 1A.3``). A cell of a notebook gives its figure a caption
and a ``name`` in its metadata, as ``mystnb``: ``figure``.
"""

from __future__ import annotations

import base64
import os
import re
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform
from sphinx.util.docutils import SphinxDirective

from iclutils.errors import unknown
from iclutils.files import read_json

CHAPTER = re.compile(r"notebooks/(\d\d)_(appendix)?")


class Numbered(SphinxTransform):
    """Put the number before the title of a chapter, and give every figure a name and a text."""

    default_priority = 700  # names and targets are made

    def apply(self) -> None:
        title = next(self.document.findall(nodes.title), None)
        chapter = CHAPTER.match(self.env.docname)
        if chapter and title is not None and not chapter[2]:
            title.insert(0, nodes.Text(f"{chapter[1]} "))
        for figure in self.document.findall(nodes.figure):
            if not figure["ids"]:
                self.document.set_id(figure)
            for caption in figure.findall(nodes.caption):
                for image in figure.findall(nodes.image):
                    image["alt"] = image.get("alt") or caption.astext()


def count_by_page(app: Sphinx, env: BuildEnvironment) -> list[str]:
    """Count figures and exercises anew on each page, after the number of its chapter."""
    for page, kinds in env.toc_fignumbers.items():
        chapter = CHAPTER.match(page)
        before = (f"{int(chapter[1])}{'A' if chapter[2] else ''}",) if chapter else ()
        for numbers in kinds.values():
            numbers.update({name: (*before, i) for i, name in enumerate(numbers, 1)})
    return []


class ChapterFigure(SphinxDirective):
    """``{chapterfigure} NAME``: the figure of this name; the content is its caption here."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        name, known = self.arguments[0], []
        for notebook in sorted(Path(self.env.srcdir, "notebooks").glob("*.ipynb")):
            for cell in read_json(notebook)["cells"]:
                about = cell["metadata"].get("mystnb", {})
                known.append(about.get("figure", {}).get("name", ""))
                if known[-1] == name:
                    self.env.note_dependency(str(notebook))
                    datas = [output.get("data", {}) for output in cell["outputs"]]
                    picture = next(data["image/png"] for data in datas if "image/png" in data)
                    alt = about.get("image", {}).get("alt") or about["figure"]["caption"]
                    return [self.figure(picture, alt)]
        raise self.error(str(unknown("figure", name, filter(None, known))))

    def figure(self, picture: str, alt: str) -> nodes.Node:
        """Show it; its file is beside the stored pages, as the sources must stay as they are."""
        path = Path(self.env.doctreedir, "figures", f"{self.arguments[0]}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(picture))
        uri = f"/{os.path.relpath(path, self.env.srcdir)}".replace(os.sep, "/")
        made = nodes.figure("", nodes.image(uri=uri, alt=alt), classes=["chapterfigure"])
        text, _ = self.state.inline_text(" ".join(self.content), self.lineno)
        made += nodes.caption("", "", *text)
        return made

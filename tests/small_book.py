"""A small book, for tests of what the pages are made by."""

import io
import re

from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace, patch_docutils


class Book:
    """Pages that a test writes and builds; ``settings`` are those of Sphinx."""

    def __init__(self, folder, **settings):
        self.source, self.out = folder / "src", folder / "out"
        self.settings, self.pages = settings, []

    def write(self, name, text):
        """Write a file; a page is also listed in the contents."""
        path = self.source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if path.suffix in (".md", ".ipynb") and name != "index.md":
            self.pages = list(dict.fromkeys([*self.pages, name.rpartition(".")[0]]))

    def build(self, start="# I\n"):
        """Build the book, ``start`` and the contents as its first page; return the warnings."""
        self.write("index.md", f"{start}\n```{{toctree}}\n{chr(10).join(self.pages)}\n```\n")
        warnings, trees = io.StringIO(), self.out / ".doctrees"
        with patch_docutils(), docutils_namespace():
            Sphinx(
                self.source, None, self.out, trees, "html", self.settings, None, warnings, True
            ).build()
        return re.sub(r"\x1b\[[\d;]*m", "", warnings.getvalue())

    def html(self, name):
        """Return a built page."""
        return (self.out / f"{name}.html").read_text(encoding="utf-8")

"""What the directives of the book have in common: they write Markdown, which Sphinx then reads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from docutils import nodes
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective

from iclutils import claims
from iclutils.claims import Result
from iclutils.errors import IclError

read_results = cache(claims.read_results)  # once in each build


class Generated(SphinxDirective):
    """Markdown in place of the directive."""

    def markdown(self) -> list[str]:
        """Return the lines."""
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        try:
            text = "\n".join(self.markdown())
        except IclError as error:
            raise self.error(str(error)) from error
        return self.parse_text_to_nodes(text, allow_section_headings=True)


def results(env: BuildEnvironment) -> dict[tuple[str, str], Result]:
    """Return the results of the tree that is built."""
    return read_results(Path(env.srcdir, "book", "results"))


def table(head: Sequence[str], body: Iterable[Sequence[str]], name: str) -> list[str]:
    """Return a table of that class, its cells Markdown; the first column names its row."""
    lines = ["````{list-table}", f":class: {name}", ":header-rows: 1", ":stub-columns: 1"]
    lines += [":widths: auto", ""]
    for row in [head, *body]:
        for mark, cell in zip(["* - ", *["  - "] * (len(row) - 1)], row, strict=True):
            lines.append(mark + cell.replace("\n", "\n    "))
    return [*lines, "````", ""]


def plain(text: object) -> str:
    """Return text as it is, nothing in it taken for Markdown."""
    return re.sub(r"([!-/:-@[-`{-~])", r"\\\1", str(text))

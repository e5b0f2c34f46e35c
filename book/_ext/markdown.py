"""What the directives of the book have in common: they write Markdown, which Sphinx then reads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective

from iclutils import claims, scorecard
from iclutils.claims import Result
from iclutils.errors import IclError, unknown
from iclutils.files import read_json


class Generated(SphinxDirective):
    """Markdown in place of the directive; its page is read again at every build."""

    def markdown(self) -> list[str]:
        """The lines."""
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        """Read the lines where the directive stands."""
        self.env.note_reread()
        try:
            return self.parse(self.markdown())
        except IclError as error:
            raise self.error(str(error)) from error

    def parse(self, lines: list[str]) -> list[nodes.Node]:
        """Read lines where the directive stands."""
        return self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True)


read_results = cache(claims.read_results)  # once in each build


def results(env: BuildEnvironment) -> dict[tuple[str, str], Result]:
    """Results of the tree that is built."""
    return read_results(Path(env.srcdir, "book", "results"))


def rows(env: BuildEnvironment, chapter: str | None = None) -> list[scorecard.Row]:
    """Rows of the scorecard, of a chapter or of all."""
    return scorecard.rows(results(env), chapter)


def notebook(chapter: str) -> str:
    """Name of the notebook of a chapter, given as its number."""
    return next(name for name in claims.chapters() if name.startswith(f"{chapter}_"))


def cells(env: BuildEnvironment, chapter: str) -> tuple[list[Path], list[dict[str, Any]]]:
    """The notebooks of a chapter, given as its number, and all their cells, an appendix last."""
    paths = sorted(
        Path(env.srcdir, "notebooks").glob("[0-9][0-9]_*.ipynb"),
        key=lambda path: (path.stem not in claims.chapters(), path.stem),
    )
    known = [path for path in paths if path.stem[:2] == chapter]
    if not known:
        raise unknown("chapter", chapter, sorted({path.stem[:2] for path in paths}))
    return known, [cell for path in known for cell in read_json(path)["cells"]]


def heading(env: BuildEnvironment, chapter: str) -> str:
    """Number and title of a chapter, or its number alone where the book has no notebook of it."""
    try:
        first = "".join(cells(env, chapter)[1][0]["source"])
    except IclError:
        return chapter
    found = re.search(r"^# (.+)$", first, re.MULTILINE)
    return f"{chapter} {found[1]}" if found else chapter


def table(head: Sequence[str], body: Iterable[Sequence[str]], name: str) -> list[str]:
    """A table of that class, its cells Markdown; the first column names its row."""
    lines = ["````{list-table}", f":class: {name}", ":header-rows: 1", ":stub-columns: 1"]
    lines += [":widths: auto", ""]
    for row in [head, *body]:
        for mark, cell in zip(["* - ", *["  - "] * (len(row) - 1)], row, strict=True):
            lines.append(mark + cell.replace("\n", "\n    "))
    return [*lines, "````", ""]


def plain(text: object) -> str:
    """Text as it is, nothing in it taken for Markdown."""
    return re.sub(r"([!-/:-@[-`{-~])", r"\\\1", str(text))


def commit(of: str) -> str:
    """A commit, short; ``+`` says that the package differed from it, ``none`` is no commit."""
    return plain((of[:10] + "+" * of.endswith("+")) or "none")


def versions(python: str, others: Mapping[str, str]) -> str:
    """Python's version, and those of packages by name."""
    return plain(", ".join([f"python {python}", *(f"{name} {v}" for name, v in others.items())]))

"""``{citation}``: how to cite the book, as text and as BibTeX, from ``CITATION.cff``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

FILE = "CITATION.cff"


class Citation(SphinxDirective):
    """Both forms, each ready to be copied."""

    def run(self) -> list[nodes.Node]:
        """Read the file and write the two forms."""
        self.env.note_dependency(FILE)
        path = Path(self.env.srcdir, FILE)
        if not path.is_file():
            raise self.error(f"The book has no {FILE}.")
        cited = yaml.safe_load(path.read_text(encoding="utf-8"))
        entry = nodes.literal_block(bibtex(cited), bibtex(cited), language="bibtex")
        return [nodes.block_quote("", nodes.paragraph("", sentence(cited))), entry]


def sentence(cited: dict[str, Any]) -> str:
    """Authors, year, title, version, licence and address, as far as they are known."""
    year = f" ({cited['date-released'].year})" if "date-released" in cited else ""
    parts = [
        f"{', '.join(map(name, cited['authors']))}{year}",
        f"{cited['title']}, version {cited['version']}",
        f"Licence: {cited['license']}",
        cited.get("repository-code", ""),
    ]
    return " ".join(f"{part}." for part in parts if part)


def bibtex(cited: dict[str, Any]) -> str:
    """The same as a BibTeX entry."""
    fields = {
        "author": " and ".join(_exact(name(author)) for author in cited["authors"]),
        "title": _exact(cited["title"]),
        "version": str(cited["version"]),
        "year": str(cited["date-released"].year) if "date-released" in cited else "",
        "url": cited.get("repository-code", ""),
    }
    lines = [f"  {field} = {{{value}}}," for field, value in fields.items() if value]
    return "\n".join(["@software{icl_taken_apart,", *lines, "}"])


def name(author: dict[str, str]) -> str:
    """A person's or a group's name."""
    person = [author[part] for part in ("given-names", "family-names") if part in author]
    return " ".join(person) or author["name"]


def _exact(text: str) -> str:
    """In braces, so that BibTeX leaves words and capitals as they are."""
    return f"{{{text}}}"

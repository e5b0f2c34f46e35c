"""``{messages}``: the pages about errors beside the page that holds it, each with its message."""

from __future__ import annotations

import re
from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

SHOWN = re.compile(r"^## You see\n\n```text\n(.*?)\n```", re.DOTALL | re.MULTILINE)


def shown(page: Path) -> str:
    """The message that a page about an error shows, on one line."""
    found = SHOWN.search(page.read_text(encoding="utf-8"))
    return " ".join(found[1].split()) if found else ""


class Messages(SphinxDirective):
    """A table of the pages."""

    def run(self) -> list[nodes.Node]:
        """Parse the Markdown of the table."""
        lines = ["| Page | For example |", "|---|---|"]
        for page in sorted(Path(self.env.doc2path(self.env.docname)).parent.glob("*.md")):
            self.env.note_dependency(str(page))
            if message := shown(page).replace("|", r"\|"):
                lines.append(f"| {{doc}}`{page.stem}` | `` {message} `` |")
        container = nodes.Element()
        self.state.nested_parse(StringList(lines), 0, container)
        return container.children

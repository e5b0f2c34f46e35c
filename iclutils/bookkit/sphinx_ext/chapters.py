"""What other pages take from the chapters, and what the chapters get: links to the scorecard.

- ``{chapterfigure}``: a figure of a chapter, with its text for those who cannot see it;
- where a cell printed a verdict, the name of the claim becomes a link to its row; claims that the
  committed run did not judge are listed at the end of the section that would.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from ...errors import IclError
from .. import claims, presets
from ..claims import VERDICTS, Claim
from . import notebooks, shown
from .scorecard import PAGE, anchor

PRINTED = re.compile(
    rf"^((?:{'|'.join([*VERDICTS, 'no claim', 'undefined'])}) +)(\d\d\.\w+)", re.MULTILINE
)


class ChapterFigure(SphinxDirective):
    """``{chapterfigure} NN-section``: a figure of that section, its caption the content.

    The option ``number`` counts the figures of the section, from 1.
    """

    required_arguments = 1
    has_content = True
    option_spec = {"number": directives.positive_int}  # noqa: RUF012 - docutils' own form

    def run(self) -> list[nodes.Node]:
        """Build the figure."""
        shown.use(self.env)
        label, number = self.arguments[0], self.options.get("number", 1)
        try:
            page, cells = notebooks.read(self.env, label.split("-")[0])
            picture, alt = notebooks.figure(cells, label, number)
        except IclError as error:
            raise self.error(str(error)) from error
        self.env.note_dependency(f"{page}.ipynb")
        # Beside the stored pages and not among the sources, which must stay as they are.
        path = Path(self.env.doctreedir, "figures", f"{label}-{number}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture)
        uri = f"/{os.path.relpath(path, self.env.srcdir)}".replace(os.sep, "/")
        shown_figure = nodes.figure("", nodes.image(uri=uri, alt=alt), classes=["chapterfigure"])
        if self.content:
            said, _ = self.state.inline_text(" ".join(self.content), self.lineno)
            shown_figure += nodes.caption("", "", *said)
        return [shown_figure]


def link_claims(app: Sphinx, doctree: nodes.document) -> None:
    """Lead from a chapter to its rows of the scorecard, if the book has one."""
    page = app.env.docname
    stems = {f"notebooks/{name}": name for name in claims.chapters()}
    if page not in stems or PAGE not in app.env.found_docs:
        return
    shown.use(app.env)
    ledger = claims.ledger(stems[page])
    judged: set[str] = set()
    for block in doctree.findall(nodes.literal_block):
        if "stream" in block["classes"] and (names := _verdicts(block, ledger, page)):
            judged |= names
    rest = [claim for claim in ledger.values() if claim.id not in judged]
    for cell in dict.fromkeys(claim.cell for claim in rest):
        section = doctree.ids.get(doctree.nameids.get(f"{stems[page][:2]}-{cell}", ""))
        while section is not None and not isinstance(section, nodes.section):
            section = section.parent
        if section is None:  # the scorecard warns of a label that is not there
            continue
        lead = "Judged here, but not in the run shown: "
        line = nodes.paragraph("", lead, classes=["claims-here"])
        for number, claim in enumerate(claim for claim in rest if claim.cell == cell):
            line += [nodes.Text(", " * bool(number)), _link(claim, page)]
        line += nodes.Text(".")
        inner = next((i for i, n in enumerate(section) if isinstance(n, nodes.section)), None)
        section.insert(len(section) if inner is None else inner, line)


def _verdicts(block: nodes.literal_block, ledger: dict[str, Claim], page: str) -> set[str]:
    """Make the claims that an output names links; return their ids."""
    text, end, found = block.astext(), 0, set()
    children: list[nodes.Node] = []
    for match in PRINTED.finditer(text):
        claim = ledger.get(match[2])
        if claim is None:
            continue
        children += [nodes.Text(text[end : match.start(2)]), _link(claim, page)]
        end = match.end()
        found.add(claim.id)
    if found:
        # Sphinx colours a block as code where its source is its text; this one it leaves alone.
        block.rawsource = ""
        block.children = []
        block += [*children, nodes.Text(text[end:])]
    return found


def _link(claim: Claim, page: str) -> nodes.Node:
    """The id as a link to its first row of the scorecard."""
    return addnodes.pending_xref(
        "",
        nodes.inline("", claim.id),
        refdomain="std",
        reftype="ref",
        reftarget=anchor(claim, next(tier for tier in presets.TIERS if tier in claim.tiers)),
        refdoc=page,
        refexplicit=True,
        refwarn=True,
    )

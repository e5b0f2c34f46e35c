"""Links from the chapters to the scorecard.

- tables of claims (``book.table``) show the results of the tree that is built;
- where a cell printed a verdict, the name of the claim becomes a link to its row; claims that the
  committed run did not judge are listed at the end of the section that would;
- before the first cell stands how many findings hold, and where it says what that means.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

from iclutils import claims, scorecard
from iclutils.claims import VERDICTS, Claim

from . import scorecard as cards
from .markdown import results, rows

VERDICTS_PAGE = "book/verdicts"
PRINTED = re.compile(
    rf"^((?:{'|'.join([*VERDICTS, 'no claim', 'undefined'])}) +)(\d\d\.\w+)", re.MULTILINE
)
TABLE = re.compile(r'<table class="[\w ]*compared" data-claims="([^"]*)"')


def link_claims(app: Sphinx, doctree: nodes.document) -> None:
    """Lead from a chapter to its rows of the scorecard, if the book has one."""
    docname = app.env.docname
    stem = docname.removeprefix("notebooks/")
    ledger = {k: claim for k, claim in claims.ledger().items() if claim.chapter == stem[:2]}
    if stem == docname or not ledger or cards.PAGE not in app.env.found_docs:
        return
    app.env.note_reread()  # whether the ledger has changed is not seen here
    if stem in claims.chapters():
        _say_how_many_hold(app.env, doctree, stem[:2])
    _renew_tables(app.env, doctree)
    judged: set[str] = set()
    for block in doctree.findall(nodes.literal_block):
        if "stream" in block["classes"]:
            judged |= _link_verdicts(block, ledger, docname)
    rest = [claim for claim in ledger.values() if claim.id not in judged]
    for cell in dict.fromkeys(claim.cell for claim in rest):
        section = doctree.ids.get(doctree.nameids.get(f"{stem[:2]}-{cell}", ""))
        while section is not None and not isinstance(section, nodes.section):
            section = section.parent
        if section is None:  # the scorecard warns of a label that is not there
            continue
        lead = "Put to another model than this run's, with results on the scorecard: "
        line = nodes.paragraph("", lead, classes=["claims-here"])
        for number, claim in enumerate(claim for claim in rest if claim.cell == cell):
            line += [nodes.Text(", " * bool(number)), _to_row(claim, docname)]
        line += nodes.Text(".")
        inner = next((i for i, n in enumerate(section) if isinstance(n, nodes.section)), None)
        section.insert(len(section) if inner is None else inner, line)


def _say_how_many_hold(env: BuildEnvironment, doctree: nodes.document, chapter: str) -> None:
    """Before the first cell."""
    first = next((n for n in doctree.findall(nodes.container) if "cell" in n["classes"]), None)
    found = rows(env, chapter)
    if first is None or not cards.sentence(found):
        return
    chosen = f"{os.path.relpath(cards.PAGE, Path(env.docname).parent)}.html?chapter={chapter}"
    link = nodes.reference("", "the scorecard", refuri=chosen, internal=True)
    line = nodes.paragraph("", "", classes=["claims-here"])
    line += nodes.Text(f"Findings of this chapter on small models: {cards.sentence(found)} (")
    line += [link, nodes.Text(").")]
    if VERDICTS_PAGE in env.found_docs:
        text = "What a verdict means"
        link = _link(text, env.docname, reftype="doc", reftarget=f"/{VERDICTS_PAGE}")
        line += [nodes.Text(" "), link, nodes.Text(".")]
    first.parent.insert(first.parent.index(first), line)


def _renew_tables(env: BuildEnvironment, doctree: nodes.document) -> None:
    """Show in tables of claims what the results of this tree say, with links to their rows."""
    page = f"{os.path.relpath(cards.PAGE, Path(env.docname).parent)}.html"
    for shown in doctree.findall(nodes.raw):
        if match := TABLE.search(shown.astext()):
            ledger = claims.ledger()
            known = [ledger[name] for name in match[1].split() if name in ledger]
            renewed = [scorecard.row(claim, results(env)) for claim in known]
            shown.children = [nodes.Text(scorecard.compared_html(renewed, page))]


def _link_verdicts(block: nodes.literal_block, ledger: dict[str, Claim], docname: str) -> set[str]:
    """Make the claims that an output names links; return their ids."""
    text, end, found = block.astext(), 0, set()
    children: list[nodes.Node] = []
    for match in PRINTED.finditer(text):
        if claim := ledger.get(match[2]):
            children += [nodes.Text(text[end : match.start(2)]), _to_row(claim, docname)]
            end = match.end()
            found.add(claim.id)
    if found:
        # Sphinx colours a block as code where its source is its text; this one it leaves alone.
        block.rawsource = ""
        block.children = []
        block += [*children, nodes.Text(text[end:])]
    return found


def _to_row(claim: Claim, docname: str) -> nodes.Node:
    """The id as a link to its row of the scorecard."""
    return _link(claim.id, docname, reftype="ref", reftarget=scorecard.anchor(claim))


def _link(text: str, docname: str, **target: str) -> nodes.Node:
    """A link from a page, which Sphinx resolves when all pages are read."""
    options = {"refdomain": "std", "refdoc": docname, "refexplicit": True, "refwarn": True}
    return addnodes.pending_xref("", nodes.inline("", text), **options, **target)

"""The scorecard page: a summary, a filter, a table for each chapter, and where the numbers come
from; and the verdict counts of the front page.

The filter's script (``book/_static/scorecard.js``) shows the form and hides rows by the classes
that stand on them. Without it the page is the whole table.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from ...errors import IclError
from .. import claims, presets, scorecard
from ..claims import VERDICTS, Claim, Result
from ..scorecard import Row
from . import notebooks, shown, sources
from .tables import commit, linked, table, text, versions

PAGE = "book/scorecard"
SCRIPT = "scorecard.js"


def _rows(directive: SphinxDirective) -> list[Row]:
    """All rows, for a page that is read again when they change."""
    shown.use(directive.env)
    try:
        return scorecard.rows(shown.results(directive.env))
    except IclError as error:
        raise directive.error(str(error)) from error


class Scorecard(SphinxDirective):
    """``{scorecard}``: a summary, a table for each chapter, and where the numbers come from."""

    def run(self) -> list[nodes.Node]:
        """Build the tables."""
        rows = _rows(self)
        if not rows:
            return [text("No claims yet.")]
        self.runs = sorted({_run(row.result) for row in rows if row.result})
        parts: list[nodes.Node] = [*self.summary(rows), self.filter(rows)]
        for chapter in claims.chapters():
            own = [row for row in rows if row.claim.chapter == chapter.split("_")[0]]
            parts.append(self.section(f"Chapter {chapter.split('_')[0]}", self.chapter(own)))
        if self.runs:
            parts.append(self.section("Runs", [self.provenance()]))
        return parts

    def summary(self, rows: list[Row]) -> Iterator[nodes.Node]:
        """One sentence, and the counts by chapter and tier; each count leads to its rows."""
        number = len({row.claim.id for row in rows})
        yield _tally(f"{number} claims in {len(rows)} rows, one for each tier: ", rows, "")
        body = []
        for (chapter, tier), found in scorecard.counts(rows).items():
            some = {"chapter": chapter, "tier": tier}
            counted = [
                linked(str(found[v]), address("", **some, verdict=v)) if found[v] else text("0")
                for v in VERDICTS
            ]
            body.append([[linked(chapter, address("", chapter=chapter))], [text(tier)]])
            body[-1] += [[cell] for cell in counted]
        head = ["Chapter", "Tier", *(verdict.capitalize() for verdict in VERDICTS)]
        yield table(head, body, "scorecard-counts")

    def filter(self, rows: list[Row]) -> nodes.Node:
        """The form by which the script hides rows; hidden itself until the script runs."""
        works = sources.names(self.env, {key for row in rows for key in sources.keys(row.claim)})
        chapters = sorted({row.claim.chapter for row in rows})
        found = {
            "chapter": _options({name: notebooks.title(self.env, name) for name in chapters}),
            "source": "".join(
                f'<optgroup label="{escape(group)}">{_options(named)}</optgroup>'
                for group, named in works.items()
            ),
            "verdict": _options({v: v for v in VERDICTS if any(r.verdict == v for r in rows)}),
            "tier": _options({name: name for name in presets.TIERS}),
        }
        fields = {
            name: f'<select name="{name}" id="filter-{name}"><option value="">all</option>'
            f"{options}</select>"
            for name, options in found.items()
        }
        fields["words"] = '<input type="search" name="words" id="filter-words" autocomplete="off">'
        choices = "".join(
            f'<div><label for="filter-{name}">{name.capitalize()}</label>{field}</div>'
            for name, field in fields.items()
        )
        form = (
            '<form class="scorecard-filter" role="search" aria-label="Filter the claims" hidden>'
            f'{choices}<button type="reset">Show all</button><output aria-live="polite"></output>'
            "</form>"
        )
        return nodes.raw("", form, format="html")

    def chapter(self, rows: list[Row]) -> list[nodes.Node]:
        """The table of one chapter."""
        head = ["Claim", "Verdict", "Ours", "Published", "Tier"]
        body, kinds, before = [], [], ""
        for row in rows:
            claim = row.claim
            source = self.inline(claim.source, "said")
            cells = [self.statement(row), [_badge(row.verdict)], [text(row.value)]]
            body.append([*cells, [text(scorecard.published(claim)), source], self.tier(row)])
            # The style sheet hides what the row above has already said, if that one is shown.
            kinds.append([*_kinds(row), *(["again"] if claim.id == before else [])])
            before = claim.id
        return [table(head, body, "scorecard", stub=True, classes=kinds)]

    def statement(self, row: Row) -> list[nodes.Node]:
        """Id with a link to the cell that checks it, statement, and how it is judged."""
        claim = row.claim
        name = anchor(claim, row.tier)
        title = nodes.paragraph(
            "", "", self.link(claim), ids=[name], names=[name], classes=["claim-id"]
        )
        self.state.document.note_explicit_target(title, title)
        rules = [f"{verdict} if {_words(rule)}" for verdict, rule in claim.tiers[row.tier].items()]
        judged = nodes.bullet_list()
        for line in (
            f"Measured: {claim.measure}",
            f"{'; '.join(rules)}; else not reproduced".capitalize(),
            f"Margin: {claim.sigmas:g} spreads on either side" if claim.sigmas else "",
            f"Bounds: {claim.tolerance}",
        ):
            if line:
                judged += nodes.list_item("", self.inline(line))
        return [title, self.inline(claim.statement, "said"), *_details("How it is judged", judged)]

    def link(self, claim: Claim) -> nodes.Node:
        """The id as a link into the chapter's notebook, if the book has it."""
        name = nodes.literal(claim.id, claim.id)
        stems = [name for name in claims.chapters() if name.split("_")[0] == claim.chapter]
        if f"notebooks/{stems[0]}" not in self.env.found_docs:
            return name
        return addnodes.pending_xref(
            "",
            name,
            refdomain="std",
            reftype="ref",
            reftarget=f"{claim.chapter}-{claim.cell}",
            refdoc=self.env.docname,
            refexplicit=True,
            refwarn=True,
        )

    def tier(self, row: Row) -> list[nodes.Node]:
        """The tier, and which run below the number comes from."""
        if row.result is None:
            return [text(row.tier)]
        number = self.runs.index(_run(row.result)) + 1
        link = nodes.reference("", f"run {number}", refid=f"run-{number}", internal=True)
        return [text(row.tier), nodes.paragraph("", "", link, classes=["run"])]

    def provenance(self) -> nodes.Node:
        """One row for each distinct run."""
        head = ["Run", "Tier", "Model", "Seed", "Device", "Date", "Commit", "Versions"]
        body = []
        for number, run in enumerate(self.runs, 1):
            first = nodes.paragraph("", str(number), ids=[f"run-{number}"])
            body.append([[first], *([text(cell)] for cell in run)])
        return table(head, body, "scorecard-runs", stub=True)

    def section(self, title: str, content: list[nodes.Node]) -> nodes.section:
        """A section of the page, which also shows in its table of contents."""
        section = nodes.section("", nodes.title("", title), *content)
        section["names"].append(nodes.fully_normalize_name(title))
        self.state.document.note_implicit_target(section, section)
        return section

    def inline(self, markdown: str, kind: str = "") -> nodes.paragraph:
        """A paragraph of inline Markdown, of that class."""
        children, _ = self.state.inline_text(markdown, self.lineno)
        return nodes.paragraph("", "", *children, classes=[kind] if kind else [])


class Verdicts(SphinxDirective):
    """``{verdicts}``: how many rows of the scorecard have which verdict, as links to them."""

    def run(self) -> list[nodes.Node]:
        """Build the sentence."""
        rows = _rows(self)
        here = Path(self.env.docname).parent
        number = len({row.claim.id for row in rows})
        lead = f"{number} claims, each at one or two sizes of model: "
        return [_tally(lead, rows, f"{os.path.relpath(PAGE, here)}.html")]


def _tally(lead: str, rows: list[Row], page: str) -> nodes.paragraph:
    """One sentence with the count of each verdict, each a link into the scorecard."""
    sentence = nodes.paragraph("", lead)
    tally = {v: count for v in VERDICTS if (count := sum(row.verdict == v for row in rows))}
    for place, (verdict, count) in enumerate(tally.items(), 1):
        target = address(page, verdict=verdict)
        sentence += nodes.reference("", f"{count} {verdict}", refuri=target, internal=True)
        sentence += nodes.Text(", " if place < len(tally) else ".")
    return sentence


def anchor(claim: Claim, tier: str) -> str:
    """Name of a claim's row at one tier, as the page's target."""
    return f"claim-{claim.id.replace('.', '-').replace('_', '-')}-{tier}"


def address(page: str, **chosen: str) -> str:
    """Address of the scorecard with the filter set; ``page`` may be ``""`` on the page itself."""
    return f"{page}?{urlencode(chosen)}"


def load_script(
    app: Sphinx, name: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Load the filter's script on the page that has the table, and on no other."""
    if doctree and any("scorecard" in found["classes"] for found in doctree.findall(nodes.table)):
        app.add_js_file(SCRIPT, loading_method="defer")


def _kinds(row: Row) -> list[str]:
    """Classes of a row, ``on-FIELD-VALUE``, by which the script chooses."""
    fields = [("chapter", row.claim.chapter), ("tier", row.tier), ("verdict", row.verdict)]
    fields += [("source", key) for key in sources.keys(row.claim)]
    return [f"on-{field}-{value.replace(' ', '-')}" for field, value in fields]


def _options(named: dict[str, str]) -> str:
    return "".join(
        f'<option value="{escape(value)}">{escape(name)}</option>' for value, name in named.items()
    )


def _run(result: Result) -> tuple[str, ...]:
    """What results of one run have in common: the columns of the table of runs."""
    return (
        result.tier,
        result.model,
        str(result.seed),
        result.device,
        result.date,
        commit(result.commit),
        versions(result.python, result.versions),
    )


def _words(criterion: str) -> str:
    """A criterion of the ledger in words."""
    low, between, high = criterion.replace("-", scorecard.MINUS).partition(" .. ")
    if between:
        return f"between {low} and {high}"
    for sign, word in (("<=", "at most"), (">=", "at least"), ("<", "below"), (">", "above")):
        low = low.replace(sign, word)
    return low


def _badge(verdict: str) -> nodes.paragraph:
    """The verdict in words; the style sheet adds a sign and a colour."""
    kind = f"verdict-{verdict.replace(' ', '-')}"
    return nodes.paragraph("", "", nodes.inline("", verdict, classes=["verdict", kind]))


def _details(summary: str, content: nodes.Node) -> Iterator[nodes.Node]:
    """``content`` folded under a summary."""
    yield nodes.raw("", f"<details><summary>{summary}</summary>", format="html")
    yield content
    yield nodes.raw("", "</details>", format="html")

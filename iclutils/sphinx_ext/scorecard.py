"""The scorecard page: a summary, a table for each chapter, and where the numbers come from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.util.docutils import SphinxDirective

from .. import claims, scorecard
from ..claims import VERDICTS, Claim, Result
from ..errors import IclError
from ..scorecard import Row
from . import shown


class Scorecard(SphinxDirective):
    """``{scorecard}``: a summary, a table for each chapter, and where the numbers come from."""

    def run(self) -> list[nodes.Node]:
        """Build the tables."""
        shown.use(self.env)
        try:
            rows = scorecard.rows(shown.results(self.env))
        except IclError as error:
            raise self.error(str(error)) from error
        if not rows:
            return [nodes.paragraph("", "No claims yet.")]
        self.runs = sorted({_run(row.result) for row in rows if row.result})
        parts: list[nodes.Node] = [*self.summary(rows)]
        for chapter in claims.chapters():
            own = [row for row in rows if row.claim.chapter == chapter.split("_")[0]]
            parts.append(self.section(f"Chapter {chapter.split('_')[0]}", self.chapter(own)))
        if self.runs:
            parts.append(self.section("Runs", [self.provenance()]))
        return parts

    def summary(self, rows: list[Row]) -> Iterator[nodes.Node]:
        """One sentence, and the counts by chapter and tier."""
        tally = {verdict: sum(row.verdict == verdict for row in rows) for verdict in VERDICTS}
        listed = ", ".join(f"{count} {verdict}" for verdict, count in tally.items() if count)
        number = len({row.claim.id for row in rows})
        yield nodes.paragraph(
            "", f"{number} claims in {len(rows)} rows, one for each tier: {listed}."
        )
        body = [
            [[_text(cell)] for cell in (chapter, tier, *(str(found[v]) for v in VERDICTS))]
            for (chapter, tier), found in scorecard.counts(rows).items()
        ]
        head = ["Chapter", "Tier", *(verdict.capitalize() for verdict in VERDICTS)]
        yield _table(head, body, "scorecard-counts")

    def chapter(self, rows: list[Row]) -> list[nodes.Node]:
        """The table of one chapter."""
        head = ["Claim", "Published", "Ours", "Tier", "Verdict"]
        body, before = [], ""
        for row in rows:
            claim, again = row.claim, row.claim.id == before
            source = [] if again else [self.inline(claim.source)]
            cells = [self.statement(row, again), [_text(scorecard.published(claim)), *source]]
            body.append([*cells, [_text(row.value)], self.tier(row), [_badge(row.verdict)]])
            before = claim.id
        return [_table(head, body, "scorecard", stub=True)]

    def statement(self, row: Row, again: bool) -> list[nodes.Node]:
        """Id with a link to the cell that checks it, statement, and how it is judged."""
        claim = row.claim
        name = f"claim-{claim.id.replace('.', '-').replace('_', '-')}-{row.tier}"
        title = nodes.paragraph("", "", self.link(claim), ids=[name], classes=["claim-id"])
        self.state.document.note_explicit_target(title, title)
        said = [] if again else [self.inline(claim.statement)]
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
        return [title, *said, *_details("How it is judged", judged)]

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
            return [_text(row.tier)]
        number = self.runs.index(_run(row.result)) + 1
        link = nodes.reference("", f"run {number}", refid=f"run-{number}", internal=True)
        return [_text(row.tier), nodes.paragraph("", "", link, classes=["run"])]

    def provenance(self) -> nodes.Node:
        """One row for each distinct run."""
        head = ["Run", "Tier", "Model", "Seed", "Device", "Date", "Commit", "Versions"]
        body = []
        for number, run in enumerate(self.runs, 1):
            first = nodes.paragraph("", str(number), ids=[f"run-{number}"])
            body.append([[first], *([_text(cell)] for cell in run)])
        return _table(head, body, "scorecard-runs", stub=True)

    def section(self, title: str, content: list[nodes.Node]) -> nodes.section:
        """A section of the page, which also shows in its table of contents."""
        section = nodes.section("", nodes.title("", title), *content)
        section["names"].append(nodes.fully_normalize_name(title))
        self.state.document.note_implicit_target(section, section)
        return section

    def inline(self, text: str) -> nodes.paragraph:
        """A paragraph of inline Markdown."""
        children, _ = self.state.inline_text(text, self.lineno)
        return nodes.paragraph("", "", *children)


def _run(result: Result) -> tuple[str, ...]:
    """What results of one run have in common: the columns of the table of runs."""
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    return (
        result.tier,
        result.model,
        str(result.seed),
        result.device,
        result.date,
        (result.commit[:10] + "+" * result.commit.endswith("+")) or "none",
        f"python {result.python}, {versions}",
    )


def _words(criterion: str) -> str:
    """A criterion of the ledger in words."""
    low, between, high = criterion.replace("-", scorecard.MINUS).partition(" .. ")
    if between:
        return f"between {low} and {high}"
    for sign, word in (("<=", "at most"), (">=", "at least"), ("<", "below"), (">", "above")):
        low = low.replace(sign, word)
    return low


def _text(text: str) -> nodes.paragraph:
    return nodes.paragraph("", text)


def _badge(verdict: str) -> nodes.paragraph:
    """The verdict in words; the style sheet adds a sign and a colour."""
    kind = f"verdict-{verdict.replace(' ', '-')}"
    return nodes.paragraph("", "", nodes.inline("", verdict, classes=["verdict", kind]))


def _details(summary: str, content: nodes.Node) -> Iterator[nodes.Node]:
    """``content`` folded under a summary."""
    yield nodes.raw("", f"<details><summary>{summary}</summary>", format="html")
    yield content
    yield nodes.raw("", "</details>", format="html")


def _table(
    head: list[str], body: list[list[list[Any]]], name: str, stub: bool = False
) -> nodes.table:
    """A table; each cell of the body is a list of nodes."""
    group = nodes.tgroup(cols=len(head))
    for column in range(len(head)):
        group += nodes.colspec(colwidth=1, **({"stub": 1} if stub and not column else {}))
    lines = [[[_text(cell)] for cell in head], *body]
    made = [nodes.row("", *(nodes.entry("", *cell) for cell in line)) for line in lines]
    group += nodes.thead("", made[0])
    group += nodes.tbody("", *made[1:])
    return nodes.table("", group, classes=[name])

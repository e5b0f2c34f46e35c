"""The scorecard page: a summary, a filter, a table for each chapter, and where the numbers come
from; and the verdict counts of the front page.

The filter's script (``book/_static/scorecard.js``) shows the form and hides rows by the classes
that stand on them. Without it the page is the whole table.
"""

from __future__ import annotations

import os
import re
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from docutils import nodes
from sphinx.application import Sphinx

from .. import presets, scorecard
from ..claims import VERDICTS, Claim, Result
from ..scorecard import Row
from . import chapters
from .markdown import Generated, commit, plain, rows, table, versions

PAGE = "book/scorecard"
SCRIPT = "scorecard.js"
OURS = "ours"


class Scorecard(Generated):
    """``{scorecard}``: a summary, a table for each chapter, and where the numbers come from."""

    def run(self) -> list[nodes.Node]:
        """The summary and the filter, then a section for each chapter."""
        parts = super().run()
        for title, own in self.chapters.items():
            head = ["Claim", "Verdict", "Ours", "Published", "Tier"]
            body = [self.cells(row) for row in own]
            parts.append(self.section(title, table(head, body, "scorecard")))
            (found,) = parts[-1].findall(nodes.tbody)
            _mark(found, own)
        if self.runs:
            head = ["Run", "Tier", "Model", "Seed", "Device", "Date", "Commit", "Versions"]
            body = [[f"{{#run-{n}}}\n{n}", *run] for n, run in enumerate(self.runs, 1)]
            parts.append(self.section("Runs", table(head, body, "scorecard-runs")))
        return parts

    def section(self, title: str, lines: list[str]) -> nodes.section:
        """A section of the page, which also shows in its table of contents."""
        section = nodes.section("", nodes.title("", title), *self.parse(lines))
        section["names"].append(nodes.fully_normalize_name(title))
        self.state.document.note_implicit_target(section, section)
        return section

    def markdown(self) -> list[str]:
        """The summary and the filter."""
        self.rows = rows(self.env)
        self.chapters: dict[str, list[Row]] = {}
        for row in self.rows:
            self.chapters.setdefault(f"Chapter {row.claim.chapter}", []).append(row)
        self.runs = sorted({_run(row.result) for row in self.rows if row.result})
        if not self.rows:
            return ["No claims yet."]
        number = len({row.claim.id for row in self.rows})
        lead = f"{number} claims in {len(self.rows)} rows, one for each tier: "
        lines = [_tally(lead, self.rows, ""), "", *self.counts()]
        return [*lines, "```{raw} html", self.form(), "```", ""]

    def counts(self) -> list[str]:
        """The counts by chapter and tier; each count leads to its rows."""
        body = []
        for (chapter, tier), found in scorecard.counts(self.rows).items():
            chosen = {"chapter": chapter, "tier": tier}
            counted = [
                _link(str(found[v]), "", **chosen, verdict=v) if found[v] else "0" for v in VERDICTS
            ]
            body.append([_link(chapter, "", chapter=chapter), tier, *counted])
        head = ["Chapter", "Tier", *(verdict.capitalize() for verdict in VERDICTS)]
        return table(head, body, "scorecard-counts")

    def cells(self, row: Row) -> list[str]:
        """One row: its claim, how it is judged, verdict, figures and tier."""
        claim = row.claim
        name = f"`{claim.id}`"
        if f"notebooks/{chapters.page(claim.chapter)}" in self.env.found_docs:
            name = f"[{name}](#{claim.chapter}-{claim.cell})"
        rules = [f"{verdict} if {_words(rule)}" for verdict, rule in claim.tiers[row.tier].items()]
        judged = [
            f"Measured: {claim.measure}",
            f"{'; '.join(rules)}; else does not hold".capitalize(),
            f"Bounds: {claim.tolerance}",
        ]
        statement = [f"{{#{anchor(claim, row.tier)} .claim-id}}", name, "", "{.said}"]
        statement += [_line(claim.statement), "", "<details><summary>How it is judged</summary>"]
        statement += ["", *(f"- {_line(text)}" for text in judged), "", "</details>"]
        verdict = f"[{row.verdict}]{{.verdict .verdict-{row.verdict.replace(' ', '-')}}}"
        published = f"{plain(scorecard.published(claim))}\n\n{{.said}}\n{_line(claim.source)}"
        tier = row.tier
        if row.result:
            number = self.runs.index(_run(row.result)) + 1
            tier += f"\n\n{{.run}}\n[run {number}](#run-{number})"
        return ["\n".join(statement), verdict, plain(row.value), published, tier]

    def form(self) -> str:
        """The form by which the script hides rows; hidden itself until the script runs."""
        numbers = sorted({row.claim.chapter for row in self.rows})
        found = {
            "chapter": _options({name: chapters.title(self.env, name) for name in numbers}),
            "source": "".join(
                f'<optgroup label="{escape(group)}">{_options(named)}</optgroup>'
                for group, named in self.sources().items()
            ),
            "verdict": _options({v: v for v in VERDICTS if any(r.verdict == v for r in self.rows)}),
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
        return (
            '<form class="scorecard-filter" role="search" aria-label="Filter the claims" hidden>'
            f'{choices}<button type="reset">Show all</button><output aria-live="polite"></output>'
            "</form>"
        )

    def sources(self) -> dict[str, dict[str, str]]:
        """Short names of the works that claims rest on, by citation key, in groups."""
        entries = self.env.get_domain("cite").bibdata.data.entries  # type: ignore[attr-defined]
        wanted = {key for row in self.rows for key in keys(row.claim)}
        groups: dict[str, dict[str, str]] = {"Study notes": {}, "Papers and code": {}}
        for key in wanted & set(entries):
            note = "howpublished" in entries[key].fields
            groups["Study notes" if note else "Papers and code"][key] = _work(entries[key], note)
        groups["This book"] = {OURS: "our own questions and controls"} if OURS in wanted else {}
        by_name = {
            group: dict(sorted(found.items(), key=lambda item: item[1].lower()))
            for group, found in groups.items()
        }
        return {group: found for group, found in by_name.items() if found}


class Verdicts(Generated):
    """``{verdicts}``: how many rows of the scorecard have which verdict, as links to them."""

    def markdown(self) -> list[str]:
        """The sentence."""
        found = rows(self.env)
        number = len({row.claim.id for row in found})
        here = Path(self.env.docname).parent
        lead = f"{number} claims, each at one or two sizes of model: "
        return [_tally(lead, found, f"{os.path.relpath(PAGE, here)}.html")]


def load_script(
    app: Sphinx, name: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Load the filter's script on the page that has the table, and on no other."""
    if doctree and any("scorecard" in found["classes"] for found in doctree.findall(nodes.table)):
        app.add_js_file(SCRIPT, loading_method="defer")


def anchor(claim: Claim, tier: str) -> str:
    """Name of a claim's row at one tier, as the page's target."""
    return f"claim-{claim.id.replace('.', '-').replace('_', '-')}-{tier}"


def keys(claim: Claim) -> list[str]:
    """Citation keys in a claim's source, or ``["ours"]`` where it names none."""
    groups = re.findall(r"\{cite(?::\w+)?\}`([^`]+)`", claim.source)
    return [key.strip() for group in groups for key in group.split(",")] or [OURS]


def _mark(body: nodes.tbody, found: list[Row]) -> None:
    """Put on each row the classes ``on-FIELD-VALUE`` by which the script chooses."""
    before = ""
    for node, row in zip(body.children, found, strict=True):
        fields = [("chapter", row.claim.chapter), ("tier", row.tier), ("verdict", row.verdict)]
        fields += [("source", key) for key in keys(row.claim)]
        node["classes"] += [f"on-{name}-{value.replace(' ', '-')}" for name, value in fields]
        # The style sheet hides what the row above has already said, if that one is shown.
        node["classes"] += ["again"] * (row.claim.id == before)
        before = row.claim.id


def _tally(lead: str, found: list[Row], page: str) -> str:
    """One sentence with the count of each verdict, each a link into the scorecard."""
    tally = {v: count for v in VERDICTS if (count := sum(row.verdict == v for row in found))}
    return lead + ", ".join(_link(f"{n} {v}", page, verdict=v) for v, n in tally.items()) + "."


def _link(text: str, page: str, **chosen: str) -> str:
    """A link to the scorecard with the filter set; ``page`` is ``""`` on the page itself."""
    target = escape(f"{page}?{urlencode(chosen)}")
    return f'<a class="reference internal" href="{target}">{text}</a>'


def _options(named: dict[str, str]) -> str:
    return "".join(
        f'<option value="{escape(value)}">{escape(name)}</option>' for value, name in named.items()
    )


def _run(result: Result) -> tuple[str, ...]:
    """What results of one run have in common: the columns of the table of runs."""
    return (
        result.tier,
        plain(result.model),
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


def _line(markdown: str) -> str:
    return " ".join(markdown.split())


def _work(entry: Any, note: bool) -> str:
    """Authors and year; of a note the title too, since several are unsigned."""
    people = [" ".join([*p.prelast_names, *p.last_names]) for p in entry.persons["author"]]
    others = len(people) > 2 or people[-1] == "others"
    who = f"{people[0]} et al." if others else " and ".join(people)
    title = f": {entry.fields['title']}" if note else ""
    return re.sub(r"[{}]|``|''", "", f"{who} {entry.fields.get('year', '')}".strip() + title)

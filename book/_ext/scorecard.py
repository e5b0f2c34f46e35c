"""The scorecard page: totals, a filter, a table for each chapter, and where the numbers come from;
and the totals of the front page.

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

from iclutils import scorecard
from iclutils.claims import FAILS, HOLDS, JUDGED, KINDS, NULL, VERDICTS, Claim, Result
from iclutils.presets import TIERS
from iclutils.scorecard import COLUMNS, ORIGINS, Entry, Row, of, tally

from .markdown import Generated, commit, heading, notebook, plain, rows, table, versions

PAGE = "book/scorecard"
SCRIPT = "scorecard.js"
OURS = "ours"
# Fields of the filter that choose by the verdict in a column.
BY_VERDICT = {
    **{"verdict": "mini", "null": f"mini{NULL}"},
    **{"real": "real", "realnull": f"real{NULL}", "paper": "paper"},
}
# Where findings are counted: the column, what it is called, and its field of the filter.
COUNTED = {"mini": ("on small models", "verdict"), "real": ("in a real language model", "real")}


class Scorecard(Generated):
    """``{scorecard}``: totals, a table for each chapter, and where the numbers come from."""

    def run(self) -> list[nodes.Node]:
        parts = super().run()
        for name, own in self.chapters.items():
            head = ["Claim", "Source", *(COLUMNS[tier] for tier in TIERS)]
            body = [self.cells(row) for row in own]
            parts.append(self.section(f"Chapter {name}", table(head, body, "scorecard")))
            (found,) = parts[-1].findall(nodes.tbody)
            for node, row in zip(found.children, own, strict=True):
                node["classes"] += [f"on-{k}-{v.replace(' ', '-')}" for k, v in fields(row)]
            fold = f'<details class="printed"><summary>{len(own)} claims</summary>'
            parts[-1].insert(1, nodes.raw("", fold, format="html"))
            parts[-1] += nodes.raw("", "</details>", format="html")
        if self.runs:
            head = ["Run", "Models", "Seed", "Device", "Date", "Commit", "Versions"]
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
        self.rows = rows(self.env)
        self.chapters: dict[str, list[Row]] = {}
        for row in self.rows:
            self.chapters.setdefault(row["mini"].claim.chapter, []).append(row)
        entries = [entry for row in self.rows for entry in row.values()]
        self.runs = sorted({_run(entry.result) for entry in entries if entry.result})
        if not self.rows:
            return ["No claims yet."]
        return [*_totals(self.rows, ""), *self.counts(), "```{raw} html", self.form(), "```", ""]

    def counts(self) -> list[str]:
        """The counts by chapter; each leads to its rows."""
        body = []
        for name, own in self.chapters.items():
            found = of(own, kind="finding")
            chosen = {"chapter": name, "kind": "finding"}
            counted = [_count(tally(found)[v], "", **chosen, verdict=v) for v in WORDS]
            for kind in KINDS[1:]:
                counted.append(_count(len(of(own, kind=kind)), "", chapter=name, kind=kind))
            body.append([_link(f"Chapter {name}", "", chapter=name), *counted])
        head = ["On small models", *WORDS.values(), "identities", "errata"]
        return table(head, body, "scorecard-counts")

    def cells(self, row: Row) -> list[str]:
        """One row: the claim and how it is judged, kind and source, then a cell for each tier."""
        claim = row["mini"].claim
        name = f"`{claim.id}`"
        if f"notebooks/{notebook(claim.chapter)}" in self.env.found_docs:
            name = f"[{name}](#{claim.chapter}-{claim.cell})"
        rules = "\n".join(f"- {_line(text)}" for text in _rules(claim))
        said = [f"{{#{anchor(claim)} .claim-id}}\n{name}", _line(claim.statement)]
        if claim.added_after:
            said.append(f"{{.added}}\nAdded after `{claim.added_after}` had failed.")
        said += ["<details><summary>How it is judged</summary>", f"{rules}\n\n</details>"]
        source = [f"{{.muted}}\n{claim.kind}, {SAID_BY[claim.origin]}"]
        source += [plain(scorecard.published(claim))] if claim.published is not None else []
        source.append(_line(claim.source))
        return [*map("\n\n".join, (said, source)), *(self.tier(row, tier) for tier in TIERS)]

    def tier(self, row: Row, tier: str) -> str:
        """What was measured at a tier, and below it its null."""
        said, null = self.entry(row[tier]), row.get(tier + NULL)
        if row[tier].result and null:
            said += f"\n\n{{.null}}\nNull, {scorecard.null_name(null.claim)}:\n\n{self.entry(null)}"
        if lead := row[tier].lead:
            said += f"\n\n{{.muted}}\nDifference {lead}"
        return said

    def entry(self, entry: Entry) -> str:
        """What was measured, and in which run."""
        if entry.result is None:
            return measured(entry)
        number = self.runs.index(_run(entry.result)) + 1
        return measured(entry, f"[run {number}](#run-{number})")

    def form(self) -> str:
        """The form by which the script hides rows; hidden itself until the script runs."""
        there = {pair for row in self.rows for pair in fields(row)}
        offered = {
            "Chapter": (
                "chapter",
                {name: heading(self.env, name) for name in self.chapters},
            ),
            "Kind": ("kind", {kind: kind for kind in KINDS}),
            "Said by": ("origin", ORIGINS),
            "Source": ("source", {}),
            "Asked of": ("tier", {tier: COLUMNS[tier].lower() for tier in TIERS}),
        }
        for field, column in BY_VERDICT.items():
            said = [scorecard.REPRODUCED.get(v, v) if column == "paper" else v for v in VERDICTS]
            offered[COLUMNS[column]] = (field, {word: word for word in said})
        controls = {}
        for label, (name, choices) in offered.items():
            options = _options({v: shown for v, shown in choices.items() if (name, v) in there})
            for group, named in self.sources().items() if name == "source" else ():
                options += f'<optgroup label="{escape(group)}">{_options(named)}</optgroup>'
            field = f'<select name="{name}" id="filter-{name}"><option value="">all</option>'
            controls[name, label] = f"{field}{options}</select>"
        words = '<input type="search" name="words" id="filter-words" autocomplete="off">'
        controls["words", "Words"] = words
        form = "".join(
            f'<div><label for="filter-{name}">{label}</label>{control}</div>'
            for (name, label), control in controls.items()
        )
        return (
            '<form class="scorecard-filter" role="search" aria-label="Filter the claims" hidden>'
            f'{form}<button type="reset">Show all</button><output aria-live="polite"></output>'
            "</form>"
        )

    def sources(self) -> dict[str, dict[str, str]]:
        """Short names of the works that claims rest on, by citation key, in groups."""
        entries = self.env.get_domain("cite").bibdata.data.entries  # type: ignore[attr-defined]
        wanted = {key for row in self.rows for key in keys(row["mini"].claim)}
        groups: dict[str, dict[str, str]] = {"Study notes": {}, "Papers and code": {}}
        for key in wanted & set(entries):
            note = "howpublished" in entries[key].fields
            groups["Study notes" if note else "Papers and code"][key] = _work(entries[key], note)
        groups["This book"] = {OURS: "our own questions and controls"} if OURS in wanted else {}
        return {
            group: dict(sorted(found.items(), key=lambda item: item[1].lower()))
            for group, found in groups.items()
            if found
        }


def measured(entry: Entry, *more: str) -> str:
    """The value, the verdict, and how often it was measured and over what."""
    classes = badge(entry.verdict, entry.column.endswith(NULL))
    verdict = f"[{entry.verdict}]{{.{' .'.join(classes)}}}"
    if entry.result is None:
        return verdict
    below = ", ".join(filter(None, [entry.n, *more]))
    return "\n\n".join([plain(entry.value), verdict, *[f"{{.muted}}\n{below}"] * bool(below)])


class Verdicts(Generated):
    """``{verdicts}``: how many findings hold, by source, as links into the scorecard."""

    def markdown(self) -> list[str]:
        here = Path(self.env.docname).parent
        return _totals(rows(self.env), f"{os.path.relpath(PAGE, here)}.html")


def keys(claim: Claim) -> list[str]:
    """Citation keys in a claim's source, or ``["ours"]`` where it names none."""
    groups = re.findall(r"\{cite(?::\w+)?\}`([^`]+)`", claim.source)
    return [key.strip() for group in groups for key in group.split(",")] or [OURS]


def fields(row: Row) -> list[tuple[str, str]]:
    """What the filter can choose a row by: pairs of a field and one of its values."""
    claim = row["mini"].claim
    named = [("chapter", claim.chapter), ("kind", claim.kind), ("origin", claim.origin)]
    named += [("source", key) for key in keys(claim)] + [("tier", tier) for tier in claim.tiers]
    return named + [(field, row[column].verdict) for field, column in BY_VERDICT.items()]


# Verdicts of several claims.
WORDS = {v: re.sub("^holds", "hold", v).replace("does not", "do not") for v in JUDGED}
SAID_BY = {"paper": "a paper's", "note": "a note's", "own": "our own"}


def _totals(found: list[Row], page: str) -> list[str]:
    """Findings on small models and in a real one, with their nulls, by who says it; identities,
    errata and the papers' own models in a sentence each. Every count leads to its rows."""
    lines = [line for tier in COUNTED for line in _counts(found, page, tier)]
    identities, errata = of(found, kind="identity"), of(found, kind="erratum")
    said = (
        f"Counted apart: {_count(len(identities), page, kind='identity')} identities, which any "
        f"network obeys, of which {tally(identities)[HOLDS]} hold, and "
        f"{_count(len(errata), page, kind='erratum')} errata, mistakes in a text or in released "
        f"code, of which {tally(errata)[HOLDS]} are shown."
    )
    ran = [entry for entry in of(found, "paper", kind="finding") if entry.result]
    counted = [f"{_count(n, page, kind='finding', paper=v)} {v}" for v, n in tally(ran).items()]
    names = {name for entry in ran for name in entry.result.model.split(", ")}  # type: ignore[union-attr]
    where = ", ".join(sorted({f"chapter {entry.claim.chapter}" for entry in ran}))
    own = f", save those of {where} ({', '.join(sorted(names))}), trained here at the paper's size"
    save = f"{own}: {', '.join(counted)}" if ran else ""
    return [*lines, f"{said} We have not run the papers' own models{save}.", ""]


def _counts(found: list[Row], page: str, tier: str) -> list[str]:
    """A table of the findings of a tier by who says them, if it was run."""
    if tier != "mini" and not any(row[tier].result for row in found):
        return []
    body, (where, field) = [], COUNTED[tier]
    for origin, said in {**ORIGINS, "": "all"}.items():
        chosen = {"kind": "finding"} | ({"origin": origin} if origin else {})
        counted = tally(of(found, tier, **chosen))
        cells = [_count(counted[v], page, **chosen, **{field: v}) for v in WORDS]
        body.append([said, str(counted.total()), *cells])
    head = ["Findings of", where, *WORDS.values()]
    return table(head, body, "scorecard-counts")


def badge(verdict: str, null: bool = False) -> list[str]:
    """Classes of a verdict on a page; a null that fails is as it should be."""
    name = "none" if verdict == scorecard.NOT_ASKED else verdict.replace(" ", "-")
    return ["verdict", "verdict-of-null" if null and verdict == FAILS else f"verdict-{name}"]


def anchor(claim: Claim) -> str:
    """Name of a claim's row on the scorecard's page, as a target."""
    return f"claim-{claim.id.replace('.', '-').replace('_', '-')}"


def in_words(criterion: str) -> str:
    """A criterion of the ledger in words."""
    low, between, high = criterion.replace("-", scorecard.MINUS).partition(" .. ")
    if between:
        return f"between {low} and {high}"
    for sign, word in (("<=", "at most"), (">=", "at least"), ("<", "below"), (">", "above")):
        low = low.replace(sign, word)
    return low


def _rules(claim: Claim) -> list[str]:
    """How a claim is judged, a line each."""
    what: dict[str, list[str]] = {}  # texts by the tiers of which they are true
    said: dict[str, list[str]] = {}
    for tier, criteria in claim.tiers.items():
        name = COLUMNS[tier].lower()
        over = f", over {found}" if (found := claim.said("over", tier)) else ""
        what.setdefault(f"{claim.said('measure', tier)}{over}", []).append(name)
        rule = f"holds if the whole 95 % interval is {in_words(criteria['holds'])}"
        if "weaker" in criteria:
            rule += f"; in a weaker form if it is {in_words(criteria['weaker'])}"
        said.setdefault(rule, []).append(name)
    lines = [f"Measured on {' and '.join(where)}: {text}" for text, where in what.items()]
    if len(what) == 1:
        lines = [f"Measured: {text}" for text in what]
    lines += [f"{' and '.join(where).capitalize()}: {rule}" for rule, where in said.items()]
    why = f", not measurable because {claim.undefined}" if claim.undefined else ""
    lines.append(f"Null: {scorecard.null_name(claim)}{why}")
    proof = [f"True of any network: {claim.algebra}"] if claim.algebra else []
    return [*lines, *proof, f"Bounds: {claim.tolerance}"]


def _count(number: int, page: str, **chosen: str) -> str:
    """A count that leads to its rows."""
    return _link(str(number), page, **chosen) if number else "0"


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
        plain(f"{result.model}, random weights" if result.tier.endswith(NULL) else result.model),
        str(result.seed),
        result.device,
        result.date,
        commit(result.commit),
        versions(result.python, result.versions),
    )


def _line(markdown: str) -> str:
    return " ".join(markdown.split())


def _work(entry: Any, note: bool) -> str:
    """Authors and year; of a note the title too, since several are unsigned."""
    people = [" ".join([*p.prelast_names, *p.last_names]) for p in entry.persons["author"]]
    others = len(people) > 2 or people[-1] == "others"
    who = f"{people[0]} et al." if others else " and ".join(people)
    title = f": {entry.fields['title']}" if note else ""
    return re.sub(r"[{}]|``|''", "", f"{who} {entry.fields.get('year', '')}".strip() + title)

"""Tables of claims: of all on the page of the scorecard, of a notebook's own, and totals."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

from iclutils import scorecard
from iclutils.claims import NULL, Claim
from iclutils.claims.verdicts import FAILS, JUDGED
from iclutils.scorecard import NOT_ASKED, ORIGINS, Entry, Row

from .markdown import Generated, plain, results, table

COLUMNS = {"real": "SmolLM2", "mini": "Small models", "paper": "The paper's size"}
SAID = """Every *row* leads to the scorecard, where sources, bounds and dates stand. *n*: how often
it was measured, and over what; ±: the standard error over these; over sequences or functions of one
model it says nothing about another training. *Null*: the same without what the finding is about; in
brackets the 95 %% interval of the difference: with 0 in it, it is not shown that the two differ.
{doc}`What the words mean </book/verdicts>`. After a run of yours, `book.table("%s")` prints it."""
NOTHING = "[–]{.verdict .verdict-none}"  # left out on a narrow page


class Scorecard(Generated):
    """``{scorecard}``: totals, then a table of each chapter's claims."""

    def markdown(self) -> list[str]:
        chapters = dict[str, list[Row]]()
        for row in scorecard.rows(results(self.env)):
            chapters.setdefault(row["mini"].claim.chapter, []).append(row)
        lines = totals([row for own in chapters.values() for row in own])
        for name, own in chapters.items():
            lines += [f"## Chapter {name}", "", *claims_table(own, on_scorecard=True)]
        return lines or ["No claims yet."]


class Evidence(Generated):
    """``{evidence}``: the claims whose sections stand in this notebook. The headlines are to be
    seen, the others unfold; each leads to its row of the scorecard."""

    def markdown(self) -> list[str]:
        path = Path(self.env.srcdir, f"{self.env.docname}.ipynb")
        labels = set(re.findall(r"\((\d\d-[\w-]+)\)=", path.read_text(encoding="utf-8")))
        rows = scorecard.rows(results(self.env), path.stem[:2])
        own = [r for r in rows if "{0.chapter}-{0.cell}".format(r["mini"].claim) in labels]
        first = [row for row in own if row["mini"].claim.headline]
        rest = [row for row in own if row not in first]
        lines = [*(SAID % path.stem[:2]).splitlines(), "", *(claims_table(first) if first else [])]
        if rest:
            kind, what = ("rows", "more rows") if first else ("printed", "rows")  # see print.css
            lines += [f'<details class="{kind}"><summary>{len(rest)} {what}</summary>', ""]
            lines += [*claims_table(rest), "</details>", ""]
        return lines


class Times(Generated):
    """``{times}``: what each notebook takes from nothing, in seconds: its last run, and what that
    run read instead of computing it."""

    def markdown(self) -> list[str]:
        path = Path(self.env.srcdir, "book", "runs.json")
        runs = json.loads(path.read_text(encoding="utf-8"))
        body = []
        for name in sorted({name for column in runs.values() for name in column}):
            own = [runs[column].get(name) for column in runs]
            spent = [f"{run['seconds'] + run.get('read', 0):.0f}" if run else "–" for run in own]
            body.append([plain(name), *spent])
        return table(["Notebook", *runs], body, "times")


def claims_table(own: list[Row], on_scorecard: bool = False) -> list[str]:
    """Return a table of claims: what is claimed, measured values with verdicts, the source and the
    null with the difference from it; on the scorecard also how it is judged, and dates."""
    ran = on_scorecard or any(row["paper"].result for row in own)
    columns = {k: v for k, v in COLUMNS.items() if ran or k != "paper"}
    body = []
    for row in own:
        claim = row["mini"].claim
        name = f"{_line(claim.statement)} ({{ref}}`row <{anchor(claim)}>`)"
        source = plain(scorecard.published(claim)) if claim.published is not None else NOTHING
        if on_scorecard:
            link = f"{{#{anchor(claim)} .claim-id}}\n[`{claim.id}`](#{claim.chapter}-{claim.cell})"
            name = "\n\n".join([link, _line(claim.statement), *rules(claim)])
            parts = [ORIGINS[claim.origin], source, _line(claim.source)]
            source = "\n\n".join(part for part in parts if part != NOTHING)
        nulls = [f"{claim.null or 'random weights'}:"]
        for column, label in columns.items():
            if row[column].result and row[column + NULL].result:
                null = row[column + NULL]
                less = f"; difference {row[column].lead}" if row[column].lead else ""
                nulls.append(f"{label} {plain(null.value)} {_badge(null)}{less}")
        values = (measured(row[k], on_scorecard) for k in columns)
        body.append([name, *values, source, "\n\n".join(nulls)])
    return table(["Finding", *columns.values(), "Source", "Null"], body, "evidence")


def measured(entry: Entry, with_date: bool) -> str:
    """Return the value, the verdict, and how often it was measured and over what."""
    if entry.result is None:
        return _badge(entry)
    when = f"{entry.result.date}, commit {entry.result.commit[:10] or 'none'}" * with_date
    below = plain("; ".join(filter(None, [entry.n, when])))
    return "\n\n".join([plain(entry.value), _badge(entry), *[f"{{.muted}}\n{below}"] * bool(below)])


def rules(claim: Claim) -> list[str]:
    """Return how a claim is judged, to be unfolded."""
    lines = []
    for tier, criteria in claim.tiers.items():
        over = f", over {what}" if (what := claim.text_at("over", tier)) else ""
        weaker = f"; *weaker* if it is {criteria['weaker']}" if "weaker" in criteria else ""
        rule = f"It holds if the whole 95 % interval is {criteria['holds']}{weaker}."
        lines.append(f"- {COLUMNS[tier]}: {_line(claim.text_at('measure', tier))}{over}. {rule}")
    lines.append(f"- Bounds: {_line(claim.tolerance)}")
    if claim.undefined:
        lines.append(f"- Its null is not measurable: {claim.undefined}")
    if claim.added_after:
        lines.append(f"- Added after `{claim.added_after}` had failed.")
    summary = "<details><summary>How it is judged</summary>"
    return [summary, "\n".join(lines).replace("<=", "≤").replace(">=", "≥"), "</details>"]


def totals(every: list[Row]) -> list[str]:
    """Return tables of the claims by who says them."""
    lines = list[str]()
    for tier, where in (("mini", "on small models"), ("real", "in a real language model")):
        body = []
        for origin, name in {**ORIGINS, "": "all"}.items():
            counts = Counter(
                row[tier].verdict for row in every if origin in ("", row[tier].claim.origin)
            )
            del counts[NOT_ASKED]
            body.append([name, *map(str, (counts.total(), *(counts[v] for v in JUDGED)))])
        if tier == "mini" or any(row[tier].result for row in every):
            lines += table(["Findings of", where, *JUDGED], body, "scorecard-counts")
    return [*lines, ""]


def badge(verdict: str, null: bool = False) -> list[str]:
    """Return the classes of a verdict on a page; a null that fails is as it should be."""
    name = "none" if verdict == NOT_ASKED else verdict.replace(" ", "-")
    return ["verdict", "verdict-of-null" if null and verdict == FAILS else f"verdict-{name}"]


def anchor(claim: Claim) -> str:
    """Return the name of a claim's row on the scorecard's page, as a target."""
    return f"claim-{claim.id.replace('.', '-').replace('_', '-')}"


def _badge(entry: Entry) -> str:
    classes = badge(entry.verdict, entry.column.endswith(NULL))
    return f"[{entry.verdict}]{{.{' .'.join(classes)}}}"


def _line(markdown: str) -> str:
    return " ".join(markdown.split())

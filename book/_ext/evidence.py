"""The evidence of a chapter, or of its appendix: one table of what the notebook judges."""

from __future__ import annotations

from pathlib import Path

from iclutils import scorecard
from iclutils.claims import NULL
from iclutils.files import read_json
from iclutils.scorecard import NOT_ASKED, Row

from .._tools import dependencies
from .markdown import Generated, plain, rows, table
from .scorecard import anchor, badge, measured

SAID = """Every *row* leads to the scorecard, where sources, bounds and runs stand. *n*: how often
it was measured, and over what; ±: the standard error over these; over sequences or functions of one
model it says nothing about another training. *Null*: the same without what the finding is about; in
brackets the 95 %% interval of the difference: with 0 in it, it is not shown that the two differ.
{doc}`What the words mean </book/verdicts>`. After a run of yours, `book.table("%s")` prints it."""
NOTHING = f"[{NOT_ASKED}]{{.{' .'.join(badge(NOT_ASKED))}}}"  # left out on a narrow page
COLUMNS = {"real": "SmolLM2", "mini": "Small models", "paper": "The paper's size"}


class Evidence(Generated):
    """``{evidence}``: the findings that this notebook judges. Those of the headlines are to be
    seen, the others unfold; each leads to its row of the scorecard."""

    def markdown(self) -> list[str]:
        path = Path(self.env.srcdir, f"{self.env.docname}.ipynb")
        named = dependencies.claims_in(read_json(path)["cells"])
        found = [row for row in rows(self.env) if row["mini"].claim.id in named]
        first = [row for row in found if row["mini"].claim.headline]
        rest = [row for row in found if row not in first]
        what = "more rows: findings, identities and errata" if first else "rows"
        ran = any(row["paper"].result for row in found)
        shown = {k: label for k, label in COLUMNS.items() if k != "paper" or ran}
        folded = _table(rest, shown)
        kind = "rows" if first else "printed"  # on paper: print.css
        opens = f'<details class="{kind}"><summary>{len(rest)} {what}</summary>'
        fold = [opens, "", *folded, "</details>"]
        said = [*(SAID % path.stem[:2]).splitlines(), ""]
        return [*said, *(_table(first, shown) if first else []), *(fold if rest else []), ""]


def _table(found: list[Row], shown: dict[str, str]) -> list[str]:
    body = (_cells(row, shown) for row in found)
    return table(["Finding", *shown.values(), "Source", "Null"], body, "evidence")


def _cells(row: Row, shown: dict[str, str]) -> list[str]:
    """Finding, measured values with verdicts, what the source gives, and the null by name with the
    difference from it."""
    claim = row["mini"].claim
    name = " ".join(claim.statement.split())
    link = f"{{ref}}`row <{anchor(claim)}>`"
    nulls = []
    for column, label in shown.items():
        if row[column].result and row[column + NULL].result:
            less = f"; difference {row[column].lead}" if row[column].lead else ""
            nulls.append(f"{label} {plain(row[column + NULL].value)}{less}")
    null = "\n\n".join([f"{scorecard.null_name(claim)}:", *nulls]) if nulls else NOTHING
    if claim.algebra:
        null = f"true of any network: {claim.algebra}"
    source = plain(scorecard.published(claim)) if claim.published is not None else NOTHING
    return [f"{name} ({link})", *(measured(row[column]) for column in shown), source, null]

"""The scorecard: every claim with what the source says, what was measured on small models, with
random weights (the null), on a real model and on the source's own. Data and text only: verdicts
are judged in ``iclutils.claims.verdicts``."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from . import claims
from .claims import NULL, Claim, Result
from .claims.verdicts import FAILS, HOLDS, UNDEFINED, WEAKER, difference, judge

MINUS = "\N{MINUS SIGN}"
NOT_RUN, NOT_ASKED = "not run", "–"  # the second: the claim is not put to such models
COLUMNS = {
    **{"mini": "Small models", f"mini{NULL}": "Null"},
    **{"real": "Real model", f"real{NULL}": "Its null"},
    **{"paper": "Paper", f"paper{NULL}": "Paper's null"},
}
ORIGINS = {"paper": "papers", "note": "study notes", "own": "our own"}
# Who runs the source's own model or task reproduces it.
REPRODUCED = {HOLDS: "reproduced", WEAKER: "reproduced in part", FAILS: "not reproduced"}


@dataclass(frozen=True)
class Entry:
    """One claim in one column: at a tier, or with random weights."""

    claim: Claim
    column: str
    result: Result | None
    null: Result | None = None

    @property
    def verdict(self) -> str:
        """Return the result's verdict in the words of the column, ``not run``, or a dash."""
        if self.result is None:
            return NOT_RUN if self.column.removesuffix(NULL) in self.claim.tiers else NOT_ASKED
        verdict = judge(self.result, self.null)
        return REPRODUCED.get(verdict, verdict) if self.column == "paper" else verdict

    @property
    def value(self) -> str:
        """Return the measured value with its standard error, coarsely; ``not run`` or a dash."""
        if self.result is None:
            return self.verdict
        value = self.result.value
        return UNDEFINED if value is None else number(value, self.result.spread)

    @property
    def n(self) -> str:
        """Return how often it was measured, and over what; nothing of a single measurement."""
        count = self.result.count if self.result else 0
        over = self.claim.text_at("over", self.column)
        return f"n = {count} {over}".rstrip() if count > 1 else ""

    @property
    def lead(self) -> str:
        """Return how much it differs from its null, with the 95 % interval, if there is one."""
        if self.result is None:
            return ""
        apart = difference(self.result, self.null)
        less, *ends = map(number, apart) if apart else ["", ""]
        return f"{less} ({' to '.join(ends)})" if len(set(ends)) > 1 else less


Row = dict[str, Entry]  # by column


def row(claim: Claim, results: Mapping[tuple[str, str], Result]) -> Row:
    """Return a claim in every column."""
    every = {column: results.get((column, claim.id)) for column in COLUMNS}
    trained = {c: result for c, result in every.items() if result and not c.endswith(NULL)}
    nulls = {c: claims.null_of(result, results) for c, result in trained.items()}
    every |= {c + NULL: null for c, null in nulls.items() if null}
    return {c: Entry(claim, c, result, nulls.get(c)) for c, result in every.items()}


def rows(results: Mapping[tuple[str, str], Result], chapter: str | None = None) -> list[Row]:
    """Return a row for each claim, of a chapter or of all."""
    return [row(claim, results) for claim in claims.ledger(chapter).values()]


def number(value: float, spread: float = 0.0) -> str:
    """Return a number for a reader: three digits, or as many as the spread lets stand."""
    largest = max(abs(value), spread)
    if not largest:
        return "0"
    size = math.floor(math.log10(largest))
    if size < -3 or size > 6:
        power = f"10{str(size).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"
        text = number(value / 10**size, spread / 10**size)
        return f"({text}) × {power}" if "±" in text else f"{text} × {power}"
    decimals, margin = max(0, 2 - size), ""
    if spread:  # one digit of the spread, but never more than four of the value
        fine = max(0, min(-math.floor(math.log10(spread)), 3 - size))
        if float(f"{spread:.{fine}f}"):
            decimals, margin = fine, f" ± {spread:.{fine}f}"
    return f"{value:z.{decimals}f}{margin}".replace("-", MINUS)


def published(claim: Claim) -> str:
    """Return the source's number as the source gives it, or ``no number``."""
    if claim.published is None:
        return "no number"
    text = str(claim.published)
    text = text if isinstance(claim.published, str) else text.replace("-", MINUS)
    return f"{text} ({claim.published_of})" if claim.published_of else text


def comparison_text(table: Iterable[Row]) -> str:
    """Return claims in every column, as text: source, small models, real model, paper."""
    lines = []
    for row in table:
        claim = row["mini"].claim
        lines += [f"{claim.id}  {claim.statement}", f"  {'Source':<13} {published(claim)}"]
        for column, label in COLUMNS.items():
            value, verdict = row[column].value, row[column].verdict
            if verdict != NOT_ASKED:
                also = "" if value == verdict else f" ({verdict})"
                lines.append(f"  {label:<13} {value}{also}")
    return "\n".join(lines)

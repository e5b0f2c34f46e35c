"""The scorecard: every claim with what the source says, what was measured on small models, with
random weights (the null), on a real model and on the source's own. Data and text only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from . import claims
from .claims import FAILS, HOLDS, NULL, UNDEFINED, WEAKER, Claim, Result

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
        """The result's verdict in the words of the column, ``not run``, or a dash."""
        if self.result is None:
            return NOT_RUN if self.column.removesuffix(NULL) in self.claim.tiers else NOT_ASKED
        verdict = claims.judge(self.result, self.null)
        return REPRODUCED.get(verdict, verdict) if self.column == "paper" else verdict

    @property
    def value(self) -> str:
        """The measured value with its standard error, coarsely; ``not run`` or a dash if none."""
        if self.result is None:
            return self.verdict
        value = self.result.value
        return UNDEFINED if value is None else number(value, self.result.spread)

    @property
    def n(self) -> str:
        """How often it was measured, and over what; nothing of a single measurement."""
        count = self.result.count if self.result else 0
        return f"n = {count} {self.claim.said('over', self.column)}".rstrip() if count > 1 else ""

    @property
    def lead(self) -> str:
        """By how much it differs from its null, with the 95 % interval, if both have a spread and
        their difference has one."""
        if self.result is None or self.claim.kind == "identity":
            return ""
        found = claims.difference(self.result, self.null)
        less, *ends = map(number, found) if found else ["", ""]
        return f"{less} ({' to '.join(ends)})" if len(set(ends)) > 1 else less


Row = dict[str, Entry]  # by column


def row(claim: Claim, results: Mapping[tuple[str, str], Result]) -> Row:
    """A claim in every column."""
    found = {column: results.get((column, claim.id)) for column in COLUMNS}
    asked = {c: result for c, result in found.items() if result and not c.endswith(NULL)}
    nulls = {c: claims.null_of(result, results) for c, result in asked.items()}
    found |= {c + NULL: null for c, null in nulls.items() if null}
    return {c: Entry(claim, c, result, nulls.get(c)) for c, result in found.items()}


def rows(results: Mapping[tuple[str, str], Result], chapter: str | None = None) -> list[Row]:
    """A row for each claim, of a chapter or of all."""
    return [row(claim, results) for claim in claims.ledger(chapter).values()]


def number(value: float, spread: float = 0.0) -> str:
    """A number for a reader: three digits, or as many as the spread lets stand."""
    largest = max(abs(value), spread)
    if not largest:
        return "0"
    size = math.floor(math.log10(largest))
    if size < -3 or size > 6:
        power = f"10{str(size).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"
        shown = number(value / 10**size, spread / 10**size)
        return f"({shown}) × {power}" if "±" in shown else f"{shown} × {power}"
    decimals, margin = max(0, 2 - size), ""
    if spread:  # one digit of the spread, but never more than four of the value
        fine = max(0, min(-math.floor(math.log10(spread)), 3 - size))
        if float(f"{spread:.{fine}f}"):
            decimals, margin = fine, f" ± {spread:.{fine}f}"
    return f"{value:z.{decimals}f}{margin}".replace("-", MINUS)


def published(claim: Claim) -> str:
    """The source's number as the source gives it, or ``no number``."""
    if claim.published is None:
        return "no number"
    shown = str(claim.published)
    shown = shown if isinstance(claim.published, str) else shown.replace("-", MINUS)
    return f"{shown} ({claim.published_of})" if claim.published_of else shown


def compared(table: Iterable[Row]) -> str:
    """Claims in every column, as text: source, small models, real model, paper."""
    said = []
    for found in table:
        claim = found["mini"].claim
        said += [f"{claim.id}  {claim.statement}", f"  {'Source':<13} {published(claim)}"]
        for column, label in COLUMNS.items():
            value, verdict = found[column].value, found[column].verdict
            if verdict != NOT_ASKED:
                also = "" if value == verdict else f" ({verdict})"
                said.append(f"  {label:<13} {value}{also}")
    return "\n".join(said)

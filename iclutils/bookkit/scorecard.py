"""The scorecard: every claim at every tier it applies to, with its result if there is one.

Data and text only. The book's extension makes a page of it, ``make book`` prints it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from . import claims, presets
from .claims import VERDICTS, Claim, Result

MINUS = "\N{MINUS SIGN}"
NOT_RUN = "not run"


@dataclass(frozen=True)
class Row:
    """One claim at one tier."""

    claim: Claim
    tier: str
    result: Result | None

    @property
    def verdict(self) -> str:
        """The result's verdict, or ``not run``."""
        return self.result.verdict if self.result else NOT_RUN

    @property
    def value(self) -> str:
        """The measured value with its spread, coarsely, or ``not run``."""
        if self.result is None:
            return NOT_RUN
        value = self.result.value
        return claims.UNDEFINED if value is None else number(value, self.result.spread)


def rows(results: Mapping[tuple[str, str], Result], chapter: str | None = None) -> list[Row]:
    """A row for each claim (of a chapter, or of all) and each tier it applies to."""
    return [
        Row(claim, tier, results.get((tier, claim.id)))
        for claim in claims.ledger(chapter).values()
        for tier in presets.TIERS
        if tier in claim.tiers
    ]


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
    return f"{value:.{decimals}f}{margin}".replace("-", MINUS)


def published(claim: Claim) -> str:
    """The source's figure as the source gives it, or ``no figure``."""
    if claim.published is None:
        return "no figure"
    shown = str(claim.published)
    return shown if isinstance(claim.published, str) else shown.replace("-", MINUS)


def counts(table: Iterable[Row]) -> dict[tuple[str, str], Counter[str]]:
    """Number of rows of each verdict, by (chapter, tier)."""
    found: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for row in table:
        found[row.claim.chapter, row.tier][row.verdict] += 1
    order = list(presets.TIERS)
    return dict(sorted(found.items(), key=lambda item: (item[0][0], order.index(item[0][1]))))


def text(table: list[Row]) -> str:
    """The counts as plain text, and the claims that were not reproduced by name."""
    if not table:
        return "No claims yet."
    head = ["chapter", "tier", *VERDICTS]
    body = [
        [chapter, tier, *(str(tally[verdict]) for verdict in VERDICTS)]
        for (chapter, tier), tally in counts(table).items()
    ]
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
             for line in [head, *body]]  # fmt: skip
    failed = [f"{row.claim.id} ({row.tier})" for row in table if row.verdict == claims.FAILS]
    if failed:
        lines.append(f"Does not hold: {', '.join(failed)}")
    return "\n".join(lines)

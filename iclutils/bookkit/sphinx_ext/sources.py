"""Short names of the works that a claim rests on, for the scorecard's filter."""

from __future__ import annotations

import re
from typing import Any

from sphinx.environment import BuildEnvironment

from ..claims import Claim

OURS = "ours"


def keys(claim: Claim) -> list[str]:
    """Citation keys in a claim's source, or ``["ours"]`` where it names none."""
    groups = re.findall(r"\{cite(?::\w+)?\}`([^`]+)`", claim.source)
    return [key.strip() for group in groups for key in group.split(",")] or [OURS]


def names(env: BuildEnvironment, wanted: set[str]) -> dict[str, dict[str, str]]:
    """Groups of names to choose from: the notes, the papers, and what is ours.

    Args:
        env: holds the bibliography.
        wanted: citation keys.

    Returns:
        For each group its names by key, in alphabetical order.
    """
    entries = env.get_domain("cite").bibdata.data.entries  # type: ignore[attr-defined]
    groups: dict[str, dict[str, str]] = {"Study notes": {}, "Papers and code": {}, "This book": {}}
    for key in wanted & set(entries):
        note = "howpublished" in entries[key].fields
        groups["Study notes" if note else "Papers and code"][key] = _name(entries[key], note)
    if OURS in wanted:
        groups["This book"][OURS] = "our own questions and controls"
    for group, found in groups.items():
        groups[group] = dict(sorted(found.items(), key=lambda item: item[1].lower()))
    return {group: found for group, found in groups.items() if found}


def _name(entry: Any, note: bool) -> str:
    """Authors and year; of a note the title too, since several are unsigned."""
    people = [" ".join([*p.prelast_names, *p.last_names]) for p in entry.persons["author"]]
    others = len(people) > 2 or people[-1] == "others"
    who = f"{people[0]} et al." if others else " and ".join(people)
    title = f": {entry.fields['title']}" if note else ""
    return re.sub(r"[{}]|``|''", "", f"{who} {entry.fields.get('year', '')}".strip() + title)

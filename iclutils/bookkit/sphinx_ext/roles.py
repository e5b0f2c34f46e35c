"""Roles that put a number of the results, or of the source, into prose."""

from __future__ import annotations

import re

from docutils import nodes
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.docutils import SphinxRole

from ...errors import IclError, unknown
from .. import claims, scorecard
from ..claims import UNDEFINED
from .markdown import results

logger = logging.getLogger(__name__)

NAME = re.compile(r"(?P<id>\d\d\.[a-z0-9_]+)(?:\.(?P<field>\w+))?(?:@(?P<column>[\w-]+))?")


class Number(SphinxRole):
    """``{measured}`01.name```: the value with its spread, or one field of the result, with
    ``.field`` and ``@null``, ``@real`` or ``@paper`` if wanted; ``{verdict}`01.name```: the verdict
    likewise; ``{real}`01.name```: the value in the real language model; ``{published}`01.name```:
    the source's figure. The field ``percent`` gives the value as "87 %".
    """

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Show the text, marked with the role's name; or warn with the error."""
        self.env.note_reread()
        try:
            text = ROLES[self.name](self.env, self.text)
        except IclError as error:
            logger.warning("%s: %s", self.name, error, location=self.get_location())
            return [nodes.problematic(self.rawtext, self.rawtext)], []
        classes = scorecard.badge(text) if self.name == "verdict" else [self.name]
        return [nodes.inline(self.rawtext, text, classes=classes)], []


def measured(env: BuildEnvironment, name: str) -> str:
    """The value with its spread, or the field of the result."""
    entry, field = _entry(env, name)
    if field is None or entry.result is None:
        return entry.value
    share = f"{100 * entry.result.value:.0f} %" if entry.result.value is not None else UNDEFINED
    known = vars(entry.result) | {"verdict": entry.verdict, "percent": share} | entry.result.detail
    if field not in known:
        raise unknown(f"field of {entry.claim.id}", field, known)
    value = known[field]
    return scorecard.number(value) if isinstance(value, float) else str(value)


def real(env: BuildEnvironment, name: str) -> str:
    """The value in the real language model, or the field of that result."""
    return measured(env, f"{name}@real")


def verdict(env: BuildEnvironment, name: str) -> str:
    """The verdict."""
    return _entry(env, name)[0].verdict


def published(env: BuildEnvironment, name: str) -> str:
    """The source's figure."""
    return scorecard.published(_claim(name))


ROLES = {"measured": measured, "published": published, "real": real, "verdict": verdict}


def _entry(env: BuildEnvironment, name: str) -> tuple[scorecard.Entry, str | None]:
    """The claim in the column that is named, and the field."""
    match = NAME.fullmatch(name)
    if not match:
        raise IclError(f"{name!r} is not of the form 01.claim, 01.claim.field or 01.claim@real.")
    column = {None: "mini", "null": f"mini{claims.NULL}"}.get(match["column"], match["column"])
    entry = scorecard.row(_claim(match["id"]), results(env)).get(column)
    if entry is None or entry.verdict == scorecard.NOT_ASKED:
        raise unknown(f"tier of claim {match['id']}", column, _claim(match["id"]).tiers)
    return entry, match["field"]


def _claim(name: str) -> claims.Claim:
    known = claims.ledger()
    if name not in known:
        raise unknown("claim", name, known)
    return known[name]

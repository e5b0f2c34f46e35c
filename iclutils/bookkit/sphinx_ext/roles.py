"""Roles that put a number of the results, or of the source, into prose."""

from __future__ import annotations

import re

from docutils import nodes
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.docutils import SphinxRole

from ...errors import IclError, unknown
from .. import claims, scorecard
from ..scorecard import Row
from .markdown import results

logger = logging.getLogger(__name__)

NAME = re.compile(r"(?P<id>\d\d\.[a-z0-9_]+)(?:\.(?P<field>\w+))?(?:@(?P<tier>\w+))?")


class Number(SphinxRole):
    """``{measured}`01.name```: the value with its spread, or one field of the result, with
    ``.field`` and ``@tier`` if wanted; ``{published}`01.name```: the source's figure.
    """

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Show the text, marked with the role's name; or warn with the error."""
        self.env.note_reread()
        try:
            text = (published if self.name == "published" else measured)(self.env, self.text)
        except IclError as error:
            logger.warning("%s: %s", self.name, error, location=self.get_location())
            return [nodes.problematic(self.rawtext, self.rawtext)], []
        return [nodes.inline(self.rawtext, text, classes=[self.name])], []


def measured(env: BuildEnvironment, name: str) -> str:
    """The value with its spread, or the field of the result."""
    match = NAME.fullmatch(name)
    if not match:
        raise IclError(f"{name!r} is not of the form 01.claim, 01.claim.field or 01.claim@tier.")
    claim, field, tier = _claim(match["id"]), match["field"], match["tier"] or "mini"
    if tier not in claim.tiers:
        raise unknown(f"tier of claim {claim.id}", tier, claim.tiers)
    row = Row(claim, tier, results(env).get((tier, claim.id)))
    if field is None or row.result is None:
        return row.value
    known = vars(row.result) | row.result.detail
    if field not in known:
        raise unknown(f"field of {claim.id}", field, known)
    value = known[field]
    return scorecard.number(value) if isinstance(value, float) else str(value)


def published(env: BuildEnvironment, name: str) -> str:
    """The source's figure."""
    return scorecard.published(_claim(name))


def _claim(name: str) -> claims.Claim:
    known = claims.ledger()
    if name not in known:
        raise unknown("claim", name, known)
    return known[name]

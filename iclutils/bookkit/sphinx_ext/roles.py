"""Roles that put a number of the results, or of the source, into prose."""

from __future__ import annotations

import re

from docutils import nodes
from sphinx.util import logging
from sphinx.util.docutils import SphinxRole

from ...errors import IclError, unknown
from .. import claims, scorecard
from ..claims import Claim
from ..scorecard import Row
from . import shown

logger = logging.getLogger(__name__)

_NAME = re.compile(r"(?P<id>\d\d\.[a-z0-9_]+)(?:\.(?P<field>\w+))?(?:@(?P<tier>\w+))?")


class _ClaimRole(SphinxRole):
    """A role that shows what ``look_up`` returns, or warns with the error it raises."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Show the text, marked with the role's name."""
        shown.use(self.env)
        try:
            text = self.look_up(self.text.strip())
        except IclError as error:
            logger.warning("%s: %s", self.name, error, location=self.get_location())
            return [nodes.problematic(self.rawtext, self.rawtext)], []
        return [nodes.inline(self.rawtext, text, classes=[self.name])], []

    def look_up(self, name: str) -> str:
        """The text for the role's content."""
        raise NotImplementedError


class Measured(_ClaimRole):
    """``{measured}`01.name```: the value with its spread, or one field of the result."""

    def look_up(self, name: str) -> str:
        match = _NAME.fullmatch(name)
        if not match:
            raise IclError(
                f"{name!r} is not of the form 01.claim, 01.claim.field or 01.claim@tier."
            )
        claim, field, tier = _claim(match["id"]), match["field"], match["tier"] or "mini"
        if tier not in claim.tiers:
            raise unknown(f"tier of claim {claim.id}", tier, claim.tiers)
        row = Row(claim, tier, shown.results(self.env).get((tier, claim.id)))
        if field is None or row.result is None:
            return row.value
        known = vars(row.result) | row.result.detail
        if field not in known:
            raise unknown(f"field of {claim.id}", field, known)
        value = known[field]
        return scorecard.number(value) if isinstance(value, float) else str(value)


class Published(_ClaimRole):
    """``{published}`01.name```: the source's figure."""

    def look_up(self, name: str) -> str:
        return scorecard.published(_claim(name))


def _claim(name: str) -> Claim:
    known = claims.ledger()
    if name not in known:
        raise unknown("claim", name, known)
    return known[name]

"""Roles that put a number of the results, or of the source, into prose."""

from __future__ import annotations

import re

from docutils import nodes
from sphinx.util import logging
from sphinx.util.docutils import SphinxRole

from iclutils import claims, scorecard
from iclutils.claims.verdicts import UNDEFINED, interval
from iclutils.errors import IclError, unknown

from .markdown import results
from .scorecard import badge

logger = logging.getLogger(__name__)
ROLES = ("measured", "published", "real", "verdict")
NAME = re.compile(r"(?P<id>\d\d\.[a-z0-9_]+)(?:\.(?P<field>\w+))?(?:@(?P<column>[\w-]+))?")


class Number(SphinxRole):
    """``{measured}`01.name```: the value with its spread, or one field of the result, with
    ``.field`` and ``@null``, ``@real`` or ``@paper`` if wanted; ``{verdict}`01.name```: the verdict
    likewise; ``{real}`01.name```: the value in the real language model; ``{published}`01.name```:
    the source's figure. The field ``percent`` gives the value as "87 %", ``short`` with two digits
    (two decimals below 1), ``difference`` what it has more than its null, with the interval,
    ``interval`` the 95 % interval of a mean, and ``interval_percent`` the same of a share.
    """

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        try:
            text = self.wording()
        except IclError as error:
            logger.warning("%s: %s", self.name, error, location=self.get_location())
            return [nodes.problematic(self.rawtext, self.rawtext)], []
        text = re.sub(r" (?=[±×%])|(?<=[±×]) ", "\N{NO-BREAK SPACE}", text)
        classes = badge(text) if self.name == "verdict" else [self.name]
        return [nodes.inline(self.rawtext, text, classes=classes)], []

    def wording(self) -> str:
        """Return what stands in the place of the role."""
        match = NAME.fullmatch(self.text + "@real" * (self.name == "real"))
        if not match:
            raise IclError(f"{self.text!r} is not of the form 01.claim.field or 01.claim@real.")
        claim, field = claims.find(match["id"]), match["field"]
        if self.name == "published":
            return scorecard.published(claim)
        column = {None: "mini", "null": f"mini{claims.NULL}"}.get(match["column"], match["column"])
        entry = scorecard.row(claim, results(self.env)).get(column)
        if entry is None or entry.verdict == scorecard.NOT_ASKED:
            raise unknown(f"tier of claim {claim.id}", column, claim.tiers)
        if self.name == "verdict":
            return entry.verdict
        if field is None or entry.result is None:
            return entry.value
        value = entry.result.value
        share = UNDEFINED if value is None else f"{100 * value:.0f} %"
        fields = vars(entry.result) | {"difference": entry.lead} | entry.result.detail
        fields["percent"] = share.replace("-", scorecard.MINUS)
        form = ".2f" if abs(value or 0) < 1 else ".2g" if abs(value or 0) < 10 else ".3g"
        short = UNDEFINED if value is None else f"{value:{form}}"
        fields["short"] = short.replace("-", scorecard.MINUS)
        if value is not None and entry.result.count > 1:
            low, high = interval(value, entry.result.spread, entry.result.count)
            fields["interval"] = f"{low:.2f} to {high:.2f}".replace("-", scorecard.MINUS)
            fields["interval_percent"] = f"{100 * low:.0f} to {100 * high:.0f} %"
        if field not in fields:
            raise unknown(f"field of {claim.id}", field, fields)
        chosen = fields[field]
        return scorecard.number(chosen) if isinstance(chosen, float) else str(chosen)

"""Tables that a reader can search, in a notebook or on a page, without a server or a library.

Without scripts the table is there all the same, and the field to search in is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

import pandas as pd

from ..errors import IclError

_SEARCH = (
    "for (const row of this.parentNode.querySelectorAll('tbody tr')) "
    "row.hidden = !row.textContent.toLowerCase().includes(this.value.toLowerCase())"
)


class Table:
    """Rows of one shape, with a caption. The last expression of a cell shows it."""

    def __init__(self, rows: Sequence[Mapping[str, object]], caption: str) -> None:
        """Take the rows."""
        if not rows or any(list(row) != list(rows[0]) for row in rows):
            raise IclError("A table needs at least one row, and the same columns in all.")
        self.rows, self.caption = pd.DataFrame(rows, dtype=object), caption

    def __repr__(self) -> str:
        return f"{self.caption}: {len(self.rows)} rows of {', '.join(self.rows)}"

    def _repr_html_(self) -> str:
        look = {"index": False, "border": 0, "justify": "left", "na_rep": "–"}
        with pd.option_context("display.max_colwidth", None):
            table: str = self.rows.to_html(float_format="{:.2f}".format, **look)
        caption = escape(self.caption)
        table = table.replace("<thead>", f"<caption>{caption}</caption><thead>")
        table = table.replace("<th>", '<th scope="col">')
        field = f'<input type="search" placeholder="search" aria-label="Search: {caption}"'
        search = f'{field} oninput="{escape(_SEARCH)}">'
        return f'<div class="searchable" style="overflow-x: auto">{search}{table}</div>'

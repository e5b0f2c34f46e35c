"""Tables that a reader can search, in a notebook or on a page, without a server or a library.

Without scripts the table is there all the same, and the field to search in is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

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
        self.rows, self.caption = rows, caption

    def __repr__(self) -> str:
        return f"{self.caption}: {len(self.rows)} rows of {', '.join(self.rows[0])}"

    def _repr_html_(self) -> str:
        head = "".join(f'<th scope="col">{escape(name)}</th>' for name in self.rows[0])
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(_told(v))}</td>" for v in row.values()) + "</tr>"
            for row in self.rows
        )
        field = (
            f'<input type="search" placeholder="search" aria-label="Search: '
            f'{escape(self.caption)}" oninput="{escape(_SEARCH)}">'
        )
        return (
            f'<div class="searchable" style="overflow-x: auto">{field}<table>'
            f"<caption>{escape(self.caption)}</caption><thead><tr>{head}</tr></thead>"
            f"<tbody>{body}</tbody></table></div>"
        )


def _told(value: object) -> str:
    if isinstance(value, float):
        return "–" if math.isnan(value) else f"{value:.2f}"
    return str(value)

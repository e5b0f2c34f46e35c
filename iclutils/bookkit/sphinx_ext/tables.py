"""Tables whose cells are lists of nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from docutils import nodes

Cell = list[nodes.Node]


def text(content: str) -> nodes.paragraph:
    """A cell's text."""
    return nodes.paragraph("", content)


def commit(of: str) -> str:
    """A commit, short; ``+`` says that the package differed from it, ``none`` is no commit."""
    return (of[:10] + "+" * of.endswith("+")) or "none"


def versions(python: str, others: Mapping[str, str]) -> str:
    """Python's version, and those of packages by name."""
    return ", ".join([f"python {python}", *(f"{name} {its}" for name, its in others.items())])


def linked(content: str, target: str) -> nodes.paragraph:
    """A cell's text as a link to ``target``, an address relative to the page."""
    return nodes.paragraph("", "", nodes.reference("", content, refuri=target, internal=True))


def table(
    head: list[str],
    body: list[list[Cell]],
    name: str,
    stub: bool = False,
    classes: Sequence[list[str]] = (),
) -> nodes.table:
    """A table of that class.

    Args:
        head: texts of the head.
        body: rows, each a list of cells.
        name: class of the table.
        stub: whether the first column names its row.
        classes: classes of each row, if they have any.
    """
    group = nodes.tgroup(cols=len(head))
    for column in range(len(head)):
        group += nodes.colspec(colwidth=1, **({"stub": 1} if stub and not column else {}))
    lines: list[list[Cell]] = [[[text(cell)] for cell in head], *body]
    made = [nodes.row("", *(nodes.entry("", *cell) for cell in line)) for line in lines]
    for row, own in zip(made[1:], classes, strict=False):
        row["classes"] += own
    group += nodes.thead("", made[0])
    group += nodes.tbody("", *made[1:])
    return nodes.table("", group, classes=[name])

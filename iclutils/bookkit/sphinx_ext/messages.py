"""Every message of the package, and the page that explains it.

A page of ``book/errors`` says in its first lines, in a comment, which messages are its own, one
regular expression a line. ``{messages}`` lists all messages of the package with their pages; those
that no other page claims belong to the page whose expression is ``.*``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

from ...files import PACKAGE

CLAIMED = re.compile(r"\A%%? messages\n((?:%%? .*\n)+)", re.MULTILINE)


@dataclass(frozen=True)
class Message:
    """What an error says, with … for what depends on the case, and the module that raises it."""

    text: str
    module: str


def messages(package: Path = PACKAGE) -> list[Message]:
    """All messages of ``IclError``, in the order of the modules."""
    found: dict[Message, None] = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        for text in _raised(ast.parse(path.read_text(encoding="utf-8"))):
            found[Message(text, module)] = None
    return list(found)


def _raised(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in ("IclError", "unknown"):
                text = _text(node.args[0])
                yield f"Unknown {text} …" if name == "unknown" else text


def _text(node: ast.expr) -> str:
    """A string of the source, with … for what is put in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    return "…"


def claims(folder: Path) -> dict[str, list[re.Pattern[str]]]:
    """The expressions of each page, by its name."""
    found = {}
    for path in sorted(folder.glob("*.md")):
        if head := CLAIMED.match(path.read_text(encoding="utf-8")):
            lines = [line.lstrip("% ") for line in head[1].splitlines()]
            found[path.stem] = [re.compile(line) for line in lines if line]
    return found


def page_of(text: str, pages: dict[str, list[re.Pattern[str]]]) -> str:
    """The page of a message; the one that claims everything is asked last."""
    rest = ""
    for name, expressions in pages.items():
        if any(expression.pattern == ".*" for expression in expressions):
            rest = name
        elif any(expression.search(text) for expression in expressions):
            return name
    return rest


class Messages(SphinxDirective):
    """``{messages}``: a table of all messages, each with its page and its module."""

    def run(self) -> list[nodes.Node]:
        """Build it."""
        folder = Path(self.env.srcdir, "book", "errors")
        pages = claims(folder)
        for path in folder.glob("*.md"):
            self.env.note_dependency(str(path))
        lines = ["| Message | Page | Module |", "|---|---|---|"]
        for message in messages():
            text = re.sub(r"[|`]", "'", " ".join(message.text.split()))
            page = page_of(message.text, pages)
            lines.append(f"| `` {text} `` | {{doc}}`{page}` | `{message.module}` |")
        container = nodes.Element()
        self.state.nested_parse(StringList(lines), 0, container)
        return container.children

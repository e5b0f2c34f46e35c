"""The exercises of a chapter, read from its notebook; and the code that they stand on.

An exercise is a markdown cell with its stub and its hint, followed by the cell of its solution;
an open one has a place to start instead of both. ``foundation`` is the part of the chapter's code
that given blocks need: running it instead of the whole chapter makes testing them affordable.
"""

from __future__ import annotations

import ast
import re
import symtable
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from notebook_rules import code, source, tags

from iclutils.files import read_json

LEVELS = ("Easy", "Medium", "Hard", "Open")
KINDS = ("Warm-up", "By hand", "Extend the method", "Break a claim", "Open question")
CELL = re.compile(r"^````\{(exercise|solution)\} (.+)\n", re.MULTILINE)
HEAD = re.compile(r"\*(\w+), ([^.]+)\. ([^.]+)\.\* (\S.*)", re.DOTALL)
FOLDED = re.compile(r"```\{admonition\} (.+)\n:class: dropdown tip\n(.*?)```", re.DOTALL)
CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)
MUTATORS = {"append", "extend", "add", "update", "setdefault", "insert"}


@dataclass(frozen=True)
class Exercise:
    """What stands in the notebook; empty where it does not."""

    label: str
    level: str
    minutes: str
    kind: str
    text: str
    stub: str
    folded: str  # title of the hint
    hint: str
    solution: str = ""
    why: str = ""  # the words of the solution

    @property
    def is_open(self) -> bool:
        """Whether it has no solution by design."""
        return self.level == "Open"


def exercises(notebook: Path) -> list[Exercise]:
    """All exercises of a chapter, in order.

    Raises:
        ValueError: if a cell is not of the form, or a solution does not follow its exercise.
    """
    found: list[Exercise] = []
    for cell in read_json(notebook)["cells"]:
        match = CELL.search(source(cell)) if cell["cell_type"] == "markdown" else None
        if match is None:
            continue
        if match[1] == "exercise":
            found.append(_exercise(source(cell)))
        elif match[2] != found[-1].label or found[-1].solution:
            raise ValueError(f"the solution of {match[2]} follows {found[-1].label}")
        else:
            text = source(cell)
            changes = {"solution": "\n".join(CODE.findall(text)), "why": CODE.sub("", text)}
            found[-1] = Exercise(**(vars(found[-1]) | changes))
    return found


def _exercise(text: str) -> Exercise:
    label, head, folded = re.search(r":label: (\S+)", text), HEAD.search(text), FOLDED.search(text)
    if label is None or head is None or folded is None or len(CODE.findall(text)) != 1:
        raise ValueError(f"not of the form: label, *level, minutes. kind.*, stub, hint: {text}")
    return Exercise(
        label[1], *head.groups()[:3], text, CODE.findall(text)[0], folded[1], folded[2].strip()
    )


def asserts(block: str) -> list[str]:
    """The assertions at the top level of a block, one form for all spacing."""
    return [ast.unparse(s) for s in ast.walk(ast.parse(block)) if isinstance(s, ast.Assert)]


def foundation(notebook: Path, blocks: Iterable[str]) -> str:
    """The chapter's set-up, and of its other statements those that the blocks depend on.

    Walks the statements backwards and keeps those that bind, or change, a name still needed.
    """
    cells = [cell for cell in code(read_json(notebook)) if "parameters" not in tags(cell)]
    live: set[str] = set()
    for block in blocks:
        live |= _needed(ast.parse(block).body)[0]
    statements = [s for cell in cells for s in ast.parse(source(cell)).body]
    set_up = len(ast.parse(source(cells[0])).body)
    live, kept = _needed(statements[set_up:], live)
    return "\n".join(ast.unparse(s) for s in [*statements[:set_up], *kept])


def _needed(
    statements: list[ast.stmt], live: set[str] | None = None
) -> tuple[set[str], list[ast.stmt]]:
    """Names needed before the statements, and which statements are; all, with no ``live``."""
    everything, live, kept = live is None, set(live or ()), list[ast.stmt]()
    for statement in reversed(statements):
        uses, binds = _names(statement)
        changed = set(_changed(statement))
        if not everything and not live & (binds | changed):
            continue
        if isinstance(statement, ast.If):  # what it binds may have been bound before, too
            branches = (statement.body, statement.orelse)
            sides = [_needed(side, None if everything else live) for side in branches]
            statement.body, statement.orelse = (side for _, side in sides)
            statement.body = statement.body or [ast.Pass()]
            live = live.union(_names(ast.Expr(statement.test))[0], *(names for names, _ in sides))
        elif isinstance(statement, ast.For):
            targets = {n.id for n in ast.walk(statement.target) if isinstance(n, ast.Name)}
            inside, _ = _needed(statement.body)
            live |= _names(ast.Expr(statement.iter))[0] | (inside - targets) | changed
        else:
            live = (live - (binds - changed)) | uses | changed
        kept.insert(0, statement)
    return live, kept


def _names(statement: ast.stmt) -> tuple[set[str], set[str]]:
    """Global names that a statement reads, also from inside functions, and those that it binds."""
    table = symtable.symtable(ast.unparse(statement), "cell", "exec")
    top = table.get_symbols()
    uses = {s.get_name() for s in top if s.is_referenced()}
    for scope in _scopes(table):
        uses |= {s.get_name() for s in scope.get_symbols() if s.is_global() and s.is_referenced()}
    return uses, {s.get_name() for s in top if s.is_assigned() or s.is_imported()}


def _scopes(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    for child in table.get_children():
        yield child
        yield from _scopes(child)


def _changed(statement: ast.stmt) -> Iterator[str]:
    """Names whose object is changed in place."""
    for node in ast.walk(statement):
        if isinstance(node, ast.AugAssign):
            yield from _root(node.target)
        elif isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from _root(node.value)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in MUTATORS:
            yield from _root(node.func)


def _root(node: ast.AST) -> Iterator[str]:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    if isinstance(node, ast.Name):
        yield node.id

"""The half of a homework that students get: how answers are asked, what public checks expect.

It is cut out of the homework's table: of the code what ``inputs``, ``outcome``, ``look`` and
``reading`` need, of solutions and mistakes only the values that they give on the public input. A
table whose half would hold a solution is refused.
"""

import ast
import base64
import zlib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from iclutils.checks import Function, Part, Value, frozen
from iclutils.errors import IclError

# What a student may have of an entry of the table, and what a ``Part`` calls it.
KEPT = {name: name for name in ("inputs", "outcome", "look", "tolerance")} | {"reading": "outcome"}


def packed(table: Path, questions: dict[str, tuple[Function | Value, ...]]) -> str:
    """The students' half of a table as text; ``checks.unpacked`` reads it."""
    expected = {name: [part.expected(0) for part in parts] for name, parts in questions.items()}
    kept = {"name": table.stem, "source": source(table, questions), "expected": expected}
    return base64.b85encode(zlib.compress(frozen(kept), 9)).decode()


def source(table: Path, questions: dict[str, tuple[Function | Value, ...]]) -> str:
    """The code of the students' half: each question's ``Part`` objects, and what they need."""
    body = ast.parse(table.read_text(encoding="utf-8")).body
    bound = {name: node for node in body for name in _bound(node)}
    made = [
        f"{name} = ({', '.join(map(_part, _calls(bound[name], table), parts))},)"
        for name, parts in questions.items()
    ]
    needed: set[str] = set()
    left: list[ast.AST] = [ast.parse(line) for line in made]
    while left:
        used = {each.id for each in ast.walk(left.pop()) if isinstance(each, ast.Name)}
        new = (used & bound.keys()) - needed - questions.keys()
        needed |= new
        left += [bound[name] for name in new]
    solutions = {p.name for parts in questions.values() for p in parts if isinstance(p, Function)}
    if shown := sorted(needed & solutions):
        raise IclError(f"{table.name}: inputs, outcome or look use the solution {shown}.")
    lines = ["from __future__ import annotations", f"from {Part.__module__} import Part"]
    for node in body:
        names = needed.intersection(_bound(node))
        if isinstance(node, ast.Import | ast.ImportFrom):
            node.names = [each for each in node.names if (each.asname or each.name) in needed]
        if names:
            lines.append(ast.unparse(node))
    return "\n".join([*lines, *made])


def _bound(node: ast.stmt) -> Iterator[str]:
    """The names that a statement at the top of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        if getattr(node, "module", "") != "__future__":
            yield from ((each.asname or each.name) for each in node.names)
    elif isinstance(node, ast.Assign):
        yield from (each.id for each in ast.walk(node.targets[0]) if isinstance(each, ast.Name))


def _calls(node: ast.stmt, table: Path) -> list[ast.Call]:
    """``Function(...)`` and ``Value(...)`` of one question."""
    given = node.value.elts if isinstance(node, ast.Assign) else []  # type: ignore[attr-defined]
    if not all(isinstance(each, ast.Call) for each in given):
        raise IclError(f"{table.name}: a question is a tuple of Function(...) and Value(...).")
    return given


def _part(call: ast.Call, entry: Function | Value) -> str:
    """The code of the ``Part`` of one entry."""
    flat = [each.value.elts if isinstance(each, ast.Starred) else [each] for each in call.args]  # type: ignore[attr-defined]
    names = (field.name for field in fields(entry))
    given = dict(zip(names, (each for some in flat for each in some), strict=False))
    given |= {str(each.arg): each.value for each in call.keywords}
    kept = [f"{KEPT[name]}={ast.unparse(node)}" for name, node in given.items() if name in KEPT]
    return f"Part({', '.join([repr(entry.name), repr(entry.part.kind), *kept])})"

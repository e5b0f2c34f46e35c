"""What a notebook's checks depend on: its statements are followed back from them by the names that
these bind, and from there into the package (``iclutils.science``)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from iclutils import claims
from iclutils.science import (
    NESTED,
    SESSION,
    Key,
    Module,
    Plain,
    Science,
    binds,
    definitions,
    hashed,
    imports,
    is_apart,
    of_session,
    root,
)

SHOWS = {"display", "print"}
CHECK = "check"  # the session's method that judges
JUDGES = f"{SESSION}.{CHECK}"


@cache
def of_notebook(cells: tuple[str, ...]) -> tuple[Science, set[str]]:
    """What the checks of a notebook's cells of code can reach, and the names of the sizes that they
    ask for."""
    code = "\n".join(cells).splitlines()
    tree = ast.parse("\n".join(line for line in code if not line.startswith(("%", "!"))))
    home = Module("notebook", Path(), {}, dict(imports(tree, "notebook")))
    own, uses, asked = dict[str, list[str]](), set[Key](), set[str]()
    for needed in _needed([_Statement(node, home) for node in tree.body]):
        own.setdefault(needed.name, []).append(needed.code)
        uses |= needed.plain.uses
        asked |= needed.plain.asked
    sizes = {name.split(".")[1] for name in asked if name.startswith("tier.")}
    return hashed(own, uses | of_session(asked)), sizes - {"name", "models"}


def claims_in(cells: Iterable[Mapping[str, Any]]) -> set[str]:
    """Ids that the code of a notebook's cells names, other than to show what was found; of an
    f-string, such as ``f"02.vanilla_{task}"``, all of the ledger that it can mean."""
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    code = re.sub(r"\bbook\.(table|kept)\(.*?\)", "", code, flags=re.DOTALL)
    named = set(re.findall(r"""["'](\d\d\.[a-z][\w{}]*)["']""", code))
    made = {name: re.sub(r"\{\w+\}", r"\\w+", name) for name in named if "{" in name}
    return (named - made.keys()) | {
        claim for form in made.values() for claim in claims.ledger() if re.fullmatch(form, claim)
    }


class _Statement:
    """A statement of a notebook: its plain code, the names that it binds, and those of objects that
    it may change."""

    def __init__(self, node: ast.stmt, home: Module) -> None:
        self.binds, self.changes = set(binds(node)), set(_changes(node, home))
        self.generators = set(_generators(node))
        self.defines = isinstance(node, NESTED)
        self.replaces = self.defines or isinstance(node, ast.Assign | ast.AnnAssign)
        claim = re.search(r"""(["'])(\d\d\.[a-z]\w*)\1""", ast.unparse(node))
        self.plain = Plain(home)
        self.code = self.plain.code(node)
        judges = CHECK in self.plain.asked
        self.free = self.plain.free | ({JUDGES} if judges else set())
        said = [claim[2]] if claim else []
        made = [*([] if self.defines else sorted(self.changes)), *sorted(self.binds)]
        self.name = [*(said + made if judges else made + said), *sorted(self.free), ""][0]


def _needed(statements: list[_Statement]) -> list[_Statement]:
    """Those that a check depends on, in order: names are followed from the last one back. A
    function is called where it is named, and who names a generator draws from it."""
    functions = [each for each in statements if each.defines]
    generators = set().union(*(each.generators for each in statements))
    needed, live = list[_Statement](), set[str]()
    for each in reversed(statements):
        names, called = set(each.free), list[_Statement]()
        while more := [it for it in functions if it.binds & names and it not in called]:
            called += more
            names = names.union(*(it.free for it in more))
        changes = each.changes.union(names & generators, *(it.changes for it in called))
        changes = set() if each.defines else changes
        if (JUDGES in names and not each.defines) or (each.binds | changes) & live:
            needed.append(each)
            live = (live - each.binds if each.replaces else live) | names
    return needed[::-1]


def _changes(node: ast.AST, home: Module) -> Iterator[str]:
    """Names of objects that a statement may change: it calls a method of theirs or hands them to a
    function, for nothing but its effect, or it sets a part of them."""
    for part in ast.walk(node):
        match part:
            case ast.Expr(value=ast.Call(func=ast.Attribute() as func)) if (
                name := root(func)
            ) not in home.imported:
                yield from {name} - {SESSION, ""}
            case ast.Expr(value=ast.Call(func=func, args=args)):
                full = home.imported.get(root(func), root(func)).split(".")
                if full[0] not in SHOWS and not is_apart(full):
                    yield from (n.id for a in args for n in ast.walk(a) if isinstance(n, ast.Name))
            case ast.Subscript(ctx=ast.Store()) | ast.Attribute(ctx=ast.Store()):
                yield from {root(part)} - {""}


def _generators(node: ast.AST) -> Iterator[str]:
    """Names that a statement gives to random generators."""
    for part in (part for part in ast.walk(node) if isinstance(part, ast.Assign)):
        for name, own in definitions(part):
            made = own.value if isinstance(own, ast.Assign) else own
            if ast.unparse(made).startswith(f"{SESSION}.generator("):
                yield name

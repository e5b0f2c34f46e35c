"""What a number depends on: the definitions that the code which gives it can reach, by name.

Code is followed by the names that it uses, from definition to definition (a function, a class or a
constant of the package, a statement of a notebook), and hashed without what changes no number: its
file, layout, comments, docstrings, annotations, imports, refusals, single words and numbers that
a call of ``plots`` is given as they are (those in a list count) and the names of local variables. A
class counts whole, and so does a name that may be meant.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

from .files import PACKAGE

Key = tuple[str, str]  # a module's name, and that of a definition in it
Science = dict[str, str]  # for the name of each definition a hash of its code
# What says, shows, stores or judges, and never changes a number.
APART = {
    *("commandline", "doctor", "errors", "files", "plots", "progress", "room", "your_model"),
    *("checks", "claims", "remember", "science", "scorecard", "session"),
}
SESSION = "book"  # what notebooks call it
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
UNSAID = ("ctx", "kind", "type_comment")  # of a node
NESTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@cache
def sources() -> dict[Path, bytes]:
    """All code and data, as they were when this was first asked: what is edited while a chapter
    runs is not what it runs."""
    return {p: p.read_bytes() for p in (*PACKAGE.rglob("*.py"), *PACKAGE.glob("tasks/data/**/*.*"))}


def is_current() -> bool:
    """Whether the files are still what they were."""
    return all(path.is_file() and path.read_bytes() == it for path, it in sources().items())


def of_definition(module: str, name: str) -> Science:
    """What a definition of the package can reach, itself too."""
    return hashed({}, {(module, name)})


def of_source(source: str, around: Mapping[str, Any]) -> tuple[Science, set[str]]:
    """What a function outside of the package can reach of it, and the names of the other values
    that it takes from ``around``."""
    full = {name: _full(value) for name, value in around.items()}
    here = f"{around.get('__name__')}."
    imported = {k: it for k, it in full.items() if it and not it.startswith(here)}
    home = Module("", Path(), {}, imported)
    plain = Plain(home)
    code = plain.code(ast.parse(dedent(source)).body[0])
    taken = plain.free | ({SESSION} if plain.asked else set())
    uses = plain.uses | of_session(plain.asked)
    return hashed({"": [code]}, uses), taken & (around.keys() - home.imported.keys())


def _full(value: Any) -> str:
    """The dotted name of a module, or of what a module defines; else nothing."""
    if isinstance(value, ModuleType):
        return value.__name__
    module, name = (getattr(value, f"__{part}__", "") for part in ("module", "qualname"))
    return f"{module}.{name}" if module and name else ""


def digest(of: Any) -> str:
    """A short hash of a plain value."""
    return hashlib.sha256(repr(of).encode()).hexdigest()[:10]


def hashed(own: Mapping[str, list[str]], uses: set[Key]) -> Science:
    """Hashes of all that can be reached; definitions of one name are told together."""
    found, waiting = dict[Key, str](), set(uses)
    while waiting:
        key = waiting.pop()
        found[key], more = _definition(*key)
        waiting |= more - found.keys()
    codes = {name: ["\n".join(said)] for name, said in own.items()}
    for (_, name), code in found.items():
        codes.setdefault(name, []).append(code)
    return {name: " ".join(sorted(map(digest, each))) for name, each in sorted(codes.items())}


@dataclass(frozen=True)
class Module:
    """The statements that define each name of a file, and what its imports call things."""

    name: str
    folder: Path
    defined: Mapping[str, list[ast.stmt]]
    imported: Mapping[str, str]  # as iclutils.interp.patching.ablate


@cache
def _module(name: str) -> Module | None:
    """The module of the package of that name, if there is one."""
    path = PACKAGE.parent.joinpath(*name.split("."))
    package = path / "__init__.py" in sources()
    path = path / "__init__.py" if package else path.with_suffix(".py")
    if path not in sources():
        return None
    tree, defined = ast.parse(sources()[path]), dict[str, list[ast.stmt]]()
    for own, node in chain.from_iterable(map(definitions, tree.body)):
        defined.setdefault(own, []).append(node)
    imported = dict(imports(tree, name if package else name.rpartition(".")[0]))
    return Module(name, path.parent, defined, imported)


def definitions(node: ast.stmt) -> Iterator[tuple[str, ast.stmt]]:
    """The names that a statement of a module defines, each with its own part of it."""
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)) if len(
            names
        ) == len(values):
            for name, value in zip(names, values, strict=True):
                yield from definitions(ast.Assign([name], value))
        case _:
            stored = (n for n in ast.walk(node) if isinstance(getattr(n, "ctx", None), ast.Store))
            own = [*binds(node)] or [*filter(None, map(root, stored))]  # or a part of them
            yield from ((name, deepcopy(node) if n else node) for n, name in enumerate(own))


def imports(tree: ast.Module, package: str) -> Iterator[tuple[str, str]]:
    """What each name stands for that is imported anywhere in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = parts[: len(parts) - node.level + 1] if node.level else []
            for alias in node.names:
                full = ".".join(filter(None, [*above, node.module, alias.name]))
                yield alias.asname or alias.name, full
        elif isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                yield alias.asname or first, alias.name if alias.asname else first


def is_apart(parts: list[str]) -> bool:
    return parts[0] == PACKAGE.name and not APART.isdisjoint(parts[1:2])


def _resolve(dotted: str) -> tuple[str, str, str] | None:
    """The module, the definition in it and what is left of a dotted name; None outside science."""
    parts = dotted.split(".")
    if parts[0] != PACKAGE.name or is_apart(parts):
        return None
    for cut in range(len(parts), 0, -1):
        if module := _module(".".join(parts[:cut])):
            if module.name == f"{PACKAGE.name}.zoo":  # it hands out what is told by its checksums
                return None
            name, left = ".".join(parts[cut : cut + 1]), parts[cut + 1 :]
            if name in module.imported and name not in module.defined:
                return _resolve(".".join([module.imported[name], *left]))
            return module.name, name, ".".join(left)
    return None


@cache
def _definition(module: str, name: str) -> tuple[str, frozenset[Key]]:
    """The plain code of a definition, with the data files that it names, and what it uses."""
    home = _module(module)
    assert home is not None
    nodes, plain = home.defined.get(name, []), Plain(home)
    said = [plain.code(node) for node in nodes]
    if "__file__" in plain.free:
        values = [n.value for node in nodes for n in ast.walk(node) if isinstance(n, ast.Constant)]
        texts = (text for text in values if isinstance(text, str) and text != "utf-8")
        there = home.folder.joinpath(*texts)
        data = sorted(p for p in sources() if p.suffix != ".py" and there in (p, *p.parents))
        said += [digest((path.name, sources()[path])) for path in data]
    return "\n".join(said), frozenset(plain.uses)


def of_session(asked: set[str]) -> set[Key]:
    """What the session's methods of these names use; the session itself only hands on."""
    methods, uses, seen, waiting = _session(), set[Key](), set[str](), set(asked)
    while waiting:
        name = waiting.pop().partition(".")[0]
        if name in methods and name not in seen:
            uses |= methods[name][0]
            waiting |= methods[name][1]
        seen.add(name)
    return uses


@cache
def _session() -> dict[str, tuple[set[Key], set[str]]]:
    """For each method of the session the definitions and the methods that it uses."""
    package = _module(PACKAGE.name)
    assert package is not None
    home = _module(package.imported["begin"].rpartition(".")[0])
    assert home is not None
    found = {}
    for node in ast.walk(home.defined["Session"][0]):
        if isinstance(node, ast.FunctionDef):
            plain = Plain(home, "self")
            plain.code(node)
            found[node.name] = {key for key in plain.uses if key[0] != home.name}, plain.asked
    return found


class _Bare(ast.NodeTransformer):
    """Code without annotations, docstrings, imports and refusals."""

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(node.arg)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        bare = ast.Assign([node.target], node.value) if node.value else ast.Expr(node.target)
        return self.generic_visit(bare)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_Import(self, node: ast.stmt) -> None:
        return None

    visit_ImportFrom = visit_Assert = visit_Import

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return ast.Raise()

    def visit_If(self, node: ast.If) -> ast.AST | None:
        refuses = not node.orelse and all(isinstance(step, ast.Raise) for step in node.body)
        if not refuses:
            return self.generic_visit(node)
        sets = any(isinstance(part, ast.NamedExpr) for part in ast.walk(node.test))
        return ast.Expr(node.test) if sets else None


class Plain(ast.NodeTransformer):
    """Bare code that calls a definition by its own name, wherever it stands and however it was
    imported, and local variables by numbers. What it names is noted on the way: ``uses``
    definitions, ``free`` names that are neither defined nor local, and what is ``asked`` of the
    session, which is called ``me``."""

    def __init__(self, home: Module, me: str = SESSION) -> None:
        self.home, self.me = home, me
        self.uses, self.free, self.asked = set[Key](), set[str](), set[str]()
        self.scopes: list[dict[str, str]] = []

    def code(self, node: ast.stmt) -> str:
        """The code of a statement as text."""
        bare = _Bare().visit(node)
        return _said(self.visit(bare)) if bare else ""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        for scope in reversed(self.scopes):
            if node.id in scope:
                return ast.Name(scope[node.id])
        return self._refer(node.id) if isinstance(node.ctx, ast.Load) else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        names, base = [node.attr], node.value
        while isinstance(base, ast.Attribute):
            names, base = [base.attr, *names], base.value
        if isinstance(base, ast.Name):
            if base.id == self.me:
                self.asked.add(".".join(names))
                return ast.Name(".".join([base.id, *names]))
            if not any(base.id in scope for scope in self.scopes):
                return self._refer(".".join([base.id, *names]))
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if self.home.imported.get(root(node.func), "").startswith(f"{PACKAGE.name}.plots."):
            node.args = [each for each in node.args if not isinstance(each, ast.Constant)]
            node.keywords = [k for k in node.keywords if not isinstance(k.value, ast.Constant)]
        return self.generic_visit(node)

    def _refer(self, dotted: str) -> ast.AST:
        """A dotted name whose first part is not local."""
        first, _, rest = dotted.partition(".")
        if first in self.home.defined:
            self.uses.add((self.home.name, first))
            return ast.Name(dotted)
        self.free.add(first)
        if first not in self.home.imported:
            return ast.Name(dotted)
        full = ".".join(filter(None, [self.home.imported[first], rest]))
        found = _resolve(full)
        if found is None:
            ours = full.startswith(f"{PACKAGE.name}.")
            return ast.Name(full.rpartition(".")[2] if ours else full)
        module, name, left = found
        every = getattr(_module(module), "defined", {}) if not name else [name]  # as a value: all
        self.uses |= {(module, each) for each in every}
        return ast.Name(".".join(filter(None, [name or module.rpartition(".")[2], left])))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if self.scopes:
            node.name = self.scopes[-1].get(node.name, node.name)
        node.decorator_list = [self.visit(each) for each in node.decorator_list]
        node.args = self.generic_visit(node.args)  # type: ignore[assignment]  # its defaults
        outer = {name for n in ast.walk(node) if isinstance(n, ast.Global | ast.Nonlocal)
                 for name in n.names}  # fmt: skip
        own = [name for step in node.body for name in binds(step) if name not in outer]
        self._enter(own, {a.arg: a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)})
        node.body = [found for step in node.body if (found := self.visit(step))]
        self.scopes.pop()
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        node.args = self.generic_visit(node.args)  # type: ignore[assignment]
        self._enter([a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)], {})
        for each in (a for a in ast.walk(node.args) if isinstance(a, ast.arg)):
            each.arg = self.scopes[-1][each.arg]
        node.body = self.visit(node.body)
        self.scopes.pop()
        return node

    def visit_ListComp(self, node: Any) -> ast.AST:
        first = node.generators[0]
        first.iter = self.visit(first.iter)  # outside of the comprehension
        self._enter([name for each in node.generators for name in binds(each.target)], {})
        kept, first.iter = first.iter, ast.Constant(None)
        self.generic_visit(node)
        first.iter = kept
        self.scopes.pop()
        return node

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp

    def _enter(self, own: Iterable[str], given: dict[str, str]) -> None:
        depth = len(self.scopes)
        short = {name: f"_{depth}_{n}" for n, name in enumerate(dict.fromkeys(own))}
        self.scopes.append(short | given)


def root(node: ast.AST) -> str:
    """The name that an expression begins with, or nothing."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def binds(node: ast.AST) -> Iterator[str]:
    """Names that a statement binds in its own scope, in order."""
    if isinstance(node, NESTED):
        yield node.name
        return
    if isinstance(node, (*COMPREHENSIONS, ast.Lambda)):
        return
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
        yield node.name
    for child in ast.iter_child_nodes(node):
        yield from binds(child)


def _said(node: Any) -> str:
    """Code as text that is the same in every version of Python."""
    if isinstance(node, list):
        return f"[{','.join(map(_said, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = {k: v for k, v in ast.iter_fields(node) if k not in UNSAID and v not in (None, [])}
    return f"{type(node).__name__}({','.join(f'{k}={_said(v)}' for k, v in fields.items())})"

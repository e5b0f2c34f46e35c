"""Lines of the chapters as answers to homework: which of them can be pasted?

A student who pastes a line gives its names the homework's own. So every run of statements of a
cell (or of a function in it, or of a solution) is tried with each choice of the inputs for the
names that it reads, and what its last statement computes is judged as an answer.
"""

import ast
import builtins
import contextlib
import itertools
import signal
import symtable
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from inspect import isfunction, signature
from pathlib import Path
from types import CodeType
from typing import Any

import checks
from notebook_rules import source, tags
from torch import Tensor

from iclutils.files import read_json

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
LONGEST = 8  # statements
MOST = 6  # names that a run of statements reads
DRAWS = "iclutils.plots", "matplotlib", "training"  # no answer comes from them
ALLOWED = (ast.BinOp, ast.Call, ast.UnaryOp, ast.Subscript, ast.List, ast.Tuple, ast.ListComp)


@dataclass(frozen=True)
class Lines:
    """Statements whose last computes ``_answer``, and the names that they read."""

    code: CodeType
    reads: dict[str, set[str]]  # with the attributes that each has to have
    text: str
    globals: dict[str, Any]

    def answer(self, order: tuple[int, ...]) -> Any:
        """Return a function of a question's inputs; ``order`` says which of them each name is."""

        def given(*inputs: Any) -> Any:
            names = self.globals | {"print": lambda *said, **options: None}
            names |= {name: inputs[i] for name, i in zip(self.reads, order, strict=True)}
            exec(self.code, names)
            return names["_answer"]

        return given

    def orders(self, inputs: tuple[Any, ...]) -> Iterator[tuple[int, ...]]:
        """Yield which of the inputs each name may be, all ways."""
        fit = [[i for i, x in enumerate(inputs) if all(a in dir(x) for a in has)]
               for has in self.reads.values()]  # fmt: skip
        return (order for order in itertools.product(*fit) if len({*order}) == len(order))


def blocks(cell: str) -> Iterator[list[ast.stmt]]:
    """Yield the statements of a cell, and those of each function in it."""
    tree = ast.parse(cell)
    yield tree.body
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.For | ast.With):
            yield node.body


def loads(statement: ast.stmt) -> set[str]:
    """Names that a statement reads from outside."""

    def of(table: symtable.SymbolTable, top: bool) -> set[str]:
        names = {
            s.get_name()
            for s in table.get_symbols()
            if s.is_referenced() and (top or s.is_global())
        }
        return names.union(*(of(child, False) for child in table.get_children()))

    return of(symtable.symtable(ast.unparse(statement), "lines", "exec"), True)


def stores(statement: ast.stmt) -> set[str]:
    """Names that a statement binds."""
    if isinstance(statement, ast.FunctionDef):
        return {statement.name}
    return {
        n.id
        for n in ast.walk(statement)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }


def attributes(text: str, names: set[str]) -> dict[str, set[str]]:
    """What is done with each name: its attributes, ``__call__``, ``__getitem__``."""
    has: dict[str, set[str]] = {name: set() for name in sorted(names)}
    kinds = (ast.Attribute, "value"), (ast.Call, "func"), (ast.Subscript, "value")
    for node in ast.walk(ast.parse(text)):
        for kind, of in kinds:
            name = getattr(getattr(node, of, None), "id", "")
            if isinstance(node, kind) and name in has:
                what = {ast.Call: "__call__", ast.Subscript: "__getitem__"}
                has[name].add(what.get(kind) or node.attr)
    return has


def values(statement: ast.stmt) -> Iterator[ast.expr]:
    """Yield what a statement computes: its whole value, then the parts of it."""
    for node in ast.walk(statement):
        if isinstance(node, ALLOWED) and isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            yield node


@cache
def known(notebook: Path) -> dict[str, Any]:
    """What a chapter imports, but for what answers may not use, and the functions it defines."""
    names: dict[str, Any] = {}
    for cell in read_json(notebook)["cells"]:
        if cell["cell_type"] == "code":
            for node in ast.parse(source(cell)).body:
                if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef):
                    with contextlib.suppress(Exception):
                        exec(ast.unparse(node), names)
    return {name: value for name, value in names.items() if not refused(value)}


def refused(value: Any) -> bool:
    """Whether an answer may not use it, or does not."""
    home = str(getattr(value, "__module__", None) or getattr(value, "__name__", ""))
    modules = (*checks.MEASURES, *DRAWS)
    return checks._within(home, modules) and not checks._within(home, checks.TOOLS)


def sources(notebook: Path) -> Iterator[str]:
    """Yield the code of a chapter: cells, and blocks in its text."""
    for cell in read_json(notebook)["cells"]:
        if cell["cell_type"] == "code" and not tags(cell) & {"set-up", "parameters"}:
            yield source(cell)
        elif "```python" in source(cell):
            for part in source(cell).split("```python\n")[1:]:
                yield part.partition("```")[0]


def endings(block: list[ast.stmt]) -> Iterator[tuple[int, ast.expr]]:
    """Yield what a block computes, with the number of statements before it: each value, and the
    stack of two names that are bound one after the other."""
    for number, statement in enumerate(block):
        yield from ((number, value) for value in values(statement))
        one, two = (stores(each) for each in (block[number - 1], statement))
        if number and len(one) == len(two) == 1:
            both = f"__import__('torch').stack([{one.pop()}, {two.pop()}])"
            yield number + 1, ast.parse(both, mode="eval").body


@cache
def lines(notebook: Path) -> list[Lines]:
    """Return all runs of statements of a chapter that read few names."""
    space, seen, result = known(notebook), set[str](), []
    outside = space.keys() | vars(builtins).keys()
    for block in (block for cell in sources(notebook) for block in blocks(cell)):
        facts = [(loads(each) - outside, stores(each)) for each in block]
        for number, value in endings(block):
            answer = ast.Assign([ast.Name("_answer", ast.Store())], value, lineno=1)
            try:
                read, before = loads(answer) - outside, list[ast.stmt]()
            except SyntaxError:  # a slice, which stands in brackets alone
                continue
            for begin in range(number, max(-1, number - LONGEST), -1):
                if begin < number:
                    if not facts[begin][1] & read:
                        continue  # what it binds is not needed
                    before = [block[begin], *before]
                    read = (read - facts[begin][1]) | facts[begin][0]
                text = "\n".join(map(ast.unparse, [*before, answer]))
                if 0 < len(read) <= MOST and text not in seen:
                    seen.add(text)
                    with contextlib.suppress(SyntaxError):  # a return, a yield
                        code = compile(text, notebook.stem, "exec")
                        result.append(Lines(code, attributes(text, read), text, space))
    return result + [whole(name, space) for name in space if isfunction(space[name])]


def whole(name: str, space: dict[str, Any]) -> Lines:
    """Return the call of a function that a chapter defines, with what it has to be given."""
    given = [p for p in signature(space[name]).parameters.values() if p.default is p.empty]
    reads: dict[str, set[str]] = {f"_{i}": set() for i in range(len(given))}
    text = f"_answer = {name}({', '.join(reads)})"
    return Lines(compile(text, name, "exec"), reads, text, space)


def pasted(homework: str, notebook: Path) -> list[str]:
    """Return the lines of a chapter that pass a public check, each with the name of the answer."""
    asked = [part for parts in checks.questions(homework).values() for part in parts]
    return [
        f"{part.name}: {each}"
        for part in asked
        if part.kind == "function"
        for each in answers(homework, part, notebook)
    ]


def answers(homework: str, part: checks.Part, notebook: Path) -> Iterator[str]:
    """Yield the lines of a chapter that answer one part."""
    truth, _ = checks.truth(checks.table(homework), part.name)
    calls, begun = [], time.process_time()
    expected = part.expected(lambda *inputs: calls.append(inputs) or truth(*inputs), {}, 0)
    seconds = max(0.03, 3 * (time.process_time() - begun))
    for each in lines(notebook):
        tried = (each.answer(order) for order in each.orders(calls[0]))
        if any(is_right(part, answer, calls[0], expected, seconds) for answer in tried):
            yield each.text


def is_right(
    part: checks.Part, answer: Any, inputs: tuple[Any, ...], expected: Any, seconds: float
) -> bool:
    """Whether the public check passes, in a processor's time that an answer needs."""
    running = True

    def stop(*_: Any) -> None:
        if running:
            raise TimeoutError

    signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds)
    try:
        answer(*(x.clone() if isinstance(x, Tensor) else x for x in inputs))  # most fail here
        part.judge(part.ask(answer, 0), expected)
    except Exception:
        return False
    finally:
        running = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return True

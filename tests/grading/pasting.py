"""Lines of the chapters as answers to homework: which of them can be pasted?

A student who pastes a line gives its names the homework's own. So every run of statements of a
cell (or of a function in it, or of a solution) is tried with each choice of the inputs for the
names that it reads. Runs that begin alike are a tree: a statement that fails for some inputs ends
all runs that begin with it, and what it computes is computed once.
"""

import ast
import builtins
import contextlib
import itertools
import signal
import symtable
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
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
SECONDS = 0.05  # of the processor's for one statement, or three times what the solution takes
DRAWS = "iclutils.plots", "matplotlib", "training"  # no answer comes from them
VALUES = (ast.BinOp, ast.Call, ast.UnaryOp, ast.Subscript, ast.List, ast.Tuple, ast.ListComp)
Names = dict[str, Any]


@dataclass
class Step:
    """A statement, the names that it reads with what each has to have, and what may follow."""

    text: str
    code: CodeType
    reads: dict[str, set[str]]
    then: dict[str, "Step"] = field(default_factory=dict)

    @property
    def is_answer(self) -> bool:
        """Whether it computes what may be an answer."""
        return self.text.startswith("_answer = ")


@dataclass
class Question:
    """A function that is asked for, its public inputs, and what is right for them."""

    part: checks.Part
    inputs: tuple[Any, ...]
    has: list[set[str]]  # attributes of each input
    right: Any
    expected: checks.Expected | None
    seconds: float

    @classmethod
    def of(cls, homework: str, part: checks.Part) -> "Question":
        """Ask the solution once for what it is given."""
        truth, _ = checks.truth(checks.table(homework), part.name)
        calls: list[tuple[Any, ...]] = []
        begun = time.process_time()
        expected = part.expected(lambda *inputs: calls.append(inputs) or truth(*inputs), {}, 0)
        seconds = max(SECONDS, 3 * (time.process_time() - begun))
        has = [{*dir(each)} for each in calls[0]]
        right = checks.detached(truth(*calls[0]))
        return cls(part, calls[0], has, right, expected, seconds)

    def may_be(self, value: Any) -> bool:
        """Whether a value looks like an answer: its kind and the sizes of its axes."""
        with contextlib.suppress(Exception):
            return sizes(checks.detached(value)) == sizes(self.right)
        return False

    def accepts(self, answer: Any) -> bool:
        """Whether the public check passes."""
        try:
            with within(self.seconds):
                self.part.judge(self.part.ask(answer, 0), self.expected)
        except Exception:
            return False
        return True


def sizes(value: Any) -> Any:
    """Axes longer than 1, none of a number; of what is neither tensor nor number its type."""
    if isinstance(value, Tensor):
        return [n for n in value.shape if n > 1]
    return [] if isinstance(value, int | float) else type(value)


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in what takes longer, by the processor's time."""
    running = True

    def stop(*_: Any) -> None:
        if running:
            raise TimeoutError

    signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds)
    try:
        yield
    finally:
        running = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


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
    found = (n for n in ast.walk(statement) if isinstance(n, ast.Name))
    return {n.id for n in found if isinstance(n.ctx, ast.Store)}


def attributes(statement: ast.stmt, names: set[str]) -> dict[str, set[str]]:
    """What is done with each name: its attributes, ``__call__``, ``__getitem__``."""
    has: dict[str, set[str]] = {name: set() for name in sorted(names)}
    for node in ast.walk(statement):
        for kind, of, what in (
            (ast.Attribute, "value", getattr(node, "attr", "")),
            (ast.Call, "func", "__call__"),
            (ast.Subscript, "value", "__getitem__"),
        ):
            name = getattr(getattr(node, of, None), "id", "")
            if isinstance(node, kind) and name in has:
                has[name].add(what)
    return has


@cache
def known(notebook: Path) -> Names:
    """What a chapter imports, but for what answers may not use, and the functions it defines."""
    names: Names = {"print": lambda *said, **options: None}
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
        for node in ast.walk(statement):
            if isinstance(node, VALUES) and isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
                yield number, node
        one, two = (stores(each) for each in (block[number - 1], statement))
        if number and len(one) == len(two) == 1:
            both = f"__import__('torch').stack([{one.pop()}, {two.pop()}])"
            yield number + 1, ast.parse(both, mode="eval").body


@cache
def tree(notebook: Path) -> dict[str, Step]:
    """Return all runs of statements of a chapter that read few names, by how they begin."""
    begin: dict[str, Step] = {}
    outside = known(notebook).keys() | vars(builtins).keys()
    for block in (block for cell in sources(notebook) for block in blocks(cell)):
        facts = [(loads(each) - outside, stores(each)) for each in block]
        for number, value in endings(block):
            answer = ast.Assign([ast.Name("_answer", ast.Store())], value, lineno=1)
            with contextlib.suppress(SyntaxError):  # a slice, which stands in brackets alone
                read = loads(answer) - outside
                steps = [_step(answer, read)]
                if read and len(read) <= MOST:
                    _add(begin, steps)
                for i in range(number - 1, max(-1, number - LONGEST), -1):
                    loaded, stored = facts[i]
                    if stored & read:  # what it binds is needed
                        read = (read - stored) | loaded
                        steps = [_step(block[i], loaded), *steps]
                        if read and len(read) <= MOST:
                            _add(begin, steps)
    for name, value in known(notebook).items():
        if isfunction(value):
            _add(begin, [whole(name, value)])
    return begin


def _step(statement: ast.stmt, read: set[str]) -> Step:
    text = ast.unparse(statement)
    return Step(text, compile(text, "lines", "exec"), attributes(statement, read))


def _add(begin: dict[str, Step], steps: list[Step]) -> None:
    for step in steps:
        begin = begin.setdefault(step.text, Step(step.text, step.code, step.reads)).then


def whole(name: str, function: Any) -> Step:
    """Return the call of a function that a chapter defines, with what it has to be given."""
    given = [p for p in signature(function).parameters.values() if p.default is p.empty]
    reads: dict[str, set[str]] = {f"_{i}": set() for i in range(len(given))}
    text = f"_answer = {name}({', '.join(reads)})"
    return Step(text, compile(text, name, "exec"), reads)


def pasted(homework: str, notebook: Path) -> list[str]:
    """Return the lines of a chapter that pass a public check, each with the name of the answer."""
    asked = [part for parts in checks.questions(homework).values() for part in parts]
    found = {
        f"{part.name}: " + "\n".join(step.text for step in run): None
        for part in asked
        if part.kind == "function"
        for run in answers(Question.of(homework, part), notebook)
    }
    return list(found)


def answers(question: Question, notebook: Path) -> Iterator[list[Step]]:
    """Yield the runs of statements of a chapter that answer a question."""
    space = known(notebook)

    def walk(before: list[Step], then: dict[str, Step], names: Names, of: Names) -> Iterator[Any]:
        """Go on after some statements with what they have bound; ``of`` says which input is
        which of their names."""
        for step in then.values():
            for own in choices(step, names, of):
                after = copied(names | {name: question.inputs[i] for name, i in own.items()})
                try:
                    with within(question.seconds):
                        exec(step.code, after)
                except Exception:
                    continue
                run = [*before, step]
                if not step.is_answer:
                    yield from walk(run, step.then, after, of | own)
                elif question.may_be(after["_answer"]) and question.accepts(
                    as_function(run, of | own, space)
                ):
                    yield run

    def choices(step: Step, names: Names, of: Names) -> Iterator[dict[str, int]]:
        """Yield which of the inputs each name may be that is not bound, all ways."""
        free = [name for name in step.reads if name not in names]
        fit = [[i for i, has in enumerate(question.has) if step.reads[name] <= has]
               for name in free]  # fmt: skip
        for own in itertools.product(*fit):
            if len({*own, *of.values()}) == len(own) + len(of):
                yield dict(zip(free, own, strict=True))

    yield from walk([], tree(notebook), space, {})


def copied(names: Names) -> Names:
    """The names for one statement, which may change what they hold."""
    copies = {Tensor: Tensor.clone, list: list.copy}
    return {name: copies.get(type(value), lambda x: x)(value) for name, value in names.items()}


def as_function(run: list[Step], of: dict[str, int], space: Names) -> Any:
    """Return the function of a question's inputs that a student would paste."""

    def given(*inputs: Any) -> Any:
        names = space | {name: inputs[i] for name, i in of.items()}
        for step in run:
            exec(step.code, names)
        return names["_answer"]

    return given

"""Lines of the chapters as answers to homework: which of them can be pasted?

A student who pastes a line gives its names the homework's own. So every run of statements of a
cell (or of a function in it, or of a solution) is tried with each choice of the inputs for the
names that it reads. Runs that begin alike are a tree: a statement that fails for some inputs ends
all runs that begin with it, and what it computes is computed once. One that has taken too long
three times is not tried with other inputs.
"""

import ast
import builtins
import contextlib
import itertools
import signal
import symtable
import time
from collections import Counter
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
SECONDS = 0.05  # of the processor's for one statement, or twice what the solution takes
DRAWS = "iclutils.plots.", "matplotlib.", "training."  # no answer comes from them
VALUES = (ast.BinOp, ast.Call, ast.UnaryOp, ast.Subscript, ast.List, ast.Tuple, ast.ListComp)
Names = dict[str, Any]


@dataclass
class Step:
    """A statement, the names that it reads (each with the attributes that it asks for), and what
    may follow."""

    text: str
    code: CodeType
    reads: dict[str, set[str]]
    then: dict[str, "Step"] = field(default_factory=dict)


def step(statement: ast.stmt, reads: set[str]) -> Step:
    """Return a statement that is ready to be run, as the first of a tree of its own."""
    text, asked = ast.unparse(statement), {name: set[str]() for name in sorted(reads)}
    for node in ast.walk(statement):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in asked:
            asked[node.value.id].add(node.attr)
    return Step(text, compile(text, "lines", "exec"), asked)


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


def loads(statement: ast.stmt) -> set[str]:
    """Names that a statement reads from outside."""

    def of(table: symtable.SymbolTable, top: bool) -> set[str]:
        read = {s.get_name() for s in table.get_symbols()
                if s.is_referenced() and (top or s.is_global())}  # fmt: skip
        return read.union(*(of(child, False) for child in table.get_children()))

    inside = [n.target for n in ast.walk(statement) if isinstance(n, ast.comprehension)]
    bound = {n.id for target in inside for n in ast.walk(target) if isinstance(n, ast.Name)}
    read = of(symtable.symtable(ast.unparse(statement), "lines", "exec"), True)
    return read - bound  # from Python 3.12 on, a comprehension's names are among those around it


def stores(statement: ast.stmt) -> set[str]:
    """Names that a statement binds."""
    if isinstance(statement, ast.FunctionDef):
        return {statement.name}
    found = (n for n in ast.walk(statement) if isinstance(n, ast.Name))
    return {n.id for n in found if isinstance(n.ctx, ast.Store)}


@cache
def known(notebook: Path) -> Names:
    """What a chapter imports, but for what answers may not use, and the functions it defines."""
    names: Names = {"print": lambda *said, **options: None}
    for cell in read_json(notebook)["cells"]:
        for node in ast.parse(source(cell)).body if cell["cell_type"] == "code" else ():
            if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef):
                with contextlib.suppress(Exception):
                    exec(ast.unparse(node), names)
    return {name: value for name, value in names.items() if not refused(value)}


def refused(value: Any) -> bool:
    """Whether an answer may not use it, or does not."""
    home = str(getattr(value, "__module__", None) or getattr(value, "__name__", "")) + "."
    return home.startswith(DRAWS) or bool(checks.MEASURES.match(home))


def blocks(notebook: Path) -> Iterator[list[ast.stmt]]:
    """Yield the statements of each cell, of each block of code in the text, and of the functions
    and loops in them."""
    for cell in read_json(notebook)["cells"]:
        text = source(cell)
        parts = [part.partition("```")[0] for part in text.split("```python\n")[1:]]
        if cell["cell_type"] == "code":
            parts = [] if tags(cell) & {"set-up", "parameters"} else [text]
        for tree in map(ast.parse, parts):
            yield tree.body
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.For | ast.With):
                    yield node.body


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
def runs(notebook: Path) -> dict[str, Step]:
    """Return all runs of statements of a chapter that read few names, by how they begin; the last
    statement of each computes ``_answer``."""
    first: dict[str, Step] = {}
    outside = known(notebook).keys() | vars(builtins).keys()

    def add(steps: list[Step], reads: set[str]) -> None:
        then = first
        for each in steps if 0 < len(reads) <= MOST else ():
            then = then.setdefault(each.text, Step(each.text, each.code, each.reads)).then

    for block in blocks(notebook):
        facts = [(loads(each) - outside, stores(each)) for each in block]
        for number, value in endings(block):
            answer = ast.Assign([ast.Name("_answer", ast.Store())], value, lineno=1)
            with contextlib.suppress(SyntaxError):  # a slice, which stands in brackets alone
                reads = loads(answer) - outside
                steps = [step(answer, reads)]
                add(steps, reads)
                for i in range(number - 1, max(-1, number - LONGEST), -1):
                    loaded, stored = facts[i]
                    if stored & reads:  # what it binds is needed
                        steps = [step(block[i], loaded), *steps]
                        reads = (reads - stored) | loaded
                        add(steps, reads)
    for name, function in known(notebook).items():
        if isfunction(function):  # the whole of it
            needs = [p for p in signature(function).parameters.values() if p.default is p.empty]
            given = [f"_{i}" for i in range(len(needs))]
            call = ast.parse(f"_answer = {name}({', '.join(given)})").body[0]
            add([step(call, {*given})], {*given})
    return first


def pasted(homework: str, notebook: Path) -> list[str]:
    """Return the lines of a chapter that pass a public check, each with the name of the answer."""
    asked = [part for parts in checks.questions(homework).values() for part in parts]
    return [
        f"{part.name}: {text}"
        for part in asked
        if part.inputs
        for text in answers(homework, part, notebook)
    ]


def answers(homework: str, part: checks.Part, notebook: Path) -> set[str]:
    """Return the lines of a chapter that answer one part."""
    truth, calls = part.truth, list[tuple[Any, ...]]()
    checks.expected(part, 0)  # what is right is worked out once, before time is taken
    start = time.process_time()
    given = part.call(lambda *inputs: calls.append(inputs) or truth(*inputs), 0)  # or often
    part.judge(given, 0)
    inputs, found, begun, slow = calls[0], set[str](), time.process_time(), Counter[str]()
    has, right = [{*dir(each)} for each in inputs], sizes(truth(*inputs))
    seconds, whole = (max(SECONDS, 2 * x) for x in (time.process_time() - begun, begun - start))
    space = {"__builtins__": vars(builtins) | known(notebook)}

    def walk(before: list[Step], then: dict[str, Step], names: Names, of: dict[str, int]) -> None:
        """Go on after some statements with what they have bound; ``of`` says which of the inputs
        their names are."""
        for each in then.values():
            free = [name for name in each.reads if name not in names]
            fit = [[i for i, its in enumerate(has) if each.reads[name] <= its] for name in free]
            for own in itertools.product(*fit):
                if len({*own, *of.values()}) == len(own) + len(of) and slow[each.text] < 3:
                    go([*before, each], names, of | dict(zip(free, own, strict=True)))

    def go(run: list[Step], names: Names, of: dict[str, int]) -> None:
        after = copied(names | {name: inputs[i] for name, i in of.items() if name not in names})
        last = run[-1]
        try:
            with within(seconds):
                exec(last.code, after)
        except Exception as error:
            if isinstance(error, TimeoutError):  # so it is with most inputs
                slow[last.text] += 1
            return
        walk(run, last.then, after, of)
        if "_answer" in after and sizes(after["_answer"]) == right and passes(run, of):
            found.add("\n".join(each.text for each in run))

    def passes(run: list[Step], of: dict[str, int]) -> bool:
        """Whether the public check takes it, as a function of the inputs."""

        def given(*inputs: Any) -> Any:
            names = space | {name: inputs[i] for name, i in of.items()}
            for each in run:
                exec(each.code, names)
            return names["_answer"]

        try:
            with within(SECONDS + whole):
                part.judge(part.ask(given, 0), 0)
        except Exception:
            return False
        return True

    walk([], runs(notebook), space, {})
    return found


def sizes(value: Any) -> Any:
    """Axes longer than 1, none of a number; of what is neither tensor nor number its type."""
    with contextlib.suppress(Exception):
        value = checks.plain(value)
    if isinstance(value, Tensor):
        return [n for n in value.shape if n > 1]
    return [] if isinstance(value, int | float) else type(value)


def copied(names: Names) -> Names:
    """The names for one statement, which may change what they hold."""
    copies = {Tensor: Tensor.clone, list: list.copy}
    return {name: copies.get(type(value), lambda x: x)(value) for name, value in names.items()}

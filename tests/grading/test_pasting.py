"""No line of a chapter answers a question of the homework.

A student who pastes lines gives their names the homework's own. So what a chapter computes, with
the statements before it that it needs, is made a function of the names that it reads, and that is
called with each choice of a question's inputs for them.
"""

import ast
import builtins
import contextlib
import itertools
import json
import signal
import time
from collections import Counter
from functools import cache
from inspect import isfunction, signature
from pathlib import Path

import checks
import pytest
from notebook_rules import source, tags
from torch import Tensor

from iclutils.files import read_json

pytestmark = pytest.mark.filterwarnings("ignore")  # of lines on inputs that they are not made for
NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
CHAPTERS = sorted(NOTEBOOKS.glob("0*.ipynb"))
MASTERS = {path.stem[:4]: path for path in sorted(NOTEBOOKS.glob("assignments/hw*.ipynb"))}
LONGEST, MOST = 8, 6  # statements; names that they read
SECONDS = 0.05  # of the processor's, for lines; or three times what the solution takes
SLOW = 3  # lines that have so often taken longer are not tried again
COPY = {Tensor: Tensor.clone, list: list.copy}  # lines may change what they are given
DRAWS = "iclutils.plots.", "matplotlib.", "training."  # no answer comes from them
VALUES = ast.BinOp | ast.Call | ast.UnaryOp | ast.Subscript | ast.List | ast.Tuple | ast.ListComp


@contextlib.contextmanager
def within(seconds):
    """Raise TimeoutError in what takes longer, by the processor's time."""

    def stop(*_):
        raise TimeoutError

    signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def names(node, kind):
    """The names that code loads or stores."""
    if isinstance(node, ast.FunctionDef) and kind is ast.Store:
        return {node.name}
    inner = [x.target for x in ast.walk(node) if isinstance(x, ast.comprehension)]
    own = {x.id for part in inner for x in ast.walk(part) if isinstance(x, ast.Name)}
    own |= {x.arg for x in ast.walk(node) if isinstance(x, ast.arg)}
    found = (x for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, kind))
    return {x.id for x in found} - own


@cache
def known(notebook):
    """What a chapter imports, but for what answers may not use, and the functions it defines."""
    space = {}
    for cell in read_json(notebook)["cells"]:
        for node in ast.parse(source(cell)).body if cell["cell_type"] == "code" else ():
            if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef):
                with contextlib.suppress(Exception):
                    exec(ast.unparse(node), space)

    def refused(value):
        home = str(getattr(value, "__module__", None) or getattr(value, "__name__", "")) + "."
        return home.startswith(DRAWS) or checks.MEASURES.match(home)

    space = {name: value for name, value in space.items() if not refused(value)}
    return vars(builtins) | {"print": lambda *said, **options: None} | space


def blocks(notebook):
    """The statements of each cell, of each block of code in the text, and of functions, loops."""
    for cell in read_json(notebook)["cells"]:
        text = source(cell)
        parts = [part.partition("```")[0] for part in text.split("```python\n")[1:]]
        if cell["cell_type"] == "code":
            parts = [] if tags(cell) & {"set-up", "parameters"} else [text]
        for tree in map(ast.parse, parts):
            inner = ast.FunctionDef | ast.For | ast.With
            yield from (x.body for x in ast.walk(tree) if isinstance(x, ast.Module | inner))


def endings(block):
    """What a block computes, with the statements before it: each value, and two names in a row."""
    for number, statement in enumerate(block):
        for node in ast.walk(statement):
            if isinstance(node, VALUES) and isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
                yield block[:number], node
        one, two = (names(each, ast.Store) for each in (block[number - 1], statement))
        if number and len(one) == len(two) == 1:
            both = f"__import__('torch').stack([{one.pop()}, {two.pop()}])"
            yield block[: number + 1], ast.parse(both, mode="eval").body


@cache
def lines(notebook):
    """All that a chapter computes from few names, by its text: a function, and the number of its
    arguments. The functions of a chapter are among them."""
    space, found = known(notebook), {}

    def add(needed, value, reads):
        text = "\n".join(map(ast.unparse, [*needed, ast.Return(value)]))
        if not 0 < len(reads) <= MOST or text in found:
            return
        inside = text.replace("\n", "\n    ")
        with contextlib.suppress(SyntaxError):  # a slice, which stands in brackets alone
            exec(f"def answer({', '.join(sorted(reads))}):\n    {inside}", made := dict(space))
            found[text] = made["answer"], len(reads)

    for block in blocks(notebook):
        for before, value in endings(block):
            needed, reads = [], names(value, ast.Load) - space.keys()
            add(needed, value, reads)
            for each in before[:-LONGEST:-1]:
                if names(each, ast.Store) & reads:
                    needed = [each, *needed]
                    reads = reads - names(each, ast.Store) | names(each, ast.Load) - space.keys()
                    add(needed, value, reads)
    for name, value in space.items():
        if isfunction(value):
            needs = [p for p in signature(value).parameters.values() if p.default is p.empty]
            found[name] = value, len(needs)
    return found


def sizes(value):
    """Axes longer than 1, none of a number; of what is neither tensor nor number its type."""
    with contextlib.suppress(Exception):
        value = checks.plain(value)
    if isinstance(value, Tensor):
        return [n for n in value.shape if n > 1]
    return [] if isinstance(value, int | float) else type(value)


def pasted(homework, notebook):
    """The lines of a chapter that pass a public check, each with the name of the answer."""
    parts = [part for parts in checks.questions(homework).values() for part in parts]
    return [f"{part.name}: {text}" for part in parts if part.inputs
            for text in answers(part, notebook)]  # fmt: skip


def answers(part, notebook):
    """The lines of a chapter that answer one part."""
    calls, slow = [], Counter()
    part.call(lambda *inputs: calls.append(inputs) or part.truth(*inputs), 0)
    inputs, start = calls[0], time.process_time()
    right = sizes(part.truth(*inputs))
    seconds = max(SECONDS, 3 * (time.process_time() - start))
    for text, (function, count) in lines(notebook).items():
        for own in itertools.permutations(range(len(inputs)), count):
            if slow[text] == SLOW:
                break

            def given(*inputs, function=function, own=own):
                return function(*(inputs[i] for i in own))

            try:
                with within(seconds):
                    value = given(*(COPY.get(type(x), lambda x: x)(x) for x in inputs))
                if sizes(value) == right:
                    with within(5.0):
                        part.judge(part.ask(given, 0), 0)
                    yield text
                    break
            except TimeoutError:
                slow[text] += 1
            except Exception:
                continue


@pytest.mark.nightly
@pytest.mark.parametrize("homework", MASTERS)
@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_no_line_of_a_chapter_answers_a_homework(chapter, homework):
    assert pasted(homework, chapter) == []


@pytest.mark.nightly
@pytest.mark.parametrize("homework", MASTERS)
def test_a_solution_that_stands_in_a_chapter_is_seen(homework):
    """With the solved master in the place of the chapter, every function is found."""
    asked = [part for parts in checks.questions(homework).values() for part in parts]
    found = {each.partition(":")[0] for each in pasted(homework, MASTERS[homework])}
    assert found == {part.name for part in asked if part.inputs}


@pytest.mark.parametrize(
    ("homework", "cell", "answer"),
    [
        ("hw06", "import torch\ndata, flips = load()\nmeans = (flips * data).mean(-1).abs()\n"
         "more = (means >= data.mean().abs()).sum().item()\n"
         "print((1 + more) / (1 + len(flips)))", "sign_flip_p"),
        ("hw04", "def layer(x, Q, K, V, P):\n    left = x @ K.T\n"
         "    return x + left @ (x[:-1] @ Q.T).T @ (x[:-1] @ V.T) @ P.T", "attend"),
        ("hw01", "for q in range(3):\n    length = a.shape[-1] // 2\n    back = range(length + 2)\n"
         "    rows = [a[:, :, length + 1:].diagonal(length + 1 - d, -2, -1) for d in back]\n"
         "    best = torch.stack([x.mean((0, 2)) for x in rows], -1).argmax(-1)", "looks_back"),
    ],
)  # fmt: skip
def test_a_line_that_answers_one_is_seen_under_any_names(tmp_path, homework, cell, answer):
    about = {"cell_type": "code", "metadata": {}}
    cells = [{**about, "source": "import torch"}, {**about, "source": cell}]
    (tmp_path / "01_x.ipynb").write_text(json.dumps({"cells": cells}))
    found = pasted(homework, tmp_path / "01_x.ipynb")
    assert found
    assert all(each.startswith(answer) for each in found)

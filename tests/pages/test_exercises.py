"""The exercises: their form, that what they name exists, and what their tests say.

An exercise is three cells: the box with its hint, the stub, and the test of what is written there.
The box of its solution stands below it, or at the end of the chapter; an open question has none.
"""

import ast
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType

import matplotlib.pyplot as plt
import nbformat
import pytest
from mistakes import MISTAKES
from notebook_rules import code, source, tags

from iclutils.files import read_json
from iclutils.session import UNFILLED

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
CHAPTERS = [
    path for path in sorted(NOTEBOOKS.glob("0*.ipynb")) if '"exercise"' in path.read_text("utf-8")
]
GUIDE = (NOTEBOOKS.parent / "book/lectures.md").read_text("utf-8")
NAMED = re.compile(r"`([a-z_]\w*(?:\.\w+)+)(?:\(.*?\))?`", re.DOTALL)
FORM = r"````\{exercise\} .+?:label: (\S+).+?\*\w+, [^.]+\. [^.]+\.\* \S.*```\{admonition\} .+\n"
BOX = re.compile(FORM + r":class: dropdown tip\n.*?```.*````", re.DOTALL)
SOLVED = re.compile(r"````\{solution\} (\S+)\n:class: dropdown\n(.+?)````", re.DOTALL)
CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)


@dataclass
class Exercise:
    """What stands in the notebook; an open question has no solution."""

    label: str
    text: str
    stub: str = ""
    test: str = ""
    solution: str = ""
    why: str = ""  # the words of the solution


def exercises(notebook):
    found = {}
    for cell in read_json(notebook)["cells"]:
        text = source(cell)
        if "exercise" in tags(cell) and cell["cell_type"] == "markdown":
            box = BOX.fullmatch(text)
            assert box, f"not of the form: label, *level, minutes. kind.*, hint: {text}"
            last = found[box[1]] = Exercise(box[1], text)
        elif "exercise" in tags(cell):
            assert not last.test, f"more than two cells of code under {last.label}"
            setattr(last, "test" if last.stub else "stub", text)
        elif "solution" in tags(cell) and not text.startswith("## Solution"):
            label, words = SOLVED.fullmatch(text).groups()
            found[label].solution = "\n".join(CODE.findall(words))
            found[label].why = CODE.sub("", words)
    return list(found.values())


def functions(block):
    return [part for part in ast.parse(block).body if isinstance(part, ast.FunctionDef)]


def unfilled(stub):
    """Names of the functions that a stub leaves to the reader."""
    wanted = f"raise NotImplementedError({UNFILLED!r})"
    return [f.name for f in functions(stub) if ast.unparse(f.body[-1]) == wanted]


def judged(test):
    """The block of a test in which the answer is judged."""
    (block,) = (part for part in ast.parse(test).body if isinstance(part, ast.With))
    return block


def imported(*sources):
    """What the imports at the top of blocks of code bind."""
    kinds, space = ast.Import | ast.ImportFrom, {}
    parts = (part for text in sources for part in ast.parse(text).body if isinstance(part, kinds))
    exec("\n".join(map(ast.unparse, parts)), space)
    return space


def story(notebook):
    return [source(cell) for cell in code(read_json(notebook)) if "exercise" not in tags(cell)]


def missing(names, space):
    """Dotted names that begin with a module of ours and lead nowhere."""
    lost = []
    for name in names:
        first, *rest = name.split(".")
        at = space.get(first)
        if isinstance(at, ModuleType) and at.__name__.startswith("iclutils"):
            while rest and isinstance(at, ModuleType | type):
                at = getattr(at, rest.pop(0), None)
            if at is None:
                lost.append(name)
    return lost


chapters = pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)


@chapters
def test_a_stub_computes_nothing_and_its_solution_fills_it(chapter):
    """It defines the same functions with the same arguments, and nothing is left."""
    cells = story(chapter)
    for e in exercises(chapter):
        left, parts = unfilled(e.stub), ast.parse(e.stub).body
        assert left, e.label
        kinds = ast.Import | ast.ImportFrom | ast.FunctionDef
        assert all(isinstance(part, kinds) for part in parts), e.label
        assert all(ast.get_docstring(f) for f in functions(e.stub)), e.label
        exec(e.stub, imported(*cells))
        asserted = [part for part in ast.walk(judged(e.test)) if isinstance(part, ast.Assert)]
        assert asserted, e.label
        assert all(part.msg is not None for part in asserted), e.label
        if e.solution:
            given, solved = (
                {f.name: ast.unparse(f.args) for f in functions(block)}
                for block in (e.stub, e.solution)
            )
            assert given.items() <= solved.items(), e.label
            assert not unfilled(e.solution), e.label


@chapters
def test_what_hints_name_exists_and_no_exercise_undoes_another(chapter):
    found = exercises(chapter)
    written = [f.name for e in found for f in functions(e.stub)]
    assert len(set(written)) == len(written)
    for e in found:
        space = imported(*story(chapter), e.stub, e.test, e.solution)
        named = NAMED.findall(e.text + e.why)
        for name in named:
            if name.startswith("iclutils."):
                resolve_name(name)
        assert not missing(named, space), e.label


@pytest.mark.nightly
@chapters
def test_the_version_without_solutions_holds_none(chapter, tmp_path):
    """As the guide for instructors says to make it."""
    (words,) = re.findall(r"^jupyter nbconvert --to notebook.*(?:\\\n.*)*", GUIDE, re.MULTILINE)
    words = words.replace("\\\n", " ").replace("notebooks/0*.ipynb", str(chapter)).split()
    words[words.index("--output-dir") + 1] = str(tmp_path)
    subprocess.run([sys.executable, "-m", *words], check=True, capture_output=True)
    cells = nbformat.read(tmp_path / chapter.name, as_version=4).cells
    whole = read_json(chapter)["cells"]
    assert [cell["id"] for cell in cells] == [c["id"] for c in whole if "solution" not in tags(c)]
    assert not any("{solution}" in cell.source for cell in cells)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


@pytest.mark.nightly
@pytest.mark.usefixtures("results_elsewhere")
@chapters
def test_stubs_ask_solutions_are_right_and_mistakes_are_told(chapter, capsys):
    """After the chapter, as a reader meets them."""
    space = {}
    for cell in story(chapter):
        exec(cell, space)
        plt.close("all")
    capsys.readouterr()
    for e in exercises(chapter):
        assert said(e, e.stub, space, capsys) == f"{e.label}: {UNFILLED}."
        if e.solution:
            assert said(e, e.solution, space, capsys) == f"{e.label}: right."
        if e.label in MISTAKES:
            wrong, message = MISTAKES[e.label]
            told = said(e, f"{e.stub}\n{wrong}", space, capsys)
            assert told.startswith(f"{e.label}: not yet. ")
            assert message in told
    plt.close("all")


def said(e, block, space, capsys):
    """What the test of an exercise prints last of a block in place of the stub."""
    exec(compile(f"{block}\n{e.test}", e.label, "exec"), dict(space))
    return capsys.readouterr().out.splitlines()[-1]

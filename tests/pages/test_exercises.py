"""The exercises: their form, that what they name exists, and what their tests say.

An exercise is three cells: the box with its hint, the stub, and the test of what is written there.
The box of its solution stands below it, or at the end of the chapter; an open question has none.
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name

import matplotlib.pyplot as plt
import pytest
from mistakes import MISTAKES
from notebook_rules import code, source, tags

from iclutils.files import read_json
from iclutils.session import UNFILLED

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
CHAPTERS = [
    path for path in sorted(NOTEBOOKS.glob("0*.ipynb")) if '"exercise"' in path.read_text("utf-8")
]
NAMED = re.compile(r"`(iclutils(?:\.\w+)+)(?:\(.*?\))?`", re.DOTALL)
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


def story(notebook):
    return [source(cell) for cell in code(read_json(notebook)) if "exercise" not in tags(cell)]


chapters = pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)


@chapters
def test_what_hints_name_exists_and_no_exercise_undoes_another(chapter):
    found = exercises(chapter)
    parts = [part for e in found for part in ast.parse(e.stub).body]
    written = [part.name for part in parts if isinstance(part, ast.FunctionDef)]
    assert len(set(written)) == len(written)
    for e in found:
        asserted = [n for n in ast.walk(ast.parse(e.test)) if isinstance(n, ast.Assert)]
        assert asserted, e.label
        assert all(n.msg for n in asserted), "a mistake is told"
        for name in NAMED.findall(e.text + e.why):
            resolve_name(name)


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

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
import pytest
from mistakes import MISTAKES
from notebook_rules import code, source, tags

from iclutils.files import read_json
from iclutils.session import UNFILLED

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
CHAPTERS = [
    path for path in sorted(NOTEBOOKS.glob("0*.ipynb")) if '"exercise"' in path.read_text("utf-8")
]
GUIDE = (NOTEBOOKS.parent / "book/lectures.md").read_text("utf-8").replace("\\\n", " ")
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
def test_what_hints_name_exists_and_no_exercise_undoes_another(chapter):
    found = exercises(chapter)
    parts = [part for e in found for part in ast.parse(e.stub).body]
    written = [part.name for part in parts if isinstance(part, ast.FunctionDef)]
    assert len(set(written)) == len(written)
    for e in found:
        asserted = [n for n in ast.walk(ast.parse(e.test)) if isinstance(n, ast.Assert)]
        assert asserted, e.label
        assert all(n.msg for n in asserted), "a mistake is told"
        space = imported(*story(chapter), e.stub, e.test, e.solution)
        named = NAMED.findall(e.text + e.why)
        for name in named:
            if name.startswith("iclutils."):
                resolve_name(name)
        assert not missing(named, space), e.label


@pytest.mark.nightly
def test_the_version_without_solutions_holds_none(tmp_path):
    """As the guide for lecturers says to make it."""
    (words,) = re.findall(r"^jupyter (nbconvert --to notebook.*)", GUIDE, re.MULTILINE)
    words = words.replace("notebooks/0*.ipynb", " ".join(map(str, CHAPTERS))).split()
    words[words.index("--output-dir") + 1] = str(tmp_path)
    subprocess.run([sys.executable, "-m", "jupyter", *words], check=True, capture_output=True)
    for chapter in CHAPTERS:
        cells = read_json(tmp_path / chapter.name)["cells"]
        whole = [cell["id"] for cell in read_json(chapter)["cells"] if "solution" not in tags(cell)]
        assert [cell["id"] for cell in cells] == whole
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

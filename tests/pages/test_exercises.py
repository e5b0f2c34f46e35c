"""The exercises: their form, that what they name exists, and what their tests say."""

import ast
import re
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

import matplotlib.pyplot as plt
import nbformat
import pytest
from exercises import blocks, exercises, functions, imported, unfilled
from mistakes import MISTAKES
from notebook_rules import code, source, tags

from book._tools.__main__ import LINE
from book._tools.run import NOTEBOOKS
from iclutils import claims
from iclutils.files import read_json
from iclutils.session import UNFILLED

CHAPTERS = [NOTEBOOKS / f"{name}.ipynb" for name in claims.chapters()]
NAMED = re.compile(r"`([a-z_]\w*(?:\.\w+)+)(?:\(.*?\))?`", re.DOTALL)
Out = pytest.CaptureFixture[str]


def story(notebook):
    """The code of the chapter before its exercises."""
    return [source(cell) for cell in code(read_json(notebook)) if "exercise" not in tags(cell)]


@pytest.fixture(params=CHAPTERS, ids=lambda path: path.stem)
def chapter(request):
    return request.param


def missing(names, space):
    """Dotted names that begin with a module of ours and lead nowhere."""
    lost = []
    for name in sorted(names):
        first, *rest = name.split(".")
        at = space.get(first)
        if isinstance(at, ModuleType) and at.__name__.startswith("iclutils"):
            while rest and isinstance(at, ModuleType | type):
                at = getattr(at, rest.pop(0), None)
            if at is None:
                lost.append(name)
    return lost


def dotted(block):
    """Every ``a.b.c`` that code reads."""
    nodes = [n for n in ast.walk(ast.parse(block)) if isinstance(n, ast.Attribute)]
    return {text for n in nodes if re.fullmatch(r"[\w.]+", text := ast.unparse(n))}


def test_a_stub_computes_nothing_and_its_test_begins_with_it(chapter):
    cells = story(chapter)
    for e in exercises(chapter):
        left, parts = unfilled(e.stub), ast.parse(e.stub).body
        assert left, e.label
        kinds = ast.Import | ast.ImportFrom | ast.FunctionDef
        assert all(isinstance(part, kinds) for part in parts), e.label
        assert all(ast.get_docstring(f) for f in functions(e.stub)), e.label
        exec(e.stub, imported(*cells))
        (block,) = blocks(e.test)
        judged = [part for part in ast.walk(block) if isinstance(part, ast.Assert)]
        assert judged, e.label
        assert all(part.msg is not None for part in judged), e.label


def bound(block):
    """Names that a block of code binds, within its functions too."""
    nodes = list(ast.walk(ast.parse(block)))
    names = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    names |= {n.name for n in nodes if isinstance(n, ast.FunctionDef)}
    return names | {(n.asname or n.name) for n in nodes if isinstance(n, ast.alias)}


def read(e):
    """Names that an exercise takes from its chapter."""
    blocks = (e.stub, e.test, e.solution)
    nodes = [n for b in blocks for n in ast.walk(ast.parse(b))]
    own = set().union(*map(bound, blocks), {n.arg for n in nodes if isinstance(n, ast.arg)})
    return {n.id for n in nodes if isinstance(n, ast.Name)} - own


def test_no_exercise_changes_what_another_reads(chapter):
    """So that they can be done in any order."""
    found = exercises(chapter)
    for e in found:
        changed = set(imported(e.stub, e.test)) - {"__builtins__"}
        for part in [*ast.parse(e.stub).body, *blocks(e.test)[0].body]:
            changed |= (
                {part.name} if isinstance(part, ast.FunctionDef) else bound(ast.unparse(part))
            )
        for other in found:
            assert not changed & read(other), f"{e.label}, {other.label}"


def test_a_solution_fills_the_stub(chapter):
    """It defines the same functions with the same arguments, and nothing is left."""
    for e in (e for e in exercises(chapter) if e.solution):
        given = {f.name: ast.unparse(f.args) for f in functions(e.stub)}
        solved = {f.name: ast.unparse(f.args) for f in functions(e.solution)}
        assert given.items() <= solved.items(), e.label
        assert not unfilled(e.solution), e.label


def test_what_code_and_hints_name_exists(chapter):
    for e in exercises(chapter):
        blocks = (e.stub, e.test, e.solution)
        space = imported(*story(chapter), *blocks)
        named = set().union(*map(dotted, blocks), NAMED.findall(e.text + e.why))
        for name in named:
            if name.startswith("iclutils."):
                resolve_name(name)
        assert not missing(named, space), e.label


# The version without solutions


def test_the_version_without_solutions_holds_none(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert LINE.main(["exercises", "01"]) == LINE.main(["exercises", "--out", "all"]) == 0
    made, *rest = (Path(line[6:]) for line in capsys.readouterr().out.splitlines())
    assert made.parent == Path("_build/exercises")
    assert made.read_text() == rest[0].read_text()
    assert [path.name for path in rest] == [path.name for path in CHAPTERS]
    assert sorted(Path("all").iterdir()) == sorted(rest)
    for path in rest:
        nbformat.validate(nbformat.read(path, as_version=4))
        whole, cells = read_json(NOTEBOOKS / path.name)["cells"], read_json(path)["cells"]
        kept = [cell["id"] for cell in whole if "solution" not in tags(cell)]
        assert [cell["id"] for cell in cells] == kept
        assert not any("{solution}" in source(cell) for cell in cells)
        assert not any(
            cell["outputs"] or cell["execution_count"] for cell in code({"cells": cells})
        )


# What the tests of the exercises say


@pytest.mark.nightly
@pytest.mark.usefixtures("results_elsewhere")
def test_stubs_ask_solutions_are_right_and_mistakes_are_told(chapter, capsys):
    """After the chapter, as a reader meets them."""
    space: dict[str, Any] = {}
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

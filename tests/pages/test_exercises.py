"""The exercises: their form, that what they name exists, and that every solution is one.

A stub ends in the assertions that its solution must satisfy. So there are two things to run: the
solution, which must pass, and the stub as it stands, which must not.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

import matplotlib.pyplot as plt
import pytest
from exercises import KINDS, LEVELS, Exercise, asserts, exercises
from notebook_rules import code, source

from iclutils.bookkit import claims
from iclutils.bookkit.run import NOTEBOOKS
from iclutils.files import read_json

CHAPTERS = [NOTEBOOKS / f"{name}.ipynb" for name in claims.chapters()]
NAMED = re.compile(r"`([a-z_]\w*(?:\.\w+)+)(?:\(.*?\))?`", re.DOTALL)
IMPORTS = (ast.Import, ast.ImportFrom)


@pytest.fixture(params=CHAPTERS, ids=lambda path: path.stem)
def chapter(request: pytest.FixtureRequest) -> Path:
    """Every chapter in turn."""
    path: Path = request.param
    return path


def imported(*blocks: str) -> dict[str, Any]:
    """What the imports at the top of blocks of code bind."""
    lines = [ast.unparse(s) for b in blocks for s in ast.parse(b).body if isinstance(s, IMPORTS)]
    space: dict[str, Any] = {}
    exec("\n".join(lines), space)
    return space


def missing(names: set[str], space: dict[str, Any]) -> list[str]:
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


def dotted(block: str) -> set[str]:
    """Every ``a.b.c`` that code reads."""
    nodes = [n for n in ast.walk(ast.parse(block)) if isinstance(n, ast.Attribute)]
    return {text for n in nodes if re.fullmatch(r"[\w.]+", text := ast.unparse(n))}


def test_there_are_exercises_in_every_chapter() -> None:
    assert len(CHAPTERS) == 7


def test_a_chapter_leads_from_a_warm_up_to_an_open_question(chapter: Path) -> None:
    found = exercises(chapter)
    assert 5 <= len(found) <= 8
    levels = [LEVELS.index(e.level) for e in found]
    assert levels == sorted(levels)
    assert (found[0].kind, found[-1].kind) == ("Warm-up", "Open question")
    assert {"Extend the method", "Break a claim"} <= {e.kind for e in found} <= set(KINDS)


def test_labels_are_those_of_the_chapter_and_of_no_other_exercise() -> None:
    labels = Counter(e.label for path in CHAPTERS for e in exercises(path))
    assert not [label for label, times in labels.items() if times > 1]
    for path in CHAPTERS:
        assert all(e.label.startswith(f"{path.stem[:2]}-ex-") for e in exercises(path))


def test_every_exercise_has_its_parts(chapter: Path) -> None:
    for e in exercises(chapter):
        assert re.match(r"(\d+ minutes|an hour|an afternoon)", e.minutes), e.label
        assert e.folded == ("Where to start" if e.is_open else "Hint"), e.label
        assert (e.kind == "Open question") == e.is_open == (not e.solution), e.label
        assert len(e.hint.split()) >= 8, e.label
        assert "..." in e.stub, e.label
        assert asserts(e.stub), e.label
        assert e.is_open or len(e.why.split()) >= 15, e.label
        lines = (e.stub + e.solution).splitlines()
        assert max(map(len, lines)) <= 72, e.label  # a box is narrower than a cell


def test_a_solution_answers_to_the_assertions_of_its_stub(chapter: Path) -> None:
    for e in exercises(chapter):
        if e.solution:
            assert set(asserts(e.stub)) <= set(asserts(e.solution)), e.label


def test_what_code_and_hints_name_exists(chapter: Path) -> None:
    cells = [source(cell) for cell in code(read_json(chapter))]
    for e in exercises(chapter):
        space = imported(*cells, e.stub, e.solution)
        named = dotted(e.stub) | dotted(e.solution) | set(NAMED.findall(e.text + e.why))
        assert not missing(named, space), e.label
        for name in named:
            if name.startswith("iclutils."):
                resolve_name(name)


def test_a_name_that_leads_nowhere_is_found() -> None:
    space = imported("from iclutils.interp import head_scores")
    assert missing({"head_scores.score_heads", "head_scores.heads", "other.x"}, space) == [
        "head_scores.heads"
    ]


@pytest.mark.nightly
@pytest.mark.usefixtures("results_elsewhere")
def test_solutions_solve_and_stubs_do_not(
    chapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the chapter, as a reader meets them."""
    space: dict[str, Any] = {}
    for cell in code(read_json(chapter)):
        exec(source(cell), space)
        plt.close("all")
    for e in (e for e in exercises(chapter) if e.solution):
        run(e, e.solution, space)
        checks = "\n".join(asserts(e.solution))
        assert not passes(e, f"{e.stub}\n{checks}", space), e.label
    plt.close("all")


def run(e: Exercise, block: str, space: dict[str, Any]) -> None:
    """Run a block after the chapter, without leaving anything behind."""
    exec(compile(block, e.label, "exec"), dict(space))


def passes(e: Exercise, block: str, space: dict[str, Any]) -> bool:
    """Whether a block runs to its end: `...` stops it in many ways."""
    try:
        run(e, block, space)
    except Exception:
        return False
    return True

"""Coursework: what is asked, how an answer is judged, and how a class is graded.

The solved masters in ``notebooks/assignments/`` hold the questions; a table beside them holds, for
each answer, the solution, random inputs and typical mistakes. One comparison serves the student
(``check``), the tests that otter runs (``grade``), the grader and this project's own tests.
Students get the ``public`` checks alone. ``assignments`` derives the copies from the masters,
``grading`` grades submissions, ``gradebook`` joins what they got.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from ...errors import IclError, unknown
from ...files import CHECKOUT
from .answers import Function, Mistake, Value
from .handout import Parts, unpacked

__all__ = ["Mistake", "check", "grade", "homeworks", "names", "public", "questions", "table"]

PUBLIC, HIDDEN = (0,), (1, 2, 3, 4, 5)  # seeds of the random inputs
TABLES = "answers"  # the folder of tables, beside the masters
Question = tuple[Function | Value, ...]
_students: dict[str, Parts] = {}  # what ``public`` has read


def folder() -> Path:
    """Where the masters are: ``$ICLUTILS_HOMEWORK``, or the book's own in the checkout."""
    given = os.environ.get("ICLUTILS_HOMEWORK")
    return Path(given) if given else CHECKOUT / "notebooks" / "assignments"


def homeworks() -> list[str]:
    """``hw01``, ``hw02``, ..."""
    return sorted(path.stem for path in (folder() / TABLES).glob("hw[0-9][0-9].py"))


def table(homework: str) -> Path:
    """The file with the solutions and mistakes of a homework."""
    places = (folder() / TABLES / f"{homework}.py", Path.cwd() / f"{homework}.py")  # or otter's
    found = next((path for path in places if path.is_file()), None)
    if found is None and not homeworks():
        raise IclError(
            f"The checks of {homework} are not here: run the first cells of the homework."
        )
    if found is None:
        raise unknown("homework", homework, homeworks())
    return found


def questions(homework: str) -> dict[str, Question]:
    """The questions of one homework by name, ``q1`` first; each has one part for each answer."""
    return _questions(table(homework).resolve())


@cache
def _questions(path: Path) -> dict[str, Question]:
    name = f"iclutils_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = {name: each for name, each in vars(module).items() if re.fullmatch(r"q\d+", name)}
    return dict(sorted(found.items()))


def names(question: Question) -> list[str]:
    """What the answers to a question are called in the student's notebook."""
    return [part.name for part in question]


def public(text: str) -> None:
    """Read the public checks that a student's notebook carries."""
    name, parts = unpacked(text)
    _students[name] = parts


def grade(question: str, *answers: Any, hidden: bool = False) -> None:
    """Judge the answers to one question (``"hw01.q1"``); return only if they are right.

    ``hidden`` takes the inputs of the hidden checks instead of the public ones.
    """
    parts = _known(questions(question.partition(".")[0]), question, answers)
    for seed in HIDDEN if hidden else PUBLIC:
        for entry, answer in zip(parts, answers, strict=True):
            entry.part.judge(entry.part.given(answer, seed), entry.expected(seed))


def check(question: str, *answers: Any) -> None:
    """The public checks of one question: print whether they pass, or the likely mistake."""
    homework = question.partition(".")[0]
    try:
        if homework in _students:
            parts = _known(_students[homework], question, answers)
            for (part, expected), answer in zip(parts, answers, strict=True):
                part.judge(part.given(answer, 0), expected)
        else:
            grade(question, *answers)
    except Mistake as mistake:
        print(f"{question}: not yet. {mistake}")
    else:
        print(f"{question}: the public checks pass.")


def _known(found: dict[str, Any], question: str, answers: tuple[Any, ...]) -> Any:
    homework, _, name = question.partition(".")
    if name not in found:
        raise unknown("question", question, [f"{homework}.{each}" for each in found])
    asked = [getattr(each, "name", None) or each[0].name for each in found[name]]
    if len(answers) != len(asked):
        raise IclError(f"{question} asks for {', '.join(asked)}; got {len(answers)} answers.")
    return found[name]

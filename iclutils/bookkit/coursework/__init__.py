"""Coursework: what is asked, how an answer is judged, and how a class is graded.

The solved masters in ``notebooks/assignments/`` hold the questions; the modules ``hw01`` ... here
hold, for each answer, the solution, random inputs and typical mistakes. The same comparison
serves the student (``check``), the tests that otter runs (``grade``) and this project's own tests.
``assignments`` derives the copies from the masters, ``grading`` grades submissions.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import torch

from ...errors import IclError, unknown
from .answers import Function, Mistake, Value, prepared

__all__ = ["Mistake", "check", "grade", "homeworks", "names", "questions"]

PUBLIC, HIDDEN = (0,), (1, 2, 3, 4, 5)  # seeds of the random inputs
Question = tuple[Function | Value, ...]


def homeworks() -> list[str]:
    """``hw01``, ``hw02``, ..."""
    return sorted(path.stem for path in Path(__file__).parent.glob("hw[0-9][0-9].py"))


def questions(homework: str) -> dict[str, Question]:
    """The questions of one homework by name, ``q1`` first; each has one part for each answer."""
    if homework not in homeworks():
        raise unknown("homework", homework, homeworks())
    module = importlib.import_module(f"{__name__}.{homework}")
    found = {name: each for name, each in vars(module).items() if re.fullmatch(r"q\d+", name)}
    return dict(sorted(found.items()))


def names(question: Question) -> list[str]:
    """What the answers to a question are called in the student's notebook."""
    return [part.name for part in question]


def grade(question: str, *answers: Any, hidden: bool = False) -> None:
    """Judge the answers to one question (``"hw01.q1"``); return only if they are right.

    ``hidden`` takes the inputs of the hidden checks instead of the public ones.
    """
    homework, _, name = question.partition(".")
    known = questions(homework)
    if name not in known:
        raise unknown("question", question, [f"{homework}.{each}" for each in known])
    parts = known[name]
    if len(answers) != len(parts):
        asked = ", ".join(names(parts))
        raise IclError(f"{question} asks for {asked}; got {len(answers)} answers.")
    ready = [
        (part, prepared(part.name, answer, isinstance(part, Function)))
        for part, answer in zip(parts, answers, strict=True)
    ]
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        for seed in HIDDEN if hidden else PUBLIC:
            torch.manual_seed(seed)
            for part, answer in ready:
                part.judge(answer, seed)


def check(question: str, *answers: Any) -> None:
    """The public checks of one question: print whether they pass, or the likely mistake."""
    try:
        grade(question, *answers)
    except Mistake as mistake:
        print(f"{question}: not yet. {mistake}")
    else:
        print(f"{question}: the public checks pass.")

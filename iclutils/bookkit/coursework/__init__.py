"""Coursework: what is asked, how an answer is judged, and how a class is graded.

The solved masters in ``notebooks/assignments/`` hold the questions; the modules ``hw01`` ... here
hold one grade function per question, which judges behaviour against an independent truth. The
same function serves the student (``check``), the tests that otter runs (``grade``) and this
project's own tests. ``assignments`` derives the copies from the masters, ``grading`` grades
submissions.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ...errors import IclError, unknown
from .answers import Mistake, prepared

__all__ = ["Mistake", "check", "grade", "homeworks", "names", "questions"]

PUBLIC, HIDDEN = (0,), (1, 2, 3, 4, 5)  # seeds of the random inputs
FOLDER = Path(__file__).parent


def homeworks() -> list[str]:
    """``hw01``, ``hw02``, ...: those with grade functions."""
    return sorted(path.stem for path in FOLDER.glob("hw[0-9][0-9].py"))


def questions(homework: str) -> dict[str, Callable[..., None]]:
    """The grade functions of one homework by name, ``q1`` first."""
    if homework not in homeworks():
        raise unknown("homework", homework, homeworks())
    module = importlib.import_module(f"{__name__}.{homework}")
    found = {name: f for name, f in vars(module).items() if re.fullmatch(r"q\d+", name)}
    return dict(sorted(found.items()))


def names(question: Callable[..., None]) -> list[str]:
    """What the answers to a question are called in the student's notebook."""
    return [name for name in inspect.signature(question).parameters if name != "seed"]


def grade(question: str, *answers: Any, hidden: bool = False) -> None:
    """Judge the answers to one question; return only if they are right.

    Args:
        question: for example ``"hw01.q1"``.
        answers: one for each name that the question asks for.
        hidden: use the inputs of the hidden checks instead of the public ones.
    """
    homework, _, name = question.partition(".")
    known = questions(homework)
    if name not in known:
        raise unknown("question", question, [f"{homework}.{each}" for each in known])
    judge = known[name]
    wanted = names(judge)
    if len(answers) != len(wanted):
        raise IclError(f"{question} asks for {', '.join(wanted)}; got {len(answers)} answers.")
    annotations = inspect.signature(judge).parameters
    ready = [
        prepared(each, answer, "Callable" in str(annotations[each].annotation))
        for each, answer in zip(wanted, answers, strict=True)
    ]
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        for seed in HIDDEN if hidden else PUBLIC:
            torch.manual_seed(seed)
            judge(*ready, seed=seed)


def check(question: str, *answers: Any) -> None:
    """The public checks of one question: print whether they pass, or the likely mistake."""
    try:
        grade(question, *answers)
    except Mistake as mistake:
        print(f"{question}: not yet. {mistake}")
    else:
        print(f"{question}: the public checks pass.")

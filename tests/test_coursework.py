"""Coursework: the solved masters score everything, stubs nothing, and each typical mistake gets
a message that names it.

The wrong answers are data, in ``tests/coursework/``. What otter makes of the masters is tested
in ``test_coursework_grading``.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from iclutils.bookkit import coursework
from iclutils.bookkit.address import set_up_cell
from iclutils.bookkit.coursework import Mistake, check, grade, homeworks, names, questions
from iclutils.bookkit.coursework.answers import compare
from iclutils.errors import IclError

ROOT = Path(__file__).parents[1]
MASTERS = {path.stem[:4]: path for path in sorted((ROOT / "notebooks/assignments").glob("*.ipynb"))}
ALL = [(homework, name) for homework in homeworks() for name in questions(homework)]


def master(homework: str) -> list[dict]:
    return json.loads(MASTERS[homework].read_text(encoding="utf-8"))["cells"]


def source(cell: dict) -> str:
    return "".join(cell["source"])


@cache
def wrong(homework: str) -> dict[str, list[tuple[str, Any]]]:
    """The wrong answers to one homework."""
    path = ROOT / "tests" / "coursework" / f"{homework}.py"
    spec = importlib.util.spec_from_file_location(f"wrong_{homework}", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.WRONG


@cache
def solutions(homework: str) -> dict[str, Any]:
    """What the solved master defines: its set-up, imports and solutions, without its tests."""
    names: dict[str, Any] = {}
    testing = False
    for cell in master(homework):
        text = source(cell)
        testing = (testing or text == "# BEGIN TESTS") and text != "# END TESTS"
        if cell["cell_type"] == "code" and not testing and not text.startswith("coursework.check"):
            exec(text, names)
    return names


def answers(homework: str, question: str) -> list[Any]:
    return [solutions(homework)[name] for name in names(questions(homework)[question])]


def test_every_chapter_has_its_homework() -> None:
    chapters = [path.stem for path in (ROOT / "notebooks").glob("0[1-9]_*.ipynb")]
    assert sorted(path.stem for path in MASTERS.values()) == sorted(
        f"hw{name}" for name in chapters
    )
    assert list(MASTERS) == homeworks()


@pytest.mark.parametrize("homework", homeworks())
def test_a_master_is_made_of_what_otter_and_students_need(homework: str) -> None:
    cells = master(homework)
    texts = [source(cell) for cell in cells]
    assert texts[0].startswith("# ASSIGNMENT CONFIG\nname: " + homework)
    set_up = [source(c) for c in cells if "set-up" in c["metadata"].get("tags", [])]
    assert set_up == [set_up_cell()]
    assert not any(cell.get("outputs") for cell in cells), "outputs would show the solution"
    assert 4 <= len(questions(homework)) <= 6
    for name, judge in questions(homework).items():
        given = ", ".join(names(judge))
        begin = texts.index(next(t for t in texts if re.search(rf"^name: {name}\n", t, re.M)))
        part = texts[begin : texts.index("# END QUESTION", begin) + 2]
        points = int(re.search(r"^points: (\d+)$", part[0], re.M)[1])
        assert points % 2 == 0, "half for the public checks, half for the hidden ones"
        assert re.search(rf"\*{points} points · (warm-up|medium|hard) · \d+ minutes\*", part[1])
        tests = part[part.index("# BEGIN TESTS") + 1 : part.index("# END TESTS")]
        calls = [ast.unparse(ast.parse(text)) for text in tests]
        body = "    from iclutils.bookkit.coursework import grade\n    grade('{}.{}', {}{})"
        assert calls == [
            f"def test_public({given}):\n" + body.format(homework, name, given, ""),
            f"def test_hidden({given}):\n" + body.format(homework, name, given, ", hidden=True"),
        ]
        assert tests[1].startswith("# HIDDEN")
        assert ast.unparse(ast.parse(part[-1])) == f"coursework.check('{homework}.{name}', {given})"


@pytest.mark.parametrize(("homework", "question"), ALL)
@pytest.mark.parametrize("hidden", [False, True], ids=["public", "hidden"])
def test_the_solution_is_right(homework: str, question: str, hidden: bool) -> None:
    grade(f"{homework}.{question}", *answers(homework, question), hidden=hidden)


@pytest.mark.parametrize(("homework", "question"), ALL)
@pytest.mark.parametrize("hidden", [False, True], ids=["public", "hidden"])
def test_a_stub_scores_nothing(homework: str, question: str, hidden: bool) -> None:
    """As the student gets it: functions that do nothing, and names that are ``...``."""
    right = answers(homework, question)
    stubs = [(lambda *given, **more: None) if callable(each) else ... for each in right]
    with pytest.raises(Mistake, match="nothing is written yet"):
        grade(f"{homework}.{question}", *stubs, hidden=hidden)


@pytest.mark.parametrize(("homework", "question"), ALL)
def test_typical_mistakes_are_named(homework: str, question: str) -> None:
    """With the first message that a student gets, in the notebook or when it is graded."""
    cases = wrong(homework)[question]
    assert len(cases) >= 3
    assert len({hint for hint, _ in cases}) >= 3
    for hint, answer in cases:
        given = answer if isinstance(answer, tuple) else (answer,)
        said = first_mistake(f"{homework}.{question}", given)
        assert hint.lower() in said.lower(), f"{hint!r} is not in: {said}"


def first_mistake(question: str, given: tuple[Any, ...]) -> str:
    for hidden in (False, True):
        try:
            grade(question, *given, hidden=hidden)
        except Mistake as mistake:
            return str(mistake)
    return "no mistake was found"


# What is around the questions


def test_a_check_prints_what_a_grade_raises(capsys: pytest.CaptureFixture[str]) -> None:
    right = solutions("hw01")["double"]
    check("hw01.q1", right)
    check("hw01.q1", lambda copy, bos: torch.cat([copy, copy], 1))
    passed, failed = capsys.readouterr().out.splitlines()
    assert passed == "hw01.q1: the public checks pass."
    assert failed.startswith("hw01.q1: not yet. BOS is missing")


def test_an_answer_that_fails_is_a_mistake_with_its_error() -> None:
    with pytest.raises(Mistake, match="`double` raised IndexError: no such"):
        grade("hw01.q1", _raises)
    with pytest.raises(Mistake, match="should be a function; it is a int"):
        grade("hw01.q1", 3)


def _raises(copy: torch.Tensor, bos: int) -> torch.Tensor:
    raise IndexError("no such")


def test_an_answer_that_borrows_a_lens_is_refused() -> None:
    from iclutils.interp import head_scores

    def borrowed(pattern: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return head_scores.olsson_prefix_matching(pattern, tokens)

    def imported(pattern: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        from iclutils.interp.head_scores import olsson_prefix_matching

        return olsson_prefix_matching(pattern, tokens)

    names = {"head_scores": head_scores, "torch": torch}
    text = "def prefix_score(pattern, tokens):\n    return head_scores.olsson_prefix_matching"
    exec(text + "(pattern, tokens)", names)
    for answer in (names["prefix_score"], imported):
        with pytest.raises(Mistake, match="Write it yourself"):
            grade("hw01.q4", answer)


def test_an_answer_cannot_spoil_what_it_is_compared_with() -> None:
    def spoiling(copy: torch.Tensor, bos: int) -> torch.Tensor:
        copy.zero_()
        return torch.cat([torch.full((len(copy), 1), bos), copy, copy], 1)

    with pytest.raises(Mistake):
        grade("hw01.q1", spoiling)


def test_questions_that_do_not_exist() -> None:
    with pytest.raises(IclError, match=r"Did you mean 'hw01\.q1'"):
        grade("hw01.q11", None)
    with pytest.raises(IclError, match="Unknown homework 'hw99'"):
        check("hw99.q1", None)
    with pytest.raises(IclError, match="asks for shares_kept, reason; got 1"):
        grade("hw01.q6", None)


@pytest.mark.parametrize(
    ("got", "truth", "message"),
    [
        (torch.zeros(2), torch.zeros(3), r"shape \(3,\); got \(2,\)"),
        (torch.zeros(2).long(), torch.zeros(2), "real numbers; its dtype is torch.int64"),
        (torch.tensor([torch.nan]), torch.ones(1), "NaN"),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]), "off by up to 0.5"),
        (torch.tensor([torch.inf]), torch.ones(1), "off by up to inf"),
        ([1.0], torch.ones(1), "Expected a tensor; got a list"),
        ("a", 1.0, "Expected a number; got a str"),
        (1.1, 1.0, "The value 1.1 is off"),
        (True, 1.0, "True or False"),
        ((0, 1), (1, 0), "not the right answer"),
        ("b", "a", "not the right answer"),
    ],
)
def test_what_is_wrong_is_said(got: Any, truth: Any, message: str) -> None:
    with pytest.raises(Mistake, match=message):
        compare(got, truth)


@pytest.mark.parametrize(
    ("got", "truth"),
    [
        (torch.ones(2) + 1e-7, torch.ones(2)),
        (torch.ones(2).double(), torch.ones(2)),
        (torch.tensor([torch.inf, torch.nan]), torch.tensor([torch.inf, torch.nan])),
        (torch.tensor(2.0), 2.0),
        (" B", "b"),
        ([1, 0], (1, 0)),
        (True, True),
    ],
)
def test_what_is_right_passes(got: Any, truth: Any) -> None:
    compare(got, truth, {"never": got})


def test_a_mistake_that_happens_to_give_the_truth_is_none() -> None:
    with pytest.raises(Mistake, match="off"):
        compare(3.0, 1.0, {"the truth": 1.0, "another": 2.0})
    assert coursework.PUBLIC != coursework.HIDDEN

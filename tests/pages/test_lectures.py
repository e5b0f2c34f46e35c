"""The plan of lectures, against the built chapters."""

from pathlib import Path

import pytest

from book._tools import lectures
from iclutils import claims

ROOT = Path(__file__).parents[2]
pytest.importorskip("bs4")


def test_each_chapter_is_two_lectures_of_at_most_ninety_minutes(site):
    chapters = lectures.read(site, [], ROOT / "_build")
    assert [chapter.name for chapter in chapters] == sorted(claims.chapters())
    for chapter in chapters:
        told = {number: minutes for number, _, minutes in chapter.lectures()}
        assert sorted(told) == [1, 2]
        assert all(45 < minutes <= lectures.LECTURE for minutes in told.values()), chapter.name
        for part in chapter.parts:  # without a label in the notebook: the question alone
            assert part.is_exercise or part.minutes > lectures.QUESTION, part.anchor
            assert part.is_exercise or all(cell.get_text() for cell in (part.ask, part.answer))
        assert any(part.wrong for part in chapter.parts), chapter.name

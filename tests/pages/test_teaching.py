"""The pages for teachers: what they say of the chapters and of the homework is so."""

import re
from pathlib import Path

import pytest
from notebook_rules import source

from iclutils.files import read_json

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("0*.ipynb"))
MASTERS = sorted((ROOT / "notebooks/assignments").glob("hw*.ipynb"))
LABEL = re.compile(r"^\((\d\d-[\w-]+)\)=$|^:label: (\d\d-[\w-]+)$", re.MULTILINE)
LINK = re.compile(r"\{ref\}`(?:[^`<]*<)?(\d\d-[\w-]+)>?`")
EFFORT = re.compile(r"\{exercise\}.*\n:label: .*\n(?:.*\n)?\*(\w+), (an hour|\d+ minutes)?")
WORDS = {"four": 4, "five": 5, "six": 6, "seven": 7, "two": 2, "three": 3}


def text_of(path):
    cells = read_json(path)["cells"]
    return "\n\n".join(source(cell) for cell in cells if cell["cell_type"] == "markdown")


def page(name):
    return (ROOT / f"book/{name}.md").read_text(encoding="utf-8")


def labels(text):
    return {one or other for one, other in LABEL.findall(text)}


def blocks(text):
    """Rows of tables, entries of lists and paragraphs."""
    return re.split(r"\n(?=\||- |\d+\. |\n)", text)


def rows(text, kind):
    """The cells of the tables of one kind, a list of lists."""
    tables = re.findall(rf"^\{{\.\w+ \.{kind}\}}\n\|.*\n\|.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [[[c.strip() for c in row.split("|")[1:-1]] for row in t.splitlines()] for t in tables]


@pytest.mark.parametrize("name", ["instructor", "lectures"])
def test_a_plan_leads_through_the_story(name):
    """What lies in a drawer is named as something to show if asked."""
    texts = [text_of(path) for path in NOTEBOOKS]
    drawers = [re.search(r"^\(\S*drawer\)=\n## .*?(?=^## |\Z)", t, re.M | re.S) for t in texts]
    inside = set().union(*(labels(drawer[0]) for drawer in drawers if drawer))
    assert len(inside) > 50
    followed = [(set(LINK.findall(block)), block) for block in blocks(page(name))]
    assert set().union(*(found for found, _ in followed)) <= labels("\n".join(texts))
    hidden = [block for found, block in followed if found & inside]
    assert [block for block in hidden if "if asked" not in block.lower()] == []
    assert len(followed) > 3 * len(hidden), "most of a plan is story"


def test_a_lecture_takes_ninety_minutes():
    (script,) = rows(page("lectures"), "script")
    times = [tuple(map(int, row[0].split(" to "))) for row in script]
    assert [start for start, _ in times] == [0, *(end for _, end in times[:-1])]
    assert times[-1][1] == 90
    lectures = rows(page("lectures"), "lecture")
    minutes = [[int(re.search(r"(\d+) minutes", row[0])[1]) for row in each] for each in lectures]
    assert [sum(each) for each in minutes] == 6 * [90]


def test_exercises_take_what_how_to_read_says():
    (told,) = rows(page("how_to_read"), "times")
    chapters = [p for p in NOTEBOOKS if (p.stem[:2] != "00") and not re.search("app|fault", p.stem)]
    for path, (name, *said) in zip(chapters, told, strict=True):
        story, _, after = text_of(path).partition("\n## Longer exercises")
        found = [
            sum(60 if time == "an hour" else int(time.split()[0])
                for level, time in EFFORT.findall(part) if level != "Open")
            for part in (story, after)
        ]  # fmt: skip
        is_open = any(level == "Open" for level, _ in EFFORT.findall(story + after))
        assert (name[:2], said) == (path.stem[:2], [*map(str, found), "yes" if is_open else "no"])


def test_homework_takes_what_coursework_says():
    (told,) = rows(page("coursework"), "hours")
    for path, row in zip(MASTERS, told, strict=True):
        text = text_of(path)
        count, points = (
            re.search(r"^(\w+) questions", text, re.M)[1],
            re.search(r"worth (\d+) points", text)[1],
        )
        hours, half = re.search(r"take about (\w+) hours( and a half)?", text).groups()
        said = (
            f"{WORDS[count.lower()]}",
            f"{WORDS[hours]}" + " ½" * bool(half),
            f"{int(points) + 4}",
        )
        assert (row[0], *row[2:]) == (f"`{path.stem[:4]}`", *said)


def test_the_question_that_coursework_shows_is_one_of_the_homework():
    shown = page("coursework").partition("## What a question looks like")[2].partition("\n## ")[0]
    master = "\n".join(source(cell) for cell in read_json(MASTERS[4])["cells"])
    task = re.findall(r"^> ?(.*)$", shown, re.MULTILINE)
    task, stub = "\n".join(task[2:]), re.search(r"```python\n(.*)    \.\.\.", shown, re.DOTALL)[1]
    assert task in master
    assert stub in master
    mistake = " ".join(re.search(r"reads: \*(.*?)\*", shown, re.DOTALL)[1].split())
    assert mistake in (ROOT / "notebooks/assignments/answers/hw05.py").read_text(encoding="utf-8")

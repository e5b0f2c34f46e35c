"""The pages for teachers: what they say of the chapters and of the homework is so."""

import json
import re
from pathlib import Path

import pytest
from notebook_rules import code, printed, source

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


def lectures():
    """Return the rows of each lecture, with the notebook of its chapter."""
    numbers = re.findall(r"^\(lecture-(\d\d)\)=", page("lectures"), re.MULTILINE)
    chapters = [p for p in NOTEBOOKS if not re.search("^00|app|fault", p.stem)]
    assert numbers == [path.stem[:2] for path in chapters]
    return list(zip(chapters, rows(page("lectures"), "lecture"), strict=True))


def live_of(path):
    """Return the script of the first live figure of a chapter."""
    figure = re.search(r"```\{live\} (\w+)", text_of(path))[1]
    return (ROOT / f"iclutils/plots/live/{figure}.js").read_text(encoding="utf-8")


def choices(text):
    """Return the choices of a bet, "(a) one; (b) two.", without letters (bold or not) and stops."""
    said = re.split(r"(?:\*\*)?\(([a-h])\)(?:\*\*)? ", " ".join(text.split()))[1:]
    assert said[::2] == list("abcdefgh")[: len(said[::2])], text
    return [words.strip(" .;").lower() for words in said[1::2]]


def bets_of(path):
    """Return choices and right letters of the bets of a chapter, that of the live figure first."""
    text = text_of(path)
    live = json.loads(re.search(r"bet: \{\n.*\n +choices: (\[.*\])", live_of(path))[1])
    found = [([choice.lower() for choice in live], None)]
    for bet in re.finditer(r"^:::\{admonition\} A bet\n(.*?)^:::$", text, re.M | re.S):
        answer = re.search(r"^:::\{admonition\} Answer\n.*\n+\((\w)\)", text[bet.end() :], re.M)
        found.append((choices(bet[1]), answer[1]))
    return found


def test_a_lecture_takes_ninety_minutes():
    for _, each in lectures():
        times = [tuple(map(int, re.match(r"(\d+) to (\d+): ", row[0]).groups())) for row in each]
        assert [start for start, _ in times] == [0, *(end for _, end in times[:-1])]
        assert times[-1] == (80, 90)
        assert each[-1][0].endswith("time to spare")


def test_a_lecture_asks_the_bets_of_its_chapter():
    """In their order, each choice in the first words of the chapter's, the same letter right."""
    for path, each in lectures():
        asked = [row for row in each if row[1].startswith("**Bet.**")]
        bets = bets_of(path)
        assert len(asked) == len(bets) >= 3, path.stem
        for (_, question, wrong, says), (theirs, right) in zip(asked, bets, strict=True):
            ours = choices(question)
            assert len(ours) == len(theirs), question
            assert all(map(str.startswith, theirs, ours)), (ours, theirs)
            letter = re.match(r"(?:\*[^*]*\* )?\((\w)\)", says)[1]  # after what to do on the page
            assert right in (None, letter), question
            assert re.match(r"\((\w)\)", wrong)[1] != letter, question


def printed_by(path):
    """Return what the cells of a notebook print."""
    return "\n".join(printed(cell) for cell in code(read_json(path)))


def test_the_numbers_of_a_lecture_stand_in_its_chapter():
    for path, each in lectures():
        there = text_of(path) + printed_by(path) + live_of(path)
        for row in each:
            plain = re.sub(r"\{\w+\}`[^`]*`|[Cc]hapter \d\d", "", " ".join(row[1:]))
            for number in re.findall(r"\d+(?:[./]\d+)?", plain):
                assert re.search(rf"(?<![\d.]){number}(?!\d)", there), (path.stem, number, row)


def test_large_numbers_are_measured_or_printed_by_a_chapter():
    printed = printed_by(NOTEBOOKS[1]) + printed_by(NOTEBOOKS[-1])
    tables = re.findall(r"^\{\.big\}\n(\|.*)", page("new"), re.MULTILINE)
    assert len(tables) == 5
    for number in (cell.strip() for head in tables for cell in head.split("|")[1:-1]):
        is_role = number.startswith(("{measured}`", "{real}`"))
        assert is_role or re.search(rf" {number}(?: \|)?$", printed, re.MULTILINE), number


def test_how_to_run_shows_what_is_printed():
    shown = re.search(r"```text\n(.*)\n```", page("how_to_run"))[1]
    assert all(shown in printed_by(path) for path in NOTEBOOKS)
    assert "SmolLM2 is here" in (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "SmolLM2 is here" in page("how_to_run")


def test_ninety_minutes_are_enough_to_decide():
    told = page("instructor").partition("## Ninety minutes to decide")[2].partition("\n## ")[0]
    assert sum(map(int, re.findall(r"^\| (\d+) \|", told, re.MULTILINE))) == 90


def test_a_plan_names_a_lecture_and_what_it_leaves():
    """The exercises at the notebooks are none of those that a lecture does in class."""
    tables = [each for _, each in lectures()]
    shown = {label for each in tables for row in each for label in LINK.findall(row[0])}
    for plan in rows(page("instructor"), "plan"):
        lessons = " ".join(row[1] for row in plan)
        assert set(re.findall(r"<lecture-(\d\d)>", lessons)) == {f"0{i}" for i in range(1, 8)}
        in_class = shown | set(LINK.findall(lessons))
        assert all("-ex-" in label for label in in_class - shown), "sections stand in the lectures"
        assert not in_class & {label for row in plan for label in LINK.findall(row[3])}


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
        minutes = re.findall(r"^\*\d points · (?!graded).* · (\d+) minutes\*", text, re.M)
        assert round(sum(map(int, minutes)) / 30) / 2 == WORDS[hours] + bool(half) / 2
        assert len(minutes) == WORDS[count.lower()]
        said = (
            ", ".join(minutes),
            f"{WORDS[hours]}" + " ½" * bool(half),
            f"{int(points) + 4}",
        )
        assert (row[0], *row[2:]) == (f"`{path.stem[:4]}`", *said)


def test_coursework_names_every_question():
    """In a fold, by the titles of the masters."""
    titles = re.findall(r"^## \d\. (.*)$", "\n".join(map(text_of, MASTERS)), re.MULTILINE)
    fold = page("coursework").partition(":::{dropdown}")[2].partition("\n:::")[0]
    assert fold.startswith(" The titles of all forty questions")
    assert re.findall(r"^\d\. (.*)$", fold, re.MULTILINE) == titles
    assert len(titles) == 40


def test_the_question_that_students_see_is_one_of_the_homework():
    shown = page("students").partition("## A question")[2].partition("\n## ")[0]
    master = "\n".join(source(cell) for cell in read_json(MASTERS[0])["cells"])
    task = re.findall(r"^> ?(.*)$", shown, re.MULTILINE)
    task, stub = "\n".join(task[2:]), re.search(r"```python\n(.*)    \.\.\.", shown, re.DOTALL)[1]
    assert task in master
    assert stub in master
    mistake = " ".join(re.search(r"it says: \*(.*?)\*", shown, re.DOTALL)[1].split())
    assert mistake in (ROOT / "notebooks/assignments/answers/hw01.py").read_text(encoding="utf-8")

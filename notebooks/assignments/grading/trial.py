"""A dry run for an instructor: twelve submissions of all kinds, graded, and what comes out."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from iclutils.files import read_json

from . import assignments, reports, submissions
from .confine import Limits

HOMEWORK, ANSWER = "hw05", "def part_and_change"
PARAGRAPH = "I would have changed my mind if an untrained head did the same on shuffled values."
Cells = list[dict[str, Any]]


def _answer(
    before: str = "", after: str = "", text: str = "", kind: str = "code"
) -> Callable[[Cells], None]:
    def edit(cells: Cells) -> None:
        cell = next(each for each in cells if "".join(each["source"]).startswith(ANSWER))
        cell |= {"source": before + (text or "".join(cell["source"])) + after, "cell_type": kind}

    return edit


def _append(kind: str, text: str) -> Callable[[Cells], None]:
    return lambda cells: cells.append({"cell_type": kind, "source": text, "metadata": {}})


def _import(cells: Cells) -> None:
    cell = next(each for each in cells if "import checks" in "".join(each["source"]))
    cell["source"] = "from google.colab import drive\n" + "".join(cell["source"])


EDITS: dict[str, Callable[[Cells], Any]] = {
    "Ada, all right": _append("markdown", PARAGRAPH),
    "Bo, a typical mistake": _answer(
        after="\n\nright = part_and_change\npart_and_change = lambda *x: right(*x).flip(0)"
    ),
    "Chi, nothing written": _answer(text=f"{ANSWER}(query, keys, values, demos):\n    ..."),
    "Dov, paragraph as code": _append("code", PARAGRAPH),
    "Eve, imports from Colab": _import,
    "Fay, answer as text": _answer(kind="markdown"),
    "Gus, an endless loop": _answer(before="while True:\n    pass\n"),
    "Hal, ends the process": _answer(before="import os\nos._exit(1)\n"),
    "Ida, looks for solutions": _answer(
        text="import glob\nprint(open(glob.glob('/**/hw05.py', recursive=True)[0]).read())"
    ),
    "Jo, takes all memory": _answer(before="x = [bytearray(10**8) for _ in range(99)]\n"),
}


def run(build: Path, unconfined: bool) -> str:
    """Make the submissions in ``build/class``, grade them, and return what a teacher sees."""
    (made,) = assignments.make(build.parent, HOMEWORK)
    folder = build / "class"
    shutil.rmtree(build, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copytree(made.student.parents[1], build / "assignments" / HOMEWORK)
    for name, edit in EDITS.items():
        notebook = read_json(made.instructor)
        notebook["cells"] = [c for c in notebook["cells"] if "See the chapter." not in c["source"]]
        edit(notebook["cells"])
        (folder / f"{name}.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    whole = (folder / "Ada, all right.ipynb").read_text(encoding="utf-8")
    (folder / "Kit, half an upload.ipynb").write_text(whole[:4000], encoding="utf-8")
    (folder / "Lou, a PDF.pdf").write_bytes(b"%PDF-1.7")
    limits = Limits(step=6.0, seconds=60.0, memory=3.0)
    path = submissions.grade(build, folder, HOMEWORK, limits, unconfined=unconfined)
    by_hand, page = path.parents[1] / "by_hand.csv", "Bo, a typical mistake.ipynb.md"
    shown = {
        f"The table, {path}:": _columns(path, "student status confined q1 q2 q3 q4 total message"),
        f"Enter points for the paragraphs in {by_hand}:": _columns(by_hand, "student of written"),
        "Feedback for Bo:": (path.parent / "feedback" / page).read_text(encoding="utf-8"),
        "The gradebook:": _columns(reports.gradebook(build / "grades"), f"student {HOMEWORK}"),
    }
    return "\n\n".join(f"{title}\n{text}" for title, text in shown.items())


def _columns(path: Path, names: str) -> str:
    return reports.table_of(path)[names.split()].to_string(index=False, max_colwidth=60)

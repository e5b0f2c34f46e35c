"""A dry run for an instructor: twelve submissions of all kinds, graded, and what comes out."""

import json
import shutil
from pathlib import Path

from iclutils.files import read_json

from . import assignments, reports, submissions

ANSWER = "def part_and_change"
CLASS = {  # of each student the beginning of a cell, what stands in its place, and its kind
    "Ada, all right": (ANSWER, "CELL", "code"),
    "Bo, a typical mistake": (ANSWER, "CELL\n\nright = part_and_change\n"
                              "part_and_change = lambda *x: right(*x).flip(0)", "code"),
    "Chi, nothing written": (ANSWER, f"{ANSWER}(*given):\n    ...", "code"),
    "Dov, paragraph as code": ("See the chapter.", "CELL", "code"),
    "Eve, imports from Colab": ("import math", "from google.colab import drive\nCELL", "code"),
    "Fay, answer as text": (ANSWER, "CELL", "markdown"),
    "Gus, an endless loop": (ANSWER, "while True:\n    pass\nCELL", "code"),
    "Hal, ends the process": (ANSWER, "import os\nos._exit(1)\nCELL", "code"),
    "Ida, looks for solutions": (ANSWER, "import glob\nfound = glob.glob('/**/hw05.py', "
                                 "recursive=True)\nprint(open(found[0]).read())", "code"),
    "Jo, takes all memory": (ANSWER, "x = [bytearray(10**8) for _ in range(99)]\nCELL", "code"),
}  # fmt: skip


def run(build: Path, unconfined: bool) -> str:
    """Make the submissions in ``build/class``, grade them, and return what a teacher sees."""
    for folder in ("class", "grades"):
        shutil.rmtree(build / folder, ignore_errors=True)
    (made,) = assignments.make(build, "hw05")
    (build / "class").mkdir()
    for name, (begins, text, kind) in CLASS.items():
        whole = read_json(made.solved)
        cell = next(x for x in whole["cells"] if "".join(x["source"]).startswith(begins))
        cell |= {"source": text.replace("CELL", "".join(cell["source"])), "cell_type": kind}
        (build / "class" / f"{name}.ipynb").write_text(json.dumps(whole), encoding="utf-8")
    (build / "class/Kit, half an upload.ipynb").write_text(json.dumps(whole)[:4000])
    (build / "class/Lou, a PDF.pdf").write_bytes(b"%PDF-1.7")
    limits = {"step": 6.0, "seconds": 60.0, "memory": 3.0}
    table = submissions.grade(build, build / "class", "hw05", limits, unconfined)
    by_hand = reports.shown(table.with_name("by_hand.csv"), "question comment")
    book = reports.shown(reports.gradebook(build / "grades"))
    return (f"The table, {table}:\n{reports.shown(table)}\n\nEnter points for the paragraphs, in "
            f"by_hand.csv:\n{by_hand}\n\nThe gradebook:\n{book}")  # fmt: skip

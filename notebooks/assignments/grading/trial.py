"""A dry run for an instructor: twelve submissions of all kinds, graded, and what comes out."""

import json
import shutil
from pathlib import Path

from iclutils.files import read_json

from . import assignments, reports, submissions
from .confine import Limits

HOMEWORK, ANSWER, IMPORTS = "hw05", "def part_and_change", "import math"
PARAGRAPH = "I would have changed my mind if an untrained head did the same on shuffled values."
CLASS = {  # of each student the cell with the first answer; RIGHT is the right one
    "Ada, all right": "RIGHT",
    "Bo, a typical mistake": (
        "RIGHT\n\nright = part_and_change\npart_and_change = lambda *x: right(*x).flip(0)"
    ),
    "Chi, nothing written": f"{ANSWER}(query, keys, values, demos):\n    ...",
    "Dov, paragraph as code": "RIGHT",
    "Eve, imports from Colab": "RIGHT",
    "Fay, answer as text": "RIGHT",
    "Gus, an endless loop": "while True:\n    pass\nRIGHT",
    "Hal, ends the process": "import os\nos._exit(1)\nRIGHT",
    "Ida, looks for solutions": (
        "import glob\nprint(open(glob.glob('/**/hw05.py', recursive=True)[0]).read())"
    ),
    "Jo, takes all memory": "x = [bytearray(10**8) for _ in range(99)]\nRIGHT",
}


def run(build: Path, unconfined: bool) -> str:
    """Make the submissions in ``build/class``, grade them, and return what a teacher sees."""
    for folder in ("class", "grades"):
        shutil.rmtree(build / folder, ignore_errors=True)
    (made,) = assignments.make(build, HOMEWORK)
    (build / "class").mkdir()
    for name, text in CLASS.items():
        notebook = read_json(made.solved)
        for cell in notebook["cells"]:
            source = "".join(cell["source"])
            if source.startswith(ANSWER):
                cell["source"] = text.replace("RIGHT", source)
                cell["cell_type"] = "markdown" if "as text" in name else "code"
            elif source.startswith(IMPORTS) and "Colab" in name:
                cell["source"] = f"from google.colab import drive\n{source}"
            elif source == "See the chapter.":  # the paragraph
                cell["cell_type"] = "code" if "as code" in name else "markdown"
                cell["source"] = PARAGRAPH if name.startswith(("Ada", "Dov")) else ""
        (build / "class" / f"{name}.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    (build / "class/Kit, half an upload.ipynb").write_text(json.dumps(notebook)[:4000])
    (build / "class/Lou, a PDF.pdf").write_bytes(b"%PDF-1.7")
    limits = Limits(step=6.0, seconds=60.0, memory=3.0)
    table = submissions.grade(build, build / "class", HOMEWORK, limits, unconfined=unconfined)
    return "\n\n".join([
        f"The table, {table}:\n{reports.shown(table)}",
        "Enter points for the paragraphs, in by_hand.csv:",
        reports.shown(table.with_name("by_hand.csv"), "question comment"),
        f"The gradebook:\n{reports.shown(reports.gradebook(build / 'grades'))}",
    ])  # fmt: skip

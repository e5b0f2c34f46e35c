"""From each solved master: the student's copy, the autograder, the instructor's copy.

``otter assign`` derives them and refuses a master whose solution fails its own tests. On the way
the set-up cell of today is put in, the public checks, and a question that is graded by hand; the
hidden checks go to the autograder alone. A homework is derived anew only when its master, its
table, the judge or the set-up cell have changed, and it is there whole or not at all.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from book._tools.address import set_up_cell
from iclutils import checks
from iclutils.checks import folder, questions, table
from iclutils.errors import IclError, unknown
from iclutils.files import read_json, write_json
from iclutils.progress import bar

from . import handout

SIGN = "made.json"  # written last: of what the folder was made
BY_HAND = "paragraph"  # the question that a person grades, and its points
BY_HAND_POINTS = 4.0
PARAGRAPH = """\
## In your own words

*4 points · graded by hand · 20 minutes*

One paragraph, without code: which result of this homework would have changed your mind, and about
what? Say what you measured, on what, and what the number does not rule out.
"""
CHECKS = """\
# @title The public checks of this homework: run this cell, it need not be read.
from iclutils import checks

checks.public("{}")"""


@dataclass(frozen=True)
class Assignment:
    """One derived homework: the copies of students, grader and instructor, and its points."""

    name: str
    student: Path
    autograder: Path
    instructor: Path
    digest: str  # of what it was made of
    points: dict[str, float]
    fresh: bool = False  # whether it was made just now


def masters() -> dict[str, Path]:
    """The solved masters by name."""
    found = {path.stem[:4]: path for path in sorted(folder().glob("hw[0-9][0-9]_*.ipynb"))}
    if not found:
        raise IclError(f"{folder()} holds no masters, such as hw01_name.ipynb.")
    return found


def make(build: Path, name: str = "") -> list[Assignment]:
    """Derive one homework (``"hw01"``), or all, into ``build/assignments/NAME``."""
    known = masters()
    if name and name not in known:
        raise unknown("homework", name, known)
    chosen = [name] if name else list(known)
    return [_made(known[each], build / "assignments" / each) for each in bar(chosen, "deriving")]


def _made(master: Path, folder: Path) -> Assignment:
    digest, sign = _digest(master), folder / SIGN
    if sign.is_file() and read_json(sign).get("digest") == digest:
        return _assignment(folder, master)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as place:
        work = Path(place).resolve()
        text = _ready(master)
        (work / master.name).write_text(text, encoding="utf-8")
        shutil.copy(table(folder.name), work)
        _assign(work / master.name, work / "out")
        made = work / "made"
        for part in ("student", "autograder", "instructor"):
            (made / part).mkdir(parents=True)
        student = work / "out" / "student" / master.name
        _keep_secrets(read_json(student), json.loads(text), folder.name)
        shutil.move(student, made / "student")
        shutil.move(work / "out" / "autograder" / master.name, made / "instructor")
        (archive,) = (work / "out" / "autograder").glob("*.zip")
        shutil.move(archive, made / "autograder" / f"{folder.name}.zip")
        points = _points(json.loads(text))
        write_json(made / SIGN, {"digest": digest, "points": points})
        if folder.exists():
            folder.rename(work / "old")
        made.rename(folder)
    return _assignment(folder, master, fresh=True)


def _assignment(folder: Path, master: Path, fresh: bool = False) -> Assignment:
    return Assignment(
        name=folder.name,
        student=folder / "student" / master.name,
        autograder=folder / "autograder" / f"{folder.name}.zip",
        instructor=folder / "instructor" / master.name,
        **read_json(folder / SIGN),
        fresh=fresh,
    )


def _points(master: dict[str, Any]) -> dict[str, float]:
    cells = "\0".join("".join(cell["source"]) for cell in master["cells"])
    begun = re.findall(r"# BEGIN QUESTION\nname: (\w+)\n(?:manual: true\n)?points: ([\d.]+)", cells)
    return {name: float(points) for name, points in begun}


def _digest(master: Path) -> str:
    judge = [Path(str(module.__file__)) for module in (checks, handout)]
    whole = hashlib.sha256((set_up_cell() + metadata.version("otter-grader")).encode())
    for path in (master, table(master.stem[:4]), *judge, Path(__file__)):
        whole.update(path.name.encode() + path.read_bytes())
    return whole.hexdigest()


def _ready(master: Path) -> str:
    """The master with what is put into every homework."""
    notebook, name = read_json(master), master.stem[:4]
    cells = notebook["cells"]
    cells[0]["source"] = ["".join(cells[0]["source"]).rstrip(), f"\nautograder_files: [{name}.py]"]
    at = next(i for i, cell in enumerate(cells) if "set-up" in cell["metadata"].get("tags", []))
    cells[at]["source"] = set_up_cell().splitlines(keepends=True)
    checks = CHECKS.format(handout.packed(table(name), questions(name)))
    hidden = {"tags": ["checks"], "jupyter": {"source_hidden": True}, "cellView": "form"}
    cells.insert(at + 1, _cell("checks", "code", checks, hidden))
    hand = [
        *(("raw", f"# BEGIN QUESTION\nname: {BY_HAND}\nmanual: true\npoints: {BY_HAND_POINTS:g}"),),
        *(("markdown", PARAGRAPH), ("raw", "# BEGIN SOLUTION"), ("markdown", "See the chapter.")),
        *(("raw", "# END SOLUTION"), ("raw", "# END QUESTION")),
    ]
    cells += [_cell(f"by-hand-{i}", kind, text) for i, (kind, text) in enumerate(hand)]
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _cell(name: str, kind: str, text: str, about: dict[str, Any] | None = None) -> dict[str, Any]:
    code: dict[str, Any] = {"outputs": [], "execution_count": None} if kind == "code" else {}
    return {"id": name, "cell_type": kind, "metadata": about or {}, "source": text} | code


def _assign(master: Path, out: Path) -> None:
    command = [sys.executable, "-m", "otter", "assign", "--no-pdfs", str(master), str(out)]
    quiet = {"ICLUTILS_QUIET": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        command, cwd=master.parent, env=os.environ | quiet, capture_output=True, text=True
    )
    if done.returncode == 0:
        return
    said = done.stdout + done.stderr
    if "No module named otter" in said:
        raise IclError('Coursework needs otter-grader: pip install "iclutils[coursework]".')
    mistakes = re.findall(r"^.*Mistake: .*$", said, re.MULTILINE) or said.strip().splitlines()[-3:]
    raise IclError(
        f"{master.name}: the solution fails its own tests, so nothing was derived. "
        + " ".join(line.strip() for line in mistakes)
    )


def _keep_secrets(student: dict[str, Any], master: dict[str, Any], name: str) -> None:
    """Refuse a student's copy that shows a solution or a hidden test."""
    text = json.dumps(student, ensure_ascii=False)
    shown = [line for line in solution_lines(master) if json.dumps(line)[1:-1] in text]
    if shown or "hidden=True" in text or "hidden: true" in text:
        raise IclError(f"{name}: the student's copy shows {shown or 'a hidden test'}.")


def solution_lines(master: dict[str, Any]) -> list[str]:
    """The lines that only the solved master may hold, those of ten characters or more."""
    found, inside = [], False
    for cell in master["cells"]:
        for line in "".join(cell["source"]).splitlines():
            if line.strip().endswith("# SOLUTION"):
                found.append(line.partition("# SOLUTION")[0].strip())
            marked = line.strip() in ("# BEGIN SOLUTION", "# END SOLUTION")
            if cell["cell_type"] == "code" and marked:
                inside = "BEGIN" in line
            elif inside:
                found.append(line.strip())
    return [line for line in found if len(line) >= 10]

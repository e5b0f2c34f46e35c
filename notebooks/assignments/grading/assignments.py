"""From each solved master: the students' notebook, and what otter and Gradescope grade with.

``otter assign`` derives them and refuses a master whose solution fails its own tests. Beforehand
the public checks are put in: a student's copy carries the code of the checks, the upper part of the
homework's table, and the values that the solutions and mistakes give on the public input.
"""

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from types import SimpleNamespace as Homework
from typing import Any

import checks
import yaml
from iclutils.errors import IclError, unknown
from iclutils.files import read_json, write_text
from iclutils.progress import bar
from nbformat.v4 import new_code_cell

CARRY = """\
# @title The public checks of this homework: run this cell, it need not be read.
import base64, json, sys, types, zlib

code, half, right, questions = json.loads(zlib.decompress(base64.b85decode("{}")))
checks = sys.modules["checks"] = types.ModuleType("checks")
exec(code, vars(checks))
exec(half, names := dict())
checks.public.update(right)
checks.carried.update((name, names[name]) for name in questions)"""


def folder() -> Path:
    """Return the folder of the masters: ``$ICLUTILS_HOMEWORK``, or the one around this package."""
    return Path(os.environ.get("ICLUTILS_HOMEWORK") or Path(__file__).parents[1]).resolve()


def masters() -> dict[str, Path]:
    """Return the solved masters by name."""
    return {path.stem[:4]: path for path in sorted(folder().glob("hw[0-9][0-9]_*.ipynb"))}


def table(homework: str) -> Path:
    """Return the file with the questions of a homework, and what is right."""
    return folder() / "answers" / f"{homework}.py"


def make(build: Path, name: str = "") -> list[Homework]:
    """Derive one homework (``"hw01"``), or all, into ``build/assignments/NAME`` if something has
    changed; return for each its name, a digest of what it was made of, the notebooks of students
    and with solutions, the points of its questions, and those that a person grades."""
    known = masters()
    if name not in {"", *known}:
        raise unknown("homework", name, known)
    chosen = [name] if name else [*known]
    return [_made(known[each], build / "assignments" / each) for each in bar(chosen, "deriving")]


def _made(master: Path, folder: Path) -> Homework:
    needs, notebook = [table(folder.name), Path(checks.__file__)], read_json(master)
    texts = [path.read_bytes() for path in (master, *needs, Path(__file__))]
    digest, sign = hashlib.sha256(b"".join(texts)).hexdigest(), folder / "made_of"
    cells = ["".join(cell["source"]) for cell in notebook["cells"]]
    asked = [yaml.safe_load(text) for text in cells if text.startswith("# BEGIN QUESTION")]
    if not sign.is_file() or sign.read_text() != digest:
        _assign(notebook, master.name, folder, needs)
        write_text(sign, digest)  # last, so that a folder that has one is whole
    return Homework(
        name=folder.name,
        digest=digest,
        student=folder / "student" / master.name,
        solved=folder / "autograder" / master.name,
        points={each["name"]: float(each["points"]) for each in asked},
        by_hand=[each["name"] for each in asked if each.get("manual")],
    )


def _assign(notebook: dict[str, Any], name: str, folder: Path, needs: list[Path]) -> None:
    """Let otter derive from a master, with the public checks after set-up."""
    cells = notebook["cells"]
    files = ", ".join(path.name for path in needs)
    cells[0]["source"] = "".join(cells[0]["source"]).rstrip() + f"\nautograder_files: [{files}]"
    at = next(i for i, cell in enumerate(cells) if "set-up" in cell["metadata"].get("tags", []))
    hidden = {"tags": ["checks"], "jupyter": {"source_hidden": True}, "cellView": "form"}
    cells.insert(at + 1, new_code_cell(carried(folder.name), id="checks", metadata=hidden))
    quiet = {"ICLUTILS_QUIET": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory() as place:
        for path in needs:
            shutil.copy(path, place)
        Path(place, name).write_text(json.dumps(notebook), encoding="utf-8")
        command = [sys.executable, "-m", "otter", "assign", "--no-pdfs", name, "made"]
        done = subprocess.run(
            command, cwd=place, env=os.environ | quiet, capture_output=True, text=True
        )
        if done.returncode:
            said = done.stdout + done.stderr
            lines = re.findall(r"Mistake: .*", said) or said.strip().splitlines()[-3:]
            raise IclError(f"{name}: otter refuses it. {' '.join(lines)}")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(Path(place, "made"), folder)


def carried(homework: str) -> str:
    """Return the cell of a student's notebook with the checks and the upper part of the table."""
    half, _, _ = table(homework).read_text(encoding="utf-8").partition(checks.MARK)
    code, names = Path(checks.__file__).read_text(encoding="utf-8"), dict[str, Any]()
    exec(half, names)
    asked = checks.questions(homework)
    right = {part.name: checks.expected(part, 0) for parts in asked.values() for part in parts}
    if shown := sorted(right.keys() & names.keys()):
        raise IclError(f"{homework}.py has the solution {shown} above the line {checks.MARK!r}.")
    whole = json.dumps([code, half, right, [*asked]], default=checks.Tensor.tolist).encode()
    return CARRY.format(base64.b85encode(zlib.compress(whole, 9)).decode())

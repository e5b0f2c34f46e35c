"""From each solved master: the student's copy, the autograder, the instructor's copy.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checks
import yaml
from iclutils.errors import IclError, unknown
from iclutils.files import read_json, write_json
from iclutils.progress import bar

SIGN = "made.json"  # written last: what the folder was made of
CARRY = """\
# @title The public checks of this homework: run this cell, it need not be read.
import base64, json, sys, types, zlib

code, *public = json.loads(zlib.decompress(base64.b85decode("{}")))
checks = sys.modules["checks"] = types.ModuleType("checks")
exec(code, vars(checks))
checks.public(*public)"""


@dataclass(frozen=True)
class Assignment:
    """One derived homework: the notebooks of students and with solutions (beside it what otter and
    Gradescope grade with), a digest of what it was made of, points, and what a person grades."""

    name: str
    student: Path
    solved: Path
    digest: str
    points: dict[str, float]
    by_hand: list[str]


def masters() -> dict[str, Path]:
    """Return the solved masters by name."""
    paths = {path.stem[:4]: path for path in sorted(checks.folder().glob("hw[0-9][0-9]_*.ipynb"))}
    if not paths:
        raise IclError(f"{checks.folder()} holds no masters, such as hw01_name.ipynb.")
    return paths


def make(build: Path, name: str = "") -> list[Assignment]:
    """Derive one homework (``"hw01"``), or all, into ``build/assignments/NAME``."""
    known = masters()
    if name and name not in known:
        raise unknown("homework", name, known)
    chosen = [name] if name else list(known)
    return [_made(known[each], build / "assignments" / each) for each in bar(chosen, "deriving")]


def _made(master: Path, folder: Path) -> Assignment:
    """Derive a homework if something changed."""
    name, sign = folder.name, folder / SIGN
    needs = [checks.table(name), Path(checks.__file__)]
    texts = [path.read_bytes() for path in (master, *needs, Path(__file__))]
    digest = hashlib.sha256(b"".join(texts)).hexdigest()
    if not sign.is_file() or read_json(sign)["digest"] != digest:
        shutil.rmtree(folder, ignore_errors=True)
        cells = ["".join(cell["source"]) for cell in read_json(master)["cells"]]
        asked = [yaml.safe_load(text) for text in cells if text.startswith("# BEGIN QUESTION")]
        _assign(master, folder.resolve(), needs)
        points = {each["name"]: float(each["points"]) for each in asked}
        by_hand = [each["name"] for each in asked if each.get("manual")]
        write_json(sign, {"digest": digest, "points": points, "by_hand": by_hand})
    student, solved = (folder / part / master.name for part in ("student", "autograder"))
    return Assignment(name, student, solved, **read_json(sign))


def _assign(master: Path, folder: Path, needs: list[Path]) -> None:
    """Let otter derive from a master, with the public checks after set-up."""
    notebook = read_json(master)
    cells = notebook["cells"]
    files = ", ".join(path.name for path in needs)
    cells[0]["source"] = "".join(cells[0]["source"]).rstrip() + f"\nautograder_files: [{files}]"
    at = next(i for i, cell in enumerate(cells) if "set-up" in cell["metadata"].get("tags", []))
    hidden = {"tags": ["checks"], "jupyter": {"source_hidden": True}, "cellView": "form"}
    about = {"id": "checks", "cell_type": "code", "metadata": hidden, "outputs": []}
    cells.insert(at + 1, about | {"execution_count": None, "source": carried(folder.name)})
    quiet = {"ICLUTILS_QUIET": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory() as place:
        for path in needs:
            shutil.copy(path, place)
        (Path(place) / master.name).write_text(json.dumps(notebook), encoding="utf-8")
        command = [sys.executable, "-m", "otter", "assign", "--no-pdfs", master.name, str(folder)]
        done = subprocess.run(
            command, cwd=place, env=os.environ | quiet, capture_output=True, text=True
        )
    if done.returncode:
        shutil.rmtree(folder, ignore_errors=True)
        said = done.stdout + done.stderr
        lines = re.findall(r"Mistake: .*", said) or said.strip().splitlines()[-3:]
        raise IclError(f"{master.name}: otter refuses it. {' '.join(lines)}")


def carried(homework: str) -> str:
    """Return the cell of a student's notebook with the checks and the upper part of the table."""
    table, code = checks.table(homework), Path(checks.__file__).read_text(encoding="utf-8")
    half, _, _ = table.read_text(encoding="utf-8").partition(checks.MARK)
    names: dict[str, Any] = {}
    exec(half, names)
    asked = checks.questions(homework)
    answers = {part.name for parts in asked.values() for part in parts}
    if shown := sorted(answers & names.keys()):
        raise IclError(f"{table.name} has the solution {shown} above the line {checks.MARK!r}.")
    right = {name: [checks.expected(part, 0) for part in asked[name]] for name in asked}
    whole = json.dumps([code, homework, half, right], default=checks.Tensor.tolist).encode()
    return CARRY.format(base64.b85encode(zlib.compress(whole, 9)).decode())

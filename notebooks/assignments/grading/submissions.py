"""Grade a folder of submissions into a table, without a server.

Each submission runs in a sandbox (``confine``, ``worker``), which knows no truth; what its answers
give is compared here, out of its reach. A step that loops, ends the process or eats memory costs
its own question: the submission is run again without it.
"""

import ast
import hashlib
import io
import json
import os
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any
from zipfile import ZipFile

import checks
from filelock import FileLock
from iclutils.errors import IclError
from iclutils.files import read_json, write_json
from iclutils.progress import bar

from . import assignments, confine, reports
from .assignments import Homework
from .confine import LIMITS, PATIENCE, UNCONFINED, Limits, Place

SAVE = "Ask for the .ipynb file, saved in Jupyter."
JUDGING = Lock()  # what is right for one student is worked out by one thread
SUFFIXES = (".ipynb", ".zip")
JOBS = 2  # at a time
ATTEMPTS = 5  # of one student, at most
RUNS = 10  # of one submission, each without a step that ended the last
HIDDEN = re.compile(r"(^|/)(\.|__MACOSX/|__pycache__/)")  # what systems add
LARGEST = 2**28  # bytes of a notebook in a zip
INSTALLATION = re.compile(r"^([ \t]*)[!%].*\binstall\b.*$", re.MULTILINE)
COMMAND = re.compile(r"^([ \t]*)([\w, ]+=\s*)?[!%].*$", re.MULTILINE)  # of IPython
FENCE = re.compile(r"^```\w*\s*$", re.MULTILINE)
BOUND = re.compile(r"^(?:def )?(\w+)(?:\(.*:| *=[^=])", re.MULTILINE)  # names, outermost
Cells = list[tuple[bool, str]]  # whether it is code, and its text


class Refused(Exception):
    """A file that cannot be graded: its status, and why."""


def grade(
    build: Path, folder: Path, homework: str, limits: Limits = LIMITS, unconfined: bool = False
) -> Path:
    """Grade every file in a folder, a notebook for each student; return the table of all that was
    graded of the homework, in ``build/grades``. What has a result is not run again."""
    names = {path: os.fsencode(name).decode("utf-8", "backslashreplace")
             for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()
             if not HIDDEN.search(name := str(path.relative_to(folder)))}  # fmt: skip
    if not names:
        raise IclError(f"{folder} holds no file. Name the folder with the submissions.")
    notebooks = (name for path, name in names.items() if path.suffix.lower() in SUFFIXES)
    ((student, count),) = Counter(map(reports.student, notebooks)).most_common(1) or [("", 0)]
    if count > ATTEMPTS:
        raise IclError(f"{folder} has {count} notebooks of one student, {student}. If it is a "
                       f"section, grade it alone: SUBMISSIONS={folder / student}")  # fmt: skip
    (made,) = assignments.make(build, homework)
    place = build / "grades" / made.name
    place.mkdir(parents=True, exist_ok=True)

    def graded(path: Path) -> dict[str, Any]:
        """Return what is stored of a submission, or grade and store it."""
        data, about = b"", f"{path.suffix} {made.digest} {limits} {where[0]} "
        with suppress(OSError):  # what may not be read is graded as empty
            data = path.read_bytes()
        key = hashlib.sha256(about.encode("utf-8", "replace") + data).hexdigest()
        store = place / ".graded" / f"{key}.json"
        if not store.is_file():
            text = json.dumps(_grade(path, data, made, where, limits), ensure_ascii=False)
            result = json.loads(text.encode("utf-8", "replace"))  # of half a character a "?"
            if result["status"] in ("crashed", "stopped: interrupted"):
                return result  # and not store it
            write_json(store, result)
        return read_json(store)

    with FileLock(place / "being_graded.lock", timeout=0):  # else an error that names it
        reports.entered(place, made.points)  # a mistake in it is said before all the work
        confine.INTERRUPTED.clear()
        where = (UNCONFINED, "") if unconfined else confine.sandbox()
        with ThreadPoolExecutor(JOBS) as pool:
            try:
                results = bar(pool.map(graded, names), f"grading {made.name}", len(names))
                grades = [x | {"name": names[path]} for path, x in zip(names, results, strict=True)]
            except BaseException:
                confine.INTERRUPTED.set()
                raise
        return reports.write(place, folder, made, grades)


def _grade(path: Path, data: bytes, made: Homework, where: Place, limits: Limits) -> dict[str, Any]:
    """Grade one submission; whatever is wrong with it, or with its grading, is in the result.

    The status is ``graded``, ``stopped: time`` (or ``memory``), ``crashed``, ``not a notebook``,
    ``broken`` or ``another homework``. Where nothing could be graded there are no scores.
    """
    blank = {"scores": {}, "written": "", "signed": "", "confined": where[0]}
    try:
        if path.suffix.lower() not in SUFFIXES:
            raise Refused("not a notebook", f"Only .ipynb is graded. {SAVE}")
        return blank | _judged(_cells(data, made.name), made, where, limits)
    except Refused as refused:
        status, why = refused.args
    except Exception as error:  # the others are graded all the same
        status, why = "crashed", f"grading failed: {error!r}"[:300]
    return blank | {"status": status, "message": why}


def _cells(data: bytes, homework: str) -> Cells:
    """Return the cells of a notebook of a homework, which may be the only one in a zip."""
    begins = data[:30].decode("utf-8", "replace")
    try:
        if data.startswith(b"PK\3\4"):
            with ZipFile(io.BytesIO(data)) as packed:
                names = [each for each in packed.namelist() if not HIDDEN.search(each)]
                (inner,) = (each for each in names if each.lower().endswith(".ipynb"))
                data = packed.open(inner).read(LARGEST)
        text = json.dumps(json.loads(data.decode("utf-8-sig")), ensure_ascii=False)
        # Half a character, which nothing can write, is now a "?".
        notebook = json.loads(text.encode("utf-8", "replace"))
        about = notebook.get("metadata", {}).get("otter", {}).get("assignment_name") or homework
        cells = [(x["cell_type"] == "code", "".join(x["source"])) for x in notebook["cells"]]
    except Exception:  # whatever a file may hold
        why = f"It is no notebook, or breaks off; it begins with {begins!r}. {SAVE}"
        raise Refused("broken", why) from None
    if about != homework:
        raise Refused("another homework", f"it is {about}")
    return cells


def _judged(cells: Cells, made: Homework, where: Place, limits: Limits) -> dict[str, Any]:
    handout, questions = read_json(made.student)["cells"], checks.questions(made.name)
    code, written = _sorted(cells, handout, {x.name for parts in questions.values() for x in parts})
    carried = next("".join(each["source"]) for each in handout if each["id"] == "checks")
    told, status = _run({"cells": code, "checks": carried}, [*code, *questions], where, limits)
    said = {step: str(told.get(step) or "")[:300] for step in (*questions, "", *code)}
    signed, scores = str(told.get("signed", ""))[:200], dict[str, float]()
    for name, parts in questions.items() if status == "graded" else ():
        kinds = [{seed: told.get(f"{name} {seed}") for seed in seeds}
                 for seeds in (checks.PUBLIC, checks.HIDDEN)]  # fmt: skip
        faults = [_fault(parts, values, signed) for values in kinds]  # half the points for each
        scores[name] = made.points[name] * faults.count("") / 2
        first = next(filter(None, faults), "")
        said[name] = first and (said[name] or first)
    lost = not scores or any(said[name] for name in questions)
    message = "; ".join(f"{step}: {x}".removeprefix(": ") for step, x in said.items() if x and lost)
    return {"status": status, "scores": scores, "message": message[:4000], "written": written,
            "signed": signed}  # fmt: skip


def _sorted(
    cells: Cells, handout: list[dict[str, Any]], answers: set[str]
) -> tuple[dict[str, str], str]:
    """Return the cells to be run, by name, and what the student wrote for a person. A cell that was
    turned into text is run if no other has its answer. Written is what stands in no handout, in
    cells of any kind that hold no Python."""
    known = {line.strip() for each in handout for line in "".join(each["source"]).splitlines()}
    lost = answers - {name for is_code, text in cells if is_code for name in BOUND.findall(text)}
    code, written = dict[str, str](), list[str]()
    for is_code, source in cells:
        text = FENCE.sub("", source)
        if runs := is_code or bool(lost & {*BOUND.findall(text)}):
            code[f"code cell {len(code) + 1}"] = INSTALLATION.sub(r"\1pass", text)
        if not runs or (is_code and not _is_python(text)):
            written += [line for line in text.splitlines() if line.strip() not in known]
    return code, "\n".join(written)[:10_000]


def _is_python(text: str) -> bool:
    """Whether a cell of code holds statements, and not a paragraph."""
    try:
        body = ast.parse(COMMAND.sub(r"\1pass", text)).body
    except Exception:
        return "def " in text
    return not all(isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant) for x in body)


def _run(
    plan: dict[str, Any], steps: list[str], where: Place, limits: Limits
) -> tuple[dict[str, Any], str]:
    """Run a submission until it comes through, each time without the step that ended it; return
    what it told, with what was wrong with these steps, and the status."""
    told, skip, end = dict[str, Any](), list[str](), time.monotonic() + PATIENCE * limits["seconds"]
    why = {"step": f"it ran longer than {limits['step']:g} s",
           "memory": f"it used more than {limits['memory']:g} GB of memory",
           "": "it ended the process that ran it"}  # fmt: skip
    for _ in range(RUNS):
        left = {"seconds": max(1.0, (end - time.monotonic()) / PATIENCE)}
        stopped, facts, last = confine.run(where, plan | {"skip": skip}, limits | left)
        told |= facts
        if "done" in facts:
            return told, "graded"
        begun = [step for step in steps if step not in skip and facts.get(step, "") is None]
        if stopped not in why or not begun:
            break
        skip += begun
        told |= dict.fromkeys(begun, why[stopped])
    told[""] = f"it ran longer than {limits['seconds']:g} s" if stopped == "time" else last
    return told, f"stopped: {stopped}" if stopped else "crashed"


def _fault(parts: tuple[checks.Part, ...], values: dict[int, Any], student: str) -> str:
    """Return the first mistake in what the answers to a question gave, or nothing."""
    try:
        for seed, given in values.items():
            if isinstance(given, str):
                return given[:300] or "it gave nothing"
            for part, value in zip(parts, given, strict=True):
                with JUDGING:
                    if confine.INTERRUPTED.is_set():
                        raise KeyboardInterrupt
                    part.judge(value, seed, student)
    except checks.Mistake as mistake:
        return str(mistake)
    except Exception:  # it is not what the worker writes
        return "its answers were not written down"
    return ""

"""Grade a folder of submissions into a table, without a server.

Each submission runs in a sandbox (``confine``, ``worker``), which knows no truth; what its answers
give is compared here, out of its reach. A step that loops, ends the process or eats memory costs
its own question: the submission is run again without it. What was graded is stored at once, and
stays until the submission, the homework or the bounds change.
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
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Lock
from typing import Any
from zipfile import ZipFile

import checks
from filelock import FileLock
from iclutils.errors import IclError
from iclutils.files import read_json
from iclutils.progress import bar

from . import assignments, confine, reports
from .assignments import Assignment
from .confine import PATIENCE, UNCONFINED, Limits

SAVE = "Ask for the .ipynb file, saved in Jupyter."
JUDGING = Lock()  # what is right for one student is worked out by one thread
SUFFIXES = (".ipynb", ".zip")
USUAL = Limits()
JOBS = 2  # at a time
ATTEMPTS = 5  # of one student, at most
RUNS = 10  # of one submission, each without a step that ended the last
HIDDEN = re.compile(r"(^|/)(\.|__MACOSX/|__pycache__/)")  # what systems add
LARGEST = 2**28  # bytes of a notebook in a zip
INSTALLATION = re.compile(r"^([ \t]*)[!%].*\binstall\b.*$", re.MULTILINE)
COMMAND = re.compile(r"^([ \t]*)([\w, ]+=\s*)?[!%].*$", re.MULTILINE)  # of IPython
FENCE = re.compile(r"^```\w*\s*$", re.MULTILINE)
BOUND = re.compile(r"^(?:def )?(\w+)(?:\(.*:| *=[^=])", re.MULTILINE)  # names, outermost
Cells = list[dict[str, Any]]


class Refused(Exception):
    """A file that cannot be graded: its status, and why."""


@dataclass(frozen=True)
class Job:
    """What the submissions of one call share: homework, what confines them, what they may use."""

    made: Assignment
    where: tuple[str, str]
    limits: Limits
    interrupted: Event


def grade(
    build: Path, submissions: Path, homework: str, limits: Limits = USUAL, unconfined: bool = False
) -> Path:
    """Grade every file under ``submissions``, a notebook for each student; return the table of all
    that was graded of the homework, in ``build/grades``. What has a result is not run again."""
    files = [path for path in sorted(submissions.rglob("*"))
             if (path.is_file() or path.is_symlink())
             and not HIDDEN.search(path.relative_to(submissions).as_posix())]  # fmt: skip
    if not files:
        raise IclError(f"{submissions} holds no file. Name the folder with the submissions.")
    names = {path: os.fsencode(path.relative_to(submissions)).decode("utf-8", "backslashreplace")
             for path in files}  # fmt: skip
    notebooks = (name for path, name in names.items() if path.suffix.lower() in SUFFIXES)
    for student, count in Counter(map(reports.student, notebooks)).items():
        if count > ATTEMPTS:
            raise IclError(
                f"{submissions} has {count} notebooks of one student, {student}. If it is a "
                f"section, grade it alone: SUBMISSIONS={submissions / student}"
            )
    (made,) = assignments.make(build, homework)
    place = build / "grades" / made.name
    place.mkdir(parents=True, exist_ok=True)
    with FileLock(place / "being_graded.lock", timeout=0):  # else an error that names it
        reports.entered(place, made.points)  # a mistake in it is said before all the work
        stores = dict[Path, Path]()
        for path in files:  # of what, and how it is graded
            about = f"{path.suffix} {made.digest} {limits} {unconfined}".encode("utf-8", "replace")
            key = hashlib.sha256(about)
            with suppress(OSError):  # what may not be read is told as a crash
                key.update(b"" if path.is_symlink() else path.read_bytes())
            stores[path] = place / ".graded" / f"{key.hexdigest()}.json"
        done = {path: read_json(store) for path, store in stores.items() if store.is_file()}
        if left := [path for path in files if path not in done]:
            where = (UNCONFINED, "") if unconfined else confine.sandbox()
            job = Job(made, where, limits, Event())

            def graded(path: Path) -> dict[str, Any]:
                result = _grade(path, job)
                if result["status"] != "crashed" and not job.interrupted.is_set():
                    reports.save(stores[path], json.dumps(result))
                return result

            with ThreadPoolExecutor(JOBS) as pool:
                try:
                    results = bar(pool.map(graded, left), f"grading {made.name}", len(left))
                    done |= dict(zip(left, results, strict=True))
                except BaseException:
                    job.interrupted.set()
                    raise
        grades = [done[path] | {"name": names[path]} for path in files]
        return reports.write(place, submissions, made, grades)


def _read(path: Path, homework: str) -> Cells:
    """Return the cells of a notebook of a homework, the source of each as one text."""
    if path.is_symlink() or path.suffix.lower() not in SUFFIXES:
        raise Refused("not a notebook", f"Only .ipynb is graded, and no link to it. {SAVE}")
    data = path.read_bytes()
    try:
        text = json.dumps(json.loads(_unpacked(data).decode("utf-8-sig")), ensure_ascii=False)
        # Half a character, which nothing can write, is now a "?".
        notebook = json.loads(text.encode("utf-8", "replace"))
        about = notebook.get("metadata", {}).get("otter", {}).get("assignment_name") or homework
        cells = [{"source": "".join(each["source"]), "code": each["cell_type"] == "code"}
                 for each in notebook["cells"]]  # fmt: skip
    except Exception:  # whatever a file may hold
        begins = data[:30].decode("utf-8", "replace")
        why = f"It is no notebook, or breaks off; it begins with {begins!r}. {SAVE}"
        raise Refused("broken", why) from None
    if about != homework:
        raise Refused("another homework", f"it is {about}")
    return cells


def _unpacked(data: bytes) -> bytes:
    """Return a notebook; of a zip, also of one in a zip, the only notebook in it."""
    if not data.startswith(b"PK\3\4"):
        return data
    with ZipFile(io.BytesIO(data)) as packed:
        (inner,) = (each for each in packed.infolist() if not HIDDEN.search(each.filename)
                    and each.filename.lower().endswith(SUFFIXES))  # fmt: skip
        if inner.file_size > LARGEST:
            raise ValueError("too large")
        return _unpacked(packed.read(inner))


def _grade(path: Path, job: Job) -> dict[str, Any]:
    """Grade one submission; whatever is wrong with it, or with its grading, is in the result.

    The status is ``graded``, ``stopped: time`` (or ``memory``), ``crashed``, ``not a notebook``,
    ``broken`` or ``another homework``. Where nothing could be graded there are no scores. Notes say
    what was wrong, by question; "" is the whole of it.
    """
    blank = {"scores": {}, "written": "", "signed": "", "confined": job.where[0]}
    try:
        return blank | _judge_notebook(_read(path, job.made.name), job)
    except Refused as refused:
        status, why = refused.args
    except Exception as error:  # the others are graded all the same
        status, why = "crashed", f"grading failed: {error!r}"[:300]
    return blank | {"status": status, "notes": {"": why}}


def _judge_notebook(cells: Cells, job: Job) -> dict[str, Any]:
    student, questions = read_json(job.made.student)["cells"], checks.questions(job.made.name)
    code, written, notes = _sorted(cells, student, questions)
    carried = next("".join(each["source"]) for each in student if each["id"] == "checks")
    facts, status = _run({"cells": code, "checks": carried}, job)
    answers, errors, signed = dict[str, dict[str, Any]](), dict[str, str](), ""
    for fact in facts:
        step, values = str(fact.get("step"))[:99], fact.get("values")
        signed = str(fact.get("signed", signed))[:200]
        if "error" in fact and step in {"", *code, *questions}:
            errors[step] = str(fact["error"])[:300]  # "" is that of a cell that came through
        elif isinstance(values, dict):
            answers.setdefault(step, {}).update(values)
    scores = dict[str, float]()
    for name, parts in questions.items() if status == "graded" else ():
        of, error = job.made.points[name], errors.pop(name, "")
        scores[name], mistake = _judge(parts, answers.get(name, {}), of, signed)
        if scores[name] < of:
            notes[name] = "; ".join(filter(None, [error or mistake, notes.get(name)]))
    if not scores or any(scores[name] < job.made.points[name] for name in scores):
        said = [f"{step}: {text}" if step else text for step, text in errors.items() if text]
        notes = {"": "; ".join(said)[:2000]} | notes if said else notes
    return {"status": status, "scores": scores, "notes": notes, "written": written,
            "signed": signed}  # fmt: skip


def _sorted(
    cells: Cells, student: Cells, questions: dict[str, checks.Question]
) -> tuple[dict[str, str], str, dict[str, str]]:
    """Return the cells to be run, by name; what the student wrote for a person; notes. A cell that
    was turned into text is run if no other has its answer. Written is what stands in no handout, in
    cells of any kind that hold no Python."""
    asked = {part.name: name for name, parts in questions.items() for part in parts}
    handout = {line.strip() for c in student for line in "".join(c["source"]).splitlines()}
    there = {name for cell in cells if cell["code"] for name in BOUND.findall(cell["source"])}
    code, written, notes = dict[str, str](), list[str](), dict[str, str]()
    for cell in cells:
        text = FENCE.sub("", cell["source"])
        lost = set() if cell["code"] else {*BOUND.findall(text)} & (asked.keys() - there)
        if cell["code"] or lost:
            code[f"code cell {len(code) + 1}"] = INSTALLATION.sub(r"\1pass", text)
            notes |= {asked[name]: f"`{name}` stands in a cell of text" for name in lost}
        if not (_is_code(text) if cell["code"] else lost):
            written += [line for line in text.splitlines() if line.strip() not in handout]
    return code, "\n".join(written)[:10_000], notes


def _is_code(text: str) -> bool:
    """Whether a cell of code holds statements, and not a paragraph."""
    try:
        body = ast.parse(COMMAND.sub(r"\1pass", text)).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "def " in text
    return not all(isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant) for x in body)


def _run(plan: dict[str, Any], job: Job) -> tuple[list[dict[str, Any]], str]:
    """Run a submission until it comes through, each time without the step that ended it; return
    what it told, with what was wrong with these steps, and the status."""
    limits, facts, skip, end = job.limits, list[dict[str, Any]](), list[str](), confine.End()
    until, steps = time.monotonic() + PATIENCE * limits.seconds, plan["cells"] | job.made.points
    why = {"step": f"it ran longer than {limits.step:g} s",
           "memory": f"it used more than {limits.memory:g} GB of memory",
           "": "it ended the process that ran it"}  # fmt: skip
    for _ in range(RUNS):
        left = max(1.0, (until - time.monotonic()) / PATIENCE)
        bound = replace(limits, seconds=left)
        end = confine.run(job.where, plan | {"skip": skip}, bound, job.interrupted)
        facts += end.facts
        if any("done" in fact for fact in end.facts):
            return facts, "graded"
        begun = [each for fact in end.facts if (each := str(fact.get("begun"))) in steps]
        if end.stopped not in why or not begun or begun[-1] in skip:
            break
        skip.append(begun[-1])
        facts.append({"step": begun[-1], "error": why[end.stopped]})
    last = (end.text.strip().splitlines() or ["it ended without a result"])[-1]
    late = f"it ran longer than {limits.seconds:g} s"
    facts.append({"step": "", "error": late if end.stopped == "time" else last})
    return facts, f"stopped: {end.stopped}" if end.stopped else "crashed"


def _judge(
    parts: checks.Question, values: dict[str, Any], of: float, student: str
) -> tuple[float, str]:
    """Return the points of a question, half for each kind of check, and the first mistake."""
    score, first = 0.0, ""
    for seeds in (checks.PUBLIC, checks.HIDDEN):
        try:
            for seed in seeds:
                for part, value in zip(parts, values[str(seed)], strict=True):
                    if "mistake" in value:
                        raise checks.Mistake(str(value["mistake"])[:300])
                    with JUDGING:
                        part.judge(value["value"], seed, student)
            score += of / 2
        except checks.Mistake as mistake:
            first = first or str(mistake)
        except Exception:  # it is not what the worker writes
            first = first or "its answers were not written down"
    return score, first

"""Grade a folder of submissions into tables, without a server.

Each submission runs in a sandbox (``confine``, ``worker``), which knows no truth; what its answers
give is compared here, out of its reach. A step that loops, ends the process or eats memory costs
its own question: the submission is run again without it. What was graded is stored at once, and
stays until the submission, the homework or the bounds change.
"""

import ast
import hashlib
import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Event, Lock
from typing import Any

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
RUNS = 10  # of one submission, each without a step that ended the last
INSTALLATION = re.compile(r"^([ \t]*)[!%].*\binstall\b.*$", re.MULTILINE)
COMMAND = re.compile(r"^([ \t]*)([\w, ]+=\s*)?[!%].*$", re.MULTILINE)  # of IPython


@dataclass(frozen=True)
class Grade:
    """What one submission got; ``notes`` say what was wrong, by question, or why nothing is graded.

    The status is ``graded``, ``stopped: time`` (or ``memory``), ``crashed``, ``not a notebook``,
    ``broken`` or ``another homework``. Where nothing could be graded there are no scores.
    """

    name: str  # the file, relative to the folder of submissions
    status: str
    scores: dict[str, float] = field(default_factory=dict)  # by question
    notes: dict[str, str] = field(default_factory=dict)  # by question; "" is the whole of it
    written: str = ""  # what a person grades
    confined: str = ""  # by what
    signed: str = ""  # the name in the first cell
    digest: str = ""  # of the file


class Refused(Exception):
    """A file that cannot be graded: its status, and why."""


@dataclass(frozen=True)
class Job:
    """What the submissions of one call share: homework, what students got, how it is run."""

    made: Assignment
    student: list[dict[str, Any]]  # cells
    where: tuple[str, str]
    limits: Limits
    interrupted: Event


def grade(
    build: Path,
    submissions: Path,
    homework: str = "",
    limits: Limits = Limits(),  # noqa: B008 - it cannot be changed
    jobs: int = 2,
    unconfined: bool = False,
) -> Path:
    """Grade every file under ``submissions``, a notebook for each student, ``jobs`` at a time, as
    the homework that most of them say they are, unless it is named; return the table of all that
    was graded of it, in ``build/grades``. What has no result yet, or failed, is graded."""
    files = _files(submissions)
    (made,) = assignments.make(build, homework or _homework_of(files))
    place = build / "grades" / made.name
    place.mkdir(parents=True, exist_ok=True)
    with FileLock(place / "being_graded.lock", timeout=0):  # else an error that names it
        reports.entered(place, made.points)  # a mistake in it is said before all the work
        key = made.digest, limits, unconfined
        stores = {path: place / ".graded" / f"{_digest(path, *key)}.json" for path in files}
        done = {path for path, store in stores.items() if store.is_file()}
        left = [p for p in files if p not in done or read_json(stores[p])["status"] == "crashed"]
        if left:
            where = (UNCONFINED, "") if unconfined else confine.sandbox()
            job = Job(made, read_json(made.student)["cells"], where, limits, Event())
            _grade_all({path: stores[path] for path in left}, job, jobs)
        grades = [
            replace(Grade(**read_json(store)), name=_name(path, submissions))
            for path, store in stores.items()
        ]
        return reports.write(place, submissions, made, grades)


def _grade_all(stores: dict[Path, Path], job: Job, jobs: int) -> None:
    """Grade files; each result is stored at once."""

    def store(path: Path) -> None:
        result = _grade(path, job)
        if not job.interrupted.is_set():
            reports.save(stores[path], json.dumps(asdict(result)))

    with ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(store, path) for path in stores]
        try:
            for ready in bar(as_completed(waiting), f"grading {job.made.name}", len(waiting)):
                ready.result()
        except BaseException:
            job.interrupted.set()
            pool.shutdown(cancel_futures=True)
            raise


def _files(folder: Path) -> list[Path]:
    """Return the files that were handed in, without what systems add."""
    if not folder.is_dir():
        raise IclError(f"There is no folder {folder}. Name the one with the submissions.")
    files = []
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith((".", "__")) for part in path.relative_to(folder).parts)
        files += [path] if (path.is_file() or path.is_symlink()) and not hidden else []
    if not files:
        raise IclError(f"{folder} is empty: put one notebook per student into it.")
    return files


def _name(path: Path, folder: Path) -> str:
    """Return a file's name as text, also where it is not UTF-8."""
    name = path.relative_to(folder).as_posix()
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _digest(path: Path, *rest: object) -> str:
    """Return a digest of a file, of how it is graded and of what else is named."""
    code = [Path(__file__).with_name(f"{name}.py") for name in ("submissions", "confine", "worker")]
    whole = hashlib.sha256(f"{path.suffix} {rest}".encode("utf-8", "replace"))
    for each in (path, *code):
        whole.update(each.read_bytes() if each.exists() else b"")
    return whole.hexdigest()


def _homework_of(files: list[Path]) -> str:
    """Return the homework that most of the files say they are."""
    names = []
    for path in files:
        with suppress(Refused):
            names.append(_homework(_read(path)))
    if not any(names):
        raise IclError("No file is a notebook that says which homework it is. Name it: HW=hw01.")
    return max(filter(None, names), key=names.count)


def _homework(notebook: dict[str, Any]) -> str:
    """Return what otter has noted in a notebook, or nothing."""
    try:
        return str(notebook["metadata"]["otter"]["assignment_name"])
    except (KeyError, TypeError):
        return ""


def _read(path: Path) -> dict[str, Any]:
    """Return the notebook in a file, the source of each cell as one text."""
    if path.is_symlink():
        raise Refused("broken", f"The file is a link to another one. {SAVE}")
    if path.suffix.lower() != ".ipynb":
        raise Refused("not a notebook", f"Only .ipynb is graded. {SAVE}")
    data = path.read_bytes()
    try:
        text = json.dumps(json.loads(data.decode("utf-8-sig")), ensure_ascii=False)
        # Half a character, which nothing can write, is now a "?".
        notebook: dict[str, Any] = json.loads(text.encode("utf-8", "replace"))
        for cell in notebook["cells"]:
            cell["source"] = "".join(cell["source"])
            cell["code"] = cell["cell_type"] == "code"
        return notebook
    except (ValueError, RecursionError, TypeError, KeyError):
        begins = data[:30].decode("utf-8", "replace")
        why = f"It is no notebook, or breaks off; it begins with {begins!r}. {SAVE}"
        raise Refused("broken", why) from None


def _grade(path: Path, job: Job) -> Grade:
    """Grade one submission; whatever is wrong with it, or with its grading, is in the result."""
    try:
        notebook = _read(path)
        if _homework(notebook) not in ("", job.made.name):
            raise Refused("another homework", f"it is {_homework(notebook)}")
        result = _judge_notebook(notebook["cells"], job)
    except Refused as refused:
        status, why = refused.args
        result = Grade("", status, notes={"": why})
    except Exception as error:  # the others are graded all the same
        result = Grade("", "crashed", notes={"": f"grading failed: {error!r}"[:300]})
    return replace(result, confined=job.where[0], digest=_digest(path)[:16])


def _judge_notebook(cells: list[dict[str, Any]], job: Job) -> Grade:
    code, written, notes = _sorted(cells, job)
    carried = next("".join(each["source"]) for each in job.student if each["id"] == "checks")
    facts, status = _run({"cells": code, "checks": carried}, job)
    answers, errors, signed = dict[str, dict[str, Any]](), dict[str, str](), ""
    for fact in facts:
        step, values = str(fact.get("step"))[:99], fact.get("values")
        signed = str(fact.get("signed", signed))[:200]
        if "error" in fact:
            errors[step] = str(fact["error"])[:300]
        elif isinstance(values, dict):
            answers.setdefault(step, {}).update(values)
    scores = dict[str, float]()
    for name, parts in checks.questions(job.made.name).items() if status == "graded" else ():
        of, error = job.made.points[name], errors.pop(name, "")
        scores[name], mistake = _judge(parts, answers.get(name, {}), of, signed)
        if scores[name] < of:
            notes[name] = "; ".join(filter(None, [error or mistake, notes.get(name)]))
        for part in parts:  # what is missing is said once
            missing = f"NameError: name '{part.name}' is not defined"
            errors = {step: text for step, text in errors.items() if text != missing}
    lost = not scores or any(scores[name] < job.made.points[name] for name in scores)
    said = "; ".join(f"{step}: {text}" if step else text for step, text in errors.items())
    notes = {"": said} | notes if said and lost else notes
    return Grade("", status, scores, notes, written, signed=signed)


def _sorted(cells: list[dict[str, Any]], job: Job) -> tuple[dict[str, str], str, dict[str, str]]:
    """Return the cells to be run, by name; what the student wrote for a person; notes.

    A cell that was turned into text is run if no other has its answer. Written is what stands in no
    handout, in cells of any kind that hold no Python.
    """
    asked = {p.name: name for name, parts in checks.questions(job.made.name).items() for p in parts}
    handout = {line.strip() for c in job.student for line in "".join(c["source"]).splitlines()}
    texts = [re.sub(r"^```\w*\s*$", "", each["source"], flags=re.MULTILINE) for each in cells]
    there = {name for cell in cells if cell["code"] for name in _names(cell["source"]) or ()}
    code, written, notes = dict[str, str](), list[str](), dict[str, str]()
    for cell, text in zip(cells, texts, strict=True):
        names = _names(text)
        lost = set[str]() if cell["code"] else (names or set()) & (asked.keys() - there)
        if cell["code"] or lost:
            code[f"code cell {len(code) + 1}"] = INSTALLATION.sub(r"\1pass", text)
            notes |= {asked[name]: f"`{name}` stands in a cell of text" for name in lost}
        if names is None or not (cell["code"] or lost):
            written += [line for line in text.splitlines() if line.strip() not in handout]
    return code, "\n".join(written)[:10_000], notes


def _names(text: str) -> set[str] | None:
    """Return the names that the statements of a cell bind, or None of one that holds none."""
    try:
        body = ast.parse(COMMAND.sub(r"\1pass", text)).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set() if "def " in text else None
    nodes = [node for each in body for node in ast.walk(each)]
    names = {x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
    names |= {x.name for x in nodes if isinstance(x, ast.FunctionDef)}
    texts = [x for x in body if isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant)]
    return names if len(body) > len(texts) else None


def _run(plan: dict[str, Any], job: Job) -> tuple[list[dict[str, Any]], str]:
    """Run a submission until it comes through, each time without the step that ended it; return
    what it told, with what was wrong with these steps, and the status."""
    limits, facts, skip, end = job.limits, list[dict[str, Any]](), list[str](), confine.End()
    until = time.monotonic() + PATIENCE * limits.seconds
    for _ in range(RUNS):
        left = max(1.0, (until - time.monotonic()) / PATIENCE)
        bound = replace(limits, seconds=left)
        end = confine.run(job.where, plan | {"skip": skip}, bound, job.interrupted)
        facts += end.facts
        if any("done" in fact for fact in end.facts):
            return facts, "graded"
        step = [str(fact["begun"])[:99] for fact in end.facts if "begun" in fact][-1:]
        if end.stopped == "time" or job.interrupted.is_set() or not step or step[0] in skip:
            break
        skip += step
        why = {"step": f"it ran longer than {limits.step:g} s",
               "memory": f"it used more than {limits.memory:g} GB of memory"}  # fmt: skip
        error = why.get(end.stopped, "it ended the process that ran it")
        facts.append({"step": step[0], "error": error})
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

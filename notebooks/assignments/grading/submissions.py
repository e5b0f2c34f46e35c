"""Grade a folder of submissions into tables, without a server.

Each submission runs in a sandbox (``confine``, ``worker``), which knows no truth; what its answers
give is compared here, out of its reach. A step that loops, ends the process or eats memory costs
its own question: the submission is run again without it. What was graded is stored at once, and
stays until the submission, the homework or the bounds change.
"""

import ast
import hashlib
import itertools
import json
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Event, Lock
from typing import Any

import checks
from checks import HIDDEN, PUBLIC, Mistake
from filelock import FileLock, Timeout
from iclutils.errors import IclError
from iclutils.files import read_json
from iclutils.progress import bar

from . import assignments, confine, reports
from .assignments import Assignment
from .confine import PATIENCE, UNCONFINED, End, Limits

SAVE = "Open it in Jupyter, save it, and hand in the file that ends in .ipynb."
NO_NOTEBOOKS = {  # how they begin, and what helps
    "<!doctype": f"The file is a web page. Download the notebook itself: {SAVE}",
    "<html": f"The file is a web page. Download the notebook itself: {SAVE}",
    "pk\x03\x04": "The file is an archive. Unpack it, and hand in the .ipynb file in it.",
    "%pdf": f"The file is a PDF. {SAVE}",
}
LONGEST = 20 * 2**20  # bytes of a notebook
JUDGING = Lock()  # what is right for one student is worked out by one thread
RUNS = 10  # of one submission, each without a step that ended the last
INSTALLATION = re.compile(
    r"^([ \t]*)[!%][ \t]*(?:\S*python\S*[ \t]+-m[ \t]+)?(?:pip3?|conda|mamba|uv[ \t]+pip)[ \t]+"
    r"install\b.*$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Grade:
    """What one submission got; ``notes`` say what was wrong, by question, or why nothing is graded.

    The status is ``graded``, ``stopped: time`` (or ``memory``, ``processes``, ``output``),
    ``crashed``, ``not a notebook``, ``broken`` or ``another homework``. Where nothing could be
    graded there are no scores.
    """

    name: str  # the file, relative to the folder of submissions
    status: str
    scores: dict[str, float] = field(default_factory=dict)  # by question
    notes: dict[str, str] = field(default_factory=dict)  # by question; "" is the whole of it
    written: dict[str, str] = field(default_factory=dict)  # what a person grades, by question
    confined: str = ""  # by what
    signed: str = ""  # the name in the first cell
    digest: str = ""  # of the file

    @property
    def message(self) -> str:
        """All notes in a line."""
        return "; ".join(f"{name}: {text}" if name else text for name, text in self.notes.items())


@dataclass(frozen=True)
class Job:
    """What the submissions of one call share: homework, what students got, how it is run."""

    made: Assignment
    asked: dict[str, checks.Question]
    student: dict[str, Any]
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
    the homework that they say they are unless it is named; return the table, in
    ``build/grades/HOMEWORK/FOLDER``."""
    if not submissions.is_dir():
        raise IclError(f"There is no folder {submissions}. Name the one with the submissions.")
    files = sorted(_files(submissions))
    if not files:
        raise IclError(f"{submissions} is empty: put one notebook per student into it.")
    (made,) = assignments.make(build, homework or _only_homework(files))
    place = build / "grades" / made.name
    place.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(place / ".lock", timeout=0):
            reports.entered(place, made.points)  # a mistake in it is said before all the work
            stores = {
                p: place / ".graded" / _key(p, made.digest, limits, unconfined) for p in files
            }
            _grade_new(stores, made, limits, jobs, unconfined)
            stored = {path: Grade(**read_json(store)) for path, store in stores.items()}
            grades = [replace(each, name=_name(path, submissions)) for path, each in stored.items()]
            return reports.write(place, submissions, made, grades)
    except Timeout:
        raise IclError(
            f"{made.name} is being graded in {place}: wait until it ends. Grade one homework with "
            "one command at a time."
        ) from None


def _grade_new(
    stores: dict[Path, Path], made: Assignment, limits: Limits, jobs: int, unconfined: bool
) -> None:
    """Grade what has no result stored yet, or failed; each result is stored at once."""
    done = {path for path, store in stores.items() if store.is_file()}
    left = [p for p in stores if p not in done or read_json(stores[p])["status"] == "crashed"]
    if not left:
        return
    where = (UNCONFINED, "") if unconfined else confine.sandbox()
    asked = checks.questions(made.name)
    for name, seed in itertools.product(asked, (*PUBLIC, *HIDDEN)):
        checks.expected(made.name, name, seed)  # made once, before there are threads
    job = Job(made, asked, read_json(made.student), where, limits, Event())

    def store(path: Path) -> None:
        result = _grade(path, job)
        if not job.interrupted.is_set():
            reports.save(stores[path], json.dumps(asdict(result), ensure_ascii=False))

    with ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(store, path) for path in left]
        try:
            for ready in bar(as_completed(waiting), f"grading {made.name}", len(waiting)):
                ready.result()
        except BaseException:
            job.interrupted.set()
            pool.shutdown(cancel_futures=True)
            raise


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        hidden = any(part.startswith((".", "__")) for part in path.relative_to(folder).parts)
        if (path.is_file() or path.is_symlink()) and not hidden:
            yield path


def _name(path: Path, folder: Path) -> str:
    """The file relative to the folder, as text also where the system's is not UTF-8."""
    name = os.fsencode(path.relative_to(folder).as_posix())
    try:
        return name.decode()
    except UnicodeDecodeError:
        return name.decode("latin-1")


def _key(path: Path, *rest: object) -> str:
    code = [Path(__file__).with_name(f"{name}.py") for name in ("submissions", "confine", "worker")]
    whole = hashlib.sha256(f"{path.suffix} {rest}".encode("utf-8", "replace"))
    for each in (path, *code):
        whole.update(each.read_bytes() if each.exists() else b"")
    return f"{whole.hexdigest()}.json"


def _only_homework(files: list[Path]) -> str:
    names = {_homework(_read(path)[0]) for path in files} - {""}
    if len(names) != 1:
        raise IclError(
            f"The submissions are of {', '.join(sorted(names)) or 'no homework'}. Say which one is "
            "to be graded: HW=hw01."
        )
    return names.pop()


def _homework(notebook: dict[str, Any]) -> str:
    about = notebook.get("metadata")
    otter = about.get("otter") if isinstance(about, dict) else None
    return str(otter.get("assignment_name", "")) if isinstance(otter, dict) else ""


def _read(path: Path) -> tuple[dict[str, Any], Grade | None]:
    """The notebook in a file, or the grade that says why there is none."""
    if path.is_symlink():
        return _none("The file is a link to another one. Hand in the notebook itself.")
    if path.stat().st_size > LONGEST:
        return _none("The file is larger than 20 MB. Clear the outputs of all cells, and save.")
    data = path.read_bytes()
    begins = data[:200].decode("utf-8", errors="replace").lstrip("\ufeff \t\r\n").lower()
    if not begins:
        return _none("The file is empty: the upload did not finish. Hand the notebook in again.")
    for start, why in NO_NOTEBOOKS.items():
        if begins.startswith(start):
            return _none(why, "not a notebook")
    if path.suffix.lower() != ".ipynb":
        return _none(f"Only .ipynb is graded. {SAVE}", "not a notebook")
    try:
        notebook = json.loads(data.decode("utf-8-sig"))
        whole = json.dumps(notebook, ensure_ascii=False).encode("utf-8", "replace")
        notebook = json.loads(whole)  # half a character, which nothing can write, is now a "?"
    except (ValueError, RecursionError):
        cut = "The file breaks off: it was not saved or sent whole"
        return _none(f"{cut if begins.startswith('{') else 'This is no notebook'}. {SAVE}")
    try:
        for cell in notebook["cells"]:
            "".join(cell["source"]) + cell["cell_type"]
    except (TypeError, KeyError):
        return _none(f"The file is JSON, but holds no cells of a notebook. {SAVE}")
    return notebook, None


def _none(why: str, status: str = "broken") -> tuple[dict[str, Any], Grade]:
    return {}, Grade("", status, notes={"": why})


def _grade(path: Path, job: Job) -> Grade:
    """Grade one submission; whatever is wrong with it, or with its grading, is in the result."""
    try:
        notebook, fault = _read(path)
        other = _homework(notebook)
        if fault is None and other not in ("", job.made.name):
            fault = Grade("", "another homework", notes={"": f"it is {other}"})
        result = fault or _judge_notebook(notebook, job)
        return replace(result, confined=job.where[0], digest=_key(path)[:16])
    except Exception as error:  # the others are graded all the same
        return Grade("", "crashed", notes={"": f"grading failed: {error!r}"[:300]})


def _judge_notebook(notebook: dict[str, Any], job: Job) -> Grade:
    texts = [("".join(c["source"]), c["cell_type"]) for c in notebook["cells"]]
    code, notes = _code(texts, job)
    cells = [INSTALLATION.sub(r"\1pass", text) for text in code]
    carried = next("".join(c["source"]) for c in job.student["cells"] if c["id"] == "checks")
    skip, end = _run({"cells": cells, "checks": carried}, job)
    written = _written(texts, job)
    if not end.values("done"):
        last = (end.text.strip().splitlines() or ["it ended without a result"])[-1]
        status = f"stopped: {end.stopped}" if end.stopped else "crashed"
        return Grade("", status, notes={"": (skip.get("") or last)[:300]}, written=written)
    told = [each for each in end.facts if {"cell", "error"} <= each.keys()]
    errors = {f"cell {each['cell']}"[:99]: str(each["error"])[:300] for each in told} | skip
    answers = {str(each["question"]): each for each in end.facts if "question" in each}
    scores, student = {}, str((end.values("student") or [""])[-1])[:200]
    for question in job.asked:
        values = skip.get(question) or answers.get(question, {}).get("values")
        scores[question], note = _judge(question, values, student, job)
        if scores[question] < job.made.points[question]:
            note = _own_error(question, job, code, errors, note) or note
            notes[question] = "; ".join(filter(None, [note, notes.get(question)]))
    return Grade("", "graded", scores, notes, written, signed=student)


def _code(texts: list[tuple[str, str]], job: Job) -> tuple[list[str], dict[str, str]]:
    """The cells to be run: also one that was turned into text, where no other has its answer."""
    asked = {part.name: name for name, parts in job.asked.items() for part in parts}
    there = {name for text, kind in texts if kind == "code" for name in _defines(text) or ()}
    cells, notes = list[str](), dict[str, str]()
    for text, kind in texts:
        bare = re.sub(r"^```\w*\s*$", "", text, flags=re.MULTILINE)
        if kind == "code":
            cells.append(text)
        elif lost := (_defines(bare) or set()) & (asked.keys() - there):
            cells.append(bare)
            notes |= {asked[name]: f"`{name}` stands in a {kind} cell" for name in lost}
    return cells, notes


def _defines(text: str) -> set[str] | None:
    """The names that the statements of a cell define, or None of one that holds none."""
    plain = re.sub(r"^([ \t]*)([\w, ]+=\s*)?[!%].*$", r"\1pass", text, flags=re.MULTILINE)
    try:
        body = ast.parse(plain).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    assigned = (t for node in body if isinstance(node, ast.Assign) for t in node.targets)
    names = {x.id for target in assigned for x in ast.walk(target) if isinstance(x, ast.Name)}
    names |= {node.name for node in body if isinstance(node, ast.FunctionDef)}
    texts = [x for x in body if isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant)]
    return names if len(body) > len(texts) else None


def _run(plan: dict[str, Any], job: Job) -> tuple[dict[str, str], End]:
    """Run a submission until it comes through, each time without the step that ended it; return
    the steps left out, with reasons (by "" that of the end, if a bound was it), and the end."""
    limits, left, skip = job.limits, job.limits.seconds, dict[str, str]()
    bounds = {
        "time": f"it ran longer than {limits.seconds:g} s",
        "memory": f"it used more than {limits.memory:g} GB of memory",
        "processes": f"it started more than {limits.processes} processes",
        "output": "it told more than 32 MB",
        "interrupted": "grading was interrupted",
    }
    for _ in range(RUNS):
        begun = time.monotonic()
        bound = replace(limits, seconds=left)
        end = confine.run(job.where, plan | {"skip": list(skip)}, bound, job.interrupted)
        seconds = [each for each in end.values("used") if isinstance(each, float)]
        left = max(1.0, left - max([(time.monotonic() - begun) / PATIENCE, *seconds[-1:]]))
        step = str(end.values("step")[-1])[:99] if end.values("step") else ""
        reason = bounds.get(end.stopped, "")
        if end.values("done") or end.stopped in ("time", "interrupted") or not step or step in skip:
            return skip | {"": reason}, end
        ended = str(end.values("ended")[-1])[:99] if end.values("ended") else ""
        skip[step] = reason or ended or "it ended the process that ran it"
    return skip, end


def _judge(question: str, values: Any, student: str, job: Job) -> tuple[float, str]:
    """The points of a question, half for each kind of check, and the first mistake."""
    if not isinstance(values, dict):
        return 0.0, values if isinstance(values, str) else "its answers were not written down"
    score, first = 0.0, ""
    for seeds in (PUBLIC, HIDDEN):
        try:
            for seed in seeds:
                with JUDGING:
                    right = checks.expected(job.made.name, question, seed, student)
                parts = zip(values[str(seed)], job.asked[question], right, strict=True)
                for value, part, expected in parts:
                    if "mistake" in value:
                        raise Mistake(str(value["mistake"])[:300])
                    part.judge(value["value"], expected, student)
            score += job.made.points[question] / 2
        except Mistake as mistake:
            first = first or str(mistake)
        except Exception:  # it is not what the worker writes
            first = first or "its answers cannot be read"
    return score, first


def _own_error(question: str, job: Job, code: list[str], errors: dict[str, str], note: str) -> str:
    """What the cell raised that should have written the answer which is missing."""
    for part in job.asked[question]:
        if f"`{part.name}` is missing" in note:
            defines = rf"(?m)^[ \t]*(?:async )?(?:def {part.name}\b|{part.name}\s*(?:=|:))"
            cells = [i for i, text in enumerate(code) if re.search(defines, text)]
            if not cells:
                return f"`{part.name}` is missing: no cell defines it."
            if failed := [i for i in cells if f"cell {i}" in errors]:
                return f"code cell {failed[0] + 1}: {errors[f'cell {failed[0]}']}"
    return ""


def _written(texts: list[tuple[str, str]], job: Job) -> dict[str, str]:
    """What the student wrote for each question that a person grades: what stands below its heading,
    in cells of any kind; if that is nothing, all that is text and the student's own."""
    made = job.made
    handout = {s.strip() for c in job.student["cells"] for s in "".join(c["source"]).splitlines()}
    asked = {part.name for parts in job.asked.values() for part in parts}
    below, elsewhere, at = dict.fromkeys(made.by_hand, ""), "", ""
    for text, kind in texts:
        lines = text.splitlines()
        at = next((name for name, title in made.headings.items() if title in lines), at)
        own = "\n".join(s for s in lines if not s.strip() or s.strip() not in handout).strip()
        names = _defines(text)
        if own and at in below:
            below[at] += f"{own}\n\n"
        elif own and (names is None or (kind != "code" and not names & asked)):
            elsewhere += f"{own}\n\n"
    return {name: (text or elsewhere).strip()[:10_000] for name, text in below.items()}

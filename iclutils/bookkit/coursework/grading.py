"""Grade a folder of submissions into a CSV, without a server.

Each submission is graded by ``otter run`` in processes, a folder and bounds of its own
(``confine``), so that one that loops, eats memory or reaches for the network is stopped and
reported, and the others are graded. What has been graded is kept until the submission, the
homework or the bounds change.
"""

from __future__ import annotations

import ast
import csv
import hashlib
import io
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

from ...errors import IclError
from ...files import read_json, write_json, write_text
from ...progress import bar
from . import assignments, confine
from .confine import Limits

# What an honest answer has no need of: whoever writes it may be after the tests themselves.
SUSPECT = re.compile(
    r"sys\.modules|\botter\b|\bctypes\b|ICLUTILS_GRADED|__builtins__|\bsetattr\b|"
    r"coursework\.(?!check\b)\w+|coursework\s+import"
)
LONGEST = 20 * 2**20  # bytes of a notebook


@dataclass(frozen=True)
class Grade:
    """What one submission got; ``message`` says what was wrong, or why nothing was graded.

    The status is ``graded``, ``graded: look at it``, ``stopped: time`` (or ``memory``,
    ``network``, ``processes``), ``crashed``, ``not a notebook``, ``broken`` or
    ``another homework``.
    """

    name: str  # the file, relative to the folder of submissions
    status: str
    scores: dict[str, float] = field(default_factory=dict)  # by question; none unless graded
    message: str = ""


def grade(
    root: Path,
    build: Path,
    submissions: Path,
    homework: str = "",
    limits: Limits = Limits(),  # noqa: B008 - it cannot be changed
    jobs: int = 2,
    force: bool = False,
) -> Path:
    """Grade every file under ``submissions``, a notebook for each student, ``jobs`` at a time.

    Returns the CSV, ``build/grades/NAME.csv``. The homework is the one that the submissions say
    they are, unless it is named. ``force`` grades again what has not changed.
    """
    if not submissions.is_dir():
        raise IclError(f"There is no folder {submissions}. Name the one with the submissions.")
    files = sorted(_files(submissions))
    if not files:
        raise IclError(f"{submissions} is empty: put one notebook per student into it.")
    if jobs < 1 or min(limits.seconds, limits.memory, limits.processes) <= 0:
        raise IclError("The number of jobs and all bounds must be positive.")
    (made,) = assignments.make(root, build, homework or _only_homework(files))
    record = build / "grades" / f"{made.name}.json"
    known = read_json(record) if record.is_file() and not force else {}
    keys = {path: _key(path, made, limits) for path in files}
    named = {path: path.relative_to(submissions).as_posix() for path in files}
    done = {p: Grade(**known[k] | {"name": named[p]}) for p, k in keys.items() if k in known}
    table = build / "grades" / f"{made.name}.csv"

    def keep() -> None:
        write_json(record, {keys[path]: asdict(each) for path, each in done.items()})
        write_text(table, _csv([done[path] for path in files if path in done], made.points))

    interrupted = Event()
    with ThreadPoolExecutor(jobs) as pool:
        waiting = {
            pool.submit(_graded, path, named[path], made, limits, interrupted): path
            for path in files
            if path not in done
        }
        try:
            for ready in bar(as_completed(waiting), f"grading {made.name}", len(waiting)):
                done[waiting[ready]] = ready.result()
                keep()
        except BaseException:
            interrupted.set()
            pool.shutdown(cancel_futures=True)
            raise
    keep()
    return table


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not hidden:
            yield path


def _key(path: Path, made: assignments.Assignment, limits: Limits) -> str:
    whole = hashlib.sha256(f"{path.suffix} {made.digest} {limits}".encode())
    return hashlib.sha256(whole.digest() + path.read_bytes()).hexdigest()


def _only_homework(files: list[Path]) -> str:
    found = {_homework(_read(path)[0]) for path in files} - {""}
    if len(found) != 1:
        raise IclError(
            f"The submissions are of {', '.join(sorted(found)) or 'no homework'}. Say which one is "
            "to be graded: HW=hw01."
        )
    return found.pop()


def _homework(notebook: dict[str, Any]) -> str:
    about = notebook.get("metadata")
    otter = about.get("otter") if isinstance(about, dict) else None
    return str(otter.get("assignment_name", "")) if isinstance(otter, dict) else ""


def _read(path: Path) -> tuple[dict[str, Any], tuple[str, str]]:
    """The notebook in a file, or the status and the message that say why there is none."""
    if path.suffix != ".ipynb":
        return {}, ("not a notebook", "only .ipynb files are graded")
    if path.stat().st_size > LONGEST:
        return {}, ("broken", "the file is larger than 20 MB")
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        for cell in notebook["cells"]:
            "".join(cell["source"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        return {}, ("broken", f"no readable notebook: {error}")
    return notebook, ("", "")


def _graded(
    path: Path, name: str, made: assignments.Assignment, limits: Limits, interrupted: Event
) -> Grade:
    """Grade one submission; whatever is wrong with it is in the result."""
    notebook, (fault, message) = _read(path)
    if fault:
        return Grade(name, fault, message=message)
    if _homework(notebook) not in ("", made.name):
        return Grade(name, "another homework", message=f"it is {_homework(notebook)}")
    with tempfile.TemporaryDirectory(prefix="iclutils-graded-") as place:
        folder = Path(place).resolve()
        # A kernel of the student's own machine does not exist here, and outputs are not read.
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        notebook.setdefault("metadata", {})["kernelspec"] = kernel
        for cell in notebook["cells"]:
            if "outputs" in cell:
                cell["outputs"] = []
        (folder / "submission.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
        shutil.copy(made.autograder, folder / "autograder.zip")
        command = confine.otter(folder / "autograder.zip", folder / "submission.ipynb")
        end = confine.run(command, folder, limits, interrupted)
        if end.stopped:
            return Grade(name, f"stopped: {end.stopped}", message=end.reason)
        results = folder / "results.json"
        if end.code or not results.is_file():
            last = (end.said.strip().splitlines() or ["it ended without a result"])[-1]
            return Grade(name, "crashed", message=last[:300])
        return _judged(name, notebook, read_json(results), made)


def _judged(
    name: str, notebook: dict[str, Any], results: dict[str, Any], made: assignments.Assignment
) -> Grade:
    scores: dict[str, float] = {}
    notes = []
    for test in results["tests"]:
        if "max_score" not in test:
            continue
        scores[test["name"]] = float(test["score"])
        said = re.search(r"^\s*(?:Mistake|(\w+Error)): (.+)$", test["output"], re.MULTILINE)
        if test["score"] < test["max_score"]:
            kind = f"{said[1]}: " if said and said[1] else ""
            notes.append(f"{test['name']}: {kind}{said[2] if said else 'not passed'}")
    missing = sorted(_asked(read_json(made.student)) - _asked(notebook))
    if missing:
        notes.append(f"cells of {', '.join(missing)} are missing")
    given = {"".join(cell["source"]) for cell in read_json(made.student)["cells"]}
    code = ["".join(c["source"]) for c in notebook["cells"] if c.get("cell_type") == "code"]
    odd = _odd([text for text in code if text not in given], "\n".join(code))
    if odd:
        notes.append(f"it touches {', '.join(sorted(odd))}")
    status = "graded: look at it" if odd else "graded"
    return Grade(name, status, scores, "; ".join(notes))


def _odd(cells: list[str], whole: str) -> set[str]:
    """What in some cells an honest answer has no need of; modules that are changed, above all."""
    modules = set(re.findall(r"\bimport\s+(\w+)|\bas\s+(\w+)|,\s*(\w+)", whole))
    known = {name for names in modules for name in names if name}
    found = {match[0] for text in cells for match in SUSPECT.finditer(text)}
    for text in cells:
        try:
            nodes = list(ast.walk(ast.parse(text)))
        except (SyntaxError, ValueError, RecursionError):
            continue  # also what only IPython understands
        for node in nodes:
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                root = ast.unparse(node).split(".")[0]
                found |= {ast.unparse(node)} if root in known else set()
    return found


def _asked(notebook: dict[str, Any]) -> set[str]:
    """Questions whose answer cells are in a notebook."""
    marks = [cell.get("metadata", {}).get("otter", {}) for cell in notebook["cells"]]
    return {name for mark in marks for name in mark.get("tests", [])}


def _csv(grades: list[Grade], possible: dict[str, float]) -> str:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["name", "status", *possible, "total", "possible", "percent", "message"])
    whole = float(sum(possible.values()))
    for each in grades:
        total = float(sum(each.scores.values()))
        points = [each.scores.get(question, 0.0) for question in possible]
        row = [f"{n:g}" for n in (*points, total, whole, round(100 * total / whole, 1))]
        table.writerow([_plain(each.name), each.status, *row, _plain(each.message)])
    return text.getvalue()


def _plain(text: str) -> str:
    """Text that no spreadsheet takes for a formula."""
    text = " ".join(text.split())
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text

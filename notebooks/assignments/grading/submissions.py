"""Grade a folder of submissions into tables, without a server.

Each submission runs in processes and bounds of its own (``confine``, ``inside``), which know no
truth; what its answers give is compared here, out of its reach. A step that loops, ends the process
or eats memory costs its own question: the submission is run again without it. What has been graded
is kept until the submission, the homework or the bounds change; a submission is noted before it
runs, so that one with which the grader ended is gone past.
"""

import ast
import hashlib
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from threading import Event, Lock
from typing import Any

from filelock import FileLock, Timeout
from iclutils import checks
from iclutils.checks import HIDDEN, PUBLIC, Expected, Mistake, Question
from iclutils.errors import IclError
from iclutils.files import read_json, write_json
from iclutils.progress import bar
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from . import assignments, confine, handout, reports
from .confine import End, Limits

LOST = "stopped: with the grader"
LOST_BECAUSE = (
    "grading ended while this ran: it may have ended it, or it was beside what did. To try it "
    "again: make grade RETRY=1"
)
SAVE = "Open it in Jupyter, save it, and hand in the file that ends in .ipynb."
NO_NOTEBOOKS: dict[str, tuple[tuple[str, ...], str]] = {  # how they begin, and what helps
    "a web page": (("<!doctype", "<html", "<?xml"), "Download the notebook itself: " + SAVE),
    "an archive": (("pk\x03\x04", "rar!", "7z"), "Unpack it, and hand in the .ipynb file in it."),
    "a PDF": (("%pdf",), SAVE),
}
LONGEST = 20 * 2**20  # bytes of a notebook
RUNS = 10  # of one submission, each without a step that ended the last
# What an honest answer has no need of: whoever writes it may be after the tests themselves.
SUSPECT = ("otter", "ctypes", "subprocess")
INNER = ("__builtins__", "__dict__", "_getframe", "__subclasses__")
JUDGE = "iclutils.checks"
OPEN = (JUDGE, f"{JUDGE}.check", f"{JUDGE}.public")  # what an honest notebook has of it
PIP = re.compile(
    r"^(?P<indent>[ \t]*)[!%][ \t]*(?:\S*python\S*[ \t]+-m[ \t]+)?(?:pip3?|conda|mamba|uv[ \t]+pip)"
    r"[ \t]+install\b(?P<what>.*)$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Grade:
    """What one submission got; ``notes`` say what was wrong, by question, or why nothing is graded.

    The status is ``graded``, ``graded: look at it``, ``stopped: time`` (or ``memory``,
    ``processes``, ``output``, ``disk``, ``with the grader``), ``crashed``, ``not a notebook``,
    ``broken`` or ``another homework``. Where nothing could be graded there are no scores.
    """

    name: str  # the file, relative to the folder of submissions
    status: str
    scores: dict[str, float] = field(default_factory=dict)  # by question
    notes: dict[str, str] = field(default_factory=dict)  # by question; "" is the whole of it
    written: str = ""  # the answer that a person grades
    code: str = ""  # what the student wrote, for the report of what is alike

    @property
    def message(self) -> str:
        """All notes in a line."""
        return "; ".join(f"{name}: {text}" if name else text for name, text in self.notes.items())


@dataclass(frozen=True)
class Truth:
    """What the judge alone has: what is expected of each part, by question and seed."""

    made: assignments.Assignment
    asked: dict[str, Question]
    expected: dict[str, dict[int, list[Expected | None]]]
    public: str  # what a submission gets

    @staticmethod
    def of(made: assignments.Assignment) -> "Truth":
        asked = checks.questions(made.name)
        seeds = (*PUBLIC, *HIDDEN)
        expected = {
            name: {seed: [part.expected(seed) for part in parts] for seed in seeds}
            for name, parts in asked.items()
        }
        return Truth(made, asked, expected, handout.packed(checks.table(made.name), asked))


def grade(
    build: Path,
    submissions: Path,
    homework: str = "",
    limits: Limits = Limits(),  # noqa: B008 - it cannot be changed
    jobs: int = 2,
    force: bool = False,
    retry: bool = False,
) -> Path:
    """Grade every file under ``submissions``, a notebook for each student, ``jobs`` at a time, as
    the homework that they say they are unless it is named; return the table, in
    ``build/grades/HOMEWORK/FOLDER``. ``force`` grades again what has not changed, ``retry`` that
    with which the grader ended."""
    if not submissions.is_dir():
        raise IclError(f"There is no folder {submissions}. Name the one with the submissions.")
    files = sorted(_files(submissions))
    if not files:
        raise IclError(f"{submissions} is empty: put one notebook per student into it.")
    if jobs < 1 or min(limits.step, limits.seconds, limits.memory, limits.processes) <= 0:
        raise IclError("The number of jobs and all bounds must be positive.")
    (made,) = assignments.make(build, homework or _only_homework(files))
    place = build / "grades" / made.name
    with _alone(place):
        grades = _all(files, submissions, made, limits, jobs, place / "known.json", force, retry)
    folder = place / (submissions.resolve().name or "submissions")
    return reports.write(folder, made.name, grades, made.points)


@contextmanager
def _alone(place: Path) -> Iterator[None]:
    """Of two that grade one homework at once, the second is sent away."""
    place.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(place / ".lock", timeout=0):
            yield
    except Timeout:
        raise IclError(f"{place.name} is being graded in {place}: wait until it ends.") from None


def _all(
    files: list[Path],
    submissions: Path,
    made: assignments.Assignment,
    limits: Limits,
    jobs: int,
    record: Path,
    force: bool,
    retry: bool,
) -> list[Grade]:
    """A grade for each file; those in the record are not made again."""
    known = read_json(record) if record.is_file() else {}
    keys = {path: _key(path, made, limits) for path in files}
    named = {path: path.relative_to(submissions).as_posix() for path in files}
    kept = {path: known[key] for path, key in keys.items() if key in known and not force}
    again = {path for path, each in kept.items() if retry and each["status"] == LOST}
    done = {path: Grade(**kept[path] | {"name": named[path]}) for path in kept if path not in again}
    left = sorted((path for path in files if path not in done), key=lambda path: path in again)
    interrupted, writing = Event(), Lock()

    def note(path: Path, grade: Grade | None) -> None:
        with writing:
            if grade is None:
                known.pop(keys[path], None)
            else:
                known[keys[path]] = asdict(grade)
            write_json(record, known)

    def begin(path: Path) -> None:
        if truth is not None and not interrupted.is_set():
            note(path, Grade(named[path], LOST, notes={"": LOST_BECAUSE}))
            given = _graded(path, named[path], truth, limits, interrupted)
            if given.status != "stopped: interrupted":
                done[path] = given
                note(path, given)

    truth = Truth.of(made) if left else None
    with ThreadPoolExecutor(1 if again else jobs) as pool:
        waiting = {pool.submit(begin, path): path for path in left}
        try:
            for ready in bar(as_completed(waiting), f"grading {made.name}", len(waiting)):
                ready.result()
        except BaseException:
            interrupted.set()
            pool.shutdown(cancel_futures=True)
            for path in set(left) - done.keys():
                note(path, None)
            raise
    return [done[path] for path in files]


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        hidden = any(part.startswith((".", "__")) for part in path.relative_to(folder).parts)
        if path.is_file() and not hidden:
            yield path


def _key(path: Path, made: assignments.Assignment, limits: Limits) -> str:
    whole = hashlib.sha256(f"{path.suffix} {made.digest} {limits}".encode())
    for name in ("submissions", "confine", "guard", "inside", "jail"):
        whole.update(Path(__file__).with_name(f"{name}.py").read_bytes())
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


def _read(path: Path) -> tuple[dict[str, Any], Grade | None]:
    """The notebook in a file, or the grade that says why there is none."""
    if path.stat().st_size > LONGEST:
        return _none("The file is larger than 20 MB. Clear the outputs of all cells, and save.")
    data = path.read_bytes()
    begins = data[:200].decode("utf-8", errors="replace").lstrip("\ufeff \t\r\n").lower()
    if not begins:
        return _none("The file is empty: the upload did not finish. Hand the notebook in again.")
    for name, (start, cure) in NO_NOTEBOOKS.items():
        if begins.startswith(start):
            return _none(f"The file is {name}. {cure}", "not a notebook")
    if path.suffix != ".ipynb":
        return _none(f"Only .ipynb is graded. {SAVE}", "not a notebook")
    try:
        notebook = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        cut = "The file breaks off: it was not saved or sent whole"
        return _none(f"{cut if begins.startswith('{') else 'This is no notebook'}. {SAVE}")
    try:
        for cell in notebook["cells"]:
            "".join(cell["source"])
            cell["cell_type"] + ""
    except (TypeError, KeyError):
        return _none(f"The file is JSON, but holds no cells of a notebook. {SAVE}")
    return notebook, None


def _none(why: str, status: str = "broken") -> tuple[dict[str, Any], Grade]:
    return {}, Grade("", status, notes={"": why})


def _graded(path: Path, name: str, truth: Truth, limits: Limits, interrupted: Event) -> Grade:
    """Grade one submission; whatever is wrong with it is in the result."""
    notebook, fault = _read(path)
    if fault:
        return replace(fault, name=name)
    if (other := _homework(notebook)) not in ("", truth.made.name):
        return Grade(name, "another homework", notes={"": f"it is {other}"})
    texts = [("".join(c["source"]), c["cell_type"]) for c in notebook["cells"]]
    code = [text for text, kind in texts if kind == "code"]
    cells, asked_for = _without_pip(code)
    bounds = {"seconds": limits.step, "memory": limits.memory, "processes": limits.processes}
    plan = {"cells": cells, "public": truth.public} | bounds
    skip, end = _run(plan, limits, interrupted)
    if not end.values("done"):
        last = (end.said.strip().splitlines() or ["it ended without a result"])[-1]
        status = f"stopped: {end.stopped}" if end.stopped else "crashed"
        return Grade(name, status, notes={"": end.reason or last[:300]})
    told = [about for about, _ in end.told if {"cell", "error"} <= about.keys()]
    errors = {f"cell {each['cell']}"[:99]: str(each["error"])[:300] for each in told} | skip
    answers = {str(about["question"]): more for about, more in end.told if "question" in about}
    scores, notes = {}, {}
    for question in truth.asked:
        found = skip.get(question) or _load(answers.get(question, b""))
        scores[question], note = _judged(question, found, truth)
        if scores[question] < truth.made.points[question]:
            notes[question] = _own_error(question, truth, code, errors, note) or note
    given = {"".join(cell["source"]) for cell in read_json(truth.made.student)["cells"]}
    own = [text for text in code if text not in given]
    if asked_for:
        notes[""] = "; ".join(f"cell {i + 1} installs {what}" for i, what in asked_for)
    odd = _odd(own, code) | {str(note)[:100] for note in end.values("note")[:9]}
    if odd:
        notes["look at"] = f"it touches {', '.join(sorted(odd))}"
    status = "graded: look at it" if odd else "graded"
    return Grade(name, status, scores, notes, _paragraph(texts), "\n".join(own))


def _run(plan: dict[str, Any], limits: Limits, interrupted: Event) -> tuple[dict[str, str], End]:
    """Run a submission until it comes through, each time without the step that ended it."""
    left, skip = limits.seconds, dict[str, str]()
    for _ in range(RUNS):
        text = json.dumps(plan | {"skip": list(skip)}).encode()
        end = confine.run(confine.command(), replace(limits, seconds=left), interrupted, text)
        left = max(1.0, left - end.used)
        step = str(end.values("step")[-1])[:99] if end.values("step") else ""
        if end.values("done") or end.stopped in ("time", "interrupted") or not step or step in skip:
            break
        skip[step] = end.reason or "it ended the process that ran it"
    return skip, end


def _load(data: bytes) -> Any:
    """The numbers of one question, or what is wrong with them."""
    try:
        return checks.thawed(data)
    except Exception:  # whatever a submission may tell
        return "its answers were not written down"


def _judged(question: str, found: Any, truth: Truth) -> tuple[float, str]:
    """The points of a question, half for each kind of check, and the first mistake."""
    if isinstance(found, str):
        return 0.0, found
    score, first = 0.0, ""
    for seeds in (PUBLIC, HIDDEN):
        try:
            for seed in seeds:
                parts = truth.asked[question], truth.expected[question][seed]
                for given, entry, expected in zip(found[str(seed)], *parts, strict=True):
                    if "mistake" in given:
                        raise Mistake(str(given["mistake"])[:300])
                    entry.part.judge(given["value"], expected)
            score += truth.made.points[question] / 2
        except Mistake as mistake:
            first = first or str(mistake)
        except Exception:  # the file is not what ``inside`` writes
            first = first or "its answers cannot be read"
    return score, first


def _own_error(
    question: str, truth: Truth, code: list[str], errors: dict[str, str], note: str
) -> str:
    """What the cell raised that should have written the answer which is missing."""
    for part in truth.asked[question]:
        if f"`{part.name}` is missing" in note:
            defines = rf"(?m)^[ \t]*(?:async )?(?:def {part.name}\b|{part.name}\s*(?:=|:))"
            cells = [i for i, text in enumerate(code) if re.search(defines, text)]
            if not cells:
                return f"`{part.name}` is missing: no cell defines it."
            if failed := [i for i in cells if f"cell {i}" in errors]:
                return f"code cell {failed[0] + 1}: {errors[f'cell {failed[0]}']}"
    return ""


def _without_pip(cells: list[str]) -> tuple[list[str], list[tuple[int, str]]]:
    """Cells without their installations, and what is not here of these, each with its cell."""
    missing: list[tuple[int, str]] = []
    for i, cell in enumerate(cells):
        for line in PIP.finditer(cell):
            wanted = [word.strip("'\"") for word in line["what"].split() if word[:1] != "-"]
            missing += [(i, word) for word in wanted if not _installed(word)]
    return [PIP.sub(r"\g<indent>pass", cell) for cell in cells], missing


def _installed(word: str) -> bool:
    if "iclutils" in word or word == "pip":
        return True
    try:
        asked = Requirement(word)
        return asked.specifier.contains(metadata.version(canonicalize_name(asked.name)), True)
    except (InvalidRequirement, metadata.PackageNotFoundError):
        return False


def _odd(cells: list[str], whole: list[str]) -> set[str]:
    """What an honest answer has no need of, in some cells: above all this package's insides."""
    bound = [pair for text in whole for pair in _imported(_tree(text))]
    ours = {name for name, module in bound if module.startswith("iclutils")}
    judge = {name for name, module in bound if module.startswith(JUDGE)}
    found: set[str] = set()
    for text in cells:
        tree = _tree(text)
        for _, module in _imported(tree):
            inner = module.startswith(JUDGE) and module not in OPEN
            found |= {module} if inner or module.split(".")[0] in SUSPECT else set()
        for node in ast.walk(tree):
            path = ast.unparse(node)[:60] if isinstance(node, ast.expr) else ""
            root = path.split(".")[0]
            if isinstance(node, ast.Attribute):
                changed = root in ours and not isinstance(node.ctx, ast.Load)
                inner = node.attr in INNER or path == "sys.modules"
                if changed or inner or (root in judge and f"{JUDGE}.{node.attr}" not in OPEN):
                    found.add(path)
            elif isinstance(node, ast.Call) and node.args:
                changed = ast.unparse(node.args[0]).split(".")[0] in ours
                if changed and root.startswith(("setattr(", "delattr(", "vars(")):
                    found.add(path)
            elif (isinstance(node, ast.Name) and node.id in INNER) or (
                isinstance(node, ast.Constant)
                and re.search(r"ICLUTILS_GRADED|notebooks/assignments|answers/hw\d", path)
            ):
                found.add(path)
    return found


def _tree(text: str) -> ast.AST:
    """The syntax of a cell; nothing of one that is no Python, which does not run either."""
    try:
        return ast.parse(re.sub(r"^([ \t]*)([\w, ]+=\s*)?[!%].*$", r"\1pass", text, flags=re.M))
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The names that imports bind, and what they stand for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((a.asname or a.name.split(".")[0], a.name) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((a.asname or a.name, f"{node.module}.{a.name}") for a in node.names)


def _paragraph(texts: list[tuple[str, str]]) -> str:
    """What stands below the heading of the question that a person grades."""
    heading = assignments.PARAGRAPH.splitlines()[0]
    at = next((i for i, (text, _) in enumerate(texts) if heading in text), None)
    if at is None:
        return ""
    below = [text for text, kind in texts[at + 1 :] if kind == "markdown"]
    whole = "\n".join(text for text in below if "END QUESTION" not in text)
    return re.sub(r"^_Type your answer here.*?_$", "", whole, flags=re.M).strip()

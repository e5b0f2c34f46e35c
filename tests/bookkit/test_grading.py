"""Coursework as an instructor uses it: derived by otter, graded in bounds, into a table.

The bounds themselves are tried on small programs; then one class hands in what classes hand in.
"""

from __future__ import annotations

import ast
import csv
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event

import psutil
import pytest

from iclutils.bookkit.coursework import assignments, confine, grading, guard, homeworks
from iclutils.bookkit.coursework.assignments import Assignment
from iclutils.bookkit.coursework.confine import End, Limits
from iclutils.errors import IclError
from iclutils.files import read_json

pytest.importorskip("otter", reason="needs otter-grader (extra: coursework)")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="bounds need a POSIX system")

ROOT = Path(__file__).parents[2]
WRONG = "def double(copy, bos):\n    return torch.cat([copy, copy], 1)"


# The bounds, on small programs


@pytest.fixture
def bounded(tmp_path: Path) -> Callable[..., End]:
    """``bounded(code)`` runs a Python program in bounds, in a folder of its own."""

    def run(code: str, **limits: float) -> End:
        folder = tmp_path / "own"
        folder.mkdir()
        return confine.run([sys.executable, "-c", code], folder, Limits(**limits), Event())

    return run


def test_a_program_within_its_bounds_just_ends(bounded: Callable[..., End]) -> None:
    os.environ["SECRET_OF_THE_GRADER"] = "x"
    try:
        end = bounded("import os; print(os.getcwd(), 'SECRET_OF_THE_GRADER' in os.environ)")
    finally:
        del os.environ["SECRET_OF_THE_GRADER"]
    assert (end.code, end.stopped) == (0, "")
    assert end.said.strip().endswith("own False")


@pytest.mark.parametrize(
    ("code", "limits", "stopped", "reason"),
    [
        ("while True: pass", {"seconds": 1.0}, "time", "longer than 1 s"),
        ("kept = bytearray(10**9); input = kept; __import__('time').sleep(600)",
         {"memory": 0.5}, "memory", "more than 0.5 GB"),
        ("import os, time\nfor _ in range(9): os.fork() or time.sleep(600)\ntime.sleep(600)",
         {"processes": 5}, "processes", "more than 5 processes"),
        ("import socket\ntry: socket.create_connection(('192.0.2.1', 80), 1)\nexcept OSError: pass",
         {}, "network", "192.0.2.1"),
        ("import urllib.request as r\ntry: r.urlopen('http://example.com')\nexcept Exception: 0",
         {}, "network", "example.com"),
    ],
    ids=["loop", "memory", "processes", "address", "name"],
)  # fmt: skip
def test_a_program_that_breaks_a_bound_is_stopped(
    bounded: Callable[..., End], code: str, limits: dict[str, float], stopped: str, reason: str
) -> None:
    end = bounded(code, **limits)
    assert end.stopped == stopped
    assert reason in end.reason


def test_a_program_may_talk_to_itself(bounded: Callable[..., End]) -> None:
    """As a notebook does with its kernel."""
    end = bounded(
        "import socket\ns = socket.create_server(('127.0.0.1', 0))\n"
        "socket.create_connection(s.getsockname(), 5); print('reached')"
    )
    assert (end.stopped, end.said.strip()) == ("", "reached")


def test_nothing_outside_its_folder_is_changed(bounded: Callable[..., End], tmp_path: Path) -> None:
    other = tmp_path / "other.ipynb"
    other.write_text("precious")
    for code in (f"open({str(other)!r}, 'w')", f"__import__('os').remove({str(other)!r})"):
        end = bounded(f"open('own.txt', 'w').write('mine')\n{code}")
        shutil.rmtree(tmp_path / "own")
        assert "PermissionError: Only the own folder can be" in end.said
        assert other.read_text() == "precious"


def test_a_large_file_is_not_written(bounded: Callable[..., End]) -> None:
    end = bounded(f"f = open('big', 'wb')\nf.seek({guard.LARGEST})\nf.write(b'0')\nf.close()")
    assert "File too large" in end.said


def test_what_is_left_behind_is_ended(bounded: Callable[..., End], tmp_path: Path) -> None:
    sleep = "import subprocess as s\nprint(s.Popen(['sleep', '60'], start_new_session=True).pid)"
    end = bounded(sleep)
    assert end.code == 0
    left = int(end.said)
    for _ in range(600):
        if not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.1)
    pytest.fail("it still runs")


# Deriving


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("build")


@pytest.fixture(scope="module")
def hw01(build: Path) -> Assignment:
    (made,) = assignments.make(ROOT, build, "hw01")
    return made


def cells(path: Path, kind: str = "code") -> list[str]:
    found = read_json(path)["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == kind]


@pytest.mark.nightly
@pytest.mark.parametrize("homework", homeworks())
def test_students_get_no_solution_and_no_hidden_test(homework: str, build: Path) -> None:
    """Otter refuses a master whose solution fails, so this also runs every solution."""
    (made,) = assignments.make(ROOT, build, homework)
    student, solved = cells(made.student), cells(made.instructor)
    assert len(student) == len(solved)
    differ = [(a, b) for a, b in zip(student, solved, strict=True) if a != b]
    asked = {name for cell in read_json(made.student)["cells"]
             for name in cell["metadata"].get("otter", {}).get("tests", [])}  # fmt: skip
    assert asked == set(made.points)
    assert len(differ) >= len(asked)
    for empty, full in differ:
        for node in ast.parse(empty).body:
            body = node.body[-1] if isinstance(node, ast.FunctionDef) else node
            assert ast.unparse(body).endswith("..."), empty
        assert len(full) > len(empty)
    text = made.student.read_text(encoding="utf-8")
    assert "hidden=True" not in text
    assert "SOLUTION" not in text
    assert not assignments.make(ROOT, build, homework)[0].fresh


@pytest.mark.nightly
def test_a_master_that_fails_its_own_tests_is_refused(tmp_path: Path) -> None:
    master = read_json(assignments.masters(ROOT)["hw01"])
    end = next(i for i, c in enumerate(master["cells"]) if c["source"] == ["# END QUESTION"])
    master["cells"] = master["cells"][: end + 1]
    for cell in master["cells"]:
        cell["source"] = [line.replace("[start, copy, copy]", "[copy, copy]")
                          for line in cell["source"]]  # fmt: skip
    folder = tmp_path / assignments.MASTERS
    folder.mkdir(parents=True)
    (folder / "hw01_x.ipynb").write_text(json.dumps(master))
    with pytest.raises(IclError, match=r"hw01_x.*fails its own tests.*BOS is missing"):
        assignments.make(tmp_path, tmp_path / "build")
    assert not list((tmp_path / "build" / "assignments").iterdir())


def test_a_copy_that_shows_a_solution_is_refused() -> None:
    master = read_json(assignments.masters(ROOT)["hw01"])
    lines = assignments.solution_lines(master)
    assert "return torch.cat([start, copy, copy], 1)" in lines
    assert 'reason = "c"' in lines
    with pytest.raises(IclError, match="shows"):
        assignments._keep_secrets(master, master, "hw01")


def test_mistakes_of_the_instructor(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(IclError, match="holds no masters"):
        assignments.make(tmp_path, tmp_path)
    with pytest.raises(IclError, match="Unknown homework 'hw9'"):
        assignments.make(ROOT, tmp_path, "hw9")
    with pytest.raises(IclError, match="no folder"):
        grading.grade(ROOT, tmp_path, tmp_path / "nowhere", "hw01")
    with pytest.raises(IclError, match="is empty"):
        grading.grade(ROOT, tmp_path, tmp_path / "empty", "hw01")
    (tmp_path / "empty" / "essay.txt").write_text("x")
    with pytest.raises(IclError, match=r"no homework\. Say which one"):
        grading.grade(ROOT, tmp_path, tmp_path / "empty")


# Grading


def hand_in(folder: Path, name: str, source: Path, first: str = "", **metadata: object) -> None:
    """A submission: ``source``, with its first answer replaced."""
    notebook = read_json(source)
    for cell in notebook["cells"]:
        if first and "".join(cell["source"]).startswith("def double"):
            cell["source"] = first
            break
    notebook["metadata"] |= metadata
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.ipynb").write_text(json.dumps(notebook), encoding="utf-8")


def rows(table: Path) -> dict[str, dict[str, str]]:
    with table.open(encoding="utf-8", newline="") as stream:
        return {row["name"].removesuffix(".ipynb"): row for row in csv.DictReader(stream)}


@pytest.mark.nightly
def test_a_class_is_graded(
    hw01: Assignment, build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, solved = tmp_path / "given", hw01.instructor
    other = {"name": "their-own", "display_name": "Theirs", "language": "python"}
    hand_in(given, "good", solved, kernelspec=other)
    hand_in(given, "stub", hw01.student)
    hand_in(given, "wrong", solved, WRONG)
    hand_in(given, "memory", solved, "kept = [bytearray(10**8) for _ in range(10**5)]")
    hand_in(given, "network", solved, "import urllib.request as r\nr.urlopen('http://a.example')")
    hand_in(given, "tampered", hw01.student,
            "import iclutils.bookkit.coursework as c\nc.grade = lambda *a, **k: None")  # fmt: skip
    hand_in(given, "ends", solved, "import os\nos._exit(3)")
    hand_in(given, "another", solved, otter={"assignment_name": "hw02"})
    (given / "broken.ipynb").write_text("{")
    (given / "essay.pdf").write_text("an essay")
    table = grading.grade(ROOT, build, given, "hw01", Limits(300.0, 3.0))
    found = rows(table)
    assert {name: row["status"] for name, row in found.items()} == {
        "good": "graded",
        "stub": "graded",
        "wrong": "graded",
        "memory": "stopped: memory",
        "network": "stopped: network",
        "tampered": "graded: look at it",
        "ends": "crashed",
        "another": "another homework",
        "broken": "broken",
        "essay.pdf": "not a notebook",
    }
    assert found["good"]["percent"] == "100"
    assert found["good"]["message"] == ""
    assert found["stub"]["percent"] == "0"
    assert found["stub"]["message"].count("nothing is written yet") == len(hw01.points)
    assert found["wrong"]["q1"] == "0"
    assert float(found["wrong"]["total"]) == sum(hw01.points.values()) - hw01.points["q1"]
    assert found["wrong"]["message"].startswith("q1: BOS is missing")
    assert "a.example" in found["network"]["message"]
    assert "c.grade" in found["tampered"]["message"]
    assert "hw02" in found["another"]["message"]

    def never(*given: object) -> None:
        raise AssertionError("graded again")

    before = table.read_text()
    monkeypatch.setattr(confine, "run", never)
    assert grading.grade(ROOT, build, given, "hw01", Limits(300.0, 3.0)).read_text() == before
    (given / "essay.pdf").unlink()
    grading.grade(ROOT, build, given, "hw01", Limits(300.0, 3.0))
    assert set(rows(table)) == set(found) - {"essay.pdf"}


@pytest.mark.nightly
def test_a_loop_is_stopped(hw01: Assignment, build: Path, tmp_path: Path) -> None:
    hand_in(tmp_path / "given", "loop", hw01.instructor, "while True:\n    pass")
    row = rows(grading.grade(ROOT, build, tmp_path / "given", limits=Limits(15.0)))["loop"]
    assert (row["status"], row["total"]) == ("stopped: time", "0")
    assert row["message"] == "it ran longer than 15 s"


@pytest.mark.nightly
def test_what_was_graded_before_an_interruption_is_kept(
    hw01: Assignment, build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tmp_path / "given"
    for name in ("a", "b", "c"):
        hand_in(given, name, hw01.student, f"# {name}")

    def graded(path: Path, name: str, *more: object) -> grading.Grade:
        if path.stem == "b":
            raise KeyboardInterrupt
        return grading.Grade(name, "graded")

    monkeypatch.setattr(grading, "_graded", graded)
    with pytest.raises(KeyboardInterrupt):
        grading.grade(ROOT, build, given, "hw01", jobs=1)
    assert "a" in rows(build / "grades" / "hw01.csv")


def test_a_table_holds_no_formula() -> None:
    evil = grading.Grade("=HYPERLINK(1).ipynb", "broken", message="-1\nb")
    name, *_, message = grading._csv([evil], {"q1": 2.0}).splitlines()[1].split(",")
    assert (name, message) == ("'=HYPERLINK(1).ipynb", "'-1 b")

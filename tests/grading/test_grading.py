"""Coursework as an instructor uses it: derived by otter, graded in bounds, into a table."""

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from zipfile import ZipFile

import psutil
import pytest
from grading import assignments, confine, guard, jail, reports, submissions
from grading.assignments import Assignment
from grading.confine import Limits
from grading.submissions import Grade

from iclutils.checks import homeworks, table
from iclutils.errors import IclError
from iclutils.files import read_json

ROOT = Path(__file__).parents[2]
pytest.importorskip("otter", reason="needs otter-grader (extra: coursework)")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="bounds need a POSIX system")


NAMESPACES = sys.platform == "linux" and not subprocess.run(
    ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "true"],
    capture_output=True, check=False,
).returncode  # fmt: skip
MODES = ["hooks", pytest.param("namespaces", marks=pytest.mark.skipif(
    not NAMESPACES, reason="this system has no namespaces for this user"))]  # fmt: skip


@pytest.fixture(params=MODES)
def bounded(request):
    """``bounded(code)`` runs a Python program in bounds, with namespaces or by hooks alone."""
    jailed = request.param == "namespaces"

    def run(code, **limits):
        command = [sys.executable, "-c", code]
        end = confine.run(command, Limits(**limits), Event(), jailed=jailed)
        assert end.code != jail.REFUSED, end.said
        return end

    return run


def test_a_program_within_its_bounds_just_ends(bounded, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_GRADER", "x")
    code = "import os; print(os.listdir(), 'SECRET_OF_THE_GRADER' in os.environ); os.openpty()"
    end = bounded(code)
    assert (end.code, end.stopped, end.told) == (0, "", [])
    assert end.said.strip() == "[] False"


@pytest.mark.parametrize(
    ("code", "limits", "stopped", "reason"),
    [
        ("while True: pass", {"seconds": 1.0}, "time", "longer than 1 s"),
        ("kept = bytearray(10**9); input = kept; __import__('time').sleep(600)",
         {"memory": 0.5}, "memory", "more than 0.5 GB"),
        ("import os, time\nfor _ in range(9): os.fork() or time.sleep(600)\ntime.sleep(600)",
         {"processes": 5}, "processes", "more than 5 processes"),
        ("import guard, time; guard.send({'step': 'cell 3'}); time.sleep(600)",
         {"step": 0.1}, "step", "longer than 0.1 s"),
        ("import guard\nwhile True: guard.send({}, bytes(10**7))", {}, "output", "more than 256"),
    ],
    ids=["loop", "memory", "processes", "step", "output"],
)  # fmt: skip
def test_a_program_that_breaks_a_bound_is_stopped(bounded, code, limits, stopped, reason):
    end = bounded(code, **limits)
    assert end.stopped == stopped
    assert reason in end.reason


def test_time_that_others_take_does_not_count(bounded):
    assert bounded("import time; time.sleep(2)", seconds=1.0).stopped == ""


def test_processes_of_others_do_not_count(bounded):
    many = "import os, time\nfor _ in range(150):\n    os.fork() or (time.sleep(9), os._exit(0))\n"
    hold = partial(bounded, many + "time.sleep(9)", processes=jail.PROCESSES)
    with ThreadPoolExecutor() as pool:
        assert [end.said for end in pool.map(lambda _: hold(), range(2))] == ["", ""]


def test_the_network_is_closed_and_who_tries_is_named(bounded):
    code = "import urllib.request as r\ntry: r.urlopen('http://a.example')\nexcept Exception: 0"
    end = bounded(code)
    assert (end.code, end.stopped, end.values("note")) == (0, "", ["the network, a.example"])


def test_a_program_may_talk_to_itself(bounded):
    """As a notebook does with its kernel."""
    end = bounded(
        "import socket\ns = socket.create_server(('127.0.0.1', 0))\n"
        "socket.create_connection(s.getsockname(), 5); print('reached')"
    )
    assert (end.stopped, end.said.strip()) == ("", "reached")


# Each is tried, in Python and by native code; none is to signal, read or write outside. By hooks
# alone native code is refused only where its name tells, and then it is told.
LIBC = "import ctypes; libc = ctypes.CDLL(None); "
ATTACKS = {
    "signal the parent": "import os; os.kill(os.getppid(), 9)",
    "signal all": "import os; os.kill(-1, 9)",
    "signal natively": LIBC + "import os; libc.kill(os.getppid(), 9); libc.kill(-1, 9)",
    "signal by a shell": "import os; os.system('kill -9 $PPID; kill -9 -1')",
    "trace the parent": LIBC + "import os; print(libc.ptrace(16, os.getppid(), 0, 0))",
    "read": "print(open({secret!r}).read())",
    "read by a link": "import os; os.symlink({secret!r}, 'x'); print(open('x').read())",
    "read by /proc": "print(open('/proc/self/root' + {secret!r}).read())",
    "read as the parent": "import os; "
                          "print(open(f'/proc/{{os.getppid()}}/root' + {secret!r}).read())",
    "read by a shell": "import os; os.system('cat {secret}')",
    "read natively": LIBC + "libc.system(b'cat {secret}')",
    "read in a fork": "import os; os.fork() or os.execvp('cat', ['cat', {secret!r}])",
    "write": "open({other!r}, 'w')",
    "replace": "import os; open('x', 'w'); os.rename('x', {other!r})",
    "write by a shell": "import os; os.system('echo evil > {other}')",
    "write natively": LIBC + "libc.write(libc.open(b'{other}', 1), b'evil', 4)",
    "unmount": "import os; os.system('unshare -rm sh -c \"umount -a; cat {secret}\"')",
    "write to libraries": "import os; os.system('unshare -rm sh -c \"mount -o remount,rw,bind "
                          "{library}; echo > {library}/evil\"')",
    "a shell's bomb": "import os; os.system('bomb() {{ bomb | bomb & }}; bomb; sleep 9')",
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_nothing_outside_is_signalled_read_or_written(bounded, name, tmp_path):
    other, secret = tmp_path / "other.ipynb", table("hw05")
    other.write_text("precious")
    library = Path(json.__file__).parent
    code = ATTACKS[name].format(other=str(other), secret=str(secret), library=str(library))
    beside = subprocess.Popen(["sleep", "60"])
    end = bounded(code, seconds=20.0)
    assert beside.poll() is None
    beside.kill()
    assert beside.wait() == -signal.SIGKILL
    assert "def dual_parts" not in end.said
    assert other.read_text() == "precious"
    assert not (library / "evil").exists()


@pytest.mark.parametrize(
    "code",
    [f"f = open('big', 'wb')\nf.seek({guard.LARGEST})\nf.write(b'0')\nf.close()",
     "for i in range(3000): open(f'{i}', 'wb').write(bytes(10**6))"],
)  # fmt: skip
def test_the_disk_is_not_filled(bounded, code):
    end = bounded(code, seconds=60.0)
    assert "too large" in end.said or "No space left" in end.said or end.stopped == "disk"


def test_what_is_left_behind_is_ended(bounded):
    mark = f"{time.monotonic_ns()}"
    bounded(f"import os, time\n{mark}\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)")
    for _ in range(100):
        if not any(mark in " ".join(p.info["cmdline"] or ()) and p.info["status"] != "zombie"
                   for p in psutil.process_iter(["cmdline", "status"])):  # fmt: skip
            return
        time.sleep(0.1)
    pytest.fail("it still runs")


def test_solutions_among_libraries_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ICLUTILS_HOMEWORK", str(tmp_path))
    assert str(tmp_path) not in confine.shown()
    monkeypatch.setattr(sys, "prefix", str(tmp_path.parent))
    with pytest.raises(IclError, match="the solutions are in it"):
        confine.shown()


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    return tmp_path_factory.mktemp("build")


@pytest.fixture(scope="module")
def hw05(build):
    (made,) = assignments.make(build, "hw05")
    return made


def cells(path, kind="code"):
    found = read_json(path)["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == kind]


@pytest.mark.nightly
@pytest.mark.parametrize("homework", homeworks())
def test_students_get_no_solution_and_no_hidden_test(homework, build):
    """Otter refuses a master whose solution fails, so this also runs every solution."""
    (made,) = assignments.make(build, homework)
    student, solved = cells(made.student), cells(made.instructor)
    assert len(student) == len(solved)
    differ = [(a, b) for a, b in zip(student, solved, strict=True) if a != b]
    asked = {name for cell in read_json(made.student)["cells"]
             for name in cell["metadata"].get("otter", {}).get("tests", [])}  # fmt: skip
    assert asked == set(made.points) - {assignments.BY_HAND}
    assert len(differ) >= len(asked)
    for empty, full in differ:
        for node in ast.parse(empty).body:
            body = node.body[-1] if isinstance(node, ast.FunctionDef) else node
            assert ast.unparse(body).endswith("..."), empty
        assert len(full) > len(empty)
    text = made.student.read_text(encoding="utf-8")
    assert "hidden=True" not in text
    assert "SOLUTION" not in text
    assert assignments.PARAGRAPH.splitlines()[0] in text
    assert not assignments.make(build, homework)[0].fresh
    with ZipFile(made.autograder) as autograder:
        assert f"files/{homework}.py" in autograder.namelist()


@pytest.mark.nightly
def test_a_master_that_fails_its_own_tests_is_refused(tmp_path, monkeypatch):
    master = read_json(assignments.masters()["hw01"])
    end = next(i for i, c in enumerate(master["cells"]) if c["source"] == ["# END QUESTION"])
    master["cells"] = master["cells"][: end + 1]
    for cell in master["cells"]:
        cell["source"] = [line.replace("[start, copy, copy]", "[copy, copy]")
                          for line in cell["source"]]  # fmt: skip
    (tmp_path / "answers").mkdir()
    shutil.copy(table("hw01"), tmp_path / "answers")
    (tmp_path / "hw01_x.ipynb").write_text(json.dumps(master))
    monkeypatch.setenv("ICLUTILS_HOMEWORK", str(tmp_path))
    with pytest.raises(IclError, match=r"hw01_x.*fails its own tests.*BOS is missing"):
        assignments.make(tmp_path / "build")
    assert not list((tmp_path / "build" / "assignments").iterdir())


def test_a_copy_that_shows_a_solution_is_refused():
    master = read_json(assignments.masters()["hw01"])
    lines = assignments.solution_lines(master)
    assert "return torch.cat([start, copy, copy], 1)" in lines
    assert 'reason = "c"' in lines
    with pytest.raises(IclError, match="shows"):
        assignments._keep_secrets(master, master, "hw01")


def test_a_homework_is_made_anew_when_it_has_changed_alone(monkeypatch):
    master = assignments.masters()["hw05"]
    before = assignments._digest(master)
    monkeypatch.setattr(submissions, "__file__", __file__)
    assert assignments._digest(master) == before
    monkeypatch.setattr(assignments, "set_up_cell", lambda: "changed")
    assert assignments._digest(master) != before


@pytest.mark.parametrize(
    ("name", "data", "status", "message"),
    [("a.ipynb", b"", "broken", "The file is empty"),
     ("a.ipynb", b"<!DOCTYPE html><html>", "not a notebook", "a web page. Download the notebook"),
     ("a.ipynb", b"PK\x03\x04 and more", "not a notebook", "an archive. Unpack it"),
     ("a.pdf", b"%PDF-1.7", "not a notebook", "a PDF. Open it in Jupyter"),
     ("a.py", b"x = 1", "not a notebook", "Only .ipynb is graded"),
     ("a.ipynb", b"\xff\xfe\x00", "broken", "This is no notebook"),
     ("a.ipynb", b'{"cells": [{"cell', "broken", "breaks off"),
     ("a.ipynb", b'{"cells": [3]}', "broken", "holds no cells"),
     ("a.ipynb", b"[" * 10**6, "broken", "This is no notebook")],
)  # fmt: skip
def test_what_is_no_notebook_is_told_why_and_what_helps(tmp_path, name, data, status, message):
    (tmp_path / name).write_bytes(data)
    fault = submissions._read(tmp_path / name)[1]
    assert fault.status == status
    assert message in fault.message


# Grading: submissions of hw05, right, wrong and hostile, and what is to become of each

PARTS = "def dual_parts"


def cell(cells, begins):
    return next(each for each in cells if "".join(each["source"]).startswith(begins))


def add(begins, before="", after=""):
    def edit(cells):
        found = cell(cells, begins)
        found["source"] = before + "".join(found["source"]) + after

    return edit


def put(begins, text):
    return lambda cells: cell(cells, begins).update(source=text)


def wrap(answer):
    """``dual_parts`` becomes what ``answer`` makes of the right one and of what it is given."""
    return add(PARTS, after=f"\n\nright = dual_parts\ndual_parts = lambda *given: {answer}")


RIGHT = {  # edits
    "as it is": lambda cells: None,
    "single precision": wrap("right(*(x.float() for x in given[:3]), given[3])"),
    "requires grad": wrap("right(*given).requires_grad_()"),
    "changes its inputs": wrap("(right(*given), given[2].zero_())[0]"),
    "lists of tensors without axes": wrap("[[x for x in row] for row in right(*given)]"),
    "lists of floats and an axis more": wrap("[[[float(x) for x in r]] for r in right(*given)]"),
    "a loss in a list": add("def features", after="\n\nmine = contrastive_loss\n"
                            "contrastive_loss = lambda *given: mine(*given)[None]"),
    "magic and shell": add(PARTS, "%matplotlib inline\n%timeit -n1 -r1 1 + 1\n!echo here\n"),
    "pip of what is there": add(PARTS, "!pip install -q torch 'numpy>1'\n%pip install iclutils\n"),
    "figures": add(PARTS, "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()\n"),
    "loop after the answer": add(PARTS, after="\n\nwhile True:\n    pass"),
    "flood after the answer": add(PARTS, after="\n\nfor _ in range(300):\n    print('x' * 10**6)"),
    "files of its own": add(PARTS, "import tempfile, pathlib\nopen('notes.txt', 'w').write('x')\n"
        "tempfile.NamedTemporaryFile('w').write('x')\npathlib.Path.home().joinpath('y').touch()\n"),
    "processes of its own": add(PARTS, "from joblib import Parallel, delayed\n"
        "Parallel(2, backend='threading')(delayed(abs)(i) for i in range(3))\n"),
}  # fmt: skip
DEF = "def dual_parts(*given):\n    "
WRONG = {  # edit, message of q1
    "not written": (put(PARTS, f"{DEF}..."), "nothing is written"),
    "no cell": (lambda cells: cells.remove(cell(cells, PARTS)), "no cell defines it"),
    "a typical mistake": (wrap("right(*given).flip(0)"), "The two are exchanged"),
    "raises": (put(PARTS, f"{DEF}return 1 / 0"), "ZeroDivision"),
    "a syntax error": (add(PARTS, after="\n)"), "SyntaxError: unmatched"),
    "pip of what is not there": (
        add(PARTS, "!pip install seaborn_of_mine\nimport seaborn_of_mine\n"), "No module"),
    "ends its process": (add(PARTS, "import os\nos._exit(3)\n"), "ended the process"),
    "a loop that holds on": (
        add(PARTS, "while True:\n  try:\n    pass\n  except BaseException:\n    pass\n"),
        "longer than 6 s"),
    "an answer that loops": (put(PARTS, f"{DEF}while True:\n        pass"), "longer than 6 s"),
    "300 MB of output": (
        add(PARTS, "for _ in range(300):\n    print('x' * 10**6)\n"), "more than 1 MB"),
    "memory": (add(PARTS, "kept = [bytearray(10**8) for _ in range(99)]\n"), "Memory"),
}  # fmt: skip
SUSPECT = {  # the same, of what the instructor is asked to look at
    "network": (add(PARTS, "import urllib.request as r\nr.urlopen('http://a.example')\n"),
                "network is closed"),
    "the silent patch": (
        put(PARTS, "from iclutils import checks\n"
            "vars(checks)['grade'] = vars(checks)['check'] = lambda *a, **k: None"),
        "no cell defines it"),
    "patches the comparison": (
        put(PARTS, "import iclutils.checks as a\na.compare = lambda *a: None\n"
            f"a._fault = lambda *a: ''\n{DEF}return given[0]"), "shape"),
    "reads the solutions": (
        put(PARTS, f"exec(open({str(table('hw05'))!r}).read())"), "no cell defines it"),
}  # fmt: skip


# Answers to q1 that are after the solution, the grader or the machine, and what they get for q1.
HUNT = """\
import gc, os, sys
def take(text):
    text = text if isinstance(text, str) else bytes(text).decode('utf8', 'replace')
    if 'raw[demos] @' + ' values[demos]' in text:
        raise RuntimeError('the solution leaked')
def read(*paths):
    for path in paths:
        try:
            take(open(path, 'rb').read(10**7))
        except OSError:
            pass
"""
HOSTILE = {
    "hunts the disk": (
        "for top, inner, names in os.walk('/'):\n"
        "    inner[:] = set(inner) - {'proc', 'sys', 'usr', 'lib', 'bin', 'site-packages', 'zoo'}\n"
        "    read(*(f'{top}/{n}' for n in names if n.endswith(('py', '.ipynb', '.pack', 'zip'))))"),
    "hunts a path": "read(SECRET, '/proc/self/root' + SECRET, '/proc/1/root' + SECRET)",
    "hunts by a shell": "said = !cat $SECRET\ntake(str(said))\n!kill -9 -1",
    "hunts in git": ("said = !git -C $ROOT show HEAD:notebooks/assignments/answers/hw05.py\n"
                     "take(str(said))"),
    "hunts in proc": (
        "for pid in os.listdir('/proc'):\n"
        "    read(*(f'/proc/{pid}/{name}' for name in ('environ', 'cmdline', 'maps', 'stack')))\n"
        "    read(f'/proc/{pid}/root' + SECRET, f'/proc/{pid}/cwd/answers/hw05.py')"),
    "hunts in memory": (
        "for each in gc.get_objects():\n"
        "    if type(each) in (str, bytes): take(each)\n"
        "    if getattr(each, '__name__', '') == 'dual_parts': raise RuntimeError('leaked')\n"
        "take(str([sys._getframe(i).f_locals for i in range(12)]))"),
    "imports the grader": "from grading import submissions, handout",
    "kills its parent": "os.kill(os.getppid(), 9)",
    "kills all": "import ctypes\nctypes.CDLL(None).kill(-1, 9)\n!kill -9 -1 1 0",
    "a segmentation fault": "import ctypes\nctypes.string_at(0)",
    "a bomb": "while True:\n    os.fork()",
    "children that stay": ("import time\nfor _ in range(40):\n    if os.fork() == 0:\n"
                           "        time.sleep(99)"),
    "memory of children": ("import time\nfor _ in range(4):\n    if os.fork() == 0:\n"
                           "        kept = bytes(10**9)\n        kept = kept[1:] + b'x'\n"
                           "        time.sleep(99)\ntime.sleep(99)"),
    "fills the disk": "for i in range(900):\n    open(f'{i}', 'wb').write(bytes(10**6))",
    "floods its output": "for _ in range(600):\n    os.write(1, bytes(10**6))",
    "writes elsewhere": (
        "!echo evil > $OTHER\nos.system('echo evil > ' + OTHER)\nopen(OTHER, 'w').write('x')"),
    "writes later": ("import subprocess\nlater = 'sleep 3; echo evil > ' + OTHER\n"
                     "subprocess.Popen(['sh', '-c', later], start_new_session=True)"),
    "writes at exit": "import atexit\natexit.register(lambda: open(OTHER, 'w'))",
    "changes the package": "import iclutils\nopen(iclutils.__file__, 'a').write('#')",
    "forges an end": "import guard\nguard.send({'done': True})\nos._exit(0)",
    "forges an answer": ("import guard\nfrom iclutils.checks import frozen\n"
                         "guard.send({'question': 'q1'}, frozen({str(s): [{'value': float('nan')}]"
                         " for s in range(6)}))\nguard.send({'error': [], 'cell': {}, 'note': 1})"),
    "spoils the pipe": "import guard\nos.write(int(os.environ[guard.TO]), b'\\xff' * 99)",
    "a tensor that lies": (
        "import torch\nclass Lie(torch.Tensor):\n"
        "    __torch_function__ = classmethod(lambda *a, **k: torch.tensor(0.0))\n"
        "def dual_parts(q, k, v, d):\n    return torch.zeros(2, v.shape[1]).as_subclass(Lie)"),
    "patches what compares": (
        "import torch, builtins\ntorch.equal = torch.allclose = lambda *a, **k: True\n"
        "builtins.abs = builtins.max = lambda *a, **k: 0.0\n"
        "def dual_parts(*given):\n    return torch.zeros(2, 3)"),
}  # fmt: skip


def hand_in(folder, name, source, edit, **about):
    notebook = read_json(source)
    edit(notebook["cells"])
    notebook["metadata"] |= about
    folder.mkdir(exist_ok=True, parents=True)
    path = folder / f"{name}.ipynb"
    path.write_text(json.dumps(notebook), encoding="utf-8")
    return path


def files_of(folder):
    """Size and time of each file."""
    found = (path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in found}


def rows(table):
    return {row["name"].removesuffix(".ipynb"): row for row in reports.read(table)}


@pytest.mark.nightly
def test_sixty_submissions_are_graded_fairly(hw05, build, tmp_path, monkeypatch):
    given, other = tmp_path / "given", tmp_path / "other"
    other.write_text("precious")
    names = f"SECRET, ROOT, OTHER = {str(table('hw05'))!r}, {str(ROOT)!r}, {str(other)!r}\n"
    edits = RIGHT | {name: edit for name, (edit, _) in (WRONG | SUSPECT).items()}
    edits |= {name: put(PARTS, HUNT + names + code) for name, code in HOSTILE.items()}
    for name, edit in edits.items():
        hand_in(given, name, hw05.instructor, edit)
    bare = hand_in(given, "without metadata", hw05.instructor, edits["as it is"])
    text = json.dumps({"cells": [{key: each[key] for key in ("cell_type", "source")}
                                 for each in read_json(bare)["cells"]]})  # fmt: skip
    bare.write_text(text, encoding="utf-8-sig")
    named = {"otter": {"assignment_name": "hw02"}}
    hand_in(given, "another", hw05.instructor, edits["as it is"], **named)
    (given / "broken.ipynb").write_text("{")
    (given / "essay.pdf").write_text("an essay")
    science = files_of(ROOT / "iclutils")
    graded = submissions.grade(build, given, "hw05", Limits(step=6.0, seconds=120.0, memory=3.0))
    assert other.read_text() == "precious"
    assert files_of(ROOT / "iclutils") == science
    found = rows(graded)
    for name in HOSTILE:
        row = found[name]
        lost = name in ("forges an end", "patches what compares")
        assert (row["q1"], row["q2"]) == ("0", "4") or (lost and row["q1"] in ("0", "")), row
        assert "leaked" not in row["message"], name
    for name in (*RIGHT, "without metadata"):
        row = found[name]
        assert (row["status"], row["percent"], row["message"]) == ("graded", "100", ""), name
    for name, (_, message) in (WRONG | SUSPECT).items():
        row, status = found[name], "graded" + ": look at it" * (name in SUSPECT)
        assert (row["status"], row["q1"], row["q2"]) == (status, "0", "4"), (name, row)
        assert message in row["message"], (name, row["message"])
    assert "cell 5 installs seaborn_of_mine" in found["pip of what is not there"]["message"]
    assert "a.example" in found["network"]["message"]
    for name, status in {"another": "another homework", "broken": "broken",
                         "essay.pdf": "not a notebook"}.items():  # fmt: skip
        assert (found[name]["status"], found[name]["q1"], found[name]["total"]) == (status, "", "")
        assert found[name]["message"]
    feedback = (graded.parent / "feedback" / "a typical mistake.ipynb.md").read_text()
    assert "| q1 | 0 | 4 | The two are exchanged" in feedback
    before = graded.read_text()
    monkeypatch.setattr(confine, "run", None)  # none is graded again
    again = submissions.grade(build, given, "hw05", Limits(step=6.0, seconds=120.0, memory=3.0))
    assert again.read_text() == before
    assert not (graded.parent / "table.1.csv").exists()


@pytest.mark.nightly
def test_otter_alone_grades_the_same(hw05, tmp_path):
    """What Gradescope runs: it has the hidden checks from the file that it is given."""
    shutil.copy(hw05.instructor, tmp_path / "solved.ipynb")
    command = [sys.executable, "-m", "otter", "run", "-a", str(hw05.autograder), "solved.ipynb"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True,
                   env=os.environ | {"ICLUTILS_HOMEWORK": str(tmp_path)})  # fmt: skip
    tests = read_json(tmp_path / "results.json")["tests"]
    scores = {test["name"]: test.get("score") for test in tests}
    assert (scores["q1"], scores["q2"]) == (4.0, 4.0)


@pytest.mark.nightly
def test_a_private_homework_needs_no_change_of_the_package(tmp_path, monkeypatch):
    private = tmp_path / "private"
    (private / "answers").mkdir(parents=True)
    for source, new in ((assignments.masters()["hw05"], private / "hw77_mine.ipynb"),
                        (table("hw05"), private / "answers" / "hw77.py")):  # fmt: skip
        new.write_text(source.read_text(encoding="utf-8").replace("hw05", "hw77"), encoding="utf-8")
    monkeypatch.setenv("ICLUTILS_HOMEWORK", str(private))
    (made,) = assignments.make(tmp_path / "build")
    hand_in(tmp_path / "given", "ada", made.instructor, lambda cells: None)
    row = rows(submissions.grade(tmp_path / "build", tmp_path / "given"))["ada"]
    assert (row["status"], row["percent"]) == ("graded", "100")


@pytest.fixture
def graded(monkeypatch):
    """``graded(build, folder, name=Grade, ...)`` is the table, where grading gives these."""
    made = Assignment("hw05", *[Path()] * 3, "digest", {"q1": 4.0, "q2": 4.0, "paragraph": 4.0})

    def table(build, folder, retry=False, **grades):
        folder.mkdir(parents=True, exist_ok=True)
        for name in grades:
            (folder / f"{name}.ipynb").write_text(json.dumps({"name": str(folder / name)}))

        def given(path, name, *more):
            each = grades[path.stem]
            if isinstance(each, SystemExit):  # as a signal does
                os.kill(os.getpid(), signal.SIGKILL)
            if isinstance(each, BaseException):
                raise each
            return replace(each, name=name)

        monkeypatch.setattr(submissions, "_graded", given)
        monkeypatch.setattr(assignments, "make", lambda *given: [made])
        return submissions.grade(build, folder, "hw05", jobs=1, retry=retry)

    return table


FULL = Grade("", "graded", {"q1": 4.0, "q2": 4.0})


def test_a_submission_with_which_grading_ended_is_gone_past(graded, tmp_path):
    if (pid := os.fork()) == 0:
        graded(tmp_path, tmp_path / "given", ada=FULL, bob=SystemExit(), eve=FULL)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    again = AssertionError("again")
    found = rows(graded(tmp_path, tmp_path / "given", ada=again, bob=again, eve=FULL))
    assert {name: row["status"] for name, row in found.items()} == {
        "ada": "graded", "bob": "stopped: with the grader", "eve": "graded"
    }  # fmt: skip
    assert "make grade RETRY=1" in found["bob"]["message"]
    found = rows(graded(tmp_path, tmp_path / "given", retry=True, ada=again, bob=FULL, eve=again))
    assert found["bob"]["status"] == "graded"


def test_two_do_not_grade_one_homework_at_once(graded, tmp_path):
    with (
        submissions._alone(tmp_path / "grades" / "hw05"),
        pytest.raises(IclError, match=r"hw05 is being graded in .*: wait until it ends"),
    ):
        graded(tmp_path, tmp_path / "given", ada=FULL)
    assert set(rows(graded(tmp_path, tmp_path / "given", ada=FULL))) == {"ada"}


def test_no_table_is_lost(graded, tmp_path):
    first = graded(tmp_path, tmp_path / "monday", ada=FULL)
    other = graded(tmp_path, tmp_path / "tuesday", ada=FULL)
    assert first != other
    before = first.read_text()
    assert graded(tmp_path, tmp_path / "monday", ada=FULL, bob=FULL) == first
    assert set(rows(first)) == {"ada", "bob"}
    assert (first.parent / "table.1.csv").read_text() == before


def test_points_by_hand_and_comments_join_the_table(graded, tmp_path):
    written = replace(FULL, written="A control that fails, too.")
    table = graded(tmp_path, tmp_path / "given", ada=written)
    assert rows(table)["ada"]["paragraph"] == ""
    assert (rows(table)["ada"]["possible"], rows(table)["ada"]["percent"]) == ("8", "100")
    hand = table.parent / "by_hand.csv"
    (row,) = reports.read(hand)
    assert row["written"] == "A control that fails, too."
    hand.write_text("name,paragraph,comment,written\nada.ipynb,2,Which control?,\n")
    row = rows(graded(tmp_path, tmp_path / "given", ada=written))["ada"]
    assert (row["paragraph"], row["total"], row["possible"]) == ("2", "10", "12")
    feedback = (table.parent / "feedback" / "ada.ipynb.md").read_text()
    assert "| paragraph | 2 | 4 | Which control? |" in feedback
    hand.write_text("name,paragraph\nada.ipynb,two\n")
    with pytest.raises(IclError, match=r"'two', for ada\.ipynb, is no number"):
        graded(tmp_path, tmp_path / "given", ada=written)


def test_several_homeworks_join_into_one_gradebook(graded, tmp_path):
    table = graded(tmp_path, tmp_path / "given", ada_lovelace=FULL, bob=Grade("", "crashed"))
    grades = tmp_path / "grades"
    other = grades / "hw02" / "monday" / "table.csv"
    other.parent.mkdir(parents=True)
    other.write_text(table.read_text().replace(",8,8,", ",5,8,"))
    assert reports.read(reports.gradebook(grades)) == [
        {"student": "ada_lovelace", "hw02": "5", "hw05": "8"}
    ]
    canvas = tmp_path / "canvas.csv"
    canvas.write_text('Student,ID\n"Lovelace, Ada",17\n"Moore, Bob",18\n')
    assert reports.read(reports.gradebook(grades, canvas)) == [
        {"Student": "Lovelace, Ada", "ID": "17", "hw02": "5", "hw05": "8"},
        {"Student": "Moore, Bob", "ID": "18", "hw02": "", "hw05": ""},
    ]
    moodle = tmp_path / "moodle.csv"
    moodle.write_text("First name,Last name\nAda,Lovelace\nBob,Moore\n")
    assert [row["hw05"] for row in reports.read(reports.gradebook(grades, moodle))] == ["8", ""]
    canvas.write_text("Student\nNobody\n")
    with pytest.raises(IclError, match="does not name ada_lovelace"):
        reports.gradebook(grades, canvas)


def test_two_spellings_of_a_name_are_one_student(tmp_path):
    def graded(homework, *rows):
        table = tmp_path / homework / "monday/table.csv"
        table.parent.mkdir(parents=True, exist_ok=True)
        table.write_text("\n".join(["name,student,total", *rows]))

    graded("hw01", "r01 plain.ipynb,r01 plain,8")
    graded("hw02", "r01_plain.ipynb,r01_plain,5", "R01 Plain/a.ipynb,R01 Plain,5")
    (row,) = reports.read(reports.gradebook(tmp_path))
    assert row == {"student": "r01 plain", "hw01": "8", "hw02": "5"}
    roster = tmp_path / "roster.csv"
    roster.write_text("Student\nR01 plain\n")
    assert reports.read(reports.gradebook(tmp_path, roster))[0]["hw02"] == "5"
    graded("hw02", "r01_plain.ipynb,r01_plain,5", "r01 plain.ipynb,r01 plain,4")
    with pytest.raises(IclError, match=r"r01_plain.ipynb with 5 points and r01 plain.ipynb with 4"):
        reports.gradebook(tmp_path)
    graded("hw02", "plain r01.ipynb,plain r01,4")
    with pytest.raises(IclError, match="r01 plain and plain r01 have the same words"):
        reports.gradebook(tmp_path, roster)


@pytest.mark.parametrize(
    ("handed_in", "whose"),
    [
        ("ada.ipynb", "ada"),
        ("ada/hw05.ipynb", "ada"),
        ("Ada Lovelace_12_assignsubmission_file/hw05.ipynb", "Ada Lovelace"),  # Moodle
        ("Ada Lovelace_12_assignsubmission_file_hw05.ipynb", "Ada Lovelace"),
        ("lovelaceada_12_34_hw05.ipynb", "lovelaceada_12"),  # Canvas
        ("lovelaceada_LATE_12_34_hw05-1.ipynb", "lovelaceada_12"),
        ("ada_lovelace_hw05.ipynb", "ada_lovelace_hw05"),
    ],
)
def test_names_of_moodle_and_canvas_are_those_of_their_rosters(handed_in, whose, tmp_path):
    assert reports.student(handed_in) == whose


def test_copies_are_named_also_renamed():
    one = 3 * "def f(a, b):\n    total = a @ b.T\n    for k in range(3):\n        total += k * a\n"
    renamed = one.replace("total", "summe").replace("a", "x") + "\n# my own work"
    other = 3 * "def g(q):\n    return {k: [v**2 for v in q[k] if v > 1] for k in sorted(q)}\n"
    grades = [Grade(name, "graded", code=code)
              for name, code in {"ada": one, "bob": renamed, "eve": other}.items()]  # fmt: skip
    (pair,) = reports.similar(grades)
    assert set(pair[:2]) == {"ada", "bob"}


def test_an_honest_notebook_raises_no_alarm():
    honest = """\
# the otter, sys.modules and setattr are named in a comment
import torch
from iclutils import checks
torch.backends.cuda.matmul.allow_tf32 = False
said = "otter"
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.size = len(list(self.modules()))
checks.check("hw01.q1", said)
"""
    assert not submissions._odd([honest], [honest])


@pytest.mark.parametrize(
    "code",
    ["import otter", "checks.__dict__['grade'] = print",
     "sys.modules['iclutils']", "from iclutils.checks import compare",
     "checks._fault = print", "found = !ls\nimport ctypes",
     "open('notebooks/assignments/answers/hw01.py')"],
)  # fmt: skip
def test_who_touches_the_grader_is_named(code):
    assert submissions._odd([code], ["from iclutils import checks", code])


def test_a_table_holds_no_formula(tmp_path):
    evil = Grade("=HYPERLINK(1).ipynb", "broken", notes={"": "-1\nb"})
    (row,) = reports.read(reports.write(tmp_path, "hw05", [evil], {"q1": 2.0}))
    assert (row["name"], row["message"], row["q1"]) == ("'=HYPERLINK(1).ipynb", "'-1 b", "")

"""Coursework as an instructor uses it: derived by otter, graded in bounds, into a table."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unicodedata
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import psutil
import pytest
from filelock import FileLock
from grading import assignments, class_trial, confine, reports, submissions
from grading.assignments import Homework

from iclutils.errors import IclError
from iclutils.files import read_json

ROOT = Path(__file__).parents[2]
pytest.importorskip("otter", reason="needs otter-grader (extra: coursework)")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="bounds need a POSIX system")


@pytest.fixture(scope="module")
def where():
    """What confines submissions here."""
    try:
        return confine.sandbox()
    except IclError as error:
        pytest.skip(f"no sandbox: {error}")


@pytest.fixture
def bounded(where):
    """``bounded(code)`` runs code in a sandbox, as the worker that runs a submission."""

    def run(code, within=where, **limits):
        ended = confine.run(within, {"checks": code}, confine.LIMITS | limits)
        return SimpleNamespace(**dict(zip(("stopped", "told", "text"), ended, strict=True)))

    return run


def test_a_program_sees_libraries_and_an_empty_folder(bounded, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_GRADER", "x")
    end = bounded(
        "import os; print(os.listdir(), 'SECRET_OF_THE_GRADER' in os.environ); os.openpty()"
    )
    parts = Path(sys.prefix).parts  # of an environment below /tmp the way to it is seen
    assert f"{[parts[2]] if parts[1] == 'tmp' else []} False" in end.text
    assert end.stopped == ""


LOOP = "while True: pass"
HOLD = "kept = bytearray(6 * 10**8); import os; os.fork(); kept[::99] = kept[::99]\n"
SLEEP = "__import__('time').sleep(600)"


@pytest.mark.parametrize(
    ("code", "limits", "stopped"),
    [(LOOP, {"seconds": 1.0}, "time"),
     (SLEEP, {"seconds": 0.2}, "time"),
     (HOLD + SLEEP, {"memory": 0.7}, "memory"),
     ("import os; os._exit(124)", {}, "step")],
    ids=["loop", "wait", "memory", "step"],
)  # fmt: skip
def test_a_program_that_breaks_a_bound_is_stopped(bounded, code, limits, stopped):
    assert bounded(code, **limits).stopped == stopped


@pytest.mark.parametrize(
    ("code", "said"),
    [("import os, time\nfor _ in range(150):\n    if not os.fork(): time.sleep(60)", "BlockingIO"),
     ("import time; time.sleep(2); print('time of others')", "time of others"),
     ("import socket\ns = socket.create_server(('127.0.0.1', 0))\n"
      "socket.create_connection(s.getsockname(), 5); print('talks to itself')", "talks to itself"),
     ("import socket; socket.create_connection(('192.0.2.1', 80), 5)", "Network is unreachable"),
     ("f = open('big', 'wb')\nf.seek(2**25)\nf.write(b'0')\nf.close()", "too large"),
     ("for i in range(600): open(f'/dev/shm/{i}', 'wb').write(bytes(10**6))", "No space left"),
     ("open('/x', 'w').write('x')", "Read-only file system")],
    ids=["processes", "clock", "itself", "network", "a file", "files", "the disk"],
)  # fmt: skip
def test_a_program_may_do_this_and_no_more(bounded, code, said):
    end = bounded(code, seconds=1.0 if said == "time of others" else 60.0)
    assert (said in end.text, end.stopped) == (True, "")


# Libraries and native code that read and write past Python's own functions, and mounts.
ATTACKS = {
    "walk": "import os\nfor top, inner, names in os.walk('/'):\n"
            "    inner[:] = set(inner) - {{'proc', 'sys', 'usr', 'lib', 'bin', 'site-packages'}}\n"
            "    for name in names:\n"
            "        path = os.path.join(top, name)\n"
            "        if path.endswith(('py', 'ipynb', 'pack', 'zip')) and os.access(path, 4):\n"
            "            text = open(path, errors='replace').read()\n"
            "            if 'left(whole -' + ' parts' in text: print(text[-4000:])",
    "paths": "import os\nfor root in ('', '/proc/self/root', '/proc/1/root'):\n"
             "    os.system('cat ' + root + {secret!r})\n"
             "os.system('cat /proc/*/environ /proc/*/cmdline /proc/*/cwd/answers/hw05.py')\n"
             "os.system('git -C {root} show HEAD:notebooks/assignments/answers/hw05.py')",
    "pyarrow": "import pyarrow.csv as c; print(c.read_csv({secret!r}))",
    "libc": "import ctypes; libc = ctypes.CDLL(None); "
            "libc.write(libc.open(b'{other}', 1), b'evil', 4); libc.system(b'echo evil >{other}')",
    "unmount": "import os; os.system('unshare -rm sh -c \"umount -a; cat {secret}\"')",
    "mount": "import os; os.system('unshare -rm sh -c \"mount -o remount,rw,bind {library}; "
             "echo > {library}/evil\"')",
}  # fmt: skip


@pytest.mark.parametrize("by", ATTACKS)
def test_nothing_outside_is_read_or_written(bounded, by, tmp_path):
    other, library = tmp_path / "other.ipynb", Path(json.__file__).parent
    other.write_text("precious")
    places = {
        "other": str(other),
        "secret": str(assignments.table("hw05")),
        "library": str(library),
        "root": str(ROOT),
    }
    end = bounded(ATTACKS[by].format(**places), seconds=20.0)
    assert "left(whole" not in end.text
    assert other.read_text() == "precious"
    assert not (library / "evil").exists()


def becomes(wanted, mark):
    """Whether soon a process of this name is there, or none is; names of ended ones may stay."""
    for _ in range(100):
        there = any(mark in " ".join(p.info["cmdline"] or ()) and p.info["status"] != "zombie"
                    for p in psutil.process_iter(["cmdline", "status"]))  # fmt: skip
        if there == wanted:
            return True
        time.sleep(0.1)
    return False


def test_what_is_left_behind_is_ended(bounded):
    mark = f"mark{time.monotonic_ns()}"
    bounded(
        f"import os\nif not os.fork():\n    os.setsid()\n    os.execvp('sleep', ['{mark}', '60'])"
    )
    assert becomes(False, mark)


def test_a_grader_that_is_killed_leaves_nothing_running_and_no_folder(
    where, bounded, tmp_path, monkeypatch
):
    if where[0] != "bubblewrap":
        pytest.skip("a container is its daemon's")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mark = f"mark{time.monotonic_ns()}"
    if (pid := os.fork()) == 0:
        bounded(f"import os\nos.execvp('sleep', ['{mark}', '60'])")
        os._exit(0)
    assert becomes(True, mark)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert becomes(False, mark)
    assert not list(tmp_path.iterdir())


def test_an_output_without_end_ends(bounded):
    end = bounded("import os\nwhile True: os.write(1, bytes(10**6))", seconds=60.0)
    assert (end.stopped, end.told) == ("", {})
    code = "import os\nos.write(1, b''.join(b'[%d, 0]\\n' % i for i in range(10**6)))"
    assert len(bounded(code).told) == confine.LINES


def test_solutions_among_libraries_are_hidden(bounded, tmp_path, monkeypatch):
    """Also where the environment lies below ``/tmp``, as this folder does."""
    library, masters = tmp_path / "x-packages", tmp_path / "x-packages" / "masters"
    masters.mkdir(parents=True)
    (masters / "secret").write_text("secret of the masters")
    (library / "module.py").write_text("print('module is read')")
    monkeypatch.setenv("ICLUTILS_HOMEWORK", str(masters))
    monkeypatch.syspath_prepend(str(library))
    read = f"print(open({str(masters / 'secret')!r}).read())"
    end = bounded(f"exec(open({str(library / 'module.py')!r}).read())\n{read}")
    assert "module is read" in end.text
    assert "secret of the masters" not in end.text


def test_where_nothing_confines_grading_stops_and_says_what_helps(graded, monkeypatch):
    monkeypatch.setattr(confine.shutil, "which", lambda name: None)
    monkeypatch.setattr(confine.importlib.util, "find_spec", lambda name: None)
    confine.sandbox.cache_clear()
    with pytest.raises(IclError, match=r"(?s)apt install bubblewrap.*UNCONFINED=1"):
        confine.sandbox()
    with pytest.raises(IclError, match="bubblewrap: not installed; docker: not installed"):
        graded("class", unconfined=False, ada=FULL)
    found = rows(graded("class", ada=FULL))
    assert found["ada"]["confined"] == "UNCONFINED"
    confine.sandbox.cache_clear()


# Docker as far as it is used; what is to run in a container runs here.
DOCKER = """\
import os, sys
print(*sys.argv[1:-2], file=open({log!r}, "a"))  # without the worker
if sys.argv[1] == "build":
    print("sha256:1")
elif sys.argv[1] == "run":
    at = sys.argv.index("sha256:1") + 1
    own = dict(each[6:].split("=", 1) for each in sys.argv if each.startswith("--env="))
    words = [sys.executable if word == "python" else word for word in sys.argv[at:]]
    os.execvpe(words[0], words, own | {{"PATH": os.environ["PATH"], "PYTHONPATH": {root!r}}})
"""
# By the names in docs.docker.com/reference/cli/docker.
OPTIONS = (
    "--rm --interactive --init --read-only --network none --memory 4.0g --memory-swap 4.0g "
    "--pids-limit 100 --cap-drop ALL --security-opt no-new-privileges --user --workdir /tmp --tmpfs"
)


def test_docker_is_asked_for_bounds(bounded, tmp_path, monkeypatch):
    program, stub, log = (tmp_path / name for name in ("docker", "stub.py", "log"))
    stub.write_text(DOCKER.format(log=str(log), root=str(ROOT)))
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{stub}" "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(confine.shutil, "which", lambda n: str(program) if n == "docker" else None)
    monkeypatch.setattr(confine.importlib.util, "find_spec", lambda name: None)
    confine.sandbox.cache_clear()
    place = confine.sandbox()
    confine.sandbox.cache_clear()
    assert place == ("docker", str(program))
    assert "student" in bounded("import os; print(os.environ['USER'])", place).text
    assert bounded(LOOP, place, seconds=1.0).stopped == "time"
    calls = [line.split() for line in log.read_text().splitlines()]
    assert [call[0] for call in calls] == ["build", *["run", "rm"] * 3], "one image for all"
    assert [word for word in OPTIONS.split() if word not in calls[1]] == []


def test_an_image_is_made_of_the_package_alone():
    """Also by a builder that is sent the whole folder."""
    recipe = Path(confine.__file__).with_name("Dockerfile").read_text()
    copied = re.findall(r"^COPY (.+) /package", recipe, re.MULTILINE)
    sent = (ROOT / ".dockerignore").read_text().splitlines()[1:]
    assert sent == ["*", *sorted(f"!{name}" for name in " ".join(copied).split())]
    assert not any("assignments" in name for name in sent)


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    return tmp_path_factory.mktemp("build")


@pytest.fixture(scope="module")
def hw05(build):
    (made,) = assignments.make(build, "hw05")
    return made


@pytest.mark.nightly
@pytest.mark.parametrize("homework", assignments.masters())
def test_a_homework_is_whole_with_its_solutions_and_runs_without(homework, build, tmp_path):
    """Otter refuses a master whose solution fails. Students get no solution, no hidden test."""
    (made,) = assignments.make(build, homework)
    text = made.student.read_text(encoding="utf-8")
    assert "hidden=True" not in text
    assert "SOLUTION" not in text
    assert "## In your own words" in text
    before = made.student.stat().st_mtime_ns
    assert assignments.make(build, homework)[0].student.stat().st_mtime_ns == before
    (autograder,) = made.solved.parent.glob("*.zip")
    with ZipFile(autograder) as autograder:
        assert f"files/{homework}.py" in autograder.namelist()
    for name, source in (("solved", made.solved), ("empty", made.student)):
        hand_in(tmp_path / "given", name, source, lambda cells: None)
    found = rows(submissions.grade(build, tmp_path / "given", homework))
    asked = made.points.keys() - {*made.by_hand}
    possible = f"{sum(made.points[name] for name in asked):g}"
    assert (found["solved"]["total"], found["solved"]["message"]) == (possible, "")
    assert (found["empty"]["status"], found["empty"]["total"]) == ("graded", "0")
    assert found["empty"]["message"].count("nothing is written yet") == len(asked)


@pytest.mark.nightly
def test_a_master_that_fails_its_own_tests_is_refused(tmp_path, monkeypatch):
    master = read_json(assignments.masters()["hw05"])
    solution = cell(master["cells"], PARTS)
    solution["source"] = "".join(solution["source"]).replace("whole - rest", "rest - whole")
    (tmp_path / "answers").mkdir()
    shutil.copy(assignments.table("hw05"), tmp_path / "answers")
    (tmp_path / "hw05_x.ipynb").write_text(json.dumps(master))
    monkeypatch.setenv("ICLUTILS_HOMEWORK", str(tmp_path))
    with pytest.raises(IclError, match=r"hw05_x.*refuses it.*less the output without"):
        assignments.make(tmp_path / "build")
    assert not list((tmp_path / "build").glob("assignments/*"))


def zipped(**files):
    with ZipFile(whole := io.BytesIO(), "w") as packed:
        for name, data in files.items():
            packed.writestr(name.replace("_", "."), data)
    return whole.getvalue()


def test_a_notebook_in_a_zip_is_read():
    text = b'{"cells": [{"cell_type": "code", "source": ["x =", " 1"]}]}'
    whole = zipped(a_ipynb=text, a_txt=b"read me")
    assert submissions._cells(whole, "hw05") == [(True, "x = 1")]


@pytest.mark.parametrize(
    ("name", "data", "status", "message"),
    [("a.ipynb", b"", "broken", "it begins with ''. Ask for"),
     ("a.ipynb", b"<!DOCTYPE html><html>", "broken", "it begins with '<!DOCTYPE html>"),
     ("a.pdf", b"%PDF-1.7", "not a notebook", "Ask for"),
     ("a.ipynb", b"\xff\xfe\x00", "broken", "It is no notebook"),
     ("a.ipynb", b'{"cells": [{"cell', "broken", "breaks off"),
     ("a.ipynb", b'{"cells": [3]}', "broken", "It is no notebook"),
     ("a.zip", b"PK\x03\x04 cut", "broken", "begins with 'PK"),
     ("a.zip", zipped(a_ipynb=b"{}", b_ipynb=b"{}"), "broken", "Ask for"),
     ("a.zip", zipped(a_pdf=b"%PDF"), "broken", "Ask for")],
)  # fmt: skip
def test_what_is_no_notebook_is_told_why_and_what_helps(hw05, name, data, status, message):
    row = submissions._grade(Path(name), data, hw05, ("", ""), confine.LIMITS)
    assert row["status"] == status
    assert message in row["message"]


# Grading: submissions of hw05, right, wrong and hostile, and what is to become of each

PARTS = "def part_and_change"


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
    """The answer becomes what ``answer`` makes of the right one and of what it is given."""
    return add(
        PARTS, after=f"\n\nright = part_and_change\npart_and_change = lambda *given: {answer}"
    )


def _restless(cells):
    """One answer takes what is there when it is checked, another what comes last."""
    for begins, old, new in (
        ("def swapped", "return ", "return OFF + "),
        (PARTS, "math.", "late."),
    ):
        found = cell(cells, begins)
        found["source"] = "OFF = 0\n" + "".join(found["source"]).replace(old, new)
    source = "OFF = 3\nimport math as late"
    cells.append({"cell_type": "code", "metadata": {}, "source": source, "outputs": []})


def _imports_last(cells):
    cells.append(cells.pop(cells.index(cell(cells, "import math"))))


RIGHT = {  # edits
    "imports come last": _imports_last,
    "names that change, and come late": _restless,
    "double precision": add("import math", after="\ntorch.set_default_dtype(torch.float64)"),
    "as it is": lambda cells: None,
    "requires grad": wrap("right(*given).requires_grad_()"),
    "changes its inputs": wrap("(right(*given), given[2].zero_())[0]"),
    "a loss in a list": add("def features", after="\n\nloss = biased_loss\n"
                            "biased_loss = lambda *given: loss(*given)[None]"),
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
DEF = "def part_and_change(*given):\n    "
WRONG = {  # edit, message of q1
    "not written": (put(PARTS, f"{DEF}..."), "nothing is written"),
    "no cell": (lambda cells: cells.remove(cell(cells, PARTS)), "is missing"),
    "a typical mistake": (wrap("right(*given).flip(0)"), "The parts come first"),
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
        add(PARTS, "for _ in range(300):\n    print('x' * 10**6)\n"), "File too large"),
    "memory": (add(PARTS, "kept = [bytearray(10**8) for _ in range(99)]\n"), "Memory"),
}  # fmt: skip
CHEATS = {  # they change what judges, in their own process
    "the silent patch": (
        put(PARTS, "import checks\n"
            "vars(checks)['grade'] = vars(checks)['check'] = lambda *a, **k: None"),
        "is missing"),
    "patches the comparison": (
        put(PARTS, "import checks as a\na.compare = lambda *a: None\n"
            f"a._fault = lambda *a: ''\n{DEF}return given[0]"), "shape"),
}  # fmt: skip
WRONG |= CHEATS


# Answers to q1 that are after the grader or the machine (those that are after files stand above).
TELL = """\
import os
def tell(line):
    for fd in range(3, 99):
        try:
            os.write(fd, line)
        except OSError:
            pass
"""
HOSTILE = {
    "hunts in memory": (
        "import gc, sys\nframes = str([sys._getframe(i).f_locals for i in range(12)])\n"
        "for each in [frames, *gc.get_objects()]:\n"
        "    text = each if type(each) is str else getattr(each, '__name__', '')\n"
        "    if text == 'part_and_change' or 'left(whole -' + ' parts' in str(text):\n"
        "        raise RuntimeError('leaked')"),
    "kills all": ("import ctypes, os\nos.kill(os.getppid(), 9)\nctypes.CDLL(None).kill(-1, 9)\n"
                  "!kill -9 -1 1 0"),
    "a segmentation fault": "import ctypes\nctypes.string_at(0)",
    "a bomb": "import os\nwhile True:\n    os.fork()",
    "forges an end": TELL + (
        "for seed in range(6):\n    tell(b'[\"q1 %d\", \"\"]\\n' % seed)\n"
        "tell(b'[\"done\", true]\\n')\nos._exit(0)"),
    "forges beginnings": TELL + (
        "import time\ntell(b'[\"%d\", null]\\n' % time.time_ns())\nos._exit(0)"),
    "forges an answer": TELL + (
        "tell(b'[\"q1 0\", [NaN]]\\n[\"q1 1\", 7]\\n[[\"q1\"], {}]\\n')\n"
        "tell(b'[\"signed\", []]\\n[\"q1\", 3]\\n')\ntell(b'\\xff' * 99 + b'[' * 10**5)"),
    "a tensor that lies": (
        "import torch\nclass Lie(torch.Tensor):\n"
        "    __torch_function__ = classmethod(lambda *a, **k: torch.tensor(0.0))\n"
        "def part_and_change(q, k, v, d):\n    return torch.zeros(2, v.shape[1]).as_subclass(Lie)"),
    "patches what compares": (
        "import torch, builtins\ntorch.equal = torch.allclose = lambda *a, **k: True\n"
        "builtins.abs = builtins.max = lambda *a, **k: 0.0\n"
        "def part_and_change(*given):\n    return torch.zeros(2, 3)"),
}  # fmt: skip


def hand_in(folder, name, source, edit, **about):
    notebook = read_json(source)
    edit(notebook["cells"])
    notebook["metadata"] |= about
    folder.mkdir(exist_ok=True, parents=True)
    path = folder / f"{name}.ipynb"
    path.write_text(json.dumps(notebook), encoding="utf-8")
    return path


def read(table):
    return reports.table_of(table).to_dict("records")


def rows(table):
    return {row["name"].removesuffix(".ipynb"): row for row in read(table)}


def page_of(table, submission):
    return table.parent / "feedback" / f"{submission}.md".removeprefix("/")


def _of_others(folder, hw05):
    """What is no submission of this homework, or has lost what says that it is one."""
    bare = hand_in(folder, "without metadata", hw05.solved, lambda cells: None)
    text = json.dumps({"cells": [{key: each[key] for key in ("cell_type", "source")}
                                 for each in read_json(bare)["cells"]]})  # fmt: skip
    bare.write_text(text, encoding="utf-8-sig")
    named = {"otter": {"assignment_name": "hw02"}}
    hand_in(folder, "another", hw05.solved, lambda cells: None, **named)
    (folder / "broken.ipynb").write_text("{")
    (folder / "essay.pdf").write_text("an essay")


GROUPS = {"right": [*RIGHT, "without metadata"], "wrong": [*WRONG], "hostile": [*HOSTILE]}


@pytest.mark.nightly
@pytest.mark.parametrize("group", GROUPS)
def test_submissions_of_all_kinds_are_graded_fairly(hw05, build, tmp_path, monkeypatch, group):
    given = tmp_path / "given"
    edits = RIGHT | {name: edit for name, (edit, _) in WRONG.items()}
    edits |= {name: put(PARTS, code) for name, code in HOSTILE.items()}
    for name in edits.keys() & {*GROUPS[group]}:
        hand_in(given, name, hw05.solved, edits[name])
    if group == "right":
        _of_others(given, hw05)
    limits = {"step": 6.0, "seconds": 120.0, "memory": 3.0}
    graded = submissions.grade(build, given, "hw05", limits)
    found = {name: row for name, row in rows(graded).items() if row["folder"] == str(given)}
    for name in GROUPS[group]:
        row = found.pop(name)
        if group == "right":
            assert (row["status"], row["total"], row["possible"]) == ("graded", "16", "16"), row
            assert row["message"] == ""
        elif group == "wrong":
            assert (row["status"], row["q1"], row["q2"]) == ("graded", "0", "4"), row
            assert WRONG[name][1] in row["message"], row
        else:
            lost = name in ("forges an end", "patches what compares")
            assert (row["q1"], row["q2"]) == ("0", "4") or (lost and row["q1"] in ("0", "")), row
            assert "leaked" not in row["message"], row
    statuses = {name: (row["status"], row["total"]) for name, row in found.items()}
    others = {"another": "another homework", "broken": "broken", "essay.pdf": "not a notebook"}
    assert statuses == {name: (what, "") for name, what in others.items() if group == "right"}
    if group == "wrong":
        page = page_of(graded, given / "a typical mistake.ipynb").read_text()
        assert "- q1: 0\n" in page
        assert "- message: q1: The parts come first" in page
    before = graded.read_bytes()
    monkeypatch.setattr(confine, "run", None)  # none is graded again
    assert submissions.grade(build, given, "hw05", limits).read_bytes() == before


@pytest.mark.nightly
def test_otter_alone_grades_the_same(hw05, tmp_path):
    """What Gradescope runs: it has the hidden checks from the file that it is given."""
    hand_in(tmp_path, "right", hw05.solved, lambda cells: None)
    hand_in(tmp_path, "wrong", hw05.solved, WRONG["a typical mistake"][0])
    hand_in(tmp_path, "public", hw05.solved, wrap("right(*given) * (len(given[1]) < 7)"))
    (autograder,) = hw05.solved.parent.glob("*.zip")
    for name, points in (("right", 4.0), ("wrong", 0.0), ("public", 2.0)):
        command = [sys.executable, "-m", "otter", "run", "-a", str(autograder), f"{name}.ipynb"]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True,
                       env=os.environ | {"ICLUTILS_HOMEWORK": str(tmp_path)})  # fmt: skip
        tests = read_json(tmp_path / "results.json")["tests"]
        scores = {test["name"]: test.get("score") for test in tests}
        assert (scores["q1"], scores["q2"]) == (points, 4.0)


@pytest.mark.nightly
def test_a_private_homework_needs_no_change_of_the_package(tmp_path, monkeypatch):
    private, package = tmp_path / "private", "iclutils @ git+https://a.example/book@1"
    (private / "answers").mkdir(parents=True)
    for source, new in ((assignments.masters()["hw05"], private / "hw77_mine.ipynb"),
                        (assignments.table("hw05"), private / "answers" / "hw77.py")):  # fmt: skip
        text = source.read_text(encoding="utf-8").replace("hw05", "hw77")
        text = text.replace(r"name: hw77\n", rf"name: hw77\nrequirements: ['{package}']\n")
        new.write_text(text, encoding="utf-8")
    monkeypatch.setenv("ICLUTILS_HOMEWORK", str(private))
    monkeypatch.syspath_prepend(str(private / "answers"))
    (made,) = assignments.make(tmp_path / "build")
    (autograder,) = made.solved.parent.glob("*.zip")
    with ZipFile(autograder) as autograder:  # what Gradescope installs
        assert package in autograder.read("environment.yml").decode()
    hand_in(tmp_path / "given", "ada", made.solved, lambda cells: None)
    row = rows(submissions.grade(tmp_path / "build", tmp_path / "given", "hw77"))["ada"]
    assert (row["status"], row["total"], row["possible"]) == ("graded", "16", "16")


# What is lost never: files, points and names, whatever happens to them

POINTS = {"q1": 4.0, "q2": 4.0, "paragraph": 4.0}


def result(status="graded", written="", message="", **scores):
    scores = scores or dict.fromkeys(("q1", "q2"), 4.0) if status == "graded" else {}
    return {"status": status, "scores": scores, "message": message, "written": written,
            "signed": "", "confined": ""}  # fmt: skip


FULL, CRASHED = result(), result("crashed")
WRITTEN = result(written="A control that fails, too.")


@pytest.fixture
def graded(monkeypatch, tmp_path):
    """``graded(folder, name=result, ...)`` is the table, where grading gives these."""
    made = Homework(name="hw05", digest="digest", points=POINTS, by_hand=["paragraph"])

    def table(folder, unconfined=True, **grades):
        folder = tmp_path / folder
        folder.mkdir(parents=True, exist_ok=True)
        for name in grades:
            if not (path := folder / f"{name}.ipynb").exists():
                path.write_text(json.dumps({"name": str(path)}))

        def given(path, data, made, where, limits):
            each = grades[path.stem]
            if isinstance(each, SystemExit):  # as a power cut does
                os.kill(os.getpid(), signal.SIGKILL)
            if isinstance(each, BaseException):
                raise each
            if callable(each):
                each = each()
            return each | {"confined": where[0]}

        monkeypatch.setattr(submissions, "_grade", given)
        monkeypatch.setattr(assignments, "make", lambda *given: [made])
        monkeypatch.setattr(submissions, "JOBS", 1)
        return submissions.grade(tmp_path, folder, "hw05", unconfined=unconfined)

    return table


def test_a_crash_in_the_middle_loses_nothing(graded):
    if (pid := os.fork()) == 0:
        graded("class", ada=FULL, bob=SystemExit(), eve=FULL)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    found = rows(graded("class", ada=AssertionError("again"), bob=FULL, eve=FULL))
    assert {name: row["total"] for name, row in found.items()} == dict.fromkeys(found, "8")


def test_ctrl_c_ends_at_once_and_leaves_nothing_running(graded, where):
    """What was graded is stored, and what was not is graded by the next call."""
    mark = f"mark{time.monotonic_ns()}"
    code = {"checks": f"import os\nos.execvp('sleep', ['{mark}', '60'])"}

    def waits():
        return result(f"stopped: {confine.run(where, code, confine.LIMITS)[0]}")

    if (pid := os.fork()) == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            graded("class", ada=FULL, bob=waits, eve=FULL)
        except KeyboardInterrupt:
            os._exit(7)
        os._exit(0)
    assert becomes(True, mark)
    os.kill(pid, signal.SIGINT)
    start = time.monotonic()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert time.monotonic() - start < 5
    assert becomes(False, mark)
    found = rows(graded("class", ada=AssertionError("again"), bob=FULL, eve=FULL))
    assert {name: row["total"] for name, row in found.items()} == dict.fromkeys(found, "8")


def test_what_ended_a_process_is_a_step_that_began_and_no_forged_name(monkeypatch):
    first = {"code cell 1": None, "another": None, "code cell 2": "", "7": None}
    ends = [("", first, ""), ("", {"done": True}, "")]
    plans = []
    monkeypatch.setattr(confine, "run", lambda where, plan, _: (plans.append(plan), ends.pop(0))[1])
    steps = ["code cell 1", "code cell 2"]
    told, status = submissions._run({}, steps, ("", ""), confine.LIMITS)
    assert status == "graded"
    assert plans[1]["skip"] == ["code cell 1"]
    assert told["code cell 1"] == "it ended the process that ran it"


def test_two_do_not_grade_one_homework_at_once(graded, tmp_path):
    place = tmp_path / "grades" / "hw05"
    place.mkdir(parents=True)
    lock = place / "being_graded.lock"
    with FileLock(lock), pytest.raises(OSError, match=r"being_graded.* could not be acquired"):
        graded("class", ada=FULL)
    assert set(rows(graded("class", ada=FULL))) == {"ada"}


@pytest.fixture
def enter(tmp_path):
    """A person enters points into one of the files, or gives it another text."""

    def write(text=None, encoding="utf-8", file="by_hand.csv", **points):
        path = tmp_path / "grades" / "hw05" / file
        table = reports.table_of(path)
        table["points"] = table["student"].map(points).fillna(table["points"])
        comments = {name: f"for {name}" for name in points}
        table["comment"] = table["student"].map(comments).fillna(table["comment"])
        whole = table.to_csv(index=False)
        path.write_bytes((text(whole) if text else whole).encode(encoding))
        return path

    return write


@pytest.fixture
def book(tmp_path):
    """The gradebook, where a roster is another one than none."""

    def rows_of(roster=None):
        path = tmp_path / "roster.csv"
        if roster:
            path.write_bytes(roster if isinstance(roster, bytes) else roster.encode())
        return read(reports.gradebook(tmp_path / "grades", path if roster else None))

    return rows_of


def test_points_and_comments_that_a_person_enters_join_table_page_and_book(
    graded, enter, book, tmp_path
):
    table = graded("class", ada=WRITTEN)
    assert (rows(table)["ada"]["paragraph"], rows(table)["ada"]["possible"]) == ("", "8")
    path = enter(ada="2,5")
    (entry,) = read(path)
    assert (entry["written"], entry["of"]) == ("A control that fails, too.", "4")
    assert book() == [{"student": "ada", "hw05": "10.5"}]
    row = rows(graded("class", ada=WRITTEN))["ada"]
    assert (row["paragraph"], row["total"], row["possible"]) == ("2.5", "10.5", "12")
    page = page_of(table, tmp_path / "class/ada.ipynb").read_text()
    assert "- paragraph: 2.5\n" in page
    assert "- comment: for ada\n" in page


@pytest.mark.parametrize("wrong", ["4.01", "-3", "nan", "two"])
def test_points_that_cannot_be_name_row_and_student(graded, enter, book, wrong):
    graded("class", ada=FULL, bob=FULL)
    before = enter(ada="3", bob=wrong).read_bytes()
    with pytest.raises(IclError, match=rf"row 3, bob: '{wrong}' for paragraph. Enter .* 4 for par"):
        graded("class", ada=FULL, bob=FULL)
    with pytest.raises(IclError, match="row 3, bob"):
        book()
    assert enter(bob=wrong, ada="3").read_bytes() == before


def test_points_of_another_question_and_of_the_machine(graded, enter):
    """A person may give other points than the machine, and not for what is no question."""
    graded("class", ada=FULL, bob=CRASHED)
    enter(lambda text: text + "ada,q1,1,,late,\nbob,q1,3,,on paper,\n")
    found = rows(graded("class", ada=FULL, bob=CRASHED))
    assert (found["ada"]["q1"], found["ada"]["total"]) == ("1", "5")
    assert (found["bob"]["q1"], found["bob"]["total"]) == ("3", "3")
    enter(lambda text: text + "ada,q7,1,,,\n")
    with pytest.raises(IclError, match=r"row 6, ada: '1' for q7. Enter points from 0 to 4 for q1"):
        graded("class", ada=FULL)
    enter(lambda text: text.replace("ada,q7,1", "ada,q1,2"))
    with pytest.raises(IclError, match=r"row 6, ada: '2' for q1. Enter .*, once"):
        graded("class", ada=FULL)


@pytest.mark.parametrize("other", ["b/monday", "tuesday", "monday"])
def test_nothing_is_lost_when_another_folder_is_graded(graded, enter, book, other):
    """One of the same name, one of another name, the same a second time."""
    table = graded("monday", ada=FULL)
    path = enter(ada="3")
    before, first = path.read_bytes(), table.read_bytes()
    again = {"ada": FULL} if other == "monday" else {}
    found = rows(graded(other, **again, bob=FULL))
    assert (found["ada"]["q1"], found["bob"]["total"]) == ("4", "8")
    assert path.with_name("by_hand_old1.csv").read_bytes() == before
    assert table.with_name("table_old1.csv").read_bytes() == first
    entries = {row["student"]: (row["points"], row["comment"]) for row in read(path)}
    assert entries == {"ada": ("3", "for ada"), "bob": ("", "")}
    enter(bob="1")
    assert {row["student"]: row["hw05"] for row in book()} == {"ada": "11", "bob": "9"}


@pytest.mark.parametrize(
    ("text", "encoding"),
    [(lambda text: text, "utf-8-sig"),
     (lambda text: text.replace(",", ";"), "cp1252"),
     (lambda text: "sep=;\n" + text.replace(",", ";"), "utf-8"),
     (lambda text: text.replace(",", "\t"), "utf-16"),
     (lambda text: text.replace("\n", "\r\n\r\n") + ",,,,,\r\n", "utf-8"),
     (lambda text: text.replace("4,for Åsa,", "4"), "utf-8")],
)  # fmt: skip
def test_what_a_spreadsheet_saved_is_read(graded, enter, text, encoding):
    graded("class", Åsa=FULL)
    enter(text, encoding, Åsa="3")
    assert rows(graded("class", Åsa=FULL))["Åsa"]["total"] == "11"


@pytest.mark.parametrize(
    ("text", "message"),
    [(lambda text: text.replace("points", "Points"), "no column points"),
     (lambda text: "Homework 5\n" + text, "no column student, question, points")],
)  # fmt: skip
def test_what_a_person_entered_is_never_passed_over(graded, enter, book, text, message):
    graded("class", ada=FULL)
    enter(text, ada="3")
    for again in (lambda: graded("class", ada=FULL), book):
        with pytest.raises(IclError, match=message):
            again()


def test_numbers_of_students_as_a_spreadsheet_saves_them(graded, enter, book):
    """Noughts before a number go; of a long one digits go, and then nobody has that name."""
    graded("class", **{"00123": FULL, "00456": FULL})
    enter(lambda text: text.replace("00123", "123"), **{"00123": "3"})
    assert book() == [{"student": "00123", "hw05": "11"}, {"student": "00456", "hw05": "8"}]
    enter(lambda text: text.replace("123", "1.23E+02"), **{"123": "3"})
    assert {row["student"]: row["hw05"] for row in book()} == {
        "00123": "8", "00456": "8", "1.23E+02": "3"}  # fmt: skip
    assert {row["ID"]: row["hw05"] for row in book("ID\n00123\n456\n1.23E+02\n")} == {
        "00123": "8", "456": "8", "1.23E+02": "3"}  # fmt: skip


def test_a_question_that_a_homework_has_no_more_counts_no_more(graded, book):
    assert rows(graded("monday", ada=result(q1=4.0, q9=1.0)))["ada"]["total"] == "4"
    assert rows(graded("tuesday", bob=FULL))["ada"]["total"] == "4"
    assert [row["hw05"] for row in book()] == ["4", "8"]


def test_folders_of_one_name_have_pages_of_their_own(graded, tmp_path):
    for folder, points in (("a/monday", FULL), ("b/monday", result(q1=1.0)), ("a/monday", FULL)):
        table = graded(folder, ada=points)
    for folder, points in (("a", "4"), ("b", "1")):
        page = page_of(table, tmp_path / folder / "monday/ada.ipynb")
        assert f"- q1: {points}\n" in page.read_text()


@pytest.mark.parametrize(
    ("one", "other", "are_same"),
    [("ada_lovelace", "Ada  Lovelace", True), ("007", "7", True), ("r01 plain", "R01_Plain", True),
     ("Åsa", unicodedata.normalize("NFD", "Åsa"), True),  # as files of a Mac have it
     ("रीना", "राना", False), ("🙂", "🚀", False)],
)  # fmt: skip
def test_spellings_of_a_name_are_one_student(book, table_of, one, other, are_same):
    """The better of two submissions counts."""
    table_of("hw01", **{f"{one}.ipynb": 8, f"{other}/a.ipynb": 5})
    table_of("hw02", **{f"{other}.ipynb": 5})
    points = [(row["hw01"], row["hw02"]) for row in book()]
    assert sorted(points) == ([("8", "5")] if are_same else [("5", "5"), ("8", "")])


def test_a_folder_that_is_not_there_and_points_that_are_none_are_told(book, tmp_path):
    with pytest.raises(IclError, match=r"nowhere holds no file\. Name"):
        submissions.grade(tmp_path, tmp_path / "nowhere", "hw05")
    with pytest.raises(IclError, match="holds no points: make grade"):
        book()


def test_sections_in_folders_are_not_taken_for_students(graded, tmp_path):
    for i in range(6):
        path = tmp_path / "class" / "monday" / f"{i}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    with pytest.raises(IclError, match=r"6 notebooks of one student, monday.*=.*monday"):
        graded("class", **{str(i): FULL for i in range(6)})


def test_names_that_no_text_can_hold_stop_no_class(graded, book, tmp_path):
    folder = tmp_path / "class"
    folder.mkdir()
    names = [b"caf\xe9.ipynb", b"caf\xe8.ipynb", b"n" * 239 + b".ipynb", b"n" * 249 + b".ipynb"]
    for name in names:
        Path(os.fsdecode(os.path.join(os.fsencode(folder), name))).write_text("{}")
    table = graded("class", **{Path(os.fsdecode(name)).stem: FULL for name in names})
    assert {row["total"] for row in read(table)} == {"8"}
    assert {r"caf\xe9", r"caf\xe8"} <= {row["student"] for row in read(table)}
    assert len(book()) == 4


def test_half_a_character_stops_no_class(graded):
    text = b'{"cells": [{"cell_type": "markdown", "source": "half \\ud83d an emoji"}]}'
    assert submissions._cells(text, "hw05") == [(False, "half ? an emoji")]
    evil = result(message="q1: half \ud83d", q1=0.0)
    assert rows(graded("class", ada=evil))["ada"]["message"] == "q1: half ?"


def test_one_submission_with_which_grading_fails_stops_no_class(hw05, tmp_path, monkeypatch):
    closed, read = tmp_path / "closed.ipynb", Path.read_bytes
    closed.touch()
    monkeypatch.setattr(Path, "read_bytes", lambda p: read(p / "x" if p == closed else p))
    (tmp_path / "ada.ipynb").write_text('{"cells": []}')
    monkeypatch.setattr(submissions, "_judged", None)
    monkeypatch.setattr(assignments, "make", lambda *given: [hw05])
    found = rows(submissions.grade(tmp_path / "build", tmp_path, "hw05", unconfined=True))
    assert (found["ada"]["status"], found["closed"]["status"]) == ("crashed", "broken")


@pytest.fixture
def table_of(tmp_path):
    """What was graded of a homework with one question."""

    def write(homework, **points):
        place = tmp_path / "grades" / homework
        place.mkdir(parents=True, exist_ok=True)
        whole = [result(q1=x) | {"name": name, "folder": "/"} for name, x in points.items()]
        text = json.dumps({"points": {"q1": 9}, "grades": whole})
        (place / "grades.json").write_text(text)

    return write


def test_several_homeworks_join_into_one_gradebook(graded, book, table_of):
    graded("class", ada_lovelace=FULL, bob=CRASHED)
    table_of("hw02", **{"ada_lovelace.ipynb": 5})
    assert book() == [
        {"student": "ada_lovelace", "hw02": "5", "hw05": "8"},
        {"student": "bob", "hw02": "", "hw05": ""},
    ]
    ragged = 'Student,ID\n\n"Ada Lovelace",17,more\n"Bob Moore"\n'
    assert [list(row.values()) for row in book(ragged)] == [
        ["Ada Lovelace", "17", "more", "ada_lovelace", "5", "8"],
        ["Bob Moore", "", "", "", "", ""],
        ["", "", "", "bob", "", ""],
    ]  # fmt: skip
    lines = book("Student\nAda Lovelace,1,2\nBob,3,4\n")
    assert [row["hw05"] for row in lines] == ["8", ""]
    split = "First name;Last name\nAda;Lovelace\nBob;Moore\n".encode("utf-16")
    assert [row["hw05"] for row in book(split)] == ["8", "", ""]
    with pytest.raises(IclError, match="names ada lovelace in two lines"):
        book("Student\nAda Lovelace\nAda_lovelace\n")


@pytest.mark.parametrize(
    "roster", ["student\nada\nbob\n", "hw05,student\n1,ada\n,bob\n", ",\n", "hw05\n"]
)
def test_a_gradebook_or_nothing_may_be_the_roster(graded, book, roster):
    graded("class", ada=FULL, bob=CRASHED)
    assert [(row["student"], row["hw05"]) for row in book(roster)] == [("ada", "8"), ("bob", "")]


@pytest.mark.parametrize(
    ("handed_in", "whose"),
    [
        ("Ada Lovelace_12_assignsubmission_file/hw05.ipynb", "Ada Lovelace"),  # Moodle
        ("Ada Lovelace_12_assignsubmission_file_hw05.ipynb", "Ada Lovelace"),
        ("lovelaceada_12_34_hw05.ipynb", "12"),  # Canvas: the number is in its roster
        ("lovelaceada_LATE_12_34_hw05-1.ipynb", "12"),
        ("ada_lovelace_hw05.ipynb", "ada_lovelace_hw05"),
    ],
)
def test_names_of_moodle_and_canvas_are_those_of_their_rosters(handed_in, whose):
    assert reports.student(handed_in) == whose


def test_a_table_holds_no_formula(graded):
    evil = result("broken", message="-1\n\x1b\0b")
    row = rows(graded("class", **{"=HYPERLINK(1)": evil}))["'=HYPERLINK(1)"]
    assert (row["message"], row["q1"]) == ("'-1 b", "")


# What students do with cells

TEXT = "A control that fails, too."


def written(hw05, edit):
    student = read_json(hw05.student)["cells"]
    edit(found := read_json(hw05.student)["cells"])
    cells = [(each["cell_type"] == "code", "".join(each["source"])) for each in found]
    return submissions._sorted(cells, student, {"part_and_change"})[1]


def at_heading(cells):
    return next(i for i, c in enumerate(cells) if "## In your own words" in "".join(c["source"]))


PLACES = {
    "its cell": lambda cells: cells[-2].update(source=TEXT),
    "the question's own cell": lambda cells: (
        cells[at_heading(cells)].update(source=[*cells[at_heading(cells)]["source"], f"\n{TEXT}"])
    ),
    "a code cell": lambda cells: cells.append({"cell_type": "code", "source": TEXT}),
    "no heading": lambda cells: (
        cells.pop(at_heading(cells)), cells.append({"cell_type": "markdown", "source": TEXT})
    ),
    "above it": lambda cells: cells.insert(3, {"cell_type": "markdown", "source": TEXT}),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_the_paragraph_is_found_wherever_it_stands(hw05, place):
    assert TEXT in written(hw05, PLACES[place])
    assert len(written(hw05, PLACES[place])) < len(TEXT) + 9
    assert written(hw05, lambda cells: None) == ""


def _import_first(cells):
    add("import math", "import math, seaborn_x, torch\nfrom google.colab import drive\n"
        "drive.mount('/content')\n")(cells)  # fmt: skip
    cell(cells, PARTS)["cell_type"] = "markdown"


CLASS = {
    "as text after imports that fail": (_import_first, ("4", "4", "4")),
    "under a name": (put("student =", "student = 'Alan  Turing'"), ("4", "4", "4")),
    "says that its control is one": (
        put("def swapped", "(part,) = checks.carried['q3']\n"
            "vars(part).update(outcome=lambda *given: 1.0, verdict=print)\n"
            "def swapped(*given):\n    return given[0]"),
        ("4", "4", "0")),
}  # fmt: skip


def test_a_small_class(hw05, build, tmp_path, where):
    for name, (edit, _) in CLASS.items():
        hand_in(tmp_path, name, hw05.solved, edit)
    found = rows(submissions.grade(build, tmp_path, "hw05", limits=confine.LIMITS | {"step": 20.0}))
    for name, (_, points) in CLASS.items():
        row = found[name]
        assert (row["q1"], row["q2"], row["q3"], row["confined"]) == (*points, where[0]), row
        assert row["status"] == "graded"
        named = name == "under a name"  # the letter is that of somebody without one
        assert (row["signed"], row["q4"]) == (("alan turing", "2") if named else ("", "4"))


@pytest.mark.nightly
def test_the_trial_shows_what_a_teacher_sees(tmp_path):
    shown = class_trial.run(tmp_path / "trial", False)
    lost = ("typical", "nothing", "loop", "ends", "solutions", "memory")
    for name in class_trial.CLASS:
        points = "12" if any(word in name for word in lost) else "16"
        assert re.search(rf"^\s*{name} +{points}$", shown, re.MULTILINE), shown
    assert "The parts come first" in shown
    assert "breaks off" in shown

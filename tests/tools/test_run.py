"""The runner: parameters, folders, failures that cost one chapter, and an interruption."""

import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from iclutils import claims
from tools import accept, build, run

ROOT = Path(__file__).parents[2]
PARAMETERS = 'tier = "mini"\nmodel = ""\nweights = "trained"\nseed = 0\nsizes = 5'


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder in which ``home("90_demo", "print(1)")`` writes a notebook."""
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "BUILD", tmp_path / "_build/run")
    monkeypatch.setenv("ICLUTILS_RESULTS", "")  # the runner sets it, and it must not stay
    (tmp_path / "constraints.txt").touch()

    def write(name, *cells):
        first = new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]})
        notebook = new_notebook(cells=[new_markdown_cell("# A title"), first])
        notebook.cells += [new_code_cell(source) for source in cells]
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        notebook.metadata.kernelspec = kernel
        (tmp_path / "notebooks").mkdir(exist_ok=True)
        nbformat.write(notebook, path := tmp_path / f"notebooks/{name}.ipynb")
        return path

    write("your_model")
    return write


def test_parameters_are_checked_and_what_is_not_the_books_has_a_folder_of_its_own(home):
    path = home("90_demo")
    assert run.plan(path, {})[1:] == (run.BUILD / "book/mini/90_demo.ipynb", {})
    random = {"weights": "random", "tier": "real"}
    assert run.plan(path, random)[1:] == (run.BUILD / "book/real-null/90_demo.ipynb", random)
    assert run.plan(path, {"seed": 0, "tier": "mini"}) == run.plan(path, {})
    for given in ({"seed": 1}, {"model": "owner/name@1"}, {"sizes": 6}):
        assert "book" not in run.plan(path, given)[1].parts
    with pytest.raises(SystemExit, match="no parameter 'sise'"):
        run.plan(path, {"sise": 6})
    with pytest.raises(SystemExit, match="seed of 90_demo is of type int; got 'one'"):
        run.plan(path, {"seed": "one"})
    with pytest.raises(SystemExit, match=r"no notebook .*'91'.* there are 90_demo"):
        run.notebooks(["91"], "mini")
    assert run.notebooks(["90"], "mini") == [path] == run.notebooks([], "mini")


def test_what_a_run_depends_on_includes_the_recipes(home, tmp_path):
    plan = run.plan(home("90_demo"), {})
    before = run.fingerprint(*plan)
    (tmp_path / "training").mkdir()
    (tmp_path / "training/loop.py").write_text("STEPS = 1")
    assert run.fingerprint(*plan) != before


@pytest.mark.parametrize(
    ("changes", "is_taken"),
    [({"value": 0.50001}, False), ({"value": 0.51}, True),
     ({"detail": {"curve": [1.0, 2.5]}}, True),
     ({"detail": {"curve": [1.0, 2.00001]}}, False), ({"null": {"value": 0.4}}, True),
     ({"count": 6}, True)],
)  # fmt: skip
def test_a_result_is_taken_if_anything_that_was_measured_changed(changes, is_taken):
    stored = next(iter(claims.read_file(ROOT / "book/results/mini/01.json").values()))
    known = {"value": 0.5, "spread": 0.1, "count": 5, "null": {"value": 0.2}}
    old = replace(stored, **known, detail={"curve": [1.0, 2.0]})
    now = replace(old, **changes, date="tomorrow")
    pairs = ((getattr(old, field), getattr(now, field)) for field in accept.MEASURED)
    assert all(accept.is_close(*pair) for pair in pairs) != is_taken


@pytest.mark.slow
def test_a_failure_costs_one_chapter_and_the_rest_is_not_run_again(home, monkeypatch, tmp_path):
    monkeypatch.setattr(run, "MINUTES", {"mini": 0.1})
    read = "import sys; print('name: read; an earlier run took 2.5 s', file=sys.stderr)"
    home("90_good", "print(seed)", read)
    bad = home("91_bad", "print('before')", "raise ValueError('no such number')", "print('after')")
    home("92_slow", "import time; time.sleep(60)")
    home("93_killed", "import os; os._exit(1)")
    plans = [run.plan(path, {}) for path in run.notebooks([], "mini")]
    reports = {p.stem: e for p, _, e in run.execute_all(plans, 2, "")}
    assert reports["90_good"] == ""
    assert reports["91_bad"] == "cell [3]: ValueError: no such number"
    assert reports["92_slow"].startswith("CellTimeoutError")
    assert reports["93_killed"].startswith("DeadKernelError")
    partial = nbformat.read(plans[1][1], 4)
    assert next(c for c in partial.cells if c.get("outputs")).outputs[0].text == "before\n"
    assert "no such number" in plans[1][1].read_text()
    assert json.loads(plans[0][1].with_suffix(".json").read_text())["read"] == 2.5
    assert run.is_current(*plans[0])
    assert not any(run.is_current(*p) for p in plans[1:])
    home("90_good", "print(seed)", "1 + 2")
    assert not run.is_current(*plans[0])
    path = tmp_path / "notebooks/90_good.ipynb"
    build.show(edited := json.loads(path.read_text()), plans[0][1], "")
    assert not any(cell.get("outputs") for cell in edited["cells"]), "edited since it was run"
    home("90_good", "print(seed)", read)  # as it was run
    build.show(same := json.loads(path.read_text()), plans[0][1], "")
    accept.take_outputs(path, plans[0][1])
    for page in (same, json.loads(path.read_text())):
        assert page["cells"][2]["outputs"][0]["text"] == ["0\n"]
    with pytest.raises(SystemExit, match="edited since it was run"):
        accept.take_outputs(bad, plans[0][1])
    page = json.loads(bad.read_text())
    build.show(page, plans[1][1], reports["91_bad"])
    assert "cell [3]: ValueError: no such number" in "".join(page["cells"][0]["source"])


@pytest.mark.slow
@pytest.mark.parametrize("apart", [[], ["unshare", "--pid", "--fork", "--mount-proc"]])
def test_an_interruption_ends_everything_within_five_seconds(home, tmp_path, apart):
    """Also where the first process of a container does not collect what has ended."""
    if apart and (shutil.which(apart[0]) is None or subprocess.run([*apart, "true"]).returncode):
        pytest.skip("this system gives no process namespaces to this user")
    home("90_slow", f"open({str(tmp_path / 'begun')!r}, 'w')", "import time; time.sleep(600)")
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools/run.py", tmp_path / "tools")
    command = [*apart, sys.executable, tmp_path / "tools/run.py", "90"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, preexec_fn=_listen, **quiet)
    while not (tmp_path / "begun").exists():
        assert process.poll() is None
        time.sleep(0.1)
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    runner = next(p for p in family if p.name() != "unshare" and "run.py" in str(p.cmdline()))
    start = time.monotonic()
    runner.send_signal(signal.SIGINT)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert time.monotonic() - start < 5, "Ctrl-C took longer than promised"


def _listen():
    """Take Ctrl-C as a terminal's program does: what is started in the background ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)

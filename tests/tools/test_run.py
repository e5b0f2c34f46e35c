"""Running chapters: parameters checked, finished work kept, failures named, two at a time."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import nbformat
import pytest
from filelock import FileLock
from ledger import dump, entry
from nbclient import NotebookClient

from book._ext import pages as status
from book._tools import kernels as kernels_of
from book._tools import machine, run
from iclutils import claims, room
from iclutils.errors import IclError
from iclutils.files import read_json, write_json
from iclutils.zoo import smollm2

PARAMETERS = 'tier = "mini"\nmodel = ""\nseed = 0\nweight = 0.5\n'
CHECK = """
import json, os, pathlib
with open({log!r}, "a") as log:
    log.write("{name}\\n")
if not model:
    place = pathlib.Path(os.environ["ICLUTILS_RESULTS"]) / tier
    place.mkdir(parents=True, exist_ok=True)
    (place / "{id}.json").write_text(json.dumps({{"value": seed}}))
"""


OUTPUTS = (("run", "ipynb"), ("runs", "json"))


class Book:
    """A folder of stand-in chapters, each with a ledger of one claim, and where they are built."""

    def __init__(self, place, make_ledger):
        self.notebooks, self.build = place / "notebooks", place / "_build"
        self.log, self._ledger = place / "log", make_ledger
        self.notebooks.mkdir()

    def add(self, name, *cells, check=True, parameters=""):
        claim = f"{name[:2]}.score"
        self._ledger(name, dump(entry(id=claim)))
        last = CHECK.format(log=str(self.log), name=name, id=claim)
        sources = [PARAMETERS + parameters, *cells, *([last] if check else [])]
        notebook = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, sources)])
        notebook.cells[0].metadata["tags"] = ["parameters"]
        notebook.metadata["kernelspec"] = {"name": "python3", "language": "python"}
        path = self.notebooks / f"{name}.ipynb"
        nbformat.write(notebook, path)
        return path

    def run(self, chapter="90", **given):
        return run.run_chapters([chapter], given, self.build)[0]

    def ran(self):
        return self.log.read_text().split() if self.log.exists() else []

    @property
    def result(self):
        return self.build / "results/mini/90.score.json"


class HereClient(NotebookClient):
    """In the place of a kernel, for what does not depend on one: the cells run in this process."""

    def execute(self, env):
        space: dict[str, Any] = {}
        cells = (cell for cell in self.nb.cells if cell.cell_type == "code")
        with mock.patch.dict(os.environ, env):
            for number, cell in enumerate(cells, 1):
                exec(cell.source, space)
                cell.execution_count = number


@pytest.fixture
def kernels(tmp_path, make_ledger, monkeypatch):
    """Chapters that are run in kernels of their own, on two cores."""
    made = Book(tmp_path, make_ledger)
    monkeypatch.setattr(run, "NOTEBOOKS", made.notebooks)
    monkeypatch.setattr(machine, "cores", lambda: 2)
    monkeypatch.setattr(machine, "gpu", lambda: "one")  # where kernels are not forked
    monkeypatch.setattr(room, "memory_gib", lambda: 8)
    return made


@pytest.fixture
def book(kernels, monkeypatch):
    """Chapters that are run here; there is one, 90_demo."""
    monkeypatch.setattr(run, "NotebookClient", HereClient)
    kernels.add("90_demo")
    return kernels


@pytest.mark.parametrize(
    ("chapter", "given", "message"),
    [
        ("90_dmo", {}, r"Unknown chapter '90_dmo'\. Did you mean '90_demo'"),
        ("90", {"sead": 1}, r"Unknown parameter of 90_demo 'sead'.*mean 'seed'"),
        ("90", {"seed": "1"}, r"Parameter seed of 90_demo must be of type int .*; got '1', of"),
    ],
)
def test_mistakes_are_named_before_anything_runs(book, chapter, given, message):
    with pytest.raises(IclError, match=message):
        book.run(chapter, **given)
    assert book.ran() == []


def test_a_run_leaves_notebook_and_result_and_is_not_repeated(book):
    first = book.run()
    assert first.fresh
    assert first.notebook == book.build / "run/mini/90_demo.ipynb"
    assert read_json(book.result) == {"value": 0}
    assert [c["execution_count"] for c in read_json(first.notebook)["cells"]] == [1, 2]
    assert not book.run().fresh
    assert not book.run(seed=0, tier="mini").fresh, "naming a default is the same run"
    other = book.run(seed=3)
    tags = [cell["metadata"].get("tags") for cell in read_json(other.notebook)["cells"]]
    assert tags.count(["injected-parameters"]) == 1
    assert other.result("90.score") == book.build / "seed-3/results/mini/90.score.json"
    assert read_json(other.result("90.score")) == {"value": 3}
    assert read_json(book.result) == {"value": 0}, "results of another seed lie beside"
    assert not book.run().fresh
    assert book.run(weight=0.25).build == book.build / "weight-0.25"
    assert book.ran() == ["90_demo"] * 3
    assert run.run_chapters(["90"], {"seed": 3}, book.build, force=True)[0].fresh


def test_changes_are_noticed(book, monkeypatch, tmp_path):
    package = tmp_path / "fake"
    for name in ("code.py", "zoo/recipes/loop.py", "zoo/m.1/SHA256SUMS", "session.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("x = 1\n")
    monkeypatch.setattr(run, "PACKAGE", package)
    book.run()
    book.add("90_demo", "# a comment")
    assert book.run().fresh
    made = [book.result, *(book.build / f"{n}/mini/90_demo.{e}" for n, e in OUTPUTS)]
    for path in [*made, *(path for path in package.rglob("*.*") if path.is_file())]:
        path.unlink() if path in made else path.write_text("x = 2\n")
        assert book.run().fresh, f"a change of {path} was not noticed"
        assert not book.run().fresh, f"after {path}: nothing changed since"
    path = book.notebooks / "90_demo.ipynb"
    path.write_text(path.read_text().replace('"outputs": []', '"outputs": [{"text": "accepted"}]'))
    assert not book.run().fresh, "outputs do not matter"


def test_the_readers_own_model_stays_apart(book):
    done = book.run()
    before = [path.read_bytes() for path in (book.result, done.record)]
    own = book.run(model="gpt2", seed=3)
    assert own.fresh
    assert own.notebook == book.build / "run/own/90_demo.ipynb"
    assert [path.read_bytes() for path in (book.result, done.record)] == before
    assert not book.run().fresh, "the tier's own run is still up to date"


def test_a_chapter_of_which_a_language_model_is_asked_nothing_is_not_run(book, capsys, monkeypatch):
    monkeypatch.delenv("ICLUTILS_QUIET")
    monkeypatch.setattr(smollm2, "folder", lambda: pytest.fail("fetched for nothing"))
    book.add("90_demo", 'judged = "90.score"')  # a claim of the tier mini alone
    assert run.run_chapters(["90"], {"tier": "real"}, book.build) == []
    assert "90_demo: nothing in it is asked of a language model" in capsys.readouterr().out
    assert book.run().fresh
    book.add("00_tour")  # it names no claim
    for names, given, ran in (
        (run.chapters(), {"tier": "real"}, []),
        (run.chapters(), {"tier": "paper"}, []),
        (run.chapters(), {"tier": "real", "model": "gpt2"}, ["00_tour"]),
        (["00"], {"tier": "paper"}, ["00_tour"]),
    ):
        assert [it.chapter for it in run.run_chapters(names, given, book.build)] == ran
    for tier, left_out in (("real", run.NETWORKS), ("mini", "")):  # nor are cells about networks
        client = run._client(run.plan("90", {"tier": tier}, book.build))
        assert client.skip_cells_with_tag == left_out


def test_a_claim_that_was_not_checked_is_named(book):
    book.add("90_demo", check=False)
    for _ in range(2):  # the failed run does not count as done
        with pytest.raises(IclError, match=r"90_demo did not check these claims: 90\.score"):
            book.run()
    assert book.run(tier="paper").fresh, "claims of another tier are not asked for"
    (claims.ROOT / "90_demo.yml").write_text(dump(entry(tiers={"paper": {"holds": ">= 0.8"}})))
    claims.ledger.cache_clear()
    assert book.run(tier="paper").unchecked() == ["90.score"], "no such network was trained"
    (claims.ROOT / "90_demo.yml").unlink()
    claims.ledger.cache_clear()
    assert book.run().fresh, "a chapter without claims runs too"


def test_the_whole_is_said_and_what_does_not_fit_in_memory_is_refused(book, monkeypatch, capsys):
    monkeypatch.delenv("ICLUTILS_QUIET")
    book.add("91_other")
    runs = [run.plan(name, {}, book.build) for name in ("90", "91")]
    record = {"seconds": 1800.0, "machine": {"cores": 2, "gpu": ""}}
    for it, gib in zip(runs, (2.4, 9.0), strict=True):
        write_json(it.record, record | {"peak_gib": {"memory": gib, "gpu": 0.0}})
    monkeypatch.setattr(room, "memory", lambda: 8.5)
    with pytest.raises(IclError, match=r"Memory for 91_other \(mini\): 9.0 GiB are needed and 8.5"):
        run.run_chapters(["90", "91"], {}, book.build)
    assert book.ran() == []
    monkeypatch.setattr(room, "memory", lambda: None)  # the system does not say
    run.run_chapters(["90", "91"], {}, book.build)
    assert "all about 60 min, 1 at a time; what is interrupted" in capsys.readouterr().out


def test_the_real_tier_takes_what_it_may_and_fetches_once_before(book, monkeypatch):
    book.add("91_other")
    runs = [run.plan(name, {"tier": "real"}, book.build) for name in ("90", "91")]
    monkeypatch.setattr(room, "memory_gib", lambda: 64)
    monkeypatch.setattr(machine, "cores", lambda: 8)
    assert run._side_by_side(runs * 4) == 4, "of three GiB each, in twelve"
    fetched = []
    monkeypatch.setattr(smollm2, "folder", lambda: fetched.append(book.ran()))
    run.run_chapters(["90", "91"], {"tier": "real"}, book.build)
    assert fetched == [[]]
    assert sorted(book.ran()) == ["90_demo", "91_other"]


def test_a_run_records_its_time_memory_and_machine(kernels):
    kernels.add("90_demo", "import time; time.sleep(0.5)")
    begin = "import iclutils; iclutils.begin(tier, model, seed, 'cpu')"
    kernels.add("91_large", begin, "held = bytearray(2**30); held[::4096] = b'x' * 2**18")
    done, large = (read_json(it.record) for it in run.run_chapters(["90", "91"], {}, kernels.build))
    assert set(done) == status.FIELDS | {"pace", "cpu_seconds", "cells", "science"}
    assert 0.0 < done["pace"] < 60.0
    known = {"chapter": "90_demo", "tier": "mini", "machine": machine.describe()}
    known |= claims.provenance() | {"peak_gib": run.UNKNOWN}  # it does not begin, nor say
    assert done == done | known
    assert done["seconds"] >= 0.5
    cells = [cell["id"] for cell in read_json(kernels.notebooks / "90_demo.ipynb")["cells"]]
    assert 0.5 <= done["cells"][cells[1]] <= done["seconds"]
    assert 1.0 < large["peak_gib"]["memory"] < 8.0
    assert 0.0 < large["cpu_seconds"] < 60.0
    assert large["peak_gib"]["gpu"] == 0.0
    assert not list(kernels.build.rglob("*.peak.json"))


def test_two_runs_at_once_take_turns(book, monkeypatch, capsys):
    monkeypatch.delenv("ICLUTILS_QUIET")
    other = FileLock(book.run().notebook.with_name(".lock"), thread_local=False)
    other.acquire()
    book.add("91_other")
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(book.run, "91")
        with pytest.raises(TimeoutError):
            waiting.result(0.5)
        other.release()
        assert waiting.result().fresh
    assert "this one begins after it" in capsys.readouterr().out


MEET = """
import os, pathlib, time
here, there = pathlib.Path({here!r}), pathlib.Path({there!r})
here.touch()
for _ in range(6000):
    if there.exists(): break
    time.sleep(0.1)
assert there.exists() and os.environ["OMP_NUM_THREADS"] == "1"
"""


def test_chapters_run_side_by_side_the_longest_first(kernels, tmp_path, monkeypatch):
    """Each of two waits for the other; the third, known to be short, comes last."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("ICLUTILS_RESULTS", str(tmp_path / "elsewhere"))
    one, two = (str(tmp_path / name) for name in "ab")
    kernels.add("90_short")
    kernels.add("91_one", MEET.format(here=one, there=two))
    kernels.add("92_two", MEET.format(here=two, there=one))
    short = {"seconds": 1.0, "peak_gib": run.UNKNOWN, "machine": {"cores": 2, "gpu": ""}}
    write_json(kernels.build / "runs/mini/90_short.json", short)
    done = run.run_chapters(["90", "91", "92"], {}, kernels.build)
    assert [item.chapter for item in done] == ["90_short", "91_one", "92_two"]
    assert all(item.fresh for item in done)
    assert kernels.ran()[-1] == "90_short"
    assert not (tmp_path / "elsewhere").exists(), "results go where asked"


def test_a_time_is_told_without_what_ran_beside_it(book, monkeypatch):
    """A run that took 60 s beside others, 20 of them its own, on a machine half as fast."""
    ran = book.run()
    write_json(
        ran.record, read_json(ran.record) | {"seconds": 60.0, "cpu_seconds": 20.0, "pace": 2}
    )
    monkeypatch.setattr(machine, "pace", lambda: 1.0)
    assert ran.seconds == 10.0


LOOK = """
import os, sys
assert "torch" in sys.modules and os.getpgid(0) == os.getpid()
assert os.environ["OMP_NUM_THREADS"] == "1"
import torch
assert torch.get_num_threads() == 1
held = torch.rand(600, 600) @ torch.rand(600, 600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="kernels are forked on Linux alone")
def test_kernels_of_several_chapters_are_forked(kernels, monkeypatch):
    """They start as fresh ones; one that dies is named, and nothing of any stays behind."""
    monkeypatch.setattr(machine, "gpu", lambda: "")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    kernels.add("90_one", LOOK)
    kernels.add("91_two", LOOK)
    forked = mock.Mock(side_effect=kernels_of.Forked)
    monkeypatch.setattr(kernels_of, "Forked", forked)
    assert all(it.fresh for it in run.run_chapters(["90", "91"], {}, kernels.build))
    kernels.add("90_one", "import os; os._exit(1)")
    with pytest.raises(IclError, match="90_one stopped: its kernel died"):
        run.run_chapters(["90", "91"], {}, kernels.build, force=True)
    assert len(forked.mock_calls) == 4
    for call in forked.mock_calls:
        with pytest.raises(ProcessLookupError):
            os.kill(call.args[0], 0)


@pytest.mark.skipif(sys.platform != "linux", reason="kernels are forked on Linux alone")
@pytest.mark.parametrize(("says", "why"), [("", "what it said"), ("no memory", "no memory")])
def test_a_kernel_that_cannot_be_forked_is_one_clear_error(says, why, monkeypatch):
    """Its process has ended before it was asked, or says that the system refuses."""
    start, other = subprocess.Popen, ["sh", "-c", f"read asked; echo '{says}'" if says else "exit"]
    monkeypatch.setattr(
        kernels_of.subprocess, "Popen", lambda _, **options: start(other, **options)
    )
    with kernels_of.Template({}) as template, pytest.raises(IclError, match=f"started: .*{why}"):
        template.fork(["command"], {}, ".")


def test_of_two_chapters_one_fails_and_the_other_is_kept(kernels):
    path = kernels.add("90_broken")
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell('raise ValueError("the eigenvalues")'))
    nbformat.write(notebook, path)
    kernels.add("91_sound", "import time; time.sleep(2)")
    stopped = r"90_broken stopped in cell \[3\]: ValueError: the eigenvalues\nThe cells up to there"
    with pytest.raises(IclError, match=stopped):
        run.run_chapters(["90", "91"], {}, kernels.build)
    assert read_json(kernels.result) == {"value": 0}, "what was checked is kept"
    assert not (kernels.build / "run/mini/90_broken.ipynb").exists()
    assert (kernels.build / "run/mini/90_broken.partial.ipynb").exists()
    assert kernels.ran() == ["90_broken", "91_sound"]
    assert not kernels.run("91").fresh
    kernels.add("90_broken")
    assert kernels.run("90").fresh, "after the cure it runs, although every result was there"
    assert not list(kernels.build.rglob("*.partial.ipynb"))


def test_a_kernel_that_dies_is_one_clear_error(kernels):
    kernels.add("90_demo", "import os; os._exit(1)")
    with pytest.raises(IclError, match=r"90_demo stopped: its kernel died"):
        kernels.run()


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(signal.SIGINT, id="Ctrl-C"),
        pytest.param(signal.SIGKILL, id="killed", marks=pytest.mark.nightly),
    ],
)
def test_a_run_that_was_ended_continues_where_it_stopped(kernels, tmp_path, how):
    started = tmp_path / "started"
    mark = f"import os, pathlib, time; pathlib.Path({str(started)!r}).touch()"
    kernels.add("90_demo")
    kernels.add("91_other", mark, "time.sleep(600 if 'HOLD' in os.environ else 0)")
    program = f"""
import pathlib, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run unattended
from iclutils import claims
from book._tools import __main__ as tools
from book._tools import run
run.NOTEBOOKS = pathlib.Path({str(kernels.notebooks)!r})
claims.ROOT = pathlib.Path({str(claims.ROOT)!r})
tools.BUILD = pathlib.Path({str(kernels.build)!r})
sys.exit(tools.LINE.main(["run", "all"]))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {"HOLD": "1"},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    limit = time.monotonic() + 300
    try:
        while not (started.exists() and (kernels.build / "run/mini/90_demo.json").exists()):
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            assert time.monotonic() < limit, "the first chapter did not end"
            time.sleep(0.1)
        process.send_signal(how)
        assert process.wait(180) == (130 if how == signal.SIGINT else -how)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        _, said = process.communicate()
    assert how == signal.SIGKILL or b"run again to continue" in said
    assert kernels.ran() == ["90_demo"]
    assert not (kernels.build / "run/mini/91_other.ipynb").exists()
    assert not kernels.run("90").fresh, "what was finished is not run again"
    assert kernels.run("91").fresh
    assert kernels.ran() == ["90_demo", "91_other"]

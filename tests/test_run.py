"""Running chapters: parameters checked, nothing finished is lost or done twice.

The notebooks here are tiny stand-ins whose cells write a result as ``claims.check`` would.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import nbformat
import pytest
import yaml

from iclutils.bookkit import claims, machine, run
from iclutils.bookkit.sphinx_ext import status
from iclutils.errors import IclError
from iclutils.files import read_json, write_json

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


class Book:
    """A folder of stand-in chapters, each with a ledger of one claim, and where they are built."""

    def __init__(self, place: Path, make_ledger: Callable[..., Path]) -> None:
        self.notebooks, self.build = place / "notebooks", place / "_build"
        self.log = place / "log"
        self.notebooks.mkdir()
        self._ledger = make_ledger

    def add(self, name: str, *cells: str, check: bool = True, claim: bool = True) -> Path:
        number = name.split("_")[0]
        entry = {
            "id": f"{number}.score",
            "statement": "The score is high.",
            "source": "nobody2026",
            "measure": "score",
            "cell": "score",
            "range": [0, 1],
            "tolerance": "made up",
            "tiers": {"mini": {"reproduced": ">= 0.8"}},
        }
        self._ledger(name, yaml.safe_dump([entry] if claim else []))
        parameters = nbformat.v4.new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]})
        sources = [*cells]
        if check:
            sources.append(CHECK.format(log=str(self.log), name=name, id=entry["id"]))
        notebook = nbformat.v4.new_notebook(
            cells=[parameters, *map(nbformat.v4.new_code_cell, sources)],
            metadata={"kernelspec": {"name": "python3", "display_name": "", "language": "python"}},
        )
        path = self.notebooks / f"{name}.ipynb"
        nbformat.write(notebook, path)
        return path

    def run(self, chapter: str, **given: object) -> run.Done:
        return run.run_chapter(chapter, given, self.build, progress=False)

    def ran(self) -> list[str]:
        return self.log.read_text().split() if self.log.exists() else []


@pytest.fixture
def book(tmp_path: Path, make_ledger: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Book:
    made = Book(tmp_path, make_ledger)
    monkeypatch.setattr(run, "NOTEBOOKS", made.notebooks)
    return made


# What is refused before anything runs


def test_an_unknown_chapter_names_the_nearest(book: Book) -> None:
    book.add("90_demo")
    with pytest.raises(IclError, match=r"Unknown chapter '90_dmo'\. Did you mean '90_demo'"):
        book.run("90_dmo")


def test_an_unknown_parameter_names_the_nearest(book: Book) -> None:
    book.add("90_demo")
    with pytest.raises(IclError, match=r"Unknown parameter of 90_demo 'sead'.*mean 'seed'"):
        book.run("90", sead=1)
    assert book.ran() == []


@pytest.mark.parametrize(
    "given", [{"seed": "1"}, {"seed": 1.0}, {"seed": True}, {"tier": 1}, {"weight": 1}]
)
def test_a_parameter_of_another_type_is_refused(book: Book, given: dict[str, object]) -> None:
    book.add("90_demo")
    name, value = next(iter(given.items()))
    with pytest.raises(
        IclError, match=rf"Parameter {name} of 90_demo must be of type .*; got {value!r}, of"
    ):
        book.run("90", **given)
    assert book.ran() == []


def test_an_unknown_tier_names_the_nearest(book: Book) -> None:
    book.add("90_demo")
    with pytest.raises(IclError, match=r"Unknown tier 'papr'\. Did you mean 'paper'"):
        book.run("90", tier="papr")


def test_a_default_that_is_no_literal_is_refused(book: Book) -> None:
    path = book.add("90_demo")
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[0].source += "size = 2 * 3\n"
    nbformat.write(notebook, path)
    with pytest.raises(IclError, match=r"90_demo\.ipynb: parameter size is not a plain literal"):
        book.run("90")


def test_defaults_are_read_and_given_values_replace_them(book: Book) -> None:
    path = book.add("90_demo")
    assert run.parameters_of(path) == {"tier": "mini", "model": "", "seed": 0, "weight": 0.5}
    assert run.check_parameters(path, {"seed": 7})["seed"] == 7


def test_the_committed_chapters_are_found_in_order() -> None:
    assert run.chapters() == sorted(run.chapters())
    for name in run.chapters():
        assert run.resolve(name) == run.resolve(name[:2]) == name


# Running


def test_a_run_leaves_notebook_and_results_and_is_not_repeated(book: Book) -> None:
    book.add("90_demo")
    first = book.run("90")
    assert first.fresh
    assert first.notebook == book.build / "run" / "mini" / "90_demo.ipynb"
    assert read_json(book.build / "results" / "mini" / "90.score.json") == {"value": 0}
    counts = [c.get("execution_count") for c in read_json(first.notebook)["cells"]]
    assert counts == [1, 2], "the cells ran in order"
    again = book.run("90")
    assert not again.fresh
    assert again.notebook == first.notebook
    assert book.ran() == ["90_demo"]
    assert not list(book.build.rglob("*.partial.ipynb"))


def test_a_run_records_the_memory_that_it_took(book: Book) -> None:
    begin = "import iclutils; iclutils.begin(tier, model, seed, 'cpu')"
    book.add("90_demo", begin, "held = bytearray(2**30); held[::4096] = b'x' * 2**18")
    peak = read_json(book.run("90").record)["peak_gib"]
    assert 1.0 < peak["memory"] < 8.0
    assert peak["gpu"] == 0.0
    book.add("91_other", "pass")  # it does not begin, and so does not say
    assert read_json(book.run("91").record)["peak_gib"] == run.UNKNOWN
    assert not list(book.build.rglob("*.peak.json"))


def test_what_a_run_costs_is_said_before_it(tmp_path: Path) -> None:
    record = {
        "seconds": 185.0,
        "peak_gib": {"memory": 2.4, "gpu": 0.0},
        "machine": {"cpu": "A Chip", "cores": 2, "memory_gib": 8, "gpu": ""},
    }
    own, committed = tmp_path / "own", tmp_path / "committed"
    assert "are not known" in run.cost("90_demo", "mini", own, committed)
    write_json(committed / "mini" / "90_demo.json", record)
    said = run.cost("90_demo", "mini", own, committed)
    assert said == "90_demo (mini): about 3 min, 2.4 GiB of memory, if as last time, on 2 cores"
    larger = {"peak_gib": {"memory": 9.0, "gpu": 40.0}, "machine": {"cores": 8, "gpu": "A GPU"}}
    write_json(own / "mini" / "90_demo.json", record | larger)
    said = run.cost("90_demo", "mini", own, committed)
    assert said.endswith("9 GiB of memory, 40 GiB of GPU memory, if as last time, on A GPU")
    assert "are not known" in run.cost("90_demo", "paper", own, committed)


def test_the_cost_is_printed_only_of_what_runs(
    book: Book, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ICLUTILS_QUIET")
    book.add("90_demo", "pass")
    run.run_chapter("90", {}, book.build)
    assert "90_demo (mini): no run is recorded" in capsys.readouterr().out
    run.run_chapter("90", {}, book.build)
    assert capsys.readouterr().out == ""


def test_a_run_records_its_time_and_its_machine(book: Book) -> None:
    book.add("90_demo", "import time; time.sleep(0.5)")
    done = book.run("90")
    assert done.record == book.build / "runs" / "mini" / "90_demo.json"
    record = read_json(done.record)
    assert set(record) == status.FIELDS
    assert (record["chapter"], record["tier"]) == ("90_demo", "mini")
    assert record["seconds"] >= 0.5
    assert record["machine"] == machine.describe()
    assert record["versions"]["torch"] == metadata.version("torch")
    assert record["python"] == platform.python_version()
    # Without its record a run does not count as done; the reader's own model has one of its own.
    done.record.unlink()
    assert book.run("90").fresh
    before = done.record.read_bytes()
    assert book.run("90", model="my/folder").record.parent.name == "own"
    assert done.record.read_bytes() == before


def test_a_chapter_without_claims_runs_too(book: Book) -> None:
    book.add("90_demo", check=False)
    (claims.ROOT / "90_demo.yml").unlink()
    assert book.run("90").fresh
    assert not book.run("90").fresh


def test_changes_are_noticed(book: Book, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "fake"
    (package / "zoo" / "model").mkdir(parents=True)
    (package / "training").mkdir()
    (package / "bookkit").mkdir()
    (package / "bookkit" / "doctor.py").write_text("x = 1\n")
    (package / "training" / "loop.py").write_text("x = 1\n")
    (package / "code.py").write_text("x = 1\n")
    (package / "zoo" / "model" / "SHA256SUMS").write_text("0  model\n")
    monkeypatch.setattr(run, "PACKAGE", package)
    path = book.add("90_demo")
    steps: list[tuple[str, Callable[[], object]]] = [
        ("first", lambda: None),
        ("source", lambda: _append(path, "# a comment")),
        ("package", lambda: (package / "code.py").write_text("x = 2\n")),
        ("recipe", lambda: (package / "training" / "loop.py").write_text("x = 2\n")),
        ("model", lambda: (package / "zoo" / "model" / "SHA256SUMS").write_text("1  model\n")),
        ("result", lambda: (book.build / "results" / "mini" / "90.score.json").unlink()),
        ("output", lambda: (book.build / "run" / "mini" / "90_demo.ipynb").unlink()),
    ]
    for what, change in steps:
        change()
        assert book.run("90").fresh, f"a change of {what} was not noticed"
        assert not book.run("90").fresh, f"after {what}: nothing changed since"
    assert book.run("90", seed=5).fresh
    assert read_json(book.build / "results" / "mini" / "90.score.json") == {"value": 5}
    assert not book.run("90", seed=5).fresh
    forced = run.run_chapter("90", {"seed": 5}, book.build, progress=False, force=True)
    assert forced.fresh


def _append(path: Path, text: str) -> None:
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[-1].source += text
    nbformat.write(notebook, path)


def test_outputs_in_the_source_do_not_matter(book: Book) -> None:
    path = book.add("90_demo")
    book.run("90")
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[-1].outputs = [nbformat.v4.new_output("stream", text="accepted")]
    nbformat.write(notebook, path)
    assert not book.run("90").fresh


def test_a_failing_cell_is_named_and_finished_results_stay(book: Book) -> None:
    path = book.add("90_demo")
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell('raise ValueError("the eigenvalues")'))
    nbformat.write(notebook, path)
    with pytest.raises(
        IclError, match=r"90_demo stopped in cell \[3\]: ValueError: the eigenvalues"
    ):
        book.run("90")
    assert read_json(book.build / "results" / "mini" / "90.score.json") == {"value": 0}
    assert not (book.build / "run" / "mini" / "90_demo.ipynb").exists()
    assert (book.build / "run" / "mini" / "90_demo.partial.ipynb").exists()
    del notebook.cells[-1]
    nbformat.write(notebook, path)
    assert book.run("90").fresh, "after the cure it runs, although every result was there"


def test_a_kernel_that_dies_is_one_clear_error(book: Book) -> None:
    book.add("90_demo", "import os; os._exit(1)")
    with pytest.raises(IclError, match=r"90_demo stopped: its kernel died"):
        book.run("90")


def test_a_claim_that_was_not_checked_is_named(book: Book) -> None:
    book.add("90_demo", check=False)
    with pytest.raises(IclError, match=r"90_demo did not check these claims: 90\.score"):
        book.run("90")
    with pytest.raises(IclError, match=r"did not check"):
        book.run("90")  # and the failed run does not count as done


def test_claims_of_another_tier_are_not_asked_for(book: Book) -> None:
    book.add("90_demo", check=False)
    assert book.run("90", tier="paper").fresh


def test_the_readers_own_model_stays_apart(book: Book) -> None:
    book.add("90_demo")
    book.run("90")
    before = (book.build / "results" / "mini" / "90.score.json").read_bytes()
    own = book.run("90", model="my/folder", seed=3)
    assert own.fresh
    assert own.notebook == book.build / "run" / "own" / "90_demo.ipynb"
    assert (book.build / "results" / "mini" / "90.score.json").read_bytes() == before
    assert not book.run("90").fresh, "the tier's own run is still up to date"


def test_results_go_where_asked_whatever_the_environment(
    book: Book, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ICLUTILS_RESULTS", str(tmp_path / "elsewhere"))
    book.add("90_demo")
    book.run("90")
    assert not (tmp_path / "elsewhere").exists()
    assert os.environ["ICLUTILS_RESULTS"] == str(tmp_path / "elsewhere")


@pytest.mark.slow
def test_a_killed_run_continues_where_it_stopped(book: Book, tmp_path: Path) -> None:
    started = tmp_path / "started"
    wait = (
        f"import os, pathlib, time; pathlib.Path({str(started)!r}).touch()\n"
        "time.sleep(600 if 'HOLD' in os.environ else 0)"
    )
    book.add("90_demo")
    book.add("91_other", wait)
    program = f"""
import pathlib
from iclutils import __main__
from iclutils.bookkit import claims, commands, run
run.NOTEBOOKS = pathlib.Path({str(book.notebooks)!r})
claims.ROOT = pathlib.Path({str(claims.ROOT)!r})
commands.BUILD = pathlib.Path({str(book.build)!r})
__main__.main(["run", "all"])
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {"HOLD": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        while not started.exists():
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            time.sleep(0.1)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert book.ran() == ["90_demo"]
    assert not (book.build / "run" / "mini" / "91_other.ipynb").exists()
    assert not book.run("90").fresh, "what was finished is not run again"
    assert book.run("91").fresh
    assert book.ran() == ["90_demo", "91_other"]


def test_naming_a_default_injects_nothing(book: Book) -> None:
    book.add("90_demo")
    plain = book.run("90")
    named = run.run_chapter("90", {"seed": 0, "tier": "mini"}, book.build, progress=False)
    assert not named.fresh, "it is the same run"
    other = book.run("90", seed=3)
    injected = [
        cell
        for cell in read_json(other.notebook)["cells"]
        if "injected-parameters" in cell["metadata"].get("tags", [])
    ]
    assert len(injected) == 1
    forced = run.run_chapter("90", {"seed": 0}, book.build, progress=False, force=True)
    counts = [c.get("execution_count") for c in read_json(forced.notebook)["cells"]]
    assert counts == [1, 2]
    assert plain.notebook == forced.notebook

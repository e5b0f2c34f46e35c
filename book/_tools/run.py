"""Run chapters, several side by side: parameters are checked, outputs appear only when complete.

A chapter whose notebook, parameters, package and models have not changed since its last successful
run is not run again. Time and machine of a run are written down for the status page.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import math
import os
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import nbformat
from filelock import FileLock, Timeout
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from iclutils import claims, presets, progress, room, science, zoo
from iclutils.errors import IclError, unknown
from iclutils.files import CHECKOUT, PACKAGE, read_json, write_json, write_text
from iclutils.zoo import smollm2

from . import dependencies, kernels, machine

ROOT = CHECKOUT
NOTEBOOKS = ROOT / "notebooks"
MEMORIES = (("memory", "memory"), ("gpu", "GPU memory"))  # as a record has them, and a reader
UNKNOWN = {"memory": 0.0, "gpu": 0.0}
QUIET = {"ICLUTILS_QUIET": "1"}
NETWORKS = "networks"  # tag of cells about networks of our own, which a language model is not asked
SMALL = "small-networks"  # and of those about networks of which none has the paper's size
LEFT_OUT = {"real": NETWORKS, "paper": SMALL}
BESIDE = ("your_model", "other_rows")  # notebooks of no chapter, run by their names
UNMEASURED: dict[str, Any] = {"seconds": math.inf, "peak_gib": UNKNOWN}
USUAL = ("tier", "weights", "device")  # what the book itself runs otherwise
GIB_EACH = 3  # memory of a chapter at the mini tier and at the real one
GIB_REAL = 12  # that all chapters together may take at the real tier


@dataclass(frozen=True)
class Run:
    """One run of a chapter: what is asked, and where its outputs are."""

    chapter: str
    parameters: dict[str, Any]  # all of the notebook's
    build: Path
    fresh: bool = False  # it was not up to date

    @property
    def source(self) -> Path:
        return NOTEBOOKS / f"{self.chapter}.ipynb"

    @property
    def tier(self) -> str:
        return presets.get(self.parameters.get("tier", "mini")).name

    @property
    def kind(self) -> str:
        """The tier, its null, or ``own`` for a reader's own model."""
        null = claims.NULL if self.parameters.get("weights") == "random" else ""
        column = presets.get(self.parameters.get("tier", "mini")).column
        return "own" if self.parameters.get("model") else column + null

    @property
    def part(self) -> bool:
        """Whether it is a run of a part of its tier."""
        return self.kind.startswith(presets.PART.column)

    def with_tier(self, tier: str) -> Run:
        """The same at another tier: the whole of a part, or a part of the whole."""
        return replace(self, parameters=self.parameters | {"tier": tier})

    @property
    def notebook(self) -> Path:
        return self.build / "run" / self.kind / f"{self.chapter}.ipynb"

    @property
    def results(self) -> Path:
        return self.build / "results"

    @property
    def record(self) -> Path:
        return self.build / "runs" / self.kind / f"{self.chapter}.json"

    @property
    def committed(self) -> Path:
        """The record of the run whose results are committed."""
        return ROOT / "book/runs" / self.kind / self.record.name

    @property
    def stamp(self) -> Path:
        """What the last successful run was made from."""
        return self.notebook.with_suffix(".json")

    def inputs(self) -> dict[str, Any]:
        """All that a run depends on: parameters, and a hash of sources, ledgers and models."""
        paths = set(PACKAGE.rglob("*.py"))
        for data in ("presets.toml", "claims/*.yml", "plots/*.yml", "tasks/data/**/*.*"):
            paths |= set(PACKAGE.glob(data))
        paths |= set(PACKAGE.glob("zoo/*/SHA256SUMS"))
        if self.tier == "mini":  # it shows what a language model gave
            shown = "07" if self.chapter == "00_tour" else self.chapter[:2]
            paths |= set(ROOT.glob(f"book/results/real*/{shown}.*.json"))
        cells = ["".join(cell["source"]) for cell in read_json(self.source)["cells"]]
        digest = hashlib.sha256(repr([*cells, claims.provenance()["versions"]]).encode())
        for path in sorted(paths):
            digest.update(path.read_bytes())
        return {"inputs": digest.hexdigest(), "parameters": self.parameters}

    def code(self) -> science.Science:
        """The code that its numbers depend on, and the sizes with the weights that they name."""
        cells = (cell for cell in read_json(self.source)["cells"] if cell["cell_type"] == "code")
        left_out = {LEFT_OUT.get(self.tier)}
        kept = (c for c in cells if left_out.isdisjoint(c["metadata"].get("tags", [])))
        found, asked = dependencies.of_notebook(tuple("".join(cell["source"]) for cell in kept))
        tier = presets.get(self.parameters["tier"])
        sizes = repr([getattr(tier, name) for name in sorted(asked)])
        networks = (zoo.ROOT / name / "SHA256SUMS" for name in re.findall(r"'([\w-]+)'", sizes))
        lines = [path.read_text().splitlines() for path in networks if path.is_file()]
        sums = [line for each in lines for line in each if not line.endswith(".md")]  # their cards
        return found | {"sizes": science.digest([sizes, sums])}

    def is_usual(self) -> bool:
        """Whether it is as the book runs it: its results can be compared with the committed."""
        usual = parameters_of(self.source)
        return all(usual[k] == v for k, v in self.parameters.items() if k not in USUAL)

    def asks(self) -> list[str]:
        """Claims of this notebook and tier: those that it names, and for the one with the ledger's
        name all that no other notebook of the chapter names; of those that wait, what is there."""
        names = [name for name in chapters() if name[:2] == self.chapter[:2]]
        of = {
            n: dependencies.claims_in(read_json(NOTEBOOKS / f"{n}.ipynb")["cells"]) for n in names
        }
        mine = of.pop(self.chapter, set()) & set(claims.ledger())
        if self.chapter in claims.chapters():
            mine = set(claims.ledger(self.chapter)) - set().union(*of.values())
        return [k for k, c in claims.ledger().items() if k in mine and self.tier in c.tiers]

    def unchecked(self) -> list[str]:
        """Claims of this notebook and tier that have no result."""
        asked = self.asks() if self.kind != "own" else []
        return [k for k in asked if not self.result(k).is_file()]

    def result(self, claim: str) -> Path:
        """Where the run keeps what it measured of a claim."""
        return self.results / self.kind / f"{claim}.json"

    def is_asked(self, whole: bool = False) -> bool:
        """Whether the tier puts a claim that the notebook names. One that names none, as the tour,
        is left out where the ``whole`` book is run on models neither small nor a reader's own."""
        named = dependencies.claims_in(read_json(self.source)["cells"])
        known = [claims.ledger()[name] for name in named & set(claims.ledger())]
        if not known:
            return not whole or self.tier == "mini" or self.kind == "own"
        return any(self.tier in claim.tiers for claim in known)

    def is_current(self) -> bool:
        """Whether all outputs are there, and nothing has changed since."""
        there = all(path.is_file() for path in (self.notebook, self.record, self.stamp))
        return there and not self.unchecked() and read_json(self.stamp) == self.inputs()

    def last(self) -> dict[str, Any] | None:
        """The record of the last run, on this machine or the committed one."""
        return next((read_json(p) for p in (self.record, self.committed) if p.is_file()), None)

    @property
    def seconds(self) -> float:
        """What the last run took without what ran beside it, as long as this machine takes for it,
        or infinity."""
        last = self.last() or UNMEASURED
        if "cpu_seconds" not in last:
            return last["seconds"]
        return min(last["seconds"], last["cpu_seconds"]) * machine.pace() / last["pace"]

    @property
    def gib(self) -> float:
        """Memory that the last run held, or 0."""
        return (self.last() or UNMEASURED)["peak_gib"]["memory"]


def chapters() -> list[str]:
    """Notebooks that can be run, in order; an appendix follows the one with the ledger's name."""
    names = [path.stem for path in NOTEBOOKS.glob("[0-9][0-9]_*.ipynb")]
    return sorted(names, key=lambda name: (name[:2], name not in claims.chapters(), name))


def resolve(chapter: str) -> list[str]:
    """Notebooks of a chapter given as ``"01"``, or the one named like ``"01_gpt2_induction"``."""
    known = [*chapters(), *(name for name in BESIDE if (NOTEBOOKS / f"{name}.ipynb").is_file())]
    if found := [name for name in known if chapter in (name, name[:2])]:
        return found
    raise unknown("chapter", chapter, chapters())


def parameters_of(notebook: Path) -> dict[str, Any]:
    """Parameters of a notebook and their defaults, the literals in its cell of that tag."""
    found = {}
    for cell in read_json(notebook)["cells"]:
        if "parameters" in cell["metadata"].get("tags", []):
            for line in ast.parse("".join(cell["source"])).body:
                name = ast.unparse(getattr(line, "targets", [line])[0])
                try:
                    found[name] = ast.literal_eval(getattr(line, "value", line))
                except ValueError as error:
                    raise IclError(
                        f"{notebook.name}: parameter {name} is not a plain literal."
                    ) from error
    return found


def apart(build: Path, given: dict[str, Any], usual: dict[str, Any]) -> Path:
    """The build folder, or one in it for a run whose seed or sizes are not the book's."""
    changed = [f"{k}-{v}" for k, v in given.items() if k not in USUAL and v != usual[k]]
    return build / re.sub(r"[^\w.-]+", "_", "+".join(sorted(changed)))


def plan(chapter: str, given: dict[str, Any], build: Path) -> Run:
    """A run of a chapter (name or number) with these parameters, each of its default's type."""
    name = resolve(chapter)[0]
    known = parameters_of(NOTEBOOKS / f"{name}.ipynb")
    for key, value in given.items():
        if key not in known:
            raise unknown(f"parameter of {name}", key, known)
        if type(value) is not type(known[key]):
            raise IclError(
                f"Parameter {key} of {name} must be of type {type(known[key]).__name__} "
                f"(default {known[key]!r}); got {value!r}, of type {type(value).__name__}."
            )
    planned = Run(name, known | given, build if given.get("model") else apart(build, given, known))
    presets.get(planned.tier)
    if given:
        from iclutils import session  # takes seconds to import

        asked: dict[str, Any] = dict(model="", seed=0, weights="trained", device="auto")
        asked |= known | given
        session.refuse(asked["model"], asked["seed"], asked["weights"])
        session.resolve_device(asked["device"])
    return planned


def run_chapters(
    names: list[str], given: dict[str, Any], build: Path, *, force: bool = False
) -> list[Run]:
    """Run those chapters that are not up to date, the longest first; return all in their order,
    without those of which the tier asks nothing. Where a chapter fails, those that have begun are
    finished before its error."""
    runs, whole = [], names == chapters()
    for run in (plan(name, given, build) for chapter in names for name in resolve(chapter)):
        if run.is_asked(whole):
            runs.append(replace(run, fresh=force or not run.is_current()))
        else:
            what = "of a language model" if run.tier == "real" else f"at the tier {run.tier}"
            progress.say(f"{run.chapter}: nothing in it is asked {what}, so it is not run")
    if runs:
        _forget(runs[0].results, runs[0].tier)
    stale = sorted((r for r in runs if r.fresh), key=lambda r: r.seconds, reverse=True)
    for run in stale:
        progress.say(cost(run))
        what = f"Memory for {run.chapter} ({run.kind})"
        room.refuse_without(run.gib, room.memory(), what, room.MEMORY)
    if stale:
        jobs = _side_by_side(stale)
        if len(stale) > 1:
            ends = [0.0] * jobs
            for run in stale:
                ends[ends.index(min(ends))] += run.seconds
            total = f" about {max(ends) / 60:.0f} min" if math.isfinite(max(ends)) else ""
            progress.say(
                f"all{total}, {jobs} at a time; what is interrupted goes on when run again"
            )
        asked = stale[0].kind != "own" and stale[0].tier == "real"
        if asked or any("book.example(" in run.source.read_text("utf-8") for run in stale):
            lacking = smollm2.missing()  # fetched and converted once, before several want it
            if asked and lacking:
                raise IclError(lacking)
        with _alone(stale[0].notebook.parent):  # another may have run them by then
            _execute_all([r for r in stale if force or not r.is_current()], jobs)
    return runs


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process runs chapters into this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress.say(f"another run is at work in {folder}; this one begins after it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def cost(run: Run) -> str:
    """Time and memory of a run, for the reader to know before it starts, from its last record."""
    what, last = f"{run.chapter} ({run.kind})", run.last()
    if last is None:
        return f"{what}: no run is recorded, so its time and memory are not known"
    parts = [f"about {max(1, round(run.seconds / 60))} min"]
    parts += [f"{last['peak_gib'][k]:g} GiB of {m}" for k, m in MEMORIES if last["peak_gib"][k]]
    if "cpu_seconds" in last:
        return f"{what}: {', '.join(parts)}, by its last run and a calibration of this machine"
    where = last["machine"]["gpu"] or f"{last['machine']['cores']} cores"
    return f"{what}: {', '.join(parts)}, if as last time, on {where}"


def _forget(results: Path, tier: str) -> None:
    """Delete the results of claims that the ledger had once and puts to this tier no more, and
    of their null."""
    asked = {name for name, claim in claims.ledger().items() if tier in claim.tiers}
    for path in (*results.glob(f"{tier}/*.json"), *results.glob(f"{tier}-*/*.json")):
        if path.stem not in asked:
            path.unlink()


def _side_by_side(runs: list[Run]) -> int:
    """How many chapters at a time: as there are cores and memory for; at the paper tier one."""
    if runs[0].tier == "paper":
        return 1
    each = max(GIB_EACH, *(run.gib for run in runs))
    memory = min(room.memory_gib() or each, math.inf if runs[0].tier == "mini" else GIB_REAL)
    return min(len(runs), max(1, machine.cores()), max(1, int(memory / each)))


def _execute_all(runs: list[Run], jobs: int) -> None:
    threads = max(1, machine.cores()) // jobs
    environment = {"OMP_NUM_THREADS": str(threads)} | dict(os.environ)
    clients = {run.chapter: _client(run) for run in runs}
    codes = {run.chapter: run.code() for run in runs}  # parsed once, so not in several threads
    inputs = {run.chapter: run.inputs() for run in runs}  # before anything is imported
    failed: BaseException | None = None
    forks = len(runs) > 1 and sys.platform == "linux" and not machine.gpu()
    with (
        kernels.Template(environment | QUIET) if forks else nullcontext() as template,
        ThreadPoolExecutor(jobs) as pool,
    ):
        if template:
            for client in clients.values():
                client.km = template.manager(kernel_name=client.kernel_name)
        waiting = [
            pool.submit(
                _execute, r, clients[r.chapter], codes[r.chapter], inputs[r.chapter], environment
            )
            for r in runs
        ]
        try:
            for done in as_completed(waiting):
                if failed := done.exception():
                    pool.shutdown(wait=False, cancel_futures=True)
                    break  # what was cancelled never completes; what runs is waited for below
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            if template:
                template.process.kill()  # also who waits for it; its kernels end after it
            for client in clients.values():
                if process := getattr(getattr(client.km, "provisioner", None), "process", None):
                    process.kill()
            raise
    if failed:
        raise failed


def _client(run: Run) -> NotebookClient:
    """What executes the source, with the parameters that differ from its defaults in a cell of
    their own: naming a default must give the committed notebook's cells."""
    notebook, defaults = nbformat.read(run.source, as_version=4), parameters_of(run.source)
    given = [f"{k} = {value!r}" for k, value in run.parameters.items() if value != defaults[k]]
    tags = [cell.metadata.get("tags", []) for cell in notebook.cells]
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    if given:
        injected = new_code_cell("\n".join(given), metadata={"tags": ["injected-parameters"]})
        notebook.cells.insert(1 + ["parameters" in each for each in tags].index(True), injected)
    return NotebookClient(
        notebook,
        timeout=None,
        kernel_name="python3",
        record_timing=False,
        skip_cells_with_tag=LEFT_OUT.get(run.tier, ""),
        resources={"metadata": {"path": str(NOTEBOOKS)}},
        extra_arguments=["--IPKernelApp.log_level=40"],  # no warnings in the bar
    )


def lighter(notebook: NotebookNode) -> NotebookNode:
    """The notebook with its figures in 256 colours, a quarter of their size and not told apart."""
    from iclutils.plots.figures import few_colours  # takes seconds to import

    for cell in notebook.cells:
        for shown in cell.get("outputs", []):
            if "image/png" in (data := shown.get("data", {})):
                small = few_colours(base64.b64decode(data["image/png"]), 256, "RGBA")
                data["image/png"] = base64.b64encode(small).decode()
    return notebook


def _execute(
    run: Run,
    client: NotebookClient,
    code: science.Science,
    inputs: dict[str, Any],
    environment: dict[str, str],
) -> None:
    start = time.perf_counter()
    run.stamp.unlink(missing_ok=True)
    partial = run.notebook.with_suffix(".partial.ipynb")
    peak = run.notebook.with_suffix(".peak.json").resolve()
    codes = sum(cell.cell_type == "code" for cell in client.nb.cells)
    bar = progress.bar(what=f"{run.chapter[:2]} {run.kind}", total=codes)
    spent: dict[str, float] = {}

    def begins(cell: NotebookNode, **_: Any) -> None:
        spent[cell["id"]] = -time.perf_counter()

    def ends(cell: NotebookNode, **_: Any) -> None:
        spent[cell["id"]] += time.perf_counter()
        bar.update()

    client.on_cell_execute, client.on_cell_executed = begins, ends
    told = {"ICLUTILS_RESULTS": str(run.results.resolve()), "ICLUTILS_PEAK": str(peak)}
    try:
        client.execute(env=environment | told | QUIET)
    except (CellExecutionError, DeadKernelError) as error:
        write_text(partial, nbformat.writes(client.nb))
        what = "stopped: its kernel died, most likely because memory ran out. "
        if isinstance(error, CellExecutionError):
            cell = max(cell.get("execution_count") or 0 for cell in client.nb.cells)
            what = f"stopped in cell [{cell}]: {error.ename}: {error.evalue}\n"
        kept = f"The cells up to there are in {partial}; results already checked are kept."
        raise IclError(f"Chapter {run.chapter} {what}{kept}") from error
    finally:
        bar.close()
    seconds = time.perf_counter() - start
    write_text(run.notebook, nbformat.writes(lighter(client.nb)))
    partial.unlink(missing_ok=True)
    if missing := run.unchecked():
        said = f"Chapter {run.chapter} did not check these claims: {', '.join(missing)}."
        if run.tier != "paper":  # whose networks are not all at hand
            raise IclError(said)
        progress.say(f"{said} They stand as not run.")
    record: dict[str, Any] = {
        **{"chapter": run.chapter, "tier": run.kind, "seconds": round(seconds, 1)},
        **{"peak_gib": UNKNOWN, "cpu_seconds": round(seconds, 1)},
        **(read_json(peak) if peak.is_file() else {}),  # what the notebook says of itself
        "cells": {name: round(it, 1) for name, it in spent.items() if it >= 0.05},
        **{"machine": machine.describe(), "pace": machine.pace(), **claims.provenance()},
    }
    record["science"] = code if science.is_current() else {}  # else edited while it ran
    if run.part:
        record["values"] = dict(_few_digits(run))
    write_json(run.record, record)
    peak.unlink(missing_ok=True)
    write_json(run.stamp, inputs)
    if run.tier != "mini":
        progress.say(f"{run.chapter} ({run.kind}): done in {seconds / 60:.1f} min")


def _few_digits(run: Run) -> Iterator[tuple[str, float | None]]:
    """What was measured, and what the null of the cell gave where it has one."""
    for name in run.asks():
        result = read_json(run.result(name))
        for what, found in ((name, result), (f"{name} (null)", result["null"])):
            if found:
                yield what, found["value"] and float(f"{found['value']:.6g}")

"""Run chapters with papermill: parameters checked, progress shown, finished work kept.

papermill only warns about an unknown parameter and takes any type; here both are errors. A
chapter whose notebook, parameters, package and models have not changed since its last
successful run is not run again. Outputs appear only when complete. How long a run took, and on
what machine, is written beside its results, for the status page.
"""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import papermill
from nbclient.exceptions import DeadKernelError
from papermill.exceptions import PapermillExecutionError

from ..errors import IclError, unknown
from ..files import CHECKOUT, PACKAGE, read_json, replacing, write_json
from ..progress import say
from . import claims, machine, presets

ROOT = CHECKOUT
NOTEBOOKS = ROOT / "notebooks"
# Of the machinery a notebook meets these; it meets the science whole.
MET = ("session.py", "presets.py", "claims/__init__.py", "claims/*.yml")

MEMORIES = (("memory", "memory"), ("gpu", "GPU memory"))  # as a record has them, and a reader
UNKNOWN = {"memory": 0.0, "gpu": 0.0}


@dataclass(frozen=True)
class Done:
    """Where a chapter's run left its notebook, its results and its record."""

    chapter: str
    notebook: Path
    results: Path
    record: Path
    fresh: bool


def chapters() -> list[str]:
    """Chapters that can be run, in order."""
    return sorted(path.stem for path in NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))


def resolve(chapter: str) -> str:
    """Full name of a chapter given as ``"01"`` or ``"01_gpt2_induction"``."""
    for name in chapters():
        if chapter in (name, name.split("_")[0]):
            return name
    raise unknown("chapter", chapter, chapters())


def parameters_of(notebook: Path) -> dict[str, Any]:
    """Parameters of a notebook and their defaults."""
    found = {}
    for name, info in papermill.inspect_notebook(str(notebook)).items():
        try:
            found[name] = ast.literal_eval(info["default"])
        except (ValueError, SyntaxError) as error:
            raise IclError(f"{notebook.name}: parameter {name} is not a plain literal.") from error
    return found


def check_parameters(notebook: Path, given: dict[str, Any]) -> dict[str, Any]:
    """All parameters of the notebook, with those given put in."""
    known = parameters_of(notebook)
    for name, value in given.items():
        if name not in known:
            raise unknown(f"parameter of {notebook.stem}", name, known)
        if type(value) is not type(known[name]):
            raise IclError(
                f"Parameter {name} of {notebook.stem} must be of type {type(known[name]).__name__} "
                f"(default {known[name]!r}); got {value!r}, of type {type(value).__name__}."
            )
    return known | given


def run_chapter(
    chapter: str, given: dict[str, Any], build: Path, *, progress: bool = True, force: bool = False
) -> Done:
    """Run one chapter, unless nothing has changed since its last run.

    Args:
        chapter: name or number.
        given: parameters that differ from the notebook's defaults.
        build: folder for outputs: ``run/TIER/`` for notebooks, ``results/TIER/`` for JSON,
            ``runs/TIER/`` for time and machine.
        progress: show a bar over the cells.
        force: run even if up to date.
    """
    name = resolve(chapter)
    source = NOTEBOOKS / f"{name}.ipynb"
    values = check_parameters(source, given)
    # Only what differs is injected: naming a default must give the committed notebook's cells.
    defaults = parameters_of(source)
    given = {name: value for name, value in given.items() if value != defaults[name]}
    tier = presets.get(values.get("tier", "mini")).name
    own = bool(values.get("model"))
    kind = "own" if own else tier
    place = build / "run" / kind
    output, results = place / f"{name}.ipynb", build / "results"
    done = Done(name, output, results, build / "runs" / kind / f"{name}.json", fresh=False)
    stamp = {"inputs": _fingerprint(source), "parameters": values}
    finished = place / f"{name}.json"
    ledger = claims.ledger(name) if name in claims.chapters() and not own else {}
    wanted = [claim.id for claim in ledger.values() if tier in claim.tiers]
    missing = [k for k in wanted if not (results / tier / f"{k}.json").is_file()]
    whole = output.is_file() and done.record.is_file() and finished.is_file() and not missing
    if whole and not force and read_json(finished) == stamp:
        return done
    finished.unlink(missing_ok=True)
    partial = place / f"{name}.partial.ipynb"
    partial.parent.mkdir(parents=True, exist_ok=True)
    peak = (place / f"{name}.peak.json").resolve()
    peak.unlink(missing_ok=True)
    if progress:
        say(cost(name, kind, build / "runs", ROOT / "book" / "runs"))
    try:
        with _environment(
            ICLUTILS_RESULTS=str(results.resolve()), ICLUTILS_QUIET="1", ICLUTILS_PEAK=str(peak)
        ):
            papermill.execute_notebook(
                str(source),
                str(partial),
                parameters=given,
                cwd=str(NOTEBOOKS),
                progress_bar={"desc": name} if progress else False,
                extra_arguments=["--IPKernelApp.log_level=40"],  # no warnings in the bar
            )
    except PapermillExecutionError as error:
        raise IclError(
            f"Chapter {name} stopped in cell [{error.exec_count}]: {error.ename}: {error.evalue}\n"
            f"The cells up to there are in {partial}; results already checked are kept."
        ) from error
    except DeadKernelError as error:
        raise IclError(
            f"Chapter {name} stopped: its kernel died, most likely because memory ran out. "
            f"The cells up to there are in {partial}; results already checked are kept."
        ) from error
    with replacing(output) as temporary:
        shutil.copyfile(partial, temporary)
    partial.unlink()
    missing = [k for k in wanted if not (results / tier / f"{k}.json").is_file()]
    if missing:
        raise IclError(f"Chapter {name} did not check these claims: {', '.join(missing)}.")
    held = read_json(peak) if peak.is_file() else UNKNOWN
    write_json(done.record, _record(name, tier, read_json(output), held))
    peak.unlink(missing_ok=True)
    write_json(finished, stamp)
    return replace(done, fresh=True)


def cost(chapter: str, kind: str, *folders: Path) -> str:
    """Time and memory of a run, for the reader to know before it starts, from its last record.

    Args:
        chapter: full name.
        kind: tier, or ``"own"`` for a reader's own model.
        folders: where records are, the first that has one decides.
    """
    for folder in folders:
        path = folder / kind / f"{chapter}.json"
        if path.is_file():
            last = read_json(path)
            there = last["machine"]
            parts = [f"about {max(1, round(last['seconds'] / 60))} min"]
            parts += [
                f"{last['peak_gib'][k]:g} GiB of {what}"
                for k, what in MEMORIES
                if last["peak_gib"][k]
            ]
            where = there["gpu"] or f"{there['cores']} cores"
            return f"{chapter} ({kind}): {', '.join(parts)}, if as last time, on {where}"
    return f"{chapter} ({kind}): no run is recorded, so its time and memory are not known"


def _record(
    chapter: str, tier: str, notebook: dict[str, Any], peak: dict[str, float]
) -> dict[str, Any]:
    """What the status page says about a run, from the notebook that papermill left."""
    return {
        "chapter": chapter,
        "tier": tier,
        "seconds": round(notebook["metadata"]["papermill"]["duration"], 1),
        "peak_gib": peak,
        "machine": machine.describe(),
        "versions": {name: metadata.version(name) for name in claims.VERSIONED},
        "python": platform.python_version(),
        "commit": claims.commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def _fingerprint(notebook: Path) -> str:
    """Hash of all that a run depends on: sources, ledgers, model checksums, versions."""
    digest = hashlib.sha256()
    for cell in read_json(notebook)["cells"]:
        digest.update("".join(cell["source"]).encode())
    machinery = PACKAGE / "bookkit"
    met = {path for pattern in MET for path in machinery.glob(pattern)}
    for path in sorted([*PACKAGE.rglob("*.py"), *met, *PACKAGE.glob("zoo/*/SHA256SUMS")]):
        if path in met or machinery not in path.parents:
            digest.update(path.read_bytes())
    for package in claims.VERSIONED:
        digest.update(f"{package}={metadata.version(package)}".encode())
    return digest.hexdigest()


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

"""Run chapters with papermill: parameters checked, progress shown, finished work kept.

papermill only warns about an unknown parameter and takes any type; here both are errors. A
chapter whose notebook, parameters, package and models have not changed since its last
successful run is not run again. Outputs appear only when complete.
"""

from __future__ import annotations

import ast
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import papermill
from nbclient.exceptions import DeadKernelError
from papermill.exceptions import PapermillExecutionError

from . import claims, tiers
from .errors import IclError, unknown
from .files import read_json, replacing, write_json

PACKAGE = Path(__file__).parent
ROOT = PACKAGE.parent
NOTEBOOKS = ROOT / "notebooks"
NOT_IN_NOTEBOOKS = frozenset(
    ("__main__.py", "address.py", "book.py", "run.py", "scorecard.py", "sphinx_ext", "training")
)


@dataclass(frozen=True)
class Done:
    """Where a chapter's run left its notebook and its results."""

    chapter: str
    notebook: Path
    results: Path
    fresh: bool


def chapters() -> list[str]:
    """Chapters that can be run, in order."""
    return sorted(path.stem for path in NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))


def resolve(chapter: str) -> str:
    """Full name of a chapter given as ``"01"`` or ``"01_gpt2_induction"``.

    Raises:
        IclError: if there is none.
    """
    for name in chapters():
        if chapter in (name, name.split("_")[0]):
            return name
    raise unknown("chapter", chapter, chapters())


def parameters_of(notebook: Path) -> dict[str, Any]:
    """Parameters of a notebook and their defaults.

    Raises:
        IclError: if a default is not a plain literal.
    """
    found = {}
    for name, info in papermill.inspect_notebook(str(notebook)).items():
        try:
            found[name] = ast.literal_eval(info["default"])
        except (ValueError, SyntaxError) as error:
            raise IclError(f"{notebook.name}: parameter {name} is not a plain literal.") from error
    return found


def check_parameters(notebook: Path, given: dict[str, Any]) -> dict[str, Any]:
    """All parameters of the notebook, with those given put in.

    Raises:
        IclError: if one is unknown or of another type than the default.
    """
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
        build: folder for outputs: ``run/TIER/`` for notebooks, ``results/TIER/`` for JSON.
        progress: show a bar over the cells.
        force: run even if up to date.

    Raises:
        IclError: if a parameter is wrong, a cell fails, or a claim of the tier was not checked.
    """
    name = resolve(chapter)
    source = NOTEBOOKS / f"{name}.ipynb"
    values = check_parameters(source, given)
    # Only what differs is injected: naming a default must give the committed notebook's cells.
    defaults = parameters_of(source)
    given = {name: value for name, value in given.items() if value != defaults[name]}
    tier = tiers.get(values.get("tier", "mini")).name
    own = bool(values.get("model"))
    place = build / "run" / ("own" if own else tier)
    output, results = place / f"{name}.ipynb", build / "results"
    stamp = {"inputs": _fingerprint(source), "parameters": values}
    record = place / f"{name}.json"
    wanted = [] if own else [k for k, c in claims.ledger(name).items() if tier in c.tiers]
    missing = [k for k in wanted if not (results / tier / f"{k}.json").is_file()]
    whole = output.is_file() and record.is_file() and not missing
    if whole and not force and read_json(record) == stamp:
        return Done(name, output, results, fresh=False)
    record.unlink(missing_ok=True)
    partial = place / f"{name}.partial.ipynb"
    partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _environment(ICLUTILS_RESULTS=str(results.resolve()), ICLUTILS_QUIET="1"):
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
    write_json(record, stamp)
    return Done(name, output, results, fresh=True)


def _fingerprint(notebook: Path) -> str:
    """Hash of all that a run depends on: sources, ledgers, model checksums, versions."""
    digest = hashlib.sha256()
    for cell in read_json(notebook)["cells"]:
        digest.update("".join(cell["source"]).encode())
    for pattern in ("**/*.py", "claims/*.yml", "zoo/*/SHA256SUMS"):
        for path in sorted(PACKAGE.glob(pattern)):
            if path.relative_to(PACKAGE).parts[0] not in NOT_IN_NOTEBOOKS:
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

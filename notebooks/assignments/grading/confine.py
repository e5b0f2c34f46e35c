"""Run one command in a folder of its own, within bounds, and stop it when it breaks one.

The command and all it starts get a clean environment, the ``guard`` and a watcher, which adds up
their memory and sees when the command's last step began. Whatever they leave behind is ended, too:
everything that was started carries the folder's name in its environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import psutil
from iclutils.checks import folder as masters
from iclutils.files import CHECKOUT

from . import guard, inside

PAUSE = 0.1  # seconds between two looks
GRACE = 5.0  # seconds that a step has to end itself when its time is up
KEPT = ("PATH", "LANG", "LC_ALL", "SYSTEMROOT", "VIRTUAL_ENV", "LD_LIBRARY_PATH")


@dataclass(frozen=True)
class Limits:
    """What one submission may use: seconds on the clock for each step (a cell, or the answers to
    one question) and in all, gigabytes, processes.

    A solution needs about ten seconds in all, one gigabyte and one process.
    """

    step: float = 60.0
    seconds: float = 300.0
    memory: float = 4.0
    processes: int = 16


@dataclass(frozen=True)
class End:
    """How it ended: the exit status, why it was stopped (or nothing), what it said, and which
    machines it tried to reach."""

    code: int
    stopped: str
    reason: str
    said: str
    reached: tuple[str, ...] = ()


def run(command: list[str], folder: Path, limits: Limits, interrupted: Event) -> End:
    """Run ``command`` in ``folder``, which is all that it may write to."""
    folder = folder.resolve()
    environment = _environment(folder)
    with (folder / "said.txt").open("wb") as said:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            stopped, reason = _watch(process, folder, limits, interrupted)
        finally:
            _end_all(process, folder)
    text, note = (_text(folder / name) for name in ("said.txt", guard.NOTE))
    return End(process.returncode, stopped, reason, text, tuple(sorted(set(note.split()))))


def _text(path: Path) -> str:
    """The end of a file that the command may have written, as text."""
    with suppress(OSError), path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - 10_000))
        return stream.read().decode("utf-8", errors="replace")
    return ""


def _environment(folder: Path) -> dict[str, str]:
    """Nothing of the grader's own environment but what programs need to start."""
    watched = folder / "guard"
    for name in ("guard", "home", "tmp"):
        (folder / name).mkdir(exist_ok=True)
    shutil.copy(guard.__file__, watched / "sitecustomize.py")
    folders = {
        **dict.fromkeys(("HOME", "IPYTHONDIR"), folder / "home"),
        **dict.fromkeys(("TMPDIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"), folder / "tmp"),
        **{"ICLUTILS_RESULTS": folder / "tmp", guard.FOLDER: folder},
        **{"PYTHONPATH": os.pathsep.join(map(str, (watched, CHECKOUT))), guard.SECRET: masters()},
    }
    flags = ("PYTHONDONTWRITEBYTECODE", "HF_HUB_OFFLINE", "ICLUTILS_QUIET", "OMP_NUM_THREADS")
    own = folders | dict.fromkeys(flags, 1) | {"MPLBACKEND": "agg", "USER": "student"}
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    return kept | {name: str(value) for name, value in own.items()}


def _watch(
    process: subprocess.Popen[bytes], folder: Path, limits: Limits, interrupted: Event
) -> tuple[str, str]:
    """Look until the process ends by itself or breaks a bound; say which."""
    root, started, step = psutil.Process(process.pid), time.monotonic(), folder / inside.STEP
    while process.poll() is None:
        if interrupted.is_set():
            return "interrupted", "grading was interrupted"
        if time.monotonic() - started > limits.seconds:
            return "time", f"it ran longer than {limits.seconds:g} s"
        if step.is_file() and time.time() - step.stat().st_mtime > limits.step + GRACE:
            return "step", f"it ran longer than {limits.step:g} s"
        members = list(_family(root))
        if len(members) > limits.processes:
            return "processes", f"it started more than {limits.processes} processes"
        bound = limits.memory * 2**30
        if all(sum(_memory(p, shared) for p in members) > bound for shared in (True, False)):
            return "memory", f"it used more than {limits.memory:g} GB of memory"
        time.sleep(PAUSE)
    return "", ""


def _family(root: psutil.Process) -> Iterator[psutil.Process]:
    with suppress(psutil.Error):
        yield root
        yield from root.children(recursive=True)


def _memory(process: psutil.Process, shared: bool = True) -> int:
    """Bytes; without ``shared``, memory that processes share is divided among them; slower."""
    with suppress(psutil.Error):
        resident = process.memory_info().rss
        return resident if shared else getattr(process.memory_full_info(), "pss", resident)
    return 0


def _end_all(process: subprocess.Popen[bytes], folder: Path) -> None:
    """End the process and all that it started, also those that left its group."""
    for _ in range(5):  # one that is ended may have started another meanwhile
        left = [each for each in psutil.process_iter() if _belongs(each, folder)]
        for each in left:
            with suppress(psutil.Error):
                each.kill()
        if process.poll() is None:
            process.kill()
        process.wait()
        if not left:
            return
        psutil.wait_procs(left, timeout=1)


def _belongs(process: psutil.Process, folder: Path) -> bool:
    with suppress(psutil.Error, OSError):
        return process.environ().get(guard.FOLDER) == str(folder)
    return False


def command(folder: Path) -> list[str]:
    """What runs the submission in a folder."""
    return [sys.executable, "-P", inside.__file__, str(folder)]

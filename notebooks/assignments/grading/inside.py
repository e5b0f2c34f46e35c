"""Run one submission, cell by cell, and tell what its answers give; nothing is judged here.

This is the submission's own process: whatever it holds, students may read and change. It has the
public half of the homework, a bound of time and output for each step (a cell, or the answers to
one question), and no truth. It tells the grader what is being done (``step``), what cells raised
(``cell``, ``error``), and of each ``question`` the numbers, which are compared elsewhere.
"""

import importlib
import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
from iclutils.checks import HIDDEN, PUBLIC, Mistake, Part, frozen, unpacked
from IPython.core.interactiveshell import InteractiveShell
from torch import Tensor
from traitlets.config import Config

from guard import MAY_READ, PATIENCE, send

PRINTED = 2**20  # characters that one step may print
LARGEST = 10**6  # numbers of one answer
FIRST = os.getpid()


class Overtime(BaseException):
    """A step ran for too long; no ``except Exception`` swallows it."""


class Shell(InteractiveShell):
    """IPython, for what a notebook may hold beside Python: %magic, !shell, await, display."""

    def enable_gui(self, gui: Any = None) -> None:
        """There is no screen: %matplotlib has nothing to start."""

    def system(self, cmd: str) -> None:
        """A line that begins with ``!``: without namespaces it is not run."""
        if not os.environ.get(MAY_READ):
            self.system_piped(cmd)


class Screen(io.TextIOBase):
    """What is printed is counted, and forgotten."""

    left = PRINTED

    def write(self, text: str) -> int:
        self.left -= len(text)
        if self.left < 0:
            raise OSError(f"it printed more than {PRINTED // 2**20} MB")
        return len(text)


def main() -> None:
    """Do what the plan says, which is the input."""
    plan = json.load(sys.stdin)
    parts = unpacked(plan["public"])[1] if "public" in plan else {}
    if "memory" in plan:
        _bound_memory(plan["memory"])
    shell = Shell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    screen = sys.stdout = sys.stderr = Screen()
    sys.path.insert(0, os.getcwd())
    if plan["cells"]:
        importlib.import_module("iclutils.session")  # what set-up cells load is no student's time
    for i, source in enumerate(plan["cells"]):
        if (step := f"cell {i}") not in plan["skip"]:
            error: BaseException | None
            try:
                with _bounded(step, plan, screen):
                    result = shell.run_cell(source)
                error = result.error_before_exec or result.error_in_exec
            except Overtime as late:
                error = late
            if error is not None:
                send({"cell": i, "error": _said(error, plan["seconds"])})
    for question, asked in parts.items():
        if question not in plan["skip"]:
            slow = {"mistake": f"its answers took longer than {plan['seconds']:g} s"}
            found: Any = {seed: [slow] * len(asked) for seed in (*PUBLIC, *HIDDEN)}
            with suppress(Overtime), _bounded(question, plan, screen):
                for seed in found:
                    found[seed] = [_given(p, shell.user_ns.get(p.name), seed) for p, _ in asked]
            send({"question": question}, frozen(found))
    send({"done": True})
    os._exit(0)  # whatever threads are left


@contextmanager
def _bounded(step: str, plan: dict[str, Any], screen: Screen) -> Iterator[None]:
    """Say what is being done, and end it when its time is up: then, and every second from then.

    Time is the processor's, so that what else the machine does costs nobody points; what only waits
    has more of it. A process that was forked ends with its step, and a step that leaves too many
    ends all: no later one is blamed for them.
    """

    def late(*_: Any) -> None:
        raise Overtime

    send({"step": step})
    screen.left = PRINTED
    timers = {signal.ITIMER_PROF: plan["seconds"], signal.ITIMER_REAL: PATIENCE * plan["seconds"]}
    signal.signal(signal.SIGPROF, late)
    signal.signal(signal.SIGALRM, late)
    for timer, seconds in timers.items():
        signal.setitimer(timer, seconds, 1.0)
    try:
        yield
    finally:
        for timer in timers:
            signal.setitimer(timer, 0.0)
        if os.getpid() != FIRST or _processes() > plan["processes"]:
            os._exit(1)


def _processes() -> int:
    """How many were started here: those of this session."""
    found = 0
    for pid in psutil.pids():
        with suppress(OSError):
            found += os.getsid(pid) == os.getsid(0)
    return found


def _given(part: Part, answer: Any, seed: int) -> dict[str, Any]:
    """What one answer gives, as nothing but numbers, or the mistake that it is."""
    try:
        value = part.given(answer, seed)
    except Mistake as mistake:
        return {"mistake": str(mistake)}
    except (Exception, SystemExit) as error:
        return {"mistake": f"`{part.name}` raised {_said(error, 0.0)}"}
    if isinstance(value, Tensor):
        if value.numel() > LARGEST:
            return {"mistake": f"`{part.name}` gives {value.numel()} numbers."}
        return {"value": value.as_subclass(Tensor)}
    if value is None or type(value) in (bool, int, float, str):
        return {"value": value}
    return {"mistake": f"`{part.name}` gives a {type(value).__name__}: not a number, nor a tensor."}


def _said(error: BaseException, seconds: float) -> str:
    if isinstance(error, Overtime):
        return f"it ran longer than {seconds:g} s"
    return traceback.format_exception_only(error)[-1].strip()[:300]


def _bound_memory(gigabytes: float) -> None:
    """Memory beyond the bound is refused to the step that asks for it (Linux)."""
    import resource

    most = int(gigabytes * 2**30)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


if __name__ == "__main__":
    main()

"""Run one submission, cell by cell, and write what its answers give; nothing is judged here.

This is the submission's own process, in a sandbox (``confine``): whatever it holds, students may
read and change. Its input is a plan: the cells, the public half of the homework and the bounds. Its
output is one line of JSON for each step (a cell, or the answers to one question) that begins, for
what a cell raised, and for the numbers of each question, which are compared elsewhere.
"""

import ast
import importlib
import io
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

PRINTED = 2**20  # characters that one step may print
LARGEST = 10**5  # numbers of one answer
FILE = 256 * 2**20  # bytes of one file
GRACE = 5  # seconds that a step has to end itself when its time is up
FIRST = os.getpid()


class Overtime(BaseException):
    """A step ran for too long; no ``except Exception`` swallows it."""


class Screen(io.TextIOBase):
    """What is printed is counted, and forgotten."""

    left = PRINTED

    def write(self, text: str) -> int:
        self.left -= len(text)
        if self.left < 0:
            raise OSError(f"it printed more than {PRINTED // 2**20} MB")
        return len(text)


def main() -> None:
    """Do what the plan says."""
    plan = json.load(sys.stdin)
    bound(plan)
    output = os.dup(1)
    exec(plan["checks"], {})  # as in the student's notebook
    checks = sys.modules["checks"]
    ((parts, _),) = checks.carried.values()
    psutil = importlib.import_module("psutil")
    for loaded in ("session", "models.language"):  # by set-up cells: that is no student's time
        importlib.import_module(f"iclutils.{loaded}")
    shell = _shell()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    screen = sys.stdout = sys.stderr = Screen()

    def tell(**facts: Any) -> None:
        line = checks.frozen(facts).encode() + b"\n"
        while line:
            line = line[os.write(output, line) :]

    def end(why: str) -> None:
        tell(ended=why)
        os._exit(1)

    @contextmanager
    def bounded(step: str) -> Iterator[None]:
        """Say which step begins, and end it when its time is up: then, and each second from then.

        Time is the processor's, so that what else the machine does costs nobody points; what only
        waits has several times as long. A step that leaves a fork of this process, or too many
        processes, ends all: no later step is blamed for them.
        """
        late = 0

        def stop(*_: Any) -> None:
            nonlocal late
            late += 1
            if late > GRACE:
                end(f"it ran longer than {plan['step']:g} s")
            raise Overtime

        tell(step=step, used=time.process_time())
        screen.left = PRINTED
        timers = {signal.ITIMER_PROF: 1, signal.ITIMER_REAL: plan["patience"]}
        signal.signal(signal.SIGPROF, stop)
        signal.signal(signal.SIGALRM, stop)
        for timer, times in timers.items():
            signal.setitimer(timer, times * plan["step"], 1.0)
        try:
            yield
        finally:
            for timer in timers:
                signal.setitimer(timer, 0.0)
            if os.getpid() != FIRST:
                os._exit(1)
            if (
                len([pid for pid in psutil.pids() if _session(pid) == os.getsid(0)])
                > plan["processes"]
            ):
                end(f"it left more than {plan['processes']} processes")

    answers = {part.name for asked in parts.values() for part in asked}
    for i, cell in enumerate(plan["cells"]):
        if (step := f"cell {i}") not in plan["skip"]:
            try:
                with bounded(step):
                    error = _run(shell, cell, answers)
            except Overtime as late:
                error = late
            if error is not None:
                tell(cell=i, error=_text(error, plan["step"]))
    with suppress(Exception):  # the notebook may have loaded its checks once more
        tell(student=str(sys.modules["checks"].signed[0])[:200])
    for question, asked in parts.items():
        if question not in plan["skip"]:
            slow = {"mistake": f"its answers took longer than {plan['step']:g} s"}
            values = {seed: [slow] * len(asked) for seed in (*checks.PUBLIC, *checks.HIDDEN)}
            with suppress(Overtime), bounded(question):
                for seed in values:
                    values[seed] = [_value(p, shell.user_ns, seed, checks) for p in asked]
            tell(question=question, values=values)
    tell(done=True)
    os._exit(0)  # whatever threads are left


def bound(plan: dict[str, Any]) -> None:
    """Take an account of its own, where there is one to take, and bounds that the kernel keeps."""
    if plan["account"]:
        os.setgroups([])
        os.setresgid(*[plan["account"]] * 3)
        os.setresuid(*[plan["account"]] * 3)
    memory, seconds = int(plan["memory"] * 2**30), max(1, int(plan["seconds"]))
    bounds = {"CORE": 0, "FSIZE": FILE, "DATA": memory, "NPROC": plan["tasks"], "CPU": seconds}
    for name, most in bounds.items():
        with suppress(AttributeError, ValueError, OSError):  # not every system has all of them
            limit = getattr(resource, f"RLIMIT_{name}")
            resource.setrlimit(limit, (most, most + (name == "CPU")))  # a signal, then the end


def _session(pid: int) -> int:
    with suppress(OSError):
        return os.getsid(pid)
    return 0


def _shell() -> Any:
    """IPython, for what a notebook may hold beside Python: %magic, !shell, await, display."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    class Shell(InteractiveShell):
        def enable_gui(self, gui: Any = None) -> None:
            """There is no screen: %matplotlib has nothing to start."""

        system = InteractiveShell.system_piped

    sys.path.insert(0, os.getcwd())
    return Shell.instance(config=Config({"HistoryManager": {"enabled": False}}))


def _run(shell: Any, cell: str, answers: set[str]) -> BaseException | None:
    """Run a cell; return what it raised.

    Where an import fails that this environment does not have, for example ``google.colab``, in a
    cell without an answer, each import and each statement of the cell runs for itself.
    """
    result = shell.run_cell(cell)
    error = result.error_before_exec or result.error_in_exec
    body = ast.parse(shell.transform_cell(cell)).body if isinstance(error, ImportError) else []
    if answers.isdisjoint(getattr(each, "name", "") for each in body):
        for statement in body:
            names = getattr(statement, "names", [])
            for name in names if isinstance(statement, ast.Import | ast.ImportFrom) else [None]:
                if name is not None:
                    statement.names = [name]
                shell.run_cell(ast.unparse(statement))
    return error


def _value(part: Any, names: dict[str, Any], seed: int, checks: Any) -> dict[str, Any]:
    """What one answer gives, as nothing but numbers, or the mistake that it is."""
    try:
        value = part.ask(names.get(part.name), seed)
        if isinstance(value, checks.Tensor):
            value = value.as_subclass(checks.Tensor)
            if value.numel() > LARGEST or value.is_complex():
                kind = "complex tensor" if value.is_complex() else "tensor"
                raise checks.Mistake(f"`{part.name}` gives a {kind} of {value.numel()} numbers.")
        elif value is not None and type(value) not in (bool, int, float, str):
            kind = type(value).__name__
            raise checks.Mistake(f"`{part.name}` gives a {kind}: no number, no tensor.")
        checks.frozen(value)
        return {"value": value}
    except checks.Mistake as mistake:
        return {"mistake": str(mistake)}
    except (Exception, SystemExit) as error:
        return {"mistake": f"`{part.name}` raised {_text(error, 0.0)}"}


def _text(error: BaseException, seconds: float) -> str:
    if isinstance(error, Overtime):
        return f"it ran longer than {seconds:g} s"
    return traceback.format_exception_only(error)[-1].strip()[:300]


if __name__ == "__main__":
    main()

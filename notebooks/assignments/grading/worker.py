"""Run one submission, step by step, and write what its answers give; nothing is judged here.

This is the submission's own process, in a sandbox (``confine``): whatever it holds, students may
read and change. Its input is a plan: the cells, the public half of the homework and the bounds. A
step is a cell, or the answers to one question. Its output is a line of JSON when a step begins, and
one with what a cell raised, or with the numbers of a question, which are compared elsewhere.

A question is asked where the notebook checks it, as the student saw it: later cells may give the
names of its helpers to others. It is asked again at the end if it raised an error, or if its
answers are other ones by then, and once more after the cells that missed a name, for example
because the imports come last.
"""

import itertools
import json
import os
import re
import resource
import signal
import sys
import tempfile
from contextlib import suppress
from typing import Any
from unittest.mock import MagicMock

FILE = 32 * 2**20  # bytes of one file, also of what a step prints
PATIENCE = 5  # seconds on the clock for each of the processor's
GRACE = 5  # seconds that a step has to end itself when its time is up
TOO_LONG = 124  # the status of a process that was ended for it, as of ``timeout``
CHECK = re.compile(r"\bcheck\(\s*['\"]\w+\.(\w+)")  # of a question, in a cell
FIRST = os.getpid()


class Overtime(BaseException):
    """A step ran for too long; no ``except Exception`` swallows it."""


def main() -> None:
    """Do what the plan says."""
    plan = json.load(sys.stdin)
    bound(plan)
    output = os.dup(1)
    exec(plan["checks"], {})  # as in the student's notebook
    checks = sys.modules["checks"]
    (asked,) = checks.carried.values()
    import iclutils.models.language  # by set-up cells: that is no student's time
    import iclutils.session  # noqa: F401
    from IPython.core.interactiveshell import InteractiveShell  # for %magic, !shell, await
    from traitlets.config import Config

    sys.path.insert(0, os.getcwd())
    shell: Any = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    shell.enable_gui = lambda gui=None: None  # there is no screen
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)

    def tell(**facts: Any) -> None:
        os.write(output, json.dumps(facts).encode() + b"\n")

    answers = {part.name for parts in asked.values() for part in parts}
    held: dict[str, list[Any]] = {name: [] for name in asked}  # what was asked, and gave values
    nameless: list[str] = []  # cells that missed a name

    def take(step: str) -> None:
        if step in plan["skip"]:
            return
        tell(begun=step)
        screen = tempfile.TemporaryFile("w", errors="replace")  # noqa: SIM115 - it has no name
        sys.stdout = sys.stderr = screen
        try:
            start_clock(plan["step"])
            if step in plan["cells"]:
                error = _run(shell, plan["cells"][step], answers)
                tell(step=step, error=error)
                nameless.extend([step] if error.startswith("NameError") else [])
                return
            held[step] = [shell.user_ns.get(part.name) for part in asked[step]]
            pairs = [*zip(asked[step], held[step], strict=True)]
            for seed in (*checks.PUBLIC, *checks.HIDDEN):
                values = [_value(*each, seed, checks) for each in pairs]
                tell(step=step, values={seed: values})
                if any("mistake" in value for value in values):
                    held[step] = []
        except Overtime:
            tell(step=step, error=f"it ran longer than {plan['step']:g} s")
        finally:
            start_clock(0)
            if os.getpid() != FIRST:  # the step has forked this process
                os._exit(1)

    for cell, text in plan["cells"].items():
        take(cell)
        for question in filter(asked.__contains__, dict.fromkeys(CHECK.findall(text))):
            take(question)
    for question, parts in asked.items():
        now = [shell.user_ns.get(part.name) for part in parts]
        if [*map(id, now)] != [*map(id, held[question])]:
            take(question)
    if nameless and not all(held.values()):
        for cell in [*nameless]:
            take(cell)
        for question in [each for each in asked if not held[each]]:
            take(question)
    with suppress(Exception):  # the notebook may have loaded its checks once more
        tell(signed=str(sys.modules["checks"].signed[0])[:200])
    tell(done=True)
    os._exit(0)  # whatever threads are left


def bound(plan: dict[str, Any]) -> None:
    """Take an account of its own, where there is one to take, and bounds that the kernel keeps."""
    if plan["account"]:
        os.setgroups([])
        os.setresgid(*[plan["account"]] * 3)
        os.setresuid(*[plan["account"]] * 3)
    memory, seconds = int(plan["memory"] * 2**30), int(plan["seconds"])
    bounds = {"CORE": 0, "FSIZE": FILE, "DATA": memory, "NPROC": plan["tasks"], "CPU": seconds}
    for name, most in bounds.items():
        with suppress(AttributeError, ValueError, OSError):  # not every system has all of them
            limit = getattr(resource, f"RLIMIT_{name}")
            resource.setrlimit(limit, (most, most + (name == "CPU")))  # a signal, then the end


def start_clock(seconds: float) -> None:
    """End a step by ``Overtime`` when its time is up, and each second from then, a few times. It is
    the processor's time, so that what else the machine does costs nobody points; what only waits
    has several times as long."""
    late = itertools.count()

    def stop(*_: Any) -> None:
        if next(late) == GRACE:
            os._exit(TOO_LONG)
        raise Overtime

    signal.signal(signal.SIGPROF, stop)
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE * seconds, 1.0)


def _run(shell: Any, cell: str, answers: set[str]) -> str:
    """Run a cell; return what it raised. A module that is not here, for example ``google.colab``,
    is one that does nothing, and the cell, if it holds no answer, runs once more."""
    result = shell.run_cell(cell)
    error = result.error_before_exec or result.error_in_exec
    if isinstance(error, Overtime):
        raise error
    lost = error.name if isinstance(error, ModuleNotFoundError) else None
    if lost and lost not in sys.modules and not any(f"def {name}(" in cell for name in answers):
        sys.modules[lost] = MagicMock()
        _run(shell, cell, answers)
    return _said(error) if error else ""


def _value(part: Any, answer: Any, seed: int, checks: Any) -> dict[str, Any]:
    """Return what one answer gives, as nothing but numbers, or the mistake that it is."""

    def listed(value: Any) -> Any:
        if isinstance(value, checks.Tensor):
            return value.tolist()
        raise checks.Mistake(f"Expected real numbers or a tensor; got a {type(value).__name__}.")

    try:
        return {"value": json.loads(json.dumps(part.ask(answer, seed), default=listed))}
    except checks.Mistake as mistake:
        return {"mistake": str(mistake)}
    except (Exception, SystemExit) as error:
        return {"mistake": f"`{part.name}` raised {_said(error)}"}


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")[:300]


if __name__ == "__main__":
    main()

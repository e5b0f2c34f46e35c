"""Run one submission, step by step, and write what its answers give; nothing is judged here.

This is the submission's own process, in a sandbox (``confine``): whatever it holds, students may
read and change. Its input is a plan; a step of it is a cell, or the answers to one question. It
writes lines of JSON, a name and a value: a step and null when it begins, the step and its error
when it ends, and what answers give. A question is asked where the notebook checks it, as the
student saw it: later cells may give the names of its helpers to others. It is asked again at the
end if it raised an error, or if its answers are other ones by then.
"""

import itertools
import json
import os
import re
import signal
import sys
import tempfile
from contextlib import suppress
from typing import Any
from unittest.mock import MagicMock

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
    output = os.dup(1)
    exec(plan["checks"], {})  # as in the student's notebook
    checks = sys.modules["checks"]
    questions = {**checks.carried}
    import iclutils.models.language  # by set-up cells: that is no student's time
    import iclutils.session  # noqa: F401
    from IPython.core.interactiveshell import InteractiveShell  # for %magic, !shell, await
    from traitlets.config import Config

    sys.path.insert(0, os.getcwd())
    shell: Any = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    shell.enable_gui = lambda gui=None: None  # there is no screen
    for stream in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), stream)
    held: dict[str, list[Any]] = {name: [] for name in questions}  # what gave values
    ended = dict[str, str]()  # steps, by what they raised

    def listed(value: Any) -> Any:
        if not isinstance(value, checks.Tensor):
            raise checks.Mistake(f"Expected real numbers; got a {type(value).__name__}.")
        return value.tolist()

    def tell(name: str, value: Any) -> None:
        os.write(output, json.dumps([name, value], default=listed).encode() + b"\n")

    def answers(question: str) -> list[Any]:
        return [shell.user_ns.get(part.name) for part in questions[question]]

    def run_cell(cell: str) -> str:
        """Run a cell; return what it raised. A module that is not here, such as ``google.colab``,
        is one that does nothing, and the cell, if it holds no answer, runs once more."""
        result = shell.run_cell(cell)
        error = result.error_before_exec or result.error_in_exec
        if isinstance(error, Overtime):
            raise error
        lost = error.name if isinstance(error, ModuleNotFoundError) else None
        names = (part.name for parts in questions.values() for part in parts)
        if lost and lost not in sys.modules and not any(f"def {name}(" in cell for name in names):
            sys.modules[lost] = MagicMock()
            run_cell(cell)
        return _said(error) if error else ""

    def ask(question: str) -> str:
        """Tell for each seed what the answers to a question give, or the mistake in them."""
        held[question] = given = answers(question)
        for seed in (*checks.PUBLIC, *checks.HIDDEN):
            pairs, name = zip(questions[question], given, strict=True), f"{question} {seed}"
            try:
                tell(name, [part.ask(answer, seed) for part, answer in pairs])
            except (Exception, SystemExit) as error:
                held[question] = []
                tell(name, str(error) if isinstance(error, checks.Mistake) else _said(error))
        return ""

    def take(step: str) -> None:
        if step in plan["skip"]:
            return
        tell(step, None)
        sys.stdout = sys.stderr = tempfile.TemporaryFile("w", errors="replace")  # noqa: SIM115
        try:
            start_clock(plan["step"])
            cell = plan["cells"].get(step)
            ended[step] = ask(step) if cell is None else run_cell(cell)
        except Overtime:
            ended[step] = f"it ran longer than {plan['step']:g} s"
        finally:
            start_clock(0)
            if os.getpid() != FIRST:  # the step has forked this process
                os._exit(1)
        tell(step, ended[step])

    for cell, text in plan["cells"].items():
        take(cell)
        for question in filter(questions.__contains__, dict.fromkeys(CHECK.findall(text))):
            take(question)
    if not all(held.values()):
        for cell in [each for each in ended if ended[each].startswith("NameError")]:
            take(cell)
    for question in questions:
        if [*map(id, answers(question))] != [*map(id, held[question])]:
            take(question)
    with suppress(Exception):  # the notebook may have loaded its checks once more
        tell("signed", str(sys.modules["checks"].signed[0])[:200])
    tell("done", True)
    os._exit(0)  # whatever threads are left


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


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")[:300]


if __name__ == "__main__":
    main()

"""Judge answers to homework: is it written, is it the student's own, is it right, and why not?

In a table ``answers/hw01.py`` each question is a tuple of ``Part``: how an answer is called and
compared. Below the ``MARK`` what is right has the name of the answer, and the same name in
capitals has typical mistakes, by the message that each deserves (of a control: by words of it). A
student's notebook carries this file and what stands above the mark.

``sign`` makes a number of the student's name. The order of choices, and whatever a homework draws
from that number, belong to this student alone.
"""

from __future__ import annotations

import functools
import inspect
import os
import random
import re
import textwrap
import types
import unicodedata
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from iclutils.errors import IclError
from torch import Generator, Tensor

# What an answer may not call, and what of it it may.
MEASURES = ("iclutils.interp.", "iclutils.chapters.", "checks.")
TOOLS = (
    "iclutils.interp.hooks.",
    "iclutils.interp.clean_corrupt.",
    "iclutils.chapters.every_lens.question.",
)
SINGLE = 1e-5  # relative; what an answer in single precision may be off by, at least
PUBLIC, HIDDEN = (0,), (1, 2, 3, 4, 5)  # seeds of the random inputs
MARK = "# Students get what stands above this line, and nothing below it."
Expected = tuple[Any, Mapping[str, Any]]  # the truth, and what each mistake gives, by its message


class Mistake(Exception):
    """A wrong answer; the message names the likely mistake."""


@dataclass(frozen=True, eq=False)
class Part:
    """How one answer is called and compared.

    The ``kind`` is ``function``, ``number``, ``tensor`` or ``letter``. A function is called as
    ``outcome(function, *inputs(seed))`` (where ``inputs`` gives None, that seed is left out).
    ``look(value, truth)`` is what is compared with the truth, up to a ``tolerance`` relative to the
    largest of it and to 1. A letter names one of four ``choices``; each student sees them in
    another order, and what is right is said of the order here. What is below the ``MARK`` is put in
    last, or ``public``, in a student's notebook. Of a control no draw is right alone:
    ``verdict(draws, *inputs)`` raises ``Mistake``.
    """

    name: str
    kind: str = "function"
    inputs: Callable[[int], tuple[Any, ...] | None] = lambda seed: ()
    outcome: Callable[..., Any] = lambda answer, *inputs: answer(*inputs) if inputs else answer
    look: Callable[[Any, Any], Any] = lambda value, truth: value
    tolerance: float = SINGLE
    choices: tuple[str, ...] = ()
    verdict: Callable[..., None] | None = None
    truth: Any = None
    mistakes: Mapping[str, Any] | None = None
    public: Expected | None = None

    def order(self, student: str) -> list[str]:
        """Return the letters of the choices in the order in which this student sees them."""
        return random.Random(f"{clean(student)} {self.choices}").sample("abcd", 4)

    def ask(self, answer: Any, seed: int) -> Any:
        """Return what a student's answer gives for the inputs of a seed; None where it has none."""
        if answer is None or answer is ...:
            raise Mistake(f"`{self.name}` is missing or still `...`: nothing is written yet.")
        value = guarded(self.name, answer) if self.kind == "function" else plain(answer)
        if self.choices:
            value = str(answer).strip(" ().").lower()
            if value not in tuple("abcd"):
                raise Mistake(f"`{self.name}` is one of the letters 'a' to 'd'; got {answer!r}.")
        return self.call(value, seed)

    def call(self, answer: Any, seed: int) -> Any:
        """Return the outcome for a seed. Random numbers begin with it; the notebook's go on."""
        usual = torch.get_default_dtype()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(seed)
            torch.set_default_dtype(torch.float32)  # in double the same seed draws other inputs
            try:
                inputs = self.inputs(seed)
            finally:
                torch.set_default_dtype(usual)
            value = None if inputs is None else plain(self.outcome(answer, *inputs))
        return value.detach().cpu() if isinstance(value, Tensor) else value

    def judge(self, value: Any, seed: int, student: str = "") -> None:
        """Return if the value is right, or if nothing is expected; else raise ``Mistake``."""
        if self.verdict:
            *drawn, one, other = plain(value)
            self.verdict(drawn, *(self.inputs(seed) or ())[:-1])
            if not torch.equal(one, other):
                raise Mistake("Take random numbers from `generator`, and from nothing else.")
            return
        own = self.kind != "function"
        right = expected(self, min(seed, 1) if own else seed, number(student) if own else 0)
        if right is not None:
            truth, mistakes = plain(right[0]), right[1]
            value = self.order(student)["abcd".index(value)] if self.choices else plain(value)
            compare(self.look(value, truth), truth, mistakes, self.tolerance)


@functools.cache
def expected(part: Part, seed: int, student: int = 0) -> Expected | None:
    """Return what is right for a seed, or of a value for a student's number, and what the mistakes
    give. Whether a value is right only the hidden checks tell, so the public seed has nothing."""
    truth, mistakes, wrong = part.truth, part.mistakes or {}, dict[str, Any]()
    if truth is None or part.verdict:
        return part.public
    if part.kind != "function":
        right = truth(student) if callable(truth) else truth
        wrong = {m: each(right) if callable(each) else each for m, each in mistakes.items()}
        return (right, wrong) if seed else None
    right = part.call(truth, seed)
    for text, each in mistakes.items():
        with suppress(Exception):  # it cannot be made on these inputs
            wrong[text] = part.look(part.call(mistaken(truth, each), seed), right)
    return None if right is None else (right, wrong)


def mistaken(truth: Callable[..., Any], mistake: Any) -> Any:
    """Return a wrong function: the mistake, or the solution with ``"old -> new"`` in its text."""
    if not isinstance(mistake, str):
        return mistake
    names, (old, new) = dict(truth.__globals__), mistake.split(" -> ")
    exec(inspect.getsource(truth).replace(old, new), names)
    return names[truth.__name__]


def generator(seed: int) -> Generator:
    """Return the source of a question's random inputs."""
    return Generator().manual_seed(1000 + seed)


def normal(draw: Generator, *shape: int) -> Tensor:
    """Return normal numbers, in double precision."""
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def shaped(value: Any, *shape: int) -> Tensor:
    """Return a tensor of a shape, whatever axes of one it has; else raise ``Mistake``."""
    if not isinstance(value, Tensor):
        raise Mistake(f"Expected a tensor of the shape {shape}; got a {type(value).__name__}.")
    if value.squeeze().shape != torch.Size(n for n in shape if n > 1):
        raise Mistake(f"Expected the shape {shape}; got {tuple(value.shape)}.")
    return value.reshape(shape)


def random_control(name: str, inputs: Any, draws: int, verdict: Callable[..., None]) -> Part:
    """Return the part for a control that students design, whose last input is a generator. It draws
    so many times, and twice from one seed; where it runs, a verdict could be forged."""

    def drawn(answer: Callable[..., Any], *given: Any) -> list[Any]:
        again = [(*given[:-1], generator(7)) for _ in range(2)]
        return [plain(answer(*each)) for each in [given] * draws + again]

    return Part(name, inputs=inputs, outcome=drawn, verdict=verdict)


def guarded(name: str, answer: Any) -> Callable[..., Any]:
    """Return a student's function with copies of its inputs; what it raises is a ``Mistake``."""
    if not callable(answer):
        raise Mistake(f"`{name}` should be a function; it is a {type(answer).__name__}.")
    refuse_measures(name, answer)

    def call(*args: Any) -> Any:
        copies = [a.clone() if isinstance(a, Tensor) else a for a in args]
        try:
            value = answer(*[list(a) if isinstance(a, list) else a for a in copies])
        except Exception as error:
            raise Mistake(f"`{name}` raised {type(error).__name__}: {error}") from error
        if value is None or value is ...:
            raise Mistake(f"`{name}` returned None: nothing is written yet, or no `return`.")
        return plain(value)

    return call


def refuse_measures(name: str, answer: Callable[..., Any]) -> None:
    """Raise ``Mistake`` if a function, or one of its own file that it calls, refers to a measure of
    this package."""
    codes, known = [getattr(answer, "__code__", None)], getattr(answer, "__globals__", {})
    for code in filter(None, codes):  # which grows
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        for word in code.co_names:  # also of an import inside the function
            value = known.get(word)
            for module in (getattr(value, "__module__", getattr(value, "__name__", "")), word):
                if f"{module}.".startswith(MEASURES) and not f"{module}.".startswith(TOOLS):
                    raise Mistake(f"`{name}` uses {module}. Write it yourself, on tensors.")
            helper = getattr(value, "__code__", None)
            if getattr(value, "__globals__", None) is known and helper not in codes:
                codes.append(helper)


def plain(value: Any) -> Any:
    """Return whatever holds numbers as one tensor, whichever library made it; all else as it is."""
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        return torch.from_numpy(np.array(value, dtype=float if value.dtype.kind == "f" else int))
    if not isinstance(value, list | tuple):
        return value
    parts = [plain(each) for each in value]
    try:
        parts = [x if isinstance(x, Tensor) else torch.from_numpy(np.array(x)) for x in parts]
        kind = functools.reduce(torch.promote_types, (each.dtype for each in parts))
        return torch.stack([each.to(kind) for each in parts])
    except (TypeError, ValueError, RuntimeError):  # no numbers, or tensors of several shapes
        return parts


def compare(got: Any, truth: Any, mistakes: Mapping[str, Any], tolerance: float = SINGLE) -> None:
    """Return if ``got`` is the truth; otherwise raise the mistake that gives the same."""
    if fault := _fault(got, truth, tolerance):
        wrong = {m: x for m, x in mistakes.items() if _fault(x, truth, tolerance)}
        same = (message for message, x in wrong.items() if not _fault(got, x, tolerance))
        raise Mistake(next(same, fault))


def _fault(got: Any, truth: Any, tolerance: float) -> str:
    """Return what is wrong, or nothing. Numbers may be off by ``tolerance``, relative to the
    largest of the truth and to 1."""
    if isinstance(truth, str):
        return "" if got == truth else f"{got!r} is not the right answer."
    got, truth = plain(got), torch.as_tensor(plain(truth), dtype=torch.float64)
    kind = "complex tensor" if isinstance(got, Tensor) and got.is_complex() else type(got).__name__
    if kind not in ("bool", "int", "float", "Tensor"):
        return f"Expected a number or a tensor; got a {kind}."
    got = torch.as_tensor(got, dtype=torch.float64)
    if [n for n in got.shape if n != 1] != [n for n in truth.shape if n != 1]:
        return f"Expected the shape {tuple(truth.shape)}; got {tuple(got.shape)}."
    if got.isnan().any():
        return "The result has NaN in it: is there a division by zero, or a log of zero?"
    off, most = (max([0.0, *x.abs().flatten().tolist()])
                 for x in (got.reshape(truth.shape) - truth, truth))  # fmt: skip
    if off <= max(tolerance, SINGLE) * max(1.0, most):
        return ""
    return f"The values are off by up to {off:.3g}. Check them by hand on a small case."


# A homework

Question = tuple[Part, ...]
carried: dict[str, dict[str, Question]] = {}  # by a student's notebook
signed = [""]  # the student's name


def folder() -> Path:
    """Return the folder of the masters: ``$ICLUTILS_HOMEWORK``, or the one around this file's."""
    here = Path(globals().get("__file__", "answers/checks.py")).resolve()
    return Path(os.environ.get("ICLUTILS_HOMEWORK") or here.parents[1]).resolve()


def table(homework: str) -> Path:
    """Return the table of a homework: beside the masters, or where otter runs."""
    for path in (folder() / "answers" / f"{homework}.py", Path.cwd() / f"{homework}.py"):
        if path.is_file():
            return path.resolve()
    raise IclError(f"The checks of {homework} are not here: run the first cells of the homework.")


@functools.cache
def contents(path: Path) -> dict[str, Any]:
    """Return what a table defines; its parts know what is right."""
    names: dict[str, Any] = {"__name__": path.stem}
    exec(compile(path.read_text(encoding="utf-8"), path, "exec"), names)
    for name in filter(re.compile(r"q\d+").fullmatch, names):
        names[name] = tuple(
            replace(each, truth=names[each.name], mistakes=names.get(each.name.upper()))
            for each in names[name]
        )
    return names


def questions(homework: str) -> dict[str, Question]:
    """Return the questions of one homework by name; each has one part for each answer."""
    names = contents(table(homework))
    return {name: names[name] for name in names if re.fullmatch(r"q\d+", name)}


def public(homework: str, half: str, right: dict[str, list[Any]]) -> None:
    """Take the public checks that a student's notebook carries."""
    names: dict[str, Any] = {"__name__": f"the public checks of {homework}"}
    exec(half, names)
    carried[homework] = {
        name: tuple(
            replace(part, public=each) for part, each in zip(names[name], those, strict=True)
        )
        for name, those in right.items()
    }


def clean(student: Any) -> str:
    """Return a name however it is spaced, capitalised or accented."""
    words = unicodedata.normalize("NFC", str(student)).casefold().split()
    return " ".join(words).encode("utf-8", "replace").decode()[:200]


def number(student: str) -> int:
    """Return the number that a name has."""
    return zlib.crc32(clean(student).encode())


def sign(student: Any) -> int:
    """Take the name under which this notebook is checked; return its number."""
    signed[0] = clean(student)
    if not signed[0]:
        print("Write your name, or your number, into the first cell: it makes the homework yours.")
    return number(signed[0])


def choose(question: str) -> None:
    """Print the choices of a question in this student's order."""
    for part in asked(question):
        if part.choices:
            print(f"{part.name} = ...")
            for letter, place in zip("abcd", part.order(signed[0]), strict=True):
                text = f"{letter}  {part.choices['abcd'.index(place)]}"
                print(textwrap.fill(text, 79, subsequent_indent="   "))


def check(question: str, *answers: Any) -> None:
    """Print whether the public checks of one question (``"hw01.q1"``) pass, or the mistake."""
    try:
        grade(question, *answers)
        print(f"{question}: the public checks pass.")
    except Mistake as mistake:
        print(f"{question}: not yet. {mistake}")


def grade(question: str, *answers: Any, hidden: bool = False) -> None:
    """Return if the answers to one question are right, for the public or the hidden inputs."""
    for seed in HIDDEN if hidden else PUBLIC:
        for part, answer in zip(asked(question, hidden), answers, strict=True):
            part.judge(part.ask(answer, seed), seed, signed[0])


def asked(question: str, hidden: bool = False) -> Question:
    """Return the parts of a question as the notebook carries them, or as the table has them, which
    alone has what is hidden."""
    homework, _, name = question.partition(".")
    use_table = hidden or homework not in carried
    return (questions(homework) if use_table else carried[homework])[name]

"""Judge answers to homework: is it written, is it the student's own, is it right, and why not?

In a table ``answers/hw01.py`` each question is a tuple of ``Part``: how an answer is called and
compared. Below the ``MARK`` what is right has the name of the answer, as in the master, which says
what it is; the same name in capitals has typical mistakes, by the message that each deserves (of a
control: by words of it). A student's notebook carries this file and what stands above the mark.

``sign`` makes a number of the student's name. The order of choices, and whatever a homework draws
from that number, belong to this student alone.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import random
import re
import textwrap
import types
import unicodedata
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

MEASURES = re.compile(  # what an answer may not use
    r"(checks|iclutils\.interp(?!\.hooks|\.clean_corrupt)|iclutils\.chapters(?!\.\w+\.question))\b"
)
SINGLE = 1e-5  # relative; what an answer in single precision may be off by, at least
PUBLIC, HIDDEN = (0,), (1, 2, 3, 4, 5)  # seeds of the random inputs
MARK = "# Students get what stands above this line, and nothing below it."
Expected = tuple[Any, Mapping[str, Any]]  # the truth, and what each mistake gives, by its message


class Mistake(Exception):
    """A wrong answer; the message names the likely mistake."""


@dataclass(eq=False)
class Part:
    """How one answer is called and compared.

    A function has ``inputs`` and is called as ``outcome(function, *inputs(seed))`` (where
    ``inputs`` gives None, that seed is left out). Any other answer is a value; one with four
    ``choices`` is a letter, and what is right is said of the order here. An answer is compared with
    the truth, up to a ``tolerance`` relative to the largest of it and to 1. Of a control, which
    ``draws`` many times, no draw is right alone: its last input is the generator, and
    ``verdict(draws, *inputs)`` raises ``Mistake``. What is below the ``MARK`` is put in last.
    """

    name: str
    inputs: Any = None
    outcome: Callable[..., Any] = lambda answer, *inputs: answer(*inputs)
    tolerance: float = SINGLE
    choices: tuple[str, ...] = ()
    draws: int = 0
    verdict: Callable[..., None] | None = None
    truth: Any = None
    mistakes: Mapping[str, Any] = field(default_factory=dict)

    def order(self, student: str) -> list[str]:
        """Return the letters of the choices in the order in which this student sees them."""
        return random.Random(f"{clean(student)} {self.choices}").sample("abcd", 4)

    def ask(self, answer: Any, seed: int) -> Any:
        """Return what a student's answer gives for the inputs of a seed; None where it has none."""
        if answer is None or answer is ...:
            raise Mistake(f"`{self.name}` is missing or still `...`: nothing is written yet.")
        if self.inputs:
            return self.call(guarded(self.name, answer), seed)
        if not self.choices:
            return plain(answer)
        if (letter := str(answer).strip(" ().").lower()) not in tuple("abcd"):
            raise Mistake(f"`{self.name}` is one of the letters 'a' to 'd'; got {answer!r}.")
        return letter

    def call(self, answer: Callable[..., Any], seed: int) -> Any:
        """Return the outcome for a seed. Random numbers begin with it; the notebook's go on. A
        control draws twice more from one seed: where it runs, a verdict could be forged."""
        usual = torch.get_default_dtype()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(seed)
            torch.set_default_dtype(torch.float32)  # in double the same seed draws other inputs
            try:
                given = self.inputs(seed)
            finally:
                torch.set_default_dtype(usual)
            if self.draws:
                again = [(*given[:-1], generator(7)) for _ in range(2)]
                return plain([answer(*each) for each in [given] * self.draws + again])
            return None if given is None else plain(self.outcome(answer, *given))

    def judge(self, value: Any, seed: int, student: str = "") -> None:
        """Return if the value is right, or if nothing is expected; else raise ``Mistake``."""
        value = plain(value)
        if self.verdict:
            *drawn, one, other = value
            self.verdict(drawn, *self.inputs(seed)[:-1])
            if not torch.equal(one, other):
                raise Mistake("Take random numbers from `generator`, and from nothing else.")
        elif right := expected(self, seed, "" if self.inputs else student):
            if self.choices:
                value = self.order(student)["abcd".index(value)]
            compare(value, *right, self.tolerance)


@functools.cache
def expected(part: Part, seed: int, student: str = "") -> Expected | None:
    """Return what is right for a seed, or of a value for a student, and what the mistakes give.
    Values are compared once, for the first hidden seed."""
    truth, wrong = part.truth, dict[str, Any]()
    if truth is None:
        return public.get(part.name)
    if part.verdict or (not part.inputs and seed != HIDDEN[0]):
        return None
    if part.inputs:
        right = part.call(truth, seed)
    else:
        right = truth(number(student)) if callable(truth) else truth
    for text, each in part.mistakes.items():
        with suppress(Exception):  # it cannot be made on these inputs
            if part.inputs:
                wrong[text] = part.call(mistaken(truth, each), seed)
            else:
                wrong[text] = each(right) if callable(each) else each
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
    if not isinstance(value, Tensor) or value.squeeze().shape != torch.zeros(shape).squeeze().shape:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise Mistake(f"Expected a tensor of the shape {shape}; got {got}.")
    return value.reshape(shape)


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
    """Raise ``Mistake`` if a function, or one inside it, refers to a measure of this package."""
    codes = [getattr(answer, "__code__", None)]
    for code in filter(None, codes):  # which grows
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        for word in code.co_names:  # also of an import inside the function
            value = answer.__globals__.get(word)
            module = getattr(value, "__module__", None) or getattr(value, "__name__", word)
            if MEASURES.match(module):
                raise Mistake(f"`{name}` uses {module}. Write it yourself, on tensors.")


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
    got, truth = plain(got), torch.as_tensor(plain(truth), dtype=torch.float64).cpu()
    kind = "complex tensor" if isinstance(got, Tensor) and got.is_complex() else type(got).__name__
    if kind not in ("bool", "int", "float", "Tensor"):
        return f"Expected a number or a tensor; got a {kind}."
    got = torch.as_tensor(got, dtype=torch.float64).cpu()
    if got.squeeze().shape != truth.squeeze().shape:
        return f"Expected the shape {tuple(truth.shape)}; got {tuple(got.shape)}."
    if got.isnan().any():
        return "The result has NaN in it: is there a division by zero, or a log of zero?"
    off = (got.reshape(truth.shape) - truth).abs().max().item()
    if off <= max(tolerance, SINGLE) * max(1.0, truth.abs().max().item()):
        return ""
    return f"The values are off by up to {off:.3g}. Check them by hand on a small case."


# A homework

Questions = dict[str, tuple[Part, ...]]
carried: Questions = {}  # by a student's notebook
public: dict[str, Expected | None] = {}  # what is right of its answers for the public input
signed = [""]  # the student's name


def questions(homework: str) -> Questions:
    """Return the questions of one homework by name, each with one part for each answer, from the
    module ``hw01``, which stands beside the masters, or where otter runs."""
    names = vars(importlib.import_module(homework))
    found = {name: names[name] for name in names if re.fullmatch(r"q\d+", name)}
    for part in (each for parts in found.values() for each in parts):
        part.truth, part.mistakes = names[part.name], names.get(part.name.upper(), {})
    return found


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


def asked(question: str, hidden: bool = False) -> tuple[Part, ...]:
    """Return the parts of a question as the notebook carries them, or as the module has them, which
    alone has what is hidden."""
    homework, _, name = question.partition(".")
    return (carried if carried and not hidden else questions(homework))[name]

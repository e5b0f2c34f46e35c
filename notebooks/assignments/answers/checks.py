"""Judge answers to homework: is it written, is it the student's own, is it right, and why not?

In a table ``answers/hw01.py`` each question is a tuple of ``Part``: how an answer is called and
compared. Below the ``MARK`` what is right has the name of the answer, and the same name in
capitals has typical mistakes, by the message that each deserves. One comparison serves the student
(``check``), otter's tests (``grade``) and the grader. A student's notebook carries this file and
what stands above the mark.

The first cell of a homework names the student, and ``sign`` makes a number of the name. The order
of choices, and whatever a homework draws from that number, belong to this student alone.
"""

from __future__ import annotations

import functools
import inspect
import json
import numbers
import os
import random
import re
import textwrap
import types
import unicodedata
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from iclutils.errors import IclError, unknown
from torch import Generator, Tensor

# What an answer may not call, and what of it it may.
MEASURES = ("iclutils.interp", "iclutils.chapters", "checks")
TOOLS = (
    "iclutils.interp.hooks",
    "iclutils.interp.clean_corrupt",
    "iclutils.chapters.every_lens.question",
)
SINGLE = 1e-5  # relative; what an answer in single precision may be off by, at least
PUBLIC, HIDDEN = (0,), (1, 2, 3, 4, 5)  # seeds of the random inputs
MARK = "# Students get what stands above this line, and nothing below it."
Expected = tuple[Any, Mapping[str, Any]]  # the truth, and what each mistake gives, by its message


class Mistake(Exception):
    """A wrong answer; the message names the likely mistake."""


@dataclass(frozen=True)
class Part:
    """How one answer is called and compared, without what is right.

    The ``kind`` is ``function``, ``number``, ``tensor`` or ``letter``. A function is called as
    ``outcome(function, *inputs(seed))`` (``inputs(seed)`` may be None: that seed is left out), a
    value is read by ``outcome(value)``. ``look(value, truth)`` is what is compared with the truth,
    up to a ``tolerance`` relative to the largest of it and to 1. A letter names one of four
    ``choices``; each student sees them in another order, and what is right is said of the order
    here.
    """

    name: str
    kind: str = "function"
    inputs: Callable[[int], tuple[Any, ...] | None] = lambda seed: ()
    outcome: Callable[..., Any] = lambda answer, *inputs: answer(*inputs) if inputs else answer
    look: Callable[[Any, Any], Any] = lambda value, truth: value
    tolerance: float = SINGLE
    choices: tuple[str, ...] = ()

    def order(self, student: str) -> list[str]:
        """Return the letters of the choices in the order in which this student sees them."""
        return random.Random(f"{clean(student)} {self.choices}").sample("abcd", 4)

    def ask(self, answer: Any, seed: int) -> Any:
        """Return what the answer gives for the random inputs of a seed; None where it has none."""
        return self._ask(prepared(self.name, answer, self.kind), seed)

    def _ask(self, answer: Any, seed: int) -> Any:
        """Random numbers of its own begin with the seed, and leave the notebook's alone."""
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(seed)
            inputs = self.inputs(seed)
            return None if inputs is None else detached(self.outcome(answer, *inputs))

    def expected(
        self, truth: Any, mistakes: Mapping[str, Any], seed: int, student: str = ""
    ) -> Expected | None:
        """Return what is right for a seed, and what the mistakes give there.

        The mistake in a function is a function, or another piece in the solution (``mistaken``). A
        value that changes with the student is a function of the student's number, and its mistakes
        are functions of what is right. Whether a value is right only the hidden checks tell, so the
        public seed has nothing.
        """
        if self.kind != "function":
            if not seed:
                return None
            right = truth(number(student)) if callable(truth) else truth
            return right, {m: x(right) if callable(x) else x for m, x in mistakes.items()}
        right = self._ask(truth, seed)
        if right is None:
            return None
        wrong = {}
        for text, each in mistakes.items():
            with suppress(Exception):  # it cannot be made on these inputs
                wrong[text] = self.look(self._ask(mistaken(truth, each), seed), right)
        return right, wrong

    def judge(self, value: Any, expected: Expected | None, student: str = "") -> None:
        """Return if the value is right, or if nothing is expected; else raise ``Mistake``."""
        if expected is not None:
            truth, wrong = expected
            value = self.order(student)["abcd".index(value)] if self.choices else value
            compare(self.look(value, truth), truth, wrong, self.tolerance)


def mistaken(truth: Callable[..., Any], mistake: Any) -> Any:
    """Return the wrong function that a mistake is: itself, or the solution with one piece of its
    text replaced, ``"old -> new"``."""
    if not isinstance(mistake, str):
        return mistake
    text, (old, new) = inspect.getsource(truth), mistake.split(" -> ")
    if text.count(old) != 1:
        raise IclError(f"{truth.__name__} has {old!r} {text.count(old)} times, not once.")
    names = dict(truth.__globals__)
    exec(text.replace(old, new), names)
    return names[truth.__name__]


def generator(seed: int) -> Generator:
    """The source of a question's random inputs."""
    return Generator().manual_seed(1000 + seed)


def normal(draw: Generator, *shape: int) -> Tensor:
    """Normal numbers, in double precision."""
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def shaped(value: Any, *shape: int) -> Tensor:
    """Return a tensor of a shape, whatever axes of one it has; else raise ``Mistake``."""
    if not isinstance(value, Tensor):
        raise Mistake(f"Expected a tensor of the shape {shape}; got a {type(value).__name__}.")
    if value.squeeze().shape != torch.Size(n for n in shape if n > 1):
        raise Mistake(f"Expected the shape {shape}; got {tuple(value.shape)}.")
    return value.reshape(shape)


def refuse_other_draws(answer: Callable[..., Any], *inputs: Any) -> None:
    """Raise unless the generator, the last input, alone decides what an answer draws."""
    again = [detached(answer(*inputs[:-1], generator(7))) for _ in range(2)]
    if not torch.equal(*again):
        raise Mistake("Take random numbers from `generator`, and from nothing else.")


def prepared(name: str, answer: Any, kind: str = "function") -> Any:
    """The answer, ready to be judged: what a function raises becomes a ``Mistake``."""
    if answer is None or answer is ...:
        raise Mistake(f"`{name}` is missing or still `...`: nothing is written yet.")
    if kind == "letter":
        letter = str(answer).strip(" ().").lower()
        if letter not in tuple("abcd"):
            raise Mistake(f"`{name}` is one of the letters 'a' to 'd'; got {answer!r}.")
        return letter
    if kind != "function":
        value = plain(answer)
        if kind == "number":
            value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            if not isinstance(value, int | float):
                raise Mistake(f"`{name}` is a number; got {answer!r}.")
        return value
    if not callable(answer):
        raise Mistake(f"`{name}` should be a function; it is a {type(answer).__name__}.")
    for each in _mentioned(answer):
        if _within(each, MEASURES) and not _within(each, TOOLS):
            raise Mistake(f"`{name}` uses {each}. Write it yourself, on tensors.")

    @functools.wraps(answer)
    def guarded(*args: Any) -> Any:
        copies = [a.clone() if isinstance(a, Tensor) else a for a in args]
        try:
            value = answer(*[list(a) if isinstance(a, list) else a for a in copies])
        except Exception as error:
            raise Mistake(f"`{name}` raised {type(error).__name__}: {error}") from error
        if value is None or value is ...:
            raise Mistake(f"`{name}` returned None: nothing is written yet, or no `return`.")
        return plain(value)

    return guarded


def plain(value: Any) -> Any:
    """A number as a number and whatever holds numbers as a tensor, whichever library made it."""
    if isinstance(value, list | tuple):
        entries = [plain(each) for each in value]
        several = any(isinstance(each, Tensor) and each.ndim for each in value)
        return entries if several else _stacked(entries)  # several tensors may be several answers
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        kind = np.float64 if value.dtype.kind == "f" else np.int64
        return torch.from_numpy(np.array(value, dtype=kind))
    real = isinstance(value, numbers.Real) and not isinstance(value, int | float)
    return float(value) if real else value


def _stacked(entries: list[Any]) -> Any:
    """Tensors of one shape as one tensor; any other list as it is."""
    tensors = [torch.from_numpy(np.array(x)) if isinstance(x, int | float) else x for x in entries]
    shapes = {each.shape if isinstance(each, Tensor) else None for each in tensors}
    if len(shapes) != 1 or None in shapes:
        return tensors
    kind = functools.reduce(torch.promote_types, (each.dtype for each in tensors))
    return torch.stack([each.to(kind) for each in tensors])


def detached(value: Any) -> Any:
    """A number, or one tensor of all that lists hold, without a graph."""
    value = plain(value)
    if isinstance(value, list):
        value = _stacked([detached(each) for each in value])
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _within(name: str, modules: tuple[str, ...]) -> bool:
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def _mentioned(answer: Callable[..., Any]) -> Iterator[str]:
    """Modules that a function's code refers to, and that of those it calls of its own file."""
    waiting, seen = [getattr(answer, "__code__", None)], set[types.CodeType]()
    known = getattr(answer, "__globals__", {})
    while waiting:
        code = waiting.pop()
        if code is None or code in seen:
            continue
        seen.add(code)
        waiting += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        for name in code.co_names:
            value = known.get(name)
            if getattr(value, "__globals__", None) is known:
                waiting.append(getattr(value, "__code__", None))
            module = value if isinstance(value, types.ModuleType) else None
            yield module.__name__ if module else str(getattr(value, "__module__", ""))
            yield name  # an import inside the function


def compare(
    got: Any, truth: Any, mistakes: Mapping[str, Any] | None = None, tolerance: float = SINGLE
) -> None:
    """Return if ``got`` is the truth; otherwise name the mistake that gives the same.

    Numbers may be off by ``tolerance``, relative to the largest of the truth and to 1.
    """
    got, tolerance = detached(got), max(tolerance, SINGLE)
    fault = _fault(got, truth, tolerance)
    if not fault:
        return
    for message, value in (mistakes or {}).items():
        if _fault(value, truth, tolerance) and not _fault(got, value, tolerance):
            raise Mistake(message)
    raise Mistake(fault)


def _fault(got: Any, truth: Any, tolerance: float) -> str:
    """What is wrong, or nothing."""
    if isinstance(got, Tensor) and got.numel() == 1 and not isinstance(truth, Tensor):
        got = got.item()
    kind = "complex tensor" if isinstance(got, Tensor) and got.is_complex() else type(got).__name__
    kind = f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
    if isinstance(truth, str):
        return "" if got == truth else f"{got!r} is not the right answer."
    if not isinstance(truth, Tensor):
        if not isinstance(got, int | float):
            return f"Expected a number; got {kind}."
        close = abs(got - truth) <= tolerance * max(1.0, abs(truth))
        return "" if close else f"The value {got:.6g} is off. Check it by hand on a small case."
    if isinstance(got, int | float) and truth.numel() == 1:
        got = torch.full_like(truth, got, dtype=torch.float64)
    if not isinstance(got, Tensor) or got.is_complex():
        return f"Expected a tensor; got {kind}."
    if got.squeeze().shape == truth.squeeze().shape:
        got = got.reshape(truth.shape)
    if got.shape != truth.shape:
        return f"Expected the shape {tuple(truth.shape)}; got {tuple(got.shape)}."
    if got.isnan().any():
        return "The result has NaN in it: is there a division by zero, or a log of zero?"
    largest, off = (x.abs().max().item() if truth.numel() else 0.0
                    for x in (truth.double(), got.double() - truth.double()))  # fmt: skip
    if off <= tolerance * max(1.0, largest):
        return ""
    if got.is_floating_point() != truth.is_floating_point():
        wanted = "real numbers" if truth.is_floating_point() else "whole numbers"
        return f"Expected a tensor of {wanted}; its dtype is {got.dtype}."
    return f"The shape is right, the values are not: they are off by up to {off:.3g}."


# A homework

Question = tuple[Part, ...]
Expectations = dict[str, list[Expected | None]]  # by question
carried: dict[str, tuple[dict[str, Question], Expectations]] = {}  # by a student's notebook
signed = [""]  # the student's name


def folder() -> Path:
    """Return the folder of the masters: ``$ICLUTILS_HOMEWORK``, or the one around this file's."""
    here = Path(globals().get("__file__", "answers/checks.py")).resolve()
    return Path(os.environ.get("ICLUTILS_HOMEWORK") or here.parents[1])


def homeworks() -> list[str]:
    """``hw01``, ``hw02``, ..."""
    return sorted(path.stem for path in (folder() / "answers").glob("hw[0-9][0-9].py"))


def table(homework: str) -> Path:
    """Return the table of a homework: beside the masters, or where otter runs."""
    for path in (folder() / "answers" / f"{homework}.py", Path.cwd() / f"{homework}.py"):
        if path.is_file():
            return path.resolve()
    if homeworks():
        raise unknown("homework", homework, homeworks())
    raise IclError(f"The checks of {homework} are not here: run the first cells of the homework.")


@functools.cache
def contents(path: Path) -> dict[str, Any]:
    """What a table defines."""
    names = {"__name__": path.stem}
    exec(compile(path.read_text(encoding="utf-8"), path, "exec"), names)
    return names


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
    for part in _asked(question)[0]:
        if part.choices:
            print(f"{part.name} = ...")
            for letter, place in zip("abcd", part.order(signed[0]), strict=True):
                text = textwrap.fill(part.choices["abcd".index(place)], 76)
                print(textwrap.indent(text, "   ").replace("  ", f"{letter} ", 1))


def questions(homework: str) -> dict[str, Question]:
    """The questions of one homework by name, ``q1`` first; each has one part for each answer."""
    return _questions(contents(table(homework)))


def _questions(names: dict[str, Any]) -> dict[str, Question]:
    return {name: names[name] for name in sorted(names) if re.fullmatch(r"q\d+", name)}


def expected(homework: str, question: str, seed: int, student: str = "") -> list[Expected | None]:
    """What is expected of each part of a question for a seed, and of a value for a student."""
    asked = contents(table(homework))[question]
    return [
        _expected(table(homework), question, i, seed if part.kind == "function" else min(seed, 1),
                  "" if part.kind == "function" else student)
        for i, part in enumerate(asked)
    ]  # fmt: skip


@functools.cache
def _expected(path: Path, question: str, place: int, seed: int, student: str) -> Expected | None:
    part: Part = contents(path)[question][place]
    return part.expected(*truth(path, part.name), seed, student)


def truth(path: Path, name: str) -> tuple[Any, Mapping[str, Any]]:
    """What is right for an answer, and typical mistakes by the message that each deserves."""
    names = contents(path)
    return names[name], names.get(name.upper(), {})


def public(name: str, half: str, expected: str) -> None:
    """Take the public checks that a student's notebook carries."""
    names: dict[str, Any] = {"__name__": f"the public checks of {name}"}
    exec(half, names)
    carried[name] = _questions(names), thawed(expected)


def grade(question: str, *answers: Any, hidden: bool = False) -> None:
    """Judge the answers to one question (``"hw01.q1"``); return only if they are right.

    ``hidden`` takes the inputs of the hidden checks instead of the public ones.
    """
    homework, _, name = question.partition(".")
    parts = _parts(question, questions(homework), answers)
    for seed in HIDDEN if hidden else PUBLIC:
        _judge(parts, expected(homework, name, seed, signed[0]), answers, seed)


def check(question: str, *answers: Any) -> None:
    """Print whether the public checks of one question pass, or the likely mistake."""
    parts, right = _asked(question, answers)
    try:
        _judge(parts, right, answers, 0)
    except Mistake as mistake:
        print(f"{question}: not yet. {mistake}")
    else:
        print(f"{question}: the public checks pass.")


def _asked(question: str, answers: tuple[Any, ...] | None = None) -> tuple[Question, Any]:
    """The parts of a question and what the public checks expect, as the notebook carries them."""
    homework, _, name = question.partition(".")
    if homework in carried:
        asked, right = carried[homework]
        return _parts(question, asked, answers), right[name]
    return _parts(question, questions(homework), answers), expected(homework, name, 0)


def _parts(question: str, asked: dict[str, Question], answers: Any = None) -> Question:
    if (name := question.partition(".")[2]) not in asked:
        raise unknown("question", name, asked)
    if answers is not None and len(asked[name]) != len(answers):
        names = ", ".join(part.name for part in asked[name])
        raise IclError(f"{question} asks for {names}; got {len(answers)} answers.")
    return asked[name]


def _judge(parts: Question, right: Any, answers: tuple[Any, ...], seed: int) -> None:
    for part, each, answer in zip(parts, right, answers, strict=True):
        part.judge(part.ask(answer, seed), each, signed[0])


def frozen(value: Any) -> str:
    """Write dicts and lists of texts, numbers and tensors as JSON, which holds no code."""

    def plain_tensor(x: Tensor) -> dict[str, Any]:
        flat = x.detach().flatten()
        return {"dtype": str(x.dtype)[6:], "shape": list(x.shape), "values": flat.tolist()}

    return json.dumps(value, default=plain_tensor)


def thawed(text: str | bytes) -> Any:
    """Read what was ``frozen``; tuples have become lists, keys texts."""

    def tensor(each: dict[str, Any]) -> Any:
        if each.keys() != {"dtype", "shape", "values"}:
            return each
        flat = torch.tensor(each["values"], dtype=getattr(torch, each["dtype"]))
        return flat.reshape(each["shape"])

    return json.loads(text, object_hook=tensor)

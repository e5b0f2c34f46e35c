"""Checks of homework: is an answer there, is it the student's own, is it right, what went wrong?

A table ``answers/hw01.py`` holds, for each answer, the solution, random inputs and typical mistakes
(``Function``, ``Value``). A ``Part`` is what students may have of it: how an answer is asked, and
how it is compared. One comparison serves the student (``check``), the tests that otter runs
(``grade``) and the grader. A student's notebook carries its ``public`` checks.
"""

from __future__ import annotations

import base64
import functools
import importlib.util
import json
import math
import numbers
import os
import re
import sys
import types
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Generator, Tensor
from torch.overrides import TorchFunctionMode

from .errors import IclError, unknown
from .files import CHECKOUT

# What an answer may not be made of.
MEASURES = (
    *(f"iclutils.interp.{name}" for name in ("head_scores", "readout", "statistics", "weights")),
    *("iclutils.chapters", "iclutils.checks"),
)
SINGLE = 1e-5  # relative; what an answer in single precision may be off by, at least
PUBLIC, HIDDEN = (0,), (1, 2, 3, 4, 5)  # seeds of the random inputs
TABLES = "answers"  # the folder of tables, beside the masters
Expected = tuple[Any, Mapping[str, Any]]  # the truth, and what each mistake gives, by its message


class Mistake(Exception):
    """A wrong answer; the message names the likely mistake."""


@dataclass(frozen=True)
class Part:
    """How one answer is asked and compared, without what is right.

    The ``kind`` is ``function``, ``number``, ``tensor`` or ``letter``. A function is asked for
    ``outcome(function, *inputs(seed))``, of a value ``outcome(value)`` is read. ``look(given,
    truth)`` is what is compared with the truth.
    """

    name: str
    kind: str = "function"
    inputs: Callable[[int], tuple[Any, ...] | None] = lambda seed: ()
    outcome: Callable[..., Any] = lambda answer, *inputs: answer(*inputs) if inputs else answer
    look: Callable[[Any, Any], Any] = lambda given, truth: given
    tolerance: float = SINGLE

    def given(self, answer: Any, seed: int) -> Any:
        """What the answer gives for the random inputs of a seed; None where it has none."""
        ready = prepared(self.name, answer, self.kind)
        with _draws(seed):
            inputs = self.inputs(seed)
            return None if inputs is None else _detached(self.outcome(ready, *inputs))

    def judge(self, given: Any, expected: Expected | None) -> None:
        """Return if what was given is right, or if nothing is expected."""
        if expected is not None:
            truth, wrong = expected
            compare(self.look(given, truth), truth, wrong, self.tolerance)


@dataclass(frozen=True)
class Function:
    """A function to be written: on random inputs it must give what the solution gives.

    ``inputs(seed)`` are its arguments, None where a seed has none. ``mistakes`` has, for each
    message, a function that makes the mistake, or options with which the solution does. ``inputs``,
    ``outcome`` and ``look`` go to the students, so they may not use a solution.
    """

    solution: Callable[..., Any]
    inputs: Callable[[int], tuple[Any, ...] | None]
    mistakes: Mapping[str, Any]
    tolerance: float = SINGLE
    outcome: Callable[..., Any] = lambda function, *inputs: function(*inputs)
    look: Callable[[Any, Any], Any] = lambda given, truth: given

    @property
    def name(self) -> str:
        """What the function is called."""
        return self.solution.__name__

    @property
    def part(self) -> Part:
        """What students may have of it."""
        public = self.inputs, self.outcome, self.look
        return Part(self.name, "function", *public, self.tolerance)

    def wrong(self) -> dict[str, Callable[..., Any]]:
        """For each message a function that makes the mistake."""
        return {
            text: functools.partial(self.solution, **each) if isinstance(each, dict) else each
            for text, each in self.mistakes.items()
        }

    def expected(self, seed: int) -> Expected | None:
        """What is right on the inputs of a seed, and what the mistakes give."""
        with _draws(seed):
            inputs, wrong = self.inputs(seed), {}
            if inputs is None:
                return None
            with _Slip() as right:
                truth = _detached(self.outcome(self.solution, *inputs))
            for text, function in self.wrong().items():
                with suppress(Exception):  # it cannot be made on these inputs
                    wrong[text] = self.look(_detached(self.outcome(function, *inputs)), truth)
            for name in filter(right.might_have, SLIPS):
                with suppress(Exception), _Slip(name):
                    given = self.look(_detached(self.outcome(self.solution, *inputs)), truth)
                    if _fault(given, truth, self.tolerance):
                        wrong[SLIPS[name]] = given
            return truth, wrong


@dataclass(frozen=True)
class Value:
    """A number, a tensor or a letter to be found; only the hidden checks tell whether it is right.

    ``mistakes`` has the values that mistakes give, ``reading(value)`` is what is compared; it goes
    to the students.
    """

    name: str
    truth: Any
    mistakes: Mapping[str, Any]
    tolerance: float = SINGLE
    reading: Callable[[Any], Any] = lambda value: value

    @property
    def part(self) -> Part:
        """What students may have of it."""
        kinds = {str: "letter", Tensor: "tensor"}
        kind = kinds.get(type(self.truth), "number")
        return Part(self.name, kind, outcome=self.reading, tolerance=self.tolerance)

    def expected(self, seed: int) -> Expected | None:
        """What is right, and what mistakes give; nothing for the public checks."""
        return (self.truth, self.mistakes) if seed else None


EXPONENTIALS = ("exp", "softmax", "log_softmax", "logsumexp")
REDUCTIONS = ("sum", "mean", "softmax", "log_softmax", "logsumexp", "norm", "cumsum", "argmax")
SLIPS = {
    "exp": "Powers of 2 stand where powers of e belong: exp, softmax.",
    "log": "The logarithm is to base 2: take the natural one.",
    **{f"{name}, axis": f"The {name} runs over the wrong axis." for name in REDUCTIONS},
}


class _Slip(TorchFunctionMode):
    """What is computed inside has one of the ``SLIPS`` that are typical of any homework."""

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self.calls = list[str]()
        self.name, _, self.axis = name.partition(", ")

    def might_have(self, name: str) -> bool:
        """Whether what was computed inside could have had a slip; a whole model is spared."""
        made_in = set(EXPONENTIALS) if name == "exp" else {name.split(",")[0]}
        return len(self.calls) < 300 and not made_in.isdisjoint(self.calls)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, given = getattr(func, "__name__", ""), dict(kwargs or {})
        self.calls.append(name)
        if self.axis and name == self.name and args[0].ndim > 1:
            by_name = "dim" in given or len(args) < 2
            other = {-1: -2, -2: -1, 0: 1, 1: 0}[given["dim"] if by_name else args[1]]
            if by_name:
                given["dim"] = other
            else:
                args = (args[0], other, *args[2:])
        elif not self.axis and self.name == "exp" and name in EXPONENTIALS:
            args = (args[0] * math.log(2), *args[1:])
        found = func(*args, **given)
        return found / math.log(2) if self.name == name == "log" else found


@contextmanager
def _draws(seed: int) -> Iterator[None]:
    """Random numbers of an answer's own begin with the seed, and leave the notebook's alone."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        yield


def generator(seed: int) -> Generator:
    """The source of a question's random inputs."""
    return Generator().manual_seed(1000 + seed)


def normal(draw: Generator, *shape: int) -> Tensor:
    """Normal numbers, in double precision."""
    return torch.randn(shape, generator=draw, dtype=torch.float64)


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
    borrowed = next((each for each in _mentioned(answer) if each.startswith(MEASURES)), "")
    if borrowed:
        raise Mistake(f"`{name}` uses {borrowed}. Write it yourself, on tensors.")

    @functools.wraps(answer)
    def guarded(*args: Any) -> Any:
        copies = [a.clone() if isinstance(a, Tensor) else a for a in args]
        try:
            given = answer(*[list(a) if isinstance(a, list) else a for a in copies])
        except Exception as error:
            raise Mistake(f"`{name}` raised {type(error).__name__}: {error}") from error
        if given is None or given is ...:
            raise Mistake(f"`{name}` returned None: nothing is written yet, or no `return`.")
        return plain(given)

    return guarded


def plain(value: Any) -> Any:
    """A number as a number and whatever holds numbers as a tensor, whichever library made it."""
    if isinstance(value, list | tuple):
        found = [plain(each) for each in value]
        if found and all(isinstance(each, int | float) for each in found):
            return torch.from_numpy(np.array(found))
        several = any(isinstance(each, Tensor) and each.ndim for each in value)
        return found if several else _stacked(found)  # several tensors may be several answers
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        kind = np.float64 if value.dtype.kind == "f" else np.int64
        return torch.from_numpy(np.array(value, dtype=kind))
    real = isinstance(value, numbers.Real) and not isinstance(value, int | float)
    return float(value) if real else value


def _stacked(found: list[Any]) -> Any:
    """Tensors of one shape as one tensor; any other list as it is."""
    found = [torch.from_numpy(np.array(x)) if isinstance(x, int | float) else x for x in found]
    shapes = {each.shape if isinstance(each, Tensor) else None for each in found}
    if len(shapes) != 1 or None in shapes:
        return found
    kind = functools.reduce(torch.promote_types, (each.dtype for each in found))
    return torch.stack([each.to(kind) for each in found])


def _detached(value: Any) -> Any:
    value = plain(value)
    if isinstance(value, list):
        value = _stacked([_detached(each) for each in value])
    return value.detach().cpu() if isinstance(value, Tensor) else value


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
    got: Any,
    truth: Any,
    mistakes: Mapping[str, Any] | None = None,
    tolerance: float = SINGLE,
) -> None:
    """Return if ``got`` is the truth; otherwise name the mistake that gives the same.

    Numbers may be off by ``tolerance``, relative to the largest of the truth and to 1.
    """
    got, tolerance = _detached(got), max(tolerance, SINGLE)
    fault = _fault(got, truth, tolerance)
    if not fault:
        return
    for message, value in (mistakes or {}).items():
        if _fault(value, truth, tolerance) and not _fault(got, value, tolerance):
            raise Mistake(message)
    raise Mistake(fault)


def _fault(got: Any, truth: Any, tolerance: float) -> str:
    """What is wrong, or nothing."""
    if isinstance(truth, Tensor):
        return _tensor_fault(got, truth, tolerance)
    got = got.item() if isinstance(got, Tensor) and got.numel() == 1 else got
    if isinstance(truth, str):
        return "" if got == truth else f"{got!r} is not the right answer."
    if not isinstance(got, int | float):
        return f"Expected a number; got {_a(type(got).__name__)}."
    close = abs(got - truth) <= tolerance * max(1.0, abs(truth))
    return "" if close else f"The value {got:.6g} is off. Check it by hand on a small case."


def _a(kind: str) -> str:
    """The kind with its article."""
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def _tensor_fault(got: Any, truth: Tensor, tolerance: float) -> str:
    if isinstance(got, int | float) and truth.numel() == 1:
        got = torch.full_like(truth, got, dtype=torch.float64)
    if not isinstance(got, Tensor) or got.is_complex():
        kind = "complex tensor" if isinstance(got, Tensor) else type(got).__name__
        return f"Expected a tensor; got {_a(kind)}."
    if got.shape != truth.shape and got.squeeze().shape == truth.squeeze().shape:
        got = got.reshape(truth.shape)
    if got.shape != truth.shape:
        return f"Expected the shape {tuple(truth.shape)}; got {tuple(got.shape)}."
    dtype = got.dtype
    got, truth, real = got.double(), truth.double(), truth.is_floating_point()
    if got.isnan().any():
        return "The result has NaN in it: is there a division by zero, or a log of zero?"
    off = (got - truth).abs().max().item() if truth.numel() else 0.0
    if off <= tolerance * max(1.0, truth.abs().max().item() if truth.numel() else 0.0):
        return ""
    if dtype.is_floating_point != real:
        wanted = "real numbers" if real else "whole numbers"
        return f"Expected a tensor of {wanted}; its dtype is {dtype}."
    return f"The shape is right, the values are not: they are off by up to {off:.3g}."


# A homework

Question = tuple[Function | Value, ...]
Parts = dict[str, list[tuple[Part, Expected | None]]]
_students: dict[str, Parts] = {}  # what ``public`` has read


def folder() -> Path:
    """Where the masters are: ``$ICLUTILS_HOMEWORK``, or the book's own in the checkout."""
    given = os.environ.get("ICLUTILS_HOMEWORK")
    return Path(given) if given else CHECKOUT / "notebooks" / "assignments"


def homeworks() -> list[str]:
    """``hw01``, ``hw02``, ..."""
    return sorted(path.stem for path in (folder() / TABLES).glob("hw[0-9][0-9].py"))


def table(homework: str) -> Path:
    """The file with the solutions and mistakes of a homework."""
    places = (folder() / TABLES / f"{homework}.py", Path.cwd() / f"{homework}.py")  # or otter's
    found = next((path for path in places if path.is_file()), None)
    if found is None and not homeworks():
        raise IclError(
            f"The checks of {homework} are not here: run the first cells of the homework."
        )
    if found is None:
        raise unknown("homework", homework, homeworks())
    return found


def questions(homework: str) -> dict[str, Question]:
    """The questions of one homework by name, ``q1`` first; each has one part for each answer."""
    return _questions(table(homework).resolve())


@functools.cache
def _questions(path: Path) -> dict[str, Question]:
    name = f"iclutils_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = {name: each for name, each in vars(module).items() if re.fullmatch(r"q\d+", name)}
    return dict(sorted(found.items()))


def names(question: Question) -> list[str]:
    """What the answers to a question are called in the student's notebook."""
    return [part.name for part in question]


def public(text: str) -> None:
    """Read the public checks that a student's notebook carries."""
    name, parts = unpacked(text)
    _students[name] = parts


def grade(question: str, *answers: Any, hidden: bool = False) -> None:
    """Judge the answers to one question (``"hw01.q1"``); return only if they are right.

    ``hidden`` takes the inputs of the hidden checks instead of the public ones.
    """
    parts = _known(questions(question.partition(".")[0]), question, answers)
    for seed in HIDDEN if hidden else PUBLIC:
        for entry, answer in zip(parts, answers, strict=True):
            entry.part.judge(entry.part.given(answer, seed), entry.expected(seed))


def check(question: str, *answers: Any) -> None:
    """The public checks of one question: print whether they pass, or the likely mistake."""
    homework = question.partition(".")[0]
    try:
        if homework in _students:
            parts = _known(_students[homework], question, answers)
            for (part, expected), answer in zip(parts, answers, strict=True):
                part.judge(part.given(answer, 0), expected)
        else:
            grade(question, *answers)
    except Mistake as mistake:
        print(f"{question}: not yet. {mistake}")
    else:
        print(f"{question}: the public checks pass.")


def _known(found: dict[str, Any], question: str, answers: tuple[Any, ...]) -> Any:
    homework, _, name = question.partition(".")
    if name not in found:
        raise unknown("question", question, [f"{homework}.{each}" for each in found])
    asked = [getattr(each, "name", None) or each[0].name for each in found[name]]
    if len(answers) != len(asked):
        raise IclError(f"{question} asks for {', '.join(asked)}; got {len(answers)} answers.")
    return found[name]


def unpacked(text: str) -> tuple[str, Parts]:
    """The name of a homework and its questions."""
    kept = thawed(zlib.decompress(base64.b85decode("".join(text.split()))))
    names: dict[str, Any] = {"__name__": f"the public checks of {kept['name']}"}
    exec(kept["source"], names)
    return kept["name"], {
        question: [
            (part, each and tuple(each))
            for part, each in zip(names[question], expected, strict=True)
        ]
        for question, expected in kept["expected"].items()
    }


def frozen(value: Any) -> bytes:
    """Dicts and lists of texts, numbers and tensors as bytes, which hold no code."""
    tensors: dict[str, torch.Tensor] = {}

    def plain(each: Any) -> Any:
        if isinstance(each, torch.Tensor):
            tensors[str(len(tensors))] = each.contiguous().clone()
            return {"tensor": str(len(tensors) - 1)}
        if isinstance(each, Mapping):
            return {"map": {str(key): plain(one) for key, one in each.items()}}
        return [plain(one) for one in each] if isinstance(each, list | tuple) else each

    text = json.dumps(plain(value)).encode()
    return save(tensors | {"json": torch.frombuffer(bytearray(text), dtype=torch.uint8)})


def thawed(data: bytes) -> Any:
    """What was ``frozen``; keys are texts."""
    tensors = load(data)

    def whole(each: Any) -> Any:
        if isinstance(each, list):
            return [whole(one) for one in each]
        if isinstance(each, dict) and "map" in each:
            return {key: whole(one) for key, one in each["map"].items()}
        return tensors[each["tensor"]] if isinstance(each, dict) else each

    return whole(json.loads(bytes(tensors["json"].tolist())))

"""One answer: is it there, is it the student's own, is it right, and if not, what went wrong."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

# What an answer may not be made of.
MEASURES = (
    *(f"iclutils.interp.{name}" for name in ("head_scores", "readout", "statistics", "weights")),
    *("iclutils.chapters", "iclutils.bookkit.coursework"),
)


class Mistake(Exception):
    """A wrong answer; the message names the likely mistake."""


@dataclass(frozen=True)
class Function:
    """A function to be written: on random inputs it must give what the solution gives.

    ``inputs(seed)`` are its arguments, None where a seed has none. ``mistakes`` has, for each
    message, a function that makes the mistake, or options with which the solution does. What is
    compared is ``outcome(function, *inputs)``.
    """

    solution: Callable[..., Any]
    inputs: Callable[[int], tuple[Any, ...] | None]
    mistakes: Mapping[str, Any]
    tolerance: float = 1e-5
    outcome: Callable[..., Any] = lambda function, *inputs: function(*inputs)

    @property
    def name(self) -> str:
        """What the function is called."""
        return self.solution.__name__

    def wrong(self) -> dict[str, Callable[..., Any]]:
        """For each message a function that makes the mistake."""
        return {
            text: functools.partial(self.solution, **each) if isinstance(each, dict) else each
            for text, each in self.mistakes.items()
        }

    def judge(self, answer: Any, seed: int) -> None:
        """Return if the answer is right."""
        inputs = self.inputs(seed)
        if inputs is None:
            return
        gives = functools.partial(functools.partial, self.outcome)
        wrong = {text: gives(function, *inputs) for text, function in self.wrong().items()}
        truth = self.outcome(self.solution, *inputs)
        compare(self.outcome(answer, *inputs), truth, wrong, self.tolerance)


@dataclass(frozen=True)
class Value:
    """A number, a tensor or a letter to be found; only the hidden checks tell whether it is right.

    ``mistakes`` has the values that mistakes give, ``reading(value)`` is what is compared.
    """

    name: str
    truth: Any
    mistakes: Mapping[str, Any]
    tolerance: float = 1e-9
    reading: Callable[[Any], Any] = lambda value: value

    def judge(self, answer: Any, seed: int) -> None:
        """Return if the answer has the right form or, hidden, the right value."""
        if isinstance(self.truth, str):
            answer = str(answer).strip().lower()
            if answer not in tuple("abcd"):
                raise Mistake(f"`{self.name}` is one of the letters 'a' to 'd'; got {answer!r}.")
        elif isinstance(self.truth, float) and not isinstance(answer, int | float | Tensor):
            raise Mistake(f"`{self.name}` is a number; got {answer!r}.")
        answer = self.reading(answer)
        if seed:
            wrong = {text: functools.partial(lambda v: v, v) for text, v in self.mistakes.items()}
            compare(answer, self.truth, wrong, self.tolerance)


def generator(seed: int) -> Generator:
    """The source of a question's random inputs."""
    return Generator().manual_seed(1000 + seed)


def normal(draw: Generator, *shape: int) -> Tensor:
    """Normal numbers, in double precision."""
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def prepared(name: str, answer: Any, function: bool) -> Any:
    """The answer, ready to be judged: what a function raises becomes a ``Mistake``."""
    if answer is None or answer is ...:
        raise Mistake(f"`{name}` is missing or still `...`: nothing is written yet.")
    if not function:
        return answer
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
        return given

    return guarded


def _mentioned(answer: Callable[..., Any]) -> Iterator[str]:
    """Modules that a function's code refers to, one level deep."""
    code = getattr(answer, "__code__", None)
    codes = [code] if code else []
    while codes:
        code = codes.pop()
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        for name in code.co_names:
            value = getattr(answer, "__globals__", {}).get(name)
            module = value if isinstance(value, types.ModuleType) else None
            yield module.__name__ if module else str(getattr(value, "__module__", ""))
            yield name  # an import inside the function


def compare(
    got: Any,
    truth: Any,
    mistakes: Mapping[str, Callable[[], Any]] | None = None,
    tolerance: float = 1e-5,
) -> None:
    """Return if ``got`` is the truth; otherwise name the mistake that gives the same.

    Numbers may be off by ``tolerance``, relative to the largest of the truth and to 1.
    """
    fault = _fault(got, truth, tolerance)
    if not fault:
        return
    for message, wrong in (mistakes or {}).items():
        try:
            value = wrong()
        except Exception:  # it cannot be made on these inputs
            continue
        if _fault(value, truth, tolerance) and not _fault(got, value, tolerance):
            raise Mistake(message)
    raise Mistake(fault)


def _fault(got: Any, truth: Any, tolerance: float) -> str:
    """What is wrong, or nothing."""
    if isinstance(truth, Tensor):
        return _tensor_fault(got, truth, tolerance)
    got = got.item() if isinstance(got, Tensor) and got.ndim == 0 else got
    if isinstance(truth, str):
        return "" if got == truth else f"{got!r} is not the right answer."
    if not isinstance(got, int | float):
        return f"Expected a number; got a {type(got).__name__}."
    close = abs(got - truth) <= tolerance * max(1.0, abs(truth))
    return "" if close else f"The value {got:.6g} is off. Check it by hand on a small case."


def _tensor_fault(got: Any, truth: Tensor, tolerance: float) -> str:
    if not isinstance(got, Tensor):
        return f"Expected a tensor; got a {type(got).__name__}."
    if got.shape != truth.shape:
        return f"Expected the shape {tuple(truth.shape)}; got {tuple(got.shape)}."
    if got.is_floating_point() != truth.is_floating_point():
        kind = "real numbers" if truth.is_floating_point() else "whole numbers"
        return f"Expected a tensor of {kind}; its dtype is {got.dtype}."
    got, truth = got.detach().double(), truth.detach().double()
    if got.isnan().any():
        return "The result has NaN in it: is there a division by zero, or a log of zero?"
    off = (got - truth).abs().max().item()
    close = off <= tolerance * max(1.0, truth.abs().max().item())
    return (
        "" if close else f"The shape is right, the values are not: they are off by up to {off:.3g}."
    )
